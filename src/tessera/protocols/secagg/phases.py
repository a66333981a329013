"""What the server has collected, phase by phase: records that can be stored between messages.

Inputs are added up as they come and not kept. Everything else that clients sent in a phase is
`Kept` until the phase is closed, so that a stored state names it by digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols.machine import REASON
from tessera.protocols.secagg.groups import places_in
from tessera.protocols.secagg.messages import (
    MAX_ROWS,
    Advert,
    Clients,
    Endorsement,
    RevealedSet,
    RevealedShares,
    ShareBoxes,
)
from tessera.protocols.secagg.params import MAX_COHORT, MAX_STAGES, MAX_TABLES
from tessera.protocols.secagg.session import KeptRoster
from tessera.wire.index_set import IndexSet
from tessera.wire.stored import ByDigest, ClientSet, Kept

MAX_SUM_BYTES: Final = 1 << 36

Members = Annotated[frozenset[ClientId], ClientSet(MAX_COHORT)]

RowsByClient = Annotated[
    dict[ClientId, npt.NDArray[np.uint64]],
    wire.ByKey(wire.U32, IndexSet(MAX_ROWS), MAX_COHORT),
]
Sum = Annotated[npt.NDArray[Any], wire.Words(MAX_SUM_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSum:
    """A table's part of a sum: the rows that some group met its quorum for, and their members.

    `below_quorum` counts the rows that were named and not summed; `shrunk`, once the sum is opened,
    those that were opened although dropouts after masking left fewer survivors in their group than
    the plan's quorum; `lost`, with a strict quorum, those that were not opened for that reason.
    """

    rows: Annotated[npt.NDArray[np.uint64], IndexSet(MAX_ROWS)] = field(repr=False)
    words: Sum = field(repr=False)
    members: RowsByClient = field(repr=False)
    below_quorum: Annotated[int, wire.VARINT]
    shrunk: Annotated[int, wire.VARINT] = 0
    lost: Annotated[int, wire.VARINT] = 0

    def index(self, client: ClientId) -> npt.NDArray[np.int64]:
        """Where a client's rows stand among `rows`."""
        return places_in(self.rows, self.members[client])


TableSums = Annotated[
    dict[TableId, TableSum], wire.ByKey(wire.U16, wire.Nested(TableSum), MAX_TABLES)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSum:
    """An opened sum: the words, and whose inputs are in them."""

    stage: Annotated[StageId, wire.U8]
    survivors: Clients
    dense: Sum = field(repr=False)
    tables: TableSums = field(repr=False)


StageSums = Annotated[tuple[StageSum, ...], wire.Sequence(wire.Nested(StageSum), MAX_STAGES)]


def _answers(kind: type[Any]) -> wire.Codec:
    return wire.ByKey(wire.U32, ByDigest(kind), MAX_COHORT)


@wire.record(tag=0x01A0)
@dataclass(frozen=True, slots=True, kw_only=True)
class Advertising:
    """Collects public keys. The graph's seed is public: every client lays the graph from it."""

    graph_seed: Annotated[bytes, wire.KEY] = field(repr=False)
    answers: Annotated[dict[ClientId, Kept[Advert]], _answers(Advert)] = field(
        default_factory=dict, repr=False
    )


@wire.record(tag=0x01A1)
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectingShares:
    """Collects sealed shares."""

    listed: KeptRoster
    answers: Annotated[dict[ClientId, Kept[ShareBoxes]], _answers(ShareBoxes)] = field(
        default_factory=dict, repr=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the server carries from stage to stage.

    `context` is the digest of what everybody must agree on before the stage, `rows` how many
    positions each of its tables has, where that is known.
    """

    listed: KeptRoster
    participants: Members
    stage: Annotated[StageId, wire.U8]
    context: Annotated[bytes, wire.KEY] = field(default=bytes(32), repr=False)
    rows: Annotated[dict[TableId, int], wire.ByKey(wire.U16, wire.VARINT, MAX_TABLES)] = field(
        default_factory=dict
    )
    sums: StageSums = field(default=(), repr=False)


@wire.record(tag=0x01A2)
@dataclass(frozen=True, slots=True, kw_only=True)
class Revealing:
    """Collects the rows that clients name."""

    at: Progress
    answers: Annotated[dict[ClientId, Kept[RevealedSet]], _answers(RevealedSet)] = field(
        default_factory=dict, repr=False
    )


@wire.record(tag=0x01A3)
@dataclass(frozen=True, slots=True, kw_only=True)
class InputSum:
    """Masked inputs added up; who has answered is all that is kept of them."""

    dense: Sum = field(repr=False)
    tables: TableSums = field(repr=False)
    quorums: Annotated[dict[ClientId, int], wire.ByKey(wire.U32, wire.VARINT, MAX_COHORT)] = field(
        default_factory=dict
    )
    answers: Annotated[dict[ClientId, bool], wire.ByKey(wire.U32, wire.FLAG, MAX_COHORT)] = field(
        default_factory=dict
    )


@wire.record(tag=0x01A9)
@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting:
    """Adds up masked inputs."""

    at: Progress
    total: InputSum

    @property
    def answers(self) -> dict[ClientId, bool]:
        return self.total.answers


@wire.record(tag=0x01A4)
@dataclass(frozen=True, slots=True, kw_only=True)
class Endorsing:
    """Collects signatures over the survivor list (active setting)."""

    at: Progress
    total: InputSum
    survivors: Members
    answers: Annotated[
        dict[ClientId, Endorsement], wire.ByKey(wire.U32, wire.Nested(Endorsement), MAX_COHORT)
    ] = field(default_factory=dict, repr=False)


@wire.record(tag=0x01A5)
@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasking:
    """Collects the shares that open the sum."""

    at: Progress
    total: InputSum
    survivors: Members
    recipients: Members
    answers: Annotated[dict[ClientId, Kept[RevealedShares]], _answers(RevealedShares)] = field(
        default_factory=dict, repr=False
    )


@wire.record(tag=0x01A6)
@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """A sum is opened; waits for the caller to begin the next stage."""

    at: Progress


@wire.record(tag=0x01A7)
@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """All sums are opened."""

    sums: StageSums = field(repr=False)


@wire.record(tag=0x01A8)
@dataclass(frozen=True, slots=True, kw_only=True)
class SumAborted:
    """Too few answered; what was collected is deleted. Sums of earlier stages stay opened."""

    phase: Annotated[str, wire.TEXT]
    reason: Annotated[str, REASON]
    sums: StageSums = field(repr=False)


Phase = (
    Advertising
    | CollectingShares
    | Revealing
    | Collecting
    | Endorsing
    | Unmasking
    | Between
    | Done
    | SumAborted
)
PHASES: Final = Phase.__args__

PHASE_NAMES: Final = {
    Advertising: "advertise",
    CollectingShares: "share",
    Revealing: "reveal",
    Collecting: "collect",
    Endorsing: "consistency",
    Unmasking: "unmask",
    Between: "between",
    Done: "done",
    SumAborted: "aborted",
}
