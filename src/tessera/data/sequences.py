"""What every user did, in order, as examples of what came next: the last item is held out.

An example is an item with what its user had before it: `item` (N,) is what came, `history` (N, T)
the T items before it, the latest first and -1 where there are none. Every interaction counts, no
ratings and no labels; of an item that a user met several times the first time counts, as a
recommendation is of something new.

The test part is every user's last item (leave-one-out by time); with `part` "validation" it is the
one before, and the last is kept aside (`final`) for a test once. Whoever has a single item trains
and is not tested. A test example has all that its user had before as `seen`: these are no
candidates when it is ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data.clicks import MOST_HISTORY, offsets
from tessera.data.examples import NONE, ClientData, Examples
from tessera.data.row_names import RowNames
from tessera.data.split import TEST, VALIDATION
from tessera.errors import ConfigError

Ints = npt.NDArray[np.int64]

SEEN: Final = "seen"
"""Of a test example the items that are not ranked beside its own, -1 where there are no more."""
LENGTH: Final = 50
TIES: Final = "lines at the time of the one before"
"""Among facts: how many there are. They keep the order of the file."""
_AT_ONCE: Final = 1 << 18  # histories are gathered in pieces, so their indices stay small


@dataclass(frozen=True, slots=True)
class Sequences:
    """Everybody's items, each user's oldest first: those of user u are
    `item[begins[u] : begins[u + 1]]`."""

    item: Ints = field(repr=False)
    begins: Ints = field(repr=False)

    @classmethod
    def sorted(
        cls, user: Ints, item: Ints, time: npt.NDArray[Any] | None, *, users: int, items: int
    ) -> Sequences:
        """Of interactions in any order. Equal times stay in the order given; the first of a user
        with an item counts."""
        order = np.argsort(user, kind="stable") if time is None else np.lexsort((time, user))
        user, item = user[order], item[order]
        _, first = np.unique(user * items + item, return_index=True)
        first.sort()
        counts = np.bincount(user[first], minlength=users).astype(np.int64)
        return cls(item[first], offsets(counts))

    def of(self, user: int) -> Ints:
        """One user's items."""
        return self.item[self.begins[user] : self.begins[user + 1]]

    def first(self, kept: Ints) -> Sequences:
        """So many of each user's events, the oldest."""
        return Sequences(self.item[self.place < np.repeat(kept, self.counts)], offsets(kept))

    @property
    def users(self) -> int:
        return len(self.begins) - 1

    @property
    def counts(self) -> Ints:
        return np.diff(self.begins)

    @property
    def place(self) -> Ints:
        """Of each event: 0 for its user's first, 1 for the next."""
        return np.arange(len(self.item)) - np.repeat(self.begins[:-1], self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceData(ClientData):
    """Examples of what came next; `events` are the items of the training part.

    Where there are no times they are not `ordered`, and "next" means "as well". `attributes` are
    public ones of items: of each (items, classes), a row of which adds up to 1, or is zeros.
    `final` is the test part of data that is tested on its validation part: to be looked at once.
    """

    events: Sequences = field(repr=False)
    ordered: bool = True
    attributes: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict, repr=False)
    popularity: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    """Of each item, where a public list says so; else it is what the data have."""
    waiting: int = 0
    """Of the items the last ones, which a growing catalogue has not named yet."""
    final: Examples | None = field(default=None, repr=False)


