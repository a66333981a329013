"""The states of a client's round between two servers, and in them its roles in the protocols.

Each has exactly the fields that exist in it. `client.py` has the steps between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final

from tessera import wire
from tessera.protocols.two_server.messages import SignedHeader
from tessera.rounds import sums
from tessera.rounds.messages import RowsByTable
from tessera.rounds.root import StoredRoot
from tessera.rounds.two_server import shared_sum
from tessera.rounds.two_server.domain import StoredDomain
from tessera.wire.stored import ByDigest, Inner, Kept

UnionSum = Annotated[sums.SumClient | None, wire.Maybe(Inner("sum"))]
"""None where tables are not narrowed to a union."""
Reader = Annotated[shared_sum.RowReader, Inner("reader")]
Writer = Annotated[shared_sum.RowWriter, Inner("writer")]
KeptHeader = Annotated[Kept[SignedHeader], ByDigest(SignedHeader)]


@wire.record(tag=0x02B0)
@dataclass(frozen=True, slots=True, kw_only=True)
class NotJoined:
    """Nothing is charged and nothing sent."""


@wire.record(tag=0x02B1)
@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingIds:
    """Takes part in the union's sum; waits for the union."""

    root: StoredRoot
    sum: Annotated[sums.SumClient, Inner("sum")]


@wire.record(tag=0x02B2)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingHeader:
    """Knows the rows that the round is about; waits for the header that both servers signed."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    reader: Reader


@wire.record(tag=0x02B3)
@dataclass(frozen=True, slots=True, kw_only=True)
class FetchingRows:
    """Has asked for its `rows` of root tables; waits for both servers' answers."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    header: KeptHeader
    rows: RowsByTable = field(repr=False)
    reader: Reader


@wire.record(tag=0x02B4)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Has something to train (`pending`); waits for its caller's update."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    header: KeptHeader
    rows: RowsByTable = field(repr=False)
    reader: Reader


@wire.record(tag=0x02B5)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWritten:
    """Its report is out; nothing more is due."""

    sum: UnionSum
    domain: StoredDomain
    writer: Writer


AT_WORK: Final = (OfferingIds, AwaitingHeader, FetchingRows, TrainingRows, RowsWritten)
