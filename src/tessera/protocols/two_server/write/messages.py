"""Messages of a private write; the handshake and the sealed box are in `protocols/two_server/`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.ids import ClientId, TableId
from tessera.protocols.secagg.messages import MAX_ROWS
from tessera.protocols.two_server.inbox import Reasons
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
from tessera.protocols.two_server.params import MAX_COHORT, MAX_TABLES
from tessera.wire.index_set import IndexSet

Listed = Annotated[dict[ClientId, bytes], wire.ByKey(wire.U32, wire.KEY, MAX_COHORT)]


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
