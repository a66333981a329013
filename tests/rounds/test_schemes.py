"""One entry makes a scheme known to every command, forecast, attack and section of a page."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from tessera.api import simulate
from tessera.audit import suite
from tessera.audit.record import Record
from tessera.cli import init as init_command
from tessera.cli import main as cli
from tessera.cli import privacy  # noqa: F401 (it keeps the constant that a fixture changes)
from tessera.errors import ConfigError
from tessera.plan import Plan, PrivacyPlan, Scheme, TaskPlan, UnionPlan
from tessera.privacy.index import identification_forecast as naming_draws
from tessera.report import page
from tessera.report.figures import RunFigures
from tessera.report.sections import costs, safety, summary
from tessera.rounds import schemes
from tessera.rounds.forecast import Forecast
from tessera.rounds.forecast.forecast import identification_forecast
from tessera.rounds.schemes import CATEGORIES, SCHEMES, Knowledge, SchemeEntry
from tessera.tasks import Task, load

EVERY = [pytest.param(entry, id=entry.name) for entry in SCHEMES.values()]
FEDERATED = [pytest.param(entry, id=entry.name) for entry in SCHEMES.values() if entry.federated]

PLAN = """
scheme = "{scheme}"
cohort = 6
[model]
dense = 4
[[table]]
name = "goods"
rows = 90
width = 2
[privacy]
level = "cpp2"
[union]
max_rows = 12
"""


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(naming_draws, "MOST_ROWS", 50)


@pytest.fixture(scope="module")
def task() -> Task:
    return load("taobao-like", users=12, items=60, examples=6, history=3)


@pytest.fixture(scope="module")
def runs(task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A round of training under every scheme."""
    base = tmp_path_factory.mktemp("runs")
    for entry in SCHEMES.values():
        plan = Plan(
            scheme=entry.scheme,
            cohort=6,
            task=TaskPlan(name="taobao-like", options={"users": 12, "items": 60}),
            privacy=PrivacyPlan(level="cpp2"),
            union=UnionPlan(max_rows=40),
        )
        simulate(task, plan, 1, out=base / entry.name)
    return {name: base / name for name in map(str, SCHEMES)}


def command(*arguments: str, status: int = 0) -> None:
    assert cli.main([*arguments]) == status


# --- the table ------------------------------------------------------------------------------------


def test_there_is_an_entry_for_every_scheme_a_plan_may_have() -> None:
    assert list(SCHEMES) == list(Scheme)
    assert schemes.DEFAULT in SCHEMES


@pytest.mark.parametrize("entry", EVERY)
def test_an_entry_says_everything(entry: SchemeEntry) -> None:
    assert entry.title
    assert entry.description.endswith(".")
    for part in fields(Knowledge):
        assert getattr(entry.knowledge, part.name), part.name
    assert bool(entry.no_epsilon) is not entry.randomises
    assert bool(entry.no_epsilon_because) is (entry.hides and not entry.randomises)


@pytest.mark.parametrize("entry", EVERY)
def test_its_properties_are_those_that_its_plan_goes_by(entry: SchemeEntry) -> None:
    scheme = entry.scheme
    assert (entry.masks, entry.hides, entry.by_rows) == (
        scheme.secure,
        scheme.hides,
        scheme.by_rows,
    )
    assert schemes.of(Plan(scheme=scheme, cohort=6, index_privacy="cpp4")) is entry
    assert schemes.named(entry.name) is entry


def test_other_keys_of_a_plan_make_a_variant_of_its_scheme() -> None:
    groups = Plan(scheme="secure-submodel", cohort=6, index_privacy="groups")
    narrow = Plan(scheme="two-server", cohort=6, two_server={"domain": "union"})
    for plan, variant in ((groups, schemes.GROUPED), (narrow, schemes.NARROWED)):
        assert schemes.of(plan) is variant and variant.scheme is plan.scheme
        assert variant.knowledge.plan != SCHEMES[plan.scheme].knowledge.plan
    assert [p.name for p in schemes.NARROWED.phases(narrow)][:2] == ["advertise", "share"]
    assert schemes.NARROWED.rows.union and not SCHEMES[narrow.scheme].rows.union


def test_there_is_one_way_to_be_unfederated_and_masks_hide() -> None:
    assert [e.name for e in SCHEMES.values() if not e.federated] == ["central"]
    assert all(e.hides for e in SCHEMES.values() if e.rows.capped)


def test_an_unknown_scheme_is_an_error_and_not_a_plain_one() -> None:
    with pytest.raises(ConfigError, match="--scheme tripled: unknown scheme"):
        schemes.named("tripled", option="--scheme")


def test_a_role_refuses_the_plans_of_others() -> None:
    plan = Plan(scheme="two-server", cohort=6)
    with pytest.raises(ConfigError, match="a client does not run scheme 'two-server'"):
        schemes.check("a client", plan, two_servers=False)
    schemes.check("a leader", plan, two_servers=True)


# --- through every command ------------------------------------------------------------------------


