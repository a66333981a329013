"""[dp] of a plan in the commands: written by init, accounted for by plan and privacy dp, run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.cli.main import main
from tessera.plan import Plan
from tessera.tasks import known

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


# --- noise per user, as a task recommends it ------------------------------------------------------

TRUSTS = {
    "fedavg": "server",
    "secure-fedavg": "shares",
    "secure-submodel": "shares",
    "two-server": "each",
}


@pytest.mark.parametrize("scheme", TRUSTS)
def test_init_writes_what_a_task_recommends_under_noise(scheme, tmp_path, capsys, monkeypatch):
    """Without its data, which nobody has here: the cohort is left to the reader, and it is said."""
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    path = tmp_path / "noisy.toml"
    options = ["--out", str(path), "--dp", "user", "--scheme", scheme]
    assert main(["init", "ratings-100k", *options]) == 0
    assert "set cohort to the number of clients" in capsys.readouterr().out
    plan, private = Plan.read(path), known("ratings-100k").recommended.private
    assert plan.dp is not None and private is not None
    assert (plan.dp.unit, plan.dp.trust, plan.dp.rows) == ("user", TRUSTS[scheme], "selected")
    assert (plan.dp.threshold, plan.dp.selection) == (private.threshold, private.selection)
    assert plan.simulation.rounds == private.rounds and plan.training == private.training
    assert private.options.items() <= plan.task.options.items()


def test_plan_names_nobody_where_the_noise_is_on_every_row(tmp_path, capsys):
    """Under a number per user that covers which rows are held, B = 1 would be wrong."""
    path = tmp_path / "plan.toml"
    text = TEXT.replace('"fedavg"', '"secure-submodel"').replace(TEXT[TEXT.index("unit") :], "")
    path.write_text(f'{text}unit = "user"\nepsilon = 3.0\ntrust = "shares"\nrows = "all"\n')
    assert main(["plan", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["naming"] is None and not any("is named" in note for note in found["notes"])
    assert any('level = "groups" has no part' in note for note in found["notes"])
    path.write_text(f'{text}unit = "user"\nepsilon = 3.0\ntrust = "server"\n')
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["naming"] is not None


def test_privacy_dp_says_what_a_higher_threshold_would_save(capsys):
    options = "--unit user --noise 1 --rounds 3 --catalogue 500 --cohort 100 --dropout 0.2"
    assert main(["privacy", "dp", *options.split(), "--trust", "server", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (shares,) = (one for one in found["choices"] if one["trust"] == "shares")
    higher = shares["higher_thresholds"]
    assert [one["survivors"] for one in higher] == [80, 90, 100]
    for one in higher:
        assert one["noise_in_sum"] == pytest.approx((100 / (one["survivors"] - 1)) ** 0.5)
        assert one["saved"] == pytest.approx(1 - one["noise_in_sum"] / shares["noise_in_sum"])
    assert main(["privacy", "dp", *options.split(), "--trust", "server"]) == 0
    assert "threshold = 90 in [security]" in " ".join(capsys.readouterr().out.split())
