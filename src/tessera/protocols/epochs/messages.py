"""What members and the server of a group say, and what members sign.

    member -> server   Deposit      once: its mask key for epoch 1
    member -> server   Fetch        whenever it comes
    server -> member   Assignment   the epoch that is open, and the certificate of the last one
    server -> member   ComeBack     nothing is due
    member -> server   Delivery     one masked vector, its signature, its mask key for the next one
    member -> server   Leave        at any time: it is out for good, and so the group is retired

A signature "delivered" over epoch e is two things at once: with those of all others a certificate
that e was delivered by everybody under one h_e, and the signature over the member's mask key for
e + 1, which names federation, group, e and h_e. What kind of epoch e + 1 is nobody knows by then.

A fetch has a number that its sender has not used before (a carrier's count or clock), and its
answer has the same: a second fetch is another question and not a repetition of the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from tessera import wire
from tessera.crypto.keys import SigningKey, is_public_key, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.ids import ClientId
from tessera.protocols.epochs.chain import MAX_VECTOR_BYTES, EpochHeader
from tessera.protocols.epochs.group import MAX_GROUP, FixedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A member's signature that it has delivered epoch e: which bytes, and its next mask key.

    Epoch 0 is that it has joined: it names h_0, and there are no bytes.
    """

    sender: Annotated[ClientId, wire.U32]
    epoch: Annotated[int, wire.U64]
    link: Annotated[bytes, wire.KEY] = field(repr=False)
    """h_e."""
    vector: Annotated[bytes, wire.KEY] = field(repr=False)
    """SHA-256 of the packed masked words."""
    mask_key: Annotated[bytes, wire.KEY] = field(repr=False)
    """X25519, public, for epoch e + 1."""
    signature: Annotated[bytes, wire.SIGNATURE] = field(default=bytes(64), repr=False)

    def signed(self, group: FixedGroup, key: SigningKey) -> Delivered:
        return replace(self, signature=key.sign(self._text(group)))

    def is_signed(self, group: FixedGroup) -> bool:
        """By the member that it names, for this group."""
        return verify(group.key_of(self.sender), self.signature, self._text(group))

    def _text(self, group: FixedGroup) -> bytes:
        named = (group.federation, group.digest, self.epoch, self.link)
        return encode_context(Label.DELIVERED, *named, self.sender, self.vector, self.mask_key)


NO_VECTOR: Final = bytes(32)


@wire.record(tag=0x0710)
@dataclass(frozen=True, slots=True, kw_only=True)
class Deposit:
    """Member to server, once: it has joined, and its mask key for epoch 1."""

    statement: Delivered

    @property
    def sender(self) -> ClientId:
        return self.statement.sender


@wire.record(tag=0x0711)
@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryCertificate:
    """All g members have delivered epoch e under one h_e, in the order of the leaves; with it come
    everybody's mask keys for e + 1. That of epoch 0 is what all have deposited."""

    entries: Annotated[tuple[Delivered, ...], wire.Sequence(wire.Nested(Delivered), MAX_GROUP)]

    def fault(self, group: FixedGroup, epoch: int, link: bytes) -> str:
        """What is wrong with it as the certificate of this epoch, or nothing."""
        if len(self.entries) != group.size:
            return f"{len(self.entries)} signatures, {group.size} are needed"
        if tuple(entry.sender for entry in self.entries) != group.members:
            return "a foreign or doubled signature, or another order"
        if any((entry.epoch, entry.link) != (epoch, link) for entry in self.entries):
            return f"a signature of another epoch or chain, that of epoch {epoch} is due"
        if not all(entry.is_signed(group) for entry in self.entries):
            return "an invalid signature"
        keys = {entry.mask_key for entry in self.entries}
        if len(keys) < group.size or not all(map(is_public_key, keys)):
            return "an invalid mask key, or the same twice"
        return ""


@wire.record(tag=0x0712)
@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Member to server: what is due? `delivered` is the last epoch that it has delivered, or 0."""

    sender: Annotated[ClientId, wire.U32]
    delivered: Annotated[int, wire.U64]
    visit: Annotated[int, wire.U64]


@wire.record(tag=0x0713)
@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Server to member: epoch e is open.

    `own` is the member's own signature over e where the server has it: a member that does not
    remember it has been restored to an earlier state.
    """

    visit: Annotated[int, wire.U64]
    header: EpochHeader
    certificate: DeliveryCertificate
    """Of epoch e - 1."""
    own: Annotated[Delivered | None, wire.Maybe(wire.Nested(Delivered))]


@wire.record(tag=0x0714)
@dataclass(frozen=True, slots=True, kw_only=True)
class ComeBack:
    """Server to member: nothing is due; ask again after so many seconds. Not who is missing."""

    visit: Annotated[int, wire.U64]
    seconds: Annotated[int, wire.U32]


@wire.record(tag=0x0715)
@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Member to server: its words of epoch e under the masks with all others, and its signature."""

    statement: Delivered
    vector: Annotated[bytes, wire.PartUpTo(MAX_VECTOR_BYTES)] = field(repr=False)

    @property
    def sender(self) -> ClientId:
        return self.statement.sender


@wire.record(tag=0x0716)
@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Member to server: it is out of this group for good, and its key is erased. Not why."""

    sender: Annotated[ClientId, wire.U32]
    group: Annotated[bytes, wire.KEY] = field(repr=False)
    """h_0: a leave counts in one group's life."""
    signature: Annotated[bytes, wire.SIGNATURE] = field(default=bytes(64), repr=False)

    def signed(self, key: SigningKey) -> Leave:
        return replace(self, signature=key.sign(self._text))

    def fault(self, group: FixedGroup) -> str:
        """What is wrong with it in this group, or nothing."""
        if self.group != group.digest:
            return "left another group"
        known = verify(group.key_of(self.sender), self.signature, self._text)
        return "" if known else "sent an invalid signature"

    @property
    def _text(self) -> bytes:
        return encode_context(Label.LEFT_GROUP, self.group, self.sender)


FROM_MEMBER: Final = (Deposit, Fetch, Delivery, Leave)
FROM_GROUP_SERVER: Final = (Assignment, ComeBack)
