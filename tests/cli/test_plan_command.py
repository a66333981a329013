"""`tessera plan` predicts what rounds then cost, says what they promise, refuses with a hint."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.cli import main as cli
from tessera.cli.format import warn_if_slow
from tessera.crypto import kernel
from tessera.plan import Plan, Scheme
from tessera.plan.reference import example_plan
from tessera.privacy.index import exposure, identification_forecast
from tessera.rounds.events import RoundFinished
from tessera.rounds.forecast import Forecast
from tessera.rounds.forecast.forecast import break_even
from tessera.rounds.forecast.rows import even_holders, spread
from tessera.rounds.forecast.traffic import some
from tessera.rounds.two_server.domain import write_cost
from tessera.simulation import population
from tessera.simulation.calibration import round_seconds
from tessera.simulation.federation import Federation

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan.toml"

PLAN = """
scheme = "{scheme}"
cohort = 12
[model]
dense = 40
[[table]]
name = "goods"
rows = 400
width = 5
[[table]]
name = "kinds"
rows = 30
width = 2
derived_from = "goods"
[privacy]
level = "cpp2"
[union]
max_rows = 30
"""


GROUPS_OF_SIX = '[privacy]\nlevel = "groups"\n[groups]\nsize = 6\n'


def extended(text: str, extra: str) -> str:
    """The plan with these sections; their [privacy], if they have one, in place of its own."""
    own = '[privacy]\nlevel = "cpp2"\n'
    return (text.replace(own, "") if "[privacy]" in extra else text) + extra


@pytest.fixture(autouse=True)
def few_rows_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """How likely a holder is named has tests of its own (`test_naming_command.py`)."""
    monkeypatch.setattr(identification_forecast, "WORK", 1)
    monkeypatch.setattr(identification_forecast, "FEW_ROWS", 5)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.format(scheme="secure-submodel"))
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert cli.main(["plan", *map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert all("run on NumPy" in line for line in captured.err.splitlines())
    found: dict[str, Any] = json.loads(captured.out, parse_constant=pytest.fail)
    return found


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert cli.main(["plan", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


# --- the forecast is what happens -----------------------------------------------------------------


def rounds_of(plan: Plan, rows: int, rounds: int) -> list[RoundFinished]:
    """Real rounds without dropouts."""
    federation = Federation(
        plan,
        population.participants(plan, plan.cohort, rows),
        dense=population.dense(plan),
        tables=population.tables(plan),
        trainer=population.cohort_trainer(plan, plan.cohort),
        derived=population.derived_maps(plan),
    )
    return [e for e in federation.run(rounds) if isinstance(e, RoundFinished)]


def averaged(plan: Plan, rows: int, rounds: int) -> tuple[float, float, float]:
    """(bytes up, bytes down, union rows of all tables) of such rounds."""
    done = rounds_of(plan, rows, rounds)
    return (
        float(np.mean([sum(e.bytes_up.values()) for e in done])),
        float(np.mean([sum(e.bytes_down.values()) for e in done])),
        float(np.mean([e.union_rows for e in done])),
    )


@pytest.mark.parametrize("scheme", [s for s in Scheme if s is not Scheme.CENTRAL])
def test_predicted_bytes_are_those_of_real_rounds(scheme: Scheme) -> None:
    plan = Plan.parse(PLAN.format(scheme=scheme.value))
    forecast = Forecast(plan, 30)
    up, down, _ = averaged(plan, 30, 3)
    assert sum(forecast.bytes_up().values()) == pytest.approx(up, rel=0.03)
    assert sum(forecast.bytes_down().values()) == pytest.approx(down, rel=0.03)


@pytest.mark.parametrize(
    "extra",
    [
        '[privacy]\nlevel = "cpp1"\n',
        '[privacy]\nlevel = "cpp5"\n',
        '[privacy]\nlevel = "cpp4"\ndecoys = 0.5\nstrict_quorum = true\n',
        '[security]\nthreat = "active"\n[privacy]\nlevel = "cpp5"\n',
        '[security]\ndropout = 0.05\ngraph = "sparse"\n',
        '[model]\ndense = 3000\nprecision = "float16"\n',
    ],
)
def test_predicted_bytes_follow_the_plan(extra: str) -> None:
    text = PLAN.format(scheme="secure-submodel")
    if "[model]" in extra:
        text = text.replace("[model]\ndense = 40\n", "")
    plan = Plan.parse(extended(text, extra))
    forecast = Forecast(plan, 30)
    up, down, union = averaged(plan, 30, 4)
    assert sum(forecast.bytes_up().values()) == pytest.approx(up, rel=0.03)
    assert sum(forecast.bytes_down().values()) == pytest.approx(down, rel=0.03)
    assert sum(t.union for t in forecast.rows.tables) == pytest.approx(union, rel=0.06)


@pytest.mark.parametrize(
    "extra",
    ['write = "dpf"', 'write = "dense"', 'write = "dpf"\nstash = 2', 'domain = "union"'],
)
def test_predicted_bytes_between_two_servers_are_those_of_real_rounds(extra: str) -> None:
    plan = Plan.parse(PLAN.format(scheme="two-server") + f"[two_server]\n{extra}\n")
    forecast = Forecast(plan, 30)
    done = rounds_of(plan, 30, 3)
    for name, stages in (("bytes_up", forecast.bytes_up()), ("bytes_down", forecast.bytes_down())):
        for stage, predicted in stages.items():
            told = float(np.mean([getattr(e, name)[stage] for e in done]))
            assert predicted == pytest.approx(told, rel=0.06), (name, stage)
        assert sum(stages.values()) == pytest.approx(
            float(np.mean([sum(getattr(e, name).values()) for e in done])), rel=0.03
        )
    between = float(np.mean([e.bytes_between for e in done]))
    assert forecast.bytes_between() == pytest.approx(between, rel=0.03)
    if plan.narrows:
        union = float(np.mean([e.union_rows for e in done]))
        assert sum(t.union for t in forecast.rows.tables) == pytest.approx(union, rel=0.06)


def test_quorum_misses_are_those_of_the_papers_formula() -> None:
    """Without decoys the groups' sizes are what `exposure` averages over."""
    plan = Plan.parse(
        extended(PLAN.format(scheme="secure-submodel"), '[privacy]\ndecoys = 0\nlevel = "cpp3"\n')
    )
    forecast = Forecast(plan, 30, dropout=0.2)
    goods, privacy = forecast.rows.tables[0], plan.privacy.index
    cohort = forecast.rows.cohort(plan.tables[0])
    assert goods.missed == pytest.approx(exposure.quorum_missed(privacy, cohort))
    assert goods.lost == pytest.approx(exposure.quorum_lost(privacy, cohort))