def one_of(classes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """An attribute of which every item has one class, numbered from 0; -1: none."""
    found = np.zeros((len(classes), int(classes.max(initial=-1)) + 1))
    there = np.flatnonzero(classes >= 0)
    found[there, classes[there]] = 1.0
    return found


def sequence_data(
    name: str,
    events: Sequences,
    *,
    items: int,
    length: int = LENGTH,
    part: str = TEST,
    ordered: bool = True,
    alone: bool = False,
    popularity: npt.NDArray[np.float64] | None = None,
    waiting: int = 0,
    ids: Mapping[str, RowNames] | None = None,
    titles: Sequence[str] = (),
    attributes: Mapping[str, npt.NDArray[np.float64]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> SequenceData:
    """The examples of everybody's items; a history has the latest `length`.

    `alone`: they are one client's own, of whom nothing need be tested.
    """
    if part not in (TEST, VALIDATION):
        raise ConfigError(f"{name}: part = {part!r}", hint=f"{TEST} or {VALIDATION}")
    if not 1 <= length <= MOST_HISTORY:
        raise ConfigError(f"{name}: a history of {length} items", hint=f"1 to {MOST_HISTORY:,}")
    # Of two or more the last is the test item, of three or more the one before for validation.
    last = (events.counts >= 2).astype(np.int64)
    before = (events.counts >= 3).astype(np.int64) if part == VALIDATION else np.zeros_like(last)
    kept = events.counts - last - before
    tested = before if part == VALIDATION else last
    if not tested.any() and not alone:
        raise ConfigError(
            f"{name}: no user has {3 if part == VALIDATION else 2} items, of which one is held out",
            hint="what comes next is learnt from users with several items",
        )
    place, had = events.place, np.repeat(kept, events.counts)
    trains = np.flatnonzero(place < had)
    tests = np.flatnonzero((place == had) & (np.repeat(tested, events.counts) > 0))
    final = None
    if part == VALIDATION:
        lasts = events.begins[1:][last > 0] - 1
        final = _held_out(events, lasts, place, length)
    return SequenceData(
        name=name,
        events=events.first(kept),
        ordered=ordered,
        popularity=popularity,
        waiting=waiting,
        train=_examples(events, trains, place, length),
        offsets=offsets(kept),
        test=_held_out(events, tests, place, length),
        final=final,
        test_offsets=offsets(tested),
        sizes={"user": events.users, "item": items},
        ids=ids or {},
        titles=titles,
        attributes=attributes or {},
        facts={
            **(facts or {}),
            "users": events.users,
            "items": items,
            "events": len(events.item),
            "training examples": len(trains),
            "test examples": len(tests),
            "split": "each user's last item is the test part"
            if part == TEST
            else "each user's last item is kept for a test once, the one before is tested",
            "history": f"the last {length} items before",
        },
    )


def with_held(data: SequenceData, most: int) -> tuple[SequenceData, Examples]:
    """Without the last training item of some users, and these items as examples that are ranked.

    For what is chosen after training: neither trained on nor of the test part. At most so many
    users and at most half of them, spread evenly over those who keep two items; whoever has a
    single one trains no more.
    """
    events = data.events
    able = np.flatnonzero(events.counts >= 3)
    if not len(able):
        raise ConfigError(
            f"{data.name}: no user has three items to train on, of which one is held out",
            hint='model = "next" or "pairs" alone holds none out',
        )
    users = able[:: max(2, -(-len(able) // most))]
    kept = np.where(events.counts >= 2, events.counts, 0)
    kept[users] -= 1
    rows = events.begins[users + 1] - 1
    length = data.test["history"].shape[1]
    held = _examples(events, rows, events.place, length)
    rest = np.flatnonzero(events.place < np.repeat(kept, events.counts))
    return replace(
        data,
        events=events.first(kept),
        train=data.train.take(rest),
        offsets=offsets(kept),
        facts={**data.facts, "held out to mix models": f"an item of each of {len(users):,} users"},
    ), held.with_field(SEEN, _seen(events, rows, events.place))


def _examples(events: Sequences, rows: Ints, place: Ints, length: int) -> Examples:
    history = np.full((len(rows), length), NONE, np.int32)
    back = np.arange(1, length + 1)
    for low in range(0, len(rows), _AT_ONCE):
        some = rows[low : low + _AT_ONCE]
        there = place[some][:, None] >= back
        history[low : low + _AT_ONCE][there] = events.item[(some[:, None] - back)[there]]
    user = np.repeat(np.arange(events.users), events.counts)[rows]
    return Examples({"user": user, "item": events.item[rows], "history": history})


def _held_out(events: Sequences, rows: Ints, place: Ints, length: int) -> Examples:
    return _examples(events, rows, place, length).with_field(SEEN, _seen(events, rows, place))


def _seen(events: Sequences, rows: Ints, place: Ints) -> npt.NDArray[np.int32]:
    """For each of these events all that its user had before."""
    longest = int(place[rows].max(initial=0))
    found = np.full((len(rows), longest), NONE, np.int32)
    for at, row in enumerate(rows.tolist()):
        found[at, : place[row]] = events.item[row - place[row] : row]
    return found
