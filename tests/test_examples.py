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
    run = example("own_dense_model").main()
    assert run.plan.scheme == "two-server" and not run.plan.tables
    assert run.metric > run.facts["trivial"]["largest class"]
    (way,) = dict(run.rounds[-1]["writing"]).values()
    assert way.startswith("keys of")
    assert len((EXAMPLES / "own_dense_model.py").read_text().splitlines()) <= 40


def test_a_secure_sum_is_explained_and_exact_and_says_who_dropped_out(capsys):
    explain = example("explain")
    story = explain.main()
    out = capsys.readouterr().out
    assert explain.is_exact(story) and "equal, to the last minute" in out
    assert "NOT EQUAL" not in out
    assert "client 1" in out
    for genre in explain.GENRES:
        assert genre in out
    assert [end.phase for end in story.phase_ends][:3] == ["advertise", "share", "collect"]
    seen = {s.kind for s in story.views.by_party["server"]}
    assert {"Advert", "MaskedInput", "RevealedShares"} <= seen
    assert len(story.views.by_party) == 13


def test_another_number_of_clients_is_explained_as_well():
    explain = example("explain")
    story = explain.main(clients=9, drop=2)
    assert explain.is_exact(story)
    assert len(story.server.sums[0].survivors) == 8
    assert explain.costs(story)["bytes_up"] > 1000


def test_the_active_setting_adds_the_consistency_round():
    explain = example("explain")
    story = explain.main(active=True)
    assert explain.is_exact(story)
    assert [end.phase for end in story.phase_ends].count("consistency") == 2


def test_too_many_dropouts_open_nothing(capsys):
    story = example("explain").main(drop=8)
    out = capsys.readouterr().out
    assert str(story.outcome.aborted).startswith("round 1, ")
    assert "nothing is opened" in out
    assert "the sum it opened" not in out


def test_the_command_of_that_name_says_where_it_went(capsys):
    assert cli.main(["explain"]) == 2
    assert "examples/explain.py" in capsys.readouterr().err


def test_the_module_in_the_example_is_short():
    text = (EXAMPLES / "own_model.py").read_text()
    inside = text[text.index("class Taste") : text.index("def main")].strip().splitlines()
    assert len(inside) <= 25


def test_the_commented_plan_of_every_kind_of_task_is_a_plan(capsys):
    assert cli.main(["init"]) == 0
    assert "taobao-like" in capsys.readouterr().out
