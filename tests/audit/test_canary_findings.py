"""`tessera audit` on runs with [dp]: a finding per observer, beside what the ledger claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera import tasks
from tessera.api import simulate
from tessera.audit import canary_findings as module
from tessera.audit import canary_training
from tessera.audit.canary_findings import canary_findings
from tessera.audit.finding import Verdict
from tessera.audit.suite import audited
from tessera.cli import main as cli
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.plan import DPPlan, Plan, SimulationPlan
from tessera.rounds.noise import ServerNoise
from tessera.runs.training import complete

SMALL = {"users": 30, "items": 40, "examples": 8, "history": 3, "shops": 5, "shops_each": 2}


def planned(**dp: object) -> Plan:
    section = DPPlan(**{"noise": 2.0, "delta": 1e-5, **dp})
    plan = Plan(scheme="fedavg", cohort=4, dp=section, simulation=SimulationPlan(rounds=20))
    return complete(plan, tasks.load("retail", **SMALL, size="tiny"))


@pytest.mark.parametrize(
    "dp",
    [
        {"unit": "item", "sampling": 0.2},
        {"unit": "user", "noise": 5.0},
        {"unit": "user", "noise": 5.0, "trust": "server"},
        {"unit": "subject", "sampling": 0.2, "clients_per_subject": 2},
        {
            "unit": "subject",
            "sampling": 0.2,
            "clients_per_subject": 2,
            "drawn": "records",
            "records_per_subject": 6,
            "cap": 2,
            "noise": 4.0,
        },
    ],
    ids=lambda dp: "-".join(map(str, dp.values())),
)
def test_plans_with_noise_keep_what_they_claim_against_everybody(dp: dict[str, object]) -> None:
    found = canary_findings(planned(**dp), ScriptedEntropy(b"findings"))
    assert len(found) == (2 if dp.get("trust") == "server" else 3)  # a trusted server has no number
    for finding in found:
        assert finding.verdict is Verdict.HOLDS and 0.0 < finding.low < finding.claimed
        assert finding.trials == module.CANARIES and "lower bound" in finding.meaning


def test_a_server_that_adds_too_little_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = canary_training.discrete_gaussian
    monkeypatch.setattr(canary_training, "discrete_gaussian", lambda wide: honest(wide / 12.0))
    found = canary_findings(
        planned(unit="user", noise=12.0, trust="server"), ScriptedEntropy(b"little")
    )
    assert all(finding.verdict is Verdict.BROKEN for finding in found)


def test_a_server_that_judges_a_sum_before_its_noise_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are merged or not by the exact sum: the canaries' values alone would not show it."""
    plan = planned(unit="user", noise=12.0, trust="server")
    honest = canary_findings(plan, ScriptedEntropy(b"judging"))
    assert all(finding.verdict is Verdict.HOLDS for finding in honest)
    monkeypatch.setattr(ServerNoise, "on_sum", lambda self, total, *_: total)
    found = canary_findings(plan, ScriptedEntropy(b"judging"))
    assert all(finding.verdict is Verdict.BROKEN for finding in found)


def test_the_command_audits_a_run_with_noise_whatever_its_scheme_hides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tasks.load("retail", **SMALL, size="tiny")
    plan = complete(
        Plan(
            scheme="fedavg",
            cohort=4,
            dp=DPPlan(unit="subject", noise=2.0, delta=1e-5, sampling=0.2, clients_per_subject=2),
            simulation=SimulationPlan(rounds=2),
        ),
        task,
    )
    simulate(task, plan, out=tmp_path / "run", trainer="sequential")
    assert [f.verdict for f in audited(tmp_path / "run").findings] == [Verdict.HOLDS] * 3
    assert cli.main(["audit", str(tmp_path / "run"), "--json"]) == 0
    attacks = json.loads(capsys.readouterr().out)["attacks"]
    assert {a["unit"] for a in attacks} == {"epsilon"} and attacks[0]["high"] == "inf"
    assert cli.main(["audit", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "Canaries through the trainer" in shown and "canaries: persons, seen by" in shown


def test_people_at_more_shops_than_the_plan_says_are_an_error_in_a_simulation() -> None:
    task = tasks.load("retail", **SMALL, size="tiny")
    plan = planned(unit="subject", clients_per_subject=1)
    with pytest.raises(ConfigError, match="people are at more than the 1 clients"):
        simulate(task, plan, 1)
    few = {"drawn": "records", "records_per_subject": 1, "cap": 1, "clients_per_subject": 2}
    with pytest.raises(ConfigError, match="more than the 1 records"):
        simulate(task, planned(unit="subject", **few), 1)
