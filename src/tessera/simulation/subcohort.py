"""Subcohort: the clients of a cohort that are summed together, with the roles of their round.

All of a cohort, or those who mask their updates and those who do not apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tessera.crypto.keys import Identity
from tessera.errors import RoundAborted
from tessera.ids import ClientId
from tessera.rounds.course import PartOutcome, RoundPart
from tessera.rounds.local_state import LocalState
from tessera.rounds.roles import RoundClient, RoundServer
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound
from tessera.rounds.words import RoundResult
from tessera.simulation.faults import Fault
from tessera.simulation.stopwatch import Stopwatch


@dataclass(slots=True)
class Subcohort:
    """A part of a round, with everybody's role in it and what goes wrong."""

    part: RoundPart
    server: RoundServer
    clients: Mapping[ClientId, RoundClient]
    faults: Sequence[Fault]
    helper: HelperRound | None = None
    watch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.part.plan)

    @property
    def named(self) -> Mapping[ClientId, ClientId]:
        """Who each name of the round is."""
        return self.part.named

    def summed(self, result: RoundResult) -> PartOutcome:
        """It came to a sum."""
        return PartOutcome(
            part=self.part,
            result=result,
            excluded=self.excluded(result.survivors),
            writing=self.writing,
        )

    def aborted(self, aborted: RoundAborted) -> PartOutcome:
        """Too few answered."""
        return PartOutcome(
            part=self.part, aborted=aborted, reason=self.why_aborted() or aborted.reason
        )

    def singleton_rows(self, result: RoundResult) -> int:
        """Opened rows that exactly one client of the sum has written."""
        alone, none = 0, np.zeros(0, dtype=np.uint64)
        for name, mean in result.tables.items():
            written = [self.clients[c].written.get(name, none) for c in result.survivors]
            rows = np.sort(np.concatenate([none, *written]))
            if rows.size:
                edge = np.concatenate([[True], rows[1:] != rows[:-1], [True]])
                single = rows[edge[:-1] & edge[1:]]
                alone += int(np.isin(single, mean.ids, assume_unique=True).sum())
        return alone

    def excluded(self, survivors: Collection[ClientId] = ()) -> Counter[str]:
        """Those who answered and are not among the survivors, by the reason there is for it."""
        why: dict[ClientId, str] = {}
        if self.watch.simulator is not None:
            outcome = self.watch.simulator.outcome
            for error in outcome.refused:
                if error.peer is not None and not isinstance(error.peer, str):
                    why.setdefault(error.peer, error.reason.partition(":")[0])
            for client, fault in outcome.left.items():
                why.setdefault(client, f"left, for the server {fault.reason}")
        if isinstance(self.server, LeaderRound):
            why = {**self.server.excluded, **why}
        return Counter(reason for client, reason in why.items() if client not in survivors)

    def why_aborted(self) -> str:
        """Why a round was aborted, as far as more is known than how many were missing."""
        if self.watch.simulator is not None:
            left = self.watch.simulator.outcome.helper_left
            if left is not None:
                return f"the helper left, for the leader {left.reason}"
        return "; ".join(f"{count} x {reason}" for reason, count in self.excluded().most_common())

    @property
    def writing(self) -> dict[str, str]:
        """How two servers had each table written, and why."""
        if self.watch.simulator is None or not isinstance(self.server, LeaderRound):
            return {}
        return {cost.table: cost.reason for cost in self.server.writing}


# --- participant ----------------------------------------------------------------------------------
#
# Participant: one client of a simulated population.


@dataclass(slots=True)
class Participant:
    """What a client has of its own, from round to round."""

    local: LocalState
    identity: Identity | None = None
