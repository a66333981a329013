"""RoundDomain: over which rows a round between two servers goes, and the parameters that follow.

All rows of the tables, or those of the cohort's union where the plan narrows them. A stored state
names the union by its digest; parameters are worked out again when it is woken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.cuckoo import HASHES, STASH_ROWS, SimpleTable, bins_for
from tessera.crypto.dpf import Forest, Values
from tessera.crypto.group import Words
from tessera.crypto.ring import Ring
from tessera.crypto.verifiable import correction_bytes
from tessera.errors import Malformed
from tessera.ids import RoundId, StageId, TableId
from tessera.learning.tables.submodel import Floats, Ids
from tessera.learning.tables.table import DerivedMap, StoredTable
from tessera.plan import Plan, TablePlan, Writing
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.protocols.two_server.handshake import ServedModel
from tessera.protocols.two_server.messages import Header
from tessera.protocols.two_server.params import (
    Absent,
    Read,
    Servers,
    TwoServerParams,
    TwoServerTable,
    Write,
)
from tessera.protocols.two_server.write.client import RowUpdate
from tessera.protocols.two_server.write.sums import TwoServerSum
from tessera.rounds import encode, select
from tessera.rounds.attendance import training_digest
from tessera.rounds.messages import RoundResult, UnionOpened
from tessera.rounds.noise import noise_of
from tessera.rounds.party import OverModel
from tessera.rounds.select import Rows
from tessera.rounds.two_server.shared_sum import shared
from tessera.wire.stored import ByDigest, Kept, Supplied

# --- opened ---------------------------------------------------------------------------------------
#
# What two servers opened, as the sum of a round and as its means: the same at both.


def opened_sum(
    plan: Plan, stage: StageId, total: TwoServerSum, union: Mapping[str, Ids]
) -> StageSum:
    """Rows are by their place in the union, where there is one. Cuts are the dense part's again."""
    tables = {}
    dense, rest = plan.ring.zeros(plan.model.dense + 1), whole_part(plan)
    dense[rest] = total.dense
    for table, part in total.tables.items():
        if table >= len(plan.tables):
            plan.cuts[table - len(plan.tables)].of(dense)[part.rows] = part.words
            continue
        name = plan.tables[table].name
        rows = np.searchsorted(union[name], part.rows) if union else part.rows
        tables[table] = TableSum(
            rows=rows.astype(np.uint64), words=part.words, members={}, below_quorum=0
        )
    return StageSum(stage=stage, survivors=total.survivors, dense=dense, tables=tables)


def whole_part(plan: Plan) -> npt.NDArray[np.bool_]:
    """Which words of a dense part, its weight among them, are in no cut."""
    there = np.ones(plan.model.dense + 1, dtype=np.bool_)
    for cut in plan.cuts:
        there[cut.start : cut.stop] = False
    return there


def written_cuts(plan: Plan, dense: Words) -> dict[TableId, RowUpdate]:
    """The rows of each cut that a client sends: those of a dense part that are not zeros."""
    found = {}
    for number, cut in enumerate(plan.cuts):
        rows = cut.of(dense)
        ids = np.flatnonzero(rows.any(axis=1))
        found[TableId(len(plan.tables) + number)] = RowUpdate(ids.astype(np.uint64), rows[ids])
    return found


def opened_means(plan: Plan, total: TwoServerSum, union: Mapping[str, Ids]) -> RoundResult:
    """The means that follow from the opened sum."""
    return encode.means(plan, opened_sum(plan, StageId(0), total, union), union=union)


# --- write cost -----------------------------------------------------------------------------------
#
# WriteCost: is a table written between two servers by keys or by plain shares, in bytes.


CUT: Final = "dense part, cut"
"""What a cut of the dense part is called, with its number, beside tables that have names."""


@dataclass(frozen=True, slots=True)
class WriteCost:
    """What a client sends to write a table's rows, in bytes, each way; and which way is taken."""

    table: str
    rows: int
    keys: int | None  # None: too few rows for point functions
    shares: int
    write: Write

    @property
    def reason(self) -> str:
        """In words, for the run's log."""
        if self.keys is None:
            return f"{self.rows} rows are too few to hash: plain shares, {self.shares:,} bytes"
        taken, other = (
            (self.keys, self.shares) if self.write is Write.POINTS else (self.shares, self.keys)
        )
        names = ("keys", "plain shares") if self.write is Write.POINTS else ("plain shares", "keys")
        return f"{names[0]} of {taken:,} bytes, not {names[1]} of {other:,}"


def write_cost(plan: Plan, table: TablePlan, rows: int | None = None) -> WriteCost:
    """Keys against shares for one table; `rows` is the size of its domain, if that is a union."""
    domain = table.rows if rows is None else rows
    return _cost(plan, table.name, domain, table.width + 1, plan.union.max_rows)


