"""Lists that differ where keys last: whoever is on one of two and not on the other shows its rows.

In a key period a client writes the same rows in every round, and sums are exact. Between two rounds
whose lists differ, the rows of the difference move: in a period with `absent = "allow"`, and where
new keys are made over another list than the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.record import Truth
from tessera.audit.two_server_view import TwoServerView
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan

ABSENT: Final = "key period: rows of whoever is missing in a later round show"
REKEYED: Final = "key period: rows of whoever came or went at a re-keying show"


@dataclass(slots=True)
class KeyPeriodLists:
    """Takes rounds in order, as the leader has them; of rows with keys, counts those that show."""

    plan: Plan
    truth: Truth = field(repr=False)
    _period: RoundId | None = None
    _first: frozenset[ClientId] = frozenset()
    _absent: ClusteredTrials = field(default_factory=ClusteredTrials)
    _rekeyed: ClusteredTrials = field(default_factory=ClusteredTrials)

    def take(self, view: TwoServerView) -> None:
        listed = frozenset(view.included)
        if not listed:
            return
        if view.header.epoch:
            self._count(self._absent, view, self._first, self._first - listed)
            return
        if self._period is not None:
            self._count(self._rekeyed, view, self._first | listed, self._first ^ listed)
        self._period, self._first = view.header.period, listed

    def _count(
        self,
        trials: ClusteredTrials,
        view: TwoServerView,
        everybody: frozenset[ClientId],
        shown: frozenset[ClientId],
    ) -> None:
        """A row counts for each client that has it."""
        rows = {c: len(self.truth[c]) for c in everybody}
        trials.add(int(view.round_id), sum(rows[c] for c in shown), sum(rows.values()))

    def findings(self) -> list[Finding]:
        refuses = self.plan.two_server.absent.value == "refuse"
        absent = self._absent.finding(
            ABSENT,
            claimed=0.0 if refuses else 1.0,
            meaning="of the rows of clients with keys in later rounds, those of clients that are "
            "missing in the sum: they are in one of two exact sums and not in the other",
        )
        rekeyed = self._rekeyed.finding(
            REKEYED,
            claimed=1.0,
            meaning="of the rows of clients on two lists one after the other, those of clients on "
            "one of them alone. Nothing is promised against that",
        )
        return [replace(each, attacker="either server") for each in (absent, rekeyed)]
