"""Runs with correlated noise go on after a stop with the secrets they had, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runs import toy
from tessera.api import Run, simulate
from tessera.errors import ConfigError
from tessera.plan import DPPlan, Plan, Trust
from tessera.runs.folder import CHECKPOINT, ROOT, RunFolder, entropy_of
from tessera.runs.training import Training

ROUNDS = 5
SECTION = DPPlan(
    unit="user", noise=0.9, correlated=True, coefficients="-8388608, -2097152", trust=Trust.SERVER
)


def planned(trust: str) -> Plan:
    plan = toy.plan("two-server" if trust == "each" else "fedavg")
    simulation = replace(plan.simulation, rounds=ROUNDS)
    return replace(plan, dp=replace(SECTION, trust=Trust(trust)), simulation=simulation)


def go(folder: Path, plan: Plan, rounds: int, **more) -> Run:
    return simulate(toy.task(), plan, rounds, out=folder, trainer="sequential", **more)


def model(folder: Path) -> dict[str, bytes]:
    log = RunFolder.load(folder)
    with Training(
        toy.task(), log.plan, folder=folder / CHECKPOINT, entropy=entropy_of(log)
    ) as training:
        return {name: part.tobytes() for name, part in training.parameters(local=True).items()}


@pytest.mark.parametrize("trust", ["server", "each"])
@pytest.mark.parametrize("stopped", [1, 3])
def test_a_run_that_was_stopped_ends_with_the_same_model_to_the_bit(tmp_path, trust, stopped):
    plan, script = planned(trust), {"insecure_test_entropy": "a test"}
    go(tmp_path / "whole", plan, ROUNDS, **script)
    go(tmp_path / "parts", plan, stopped, **script)
    go(tmp_path / "parts", plan, ROUNDS, resume=True)
    assert model(tmp_path / "whole") == model(tmp_path / "parts")


@pytest.mark.parametrize("trust", ["server", "each"])
def test_other_secrets_of_earlier_rounds_are_refused(tmp_path, trust):
    plan = planned(trust)
    go(tmp_path / "run", plan, 2)
    root = tmp_path / "run" / CHECKPOINT / ROOT
    root.write_bytes(bytes(reversed(root.read_bytes())))
    with pytest.raises(ConfigError, match="other secrets of correlated noise") as refused:
        go(tmp_path / "run", plan, 3, resume=True)
    assert refused.value.hint


def test_other_coefficients_are_refused(tmp_path):
    plan = planned("server")
    go(tmp_path / "run", plan, 2)
    assert plan.dp is not None
    other = replace(plan, dp=replace(plan.dp, coefficients="-8388608, -1048576"))
    with pytest.raises(ConfigError):
        go(tmp_path / "run", other, 3, resume=True)
