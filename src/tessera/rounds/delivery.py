"""What a client is sent of the model: whether it is fit, and the digests that masks are bound to.

Both sides compute them from the same bytes, those of `Download`. What everybody is sent alike is
the dense part, or the whole model where clients do not ask for rows; of a row a client has a digest
if it asked for it. A server that gives two clients different models opens nothing
(`protocols/secagg/binding.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.ids import StageId, TableId
from tessera.learning.arrays import Floats, Ids
from tessera.protocols.secagg.binding import DIGEST_BYTES, NOTHING, Digests, Received
from tessera.rounds.messages import Download
from tessera.rounds.plan import Plan


def model_digest(dense: bytes, tables: Mapping[TableId, bytes]) -> bytes:
    """Of the dense part, and of those tables that everybody is sent whole."""
    parts = [p for t in sorted(tables) for p in (t, hashlib.sha256(tables[t]).digest())]
    named = encode_context(Label.MODEL_DIGEST, hashlib.sha256(dense).digest(), *parts)
    return hashlib.sha256(named).digest()


def row_digests(values: bytes, row_bytes: int, at: npt.NDArray[np.int64]) -> Digests:
    """One digest for each of the rows at these places, of its values as they are sent."""
    view = memoryview(values)
    starts = (at * row_bytes).tolist()
    found = b"".join([hashlib.sha256(view[i : i + row_bytes]).digest() for i in starts])
    return np.frombuffer(found, dtype=np.uint8).reshape(len(at), DIGEST_BYTES)


def received(
    plan: Plan,
    download: Download,
    asked: Mapping[str, Ids] | None,
    included: Mapping[TableId, Ids],
) -> Received:
    """What a client was sent, for its input with these rows.

    `asked` are the positions that it requested, by table; None if it was sent the whole model.
    """
    if asked is None:
        return Received(common=model_digest(download.dense, download.tables))
    rows = {}
    for table, positions in included.items():
        t = plan.tables[table]
        at = np.searchsorted(asked[t.name], positions)
        row_bytes = t.width * plan.model.precision.dtype.itemsize
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


@dataclass(slots=True)
class SentModel:
    """The digests of what a server has sent in a round, computed when they are asked for.

    `tables` has the positions of the rows that were sent to anybody, ascending, and their values.
    """

    stage: StageId  # whose inputs follow from the model
    model: bytes = NOTHING
    tables: dict[TableId, tuple[Ids, npt.NDArray[np.generic]]] = field(
        default_factory=dict, repr=False
    )

    def common(self, stage: StageId) -> bytes:
        return self.model if stage == self.stage else NOTHING

    def rows(self, stage: StageId, table: TableId, positions: Ids) -> Digests:
        known, values = self.tables[table]
        row_bytes = values.shape[1] * values.itemsize
        return row_digests(values.tobytes(), row_bytes, np.searchsorted(known, positions))