def test_even_holders_are_binomial_and_leave_the_unions_size_right() -> None:
    holders = even_holders(rows=1000, clients=30, held=50)
    union = 30 * 50 / holders.mean
    assert union == pytest.approx(1000 * (1 - 0.95**30), rel=1e-6)
    shares = dict(holders.by_row)
    assert shares[1] / shares[2] == pytest.approx(30 * 0.95 / (math.comb(30, 2) * 0.05))
    assert dict(even_holders(rows=5, clients=3, held=5).by_row) == {3: 1.0}


@pytest.mark.parametrize(("count", "of"), [(0, 9), (9, 9), (3, 10), (8, 10), (500, 2**40)])
def test_a_typical_set_has_the_size_asked_for(count: int, of: int) -> None:
    found = some(count, of)
    assert len(np.unique(found)) == len(found) == count
    assert not count or int(found.max()) < of


def test_an_even_map_spreads_rows_over_a_derived_table() -> None:
    assert spread(1, 100) == pytest.approx(1.0)
    assert spread(10_000, 100) == pytest.approx(100.0)
    drawn = np.random.default_rng(0).integers(50, size=(2000, 40))
    assert spread(40, 50) == pytest.approx(np.mean([len(set(d)) for d in drawn]), rel=0.01)
    assert spread(3, 1) == 1.0


