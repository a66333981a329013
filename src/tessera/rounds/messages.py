"""What travels in a round: rows and ids as the words of a sum, its means, and the other messages.

The other messages are the union and the rows that were requested.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.group import Words
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, RoundId, TableId
from tessera.learning.averaging import TableMean
from tessera.learning.tables.submodel import Ids, distinct
from tessera.plan import Plan, TablePlan
from tessera.protocols.machine import Outbound, RoundOutcome, RoundOver, to_all
from tessera.protocols.secagg.messages import MAX_ROWS
from tessera.protocols.secagg.params import MAX_TABLES
from tessera.wire.index_set import LEAST_BITS, IndexSet


@dataclass(frozen=True, slots=True, eq=False)
class RowWords:
    """The trained rows of a table, ascending: of each, delta times count, and the count."""

    ids: Ids = field(repr=False)
    words: Words = field(repr=False)

    @property
    def written(self) -> Ids:
        """The rows that are not all zeros."""
        return self.ids[self.words.any(axis=1)]

    def at(self, ids: Ids) -> Words:
        """The words of these rows, ascending; zeros for those that were not trained."""
        words = np.zeros((len(ids), *self.words.shape[1:]), dtype=self.words.dtype)
        _, to, source = np.intersect1d(ids, self.ids, assume_unique=True, return_indices=True)
        words[to] = self.words[source]
        return words


def whole_words(plan: Plan, dense: Words, tables: Mapping[str, RowWords]) -> Words:
    """A whole model: dense, each table row by row, with counts where it has them, the weight."""
    parts = [dense[:-1]]
    for t in plan.tables:
        rows, width = plan.sent_rows[t.name], t.width + plan.counts_rows
        words = plan.ring.zeros((len(rows), width))
        at = np.searchsorted(rows, tables[t.name].ids)
        words[at] = tables[t.name].words[:, :width]
        parts.append(words.reshape(-1))
    return np.concatenate([*parts, dense[-1:]])


def whole_tables(plan: Plan, words: Words) -> Iterator[tuple[TablePlan, Ids, Words]]:
    """The tables in a whole model's words (`whole_words`): each with its rows' ids and words."""
    start = plan.model.dense
    for t in plan.tables:
        rows, width = plan.sent_rows[t.name], t.width + plan.counts_rows
        stop = start + len(rows) * width
        yield t, rows, words[start:stop].reshape(len(rows), width, *words.shape[1:])
        start = stop


def union_words(plan: Plan, round_id: RoundId, ids: Ids, coins: Secret) -> Words:
    """What a client offers to the union, in the encoding of this round."""
    encoding = plan.union_encoding(round_id)
    words: Words = encoding.encode(ids, Stream.of(coins, Label.UNION_COINS))
    return words


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round gives: per-row means, the dense mean, and counts of rows."""

    survivors: tuple[ClientId, ...]
    weight: int
    dense: npt.NDArray[np.float64] = field(repr=False)
    tables: Mapping[str, TableMean]
    union_rows: int
    union_residual: int
    rows_opened: int
    below_quorum: int
    shrunk: int
    lost: int
    rows_out_of_bounds: int = 0  # not merged, since honest clients could not have summed to them
    out_of_bounds: bool = False  # likewise the dense part, and with it the whole round


def merged(results: Sequence[RoundResult]) -> RoundResult:
    """One outcome of parts of a cohort that were summed apart, everything by its weight."""
    if len(results) == 1:
        return results[0]
    weight = sum(r.weight for r in results)
    tables: dict[str, TableMean] = {}
    for name in results[0].tables:
        parts = [r.tables[name] for r in results]
        ids = distinct(np.concatenate([part.ids for part in parts]))
        counts = np.zeros(len(ids), dtype=np.int64)
        total = np.zeros((len(ids), parts[0].mean.shape[1]))
        for part in parts:
            at = np.searchsorted(ids, part.ids)
            counts[at] += part.counts
            total[at] += part.mean * part.counts[:, None]
        tables[name] = TableMean(ids, total / np.maximum(counts, 1)[:, None], counts)
    return RoundResult(
        survivors=tuple(sorted(c for r in results for c in r.survivors)),
        weight=weight,
        dense=np.sum([r.dense * r.weight for r in results], axis=0) / max(weight, 1),
        tables=tables,
        union_rows=max(r.union_rows for r in results),
        union_residual=sum(r.union_residual for r in results),
        rows_opened=sum(r.rows_opened for r in results),
        below_quorum=sum(r.below_quorum for r in results),
        shrunk=sum(r.shrunk for r in results),
        lost=sum(r.lost for r in results),
        rows_out_of_bounds=sum(r.rows_out_of_bounds for r in results),
        out_of_bounds=any(r.out_of_bounds for r in results),
    )


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
