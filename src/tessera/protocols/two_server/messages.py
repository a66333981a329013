"""Messages of two servers and their clients: the handshake, reports, reading and writing.

Bytes and arrays stay out of `repr`. The flow is in `docs/protocols/two-servers.md`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.dpf import SEED_BYTES
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.ids import ClientId, RoundId, TableId
from tessera.protocols.secagg.messages import MAX_ROWS
from tessera.protocols.two_server.params import MAX_COHORT, MAX_TABLES
from tessera.wire.index_set import IndexSet

Round = Annotated[RoundId, wire.U64]
ClientField = Annotated[ClientId, wire.U32]
Digest = Annotated[bytes, wire.KEY]
Signature = Annotated[bytes, wire.SIGNATURE]
Blob = Annotated[bytes, wire.PartUpTo(wire.DEFAULT_CAP)]
Blobs = Annotated[tuple[bytes, ...], wire.Sequence(wire.PartUpTo(wire.DEFAULT_CAP), MAX_TABLES)]
Seeds = Annotated[tuple[bytes, ...], wire.Sequence(wire.Exactly(SEED_BYTES), MAX_TABLES)]
Listed = Annotated[dict[ClientId, bytes], wire.ByKey(wire.U32, wire.KEY, MAX_COHORT)]
Reasons = Annotated[dict[ClientId, str], wire.ByKey(wire.U32, wire.TEXT, MAX_COHORT)]

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


# --- reading --------------------------------------------------------------------------------------


@wire.record(tag=0x0501)
@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Client to leader: keys for every bin, the leader's seeds, and a box for the helper."""

    round_id: Round
    sender: ClientField
    report_id: Digest = field(repr=False)
    public: Blobs = field(repr=False)
    seeds: Seeds = field(repr=False)
    box: Annotated[bytes, wire.UpTo(MAX_BOX)] = field(repr=False)


@wire.record(tag=0x0502)
@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersDue:
    """Leader to helper: no more queries come; whose answers are due, by digest of their query."""

    round_id: Round
    queries: Listed = field(repr=False)


@wire.record(tag=0x0503)
@dataclass(frozen=True, slots=True, kw_only=True)
class HelperAnswer:
    """Helper to leader, for a client: sealed to the client's one-time key; empty if refused."""

    round_id: Round
    client: ClientField
    box: Blob = field(repr=False)


@wire.record(tag=0x0504)
@dataclass(frozen=True, slots=True, kw_only=True)
class SealedAnswer:
    """What is in the helper's box: its half of every bin, by table, and its signature."""

    tables: Blobs = field(repr=False)
    signature: Signature = field(repr=False)


@wire.record(tag=0x0505)
@dataclass(frozen=True, slots=True, kw_only=True)
class QueryAnswers:
    """Leader to client: its own half by table, or the table where it is read whole; the dense part;
    and the helper's box."""

    round_id: Round
    report_id: Digest = field(repr=False)
    tables: Blobs = field(repr=False)
    dense: Blob = field(repr=False)
    box: Blob = field(repr=False)


# --- writing --------------------------------------------------------------------------------------


@wire.record(tag=0x0601)
@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """Client to leader: keys for all bins, the leader's seeds and plain share, the helper's box."""

    round_id: Round
    sender: ClientField
    report_id: Digest = field(repr=False)
    public: Blobs = field(repr=False)
    seeds: Seeds = field(repr=False)
    dense: Blob = field(repr=False)
    box: Annotated[bytes, wire.UpTo(MAX_BOX)] = field(repr=False)


@wire.record(tag=0x0602)
@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Leader to helper: collection is over; every report it has forwarded, by digest."""

    round_id: Round
    reports: Listed = field(repr=False)


@wire.record(tag=0x0607)
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCoin:
    """Helper to leader: what the coefficients of the check follow from; reports are fixed now."""

    round_id: Round
    coin: Digest = field(repr=False)


@wire.record(tag=0x0608)
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSums:
    """Leader to helper: its sums of tags, for every report that it has named."""

    round_id: Round
    sums: Listed = field(repr=False)


@wire.record(tag=0x0603)
@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusions:
    """Helper to leader: which of these reports are left out, and why.

    It does not hold them, or the two servers' sums of tags differ.
    """

    round_id: Round
    reasons: Reasons


@wire.record(tag=0x0604)
@dataclass(frozen=True, slots=True, kw_only=True)
class IncludedList:
    """Leader to helper: the one list of this round, signed."""

    round_id: Round
    reports: Listed = field(repr=False)
    signature: Signature = field(repr=False)


@wire.record(tag=0x0605)
@dataclass(frozen=True, slots=True, kw_only=True)
class SumShare:
    """Helper to leader: its share of the sum over that list, signed with the list."""

    round_id: Round
    dense: Blob = field(repr=False)
    tables: Blobs = field(repr=False)
    signature: Signature = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRows:
    """The rows of a table that some client wrote: indices into the domain, and packed words."""

    table: Annotated[TableId, wire.U16]
    rows: Annotated[npt.NDArray[np.uint64], IndexSet(MAX_ROWS)] = field(repr=False)
    words: Blob = field(repr=False)


@wire.record(tag=0x0606)
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSum:
    """Leader to helper: the sum, so that both continue with the same model."""

    round_id: Round
    dense: Blob = field(repr=False)
    tables: Annotated[
        tuple[OpenedRows, ...], wire.Sequence(wire.Nested(OpenedRows), MAX_TABLES)
    ] = field(repr=False)
    signature: Signature = field(repr=False)
