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

The hash chain of a group: h_e binds everything that members must agree on in epoch e.

h_0 is the group's digest. h_e follows from h_(e-1) and from all that was received for e and that
what is sent may depend on. Pair masks and signatures of e name h_e: members that were sent
different things have masks that do not cancel, and no certificate covers them both. There is one
chain in a group's life, through unions, updates and periods, so that nobody can be left behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Final

import numpy as np

from tessera import wire
from tessera.crypto import prg
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.group import Group, Words
from tessera.crypto.keys import AgreementKey, SigningKey, is_public_key, verify
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.protocols.epochs.group import MAX_GROUP, FixedGroup

MAX_INPUTS: Final = 64
MAX_VECTOR_BYTES: Final = wire.DEFAULT_CAP - 4096
"""Of a packed vector: what a message takes, less the rest of it."""


class EpochKind(Enum):
    """What an epoch's vectors are."""

    UNION = "union"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochHeader:
    """What the server fixes of an epoch before it tells anybody.

    `inputs` are the digests of everything that members receive for this epoch and that what they
    send may depend on, by name (record, salt, base, union, code, dictionary, maps, counts, ...);
    the contents travel beside it. `ring` is what the vectors are summed in, Z_2^b or F_p.
    """

    period: Annotated[int, wire.U32]
    """From 1."""
    kind: Annotated[EpochKind, wire.choice(EpochKind)]
    epoch: Annotated[int, wire.U64]
    """From 1, through all periods."""
    ring: Annotated[Group, wire.GROUP]
    length: Annotated[int, wire.VARINT]
    """Words of a vector."""
    inputs: Annotated[Mapping[str, bytes], wire.ByKey(wire.TEXT, wire.KEY, MAX_INPUTS)] = field(
        repr=False
    )

    def __post_init__(self) -> None:
        if self.period < 1 or self.epoch < 1:
            raise ConfigError("epochs and periods count from 1")
        if not 1 <= self.length * self.ring.bits <= 8 * MAX_VECTOR_BYTES:
            raise ConfigError(f"epoch {self.epoch}: vectors of {self.length} words")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLink:
    """Epoch e in the chain. `certificate` is the digest of that of e - 1, with its mask keys."""

    previous: Annotated[bytes, wire.KEY] = field(repr=False)
    header: EpochHeader
    certificate: Annotated[bytes, wire.KEY] = field(repr=False)
    digest: Annotated[bytes, wire.KEY] = field(repr=False)
    """h_e."""


def link(previous: bytes, group: FixedGroup, header: EpochHeader, certificate: bytes) -> EpochLink:
    """Epoch e after h_(e-1); every party computes it from what it has received itself."""
    named = encode_context(
        Label.EPOCH_LINK,
        previous,
        group.federation,
        group.plan,
        group.digest,
        header.period,
        header.kind.value,
        header.epoch,
        header.ring.name,
        header.length,
        certificate,
        *received(header),
    )
    digest = hashlib.sha256(named).digest()
    return EpochLink(previous=previous, header=header, certificate=certificate, digest=digest)


def received(header: EpochHeader) -> list[str | bytes]:
    """The names and digests of what came for this epoch, in one order for everybody."""
    return [part for name in sorted(header.inputs) for part in (name, header.inputs[name])]


def follows(last: EpochHeader | None, header: EpochHeader) -> bool:
    """Whether an epoch may come after this one: the next number, in its period or the next one."""
    if last is None:
        return header.epoch == 1 and header.period == 1
    return header.epoch == last.epoch + 1 and header.period - last.period in (0, 1)


# --- masks ----------------------------------------------------------------------------------------
#
# A member's words of one epoch under the masks that it shares with every other member.
#
# An epoch's root is drawn once. The mask key and all coins of the epoch (of training, rounding and
# the union's words) follow from it, so that they are stored, restored and erased together: a member
# that computed its words again under the same masks would show which of them changed.


def fresh_root(entropy: Entropy, group: FixedGroup, me: ClientId, epoch: int) -> Secret:
    """Independent of every other epoch's."""
    return entropy.secret(Label.EPOCH_ROOT, group.federation, group.digest, me, epoch)


def mask_key(root: Secret) -> AgreementKey:
    return AgreementKey.from_secret(root.derive(Label.EPOCH_MASK_KEY))


def coins(root: Secret) -> RootedEntropy:
    """What a member draws from in this epoch; the mask key does not follow from it."""
    return RootedEntropy(root.derive(Label.EPOCH_COINS))


def masked(
    words: Words,
    link: EpochLink,
    group: FixedGroup,
    me: ClientId,
    root: Secret,
    keys: tuple[bytes, ...],
) -> Words:
    """The words plus the masks with peers of larger ids, minus those with peers of smaller ones.

    `keys` are all members' mask keys of this epoch, in the order of the leaves. A pair's mask
    follows from its agreement, both ids, both keys and h_e: it cancels between two members only if
    they received the same for this epoch, and in every epoch before.
    """
    own = mask_key(root)
    streams, signs = [], []
    for peer, key in zip(group.members, keys, strict=True):
        if peer == me:
            continue
        pair = [(me, own.public), (peer, key)]
        (low, low_key), (high, high_key) = sorted(pair)
        secret = own.agree(key, Label.EPOCH_PAIR, link.digest, low, high, low_key, high_key)
        streams.append(Stream.of(secret, Label.EPOCH_MASK))
        signs.append(1 if me == low else -1)
    total: Words = np.array(words, dtype=link.header.ring.dtype)
    prg.accumulate(link.header.ring, total, streams, signs)
    return total


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
