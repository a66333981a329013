"""History: the answers of a period's clients about every row of the unions.

Of k answers about a row only the number of yeses matters: the likelihood ratio between a client
that holds the row and one that does not follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera.ids import ClientId
from tessera.learning.tables.arrays import Ids
from tessera.privacy.index import exposure
from tessera.privacy.index.response import IndexPrivacy

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RevealedSets:
    """One round: the union, and the rows that each client revealed."""

    union: Ids = field(repr=False)
    revealed: Mapping[ClientId, Ids] = field(repr=False)


@dataclass(frozen=True, slots=True)
class History:
    """How often each client answered about each row, and how often it answered yes."""

    clients: Mapping[ClientId, int]
    rows: Ids = field(repr=False)
    answers: Counts = field(repr=False)  # (clients, rows)
    yes: Counts = field(repr=False)

    @classmethod
    def before(cls, rounds: Sequence[RevealedSets]) -> History:
        """An empty history with a place for every client and row of these rounds."""
        clients = sorted({c for one in rounds for c in one.revealed})
        unions = [np.zeros(0, dtype=np.uint64), *(one.union for one in rounds)]
        rows = np.unique(np.concatenate(unions))
        answers, yes = (np.zeros((len(clients), len(rows)), dtype=np.int64) for _ in range(2))
        return cls({c: i for i, c in enumerate(clients)}, rows, answers, yes)

    @classmethod
    def of(cls, rounds: Sequence[RevealedSets]) -> History:
        """The end of these rounds."""
        history = cls.before(rounds)
        for one in rounds:
            for client in one.revealed:
                history.add(one, client)
        return history

    def add(self, one: RevealedSets, client: ClientId) -> tuple[int, npt.NDArray[np.intp]]:
        """Add one client's answers of one round; returns its line and the columns."""
        at, columns = self.clients[client], np.searchsorted(self.rows, one.union)
        self.answers[at, columns] += 1
        self.yes[at, np.searchsorted(self.rows, one.revealed[client])] += 1
        return at, columns


def log_ratio(privacy: IndexPrivacy, answers: int, yes: int) -> float:
    """log P(answers | real) / P(answers | not), for `yes` out of `answers`; may be infinite."""

    def chance(p: float) -> float:
        after_yes = _times(yes, privacy.p3) + _times(answers - yes, 1.0 - privacy.p3)
        after_no = _times(yes, privacy.p4) + _times(answers - yes, 1.0 - privacy.p4)
        return float(np.logaddexp(exposure.log(p) + after_yes, exposure.log(1.0 - p) + after_no))

    real, other = chance(privacy.p1), chance(privacy.p2)
    return 0.0 if real == other else real - other  # equal infinities: nobody answers so


def _times(count: int, probability: float) -> float:
    return count * exposure.log(probability) if count else 0.0
