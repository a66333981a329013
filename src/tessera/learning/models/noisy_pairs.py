"""Pairs under noise per user: what follows what, from one sum with noise on every cell.

A client's part is one vector of length 1 at most, whatever data it has. Of its latest items:

    pairs       .6 of its square: a cell (a, b) has exp(-(k - 1) / 3) for b k places after a, k <= 4
    attributes  .2: transitions between public attributes of items (a year, a genre, a category),
                counted as pairs are; of each attribute the same share
    popularity  .2: its items, each alike

each scaled to its share, so that Gaussian noise of one deviation on every word spends the budget
(mu^2) by these shares. Every cell of the m x m table has noise, also those that nobody holds: which
cells were written says which pairs exist. All that comes after is computed from noisy sums: cells
below so many deviations of their noise are not merged (`threshold` in [server]), and the rest score

    sum over the last items a of w_a cell(a, b), normalised
    + popularity(b)^.7 first lift(b) (other lifts)(b)^1.5, normalised

where the lift of an attribute is how much more often it follows that of the last items than it
occurs. Without times a pair is any two of a user's items, and all of them are asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tessera.data.examples import NONE, Examples
from tessera.data.sequences import SEEN, Sequences
from tessera.errors import ConfigError
from tessera.learning.models.pairs import CELL, TABLE, WEIGHT
from tessera.learning.scores import ItemScores, SummedModel
from tessera.learning.tables.submodel import ModelUpdate, TableUpdate, places
from tessera.learning.training.jobs import Job, Trained

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PLACE: Final = "place"
"""Of an entry that is no pair its place in the dense part."""
SHARES: Final = (0.6, 0.2, 0.2)
"""Of the square of a client's vector: pairs, attributes, popularity."""
LATEST: Final = 200
WINDOW: Final = 4
DECAY: Final = 3.0
TOGETHER: Final = 50
"""Items of a user that are paired where there are no times."""
ASKED: Final = (WINDOW, DECAY)
"""Latest items whose successors are scored, and their decay: as pairs are counted."""
RECENT: Final = (6, 1.5)
"""Latest items whose attributes are, and their decay."""
POWERS: Final = (1.0, 1.5)
"""Of the first attribute's lift, and of the others'."""
POPULAR: Final = 0.7
"""Power of popularity."""
MOST_PAIRED: Final = 10_000
"""Items up to which all pairs have a cell: 10^8 cells."""
THRESHOLDS: Final = ((6.0, 4.2), (2.0, 5.0), (0.0, 6.0))
"""(epsilon from which on, deviations): fixed beforehand, whatever the sums are."""


def threshold_for(epsilon: float) -> float:
    """Deviations of its noise that a pair must be above, by the budget.

    At 4.2 about 200 of 15 million cells pass by chance, at 5 about 4; at 6 none, and hardly any
    pair at a budget below 2.
    """
    return next(above for least, above in THRESHOLDS if epsilon >= least or not least)


