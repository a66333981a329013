"""What a plan means between two servers: their parameters in a round, and how tables are written.

Client, leader and helper each call `pair_params` with what they know themselves; whoever knows
something else does not get past the first message (`protocols/two_server/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from tessera.crypto.cuckoo import HASHES, STASH_ROWS, SimpleTable, bins_for
from tessera.crypto.forest import Forest, Values
from tessera.crypto.ring import Ring
from tessera.ids import RoundId, TableId
from tessera.learning.submodel import Floats, Rows
from tessera.learning.tables import DerivedMap, Table
from tessera.protocols.two_server.opening import Model
from tessera.protocols.two_server.params import (
    Read,
    Servers,
    TwoServerParams,
    TwoServerTable,
    Write,
)
from tessera.protocols.union.decoys import decoy_count
from tessera.protocols.union.sizing import union_bound
from tessera.rounds.plan import Plan, TablePlan, Writing


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
    words = table.width + 1
    shares = -(-domain * words * plan.ring.bits // 8)
    if domain < HASHES:
        return WriteCost(table.name, domain, None, shares, Write.DENSE)
    keys = key_bytes(plan, domain, words)
    wanted = plan.two_server.write
    cheaper = Write.POINTS if keys < shares else Write.DENSE
    write = {Writing.AUTO: cheaper, Writing.DPF: Write.POINTS, Writing.DENSE: Write.DENSE}[wanted]
    return WriteCost(table.name, domain, keys, shares, write)


def key_bytes(plan: Plan, rows: int, words: int) -> int:
    """The length of one table's keys: that of keys made for a table of this size."""
    most = min(plan.union.max_rows, rows)
    return _key_bytes(rows, most, stash_of(plan, rows), plan.ring, words)


@lru_cache(maxsize=256)
def _key_bytes(rows: int, most: int, stash: int, ring: Ring, words: int) -> int:
    """Every client asks for the same in every round, and hashing a large table takes a while."""
    table = SimpleTable.of(rows, bins_for(most, stash=stash), 0, stash=stash)
    return Forest.of(table.sizes, Values(ring, words)).public_bytes


def stash_of(plan: Plan, rows: int) -> int:
    """The stash of a table of so many rows: the plan's, or none where it has no use or no place.

    Each of its keys covers the whole table, so a large one goes without; too small a one is not
    hashed at all. The plan's other tables keep theirs.
    """
    return plan.two_server.stash if HASHES <= rows <= STASH_ROWS else 0


def most_union(plan: Plan) -> int:
    """The most rows that a cohort's union can name, over all tables that clients choose from.

    What the plan lets one client name, decoys included, for everybody; and the strangers that an
    encoding may let in. Those are few and independent: twice their mean and 40 are exceeded with
    probability 2^-70 at most. Whoever is told a larger union is told something else.
    """
    own = plan.union.max_rows * len(plan.roots)
    each = own + decoy_count(own, plan.privacy.decoys)
    strangers = plan.union_encoding(RoundId(0)).expected_false_positives
    named = union_bound(plan.domain, plan.cohort, each)
    return min(plan.domain, named + ceil(2 * strangers) + 40)


def narrowed(
    plan: Plan, union: Mapping[str, Rows], derived: Mapping[str, DerivedMap]
) -> dict[str, Rows]:
    """The union's rows of every table, those of derived tables too."""
    found = dict(union)
    for t in plan.tables:
        if t.derived_from:
            found[t.name] = derived[t.name].rows(found[t.derived_from])
    return found


def _reading(plan: Plan) -> Read:
    return Read.CHECKED if plan.two_server.check else Read.POINTS


def pair_params(
    plan: Plan, round_id: RoundId, servers: Servers, domain: Mapping[str, Rows] | None = None
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
                read=Read.WHOLE if few else _reading(plan),
                write=cost.write,
                stash=stash_of(plan, rows),
            )
        )
    return TwoServerParams(
        federation=plan.federation,
        round_id=round_id,
        plan_hash=plan.digest,
        cohort=plan.cohort,
        min_cohort=max(2, plan.least_survivors),
        group=plan.ring,
        servers=servers,
        tables=tuple(tables),
        dense=plan.model.dense + 1,
        dense_bytes=plan.model.dense * size,
        # A union is as large as its clients' rows: there is nothing smaller to narrow it to.
        row_limit=plan.two_server.row_limit
        if domain is None
        else max([plan.two_server.row_limit, *(t.rows for t in tables)]),
        corrupt=plan.security.corrupt,
    )


def served(
    plan: Plan, params: TwoServerParams, dense: Floats, tables: Mapping[str, Table]
) -> Model:
    """The model as both servers hold it in a round, in the bytes that clients get."""
    dtype = plan.model.precision.dtype
    held = {}
    for spec in params.tables:
        ids = np.arange(spec.rows, dtype=np.uint64) if spec.ids is None else spec.ids
        rows = tables[plan.tables[spec.table].name].rows(ids).astype(dtype)
        held[TableId(spec.table)] = rows.view(np.uint8).reshape(spec.rows, spec.row_bytes)
    return Model(tables=held, dense=dense.astype(dtype).tobytes())
