"""`benchmarks/dpf.py` runs: every function of it, in settings that take no time."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from papers import fsl_measure as fsl
from papers import fsl_tables as fsl_cells
from tessera.crypto import kernel

ROOT = Path(__file__).parents[2]
FIELDS = {
    "what",
    "settings",
    "ours",
    "unit",
    "baseline",
    "baseline_name",
    "ratio",
    "target",
    "ok",
}


@pytest.fixture
def dpf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark with tables of a few rows, each step timed once."""
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.dpf")
    monkeypatch.setattr(module, "timed", lambda work: module.machine.cpu_seconds(work, repeats=1))
    for name, value in (("ROWS", 300), ("HELD", 12), ("SCALARS", 256), ("MANY", 3)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(fsl_cells, "PAPER_SECONDS", {(10, 10): (0.028, 0.012, 0.023)})
    return module


def test_every_part_runs_and_prints_one_object(dpf, monkeypatch, capsys):
    names = list(dict.fromkeys((kernel.active().name, "reference")))
    rows = [
        *dpf.against_limit(names),
        *dpf.against_paper(names),
        *dpf.retrieval_rows(names),
        *dpf.answer_rows(names),
        *dpf.check_rows(names),
        *dpf.peer_rows(names, count=50),
    ]
    assert {row["what"] for row in rows} >= {
        "eval of a leaf",
        "two threads, wall",
        "bytes",
        "gen",
        "cuckoo placement",
        "eval + scatter",
        "answer to one client",
        *(["checked answer, a row", "check of a leaf, more"] if len(names) > 1 else []),
        "gen against sycret",
        "single points against sycret",
    }
    for row in rows:
        assert row.keys() == FIELDS
        assert row["target"] is None or row["ok"] in (True, False, None)
    machine = {"kernel": names[0]}
    dpf.machine.print_report(machine, rows, title="Point functions", as_json=True)
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told == {"machine": machine, "results": rows}


def test_it_times_the_settings_of_the_reproduction(dpf, monkeypatch):
    """One k and one number of bins for a cell of Table 5, whoever measures it."""
    printed = {(5, 30): (1.0, 1.0, 1.0), (10, 10): (1.0, 1.0, 1.0), (6, 20): (1.0, 1.0, 1.0)}
    monkeypatch.setattr(fsl_cells, "PAPER_SECONDS", printed)
    monkeypatch.setattr(fsl_cells, "PAPER_FACTOR", {5: 1.25, 6: 1.27, 10: 1.25})
    targets = dict.fromkeys((5, 6, 10), 1)
    monkeypatch.setattr(fsl_cells, "GEN_TARGETS", {True: targets, False: targets})
    made = [row["settings"] for row in dpf.against_paper(["reference"], most=6)]
    timed = {(one["m"], one["k"], one["bins"]) for one in made if one["scale"] == "paper"}
    assert timed == {(32, 10, fsl.scaled(1.25, 10)), (64, 13, fsl.scaled(1.27, 13))}


def test_cells_that_the_paper_repeats_are_compared_with_nothing(dpf, monkeypatch):
    monkeypatch.setattr(fsl_cells, "REPEATED", {(10, 10)})
    rows = {row["what"]: row for row in dpf.against_paper(["reference"])}
    assert rows["gen"]["ratio"] > 0 and rows["gen"]["target"] == ">= 40"
    assert rows["eval + scatter"]["ratio"] is rows["eval + scatter"]["target"] is None