def cut_cost(plan: Plan, number: int) -> WriteCost:
    """The same for a cut of the dense part, of which the largest rows are written."""
    cut = plan.cuts[number]
    return _cost(plan, f"{CUT} {number + 1}", cut.rows, cut.width, cut.most)


def costs(plan: Plan, params: TwoServerParams) -> list[WriteCost]:
    """Of all tables of a round, and of the cuts behind them."""
    known = len(plan.tables)
    return [
        write_cost(plan, plan.tables[spec.table], spec.rows)
        if spec.table < known
        else cut_cost(plan, spec.table - known)
        for spec in params.tables
    ]


def _cost(plan: Plan, name: str, rows: int, words: int, most: int) -> WriteCost:
    shares = -(-rows * words * plan.ring.bits // 8)
    if rows < HASHES:
        return WriteCost(name, rows, None, shares, Write.DENSE)
    keys = key_bytes(plan, rows, words, most)
    wanted = plan.two_server.write
    cheaper = Write.POINTS if keys < shares else Write.DENSE
    write = {Writing.AUTO: cheaper, Writing.DPF: Write.POINTS, Writing.DENSE: Write.DENSE}[wanted]
    return WriteCost(name, rows, keys, shares, write)


def key_bytes(plan: Plan, rows: int, words: int, most: int) -> int:
    """The length of one table's keys, with what they are checked by: for a table of this size, of
    which a client writes no more than `most` rows."""
    stash, tags = stash_of(plan, rows), plan.two_server.verify
    return _key_bytes(rows, min(most, rows), stash, plan.ring, words, tags=tags)


@lru_cache(maxsize=256)
def _key_bytes(rows: int, most: int, stash: int, ring: Ring, words: int, *, tags: bool) -> int:
    """Every client asks for the same in every round, and hashing a large table takes a while."""
    table = SimpleTable.of(rows, bins_for(most, stash=stash), 0, stash=stash)
    forest = Forest.of(table.sizes, Values(ring, words))
    return forest.public_bytes + (correction_bytes(forest) if tags else 0)


def stash_of(plan: Plan, rows: int) -> int:
    """The stash of a table of so many rows: the plan's, or none where it has no use or no place.

    Each of its keys covers the whole table, so a large one goes without; too small a one is not
    hashed at all. The plan's other tables keep theirs.
    """
    return plan.two_server.stash if HASHES <= rows <= STASH_ROWS else 0


# --- params ---------------------------------------------------------------------------------------
#
# What a plan means between two servers: their parameters in a round, and the model they serve.
#
# Client, leader and helper each call `two_server_params` with what they know themselves; one that
# knows something else does not get past the first message (`protocols/two_server/`).


def two_server_params(
    plan: Plan, round_id: RoundId, servers: Servers, domain: Mapping[str, Ids] | None = None
) -> TwoServerParams:
    """A round's parameters; `domain` has each table's rows where they are narrowed to a union."""
    size = plan.model.precision.dtype.itemsize
    tables = []
    for t in plan.tables:
        ids = None if domain is None else domain[t.name]
        rows = t.rows if ids is None else len(ids)
        if not rows:
            continue  # nobody has a row of it in this round
        cost = write_cost(plan, t, rows)
        few = rows < HASHES
        tables.append(
            TwoServerTable(
                table=plan.table_id(t.name),
                rows=rows,
                max_rows=min(plan.union.max_rows, rows),
                row_bytes=t.width * size,
                words=t.width + 1,
                ids=ids,
                read=Read.WHOLE if few else plan.two_server.reading,
                write=cost.write,
                stash=stash_of(plan, rows),
            )
        )
    known, written = len(plan.tables), 0
    for number, cut in enumerate(plan.cuts):  # written and not read: the dense part comes down
        written += cut.rows * cut.width
        tables.append(
            TwoServerTable(
                table=TableId(known + number),
                rows=cut.rows,
                max_rows=cut.most,
                words=cut.width,
                write=cut_cost(plan, number).write,
                stash=stash_of(plan, cut.rows),
            )
        )
    return TwoServerParams(
        federation=plan.federation,
        round_id=round_id,
        plan_hash=agreed_hash(plan, servers),
        cohort=plan.most_clients,
        min_cohort=max(2, plan.least_survivors),
        most_excluded=plan.most_missing,
        group=plan.ring,
        servers=servers,
        tables=tuple(tables),
        dense=plan.model.dense - written + 1,
        dense_bytes=plan.model.dense * size,
        # A union is as large as its clients' rows: there is nothing smaller to narrow it to.
        row_limit=plan.two_server.row_limit
        if domain is None
        else max([plan.two_server.row_limit, *(t.rows for t in tables if t.row_bytes)]),
        corrupt=plan.security.corrupt,
        verify=plan.two_server.verify,
        key_rounds=plan.two_server.key_rounds,
        absent=Absent(plan.two_server.absent.value),
        noise=noise_of(plan).server_deviation,
        correlation=noise_of(plan).correlation,
        rounds=plan.participation.rounds if plan.bounds_rounds else 0,
    )


def agreed_hash(plan: Plan, servers: Servers) -> bytes:
    """What clients seal for the helper, which refuses any other: the plan and, where rounds are
    bounded, the training. The digest of a plan does not have its rounds."""
    training = training_digest(plan, servers)
    return hashlib.sha256(plan.digest + training).digest() if training else plan.digest


def served(
    plan: Plan, params: TwoServerParams, dense: Floats, tables: Mapping[str, StoredTable]
) -> ServedModel:
    """The model as both servers hold it in a round, in the bytes that clients get."""
    held = {
        TableId(spec.table): served_rows(plan, spec, tables, spec.named(np.arange(spec.rows)))
        for spec in params.read
    }
    return ServedModel(tables=held, dense=dense.astype(plan.model.precision.dtype).tobytes())


def served_rows(
    plan: Plan, spec: TwoServerTable, tables: Mapping[str, StoredTable], ids: Ids
) -> npt.NDArray[np.uint8]:
    """These rows of a table, in the bytes that clients get."""
    rows = tables[plan.tables[spec.table].name].values(ids).astype(plan.model.precision.dtype)
    return rows.view(np.uint8).reshape(len(ids), spec.row_bytes)


# --- domain ---------------------------------------------------------------------------------------

NAME: Final = "domain"


@dataclass(frozen=True, slots=True, eq=False)
class RoundDomain:
    """`rows` has the union by table, derived tables included; it is empty without one."""

    union: Kept[UnionOpened] | None
    rows: Mapping[str, Ids] = field(repr=False)
    params: TwoServerParams

    @classmethod
    def of(
        cls,
        plan: Plan,
        round_id: RoundId,
        servers: Servers,
        union: Kept[UnionOpened] | None,
        maps: Mapping[str, DerivedMap],
    ) -> Self:
        """`ConfigError`: the plan cannot work with this union."""
        if union is None:
            return cls(None, {}, two_server_params(plan, round_id, servers))
        rows = select.union_rows(plan, union.message, maps)
        return cls(union, rows, two_server_params(plan, round_id, servers, rows))


def check_stored(rows: Rows, union: Kept[UnionOpened] | None) -> None:
    """A stored state has a union if the plan narrows tables to one, and otherwise none."""
    if rows.union != (union is not None):
        raise Malformed("a stored state with a union where there is none, or without one")


class WokenParts(dict[str, Any]):
    """The parts of a stored state that are read so far: later ones are woken with earlier ones."""

    def keeping(self, name: str, wake: Callable[..., Any]) -> Callable[..., Any]:
        """What reads a part, and keeps it for those after it."""

        def read(*stored: Any) -> Any:
            self[name] = wake(*stored)
            return self[name]

        return read

    def header(self, of: Callable[[Any], Header | None]) -> Header:
        """What the handshake has come to; `of` has it of that role."""
        header = of(self["handshake"]) if "handshake" in self else None
        if header is None:
            raise Malformed("a stored state is past its handshake, and has no header")
        return header


class ModelToServe:
    """The model as a server serves it in a round, worked out once for the round's rows."""

    def __init__(self, setup: OverModel) -> None:
        self._setup, self._sum = setup, shared(setup.sum)
        self._served: tuple[RoundDomain, ServedModel] | None = None

    def over(self, domain: RoundDomain) -> ServedModel:
        if self._served is None or self._served[0] is not domain:
            own = self._setup

            def made() -> ServedModel:
                return served(own.plan, domain.params, own.dense, own.tables)

            self._served = (domain, self._sum.served(made))
        return self._served[1]


FindDomain = Callable[[Kept[UnionOpened] | None], RoundDomain]


class _ByUnion(wire.Codec):
    """A domain by its union's digest; a round that is woken gives what makes it again."""

    least = 1
    _union: Final = wire.Maybe(ByDigest(UnionOpened))
    _made: Final = Supplied(NAME)

    def write(self, out: bytearray, value: RoundDomain) -> None:
        self._union.write(out, value.union)

    def read(self, source: wire.Reader) -> RoundDomain:
        make: FindDomain = self._made.read(source)
        return make(self._union.read(source))

    def references(self, value: RoundDomain) -> Iterator[Any]:
        return self._union.references(value.union)


StoredDomain: TypeAlias = Annotated[RoundDomain, _ByUnion()]
