"""What a server sends of its model takes no more than the rows it is about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rounds.population import DENSE, plan
from tessera.ids import RoundId
from tessera.learning.tables.table import LazyTable, TableSpec, Uniform
from tessera.rounds.delivery import SentModel

HUGE = 1 << 39
"""Rows of a table whose row numbers alone would take four terabytes."""


def test_a_download_of_some_rows_does_not_depend_on_how_many_the_table_has():
    settings = plan("secure-submodel")
    tables = tuple(replace(t, rows=HUGE) if t.name == "goods" else t for t in settings.tables)
    settings = replace(settings, tables=tables)
    specs = [
        TableSpec(name=t.name, size=t.rows, width=t.width, initial=Uniform(0.01)) for t in tables
    ]
    model = {spec.name: LazyTable(spec) for spec in specs}
    sent = SentModel(settings, np.zeros(DENSE, dtype=np.float32), model, dict)

    rows = np.array([0, HUGE - 1], dtype=np.uint64)
    download = sent.download(RoundId(1), {"goods": rows})
    assert list(download.tables) == [settings.table_id("goods")]
    values = model["goods"].values(rows).astype(settings.model.precision.dtype)
    assert download.tables[settings.table_id("goods")] == values.tobytes()

    common = sent.common(len(settings.stages) - 1)
    assert len(common) == 32 and common == sent.common(len(settings.stages) - 1)