@dataclass(frozen=True, slots=True)
class NoisyPairs:
    """What clients add and what is made of the sums. `attributes` are public: of each (m, classes),
    rows of which add up to 1 at most."""

    items: int
    attributes: Mapping[str, Doubles] = field(default_factory=dict, repr=False)
    ordered: bool = True

    def __post_init__(self) -> None:
        for name, classes in self.attributes.items():
            if classes.ndim != 2 or len(classes) != self.items:
                raise ConfigError(
                    f"pairs: attribute {name!r} of {len(classes)} items, where there are "
                    f"{self.items}",
                    hint="one line of attributes for each item",
                )
        if self.items > MOST_PAIRED:
            raise ConfigError(
                f"pairs with noise: {self.items:,} items are {self.items**2:,} cells, each of "
                f"which has noise and is processed for every client; {MOST_PAIRED:,} are the most",
                hint="[task] dictionary = FILE with a public list of fewer items, unknown = "
                '"drop"; or model = "next"',
            )

    @property
    def cells(self) -> int:
        return self.items**2

    @property
    def most_pairs(self) -> int:
        """Of one client: it follows from no data."""
        return LATEST * WINDOW if self.ordered else TOGETHER * (TOGETHER - 1) // 2

    @property
    def squares(self) -> list[int]:
        """Classes of each attribute."""
        return [classes.shape[1] for classes in self.attributes.values()]

    @property
    def dense(self) -> int:
        """Words of transitions, then one for each item."""
        return sum(k * k for k in self.squares) + self.items

    @property
    def shares(self) -> tuple[float, float, float]:
        """Without attributes their share is the others'."""
        pairs, attributes, popular = SHARES
        if self.attributes:
            return SHARES
        return pairs / (1.0 - attributes), 0.0, popular / (1.0 - attributes)

    # --- what a client adds -----------------------------------------------------------------------

    def entries(self, events: Sequences) -> tuple[Ints, Examples]:
        """How many entries each client has, and they: cell or place, and its weight."""
        counts, cells, where, weights = [], [], [], []
        for user in range(events.users):
            cell, pair, dense = self.part(events.of(user))
            place = np.flatnonzero(dense)
            counts.append(len(cell) + len(place))
            cells += [cell, np.full(len(place), NONE, np.int64)]
            where += [np.full(len(cell), NONE, np.int64), place]
            weights += [pair, dense[place]]
        return np.array(counts, np.int64), Examples(
            {
                CELL: np.concatenate(cells),
                PLACE: np.concatenate(where),
                WEIGHT: np.concatenate(weights).astype(np.float32),
            }
        )

    def part(self, own: Ints) -> tuple[Ints, Doubles, Doubles]:
        """One client's vector, of its items, the oldest first: cells, their weights, dense part."""
        own = own[-LATEST:] if self.ordered else own[-TOGETHER:]
        first, second, weight = self._followed(own)
        of_pairs, of_attributes, popular = self.shares
        cell, at = np.unique(first * self.items + second, return_inverse=True)
        added = np.bincount(at.reshape(-1), weights=weight, minlength=len(cell))
        pair = _scaled(added.astype(np.float64), of_pairs)
        parts = [
            _scaled(
                ((classes[first] * weight[:, None]).T @ classes[second]).reshape(-1),
                of_attributes / len(self.attributes),
            )
            for classes in self.attributes.values()
        ]
        held = np.bincount(own, minlength=self.items).astype(np.float64)
        return cell, pair, np.concatenate([*parts, _scaled(held, popular)])

    def _followed(self, own: Ints) -> tuple[Ints, Ints, Doubles]:
        """(item, later item, weight) of every pair; without order the smaller id first."""
        if not self.ordered:
            low, high = np.triu_indices(len(own), 1)
            own = np.sort(own)
            return own[low], own[high], np.ones(len(low))
        far = range(1, min(WINDOW + 1, max(2, len(own))))
        weight = [np.full(max(0, len(own) - k), np.exp(-(k - 1) / DECAY)) for k in far]
        return (
            np.concatenate([own[:-k] for k in far]),
            np.concatenate([own[k:] for k in far]),
            np.concatenate(weight),
        )

    # --- what is made of the sums -----------------------------------------------------------------

    def solved(self, summed: SummedModel) -> ItemScores:
        """Scores from noisy sums alone; `summed.deviation` is that of their noise."""
        table, m = summed.tables[TABLE], self.items
        ids = table.touched_ids
        cell, value = ids.astype(np.int64), table.values(ids)[:, 0].astype(np.float64)
        follows = np.zeros((m, m), np.float32)
        follows[cell // m, cell % m] = np.maximum(value, 0.0)
        if not self.ordered:
            follows = follows + follows.T
        *lifts, popular = self._read(summed)
        attributes = tuple(self.attributes.values())
        base = POPULAR * np.log(popular)

        def scores(some: Examples) -> Doubles:
            asked = some["history"] if self.ordered else some[SEEN]
            pairs = _history(asked, m, ASKED if self.ordered else None) @ follows
            recent = _history(asked, m, RECENT if self.ordered else None)
            total = np.broadcast_to(base, pairs.shape).copy()
            for at, (classes, lift) in enumerate(zip(attributes, lifts, strict=True)):
                of_class = (recent @ classes @ lift) @ classes.T
                total += POWERS[min(at, 1)] * np.log(np.maximum(of_class, 1e-9))
            prior = np.exp(total - total.max(axis=1, keepdims=True))
            return _whole(pairs) + _whole(prior)

        return scores

    def _read(self, summed: SummedModel) -> Iterator[Doubles]:
        """Lifts of each attribute, then popularity; nothing is below a deviation of its noise."""
        dense, least = summed.dense.astype(np.float64), max(summed.deviation, 1e-6)
        start = 0
        for k in self.squares:
            moves = np.maximum(dense[start : start + k * k], least).reshape(k, k)
            start += k * k
            yield moves * moves.sum() / np.outer(moves.sum(axis=1), moves.sum(axis=0))
        yield np.maximum(dense[start:], least)


def _scaled(values: Doubles, square: float) -> Doubles:
    """With this square of its length; zeros stay."""
    length = float(np.sqrt(np.square(values).sum()))
    return values * (np.sqrt(square) / length) if length else values


def _whole(values: npt.NDArray[Any]) -> Doubles:
    """Rows that add up to 1, or are zeros."""
    total = values.sum(axis=1, keepdims=True)
    return np.asarray(values / np.where(total > 0.0, total, 1.0), np.float64)


def _history(
    latest_first: npt.NDArray[Any], items: int, latest: tuple[int, float] | None
) -> npt.NDArray[np.float32]:
    """(N, m) weights of histories: of so many items, decaying so; without, all alike. Rows add up
    to 1."""
    steps, decay = latest or (latest_first.shape[1], np.inf)
    found = np.zeros((len(latest_first), items))
    row, back = np.nonzero(latest_first[:, :steps] >= 0)
    found[row, latest_first[row, back]] = np.exp(-back / decay)
    return _whole(found).astype(np.float32)


# --- in a federation ------------------------------------------------------------------------------


class NoisyPairTable(nn.Module):
    """Cells of one column, and the dense part: zeros before the sum."""

    def __init__(self, dense: int) -> None:
        super().__init__()
        self.pairs = nn.Embedding(1, 1)
        self.sums = nn.Parameter(torch.zeros(dense))


class VectorCounter:
    """A client's vector, as its entries have it; nothing is trained."""

    name = "pair counts of length 1"

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        return [self._counted(job) for job in jobs]

    def _counted(self, job: Job) -> Trained:
        trained, own = job.submodel.trained[TABLE], job.examples
        values = np.zeros((len(trained), 1), np.float32)
        pair = own[CELL] >= 0
        at, there = places(trained, own[CELL][pair])
        values[at[there], 0] = own[WEIGHT][pair][there]
        dense = np.zeros_like(job.submodel.dense)
        dense[own[PLACE][~pair]] = own[WEIGHT][~pair]
        counts = (values[:, 0] > 0.0).astype(np.int64)
        update = ModelUpdate(dense, len(own), {TABLE: TableUpdate(values, counts)})
        return Trained(update, job.local, 0.0, len(own))
