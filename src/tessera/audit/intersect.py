"""Intersection of unions: which clients were present when a row was in the union.

Niu et al. 2020, long version (arXiv 1911.02254), Appendix D. A client's rows are in the union of
every round it takes part in, so a row that is missing once is not its own. This attacker goes one
step further: if, among the clients of a round whose union has the row, all but one are excluded by
their other rounds, the row is attributed to that one: it is *pinned* on the client. Pinned rows are
what the client put into the union, decoys included, so that decoys reduce the share of real rows
among them. Decoys that were drawn anew in each round would not survive the intersection.

Real set and decoys are constant within a period, and the plan's claims are about a period. The same
attack over the whole run shows what is left if real sets never change, which no plan protects
against unless the same clients always meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.answers import PeriodAttack
from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.round_view import RoundView
from tessera.ids import ClientId
from tessera.learning.tables.submodel import Ids
from tessera.protocols.union.decoys import decoy_count

SET_SPREAD: Final = 0.01
"""How far the share of real rows among pinned ones may lie from its mean for one population's sets.

Simulated for the attack alone, over eight draws of the sets: within 0.9 points of the mean.
"""


@dataclass(frozen=True, slots=True)
class Attended:
    """One opened union, and whose rows are in it."""

    clients: tuple[ClientId, ...]
    union: Ids = field(repr=False)


def pinned(rounds: Sequence[Attended]) -> Iterator[tuple[ClientId, Ids]]:
    """For each client the rows that only it can have put into some union of these rounds."""
    clients = sorted({c for one in rounds for c in one.clients})
    place = {c: i for i, c in enumerate(clients)}
    rows = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *(r.union for r in rounds)]))
    attended = np.zeros(len(clients), dtype=np.int64)
    together = np.zeros((len(clients), len(rows)), dtype=np.int64)
    columns = [np.searchsorted(rows, one.union) for one in rounds]
    cohorts = [np.array([place[c] for c in one.clients], dtype=np.int64) for one in rounds]
    for cohort, at in zip(cohorts, columns, strict=True):
        attended[cohort] += 1
        together[np.ix_(cohort, at)] += 1
    suspects = together == attended[:, None]  # never there without the row
    found = np.zeros_like(suspects)
    for cohort, at in zip(cohorts, columns, strict=True):
        here = suspects[np.ix_(cohort, at)]
        found[np.ix_(cohort, at)] |= here & (here.sum(axis=0) == 1)
    for client, row in zip(clients, found, strict=True):
        yield client, rows[row]


@dataclass(slots=True)
class Intersection(PeriodAttack):
    """The attack within each period, or (`whole_run`) as if the run were one period."""

    whole_run: bool = False
    _rounds: list[Attended] = field(default_factory=list)
    _pinned: ClusteredTrials = field(default_factory=ClusteredTrials)  # real rows that are pinned
    _right: ClusteredTrials = field(default_factory=ClusteredTrials)  # pinned rows that are real

    def _period_of(self, view: RoundView) -> int:
        return 0 if self.whole_run else view.period

    def _add(self, view: RoundView) -> None:
        if view.in_union:
            self._rounds.append(Attended(view.in_union, view.union))

    def _found(self) -> list[Finding]:
        where = "over the whole run" if self.whole_run else "within a period"
        return [
            self._pinned.finding(
                f"intersection {where}: real rows pinned on their client",
                claimed=self.pinned_claim,
                meaning=self._meaning,
            ),
            self._right.finding(
                f"intersection {where}: a pinned row is real",
                claimed=self.real_claim,
                meaning="decoys kept for the period are pinned like real rows"
                if self.real_claim < 1.0
                else "without decoys that last, what is pinned is real",
                spread=SET_SPREAD if self.real_claim < 1.0 else 0.0,
            ),
        ]

    @property
    def pinned_claim(self) -> float:
        """0 where the plan keeps rounds of one client from being told apart, else all."""
        return float(self.plan.links_rounds(whole_run=self.whole_run))

    @property
    def real_claim(self) -> float:
        """Real rows among real rows and decoys: the mean over draws of the real sets.

        Rows that several clients hold are pinned less often than a decoy, and lone ones as often,
        so that the share for one population lies a little to either side.
        """
        if self.whole_run or not self.truth:
            return 1.0
        real = [len(rows) for rows in self.truth.values()]
        decoys = [decoy_count(size, self.plan.privacy.decoy_share) for size in real]
        return math.fsum(real) / max(1.0, math.fsum(real) + math.fsum(decoys))

    @property
    def _meaning(self) -> str:
        if self.pinned_claim == 0.0:
            grouped = self.plan.privacy.grouped
            same = "a client's rounds are the same as those of its group"
            return same if grouped else "a client takes part once in a period"
        if self.whole_run:
            return "real sets that stay the same for ever: no plan protects them"
        return "clients meet others in every round; the plan claims nothing but its decoys"

    def _finish(self) -> None:
        """Score a period."""
        if not self._rounds:
            return
        seen = {c for one in self._rounds for c in one.clients}
        found: dict[ClientId, npt.NDArray[np.uint64]] = dict(pinned(self._rounds))
        for client in seen:
            real = self.truth.get(client, np.zeros(0, dtype=np.uint64))
            hits = int(np.isin(found[client], real).sum())
            # One run, one history: over the whole run clients are all that can differ.
            cluster = int(client) if self.whole_run else self._period
            self._pinned.add(cluster, hits, len(real))
            self._right.add(cluster, hits, len(found[client]))
        self._rounds = []
