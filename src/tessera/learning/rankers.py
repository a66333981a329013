"""Full ranking: where the item that came next stands among all that its user does not have.

None is sampled, unless a paper's protocol is asked for (`sampled`). Ties count against the target,
so that a constant score is no good guess. Beside a model stand predictors that need none, all from
counts of the training part: popularity, the successors of the last item, the successors within a
window of the last few items divided by their popularity, and EASE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.data.examples import Examples
from tessera.data.sequences import SEEN, Sequences
from tessera.errors import ConfigError
from tessera.learning.models.pairs import Pairs
from tessera.learning.scores import ItemScores

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Progress: TypeAlias = Callable[[int, int], None]
"""(examples done, of how many)."""

POPULARITY: Final = "most frequent"
SUCCESSOR: Final = "successor of the last"
WINDOWED: Final = "successors, windowed"
EASE: Final = "EASE"

AT_ONCE: Final = 512
SAMPLED: Final = 99
"""Items that papers rank one among."""
MOST_SOLVED: Final = 6_000
"""Items up to which EASE is solved beside a model: half a minute."""
PENALTY: Final = 300.0
WINDOW: Final = 10
ASKED: Final = 5
DIVIDED: Final = 0.4
"""Successors within 10 places, of the last 5 items, divided by popularity to this power."""


def ranks(
    scores: ItemScores,
    examples: Examples,
    progress: Progress | None = None,
    among: Ints | None = None,
) -> Doubles:
    """How many items are scored as high as each example's own, or higher; 0 is the best rank.

    `among` (N, k) has for each example the items that it is ranked among, where these are not all.
    """
    found = np.empty(len(examples))
    for low in range(0, len(examples), AT_ONCE):
        some = examples.take(slice(low, low + AT_ONCE))
        drawn = None if among is None else among[low : low + AT_ONCE]
        found[low : low + len(some)] = placed(scores(some), some, drawn)
        if progress is not None:
            progress(low + len(some), len(examples))
    return found


def placed(scores: npt.NDArray[Any], examples: Examples, among: Ints | None = None) -> Doubles:
    """The same of scores (N, m) of these examples that are there."""
    given = np.array(scores, np.float64)
    own = np.arange(len(examples))
    right = given[own, examples["item"]]
    if among is not None:
        return np.asarray((~(given[own[:, None], among] < right[:, None])).sum(axis=1), np.float64)
    ahead = ~(given < right[:, None])  # so does what is not a number
    row, column = np.nonzero(examples[SEEN] >= 0)
    ahead[row, examples[SEEN][row, column]] = False
    ahead[own, examples["item"]] = False
    return np.asarray(ahead.sum(axis=1), np.float64)


def sampled(examples: Examples, items: int, number: int = SAMPLED, seed: int = 0) -> Ints:
    """For each example so many items, drawn evenly among those that its user does not have.

    The protocol of He et al. (*Neural Collaborative Filtering*, WWW 2017, section 4.1), and of most
    papers on federated recommendation since. Figures are far above those among all items, and may
    order models otherwise (Krichene and Rendle, KDD 2020). The seed is public, and a user's draw
    does not hang on who else is looked at.
    """
    found = np.empty((len(examples), number), np.int64)
    for at, (user, item) in enumerate(zip(examples["user"], examples["item"], strict=True)):
        free = np.ones(items, np.bool_)
        free[examples[SEEN][at][examples[SEEN][at] >= 0]] = False
        free[item] = False
        left = np.flatnonzero(free)
        if len(left) < number:
            raise ConfigError(
                f"user {int(user)} does not have {len(left)} items, of which {number} are drawn",
                hint="rank among all items",
            )
        found[at] = np.random.default_rng([seed, int(user)]).choice(left, number, replace=False)
    return found


def predictors(events: Sequences, items: int) -> Mapping[str, Callable[[], ItemScores]]:
    """What makes each of the predictors that need no model; EASE where its solve is short."""
    times = np.bincount(events.item, minlength=items).astype(np.float64)

    def popular() -> ItemScores:
        return lambda some: np.broadcast_to(times, (len(some), items))

    def successors() -> ItemScores:
        follow = Followers.of(events, items, window=1)
        rest = times / (1.0 + times.sum())
        return lambda some: follow.after(some["history"][:, :1]) + rest

    def windowed() -> ItemScores:
        follow = Followers.of(events, items, window=WINDOW)
        less = np.maximum(times, 1.0) ** -DIVIDED
        rest = times / (1.0 + times.sum()) ** 2
        return lambda some: follow.after(some["history"][:, :ASKED]) * less + rest

    def ease() -> ItemScores:
        pairs = Pairs(items=items, tau=0.0, penalty=PENALTY)
        solved = pairs.solved(pairs.sums_of(events)).astype(np.float32)
        return lambda some: pairs.history(some[SEEN]).astype(np.float32) @ solved

    made = {POPULARITY: popular, SUCCESSOR: successors, WINDOWED: windowed}
    return made | ({EASE: ease} if items <= MOST_SOLVED else {})


class Followers:
    """For each item what came within a few places after it, and how often."""

    def __init__(self, begins: Ints, item: Ints, often: Doubles) -> None:
        self.begins, self.item, self.often = begins, item, often

    @classmethod
    def of(cls, events: Sequences, items: int, *, window: int) -> Followers:
        pairs = np.concatenate([np.zeros(0, np.int64), *cls._pairs(events, items, window)])
        cells, often = np.unique(pairs, return_counts=True)
        begins = np.searchsorted(cells, np.arange(items + 1) * items)
        return cls(begins, cells % items, often.astype(np.float64))

    @staticmethod
    def _pairs(events: Sequences, items: int, window: int) -> Iterator[Ints]:
        place, length = events.place, np.repeat(events.counts, events.counts)
        for far in range(1, window + 1):
            first = np.flatnonzero(place + far < length)
            yield events.item[first] * items + events.item[first + far]

    def after(self, latest: npt.NDArray[Any]) -> Doubles:
        """Counts (N, m) of what followed any of these items (N, k), added up."""
        found = np.zeros((len(latest), len(self.begins) - 1))
        for row, own in enumerate(latest.tolist()):
            for item in own:
                if item >= 0:
                    some = slice(self.begins[item], self.begins[item + 1])
                    found[row, self.item[some]] += self.often[some]
        return found
