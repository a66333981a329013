"""`tessera init` writes a plan that reads, says why, and can be run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera import tasks
from tessera.interfaces import cli
from tessera.rounds.plan import Plan, Scheme


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", list(tasks.TASKS))
@pytest.mark.parametrize("scheme", ["central", "secure-submodel"])
def test_the_plan_of_every_task_reads_back(name, scheme):
    assert cli.main(["init", name, "--scheme", scheme]) == 0
    plan = Plan.read(Path("plan.toml"))
    good = tasks.known(name).recommended
    assert plan.scheme is Scheme(scheme) and plan.task.name == name
    # what depends on how many clients there are is left to the task
    assert (plan.training, plan.server) == (good.training, None if good.pull else good.server)
    assert dict(plan.task.options) == tasks.known(name).options


def test_every_key_of_a_plan_is_in_it():
    cli.main(["init", "taobao-like"])
    text = Path("plan.toml").read_text()
    for key in ("level", "decoys", "crypto", "clip", "dense_clip", "metrics", "threat", "max_rows"):
        assert f"\n{key} = " in text


def test_a_file_that_is_there_is_left_alone(capsys):
    Path("plan.toml").write_text("mine")
    assert cli.main(["init", "taobao-like"]) == 2
    assert Path("plan.toml").read_text() == "mine"
    assert "hint: name another with --out" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["amazom"], ["taobao-like", "--scheme", "open"]])
def test_what_is_not_there_is_refused(arguments, capsys):
    assert cli.main(["init", *arguments]) == 2
    assert "hint: " in capsys.readouterr().err
    assert not Path("plan.toml").exists()


def test_it_can_be_checked_and_run(capsys):
    cli.main(["init", "taobao-like"])
    text = Path("plan.toml").read_text()
    for old, new in (
        ("users = 2000", "users = 30"),
        ("goods = 20000", "goods = 100"),
        ("examples = 100", "examples = 8"),
        ("history = 50", "history = 4"),
        ("cohort = 100", "cohort = 6"),
    ):
        assert old in text
        text = text.replace(old, new)
    Path("plan.toml").write_text(text)
    capsys.readouterr()
    assert cli.main(["plan", "plan.toml", "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)
    assert set(forecast["rows"]) == {"items", "categories", "biases"}
    assert cli.main(["run", "plan.toml", "--rounds", "2", "--trainer", "sequential", "--json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["rounds"] == told["measured_rounds"] == 2
    assert told["final"] == told["curve"][-1][1]
    assert set(told["trivial"]) == {"user mean", "item mean", "sum"}
    assert "round 2/2  AUC 0." in captured.err
    assert (Path(told["folder"]) / "report.html").exists()
    # and it goes on
    again = ["run", told["folder"], "--resume", "--rounds", "3", "--trainer", "sequential"]
    assert cli.main([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 3
    assert cli.main(again) == 0
    assert "AUC" in capsys.readouterr().out


def test_made_up_clients_and_a_task_exclude_each_other(capsys):
    cli.main(["init", "taobao-like"])
    capsys.readouterr()
    assert cli.main(["run", "plan.toml", "--clients", "10"]) == 2
    assert "makes clients up" in capsys.readouterr().err
