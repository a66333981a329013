"""The examples run as they stand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tessera.cli import main as cli

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_model_of_ones_own_trains():
    run = example("own_model").main(rounds=2)
    assert [r["round_id"] for r in run.rounds] == [0, 1]
    assert run.plan.scheme == "secure-submodel"
    assert [t.name for t in run.plan.tables] == ["items", "kinds"]
    assert run.metric > 0.5
    assert run.report().read_text().startswith("<!DOCTYPE html>")


def test_data_of_ones_own_trains():
    own = example("own_data")
    own.synthesise(Path("own.csv"))
    run = own.main(Path("own.csv"), rounds=2)
    assert run.metric is not None
    assert run.facts["task"]["clients"] == 100


def test_a_network_without_tables_trains_between_two_servers():
    run = example("own_dense_model").main(rounds=3)
    assert run.plan.scheme == "two-server" and not run.plan.tables
    assert run.metric > run.facts["trivial"]["largest class"]
    (way,) = dict(run.rounds[-1]["writing"]).values()
    assert way.startswith("keys of")
    assert len((EXAMPLES / "own_dense_model.py").read_text().splitlines()) <= 40


def test_the_module_in_the_example_is_short():
    text = (EXAMPLES / "own_model.py").read_text()
    inside = text[text.index("class Taste") : text.index("def main")].strip().splitlines()
    assert len(inside) <= 25


def test_the_commented_plan_of_every_kind_of_task_is_a_plan(capsys):
    assert cli.main(["init"]) == 0
    assert "taobao-like" in capsys.readouterr().out
