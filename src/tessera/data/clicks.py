"""From interactions in the order of time to click examples: split, histories, click rates.

Every reader ends here, so that all sets follow the same rules:

- a user's last 20 % of rows are its test part, rounded down, and every user keeps training rows;
- the history of an example holds the last T items that its user liked *before* it, oldest first,
  padded with -1 on the right. A test example's history may hold earlier test items: the device
  that is asked for a prediction knows what was clicked on it an hour ago;
- `rate` is the user's smoothed share of clicks among its own earlier training rows,
  (clicks + 2.5) / (rows + 5); in the test part it stands still at the end of the training part.

No example sees its own label or anything later. Users with few rows are kept: who may take part in
a round is the engine's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data.examples import LABEL, NONE, ClientData, Examples, Pools
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError, MisuseError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

TEST_SHARE: Final = 0.2
MOST_HISTORY: Final = 100_000
MOST_NEGATIVES: Final = 10_000
MOST_EXAMPLES: Final = 2**31
PRIOR_RATE: Final = 0.5
PRIOR_ROWS: Final = 5

_ROWS_AT_ONCE: Final = 1 << 18  # histories are gathered in pieces, so their indices stay small


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Interactions in columns; ids are rows 0 .. n - 1. Sorted by user, then by time."""

    user: Ints = field(repr=False)
    item: Ints = field(repr=False)
    clicked: Mask = field(repr=False)
    line: Ints | None = field(default=None, repr=False)  # where each was read, if that is needed

    @classmethod
    def sorted(
        cls,
        user: Ints,
        item: Ints,
        clicked: Mask,
        time: npt.NDArray[Any] | None = None,
        line: Ints | None = None,
    ) -> Log:
        """Interactions in any order. Equal times stay in the order given."""
        order = np.argsort(user, kind="stable") if time is None else np.lexsort((time, user))
        return cls(
            user=user[order],
            item=item[order],
            clicked=clicked[order],
            line=None if line is None else line[order],
        )

    def __post_init__(self) -> None:
        if not len(self.user) == len(self.item) == len(self.clicked):
            raise MisuseError("clicks: columns of different lengths")
        if (self.user[1:] < self.user[:-1]).any():
            raise MisuseError("clicks: the log is not sorted by user")

    def __len__(self) -> int:
        return len(self.user)


def numbered(ids: npt.NDArray[Any]) -> tuple[Ints, npt.NDArray[Any]]:
    """Rows 0 .. m - 1 in the order of the ids, and the ids by row."""
    known, rows = np.unique(ids, return_inverse=True)
    return rows.astype(np.int64).reshape(-1), known


def click_data(
    name: str,
    log: Log,
    *,
    users: int,
    items: int,
    history: int,
    test_share: float = TEST_SHARE,
    held: Ints | None = None,
    pools: Pools | None = None,
    category_of: Ints | None = None,
    categories: int | None = None,
    given: Ints | None = None,
    extra: Mapping[str, npt.NDArray[Any]] | None = None,
    ids: Mapping[str, RowNames] | None = None,
    titles: Sequence[str] = (),
    rate: bool = True,
    facts: Mapping[str, Any] | None = None,
) -> ClientData:
    """The examples of a log.

    `held` says how many rows of each user are its test part, if not the usual share; `pools` what
    negatives without an item are to be drawn from. `categories`
    is how many there are, if not just those of `category_of`. `given` has histories that came with
    the data, one row per interaction, in place of ours; `extra` further fields; `ids` and `titles`
    what users and items are called. Sampled negatives
    stand in a fixed pattern beside the positives, which a running click rate would reveal: such
    logs are made with `rate=False`.
    """
    check(name, history=history, test_share=test_share)
    if not len(log):
        raise ConfigError(f"{name}: no interactions", hint="is the data set empty?")
    counts = np.bincount(log.user, minlength=users).astype(np.int64)
    held = last_part(counts, test_share) if held is None else held
    starts = np.cumsum(counts) - counts
    trains = ~in_last(counts, held)

    def part(rows: Ints) -> Examples:
        columns: dict[str, npt.NDArray[Any]] = {
            "user": log.user[rows],
            "item": log.item[rows],
            "history": liked_before(log, starts, rows, history) if given is None else given[rows],
            LABEL: log.clicked[rows].astype(np.float32),
        }
        if rate:
            columns["rate"] = earlier_rate(log, starts, counts - held, rows)
        columns.update({field: column[rows] for field, column in (extra or {}).items()})
        return Examples(columns)

    sizes = {"user": users, "item": items}
    if category_of is not None:
        sizes["category"] = int(category_of.max()) + 1 if categories is None else categories
    return ClientData(
        name=name,
        train=part(np.flatnonzero(trains)),
        offsets=offsets(counts - held),
        test=part(np.flatnonzero(~trains)),
        test_offsets=offsets(held),
        sizes=sizes,
        category_of=category_of,
        ids=ids or {},
        titles=titles,
        undrawn=pools,
        facts={
            **(facts or {}),
            "users": users,
            "items": items,
            "examples": len(log),
            "clicks": int(log.clicked.sum()),
            "training examples": int(trains.sum()),
            "test examples": int((~trains).sum()),
            "split": f"each user's last {100 * test_share:g} % by time, rounded down, as test",
            "history": f"the last {history} clicked items before the example"
            + (", as published" if given is not None else ""),
        },
    )


