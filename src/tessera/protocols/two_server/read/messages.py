"""Messages of a retrieval; the handshake and the sealed box are in `protocols/two_server/`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tessera import wire
from tessera.ids import ClientId
from tessera.protocols.two_server.messages import (
    MAX_BOX,
    Blob,
    Blobs,
    ClientField,
    Digest,
    Round,
    Seeds,
    Signature,
)
from tessera.protocols.two_server.params import MAX_COHORT

Digests = Annotated[dict[ClientId, bytes], wire.ByKey(wire.U32, wire.KEY, MAX_COHORT)]


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
    queries: Digests = field(repr=False)


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
