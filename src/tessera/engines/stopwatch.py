"""Stopwatch: what a simulated round counts, split into the parts of a round while it runs.

Keys, the union, the choice of rows, the rows on their way down, the update and its unmasking. Both
sums of a round send the same kinds of message, so the counters are read when the union opens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from tessera.engines.simulator import OUTCOME, WORK, Happening, Simulator
from tessera.ids import ClientId
from tessera.rounds.server import ServerRound

STAGES: Final = ("keys", "union", "choice", "rows down", "update", "unmask")
TRAIN: Final = "train"
"""A part of a client's seconds only."""
OTHER: Final = "other"
"""Kinds of message that the tables below do not have: a new one stops no run."""

STAGE_OF: Final = {
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
    "Answers": "rows down",
    "Report": "update",
    "Download": "rows down",
    "MaskedInput": "update",
    "PlainInput": "update",
    "SurvivorList": "unmask",
    "ConsistencySignature": "unmask",
    "ConsistencyProof": "unmask",
    "RevealedShares": "unmask",
}
"""Which part of a round a message belongs to. A union has some of these kinds, too."""

ANSWERS: Final = {
    "start": "keys",
    "Roster": "keys",
    "ForwardedShares": "union",  # opens its shares, then masks its part of the union
    "UnionOpened": "choice",
    "NextStage": "choice",
    "SignedHeader": "choice",
    "Answers": "rows down",
    "Download": "update",
    "RowGroups": "update",
    "SurvivorList": "unmask",
    "ConsistencyProof": "unmask",
    WORK: TRAIN,
    OUTCOME: "update",
}
"""A client's seconds are known by the message it answers: what the answer was for."""

_PHASES: Final = {
    "advertise": "keys",
    "share": "keys",
    "opening": "keys",
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

    def on_phase(self, happening: Happening) -> None:
        assert self.simulator is not None
        traffic, two_sums = self.simulator.outcome.traffic, self.has_union
        stage = _PHASES.get(happening.phase, "unmask")
        if two_sums and happening.visit == 0 and happening.phase in ("collect", "unmask"):
            stage = "union"
        self._count("server", stage)
        self._count("helper", stage)
        if two_sums and (happening.phase, happening.visit) == ("unmask", 0):
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

    def _count(self, whose: str, stage: str) -> None:
        """Give the seconds since the last time to a part of the round."""
        assert self.simulator is not None
        traffic = self.simulator.outcome.traffic
        seconds = traffic.server_seconds if whose == "server" else traffic.helper_seconds
        spent = sum(seconds.values())
        if spent > self._counted[whose]:
            counter = self.server if whose == "server" else self.helper
            counter[stage] += spent - self._counted[whose]
            self._counted[whose] = spent

    @property
    def has_union(self) -> bool:
        assert self.simulator is not None
        server = self.simulator.server
        return isinstance(server, ServerRound) and server.plan.has_union

    def by_stage(
        self,
        counted: Mapping[ClientId, Mapping[str, float]],
        which: str,
        clients: Sequence[ClientId],
        stage_of: Mapping[str, str],
    ) -> dict[str, float]:
        total = dict.fromkeys((*STAGES, TRAIN) if which == "seconds" else STAGES, 0.0)
        for client in clients:
            before = self.in_union.get(which, {}).get(client, {})
            for kind, amount in counted[client].items():
                stage, early = stage_of.get(kind, OTHER), before.get(kind, 0.0)
                total.setdefault(stage, 0.0)
                if stage == "union" and not self.has_union:
                    stage = "update"  # shares opened, and the only sum's input masked at once
                total["union" if stage in ("update", "unmask") else stage] += early / len(clients)
                total[stage] += (amount - early) / len(clients)
        return total
