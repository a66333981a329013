"""`tessera run` keeps a run's record, says that its data is synthetic, and overwrites nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.cli import main as cli
from tessera.cli import run as run_command
from tessera.cli import run_summary
from tessera.ids import SERVER, ClientId
from tessera.plan import Plan, Scheme
from tessera.report.figures import waited
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.runs.folder import RunFolder
from tessera.simulation import population, views

PLAN = """
scheme = "secure-submodel"
cohort = 8
seed = 3
[model]
dense = 10
[[table]]
name = "goods"
rows = 120
width = 3
[[table]]
name = "kinds"
rows = 9
width = 2
derived_from = "goods"
[privacy]
level = "cpp2"
[union]
max_rows = 15
"""


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("small.toml")
    path.write_text(PLAN)
    return path


def run(
    capsys: pytest.CaptureFixture[str], path: Path, *arguments: object, status: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """(what is printed for machines, the lines on stderr)."""
    assert cli.main(["run", str(path), *map(str, arguments), "--json"]) == status
    captured = capsys.readouterr()
    return json.loads(captured.out or "{}", parse_constant=pytest.fail), captured.err.splitlines()


def test_a_run_keeps_plan_events_and_rounds(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, _ = run(capsys, plan_file, "--rounds", 3, "--clients", 12)
    assert told["folder"] == "runs/small"
    assert (told["rounds"], told["finished"], told["clients"]) == (3, 3, 12)
    log = RunFolder.load(Path("runs/small"))
    assert log.plan == Plan.read(plan_file).with_simulation(rounds=3)
    rounds = list(log.rounds())
    assert [r["round_id"] for r in rounds] == [0, 1, 2]
    assert all(r["survivors"] == 8 and r["union_rows"] > 15 for r in rounds)
    assert {e["event"] for e in log.events()} == {"RoundStarted", "PhaseClosed", "RoundFinished"}
    assert not (log.folder / "views").exists()
    assert told["bytes_up"]["update"] == pytest.approx(
        np.mean([r["bytes_up"]["update"] for r in rounds])
    )


def test_every_output_says_that_the_data_is_synthetic(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, progress = run(capsys, plan_file, "--rounds", 1)
    assert told["data"] == "made up"
    assert "synthetic" in progress[0]
    assert cli.main(["run", str(plan_file), "--rounds", "1"]) == 0
    captured = capsys.readouterr()
    assert "synthetic: nothing is learnt" in " ".join(captured.out.split())


def test_progress_goes_to_stderr_a_line_for_each_round(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, progress = run(capsys, plan_file, "--rounds", 3)
    pattern = r"round (\d)/3  8/8 survivors  .* up  .* down  union \d+  .* left"
    assert [re.fullmatch(pattern, line)[1] for line in progress[1:]] == ["1", "2", "3"]


def test_views_and_truth_are_recorded_for_the_audits(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, _ = run(
        capsys, plan_file, "--rounds", 2, "--clients", 8, "--record-views", "--out", "here"
    )
    folder = Path("here")
    assert told["views"] == "here/views"
    names = {p.name for p in (folder / "views").iterdir()}
    assert names == {f"{SERVER}.view.jsonl"} | {f"client-{c}.view.jsonl" for c in range(8)}
    seen = list(views.read(folder / "views" / "server.view.jsonl"))
    assert sum(s.kind == "UnionOpened" for s in seen) == 2 * 8
    truth = json.loads((folder / "truth.json").read_text())
    plan = Plan.read(plan_file)
    expected = population.real_rows(plan, ClientId(5), 15)["goods"]
    assert truth["5"]["goods"] == expected.tolist()


def test_a_run_never_overwrites_another(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = run(capsys, plan_file, "--rounds", 1)
    before = (Path(first["folder"]) / "events.jsonl").read_bytes()
    second, _ = run(capsys, plan_file, "--rounds", 1)
    assert (first["folder"], second["folder"]) == ("runs/small", "runs/small-2")
    _, complaint = run(capsys, plan_file, "--rounds", 1, "--out", "runs/small", status=2)
    assert complaint == [
        "error: runs/small holds a run already",
        "hint: go on with it by --resume, name another with --out, or remove it",
    ]
    assert (Path(first["folder"]) / "events.jsonl").read_bytes() == before


def test_dropouts_are_counted_and_rounds_go_on(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, _ = run(capsys, plan_file, "--rounds", 6, "--dropout", 0.3)
    assert told["finished"] == 6
    assert told["survivors"] < 8


def test_a_run_of_which_no_round_finished_has_failed(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file.write_text(PLAN.replace("secure-submodel", "fedavg") + "[security]\ndropout = 0.0\n")
    told, errors = run(capsys, plan_file, "--rounds", 2, "--dropout", 0.99, status=1)
    assert (told["finished"], told["given_up"]) == (0, 2)
    assert re.fullmatch(r"error: round 1, collect: \d answered, 8 are needed", errors[-1])
    assert "aborted in collect" in errors[1]


@pytest.mark.parametrize("scheme", [s for s in Scheme if s is not Scheme.CENTRAL])
def test_every_scheme_runs(
    scheme: Scheme, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file.write_text(PLAN.replace("secure-submodel", scheme.value))
    told, _ = run(capsys, plan_file, "--rounds", 1)
    assert told["scheme"] == scheme.value and told["finished"] == 1
    assert (told["epsilon"] > 0) == (scheme is Scheme.SECURE_SUBMODEL)


def test_an_active_plan_runs_with_signed_keys(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = PLAN.replace('"cpp2"', '"cpp5"')
    plan_file.write_text(whole + '[security]\nthreat = "active"\n')
    told, _ = run(capsys, plan_file, "--rounds", 1)
    phases = [e.get("phase") for e in RunFolder.load(Path(told["folder"])).events()]
    assert phases.count("consistency") == 2


def event(**changes: Any) -> RoundFinished:
    """A finished round of a two-server run."""
    return RoundFinished(
        **{
            "round_id": 0,
            "cohort": 8,
            "survivors": 5,
            "union_rows": 0,
            "union_residual": 0,
            "rows_opened": 90,
            "rows_below_quorum": 0,
            "rows_shrunk": 0,
            "rows_lost": 0,
            "weight": 100,
            "measured": True,
            "secure": True,
            "bytes_up": {"update": 5000.0},
            "bytes_down": {"rows down": 4000.0},
            "client_seconds": {"update": 0.01},
            "server_seconds": {"unmask": 0.1},
            "epsilon": float("inf"),
            "condition": "given the sum",
            **changes,
        }
    )


def test_who_was_left_out_and_why_is_told(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine counts by reason; the command adds up rounds and prints."""
    events = [
        event(excluded={"sent invalid keys": 2, "gone": 1}),
        event(round_id=1, excluded={"gone": 4}, not_finite=3, broken={"training raised": 2}),
        RoundAbort(round_id=2, phase="handshake", answered=0, needed=1, reason="the helper left"),
        RoundAbort(round_id=3, phase="collect", answered=1, needed=6),
    ]
    monkeypatch.setattr(run_command.Federation, "run", lambda self, rounds: iter(events))
    told, progress = run(capsys, plan_file, "--rounds", 4)
    assert told["excluded"] == {"gone": 5, "sent invalid keys": 2}
    assert (told["not_finite"], told["broken"]) == (3, {"training raised": 2})
    assert told["why_given_up"] == {"the helper left": 1, "too few answered": 1}
    assert "3 excluded" in progress[1] and "4 excluded" in progress[2]
    assert "aborted in handshake: 0 answered, 1 needed (the helper left)" in progress[3]
    assert "1 answered, 6 needed  " in progress[4]
    assert cli.main(["run", str(plan_file), "--rounds", "4"]) == 0
    page = capsys.readouterr().out
    for caption, count in (
        ("clients not in a sum, in all", 7),
        ("  gone", 5),
        ("clients that sent zeros, in all", 3),
        ("  training raised", 2),
        ("rounds aborted", 2),
        ("  the helper left", 1),
    ):
        assert re.search(rf"^ {re.escape(caption)} +{count} *$", page, re.MULTILINE), caption


