"""What a table costs a client, through point functions and plainly: exact bytes, from the plan.

Keys have a length that depends on how full the bins are, and so a little on the round's seed;
the figures are those of one seed. Narrow rows, and clients that hold a large part of a table, write
more cheaply by sharing all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tessera.crypto.cuckoo import HASHES, SimpleTable
from tessera.crypto.dpf import SEED_BYTES
from tessera.crypto.forest import BITS, Forest, Values
from tessera.crypto.group import Group
from tessera.protocols.pair.params import MAX_BYTES, PairTable, Read, Write


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one client: through point functions (None: not possible), and of the whole table."""

    points: int | None
    whole: int


def write_bytes(spec: PairTable, group: Group) -> Bytes:
    """What it takes to write to this table, up."""
    whole = (spec.rows * spec.words * group.bits + 7) // 8
    return Bytes(_keys(spec, Values(group, spec.words)), whole)


def read_bytes(spec: PairTable) -> Bytes:
    """What it takes to read from this table: keys up, and both servers' halves down."""
    keys = _keys(spec, BITS)
    down = 2 * (spec.bins + spec.stash) * spec.row_bytes if keys is not None else 0
    return Bytes(None if keys is None else keys + down, spec.rows * spec.row_bytes)


def cheapest(spec: PairTable, group: Group) -> PairTable:
    """The same table with the cheaper way to write it, and the cheaper way to read it."""
    read, write = spec.read, spec.write
    if spec.words:
        cost = write_bytes(spec, group)
        dense = cost.points is None or cost.whole <= cost.points
        write = Write.DENSE if dense else Write.POINTS
    if spec.row_bytes:
        cost = read_bytes(spec)
        whole = cost.points is None or (cost.whole <= cost.points and cost.whole <= MAX_BYTES)
        read = Read.WHOLE if whole else Read.POINTS
    reads, writes = (bool(spec.row_bytes), read), (bool(spec.words), write)
    points = reads == (True, Read.POINTS) or writes == (True, Write.POINTS)
    return replace(spec, read=read, write=write, stash=spec.stash if points else 0)


def _keys(spec: PairTable, values: Values) -> int | None:
    """Keys and two seeds, one of them in the helper's box."""
    if spec.rows < HASHES:
        return None
    domain = spec.rows if spec.ids is None else spec.ids
    table = SimpleTable.of(domain, spec.bins, 0, stash=spec.stash)
    return Forest.of(table.sizes, values).public_bytes + 2 * SEED_BYTES
