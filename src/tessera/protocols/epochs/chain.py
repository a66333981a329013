"""The hash chain of a group: h_e binds everything that members must agree on in epoch e.

h_0 is the group's digest. h_e follows from h_(e-1) and from all that was received for e and that
what is sent may depend on. Pair masks and signatures of e name h_e: members that were sent
different things have masks that do not cancel, and no certificate covers them both. There is one
chain in a group's life, through unions, updates and periods, so that nobody can be left behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

import numpy as np

from tessera import wire
from tessera.crypto import prg
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.group import Group, Words
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.protocols.epochs.group import FixedGroup

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