def test_a_run_without_faults_tells_of_none(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, _ = run(capsys, plan_file, "--rounds", 1)
    assert told["excluded"] == told["broken"] == told["why_given_up"] == {}
    assert list(run_summary.fault_lines(told)) == []


@pytest.mark.parametrize(
    ("scheme", "why"),
    [("two-server", "max_rows, union, bins"), ("secure-submodel", "max_rows")],
)
def test_rows_over_the_cap_have_other_reasons_between_two_servers(scheme: str, why: str) -> None:
    facts: dict[str, Any] = {
        "scheme": scheme,
        "final": None,
        "trivial": {},
        "union_rows": 10,
        "rows_below_quorum": 0,
        "rows_opened": 10,
        "rows_left_home": 4.0,
        "rows_out_of_bounds": 0.0,
        "rows_exposed": 0,
        "measured_rounds": 0,
        "condition": "",
        "noise_epsilon": None,
        "groups_not_finite": 0,
        "groups_opened": 0,
        "ended": "",
        "epsilon": 1.0,
        "crypto": {"mode": "every"},
        "not_finite": 0,
        "excluded": {"gone": 1},
        "broken": {},
        "why_given_up": {},
        "seconds": 1.0,
    }
    told = dict(run_summary.lines(facts))
    assert told[f"  rows over the cap ({why})"] == "4"
    assert told["clients not in a sum, in all"] == told["  gone"] == "1"


def test_of_groups_that_wait_a_summary_says_what_counted_and_how_long_it_waited() -> None:
    event = {"cohort": 10, "survivors": 0, "groups_retired": 0, "waited": []}
    rounds = [
        {**event, "survivors": 5, "waited": [1]},
        {**event, "survivors": 10, "waited": [4, 4], "groups_retired": 1},
    ]
    found = waited(rounds)
    assert (found["counted"], found["groups_opened"], found["groups_retired"]) == (0.75, 3, 1)
    assert dict(run_summary.waiting_lines(found)) == {
        "invitations that counted": "75.0%",
        "rounds that a sum waited: mean, 95%": "3.0, 4",
        "groups retired": "1",
    }
    assert list(run_summary.waiting_lines(waited([event]))) == []
    assert list(run_summary.waiting_lines(waited([]))) == []


def test_rows_over_the_cap_are_printed(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, _ = run(capsys, plan_file, "--rounds", 1, "--rows-per-client", 40)
    assert told["rows_left_out"] == 25
    assert cli.main(["run", str(plan_file), "--rounds", "1", "--rows-per-client", "40"]) == 0
    assert (
        "25 rows of each client are over the cap and were left out: max_rows = 15."
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--rounds", 0], "--rounds 0"),
        (["--clients", 7], "7 clients for a cohort of 8"),
        (["--rows-per-client", 0], "0 rows per client"),
        (["--dropout", 1.0], "--dropout 1.0"),
        (["--dropout", -0.1], "--dropout -0.1"),
        (["--dropout", "nan"], "--dropout nan"),
    ],
)
def test_bad_input_leaves_no_folder_behind(
    arguments: list[object], field: str, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, lines = run(capsys, plan_file, *arguments, status=2)
    assert len(lines) == 2
    assert lines[0].startswith("error: ") and field in lines[0]
    assert lines[1].startswith("hint: ")
    assert not Path("runs").exists()


def test_a_population_too_small_for_its_schedule_is_refused_before_the_first_round(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = '[cohorts]\ndrawn = "schedule"\nrounds_per_client = 1\n'
    plan_file.write_text(f"{PLAN}\n{section}")
    _, lines = run(capsys, plan_file, "--rounds", 3, "--clients", 16, status=2)
    assert lines[0] == (
        "error: [cohorts] rounds_per_client = 1: 16 clients in cohorts of 8 have had their rounds "
        "after 2 of 3, and nobody may be in the others"
    )
    assert not Path("runs").exists()
    told, _ = run(capsys, plan_file, "--rounds", 2, "--clients", 16)
    assert told["finished"] == 2


@pytest.mark.parametrize("columns", [80, 140])
def test_the_page_fits_the_terminal(
    columns: int,
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["run", str(plan_file), "--rounds", "1", "--record-views"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= columns
    assert "epsilon spent, per index, given the union" in page
    assert "`tessera audit runs/small`" in page
