"""Stopwatch: bytes and seconds of a simulated round, by cost category.

What a message or a phase is counted as is in the table of schemes. Both sums of a round send the
same kinds of message, so the counters are read when the union is opened, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final

from tessera.ids import ClientId
from tessera.plan import Plan
from tessera.rounds import schemes
from tessera.rounds.phases import CATEGORIES, UNION, UNMASK, UPDATE
from tessera.simulation.simulator import OUTCOME, WORK, PhaseEnd, Simulator

TRAIN: Final = "train"
"""A category of client seconds only."""
OTHER: Final = "other"
"""Kinds of message that a scheme's table does not have: a new one stops no run."""
BETWEEN_MESSAGES: Final = MappingProxyType({WORK: TRAIN, OUTCOME: UPDATE})
"""What a client's seconds are spent on that answer no message."""


class Counted(Enum):
    """Of clients: bytes up, bytes down, seconds."""

    UP = "up"
    DOWN = "down"
    SECONDS = "client_seconds"


class Stopwatch:
    """Listens to one simulation of a round by this plan; `simulator` is set once there is one."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.scheme = plan, schemes.of(plan)
        self.simulator: Simulator | None = None
        self.server: defaultdict[str, float] = defaultdict(float)
        self.helper: defaultdict[str, float] = defaultdict(float)
        self.in_union: dict[Counted, dict[ClientId, Mapping[str, float]]] = {}
        self._counted = {"server": 0.0, "helper": 0.0}

    def on_phase(self, phase_end: PhaseEnd) -> None:
        assert self.simulator is not None
        phase = self.scheme.phase(self.plan, phase_end.phase, phase_end.visit)
        self._count("server", phase.category)
        self._count("helper", phase.category)
        if self.plan.has_union and (phase.name, phase.visit) == ("unmask", 0):
            self.in_union = {
                which: {c: dict(kinds) for c, kinds in self.by_kind(which).items()}
                for which in Counted
            }

    def by_kind(self, which: Counted) -> Mapping[ClientId, Mapping[str, float]]:
        """By client and kind of message, so far."""
        if self.simulator is None:
            return defaultdict(dict)
        traffic = self.simulator.outcome.traffic
        found: Mapping[ClientId, Mapping[str, float]] = getattr(traffic, which.value)
        return found

    def finish(self) -> None:
        """What came after the last phase was closed: two servers open a sum among themselves."""
        if self.simulator is not None:
            self._count("server", UNMASK)
            self._count("helper", UNMASK)

    def _count(self, whose: str, category: str) -> None:
        """Add the seconds since the last call to a category."""
        assert self.simulator is not None
        traffic = self.simulator.outcome.traffic
        seconds = traffic.server_seconds if whose == "server" else traffic.helper_seconds
        spent = sum(seconds.values())
        if spent > self._counted[whose]:
            counter = self.server if whose == "server" else self.helper
            counter[category] += spent - self._counted[whose]
            self._counted[whose] = spent

    def by_category(
        self,
        which: Counted,
        clients: Sequence[ClientId],
        counted: Mapping[ClientId, Mapping[str, float]] | None = None,
    ) -> dict[str, float]:
        """Of one of these clients, on average; `counted` in place of what the simulator has."""
        costs, by_kind = self.scheme.costs, self.by_kind(which) if counted is None else counted
        seconds = which is Counted.SECONDS
        category_of = {**costs.answers, **BETWEEN_MESSAGES} if seconds else costs.messages
        total = dict.fromkeys((*CATEGORIES, TRAIN) if seconds else CATEGORIES, 0.0)
        for client in clients:
            before = self.in_union.get(which, {}).get(client, {})
            for kind, amount in by_kind[client].items():
                category, early = category_of.get(kind, OTHER), before.get(kind, 0.0)
                total.setdefault(category, 0.0)
                if category == UNION and not self.plan.has_union:
                    category = UPDATE  # shares opened, and the only sum's input masked at once
                before_union = UNION if category in (UPDATE, UNMASK) else category
                total[before_union] += early / len(clients)
                total[category] += (amount - early) / len(clients)
        return total
