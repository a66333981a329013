"""What a client is sent of the model: whether it is fit, and the digests that masks are bound to.

Both sides compute them from the same bytes, those of `Download`. What everybody is sent alike is
the dense part, or the whole model where clients do not ask for rows; of a row a client has a digest
if it asked for it. A server that gives two clients different models cannot open the sum
(`protocols/secagg/transcript.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.ids import RoundId, StageId, TableId
from tessera.learning.tables.submodel import Floats, Ids, TablePart
from tessera.learning.tables.table import StoredTable
from tessera.plan import Plan
from tessera.protocols.secagg.transcript import NOTHING, Digests, Received
from tessera.rounds import select
from tessera.rounds.messages import Download

ROWS_SENT: Final = b"row sent"
"""BLAKE2s' personalisation: no other hash in the tree is the same function."""


def model_digest(dense: bytes, tables: Mapping[TableId, bytes]) -> bytes:
    """Of the dense part, and of those tables that everybody is sent whole."""
    parts = [p for t in sorted(tables) for p in (t, hashlib.sha256(tables[t]).digest())]
    named = encode_context(Label.MODEL_DIGEST, hashlib.sha256(dense).digest(), *parts)
    return hashlib.sha256(named).digest()


def row_digests(values: bytes, row_bytes: int, at: npt.NDArray[np.integer[Any]]) -> Digests:
    """One digest for each of the rows at these places, of its values as they are sent.

    A client has thousands of rows, so they are hashed in one call of the kernel. Which row a digest
    is of follows from its place, so that all have the number 0.
    """
    rows = np.frombuffer(values, dtype=np.uint8).reshape(-1, row_bytes)[at]
    return kernel.active().row_digests(ROWS_SENT, np.zeros(len(rows), dtype=np.uint64), rows)


def received(plan: Plan, download: Download, included: Mapping[TableId, Ids] | None) -> Received:
    """What a client was sent, for its input with these rows.

    `included` are their places among the rows that it requested, by table; None if it was sent the
    whole model.
    """
    if included is None:
        return Received(common=model_digest(download.dense, download.tables))
    rows = {}
    for table, at in included.items():
        row_bytes = plan.tables[table].width * plan.model.precision.dtype.itemsize
        rows[table] = row_digests(download.tables[table], row_bytes, at)
    return Received(common=model_digest(download.dense, {}), rows=rows)


def model_flaw(plan: Plan, dense: Floats, tables: Mapping[str, Floats]) -> str:
    """What is wrong with a model that was sent; "" if its values are finite and in range."""
    largest = plan.model.largest
    for values in (dense, *tables.values()):
        # NaN compares as false.
        if values.size and not (-largest <= values.min() and values.max() <= largest):
            return "sent a model with values that are not finite, or beyond the plan's largest"
    return ""


class UnfitModel(ValueError):
    """A model that a client cannot compute with; its text says what the server did."""


def model_parts(
    plan: Plan, download: Download, requested: Mapping[str, Ids]
) -> tuple[Floats, dict[str, TablePart]]:
    """The dense part and the requested rows as they were sent; `UnfitModel` if they are not."""
    tables = plan.table_ids
    if download.tables.keys() != tables.keys():
        raise UnfitModel("sent other tables than were requested")
    dtype = plan.model.precision.dtype
    values = {
        t.name: _floats(download.tables[table], (len(requested[t.name]), t.width), dtype)
        for table, t in tables.items()
    }
    dense = _floats(download.dense, (plan.model.dense,), dtype)
    if flaw := model_flaw(plan, dense, values):
        raise UnfitModel(flaw)
    return dense, {name: TablePart(requested[name], part) for name, part in values.items()}


def _floats(data: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Floats:
    if len(data) != int(np.prod(shape)) * dtype.itemsize:
        raise UnfitModel(f"sent {len(data)} bytes for {shape} parameters")
    values: Floats = np.frombuffer(data, dtype=dtype).reshape(shape)
    return values.astype(np.float32, copy=False)  # a view where nothing is to be converted


class SentModel:
    """The digests of what a server sends in a round, from its model, computed when asked for.

    `union` gives the rows by table that positions are places in; nothing where there is no union.
    """

    def __init__(
        self,
        plan: Plan,
        dense: Floats,
        tables: Mapping[str, StoredTable],
        union: Callable[[], Mapping[str, Ids]],
    ) -> None:
        self._plan, self._dense, self._tables, self._union = plan, dense, tables, union
        self._common = b""

    def download(self, round_id: RoundId, rows: Mapping[str, Ids] | None) -> Download:
        """These rows of every table, or all of them; and the dense part."""
        plan, dtype = self._plan, self._plan.model.precision.dtype
        if rows is None:
            rows = plan.sent_rows
        tables = {
            plan.table_id(name): self._tables[name].values(ids).astype(dtype).tobytes()
            for name, ids in rows.items()
        }
        return Download(round_id=round_id, dense=self._dense.astype(dtype).tobytes(), tables=tables)

    def common(self, stage: StageId) -> bytes:
        if stage != len(self._plan.stages) - 1:
            return NOTHING  # only the last stage's inputs follow from the model
        if not self._common:
            sent = self.download(RoundId(0), {} if self._plan.by_rows else None)
            self._common = model_digest(sent.dense, sent.tables)
        return self._common

    def rows(self, stage: StageId, table: TableId, positions: Ids) -> Digests:
        t = self._plan.tables[table]
        ids = select.ids_at(self._union(), t.name, positions)
        values = self._tables[t.name].values(ids).astype(self._plan.model.precision.dtype)
        every = np.arange(len(ids), dtype=np.uint64)
        return row_digests(values.tobytes(), t.width * values.itemsize, every)
