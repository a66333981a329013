"""A member of a fixed group, through all its epochs.

It comes when it can, fetches, checks, computes its words with coins from the epoch's root, and
delivers once. Its carrier stores the snapshot before it sends anything: what was stored is sent
again as it is, and never computed again. The root of an epoch is gone from the state that has the
epoch's bytes, and the bytes are gone once the certificate has come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.keys import SigningKey
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, ServerFault
from tessera.ids import SERVER, ClientId, Party
from tessera.protocols.epochs import messages
from tessera.protocols.epochs.group import MAX_GROUP, FixedGroup, OfGroup
from tessera.protocols.epochs.messages import (
    FROM_GROUP_SERVER,
    NO_VECTOR,
    Assignment,
    ComeBack,
    Delivered,
    Delivery,
    Deposit,
    EpochHeader,
    EpochLink,
    Fetch,
    Leave,
    follows,
    link,
)
from tessera.protocols.machine import (
    Follower,
    Left,
    Moved,
    Outbound,
    Over,
    RoundOutcome,
    Steps,
    shortened,
)
from tessera.wire.stored import ByDigest, Kept


@wire.record(tag=0x0780)
@dataclass(frozen=True, slots=True, kw_only=True)
class Deposited:
    """Its mask key for epoch 1 is sent."""

    root: Annotated[Secret, wire.SECRET]
    deposit: Annotated[Kept[Deposit], ByDigest(Deposit)]


@wire.record(tag=0x0781)
@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Epoch e is checked, and the one before it certified; the caller's words are due.

    `root` is that of e, `keys` everybody's mask keys for it.
    """

    link: EpochLink
    root: Annotated[Secret, wire.SECRET]
    keys: Annotated[tuple[bytes, ...], wire.Sequence(wire.KEY, MAX_GROUP)] = field(repr=False)


@wire.record(tag=0x0782)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingCertificate:
    """Epoch e is delivered; `root` is that of e + 1."""

    link: EpochLink
    root: Annotated[Secret, wire.SECRET]
    delivery: Annotated[Kept[Delivery], ByDigest(Delivery)]


@dataclass(frozen=True, kw_only=True)
class MemberSetup(OfGroup):
    """A member, its group, and the key that the group's leaf of it names."""

    group: FixedGroup
    party: ClientId
    key: SigningKey

    def __post_init__(self) -> None:
        if self.party not in self.group.members:
            raise ConfigError(f"client {self.party} is not in group {self.group.number}")
        if self.group.key_of(self.party) != self.key.public:
            raise ConfigError(f"client {self.party}: another signing key than the group's leaf has")

    @property
    def leave(self) -> Leave:
        """What it says when it is out, for whatever reason: always the same."""
        return Leave(sender=self.party, group=self.group.digest).signed(self.key)


