"""`tessera init` writes a plan that reads, says why, and can be run."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from runs import raters
from tessera import tasks
from tessera.cli import main as cli
from tessera.plan import Plan, Scheme, TwoServerPlan


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", list(tasks.TASKS))
@pytest.mark.parametrize("scheme", ["central", ""])
def test_the_plan_of_every_task_reads_back(name, scheme):
    assert cli.main(["init", name, "--scheme", scheme]) == 0
    plan = Plan.read(Path("plan.toml"))
    good = tasks.known(name).recommended
    usual = "secure-submodel" if tasks.known(name).kind.tables else "secure-fedavg"
    assert plan.scheme is Scheme(scheme or usual) and plan.task.name == name
    # what depends on how many clients there are is left to the task, and work in groups is bounded
    if name.startswith("sequences") and not good.training.weight_decay:
        assert "weight_decay" not in plan.partial["training"]  # the task's, by its data
    else:
        assert replace(plan.training, examples=good.training.examples) == good.training
    assert plan.server == (None if good.shrinkage else good.server)
    options = dict(tasks.known(name).options)
    if name.startswith("sequences"):  # the test part is for once
        options["part"] = "validation"
    assert dict(plan.task.options) == options


def test_a_model_without_tables_has_no_rows_to_choose(capsys):
    for scheme in ("submodel", "secure-submodel"):
        assert cli.main(["init", "mnist", "--scheme", scheme]) != 0
        assert "has no tables to choose rows from" in capsys.readouterr().err
    assert cli.main(["init", "mnist", "--scheme", "two-server"]) == 0
    plan = Plan.read(Path("plan.toml"))
    assert plan.selects and plan.update.error_feedback
    assert "identified with" not in capsys.readouterr().out


def test_every_key_of_a_plan_is_in_it():
    cli.main(["init", "taobao-like"])
    text = Path("plan.toml").read_text()
    for key in ("level", "decoys", "crypto", "clip", "dense_clip", "metrics", "threat", "max_rows"):
        assert f"\n{key} = " in text
    part = text.partition("[two_server]")[2].partition("\n[")[0]
    for field in fields(TwoServerPlan):
        assert f"\n{field.name} = " in part


@pytest.mark.parametrize("scheme", ["secure-submodel", "secure-fedavg", "two-server", "fedavg"])
def test_it_says_how_likely_a_holder_is_named_where_the_user_chooses(scheme, capsys, monkeypatch):
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    assert cli.main(["init", "movielens", "--scheme", scheme]) == 0
    said = " ".join(capsys.readouterr().out.split())
    plan = Plan.read(Path("plan.toml"))
    if scheme == "secure-submodel":
        assert plan.grouped and plan.promise.bound() <= 0.2
        assert "identified with at most 10% probability" in said
        assert "where clients come and go nothing exact hides a holder" in said
        assert "identified with probability 1 / group at most (B)" in Path("plan.toml").read_text()
    else:
        assert ("(B = 1)" in said) == (scheme != "fedavg")


def test_in_groups_that_wait_work_is_bounded_by_what_most_clients_have(monkeypatch):
    known = tasks.known("taobao-like")
    known = replace(known, read=partial(known.read, users=40, items=300))
    monkeypatch.setattr(tasks, "known", lambda name: known)
    counts = np.sort(np.diff(tasks.load("taobao-like", users=40, items=300).data.offsets))
    for scheme, most in (("secure-submodel", counts[-3]), ("secure-fedavg", 0)):
        assert cli.main(["init", "taobao-like", "--scheme", scheme, "--out", scheme]) == 0
        assert Plan.read(Path(scheme)).training.examples == most
    assert "95% of clients have no more" in Path("secure-submodel").read_text()


def test_between_two_servers_the_cap_is_what_clients_hold(monkeypatch):
    """Everybody's messages are as long as the cap asks for."""
    known = tasks.known("taobao-like")
    known = replace(known, read=partial(known.read, users=40, items=300))
    monkeypatch.setattr(tasks, "known", lambda name: known)
    assert cli.main(["init", "taobao-like", "--scheme", "two-server"]) == 0
    task = tasks.load("taobao-like", users=40, items=300)
    bound = task.tables.bind(task.build(0))
    rows = [len(ids) for c in range(40) for ids in bound.row_ids_of(task.data.of(c)).values()]
    cap = Plan.read(Path("plan.toml")).union.max_rows
    assert max(rows) <= cap < max(rows) + 16 and cap < known.recommended.max_rows
    assert f"clients hold {max(rows):,} at most, " in Path("plan.toml").read_text()


