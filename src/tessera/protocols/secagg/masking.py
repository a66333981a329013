"""An input under its masks: the one computation of a round that touches every word.

The client adds its self-mask and, for every peer it is summed with, the mask they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import prg
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label
from tessera.errors import MisuseError
from tessera.ids import ClientId, TableId
from tessera.protocols.secagg import mask_streams, transcript
from tessera.protocols.secagg.messages import MaskedInput, Rows
from tessera.protocols.secagg.params import StageSpec
from tessera.protocols.secagg.session import Standing, neighbourhood
from tessera.protocols.secagg.transcript import Received

CONTEXT_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A stage's input: reduced group words, and for each table a matrix of the included rows.

    `context` is for a stage without tables what it is in `Reveal` for the others; `received` are
    the digests of what this input was computed from.
    """

    dense: npt.NDArray[Any] | None = field(default=None, repr=False)
    tables: Mapping[TableId, npt.NDArray[Any]] = field(default_factory=dict, repr=False)
    context: bytes = field(default=bytes(32), repr=False)
    received: Received = field(default_factory=Received, repr=False)


def masked(
    at: Standing,
    given: Input,
    *,
    agreed: bytes,
    included: Mapping[TableId, Rows],
    shared: Mapping[TableId, Mapping[ClientId, Rows]],
) -> MaskedInput:
    """The input under the client's self-mask and one mask for every peer it is summed with.

    `agreed` is the digest of what everybody was sent, as this client received it. The masks with a
    peer also depend on the values that it was sent of the rows the two share.

    Dense words are masked with the neighbours in the graph. In a row's group everybody masks with
    everybody whatever the graph says: a member whose neighbours are all outside the group would be
    opened on its own.
    """
    session, spec, stage = at.session, at.spec, at.stage
    params, me, group = session.params, session.me, at.spec.group
    context = transcript.roster_context(params, at.roster)
    check_input(spec, given, included)

    hood = neighbourhood(params, at.roster)
    present = {int(c) for c in at.participants}
    dense_peers = [c for c in hood.neighbours(me) if c in present] if spec.dense else []
    row_peers = {c for by_peer in shared.values() for c in by_peer}
    public = {m.client: m.stages[stage].mask_key for m in at.roster.members}
    own_key = AgreementKey.from_secret(session.mask_key(stage))
    bound = transcript.pair_bindings(
        agreed, given.received, {*dense_peers, *row_peers}, included=included, shared=shared
    )
    pair = {
        c: mask_streams.pair_secret(own_key, public[c], context, (me, c), stage, bound[c])
        for c in sorted(bound)
    }
    seed = session.self_seed(stage)

    packed_dense = b""
    if spec.dense:
        words = np.array(given.dense, dtype=group.dtype)
        prg.accumulate(
            group,
            words,
            [
                mask_streams.dense_stream(seed, Label.SELF_MASK),
                *(mask_streams.dense_stream(pair[c], Label.PAIR_MASK) for c in dense_peers),
            ],
            [1, *(mask_streams.mask_sign(me, c) for c in dense_peers)],
        )
        packed_dense = group.pack(words)

    packed_tables = []
    for table in (t.table for t in spec.tables):
        rows = np.array(given.tables[table], dtype=group.dtype)
        positions, by_peer = included[table], shared[table]
        everything = np.arange(len(positions), dtype=np.uint64)
        prg.accumulate_rows(
            group,
            rows,
            [
                mask_streams.row_stream(seed, Label.SELF_MASK, table),
                *(mask_streams.row_stream(pair[c], Label.PAIR_MASK, table) for c in by_peer),
            ],
            [1, *(mask_streams.mask_sign(me, c) for c in by_peer)],
            [everything, *by_peer.values()],
            [positions, *(positions[index] for index in by_peer.values())],
        )
        if params.strict_quorum:
            keys = mask_streams.hold_back_keys(session.hold_back(stage, table), positions)
            own = mask_streams.hold_back_tweak(context, me, stage, table)
            rows = group.add(rows, mask_streams.hold_back_masks(group, keys, own, rows.shape[1]))
        packed_tables.append(group.pack(rows))
    return MaskedInput(
        round_id=params.round_id,
        stage=stage,
        sender=me,
        dense=packed_dense,
        tables=tuple(packed_tables),
    )


def check_context(context: bytes) -> None:
    """The caller's digest of what everybody must agree on before the stage."""
    if len(context) != CONTEXT_BYTES:
        raise MisuseError(f"a context of {len(context)} bytes; it has {CONTEXT_BYTES}")


def check_input(spec: StageSpec, given: Input, included: Mapping[TableId, Rows]) -> None:
    """Our caller's values: of the right shape, in the group, and within the stated bound."""
    group = spec.group
    check_context(given.context)
    given.received.check(included)
    expected = {t.table: (len(included[t.table]), t.width, *group.limbs) for t in spec.tables}
    arrays: list[npt.NDArray[Any]] = []
    if (given.dense is not None) != bool(spec.dense) or given.tables.keys() != expected.keys():
        raise MisuseError(f"stage {spec.name}: the input has other parts than the stage")
    if given.dense is not None:
        if given.dense.shape != (spec.dense, *group.limbs):
            raise MisuseError(f"stage {spec.name}: {given.dense.shape} for {spec.dense} words")
        arrays.append(given.dense)
    for table, shape in expected.items():
        if given.tables[table].shape != shape:
            raise MisuseError(
                f"stage {spec.name}, table {table}: {given.tables[table].shape} for {shape}"
            )
        arrays.append(given.tables[table])
    for words in arrays:
        if words.dtype != group.dtype or not group.contains(words):
            raise MisuseError(f"stage {spec.name}: words that are not in {group.name}")
        if spec.max_value is not None and words.size:
            if group.limbs:
                over = any(word > spec.max_value for word in group.to_ints(words))
            else:
                over = int(words.max()) > spec.max_value
            if over:
                raise MisuseError(f"stage {spec.name}: a value over {spec.max_value}")
