"""Flips: a permanent answer that changes within a period.

Where answers have no instantaneous part (p3 = 1, p4 = 0, or everybody names everything) a client's
answer about a row is one and the same for the whole period. One that changes proves that the row
came to the client's set or left it, or that the client answers otherwise than the plan says.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.record import RoundView, Truth
from tessera.ids import ClientId
from tessera.learning.tables.arrays import Ids
from tessera.plan import Plan


def answers_stay(plan: Plan) -> bool:
    """Whether no answer may change within a period."""
    privacy = plan.privacy.index
    return privacy.p3 == 1.0 and (privacy.p4 == 0.0 or min(privacy.p1, privacy.p2) == 1.0)


@dataclass(slots=True)
class Flips:
    """Answers that were both yes and no in a period, of all that could have been."""

    plan: Plan
    truth: Truth = field(repr=False)
    _period: int = -1
    _rounds: dict[ClientId, list[tuple[Ids, Ids]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _flipped: ClusteredTrials = field(default_factory=ClusteredTrials)

    def take(self, view: RoundView) -> None:
        if view.period != self._period:
            self._finish()
            self._period = view.period
        for client, rows in view.revealed.items():
            self._rounds[client].append((view.union, rows))

    def findings(self) -> list[Finding]:
        self._finish()
        if not answers_stay(self.plan):
            return []
        return [
            self._flipped.finding(
                "flips: a permanent answer changes",
                claimed=0.0,
                meaning="within a period a client answers the same about a row, whatever happens "
                "to its data; a change proves that the row is, or was, its own",
            )
        ]

    def _finish(self) -> None:
        always = self.plan.privacy.index.p2 == 1.0  # everybody names everything
        for rounds in self._rounds.values():
            asked, times = np.unique(np.concatenate([u for u, _ in rounds]), return_counts=True)
            named, often = np.unique(np.concatenate([r for _, r in rounds]), return_counts=True)
            yes = np.zeros(len(asked), dtype=np.int64)
            yes[np.searchsorted(asked, named)] = often
            tried = times >= (1 if always else 2)
            changed = (yes < times) & (always | (yes > 0)) & tried
            self._flipped.add(self._period, int(changed.sum()), int(tried.sum()))
        self._rounds.clear()
