"""Messages of clients and server in a round of secure sums.

In the order of a round; `docs/protocols/secagg.md` has the flow. Bytes and arrays stay out of
`repr`, so nothing secret reaches a log by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.shamir import SHARE_BYTES
from tessera.ids import ClientId, RoundId, StageId, TableId
from tessera.protocols.secagg.params import MAX_COHORT, MAX_STAGES, MAX_TABLES
from tessera.wire.index_set import IndexSet, SetsByKey

MAX_ROWS: Final = 1 << 28
MAX_POSITION: Final = 1 << 40
"""Row positions are below this, so that a mask's block counter cannot wrap."""

BOX_BYTES: Final = 2 * SHARE_BYTES + 16
"""A sealed box: a share of the mask key, a share of the self-mask seed, and the tag."""

Round = Annotated[RoundId, wire.U64]
Client = Annotated[ClientId, wire.U32]
Stage = Annotated[StageId, wire.U8]
Rows = Annotated[npt.NDArray[np.uint64], IndexSet(MAX_ROWS)]
Clients = Annotated[npt.NDArray[np.uint64], IndexSet(MAX_COHORT)]
BoxesByClient = Annotated[
    dict[ClientId, tuple[bytes, ...]],
    wire.ByKey(wire.U32, wire.Sequence(wire.Exactly(BOX_BYTES), MAX_STAGES), MAX_COHORT),
]
Shares = Annotated[
    dict[ClientId, bytes], wire.ByKey(wire.U32, wire.Exactly(SHARE_BYTES), MAX_COHORT)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKeys:
    """A client's public part of one stage: its mask key, and a commitment to its self-mask seed."""

    mask_key: Annotated[bytes, wire.KEY] = field(repr=False)
    commitment: Annotated[bytes, wire.KEY] = field(repr=False)


AllStageKeys = Annotated[tuple[StageKeys, ...], wire.Sequence(wire.Nested(StageKeys), MAX_STAGES)]


@wire.record(tag=0x0101)
@dataclass(frozen=True, slots=True, kw_only=True)
class Advert:
    """Client to server, first of all: the public keys it will use in this round.

    `context` is the digest of the round's parameters as this client knows them; the signature is
    empty in the semi-honest setting.
    """

    round_id: Round
    sender: Client
    context: Annotated[bytes, wire.KEY] = field(repr=False)
    channel_key: Annotated[bytes, wire.KEY] = field(repr=False)
    nonce: Annotated[bytes, wire.KEY] = field(repr=False)
    stages: AllStageKeys = field(repr=False)
    signature: Annotated[bytes, wire.UpTo(64)] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One line of the roster: an advert without what all of them have in common."""

    client: Client
    channel_key: Annotated[bytes, wire.KEY] = field(repr=False)
    nonce: Annotated[bytes, wire.KEY] = field(repr=False)
    stages: AllStageKeys = field(repr=False)
    signature: Annotated[bytes, wire.UpTo(64)] = field(repr=False)


@wire.record(tag=0x0102)
@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Server to clients: who is in the round with which keys, and the graph's public seed."""

    round_id: Round
    graph_seed: Annotated[bytes, wire.KEY] = field(repr=False)
    members: Annotated[tuple[Member, ...], wire.Sequence(wire.Nested(Member), MAX_COHORT)] = field(
        repr=False
    )


@wire.record(tag=0x0103)
@dataclass(frozen=True, slots=True, kw_only=True)
class ShareBoxes:
    """Client to server: for each holder a sealed box per stage with its two shares."""

    round_id: Round
    sender: Client
    boxes: BoxesByClient = field(repr=False)


@wire.record(tag=0x0104)
@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedShares:
    """Server to client: who goes on, and the boxes that are for this client, by sender."""

    round_id: Round
    sharers: Clients = field(repr=False)
    boxes: BoxesByClient = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RevealedRows:
    """The positions within one table that a client names."""

    table: Annotated[TableId, wire.U16]
    rows: Rows = field(repr=False)


@wire.record(tag=0x0105)
@dataclass(frozen=True, slots=True, kw_only=True)
class RevealedSet:
    """Client to server, before a row-wise sum: its rows, and the smallest group it accepts."""

    round_id: Round
    stage: Stage
    sender: Client
    quorum: Annotated[int, wire.VARINT]
    tables: Annotated[
        tuple[RevealedRows, ...], wire.Sequence(wire.Nested(RevealedRows), MAX_TABLES)
    ] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGroups:
    """The groups of one client's rows in one table, and of no others.

    `included` are indices into the rows it revealed whose group met the quorum; `shared` tells for
    each peer which of the included rows (indices into `included`) that peer is a member of.
    """

    table: Annotated[TableId, wire.U16]
    included: Rows = field(repr=False)
    shared: Annotated[
        Mapping[ClientId, npt.NDArray[np.uint64]],
        SetsByKey(wire.U32, MAX_COHORT, MAX_ROWS),  # where all reveal all, all are the same
    ] = field(repr=False)


@wire.record(tag=0x0106)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """Server to client: the groups of the rows it revealed."""

    round_id: Round
    stage: Stage
    tables: Annotated[
        tuple[TableGroups, ...], wire.Sequence(wire.Nested(TableGroups), MAX_TABLES)
    ] = field(repr=False)


@wire.record(tag=0x0107)
@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedInput:
    """Client to server: one stage's input under all its masks, packed to the group's bits."""

    round_id: Round
    stage: Stage
    sender: Client
    dense: Annotated[bytes, wire.UpTo(wire.DEFAULT_CAP)] = field(repr=False)
    tables: Annotated[tuple[bytes, ...], wire.Sequence(wire.UpTo(wire.DEFAULT_CAP), MAX_TABLES)] = (
        field(repr=False)
    )


@wire.record(tag=0x0108)
@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorList:
    """Server to clients: whose inputs of this stage are in the sum."""

    round_id: Round
    stage: Stage
    survivors: Clients


@wire.record(tag=0x0109)
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencySignature:
    """Client to server, active setting: its signature over everything it was sent so far."""

    round_id: Round
    stage: Stage
    sender: Client
    groups: Annotated[bytes, wire.KEY] = field(repr=False)
    signature: Annotated[bytes, wire.SIGNATURE] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endorsement:
    """What a peer signed: its own view of its groups, and the signature over that and the rest."""

    groups: Annotated[bytes, wire.KEY] = field(repr=False)
    signature: Annotated[bytes, wire.SIGNATURE] = field(repr=False)


@wire.record(tag=0x010A)
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencyProof:
    """Server to clients, active setting: a threshold of signatures over the same list."""

    round_id: Round
    stage: Stage
    endorsements: Annotated[
        dict[ClientId, Endorsement], wire.ByKey(wire.U32, wire.Nested(Endorsement), MAX_COHORT)
    ] = field(repr=False)


@wire.record(tag=0x010B)
@dataclass(frozen=True, slots=True, kw_only=True)
class RevealedShares:
    """Client to server: of every survivor the self-mask share, of everyone gone the key share.

    With a strict quorum also the hold-back keys of the rows whose group still meets it.
    """

    round_id: Round
    stage: Stage
    sender: Client
    self_masks: Shares = field(repr=False)
    mask_keys: Shares = field(repr=False)
    row_keys: Annotated[
        dict[TableId, bytes], wire.ByKey(wire.U16, wire.UpTo(wire.DEFAULT_CAP), MAX_TABLES)
    ] = field(default_factory=dict, repr=False)


@wire.record(tag=0x010C)
@dataclass(frozen=True, slots=True, kw_only=True)
class NextStage:
    """Server to clients: the sum is opened, and the next stage begins."""

    round_id: Round
    stage: Stage


FROM_SERVER: Final = (
    Roster,
    ForwardedShares,
    RowGroups,
    SurvivorList,
    ConsistencyProof,
    NextStage,
)
FROM_CLIENT: Final = (
    Advert,
    ShareBoxes,
    RevealedSet,
    MaskedInput,
    ConsistencySignature,
    RevealedShares,
)