@pytest.mark.parametrize("entry", FEDERATED)
def test_plan_predicts_it(entry: SchemeEntry, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.toml").write_text(PLAN.format(scheme=entry.name))
    command("plan", "plan.toml", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["server_learns"] == entry.knowledge.plan
    assert found["bytes"]["total_up"] > 0 and found["bytes"]["total_down"] > 0
    assert {*found["bytes"]["up"], *found["bytes"]["down"]} <= set(CATEGORIES)
    assert (found["security"] is not None) is entry.masks
    assert (found["privacy"] is not None) is entry.randomises
    assert (found["two_server"] is not None) is entry.two_servers
    assert (found["naming"] is not None) is entry.hides
    command("plan", "plan.toml")
    assert "learn" in capsys.readouterr().out


@pytest.mark.parametrize("entry", EVERY)
def test_an_example_of_it_is_a_plan(entry: SchemeEntry, capsys: pytest.CaptureFixture[str]) -> None:
    command("plan", "--example", entry.name)
    assert Plan.parse(capsys.readouterr().out).scheme is entry.scheme


@pytest.mark.parametrize("entry", EVERY)
def test_init_writes_a_plan_of_it(entry: SchemeEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_command, "counted", lambda plan: None)
    command("init", "taobao-like", "--scheme", entry.name)
    assert Plan.read(Path("plan.toml")).scheme is entry.scheme


@pytest.mark.parametrize("entry", EVERY)
def test_privacy_says_what_it_reveals(
    entry: SchemeEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--clients", "8", "--rounds", "2", "--cpp", "2") if entry.randomises else ()
    command("privacy", "--scheme", entry.name, *options, "--json")
    found = json.loads(capsys.readouterr().out)
    if entry.randomises:
        assert found["naming"]
        return
    assert (found["why"], found["released"]) == (entry.no_epsilon, entry.knowledge.server)
    assert found["not_covered"]
    command("privacy", "--scheme", entry.name)
    text = " ".join(capsys.readouterr().out.split())
    assert entry.knowledge.honest in text and entry.knowledge.clients in text


@pytest.mark.parametrize("entry", FEDERATED)
def test_synthetic_rounds_run_and_are_attacked_where_something_is_hidden(
    entry: SchemeEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plan.toml").write_text(PLAN.format(scheme=entry.name))
    command("run", "plan.toml", "--rounds", "1", "--record-views", "--out", "run")
    assert "CPU per round, one client" in capsys.readouterr().out
    command("audit", "run")
    text = " ".join(capsys.readouterr().out.split())
    assert ("the server reads everything" in text) is not entry.hides
    if not entry.hides:
        shutil.rmtree(Path("run") / "views")
        command("audit", "run", status=2)
        refused = capsys.readouterr().err
        assert "the server reads everything" in refused
        assert all(f'"{e.name}"' in refused for e in SCHEMES.values() if e.hides)


@pytest.mark.parametrize("entry", FEDERATED)
def test_every_forecast_works(entry: SchemeEntry) -> None:
    plan = Plan.parse(PLAN.format(scheme=entry.name))
    forecast = Forecast(plan, rows_per_client=8)
    assert (forecast.work is not None) is entry.masks
    assert (forecast.bytes_between() > 0) is entry.two_servers
    if entry.hides:
        assert identification_forecast(forecast, rounds=2).as_json()


@pytest.mark.parametrize("entry", [p for p in FEDERATED if p.values[0].hides])  # type: ignore[attr-defined]
def test_some_attack_is_tried_on_what_it_hides(entry: SchemeEntry) -> None:
    Path("plan.toml").write_text(PLAN.format(scheme=entry.name))
    command("run", "plan.toml", "--rounds", "1", "--record-views", "--out", "run")
    assert suite.run(Record.load(Path("run")))


# --- on every page --------------------------------------------------------------------------------


def test_every_section_of_the_page_has_every_scheme(runs: dict[str, Path]) -> None:
    html = page.write([*runs.values()], Path("all.html")).read_text()
    for entry in SCHEMES.values():
        assert entry.name in html


def test_each_scheme_has_a_page_of_its_own(runs: dict[str, Path]) -> None:
    for name, folder in runs.items():
        html = page.write([folder], Path(f"{name}.html")).read_text()
        assert SCHEMES[Scheme(name)].knowledge.honest.split(":")[0].split(".")[0] in html


def test_compare_has_a_line_for_each(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command("compare", *map(str, runs.values()))
    printed = capsys.readouterr().out
    assert all(name in printed for name in runs)


def test_a_colour_for_each_and_an_epsilon_or_why_not(runs: dict[str, Path]) -> None:
    figures = [RunFigures.load(folder) for folder in runs.values()]
    assert len(set(summary.slots(figures))) == len(SCHEMES)
    for run in figures:
        entry = run.entry
        once, _ = costs.epsilons(run)
        assert (once == costs.IN_THE_CLEAR) is not entry.hides
        assert run.central is not entry.federated
    text = costs.no_epsilon()
    assert [
        e.name for e in SCHEMES.values() if f"under {e.name}, {e.no_epsilon_because}" in text
    ] == [e.name for e in SCHEMES.values() if e.hides and not e.randomises]


@pytest.mark.parametrize("entry", EVERY)
def test_what_it_does_not_cover_is_said(entry: SchemeEntry) -> None:
    found = safety.not_covered([entry.name])
    own = found[: -len(safety.NOT_COVERED_BY_ANY)]
    assert own
    assert any(point.startswith(f"{entry.name}:") for point in own) is not entry.hides


def test_a_page_about_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown scheme"):
        safety.not_covered(["tripled"])
