"""A deployment of processes, any of which is killed at any instant with SIGKILL.

Deadlines are long here and processes come back at once, so that nobody is missing: every round has
everybody in its sum, and the model is the simulator's to the bit. The tap finds one content per
number on every link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "h11", "prometheus_client")):
    pytest.skip("the extra `http` is not installed", allow_module_level=True)

from services.processes import SCRIPT, Deployment
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import SERVER, ClientId, Party
from tessera.rounds.events import RoundFinished
from tessera.services.loopback import simulation
from tessera.simulation.faults import Drop

PLAN: Final = """
scheme = "{scheme}"
cohort = {cohort}
federation = "killed"
seed = 3
[model]
dense = 5
[[table]]
name = "goods"
rows = 60
width = 2
[union]
max_rows = 12
[privacy]
{privacy}
[service]
join = {phase}
phase = {phase}
poll = 5
retry = 0.02
"""
KILLS: Final = 10
KILLS_IN_SLOW: Final = 200


def plan(scheme: str, *, cohort: int = 5, phase: float = 120.0, privacy: str = "") -> str:
    if scheme == "secure-submodel" and not privacy:
        privacy = 'level = "cpp4"'
    return PLAN.format(scheme=scheme, cohort=cohort, phase=phase, privacy=privacy)


def simulated(deployment: Deployment, rounds: int, gone: dict[int, list[int]] | None = None) -> str:
    """The digest of the simulator's model for the same survivors."""
    federation = simulation(
        deployment.bundle,
        ScriptedEntropy(SCRIPT.encode()),
        faults=lambda r, _: [Drop(ClientId(c), "collect") for c in (gone or {}).get(int(r), [])],
    )
    ends = [e for e in federation.run(rounds) if isinstance(e, RoundFinished)]
    assert len(ends) == rounds
    return federation.model.digest.hex()


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as made:
        yield Path(made)


class Killer:
    """Kills and starts again: at messages, which it then loses or answers late, or at any time."""

    def __init__(self, deployment: Deployment, kills: int, seed: int, every: int) -> None:
        self.deployment, self.left = deployment, kills
        self._rng, self._every, self._seen = np.random.default_rng(seed), every, 0
        self._guard = threading.Lock()
        self.killed: list[tuple[Party, str]] = []

    def __call__(self, sender: Party, side: str) -> None:
        with self._guard:
            self._seen += 1
            if not self.left or self._seen % self._every:
                return
            self.left -= 1
            everybody = self.deployment.everybody
            at_random = bool(self.left % 2)
            victim = (
                everybody[int(self._rng.integers(len(everybody)))]
                if at_random
                else (sender if self._rng.integers(2) else SERVER)
            )
            if at_random:
                time.sleep(float(self._rng.random()) * 0.05)
            self.killed.append((victim, "any time" if at_random else side))
            self.deployment.restart(victim)


def survive(deployment: Deployment, kills: int, rounds: int, seed: int, every: int) -> None:
    print(f"seed {seed}")
    killer = Killer(deployment, kills, seed, every)
    deployment.tap.on_message = killer
    deployment.start_all()
    deployment.wait(60.0 + 10.0 * rounds + 3.0 * kills)
    deployment.tap.check()
    assert killer.left == 0, f"{killer.left} kills did not happen: too few messages"
    ended = deployment.outcomes()
    assert {e["round_id"] for e in ended} == set(range(rounds))
    assert all(e.get("survivors") == deployment.bundle.plan.cohort for e in ended), ended
    assert deployment.model() == simulated(deployment, rounds)


def test_ten_kills_between_two_servers(folder: Path) -> None:
    deployment = Deployment(plan("two-server"), folder, rounds=4)
    try:
        # A round has at least 36 messages and answers, however they are packed; 100 are needed.
        survive(deployment, KILLS, rounds=4, seed=20, every=10)
    finally:
        deployment.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["two-server", "secure-submodel"])
def test_many_kills(folder: Path, scheme: str) -> None:
    kills, every = KILLS_IN_SLOW // 2, 11
    rounds = -(-kills * every // 25) + 1
    deployment = Deployment(plan(scheme), folder, rounds=rounds)
    try:
        survive(deployment, kills, rounds=rounds, seed=21, every=every)
    finally:
        deployment.close()
