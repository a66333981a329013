"""Learning curves: every cell once, cached, resumable, and told as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from papers import sfsl_curves as curves
from papers.cells import Request
from tessera import api
from tessera.cli import main as cli
from tessera.errors import ConfigError
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Scheme

TINY = {"users": 20, "items": 80, "examples": 8, "history": 4}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(curves, "COHORT", 5)
    monkeypatch.setattr(
        curves,
        "SETS",
        (
            curves.DataSet("shop", "taobao-like", TINY, training=LocalTraining(batch=4, rate=0.1)),
            curves.DataSet("films", "movielens"),
        ),
    )


def run(*arguments: str, capsys) -> dict:
    assert cli.main(["reproduce", "sfsl", "--part", "curves", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_variant_is_a_cell_and_missing_sets_are_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    arguments = ["reproduce", "sfsl", "--part", "curves", "--seeds", "0,1", "--rounds", "2"]
    assert cli.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert "left out" in captured.err and "MovieLens 1M" in captured.err
    cells = json.loads(captured.out)["cells"]
    last = {c["row"]: c for c in cells if c["table"].startswith("AUC at round 2, shop")}
    for level in ("CPP1", "CPP2", "CPP3", "CPP4", "CPP5"):
        assert 0.0 < last[level]["ours"] < 1.0
        assert "over 2 seeds" in last[level]["note"]
    assert {"central", "full-model averaging", "sum, no model"} <= set(last)
    assert last["central"]["paper"] == 0.641
    assert "to central" in last["CPP1"]["note"]
    assert last["CPP5"]["ours"] == last["CPP1"]["ours"]
    assert "CPP1's to the last digit" in last["CPP5"]["note"]
    assert [c["column"] for c in cells if c["table"] == "AUC by round, shop"][:1] == ["2"]


def test_what_was_done_is_not_done_again_and_what_was_stopped_goes_on(capsys, monkeypatch):
    few = ["--seeds", "0", "--variants", "cpp1", "--sets", "shop"]
    first = run(*few, "--rounds", "2", capsys=capsys)
    ran: list[str] = []
    monkeypatch.setattr(api, "simulate", lambda *a, **k: ran.append("again"))
    assert run(*few, "--rounds", "2", capsys=capsys)["cells"] == first["cells"]
    assert not ran


def test_the_papers_setting_is_insecure_and_says_so():
    data = curves.SETS[0]
    plan = curves.plan_for(data, "cpp3", 0, 10, quick=False)
    assert plan.privacy.insecure_small_groups and plan.privacy.min_group == 1
    assert plan.privacy.decoys == 0.0 and plan.privacy.level == "cpp3"
    assert curves.plan_for(data, "fedavg", 0, 10, quick=False).scheme is Scheme.FEDAVG
    assert curves.plan_for(data, "fedavg", 0, 10, quick=False).task.options["share_users"]


@pytest.mark.parametrize("bad", [["--seeds", "one"], ["--sets", "nothing"], ["--part", "curve"]])
def test_what_is_not_there_is_refused(bad, capsys):
    assert cli.main(["reproduce", "sfsl", "--part", "curves", "--rounds", "1", *bad]) == 2
    assert "hint: " in capsys.readouterr().err


def test_figures_are_means_over_the_seeds_that_have_the_round(tmp_path, monkeypatch):
    drawn = [
        curves.LearningCurve("s", "cpp1", 0, {5: 0.6, 10: 0.7}, tmp_path),
        curves.LearningCurve("s", "cpp1", 1, {5: 0.5, 10: 0.8}, tmp_path),
        curves.LearningCurve("s", "cpp5", 0, {5: 0.6, 10: 0.7}, tmp_path),
    ]
    found = curves.figures(drawn)
    assert found["cpp1", 10] == [0.7, 0.8] and found["cpp5", 10] == [0.7]
    monkeypatch.setattr(curves.RunFolder, "load", lambda _: SimpleNamespace(fact=lambda _: {}))
    cells = {(c.table[:5], c.row): c for c in curves.set_cells("s", drawn)}
    assert cells["AUC a", "CPP1"].ours == pytest.approx(0.75)
    assert cells["AUC a", "CPP1"].note == "+- 0.0500 over 2 seeds"
    assert curves.same_model(drawn) is True
    assert curves.same_model(drawn[:2]) is None
    request = Request(parts=("curves",), cache=tmp_path, quick=True, rounds=1)
    with pytest.raises(ConfigError, match="no data set"):
        curves.run_all(replace(request, sets=("films",), data=tmp_path))
