"""Event 2 is a row that no member of its group holds, and not one that was not trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit import runs
from tessera.audit.finding import Finding, Verdict
from tessera.audit.record import Record
from tessera.audit.row_counts import Events
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TableUpdate


def event_2(folder: Path) -> Finding:
    record = Record.load(folder)
    events = Events(record.plan.group_plan, record.truth)
    for view in record.rounds():
        events.take(view)
    return events.findings()[1]


def half_trained(submodel: Submodel) -> ModelUpdate:
    """As with `[training] examples`: some of the rows have no example in this round."""
    ids = submodel.trained["goods"]
    some = (ids % 2).astype(np.int64)
    values = TableUpdate(np.full((len(ids), runs.WIDTH), 0.25) * some[:, None], some)
    return ModelUpdate(np.zeros(0), 1, {"goods": values})


def test_a_held_row_without_an_example_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "train", half_trained)
    plan = runs.plan_of(cohort=12, rows=250, level="groups", group=6)
    found = event_2(runs.record(tmp_path, plan, 3, clients=12))
    assert found.trials > 100 and found.measured == 0.0 and found.verdict is Verdict.HOLDS


def test_rows_of_a_late_dropout_still_are(tmp_path: Path) -> None:
    plan = runs.plan_of(cohort=8, rows=400, level="cpp5")
    found = event_2(runs.record(tmp_path, plan, 6, clients=8, drops=0.3))
    assert found.measured > 0.05
