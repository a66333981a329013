"""Negatives: rows that a client takes beside its own, so that a softmax has more than its targets.

They are drawn from the client's lasting secret, once and for good: negatives drawn anew leave the
client's own rows in the intersection of what it asked for before and after. They count as the
client's rows everywhere: under `max_rows`, in unions, answers, downloads and updates. What they
hide and what not: docs/threat-model.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.learning.tables.arrays import Ids
from tessera.protocols.union import decoys


def with_negatives(
    real: Mapping[str, Ids], table: str, rows: int, negatives: int, secret: Secret
) -> dict[str, Ids]:
    """A client's rows by table, with `negatives` others of this one, which has so many rows.

    Uniform among the rows that are not its own; all of them, if there are no more.
    """
    own = real[table]
    stream = Stream.of(secret, Label.NEGATIVES, table)
    drawn = decoys.draw_others(own, decoys.WholeTable(rows), stream, negatives)
    return {**real, table: np.union1d(own, drawn)}
