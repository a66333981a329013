"""Draws: whose a row is, from the rounds in which it was trained.

With `[training] examples` a client trains on some of its examples, drawn anew in each round. A row
that is the target of one example then has a count of 1 or 0, round by round, as that example is
drawn or not. If draws follow from something public, that pattern says whose example it is, and at
which place among the client's: over 20 rounds hardly two places have one pattern. How many examples
a client has is not public; the number that explains most rows is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.transcript import Clients
from tessera.ids import ClientId
from tessera.privacy.index.naming import Floats

Drawn = Callable[[int, ClientId, int], npt.NDArray[np.int64]]
"""(round, client, how many examples it has) -> the places of those that are drawn."""

MOST_TIMES: Final = 4
"""A client has at most so many times as many examples as it trains on: more are not tried."""
ROUNDS_TRIED: Final = 12
"""With which the number of examples is looked for; all of them count then."""
MOST_ROUNDS: Final = 62
"""A pattern is the bits of one number."""


def patterns(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(rounds, rows) counts -> one number per row, -1 for rows that are in two examples at once."""
    counts = counts[:MOST_ROUNDS]
    bits = (1 << np.arange(len(counts), dtype=np.int64))[:, None]
    once = (counts <= 1).all(axis=0) & counts.any(axis=0)
    found: npt.NDArray[np.int64] = np.where(once, (counts * bits).sum(axis=0), -1)
    return found


def explained(
    rounds: Sequence[int], members: Clients, seen: npt.NDArray[np.int64], most: int, drawn: Drawn
) -> Floats:
    """P(member holds row) at [row, member]: the members among whose examples one has its pattern.

    `seen` is (rounds, rows) counts of a group, `most` how many examples a client trains on.
    """
    whole, few = patterns(seen), patterns(seen[:ROUNDS_TRIED])
    some = Counter(few[few > 0].tolist())
    places = [_places(rounds, client, some, most, drawn) for client in members]
    holds = np.array([np.isin(whole, own) for own in places], dtype=np.float64).T
    total = holds.sum(axis=1, keepdims=True)
    found: Floats = np.where(total > 0.0, holds / np.maximum(total, 1.0), 1.0 / len(members))
    return found


def _places(
    rounds: Sequence[int], client: ClientId, some: Mapping[int, int], most: int, drawn: Drawn
) -> npt.NDArray[np.int64]:
    """The patterns of a client's examples, for the number of them that explains most rows.

    By chance a larger number explains more, so that the rows which chance explains are taken off.
    """
    known = np.array(sorted(some), dtype=np.int64)
    best, count = -np.inf, most + 1
    for examples in range(most + 1, MOST_TIMES * most + 1):
        found = _patterns(rounds[:ROUNDS_TRIED], client, examples, drawn)
        right = np.isin(known, found).sum() - len(known) * len(np.unique(found)) / 2**ROUNDS_TRIED
        if right > best:
            best, count = float(right), examples
    return _patterns(rounds[:MOST_ROUNDS], client, count, drawn)


def _patterns(
    rounds: Sequence[int], client: ClientId, examples: int, drawn: Drawn
) -> npt.NDArray[np.int64]:
    counts = np.zeros((len(rounds), examples), dtype=np.int64)
    for at, round_id in enumerate(rounds):
        counts[at, drawn(round_id, client, examples)] = 1
    return patterns(counts)
