"""Where the rows of every table are in bins: public, and the same for everybody in a round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

from tessera.crypto.cuckoo import Layout, SimpleTable
from tessera.crypto.forest import Forest, Values
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.ids import TableId
from tessera.protocols.two_server.messages import Header, Purpose
from tessera.protocols.two_server.params import TwoServerParams, TwoServerTable


@dataclass(frozen=True, slots=True, eq=False)
class Layouts:
    """The layouts of a round by table: of bits for retrieval, of words for writing."""

    reading: dict[TableId, Layout] = field(repr=False)
    writing: dict[TableId, Layout] = field(repr=False)

    def forests(self, purpose: Purpose) -> tuple[Forest, ...]:
        """The trees that a query or a report has keys for, in the order of the tables."""
        chosen = self.reading if purpose is Purpose.RETRIEVE else self.writing
        return tuple(layout.forest for layout in chosen.values())


def layouts_of(params: TwoServerParams, header: Header) -> Layouts:
    """The round's bins, once both nonces are known."""
    return _layouts(params, header.seed, header.write_seed)


@lru_cache(maxsize=4)  # a simulated cohort shares one, and so do the two protocols of a round
def _layouts(params: TwoServerParams, read_seed: bytes, write_seed: bytes) -> Layouts:
    reading: dict[TableId, Layout] = {}
    writing: dict[TableId, Layout] = {}
    for spec in params.tables:
        if not spec.uses_points:
            continue
        if spec.reads_points:
            reading[spec.table] = Layout.of(_hashed(spec, read_seed), spec.selecting)
        if spec.writes_points:
            values = Values(params.group, spec.words)
            writing[spec.table] = Layout.of(_hashed(spec, write_seed), values)
    return Layouts(reading, writing)


@lru_cache(maxsize=32)  # reading and writing share a table's bins in a round with full keys
def _hashed(spec: TwoServerTable, seed: bytes) -> SimpleTable:
    own = hashlib.sha256(encode_context(Label.BINS, seed, spec.table)).digest()
    domain = spec.rows if spec.ids is None else spec.ids
    return SimpleTable.of(domain, spec.bins, int.from_bytes(own[:8], "little"), stash=spec.stash)
