"""Events 1 and 2: what an opened row reveals about the members of its group.

Event 1: one member is left in the sum and holds the row, so that its update is known, and whose it
is. Event 2: the count is zero, so that all remaining members named a row they do not hold. Niu et
al. 2020, section 5.1 and Theorem 5.5. Both are counted over rows that a client which named rows
holds; decoys, which no client holds, are not counted. Nor is a zero whose group has a holder, which
trained on no example of the row in this round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.population import HolderCounts
from tessera.audit.record import RoundView, Truth
from tessera.ids import RoundId
from tessera.plan import Plan
from tessera.privacy.index import exposure
from tessera.privacy.index.exposure import Cohort


@dataclass(slots=True)
class Events:
    """Both events, by the server's own sums; the truth says only which rows to count."""

    plan: Plan
    truth: Truth = field(repr=False)
    _holders: HolderCounts = field(default_factory=HolderCounts)
    _present: int = 0
    _gone: int = 0
    _first: ClusteredTrials = field(default_factory=ClusteredTrials)
    _second: ClusteredTrials = field(default_factory=ClusteredTrials)

    def take(self, view: RoundView) -> None:
        if not view.finished:
            return
        named = sorted(view.revealed)
        holders = view.among(self.truth, named).sum(axis=0)
        held = holders > 0
        members = view.among(view.members, view.survivors)
        left, count = members.sum(axis=0), view.count
        # A member that holds the row may have trained on no example of it (drawn others, or more
        # rows than it may use): then the count says of it what is not so, and gives nothing away.
        lacking = ~(members & view.among(self.truth, view.survivors)).any(axis=0)
        first = (left == 1) & (count > 0)
        second = (left >= 1) & (count == 0) & lacking
        self._holders.add(len(named), holders)
        self._present += len(named)
        self._gone += len(set(named) - set(view.survivors))
        rows = int(held.sum())
        self._first.add(view.period, int((first & held).sum()), rows)
        self._second.add(view.period, int((second & held).sum()), rows)

    def findings(self) -> list[Finding]:
        privacy = self.plan.privacy.index
        return [
            self._first.finding(
                "Event 1: a row opens as one known client's update",
                claimed=self._claim(lambda cohort: exposure.event_1(privacy, cohort)),
                meaning="of the union's rows, those whose sum is the update of the one client "
                "left in the group",
            ),
            self._second.finding(
                "Event 2: a row opens empty",
                claimed=self._claim(lambda cohort: exposure.event_2(privacy, cohort)),
                meaning="of the union's rows, those whose whole group is known to lack the row",
            ),
        ]

    def _claim(self, formula: Callable[[Cohort], float]) -> float:
        dropout = self._gone / self._present if self._present else 0.0
        quorum = self.plan.secagg(RoundId(0)).quorum
        return self._holders.claim(formula, min_group=quorum, dropout=dropout)
