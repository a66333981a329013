"""[dp] of a plan in the commands: written by init, accounted for by plan and privacy dp, run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.cli.main import main
from tessera.rounds.plan import Plan

TEXT = """
scheme = "fedavg"
cohort = 10
[model]
dense = 50
[[table]]
name = "items"
rows = 100
width = 4
[dp]
unit = "item"
sampling = 0.05
steps = 4
{more}
[simulation]
rounds = 25
"""


@pytest.fixture
def written(tmp_path: Path):
    def write(more: str) -> str:
        path = tmp_path / "plan.toml"
        path.write_text(TEXT.format(more=more))
        return str(path)

    return write


def test_plan_says_how_many_rounds_a_budget_lasts(written, capsys) -> None:
    path = written("epsilon = 3.0")
    assert main(["plan", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["dp"]
    assert found["noise"] > 0.0 and found["epsilon"] <= 3.0 and 25 <= found["lasts"] <= 26
    assert main(["plan", path]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"a budget of 3.00 lasts {found['lasts']} rounds" in page
    assert "epsilon at delta 1e-06, per item" in page


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("epsilon = 3.0", "noise"),
        ("noise = 1.0", "epsilon"),
        ("noise = 1.0\nepsilon = 3.0", "rounds"),
    ],
)
def test_privacy_dp_accounts_for_a_plan(written, capsys, more: str, found: str) -> None:
    assert main(["privacy", "dp", written(more), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["found"], report["unit"], report["scheme"]) == (found, "item", "fedavg")
    assert (report["steps"], report["rate"]) == (4, 0.05)
    (leader, *_) = (c for c in report["guarantees"] if c["unit"] == "item")
    assert 0.0 < leader["epsilon"] <= 3.0 or found == "epsilon"


def test_a_plan_without_noise_has_nothing_to_account_for(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('scheme = "fedavg"\ncohort = 10\n[model]\ndense = 5\n')
    assert main(["privacy", "dp", str(path)]) == 2
    assert "no [dp]" in capsys.readouterr().err


def test_synthetic_clients_refuse_a_plan_with_noise(written, capsys, tmp_path: Path) -> None:
    assert main(["run", written("noise = 1.0"), "--out", str(tmp_path / "run")]) == 2
    assert "without a task" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["item", "user", "subject"])
def test_init_writes_the_section(tmp_path: Path, unit: str) -> None:
    path = tmp_path / f"{unit}.toml"
    assert main(["init", "taobao-like", "--out", str(path), "--dp", unit]) == 0
    plan = Plan.read(path)
    assert plan.dp is not None and (plan.dp.unit, plan.dp.epsilon) == (unit, 3.0)


def test_init_refuses_an_unknown_unit_and_writes_no_section_unasked(tmp_path: Path, capsys) -> None:
    assert main(["init", "taobao-like", "--out", str(tmp_path / "a.toml"), "--dp", "row"]) == 2
    assert "--dp row" in capsys.readouterr().err
    assert main(["init", "taobao-like", "--out", str(tmp_path / "b.toml")]) == 0
    assert Plan.read(tmp_path / "b.toml").dp is None
