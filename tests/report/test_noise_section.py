"""Pages of runs with noise: curves over epsilon, what the budget went to, units and observers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runs import raters
from tessera.api import simulate
from tessera.plan import DPPlan, Plan, SimulationPlan
from tessera.report import page
from tessera.report.lineup import load_all
from tessera.report.sections.noise import noise, shares_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    task = raters.task(factors=0, mask="linear", penalty=1.0, refit=True)
    plan = Plan(scheme="fedavg", cohort=20, simulation=SimulationPlan(rounds=2, evaluate_every=2))
    section = DPPlan(unit="user", epsilon=3.0, delta=1e-5, trust="server", rows="selected")
    plans = {
        "bare": plan,
        "three": replace(plan, dp=section),
        "ten": replace(plan, dp=replace(section, epsilon=10.0, rows="own")),
    }
    base = tmp_path_factory.mktemp("runs")
    for name, one in plans.items():
        simulate(task, one, 2, out=base / name)  # under test entropy no number is printed
    return [base / name for name in plans]


def test_runs_without_noise_have_no_such_section(folders):
    assert noise(load_all(folders[:1])) == []
    assert "Noise and budget" not in page.page(load_all(folders[:1]))


def test_a_run_shows_what_its_budget_went_to_and_who_is_protected_from_whom(folders):
    (run,) = load_all(folders[1:2])
    spent = shares_of(run)
    assert spent["popularity of rows"] == pytest.approx(0.1) and sum(
        spent.values()
    ) == pytest.approx(1.0)
    text = page.page([run])
    for words in ("Noise and budget", "popularity of rows", "readers of the model", "infinite"):
        assert words in text
    assert "RMSE against epsilon" not in text  # one run is no curve


def test_runs_of_several_epsilons_are_a_curve_with_trivial_predictors_across(folders):
    runs = load_all(folders, exact=True)
    assert shares_of(runs[2]) == {"rounds": 1.0}
    text = page.page(runs)
    assert "RMSE against epsilon" in text and "noise by the server" in text
    assert "item mean" in text and ", no noise" in text


def test_under_test_entropy_no_number_is_printed(tmp_path):
    """Whoever has the script draws the noise again."""
    task = raters.task(factors=0, mask="linear", penalty=1.0, refit=True)
    section = DPPlan(unit="user", noise=2.0, delta=1e-5, trust="server")
    plan = Plan(scheme="fedavg", cohort=20, dp=section, simulation=SimulationPlan(rounds=1))
    simulate(task, plan, 1, out=tmp_path / "run", insecure_test_entropy="known")
    text = page.page(load_all([tmp_path / "run"]))
    assert "it has no epsilon" in text and "readers of the model" not in text
