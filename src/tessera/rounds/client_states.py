"""The states of a client's round before one server: what it has come to, and in it the sum's role.

Each has exactly the fields that exist in it. `rounds/client.py` has the steps between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy.typing as npt

from tessera import wire
from tessera.ids import TableId
from tessera.protocols.secagg.params import MAX_TABLES
from tessera.protocols.secagg.phases import MAX_SUM_BYTES
from tessera.rounds.messages import Download, RowsByTable, UnionOpened
from tessera.rounds.root import StoredRoot
from tessera.rounds.sums import SumClient
from tessera.wire.stored import ByDigest, Inner, Kept

Sum = Annotated[SumClient, Inner("sum")]
KeptUnion = Annotated[Kept[UnionOpened], ByDigest(UnionOpened)]
KeptDownload = Annotated[Kept[Download], ByDigest(Download)]
Words = Annotated[npt.NDArray[Any], wire.Words(MAX_SUM_BYTES)]


@wire.record(tag=0x0280)
@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """Has not begun: nothing is charged and nothing sent."""


@wire.record(tag=0x0281)
@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingRows:
    """Takes part in the union's sum; waits for the union."""

    root: StoredRoot
    sum: Sum


@wire.record(tag=0x0282)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyToChoose:
    """Knows the union, where there is one; names rows as soon as the sum asks for them."""

    root: StoredRoot
    sum: Sum
    union: Annotated[Kept[UnionOpened] | None, wire.Maybe(ByDigest(UnionOpened))]


@wire.record(tag=0x0203)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAsked:
    """The ids it has asked for, and those of them that it trains; rows of derived tables follow.

    Not sent to anybody; stored once, like a message, since it does not change any more.
    """

    requested: RowsByTable = field(repr=False)
    trained: RowsByTable = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What it has asked for, over which union."""

    rows: Annotated[Kept[RowsAsked], ByDigest(RowsAsked)]
    union: Annotated[Kept[UnionOpened] | None, wire.Maybe(ByDigest(UnionOpened))]

    @property
    def context(self) -> bytes:
        """What everybody must have alike before the update is summed."""
        return NO_CONTEXT if self.union is None else self.union.digest


AskedFor = Annotated[Question | None, wire.Maybe(wire.Nested(Question))]
"""None: the whole model, which is sent unasked."""


@wire.record(tag=0x0283)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingModel:
    """Waits for the values of its rows, or for the whole model."""

    root: StoredRoot
    sum: Sum
    asked: AskedFor


@wire.record(tag=0x0284)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingModel:
    """Has something to train (`pending`); waits for its caller's update."""

    root: StoredRoot
    sum: Sum
    asked: AskedFor
    download: KeptDownload


@wire.record(tag=0x0285)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Has its update in words; sends it as soon as the sum asks for it.

    `tables` has words of the trained rows; without counts by row a whole model is all in `dense`.
    """

    sum: Sum
    asked: AskedFor
    download: KeptDownload
    dense: Words = field(repr=False)
    tables: Annotated[
        dict[TableId, npt.NDArray[Any]],
        wire.ByKey(wire.U16, wire.Words(MAX_SUM_BYTES), MAX_TABLES),
    ] = field(repr=False)


@wire.record(tag=0x0286)
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSent:
    """Its update is out; does its part of what opens the sum."""

    sum: Sum


AT_WORK: Final = (
    OfferingRows,
    ReadyToChoose,
    AwaitingModel,
    TrainingModel,
    TrainedModel,
    UpdateSent,
)
NO_CONTEXT: Final = bytes(32)
