"""WriteCost: is a table written between two servers by keys or by plain shares, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tessera.crypto.cuckoo import HASHES, STASH_ROWS, SimpleTable, bins_for
from tessera.crypto.forest import Forest, Values
from tessera.crypto.ring import Ring
from tessera.crypto.verifiable import correction_bytes
from tessera.plan import Plan, TablePlan, Writing
from tessera.protocols.two_server.params import TwoServerParams, Write

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
