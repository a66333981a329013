"""Messages of a round besides its sums: the union, and the rows that were requested."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.ids import ClientId, RoundId, TableId
from tessera.protocols.machine import Outbound, RoundOutcome, RoundOver, to_all
from tessera.protocols.secagg.messages import MAX_ROWS
from tessera.protocols.secagg.params import MAX_TABLES
from tessera.rounds.words import RoundResult
from tessera.wire.index_set import LEAST_BITS, IndexSet

RowsByTable = Annotated[
    dict[TableId, npt.NDArray[np.uint64]],
    wire.ByKey(wire.U16, IndexSet(MAX_ROWS), MAX_TABLES),
]


@wire.record(tag=0x0201)
@dataclass(frozen=True, slots=True, kw_only=True)
class UnionOpened:
    """Server to clients: the cohort's rows, by table, from the opened sum of the union.

    Rows of derived tables follow from these by the public map and are not sent.
    """

    round_id: Annotated[RoundId, wire.U64]
    tables: RowsByTable = field(repr=False)


def most_union_bytes(rows: int, domain: int, tables: int) -> int:
    """No `UnionOpened` with up to so many rows, of so many tables together, is longer than this.

    An index takes log2(range / count) + 2 bits, rounded up, and no fewer than the codec's least;
    the rest are frame, lengths and keys.
    """
    bits = max(max(domain // max(rows, 1), 1).bit_length() + 2, LEAST_BITS)
    return 64 + 32 * tables + -(-rows * bits // 8)


@wire.record(tag=0x0202)
@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Server to client: the dense part and the values of the rows it revealed, in their order.

    The dense part is the same for everybody, and hashed once.
    """

    round_id: Annotated[RoundId, wire.U64]
    dense: Annotated[bytes, wire.PartUpTo(wire.DEFAULT_CAP)] = field(repr=False)
    tables: Annotated[
        dict[TableId, bytes], wire.ByKey(wire.U16, wire.PartUpTo(wire.DEFAULT_CAP), MAX_TABLES)
    ] = field(repr=False)


FROM_SERVER: Final = (UnionOpened, Download)


# --- farewell -------------------------------------------------------------------------------------
#
# The last word of a round to its clients: whether what each of them sent has counted.


OUT_OF_BOUNDS: Final = "the opened sum is not one of honest clients"
"""Why a sum is not merged."""


def farewells(
    round_id: RoundId, invited: Collection[ClientId], result: RoundResult
) -> list[Outbound]:
    """After a sum: done for those who are in it, and left out for the others.

    A sum that cannot be merged leaves everybody out: clients keep what they sent.
    """
    counted = frozenset() if result.out_of_bounds else frozenset(result.survivors)
    reason = OUT_OF_BOUNDS if result.out_of_bounds else "not in the sum"
    done = RoundOver.of(round_id, RoundOutcome.DONE)
    left_out = RoundOver.of(round_id, RoundOutcome.LEFT_OUT, reason)
    return [
        *to_all(counted & frozenset(invited), done),
        *to_all(frozenset(invited) - counted, left_out),
    ]