class GroupMember(Follower[MemberSetup]):
    """One member in the life of its group: bytes in, bytes out, and a state that can be stored.

    Any fault of the server's ends it for good: the group opens nothing without it.
    """

    ROLE = "member of a fixed group"
    STATES = (Deposited, Assigned, AwaitingCertificate, Left)
    FROM_SERVER = FROM_GROUP_SERVER

    @classmethod
    def join(cls, setup: MemberSetup, *, entropy: Entropy) -> tuple[Self, list[Outbound]]:
        """Once in a group's life: draw the first epoch's root and deposit its mask key."""
        group, me = setup.group, setup.party
        root = messages.fresh_root(entropy, group, me, 1)
        joined = Delivered(
            sender=me,
            epoch=0,
            link=group.digest,
            vector=NO_VECTOR,
            mask_key=messages.mask_key(root).public,
        )
        deposit = Kept.of(Deposit(statement=joined.signed(group, setup.key)))
        member = cls(setup, Deposited(root=root, deposit=deposit))
        return member, member.resend()

    # -- what its caller reads

    @property
    def expected(self) -> frozenset[Party]:
        waits = isinstance(self.state, Deposited | AwaitingCertificate)
        return frozenset({SERVER}) if waits else frozenset()

    @property
    def delivered(self) -> int:
        """The last epoch whose words it has sent, or 0."""
        match self.state:
            case Assigned(link=at):
                return at.header.epoch - 1
            case AwaitingCertificate(link=at):
                return at.header.epoch
            case Deposited():
                return 0
        raise MisuseError(f"no epoch in state {self.phase}")

    @property
    def settled(self) -> int:
        """The last epoch whose certificate it has verified, or 0: what its caller may keep."""
        return max(0, self.delivered - isinstance(self.state, AwaitingCertificate))

    @property
    def due(self) -> EpochHeader | None:
        """The epoch that words are due for, if one is."""
        return self.state.link.header if isinstance(self.state, Assigned) else None

    @property
    def coins(self) -> RootedEntropy:
        """Where everything that is drawn for the epoch that is due comes from."""
        return messages.coins(self._assigned.root)

    @property
    def _assigned(self) -> Assigned:
        if not isinstance(self.state, Assigned):
            raise MisuseError(f"no words are due in state {self.phase}")
        return self.state

    # -- what its caller does

    def fetch(self, visit: int, *, told: bool = True) -> list[Outbound]:
        """Ask what is due. `visit` is a number that was not used before; nothing changes here.

        Not `told`: the server may not have the last delivery. Then it asks as one that has not made
        it yet: whether it has, by now, depends on how long its data took it.
        """
        delivered = self.delivered if told else self.settled
        question = Fetch(sender=self.setup.party, delivered=delivered, visit=visit)
        return [Outbound.of(SERVER, question)]

    def deliver(self, words: npt.NDArray[Any], *, entropy: Entropy) -> list[Outbound]:
        """Mask and sign the words of the epoch that is due; draw the next epoch's root.

        `MisuseError` for words that do not fit leaves the state as it was. Afterwards the epoch's
        own root, and with it mask key and coins, is no longer there.
        """
        at, me, group = self._assigned, self.setup.party, self.setup.group
        header, ring = at.link.header, at.link.header.ring
        words = np.asarray(words)
        if words.shape != (header.length, *ring.limbs) or not ring.contains(words):
            raise MisuseError(f"epoch {header.epoch}: not {header.length} words of {ring.name}")
        following = messages.fresh_root(entropy, group, me, header.epoch + 1)
        vector = wire.HashedBytes(
            ring.pack(messages.masked(words, at.link, group, me, at.root, at.keys))
        )
        statement = Delivered(
            sender=me,
            epoch=header.epoch,
            link=at.link.digest,
            vector=vector.digest,
            mask_key=messages.mask_key(following).public,
        )
        kept = Kept.of(Delivery(statement=statement.signed(group, self.setup.key), vector=vector))
        self._move(AwaitingCertificate(link=at.link, root=following, delivery=kept), b"")
        return self.resend()

    def resend(self) -> list[Outbound]:
        """What it has stored and the server may not have: the same bytes."""
        match self.state:
            case Deposited(deposit=kept) | AwaitingCertificate(delivery=kept):
                return [Outbound.again(SERVER, kept.data)]
        return []

    def leave(self, reason: str) -> ServerFault:
        """For good: what came beside an assignment is not what it should be. To be raised."""
        fault = self._fault(reason)
        if not isinstance(self.state, Left | Over):
            self._end(Left(reason=shortened(reason)))
        return fault

    def withdraw(self, reason: str) -> list[Outbound]:
        """For good, by its own will or at its own deadline: erase the mask key that was not used,
        with the root of its coins, and tell the server."""
        self.over(RoundOutcome.ABORTED, reason)
        return [Outbound.of(SERVER, self.setup.leave)]

    # -- steps

    def _first(self, state: Deposited, kept: Kept[Assignment]) -> Moved:
        """Epoch 1, with everybody's deposits."""
        deposited = state.deposit.message.statement
        return self._following(kept.message, None, deposited, state.root), []

    def _next(self, state: AwaitingCertificate, kept: Kept[Assignment]) -> Moved:
        """Epoch e + 1 with the certificate of e; or e again, and then the same bytes again."""
        message, at, delivered = kept.message, state.link, state.delivery.message.statement
        if message.header.epoch != at.header.epoch:
            return self._following(message, at.header, delivered, state.root), []
        if message.header != at.header or wire.digest(message.certificate) != at.certificate:
            raise self._fault(f"changed epoch {at.header.epoch} after it was delivered")
        if message.own not in (None, delivered):
            raise self._fault(f"has another delivery of epoch {at.header.epoch}: {SET_BACK}")
        return state, [] if message.own else self.resend()

    def _again(self, state: Assigned, kept: Kept[Assignment]) -> Moved:
        """The epoch that it has, or another in its place: no bytes are stored for it yet."""
        message, at = kept.message, state.link
        header, due = message.header, at.header
        self._check_memory(message)
        if (header.epoch, header.period) != (due.epoch, due.period):
            raise self._fault(f"assigned {_named(header)}, {_named(due)} is due")
        if wire.digest(message.certificate) != at.certificate:
            raise self._fault(f"has two certificates of epoch {due.epoch - 1}")
        return (state if header == due else self._assign(message, at.previous, state.root)), []

    def _wait(self, state: Any, kept: Kept[ComeBack]) -> Moved:
        """Nothing is due."""
        return state, []

    def _following(
        self, message: Assignment, last: EpochHeader | None, delivered: Delivered, root: Secret
    ) -> Assigned:
        """The epoch after the one that this member has delivered, which is certified."""
        group, certificate = self.setup.group, message.certificate
        self._check_memory(message)
        if not follows(last, message.header):
            found = _named(last) if last else "no epoch"
            raise self._fault(f"assigned {_named(message.header)} after {found}")
        if fault := certificate.fault(group, delivered.epoch, delivered.link):
            raise self._fault(f"sent a certificate with {fault}")
        if certificate.entries[group.members.index(self.setup.party)] != delivered:
            raise self._fault(f"has another delivery of epoch {delivered.epoch}: {SET_BACK}")
        return self._assign(message, delivered.link, root)

    def _assign(self, message: Assignment, previous: bytes, root: Secret) -> Assigned:
        certificate = wire.digest(message.certificate)
        return Assigned(
            link=link(previous, self.setup.group, message.header, certificate),
            root=root,
            keys=tuple(entry.mask_key for entry in message.certificate.entries),
        )

    def _check_memory(self, message: Assignment) -> None:
        """Whether the server shows a delivery of this member's that it does not remember."""
        shown = [entry for entry in message.certificate.entries if entry.epoch > self.delivered]
        for one in (*shown, *([message.own] if message.own else [])):
            if one.sender == self.setup.party and one.is_signed(self.setup.group):
                raise self._fault(f"has a delivery of epoch {one.epoch}: {SET_BACK}")
        if message.own:
            raise self._fault("shows a delivery that is not this member's")

    def _move(self, following: Any, mark: bytes) -> None:
        if isinstance(following, Assigned) and not isinstance(self.state, Assigned):
            self._handled = set()  # what was said in the epochs before is not repeated
        super()._move(following, mark)


SET_BACK: Final = "this member's state was set back"


def _named(header: EpochHeader) -> str:
    return f"epoch {header.epoch} of period {header.period}"


MEMBER_STEPS: Final[Steps] = {
    (Deposited, Assignment): GroupMember._first,
    (Deposited, ComeBack): GroupMember._wait,
    (Assigned, Assignment): GroupMember._again,
    (Assigned, ComeBack): GroupMember._wait,
    (AwaitingCertificate, Assignment): GroupMember._next,
    (AwaitingCertificate, ComeBack): GroupMember._wait,
}
GroupMember.STEPS = MEMBER_STEPS