# --- what a user sees -----------------------------------------------------------------------------


def test_for_machines_a_plan_is_one_object(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, plan_file, "--rows-per-client", 20, "--dropout", 0.1)
    assert found["scheme"] == "secure-submodel"
    assert found["assumed"] == {"rows_per_client": 20, "holders": "even", "dropout": 0.1}
    assert set(found["bytes"]["up"]) == {"keys", "union", "choice", "update"}
    assert set(found["bytes"]["down"]) == {"keys", "union", "choice", "rows down", "update"}
    assert found["bytes"]["total_up"] == sum(found["bytes"]["up"].values())
    assert found["rows"]["goods"]["real"] == 20
    assert found["security"]["quorum"] == 2
    assert found["privacy"]["scope"] == "per index, given the union"
    assert found["late_dropout"]["goods"]["exposed"] > 0
    assert set(found["seconds"]) == {"client", "server", "simulated"}
    assert all(value > 0 for value in found["seconds"].values())


def test_an_infinite_epsilon_is_the_string_inf_and_a_note(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file.write_text(extended(plan_file.read_text(), '[privacy]\nlevel = "cpp1"\n'))
    found = report(capsys, plan_file)
    assert found["privacy"]["epsilon_once"] == "inf"
    assert found["privacy"]["epsilon_longitudinal"] == "inf"
    assert any("infinite" in note for note in found["notes"])


def test_one_round_in_a_period_is_charged_once(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan_file.read_text()
    answers = '[privacy]\nlevel = "cpp2"\nperiod_rounds = 9\n'
    once = f'{answers}[cohorts]\ndrawn = "schedule"\nseparation = 9\n'
    plan_file.write_text(extended(text, once))
    privacy = report(capsys, plan_file)["privacy"]
    assert privacy["rounds"] == 1
    assert privacy["epsilon_after_rounds"] == privacy["epsilon_once"]
    plan_file.write_text(extended(text, '[privacy]\nlevel = "cpp2"\nperiod_rounds = 9\n'))
    privacy = report(capsys, plan_file, "--rounds", 9)["privacy"]
    assert privacy["epsilon_once"] < privacy["epsilon_after_rounds"]
    assert privacy["epsilon_after_rounds"] <= privacy["epsilon_longitudinal"]


def test_a_schedule_is_said_with_its_passes_and_refused_if_it_cannot_be_kept(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, section = plan_file.read_text(), '[cohorts]\ndrawn = "schedule"\nseparation = 3\n'
    plan_file.write_text(extended(text, f'[privacy]\nlevel = "cpp2"\n{section}'))
    cohort = report(capsys, plan_file)["cohort"]
    found = report(capsys, plan_file, "--population", 3 * cohort - 1)
    assert found["cohorts"]["pass"] == {
        "rounds": 3,
        "fewest": cohort - 1,
        "most": cohort,
        "free_places": 1,
    }
    assert found["cohorts"]["separation"] == 3
    assert any("1 places are free" in note for note in found["notes"])
    error, hint = complaint(capsys, plan_file, "--population", 2 * cohort)
    assert "make a pass of 2 rounds" in error and "separation = 2" in hint
    plan_file.write_text(text)
    assert report(capsys, plan_file)["cohorts"] is None


def test_holders_that_are_given_are_used(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file.write_text(extended(plan_file.read_text(), '[privacy]\ndecoys = 0\nlevel = "cpp2"\n'))
    found = report(capsys, plan_file, "--rows-per-client", 10, "--holders", "4=1")
    assert found["assumed"]["holders"] == "given"
    assert found["rows"]["goods"]["union"] == pytest.approx(12 * 10 / 4)


def test_rows_over_the_cap_are_noted(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, plan_file, "--rows-per-client", 50)
    assert found["rows_left_out"] == 20
    assert found["rows"]["goods"]["real"] == 30
    assert any("over the cap" in note for note in found["notes"])


FEDERATED = [s for s in Scheme if s is not Scheme.CENTRAL]


@pytest.mark.parametrize("scheme", [s for s in FEDERATED if s is not Scheme.SECURE_SUBMODEL])
def test_schemes_without_a_union_promise_no_epsilon(
    scheme: Scheme, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.format(scheme=scheme.value))
    found = report(capsys, path)
    assert found["privacy"] is None and found["late_dropout"] is None
    assert "union" not in found["bytes"]["up"]
    assert (found["seconds"] is None) == (not scheme.hides)
    assert cli.main(["plan", str(path)]) == 0
    assert found["server_learns"] in " ".join(capsys.readouterr().out.split())


def test_seconds_of_a_round_are_those_of_all_its_groups(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    groups = GROUPS_OF_SIX
    text = PLAN.format(scheme="secure-submodel").replace("cohort = 12", "cohort = 60")
    path.write_text(extended(text, groups))
    forecast = Forecast(Plan.read(path), 30)
    assert forecast.groups == 10 and forecast.plan.cohort == 6
    found = round_seconds(forecast)
    assert found["simulated"] == pytest.approx(60 * found["client"] + found["server"])


def test_what_is_printed_of_groups_that_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    text = PLAN.format(scheme="secure-submodel").replace("cohort = 12", "cohort = 40")
    path.write_text(
        extended(text, '[privacy]\nlevel = "groups"\n[groups]\nsmall = true\nperiod = 20\n')
        + "[simulation]\ndropout = 0.3\n"
    )
    groups = report(capsys, path)["groups"]
    assert groups["size"] == 10 and groups["waiting"]["counted"] == pytest.approx(0.7, abs=0.03)
    assert groups["waiting"]["p95"] >= groups["waiting"]["mean"] > 1.0
    alive = groups["alive_after_a_year"]
    assert [round(100 * each) for each in alive.values()] == [30, 9, 0]
    weak = groups["corrupt"]
    assert [round(weak[f]["mean"], 3) for f in ("0.2", "0.3")] == [0.125, 0.143]
    assert [round(weak[f]["weak"], 2) for f in ("0.2", "0.3")] == [0.02, 0.1]
    assert report(capsys, path, "--dropout", "0")["groups"]["waiting"]["counted"] == 1.0
    assert cli.main(["plan", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        "in fixed groups of 10. A sum opens over all members",
        "invitations that count, if 30% are absent",
        "the union, every 20 updates",
        "groups alive after a year, if 1%, 2%, 5% of clients",
        "30%, 9%, 0%",
        "groups on the operator's word, nobody knows who was active between two periods",
        "small = true: among few newcomers",
    ):
        assert part in said, part
    assert "quorum" not in said


def test_waiting_is_predicted_for_the_clients_that_a_task_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'scheme = "secure-submodel"\ncohort = 20\n[task]\nname = "taobao-like"\nusers = 20\n'
        'items = 60\n[privacy]\nlevel = "groups"\n[groups]\nsmall = true\n'
    )
    told, given, many = (
        report(capsys, path, "--dropout", "0.3", *more)["groups"]["waiting"]
        for more in ((), ("--population", "20"), ("--population", "400"))
    )
    assert told == given != many


def test_a_server_of_fixed_groups_learns_of_groups_and_no_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "plan.toml", PLAN.format(scheme="secure-submodel")
    path.write_text(extended(text, GROUPS_OF_SIX))
    grouped = report(capsys, path)["server_learns"]
    assert grouped.startswith("of each fixed group") and "randomised" not in grouped
    path.write_text(extended(text, '[privacy]\nlevel = "cpp2"\n'))
    assert "every client's randomised index set" in report(capsys, path)["server_learns"]


@pytest.mark.parametrize("columns", [80, 140])
def test_the_page_fits_the_terminal_and_says_given_the_union(
    columns: int,
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(plan_file.parent)
    assert cli.main(["plan", plan_file.name]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= columns
    assert page.startswith("plan.toml is a valid plan.")
    for part in ("per index, given the union", "below quorum 2", "total", "rows down"):
        assert part in page


def test_a_plan_over_two_thousand_million_rows_is_forecast_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        PLAN.format(scheme="secure-submodel").replace("rows = 400", "rows = 2000000000")
    )
    found = report(capsys, path)
    assert found["union"]["encoding"] == "SumTable"
    assert found["bytes"]["total_up"] < 1e6


# --- two servers --------------------------------------------------------------------------------


def two_servers(tmp_path: Path, extra: str = "", rows: int = 400) -> Path:
    path = tmp_path / "plan.toml"
    text = PLAN.format(scheme="two-server").replace("rows = 400", f"rows = {rows}")
    path.write_text(text + (f"[two_server]\n{extra}\n" if extra else ""))
    return path


def test_a_plan_says_how_each_table_is_written_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two_servers(tmp_path, rows=4000)
    told = report(capsys, path)
    found, even = told["two_server"], told["break_even"]
    goods, kinds = found["tables"]
    assert goods["write"] == "dpf" and goods["keys"] < goods["shares"]
    assert kinds["write"] == "dense" and kinds["shares"] < kinds["keys"]
    assert even["goods"] > 30 > even["kinds"]
    assert found["rows_looked_at"] == 3 * (2 * 4000 + 30)  # goods twice, kinds are only read so
    assert (found["min_cohort"], found["may_vanish"], found["domain"]) == (10, 2, "whole")
    assert cli.main(["plan", str(path)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert goods["reason"] in page and "row_limit = 1,048,576" in page
    assert "do not collude" in page and "the helper" in page
    assert "per client between the two servers" in page
    assert "exact update, without its identity" in page


def test_break_even_is_where_keys_stop_being_fewer(tmp_path: Path) -> None:
    plan = Plan.read(two_servers(tmp_path, rows=4000))
    cost = write_cost(plan, plan.tables[0])
    even = break_even(plan, cost, plan.tables[0].width + 1)

    def keys(most: int) -> int:
        other = replace(plan, union=replace(plan.union, max_rows=most))
        found = write_cost(other, plan.tables[0]).keys
        assert found is not None
        return found

    assert keys(even) < cost.shares <= keys(even + 1)


def test_it_says_what_each_server_learns_and_what_both_do_if_they_collude(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = report(capsys, two_servers(tmp_path))["server_learns"]
    each, both = said.split("; if they collude, ")
    assert each.startswith("each of them who took part") and "the sum" in each
    assert both == "every client's rows and updates"


def test_a_cap_over_what_clients_hold_is_told_with_what_a_lower_one_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two_servers(tmp_path, rows=4000)
    found = report(capsys, path, "--rows-per-client", 12)
    fewer = found["fewer_rows"]
    (note,) = [n for n in found["notes"] if "sized for max_rows = 30" in n]
    assert "12 are assumed" in note and "max_rows = 12 would take" in note
    text = path.read_text()
    assert "max_rows = 30" in text
    path.write_text(text.replace("max_rows = 30", "max_rows = 12"))
    then = report(capsys, path, "--rows-per-client", 12)
    assert {k: then["bytes"][k] for k in ("total_up", "total_down")} == {
        k: fewer[k] for k in ("total_up", "total_down")
    }
    assert then["fewer_rows"] is None and not any("as long as" in n for n in then["notes"])
    assert report(capsys, path)["assumed"]["rows_per_client"] == 12  # nothing else is known


@pytest.mark.parametrize("check", [True, False])
def test_a_plan_without_the_check_of_rows_says_what_that_gives_away(
    check: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, two_servers(tmp_path, f"check = {str(check).lower()}", rows=4000))
    assert found["two_server"]["check"] is check
    assert any("goes unnoticed" in note for note in found["notes"]) is not check
    assert found["seconds"]["helper"] > 0


def test_a_plan_says_what_reports_take_while_keys_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, often = (
        report(capsys, two_servers(tmp_path, f"key_rounds = {rounds}", rows=4000))
        for rounds in (1, 4)
    )
    first, later = often["two_server"]["report_bytes"]
    # Bins follow from the plan's digest: the largest one may need a level more or less.
    assert later < first
    assert once["two_server"]["report_bytes"] == pytest.approx([first, later], rel=0.01)
    assert often["bytes"]["up"]["update"] == (first + 3 * later) / 4
    assert any("keys last 4 rounds" in note for note in often["notes"])
    assert not any("keys last" in note for note in once["notes"])


@pytest.mark.parametrize("verify", [True, False])
def test_a_plan_without_the_check_of_keys_says_what_one_client_can_do(
    verify: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, two_servers(tmp_path, f"verify = {str(verify).lower()}", rows=4000))
    assert found["two_server"]["verify"] is verify
    assert any("any number of rows" in note for note in found["notes"]) is not verify


def test_a_cohort_of_two_may_lose_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two_servers(tmp_path)
    path.write_text(path.read_text().replace("cohort = 12", "cohort = 2"))
    assert cli.main(["plan", str(path)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "no client may drop out" in page and "up to 0" not in page


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("scheme", ["two-server", "secure-submodel"])
def test_without_compiled_code_two_servers_are_slow_and_that_is_said_once(
    command: str,
    scheme: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(kernel.VARIABLE, "reference")
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN.format(scheme=scheme))
    arguments = ["--rounds", "1", "--clients", "12"] if command == "run" else []
    assert cli.main([command, "plan.toml", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if "point functions run on NumPy" in line]
    assert len(said) == (scheme == "two-server")
    json.loads(captured.out)
    monkeypatch.delenv(kernel.VARIABLE)
    warn_if_slow(Plan.read(Path("plan.toml")))
    assert not capsys.readouterr().err or len(kernel.available()) == 1


@pytest.mark.parametrize("columns", [80, 140])
def test_a_table_over_the_limit_is_narrowed_to_the_union(
    columns: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = two_servers(tmp_path, "row_limit = 300")
    found = report(capsys, path)
    assert found["two_server"]["domain"] == "union" and found["bytes"]["up"]["union"] > 0
    assert found["union"]["words"] > 0 and found["privacy"] is None
    assert "exactly which rows the cohort has" in found["server_learns"]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", path.name]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= columns
    assert "the cohort's union (row_limit = 300)" in page and "in the union" in page
    path = two_servers(tmp_path, 'row_limit = 300\ndomain = "whole"')
    assert "row_limit = 300" in complaint(capsys, path)[0]


# --- the example ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", Scheme)
def test_the_example_is_a_plan_of_its_scheme(
    scheme: Scheme, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--example", scheme.value]) == 0
    text = capsys.readouterr().out
    assert Plan.parse(text).scheme is scheme
    assert text.count("#") > 5


def test_the_example_in_the_tree_is_the_one_that_is_printed() -> None:
    assert EXAMPLE.read_text() == example_plan(Scheme.SECURE_SUBMODEL)


# --- bad input ------------------------------------------------------------------------------------


def test_bad_input_is_an_error_line_and_a_hint_line(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan_file.read_text()
    plan_file.write_text(text.replace("max_rows", "max_row"))
    assert complaint(capsys, plan_file) == [
        f"error: {plan_file}: unknown key [union] max_row",
        "hint: did you mean max_rows?",
    ]
    plan_file.write_text(text)
    for arguments, field in [
        (["--rows-per-client", 0], "rows per client = 0"),
        (["--dropout", 1.5], "dropout = 1.5"),
        (["--holders", "1=0.5"], "holders"),
        (["--holders", "40=1"], "40 holders"),
        (["--rounds", 0], "--rounds 0"),
        (["--rounds", 101], "--rounds 101"),
    ]:
        lines = complaint(capsys, plan_file, *arguments)
        assert len(lines) == 2, lines
        assert lines[0].startswith("error: ") and field in lines[0]
        assert lines[1].startswith("hint: ")


def test_no_plan_and_no_such_scheme_end_in_a_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys) == [
        "error: no plan given",
        "hint: `tessera plan --example > plan.toml` writes one",
    ]
    lines = complaint(capsys, "--example", "magic")
    assert lines[0] == "error: --example: unknown scheme 'magic'"
    assert "secure-submodel" in lines[1]
    assert "No such file" in complaint(capsys, "none.toml")[0]


# --- the command line itself ----------------------------------------------------------------------


def test_the_version_and_the_help_load_none_of_the_commands() -> None:
    code = (
        "import sys; from tessera.cli import main as cli\n"
        "assert cli.main(['--version']) == 0 and cli.main(['--help']) == 0\n"
        "sys.exit(any(m in sys.modules for m in ('numpy', 'rich', 'cryptography')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", ["plan", "run", "privacy"])
def test_a_command_declared_elsewhere_has_its_own_help_and_errors(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"Usage: tessera {name} [OPTIONS]") and "--json" in told
    assert cli.main([name, "--no-such-option"]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == f"hint: `tessera {name} --help` lists what there is"
    )


# --- what noise leaves ----------------------------------------------------------------------------

NOISY_PLAN = """
scheme = "fedavg"
cohort = {cohort}
[model]
dense = 0
[[table]]
name = "items"
rows = 500
width = 1
[dp]
unit = "user"
epsilon = {epsilon}
delta = 1e-6
trust = "server"
rows = "selected"
threshold = -10.0
[server]
rate = 0.4
[simulation]
rounds = 3
"""


def noisy(tmp_path, *more, cohort=1_000, epsilon=3.0):
    path = tmp_path / "noisy.toml"
    path.write_text(NOISY_PLAN.format(cohort=cohort, epsilon=epsilon))
    return [str(path), "--rows-per-client", "40", *more]


def test_a_plan_that_cannot_help_says_so(tmp_path, capsys):
    assert cli.main(["plan", *noisy(tmp_path, "--json", cohort=100_000)]) == 0
    helpful = json.loads(capsys.readouterr().out)["utility"]
    assert helpful["warning"] == "" and helpful["rows_learnt"] > 400
    assert helpful["users_to_beat_nothing_shared"] < helpful["users"] == 100_000
    over = helpful["noise_over_signal"]
    assert over["popular"] < over["median"] < over["rare"]
    assert cli.main(["plan", *noisy(tmp_path, cohort=60, epsilon=0.1)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: this plan is not expected to help" in said
    assert "rows learnt at all" in said and "assumed: Zipf" in said


def test_popularity_is_assumed_or_given_and_never_counted(tmp_path, capsys):
    counts = tmp_path / "counts.txt"
    counts.write_text("".join(f"{n}\n" for n in range(1, 501)))
    command = noisy(tmp_path, "--json", "--popularity", str(counts))
    assert cli.main(["plan", *command]) == 0
    found = json.loads(capsys.readouterr().out)["utility"]
    assert found["popularity"] == "counts in counts.txt" and found["rows"] == 500
    assert cli.main(["privacy", "dp", command[0], "--popularity", str(counts), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["utility"]["rows"] == 500
    for wrong in ("many\n", "-1\n", "", "0\n0\n", "nan\n"):
        counts.write_text(wrong)
        assert cli.main(["plan", *command]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and "hint: " in said
    assert cli.main(["plan", *noisy(tmp_path, "--skew", "-1")]) == 2
    assert "hint: " in capsys.readouterr().err


def test_what_is_counted_in_the_data_is_called_outside_epsilon(tmp_path, capsys):
    path = tmp_path / "shop.toml"
    path.write_text(
        'scheme = "two-server"\ncohort = 20\n[task]\nname = "taobao-like"\nusers = 30\n'
        'items = 60\n[dp]\nunit = "user"\nepsilon = 3.0\ndelta = 1e-5\ntrust = "each"\n'
    )
    assert cli.main(["plan", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(each.startswith("outside epsilon") for each in found["notes"])
    assert not any("would take" in each and "max_rows" in each for each in found["notes"])
    assert found["utility"]["users"] == 30
