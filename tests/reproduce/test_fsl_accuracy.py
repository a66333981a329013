"""Tables 7 and 8 of Cui et al. 2022, on a network of a few parameters: cells, twins, going on."""

from __future__ import annotations

import pytest

from papers import fsl_accuracy as accuracy
from papers.cells import Request
from papers.fsl_accuracy import ACCURACY, ALL, BYTES, Selecting, Trial
from rounds.two_server.test_top import task as rows_task
from simulation import test_top as dense
from tessera import api
from tessera.errors import ConfigError

ROWS = (
    Selecting(ALL, {}, 97.47, 10.0),
    Selecting("few", {"top": 0.05, "error_feedback": True}, 97.0, 99.9),
)


@pytest.fixture
def small(monkeypatch):
    """The tasks of another size; how often each was loaded."""
    monkeypatch.setattr(accuracy, "TRIALS", {"trec": Trial("trec", 4, 4, 2, ROWS)})
    monkeypatch.setattr(accuracy.tasks, "load", lambda name, **options: dense.task())


def request(folder, **more) -> Request:
    return Request(parts=("trec",), cache=folder, **more)


@pytest.mark.slow
def test_a_cell_has_accuracy_bytes_and_a_twin(small, tmp_path, monkeypatch):
    found = {
        (c.row, c.column): c for c in accuracy.cells(request(tmp_path, seeds=(0, 1), rounds=4))
    }
    assert set(found) == {(row, column) for row in (ALL, "few") for column in (ACCURACY, BYTES)}
    few, whole = found["few", ACCURACY], found[ALL, ACCURACY]
    assert "target 99.9: MISSED" in few.note and "the plain twin's model" in few.note
    assert "NOT" not in few.note and "target 10: met" in whole.note and whole.paper == 97.47
    assert "of plain shares of everything" in found["few", BYTES].note
    assert found["few", BYTES].ours > 0

    def again(*arguments, **more):
        raise AssertionError("it was trained already")

    monkeypatch.setattr(api, "simulate", again)
    kept = accuracy.cells(request(tmp_path, seeds=(0, 1), rounds=4))
    assert [c.ours for c in kept] == [c.ours for c in found.values()]


def test_a_last_round_that_is_another_is_noticed(small, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "_is_the_twin", lambda *given: False)
    cells = accuracy.cells(request(tmp_path, quick=True, variants=("few",)))
    assert "NOT the plain twin's model" in cells[0].note


def test_rows_of_a_layer_are_selected_in_the_tables_too(tmp_path, monkeypatch):
    rows = (Selecting("rows", {"top": 0.01, "top_by": "row"}, None, 1.0),)
    monkeypatch.setattr(accuracy, "TRIALS", {"trec": Trial("trec", 4, 2, 2, rows)})
    monkeypatch.setattr(accuracy.tasks, "load", lambda name, **options: rows_task("row"))
    cells = accuracy.cells(request(tmp_path, quick=True))
    assert "the plain twin's model" in cells[0].note and "NOT" not in cells[0].note


def test_without_data_nothing_is_made_up(tmp_path):
    with pytest.raises(ConfigError, match="no data set is there"):
        accuracy.cells(request(tmp_path, data=tmp_path))


def test_a_row_that_no_table_has_is_refused_by_name(small, tmp_path):
    with pytest.raises(ConfigError, match="unknown row 'fewer'"):
        accuracy.cells(request(tmp_path, quick=True, variants=("fewer",)))


def test_names_of_rows_have_no_comma_which_separates_them():
    assert not any("," in row.name for trial in accuracy.TRIALS.values() for row in trial.rows)
