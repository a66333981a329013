"""The model that both servers serve in a round, and the digests of it that they sign."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import MisuseError
from tessera.ids import TableId
from tessera.protocols.two_server.params import TwoServerParams

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """Rows as bytes, in the order of each table's domain, and the dense part as bytes."""

    tables: Mapping[TableId, Bytes] = field(default_factory=dict, repr=False)
    dense: bytes = field(default=b"", repr=False)

    def check(self, params: TwoServerParams) -> None:
        due = {t.table: (t.rows, t.row_bytes) for t in params.read}
        if {t: rows.shape for t, rows in self.tables.items()} != due:
            raise MisuseError("two servers: the model has other tables than the round")
        if any(rows.dtype != np.uint8 for rows in self.tables.values()):
            raise MisuseError("two servers: rows are served as bytes")
        if len(self.dense) != params.dense_bytes:
            raise MisuseError(f"two servers: a dense part of {len(self.dense)} bytes")

    def digests(self, params: TwoServerParams) -> tuple[dict[TableId, bytes], bytes]:
        """(digest of every table, digest of the dense part), as the header states them."""
        self.check(params)
        tables = {t.table: table_digest(t.table, self.tables[t.table]) for t in params.read}
        return tables, dense_digest(self.dense)


def table_digest(table: TableId, rows: Bytes) -> bytes:
    shape = encode_context(Label.TABLE_DIGEST, table, *rows.shape)
    return hashlib.sha256(shape + np.ascontiguousarray(rows).tobytes()).digest()


def dense_digest(dense: bytes) -> bytes:
    return hashlib.sha256(encode_context(Label.DENSE_DIGEST, wire.part_digest(dense))).digest()
