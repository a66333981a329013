"""RowCut: a client's examples of a round, cut so that one row taken out of its data changes few.

Two worlds: the examples as they are, and with row r taken out of every one of them: those aimed at
r (a field with one id) are gone, and its entries in sequences are "none". Under the same coins the
two cuts may differ in `per_row` examples at most: that is what noise per index is for.

Leaving out whole examples would not do: where r stands in a hundred histories and ten examples
stay, all the others come back once r is gone. So a row that has had its share is taken *out of* the
further examples, which makes them what they are in the other world. In this order:

1. of the examples aimed at a row, `targets` are drawn by chance, and the others are left out;
2. of an example's places in sequences, `places` are drawn by chance, empty or not, and the others
   become "none": another entry does not move up;
3. of the examples that still have a row in a sequence and are not aimed at it, `histories` are
   drawn by chance, and in the others it becomes "none".

What differs, for any r and any data, if every example has the coins in both worlds that are its
own: (a) examples aimed at r, of which 1 leaves `targets`; (b) examples with r in a sequence, of
which 3 leaves `histories`, and all the others are the same in both worlds; (c) in 3 the examples of
(a) had at most `places` rows each, and each of these rows now has a place for one other example.
Whom 1 draws of other rows does not depend on r, nor does 2. So with

    targets + histories + targets * places <= per_row

no more than `per_row` examples change, come or go. Each moves a sum of clipped gradients by two
clips at most. `tests/learning/test_row_cut.py` compares both worlds of many data sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.data.examples import NONE, Examples
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel

Ints = npt.NDArray[np.int64]
Uniform = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCut:
    """How often a row may be aimed at, and stand in sequences, of how many places."""

    targets: int
    histories: int
    places: int

    @property
    def changed(self) -> int:
        """Examples that change, come or go with one row, at most."""
        return self.targets + self.histories + self.targets * self.places

    @classmethod
    def of(cls, per_row: int, places: int) -> Self:
        """The cut for examples with `places` places in sequences: at most `per_row` change.

        An example aimed at a row costs one for itself and one for each of its places. As many
        places are kept as leave one example in whose history a row may stand; of what is then left
        about half goes to more examples aimed at one row. With less than 3 there are no histories.
        """
        if per_row < 1:
            raise ConfigError(f"per_row = {per_row} examples", hint="use 1 or more")
        if not places or per_row < 3:
            return cls(targets=per_row, histories=0, places=0)
        kept = min(places, per_row - 2)
        targets = max(1, per_row // (2 * (1 + kept)))
        return cls(targets=targets, histories=per_row - targets * (1 + kept), places=kept)

    def apply(self, bound: BoundModel, examples: Examples, secret: Secret) -> Examples:
        """The examples of one round; what is drawn follows from the client's secret alone."""
        coins, count = CoinStream(Stream.of(secret, Label.ROW_CUT)), len(examples)
        columns = bound.fetched_fields(examples)
        table, aimed = aimed_at(columns, count)
        slots = places_in(columns)
        drawn, places = coins.uniform(count), coins.uniform(count * slots)
        keep = first_of(aimed, drawn, self.targets) | (aimed < 0)
        chosen = self._places(places.reshape(count, slots))
        fields: dict[str, Ints] = {}
        start = 0
        for name, own in columns.items():
            sequences = {field: column for field, column in own.items() if column.ndim == 2}
            if not sequences:
                continue
            together = np.concatenate(list(sequences.values()), axis=1)
            stop = start + together.shape[1]
            together = np.where(chosen[:, start:stop], together, NONE)[keep]
            start = stop
            target = aimed[keep] if name == table else np.full(len(together), NONE, np.int64)
            together = self._thinned(together, target, drawn[keep])
            for field, column in sequences.items():
                width = column.shape[1]
                fields[field], together = together[:, :width], together[:, width:]
        return Examples({**examples.take(keep).fields, **fields})

    def _places(self, order: Uniform) -> Mask:
        """Of each example's places those with the lowest numbers."""
        if order.shape[1] <= self.places:
            return np.ones(order.shape, np.bool_)
        return np.asarray(np.argsort(np.argsort(order, axis=1), axis=1) < self.places)

    def _thinned(self, ids: Ints, target: Ints, drawn: Uniform) -> Ints:
        """Without rows that stand in more than `histories` of the examples not aimed at them."""
        example, place = np.nonzero((ids >= 0) & (ids != target[:, None]))
        _, row = np.unique(ids[example, place], return_inverse=True)
        # A row that stands twice in a sequence is in one example.
        pairs, pair = np.unique(row * len(ids) + example, return_inverse=True)
        stays = first_of(pairs // len(ids), drawn[pairs % len(ids)], self.histories)
        out = ~stays[pair]
        ids[example[out], place[out]] = NONE
        return ids


def aimed_at(columns: Mapping[str, Mapping[str, Ints]], count: int) -> tuple[str, Ints]:
    """The table and the ids that examples are aimed at; "none" where no field has a single id."""
    single = [
        (name, field, column)
        for name, own in columns.items()
        for field, column in own.items()
        if column.ndim == 1
    ]
    if len(single) > 1:
        raise ConfigError(
            f'[dp] unit = "index" with examples that are aimed at {len(single)} rows each, by '
            f"fields {', '.join(repr(field) for _, field, _ in single)}: where one is gone, "
            "examples that were left out for the other come in, and noise does not cover those",
            hint="one field with a single id; a user's own row is kept local, or left out",
        )
    if not single:
        return "", np.full(count, NONE, np.int64)
    ((name, _, column),) = single
    return name, column


def places_in(columns: Mapping[str, Mapping[str, Ints]]) -> int:
    """Places of an example in its sequences."""
    return sum(c.shape[1] for own in columns.values() for c in own.values() if c.ndim == 2)


def first_of(groups: Ints, drawn: Uniform, most: int) -> Mask:
    """Which have one of the `most` lowest random numbers of their group."""
    order = np.lexsort((drawn, groups))
    ordered = groups[order]
    begins = np.searchsorted(ordered, ordered, side="left")
    found = np.zeros(len(groups), np.bool_)
    found[order] = np.arange(len(groups)) - begins < most
    return found
