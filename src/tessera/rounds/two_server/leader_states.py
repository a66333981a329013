"""The states of the leader's round: what it has come to, and in them its roles in the protocols.

Each has exactly the fields that exist in it. `leader.py` has the steps between them. A role that is
done stays inside the state until the round is over: it recognises what is sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tessera import wire
from tessera.protocols.two_server.write.sums import NoiseSecret
from tessera.rounds.root import StoredRoot
from tessera.rounds.sums import SumServer
from tessera.rounds.two_server import shared_sum
from tessera.rounds.two_server.domain import StoredDomain
from tessera.wire.stored import Inner

UnionSum = Annotated[SumServer, Inner("sum")]
Handshake = Annotated[shared_sum.LeaderAgreement, Inner("handshake")]
Retrieval = Annotated[shared_sum.LeaderRetrieval, Inner("retrieval")]
Writing = Annotated[shared_sum.LeaderWrite, Inner("write")]


@wire.record(tag=0x02C0)
@dataclass(frozen=True, slots=True, kw_only=True)
class NotBegun:
    """Has no union to wait for, and has sent nothing."""

    root: StoredRoot


@wire.record(tag=0x02C1)
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitingRows:
    """Carries the union's sum."""

    root: StoredRoot
    sum: UnionSum


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRows:
    """Over which rows the round goes. `sum` is the union's, if there is one; `residual` counts the
    ids that its encoding could not give back."""

    sum: Annotated[SumServer | None, wire.Maybe(Inner("sum"))]
    residual: Annotated[int, wire.VARINT]
    domain: StoredDomain
    noise: NoiseSecret = field(default=None, repr=False)


@wire.record(tag=0x02C2)
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreeing:
    """Agrees with the helper on a header."""

    over: RoundRows
    handshake: Handshake


@wire.record(tag=0x02C3)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRows:
    """Queries come in and are answered with the helper."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval


@wire.record(tag=0x02C4)
@dataclass(frozen=True, slots=True, kw_only=True)
class AddingReports:
    """Reports come in and are added up with the helper."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval
    write: Writing


@wire.record(tag=0x02C5)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsAdded:
    """The sum is opened, and its means are `result`; the helper may ask for it once more."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval
    write: Writing