def test_without_its_data_the_cap_is_the_tasks_and_says_what_it_costs(monkeypatch):
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    assert cli.main(["init", "movielens", "--scheme", "two-server"]) == 0
    assert Plan.read(Path("plan.toml")).union.max_rows == 2_500
    assert "everybody's messages are as long as this asks for" in Path("plan.toml").read_text()


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


def shrink(*more: tuple[str, str]) -> None:
    """The plan for a shop that trains in no time."""
    text = Path("plan.toml").read_text()
    for old, new in (
        ("users = 2000", "users = 30"),
        ("items = 20000", "items = 100"),
        ("examples = 100", "examples = 8"),
        ("history = 50", "history = 4"),
        ("cohort = 100", "cohort = 10"),
        *more,
    ):
        assert old in text
        text = text.replace(old, new)
    Path("plan.toml").write_text(text)


def test_two_servers_are_described_alike_before_a_run_and_in_it(capsys):
    cli.main(["init", "taobao-like"])
    shrink(('scheme = "secure-submodel"', 'scheme = "two-server"'), ("= 1000 ", "= 70 "))
    capsys.readouterr()
    assert cli.main(["plan", "plan.toml", "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)
    assert {table["name"] for table in forecast["two_server"]["tables"]} == set(forecast["rows"])
    held = forecast["held"]
    assert (
        0 < held["mean"] < held["most"] < 70 and held["mean"] < forecast["fewer_rows"]["max_rows"]
    )
    assert any(f"{held['most']} at most: max_rows = " in note for note in forecast["notes"])
    one = ["--rounds", "1", "--trainer", "sequential", "--json"]
    assert cli.main(["run", "plan.toml", *one]) == 0
    folder = Path(json.loads(capsys.readouterr().out)["folder"])
    assert json.loads((folder / "run.json").read_text())["two_server"] == forecast["two_server"]
    shrink_to_union = Path("plan.toml").read_text().replace('domain = "auto"', 'domain = "union"')
    Path("plan.toml").write_text(shrink_to_union)
    assert cli.main(["run", "plan.toml", *one]) == 0
    folder = Path(json.loads(capsys.readouterr().out)["folder"])
    told = json.loads((folder / "run.json").read_text())["two_server"]
    assert told.keys() == forecast["two_server"].keys()
    assert (told["domain"], told["tables"], told["aes_blocks"]) == ("union", [], None)


def test_it_can_be_checked_and_run(capsys):
    cli.main(["init", "taobao-like"])
    shrink()
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


def test_synthetic_clients_and_a_task_exclude_each_other(capsys):
    cli.main(["init", "taobao-like"])
    capsys.readouterr()
    assert cli.main(["run", "plan.toml", "--clients", "10"]) == 2
    assert "is for synthetic clients" in capsys.readouterr().err


def test_an_epsilon_writes_the_plan_that_is_expected_to_learn_most():
    """Of a made-up rating task: by a schedule where not everybody can be in one round."""
    from tessera.cli.init_noise import best_plan, candidates
    from tessera.plan import Trust
    from tessera.plan.places import PACE
    from tessera.tasks.known import known

    task = raters.task(factors=0, mask="linear", refit=True)
    private = known("ratings-100k").recommended.private
    assert private is not None
    clients = task.data.clients
    few = list(candidates(task, private, 3.0, "", clients // 4))
    assert all(plan.cohorts.scheduled for plan in few)
    for plan in few:  # every round of a pass has nearly as many clients as the others
        passes = -(-clients // plan.cohort)
        assert plan.simulation.rounds == passes and passes * plan.cohort - clients < passes
        assert plan.server is not None and plan.server.rate == round(PACE / passes, 4)
    assert any(plan.dp.correlated for plan in few)
    assert not any(plan.dp.correlated for plan in few if plan.dp.trust is Trust.SHARES)
    everybody = list(candidates(task, private, 3.0, "fedavg", clients))
    assert {plan.cohort for plan in everybody} == {clients}
    assert {plan.dp.trust for plan in everybody} == {Trust.SERVER}
    best = best_plan(task, private, 3.0, "fedavg", clients)
    assert best.plan.scheme is Scheme.FEDAVG and best.plan.dp.delta < 1.0 / clients


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dp", "-3"), "not an epsilon"),
        (("--dp", "inf"), "not an epsilon"),
        (("--dp", "people"), "--dp people"),
        (("--dp", "3", "--at-once", "1"), "--at-once 1"),
    ],
)
def test_a_bad_epsilon_has_a_hint(tmp_path, capsys, arguments, said):
    out = tmp_path / "plan.toml"
    assert cli.main(["init", "ratings-100k", "--out", str(out), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and "hint: " in err
    assert not out.exists()
