"""The server of a fixed group, through all its epochs.

It fixes an epoch, gives it to whoever comes, adds up masked vectors, and opens the sum with the
last one: before that the running sum is uniform, whoever is missing. Of a member's vector it keeps
nothing but what the member signed about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from tessera import wire
from tessera.crypto.group import Words
from tessera.crypto.keys import is_public_key
from tessera.errors import MisuseError
from tessera.ids import SERVER, ClientId, Party
from tessera.protocols.epochs.group import MAX_GROUP, FixedGroup, OfGroup
from tessera.protocols.epochs.messages import (
    FROM_MEMBER,
    Assignment,
    ComeBack,
    Delivered,
    Delivery,
    DeliveryCertificate,
    Deposit,
    EpochHeader,
    EpochLink,
    Fetch,
    Leave,
    follows,
    link,
)
from tessera.protocols.machine import (
    Coordinator,
    Moved,
    Outbound,
    Over,
    RoundOutcome,
    RoundOver,
    Steps,
    shortened,
    to_all,
)
from tessera.wire.stored import MAX_STATE_BYTES, Kept

HOUR: Final = 3600
LEFT: Final = "a member has left"
BY_MEMBER: Final = wire.ByKey(wire.U32, wire.Nested(Delivered), MAX_GROUP)


@wire.record(tag=0x0790)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingKeys:
    """Before epoch 1: members deposit their mask keys."""

    delivered: Annotated[dict[ClientId, Delivered], BY_MEMBER] = field(default_factory=dict)


@wire.record(tag=0x0791)
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFixed:
    """Epoch e is fixed and nobody has fetched it: another may still take its place.

    `last` is the certificate of e - 1, here and below.
    """

    link: EpochLink
    last: DeliveryCertificate

    @property
    def delivered(self) -> Mapping[ClientId, Delivered]:
        return {}


@wire.record(tag=0x0792)
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectingVectors:
    """Epoch e was fetched: it is the only one. `total` is the sum of what has come."""

    link: EpochLink
    last: DeliveryCertificate
    total: Annotated[Words, wire.Words(MAX_STATE_BYTES)] = field(repr=False)
    delivered: Annotated[dict[ClientId, Delivered], BY_MEMBER] = field(default_factory=dict)


@wire.record(tag=0x0793)
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpened:
    """All have delivered epoch e: `total` is the sum of their words."""

    link: EpochLink
    last: DeliveryCertificate
    total: Annotated[Words, wire.Words(MAX_STATE_BYTES)] = field(repr=False)
    certificate: DeliveryCertificate

    @property
    def delivered(self) -> Mapping[ClientId, Delivered]:
        return {entry.sender: entry for entry in self.certificate.entries}


Open = EpochFixed | CollectingVectors | EpochOpened


@dataclass(frozen=True, kw_only=True)
class GroupServerSetup(OfGroup):
    """A group, and how long members that come too early are told to wait."""

    group: FixedGroup
    wait: int = HOUR
    """Seconds; the same whoever asks and whoever is missing."""

    @property
    def party(self) -> Party:
        return SERVER


class GroupServer(Coordinator[GroupServerSetup]):
    """One group at its server. It opens sums over all members and nothing else."""

    ROLE = "server of a fixed group"
    STATES = (AwaitingKeys, EpochFixed, CollectingVectors, EpochOpened)
    FROM_CLIENT = FROM_MEMBER

    def __init__(self, setup: GroupServerSetup) -> None:
        super().__init__(setup, AwaitingKeys())

    def _set_up(self, setup: GroupServerSetup) -> None:
        super()._set_up(setup)
        self.invited = frozenset(setup.group.members)

    # -- what its caller reads

    @property
    def expected(self) -> frozenset[Party]:
        """Whose deposit or delivery is due."""
        if isinstance(self.state, Over):
            return frozenset()
        return frozenset(self.invited - self.state.delivered.keys())

    @property
    def open_epoch(self) -> EpochHeader | None:
        """The epoch that members are given, or were given last."""
        return None if isinstance(self.state, AwaitingKeys | Over) else self.state.link.header

    @property
    def awaits_epoch(self) -> bool:
        """Whether the next epoch can be fixed, and none is."""
        return isinstance(self.state, AwaitingKeys | EpochOpened) and not self.expected

    @property
    def opened(self) -> EpochOpened | None:
        """The sum over all members, and their certificate, until the next epoch is fixed."""
        return self.state if isinstance(self.state, EpochOpened) else None

    # -- what its caller does

    def fix(self, header: EpochHeader) -> None:
        """Fix the next epoch, or another in the place of one that nobody has fetched.

        What the header has digests of is stored before this, and this before anybody is told.
        """
        group = self.setup.group
        match self.state:
            case EpochOpened(link=at, certificate=last):
                previous, fits = at.digest, follows(at.header, header)
            case EpochFixed(link=at, last=last):
                place = (at.header.epoch, at.header.period)
                previous, fits = at.previous, (header.epoch, header.period) == place
            case AwaitingKeys(delivered=there) if not self.expected:
                last = self._certificate(there)
                previous, fits = group.digest, follows(None, header)
            case _:
                raise MisuseError(f"no epoch can be fixed in state {self.phase}")
        if not fits:
            raise MisuseError(f"epoch {header.epoch} of period {header.period} is not the next")
        self._handled = set()  # what was said in the epochs before is not repeated
        at = link(previous, group, header, wire.digest(last))
        self._move(EpochFixed(link=at, last=last), b"")

    def retire(self, reason: str) -> list[Outbound]:
        """For good: nothing of an open epoch is used or kept, and members are told."""
        self.over(RoundOutcome.ABORTED, reason)
        told = RoundOver.of(self.round_id, RoundOutcome.ABORTED, shortened(reason))
        return to_all(self.invited, told)

    # -- steps

    def _is_of_this_round(self, message: Any) -> bool:
        return True  # signatures name the group, and what is sent the epoch

    def _take_deposit(self, state: AwaitingKeys, kept: Kept[Deposit]) -> Moved:
        self._check_statement(kept.message.statement, state, 0, self.setup.group.digest)
        state.delivered[kept.message.sender] = kept.message.statement
        return state, []

    def _too_early(self, state: AwaitingKeys, kept: Kept[Fetch]) -> Moved:
        return state, [self._come_back(kept.message)]

    def _first_fetch(self, state: EpochFixed, kept: Kept[Fetch]) -> Moved:
        """From here on this epoch is the only one; stored before it is answered."""
        collecting = self._collecting(state)
        return collecting, self._answer(collecting, kept.message)

    def _later_fetch(self, state: CollectingVectors | EpochOpened, kept: Kept[Fetch]) -> Moved:
        return state, self._answer(state, kept.message)

    def _first_delivery(self, state: EpochFixed, kept: Kept[Delivery]) -> Moved:
        """Of a member that fetched before this server was restored to an earlier state."""
        if self._is_known(state, kept.message):
            return state, []
        return self._add(self._collecting(state), kept.message), []

    def _take_delivery(self, state: CollectingVectors, kept: Kept[Delivery]) -> Moved:
        if self._is_known(state, kept.message):
            return state, []
        return self._add(state, kept.message), []

    def _late(self, state: Open, kept: Kept[Deposit] | Kept[Delivery]) -> Moved:
        """What this server has, again; nothing else is taken any more."""
        if not self._is_known(state, kept.message):
            raise self._refuse(kept.message.sender, "sent a second key or vector of one epoch")
        return state, []

    def _left(self, state: Any, kept: Kept[Leave]) -> Moved:
        """A member is out, and nothing is ever opened without it."""
        if fault := kept.message.fault(self.setup.group):
            raise self._refuse(kept.message.sender, fault)
        return Over(outcome=RoundOutcome.ABORTED, reason=LEFT), []

    def _is_known(self, state: Open, message: Deposit | Delivery) -> bool:
        return message.statement in (*state.last.entries, *state.delivered.values())

    def _collecting(self, state: EpochFixed) -> CollectingVectors:
        header = state.link.header
        total = header.ring.zeros(header.length)
        return CollectingVectors(link=state.link, last=state.last, total=total)

    def _answer(self, state: CollectingVectors | EpochOpened, asked: Fetch) -> list[Outbound]:
        own = state.delivered.get(asked.sender)
        if own is not None and asked.delivered >= state.link.header.epoch:
            return [self._come_back(asked)]
        assigned = Assignment(
            visit=asked.visit, header=state.link.header, certificate=state.last, own=own
        )
        return [Outbound.of(asked.sender, assigned)]

    def _come_back(self, asked: Fetch) -> Outbound:
        return Outbound.of(asked.sender, ComeBack(visit=asked.visit, seconds=self.setup.wait))

    def _add(self, state: CollectingVectors, message: Delivery) -> CollectingVectors | EpochOpened:
        """One more vector; with the last one the masks cancel."""
        statement, sender, at = message.statement, message.sender, state.link
        self._check_statement(statement, state, at.header.epoch, at.digest)
        if wire.part_digest(message.vector) != statement.vector:
            raise self._refuse(sender, "signed other bytes than it sent")
        try:
            at.header.ring.add_packed(state.total, message.vector)
        except ValueError as error:
            raise self._refuse(sender, "sent words of the wrong number or group") from error
        state.delivered[sender] = statement
        if self.invited - state.delivered.keys():
            return state
        certificate = self._certificate(state.delivered)
        return EpochOpened(link=at, last=state.last, total=state.total, certificate=certificate)

    def _certificate(self, delivered: Mapping[ClientId, Delivered]) -> DeliveryCertificate:
        members = self.setup.group.members
        return DeliveryCertificate(entries=tuple(delivered[member] for member in members))

    def _check_statement(
        self, found: Delivered, state: AwaitingKeys | CollectingVectors, epoch: int, link: bytes
    ) -> None:
        sender = found.sender
        if sender in state.delivered:
            raise self._refuse(sender, f"sent a second key or vector of epoch {epoch}")
        if (found.epoch, found.link) != (epoch, link):
            raise self._refuse(sender, f"signed another epoch or chain, epoch {epoch} is open")
        if not found.is_signed(self.setup.group):
            raise self._refuse(sender, "sent an invalid signature")
        taken = {other.mask_key for other in state.delivered.values()}
        if not is_public_key(found.mask_key) or found.mask_key in taken:
            raise self._refuse(sender, "sent an invalid mask key, or another member's")


SERVER_STEPS: Final[Steps] = {
    (AwaitingKeys, Deposit): GroupServer._take_deposit,
    (AwaitingKeys, Fetch): GroupServer._too_early,
    (EpochFixed, Deposit): GroupServer._late,
    (EpochFixed, Fetch): GroupServer._first_fetch,
    (EpochFixed, Delivery): GroupServer._first_delivery,
    (CollectingVectors, Deposit): GroupServer._late,
    (CollectingVectors, Fetch): GroupServer._later_fetch,
    (CollectingVectors, Delivery): GroupServer._take_delivery,
    (EpochOpened, Deposit): GroupServer._late,
    (EpochOpened, Fetch): GroupServer._later_fetch,
    (EpochOpened, Delivery): GroupServer._late,
    **{(state, Leave): GroupServer._left for state in GroupServer.STATES},
}
GroupServer.STEPS = SERVER_STEPS
