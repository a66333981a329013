"""Stopwatch: bytes and seconds of a simulated round, by cost category.

The categories are keys, the union, the choice of rows, the download of rows, the update and its
unmasking. Both sums of a round send the same kinds of message, so the counters are read when the
union is opened, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from tessera.engines.simulator import OUTCOME, WORK, PhaseEnd, Simulator
from tessera.ids import ClientId
from tessera.rounds.server import ServerRound

CATEGORIES: Final = ("keys", "union", "choice", "rows down", "update", "unmask")
TRAIN: Final = "train"
"""A category of client seconds only."""
OTHER: Final = "other"
"""Kinds of message that the tables below do not have: a new one stops no run."""

CATEGORY_OF_MESSAGE: Final = {
    "start": "keys",
    "Advert": "keys",
    "Roster": "keys",
    "ShareBoxes": "keys",
    "ForwardedShares": "keys",
    "UnionOpened": "union",
    "NextStage": "union",
    "RevealedSet": "choice",
    "RowGroups": "choice",
    "PlainRows": "choice",
    "SignedHeader": "keys",
    "Query": "choice",
    "QueryAnswers": "rows down",
    "WriteReport": "update",
    "Download": "rows down",
    "MaskedInput": "update",
    "PlainInput": "update",
    "SurvivorList": "unmask",
    "ConsistencySignature": "unmask",
    "ConsistencyProof": "unmask",
    "RevealedShares": "unmask",
}
"""The cost category of each kind of message. A union has some of these kinds, too."""

CATEGORY_OF_ANSWER: Final = {
    "start": "keys",
    "Roster": "keys",
    "ForwardedShares": "union",  # opens its shares, then masks its part of the union
    "UnionOpened": "choice",
    "NextStage": "choice",
    "SignedHeader": "choice",
    "QueryAnswers": "rows down",
    "Download": "update",
    "RowGroups": "update",
    "SurvivorList": "unmask",
    "ConsistencyProof": "unmask",
    WORK: TRAIN,
    OUTCOME: "update",
}
"""A client's seconds are known by the message it answers: what the answer was for."""

_CATEGORY_OF_PHASE: Final = {
    "advertise": "keys",
    "share": "keys",
    "handshake": "keys",
    "reveal": "choice",
    "query": "rows down",
    "answer": "rows down",
    "collect": "update",
}


class Stopwatch:
    """Listens to one simulation; `simulator` is set once there is one."""

    def __init__(self) -> None:
        self.simulator: Simulator | None = None
        self.server: defaultdict[str, float] = defaultdict(float)
        self.helper: defaultdict[str, float] = defaultdict(float)
        self.in_union: dict[str, dict[ClientId, Mapping[str, float]]] = {}
        self._counted = {"server": 0.0, "helper": 0.0}

    def on_phase(self, phase_end: PhaseEnd) -> None:
        assert self.simulator is not None
        traffic, two_sums = self.simulator.outcome.traffic, self.has_union
        category = _CATEGORY_OF_PHASE.get(phase_end.phase, "unmask")
        if two_sums and phase_end.visit == 0 and phase_end.phase in ("collect", "unmask"):
            category = "union"
        self._count("server", category)
        self._count("helper", category)
        if two_sums and (phase_end.phase, phase_end.visit) == ("unmask", 0):
            self.in_union = {
                "up": {c: Counter(kinds) for c, kinds in traffic.up.items()},
                "down": {c: Counter(kinds) for c, kinds in traffic.down.items()},
                "seconds": {c: dict(kinds) for c, kinds in traffic.client_seconds.items()},
            }

    def finish(self) -> None:
        """What came after the last phase was closed: two servers open a sum among themselves."""
        if self.simulator is not None:
            self._count("server", "unmask")
            self._count("helper", "unmask")

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

    @property
    def has_union(self) -> bool:
        assert self.simulator is not None
        server = self.simulator.server
        return isinstance(server, ServerRound) and server.plan.has_union

    def by_category(
        self,
        counted: Mapping[ClientId, Mapping[str, float]],
        which: str,
        clients: Sequence[ClientId],
        category_of: Mapping[str, str],
    ) -> dict[str, float]:
        total = dict.fromkeys((*CATEGORIES, TRAIN) if which == "seconds" else CATEGORIES, 0.0)
        for client in clients:
            before = self.in_union.get(which, {}).get(client, {})
            for kind, amount in counted[client].items():
                category, early = category_of.get(kind, OTHER), before.get(kind, 0.0)
                total.setdefault(category, 0.0)
                if category == "union" and not self.has_union:
                    category = "update"  # shares opened, and the only sum's input masked at once
                before_union = "union" if category in ("update", "unmask") else category
                total[before_union] += early / len(clients)
                total[category] += (amount - early) / len(clients)
        return total
