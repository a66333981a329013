"""EpochServer: the server of one fixed group as a role, with a state that can be stored.

Messages go to the protocol's own role, which keeps the running sum; what it assigns is sent with
the period's record, the union and the base beside it. The epoch that members are given is fixed by
the carrier (`open_next`), from the model as it is then, before it hands on a fetch: stored first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from tessera import wire
from tessera.crypto.secret import Secret
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.plan import Plan
from tessera.protocols.epochs.group import FixedGroup, OfGroup
from tessera.protocols.epochs.messages import FROM_MEMBER, Assignment
from tessera.protocols.epochs.server import HOUR, GroupServer, GroupServerSetup
from tessera.protocols.machine import Coordinator, Outbound, Over, RoundOutcome
from tessera.rounds.epochs.group import (
    CarriedVectors,
    Cutoffs,
    GroupEpochs,
    GroupProgress,
    all_data,
)
from tessera.rounds.epochs.messages import EpochWork
from tessera.rounds.server_model import ServerModel
from tessera.rounds.words import RoundResult
from tessera.wire.stored import Inner


@wire.record(tag=0x0292)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGroup:
    """Where the group is, and the protocol's role with the sum so far."""

    at: GroupProgress
    role: Annotated[GroupServer, Inner("role")]


@dataclass(frozen=True, kw_only=True)
class EpochServerSetup(OfGroup):
    """A group and the federation's plan; `wait`: seconds after which members are told to ask;
    `cutoffs` names those of its periods."""

    plan: Plan
    group: FixedGroup
    wait: int = HOUR
    cutoffs: Cutoffs = field(default=all_data, repr=False)

    party: ClassVar[Party] = SERVER


class EpochServer(Coordinator[EpochServerSetup]):
    """The server of one group. It opens sums over all members and nothing else."""

    ROLE = "server of a group's training"
    STATES = (ServingGroup,)
    STEPS: ClassVar = dict.fromkeys(
        ((ServingGroup, kind) for kind in FROM_MEMBER), GroupServer.receive
    )
    FROM_CLIENT = FROM_MEMBER

    def __init__(self, setup: EpochServerSetup) -> None:
        role = GroupServer(GroupServerSetup(group=setup.group, wait=setup.wait))
        super().__init__(setup, ServingGroup(at=GroupProgress(), role=role))
        self._resumed()

    def _set_up(self, setup: EpochServerSetup) -> None:
        super()._set_up(setup)
        self.invited = frozenset(setup.group.members)
        self._role_setup = GroupServerSetup(group=setup.group, wait=setup.wait)

    def _supplied(self) -> Mapping[str, Any]:
        return {"role": lambda data, kept: GroupServer.wake(data, kept, self._role_setup)}

    def _resume(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> None:
        super()._resume(snapshot, messages)
        self._resumed()

    def _resumed(self) -> None:
        if isinstance(self.state, ServingGroup):
            setup, vectors = self.setup, CarriedVectors(self.state.role)
            at, cutoffs = self.state.at, setup.cutoffs
            self.epochs = GroupEpochs(setup.plan, setup.group, vectors, at, cutoffs)

    @property
    def phase(self) -> str:
        return self.state.role.phase if isinstance(self.state, ServingGroup) else super().phase

    @property
    def expected(self) -> frozenset[Party]:
        """Whose deposit or delivery is due."""
        return self.state.role.expected if isinstance(self.state, ServingGroup) else frozenset()

    @property
    def has_begun(self) -> bool:
        """Whether all have deposited a mask key, so that there can be epochs."""
        role = self.state.role
        return bool(role.open_epoch is not None or role.awaits_epoch)

    def open_next(self, model: ServerModel, round_id: RoundId) -> None:
        """Fix the next epoch from this model, if one is to be fixed."""
        if self.has_begun and not self.epochs.at.retired and not self.epochs.full:
            self.epochs.opened(model, round_id)

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """The protocol's role judges what is due; its assignments are sent with their inputs."""
        self._check_open()
        role: GroupServer = self.state.role
        out = role.receive(sender, data)
        if isinstance(role.state, Over):  # a member has left
            self._ended(role.state.reason)
        return [
            self._with_inputs(each) if each.kind == Assignment.__name__ else each for each in out
        ]

    def _with_inputs(self, assigned: Outbound) -> Outbound:
        """The assignment, with everything that its header has digests of and a member lacks."""
        at = self.epochs.at
        if at.open is None:  # to a member that does not remember its delivery of the last one
            work = EpochWork(assignment=assigned.data, record=self.epochs.record)
            return Outbound.of(assigned.to, work)
        base, union = at.open.base, at.open.union
        first = at.open.header.epoch == at.union_epoch + 1  # who comes later has the union
        work = EpochWork(
            assignment=assigned.data,
            record=at.open.record,
            union=union.data if first and union is not None else b"",
            base=b"" if base is None else base.data,
        )
        return Outbound.of(assigned.to, work)

    @property
    def full(self) -> bool:
        """Whether everybody has delivered, and the sum waits to be taken."""
        return isinstance(self.state, ServingGroup) and self.epochs.full

    def take(self, model: ServerModel, noise: Secret) -> RoundResult | None:
        """What a full epoch came to (`GroupEpochs.take`); the group may be retired for it."""
        result = self.epochs.take(model, noise)
        if self.epochs.at.retired:
            self.over(RoundOutcome.ABORTED, self.epochs.at.retired)
        return result

    @property
    def due(self) -> frozenset[ClientId]:
        """Members that have not delivered the epoch that is open, or will be."""
        return self.epochs.due if isinstance(self.state, ServingGroup) else frozenset()

    def retire(self, reason: str) -> list[Outbound]:
        """For good: members are told, and nothing of an open epoch is used or kept."""
        out: list[Outbound] = self.state.role.retire(reason)
        self._ended(reason)
        return out

    def _ended(self, reason: str) -> None:
        self.epochs.at.retired, self.epochs.at.open = reason, None
        self.over(RoundOutcome.ABORTED, reason)