def check(name: str, *, history: int, test_share: float = TEST_SHARE) -> None:
    if not 1 <= history <= MOST_HISTORY:
        raise ConfigError(f"{name}: a history of {history} items", hint=f"1 to {MOST_HISTORY:,}")
    if not 0.0 <= test_share < 1.0:
        raise ConfigError(f"{name}: a test share of {test_share} must lie in [0, 1)")


def last_part(counts: Ints, test_share: float) -> Ints:
    """How many of each user's rows are held out: rounded down, so that some are left to train."""
    # 0.29 * 100 is 28.999999999999996 in floating point, and means 29.
    return np.asarray(np.floor(counts * test_share + 1e-9), dtype=np.int64)


def in_last(counts: Ints, held: Ints) -> Mask:
    """Whether each row of a log lies among its user's last ones."""
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(place >= np.repeat(counts - held, counts))


def offsets(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def liked_before(log: Log, starts: Ints, rows: Ints, length: int) -> Ints:
    """For each of these rows the last `length` items its user clicked in earlier rows."""
    liked = log.item[log.clicked]
    before: Ints = np.cumsum(log.clicked, dtype=np.int64) - log.clicked
    first: Ints = before[np.minimum(starts, len(log) - 1)]  # a user without rows is never looked up
    stop = before[rows]
    return windows(liked, stop - np.minimum(stop - first[log.user[rows]], length), stop, length)


def windows(values: Ints, begin: Ints, stop: Ints, length: int) -> Ints:
    """values[begin : stop] for each pair, left-aligned in rows of `length`, padded with NONE."""
    out = np.full((len(begin), length), NONE, dtype=np.int64)
    if not len(values):
        return out
    step = np.arange(length)
    for low in range(0, len(begin), _ROWS_AT_ONCE):
        piece = slice(low, low + _ROWS_AT_ONCE)
        index = begin[piece, None] + step
        inside = index < stop[piece, None]
        out[piece][inside] = values[index[inside]]
    return out


def earlier_rate(log: Log, starts: Ints, trained: Ints, rows: Ints) -> Floats:
    """The smoothed click rate over a user's training rows before each of these rows."""
    total = offsets(log.clicked.astype(np.int64))
    user = log.user[rows]
    begin = starts[user]
    end = np.minimum(rows, begin + trained[user])
    clicks = total[end] - total[begin]
    smoothed = (clicks + PRIOR_RATE * PRIOR_ROWS) / (end - begin + PRIOR_ROWS)
    return np.asarray(smoothed, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A log with places for negatives, how many rows of each user are its test part, and pools."""

    log: Log
    held: Ints
    pools: Pools


def with_negatives(
    log: Log,
    *,
    users: int,
    items: int,
    each: int,
    catalogue: Ints | None = None,
    test_share: float = TEST_SHARE,
) -> Sampled:
    """Beside every interaction, places for `each` items that its user does not have, not clicked.

    The item there is NONE until each client draws its own (`data/examples.py`), evenly from the
    catalogue. Without one, those of the training part are drawn from the items that occur there and
    those of the test part likewise: if all were drawn from both, an item that was clicked once in
    training would come up in the test as a negative only, and a model could learn to tell that.
    They stand just before their positive, so that both see the same history, and have the features
    of its line. Who has touched the whole pool gets none. The interactions given all count as
    clicks.
    """
    if not 1 <= each <= MOST_NEGATIVES or each * len(log) > MOST_EXAMPLES:
        raise ConfigError(
            f"clicks: {each} sampled negatives for each of {len(log):,} clicks",
            hint=f"1 to {MOST_NEGATIVES:,}, and {MOST_EXAMPLES:,} in all",
        )
    counts = np.bincount(log.user, minlength=users).astype(np.int64)
    tested = in_last(counts, last_part(counts, test_share))
    pair = log.user * items + log.item
    pools, beside = [], []
    # What is held out may be a negative of the training part, never one of the test part.
    for part, own in (
        (np.flatnonzero(~tested), np.unique(pair[~tested])),
        (np.flatnonzero(tested), np.unique(pair)),
    ):
        pool = np.unique(log.item[part]) if catalogue is None else catalogue
        inside = own[np.isin(own % items, pool)]
        free = len(pool) - np.bincount(inside // items, minlength=users)
        pools.append(pool)
        beside.append(np.repeat(part[free[log.user[part]] > 0], each))
    owner = np.concatenate(beside)
    # Twice the position of the positive, less one: just before it, behind everything earlier.
    order = np.argsort(np.concatenate([2 * np.arange(len(log)), 2 * owner - 1]), kind="stable")
    user = np.concatenate([log.user, log.user[owner]])[order]
    in_test = np.concatenate([tested, tested[owner]])[order]
    return Sampled(
        Log(
            user=user,
            item=np.concatenate([log.item, np.full(len(owner), NONE)])[order],
            clicked=(np.arange(len(order)) < len(log))[order],
            line=None if log.line is None else np.concatenate([log.line, log.line[owner]])[order],
        ),
        np.bincount(user[in_test], minlength=users).astype(np.int64),
        Pools(*pools),
    )
