"""Messages of two servers and their clients before anything is read or written.

Bytes and arrays stay out of `repr`. The flow is in `docs/protocols/two-servers.md`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Annotated, Final

from tessera import wire
from tessera.crypto.dpf import SEED_BYTES
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.ids import ClientId, RoundId, TableId
from tessera.protocols.two_server.params import MAX_TABLES

Round = Annotated[RoundId, wire.U64]
ClientField = Annotated[ClientId, wire.U32]
Digest = Annotated[bytes, wire.KEY]
Signature = Annotated[bytes, wire.SIGNATURE]
Blob = Annotated[bytes, wire.PartUpTo(wire.DEFAULT_CAP)]
Blobs = Annotated[tuple[bytes, ...], wire.Sequence(wire.PartUpTo(wire.DEFAULT_CAP), MAX_TABLES)]
Seeds = Annotated[tuple[bytes, ...], wire.Sequence(wire.Exactly(SEED_BYTES), MAX_TABLES)]

MAX_BOX: Final = 1 << 16
"""A sealed box holds seeds and digests, and no rows."""


class Purpose(Enum):
    """What a client's keys are for. They are never for both."""

    RETRIEVE = "retrieve"
    WRITE = "write"


@wire.record(tag=0x0401)
@dataclass(frozen=True, kw_only=True)
class Header:
    """What both servers sign before clients send anything: one round, one seed, one model.

    A table's digest is of its rows as they are read; the seed of the bins is made from both nonces.
    `period` is the round whose keys are written with: this one, or an earlier one whose seed of
    bins is `bins`.
    """

    round_id: Round
    context: Digest = field(repr=False)
    leader_nonce: Digest = field(repr=False)
    helper_nonce: Digest = field(repr=False)
    tables: Annotated[dict[TableId, bytes], wire.ByKey(wire.U16, wire.KEY, MAX_TABLES)] = field(
        repr=False
    )
    dense: Digest = field(repr=False)
    period: Round
    bins: Annotated[bytes | None, wire.Maybe(wire.KEY)] = field(default=None, repr=False)

    @property
    def epoch(self) -> int:
        """How many rounds ago the keys were made that are written with."""
        return int(self.round_id) - int(self.period)

    @property
    def write_seed(self) -> bytes:
        """The seed of the bins that are written to."""
        return self.seed if self.bins is None else self.bins

    @cached_property
    def seed(self) -> bytes:
        parts = (self.context, self.leader_nonce, self.helper_nonce)
        return hashlib.sha256(encode_context(Label.BIN_SEED, *parts)).digest()

    @cached_property
    def digest(self) -> bytes:
        """Everything in a report is bound to it."""
        return wire.digest(self)

    @property
    def statement(self) -> bytes:
        """What is signed."""
        return encode_context(Label.HEADER, self.digest)


@wire.record(tag=0x0402)
@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeOffer:
    """Leader to helper: a commitment to its nonce, and the digests of the model that it holds."""

    round_id: Round
    context: Digest = field(repr=False)
    commitment: Digest = field(repr=False)
    tables: Annotated[dict[TableId, bytes], wire.ByKey(wire.U16, wire.KEY, MAX_TABLES)] = field(
        repr=False
    )
    dense: Digest = field(repr=False)


@wire.record(tag=0x0403)
@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeNonce:
    """Helper to leader: its nonce. The leader's is fixed by now. `period` is the round of the keys
    that it would write with: those it holds, or this one."""

    round_id: Round
    nonce: Digest = field(repr=False)
    period: Round


@wire.record(tag=0x0404)
@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeReveal:
    """Leader to helper: the nonce it has committed to, and its signature on the header."""

    round_id: Round
    nonce: Digest = field(repr=False)
    signature: Signature = field(repr=False)


@wire.record(tag=0x0405)
@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeConsent:
    """Helper to leader: its signature on the same header."""

    round_id: Round
    signature: Signature = field(repr=False)


@wire.record(tag=0x0406)
@dataclass(frozen=True, slots=True, kw_only=True)
class SignedHeader:
    """Leader to clients: the header with both signatures."""

    header: Header
    leader: Signature = field(repr=False)
    helper: Signature = field(repr=False)


@wire.record(tag=0x0410)
@dataclass(frozen=True, slots=True, kw_only=True)
class HelperBox:
    """What a client seals to the helper: its private part, and what it belongs to, signed.

    `public` is the digest of the part that both servers hold; `answer_key` is where the helper's
    answer goes, in retrieval.
    """

    purpose: Annotated[Purpose, wire.choice(Purpose)]
    round_id: Round
    plan_hash: Digest = field(repr=False)
    header: Digest = field(repr=False)
    sender: ClientField
    report_id: Digest = field(repr=False)
    public: Digest = field(repr=False)
    seeds: Seeds = field(repr=False)
    dense_seed: Annotated[Secret | None, wire.Maybe(wire.SECRET)] = field(repr=False)
    answer_key: Annotated[bytes | None, wire.Maybe(wire.KEY)] = field(repr=False)
    signature: Signature = field(repr=False)


@wire.record(tag=0x0411)
@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """Leader to helper: a client's public part and the box that is for the helper."""

    purpose: Annotated[Purpose, wire.choice(Purpose)]
    round_id: Round
    sender: ClientField
    report_id: Digest = field(repr=False)
    public: Blobs = field(repr=False)
    box: Annotated[bytes, wire.UpTo(MAX_BOX)] = field(repr=False)
