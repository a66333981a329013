"""Fixed groups that wait, as processes that are killed with SIGKILL at any instant."""

from __future__ import annotations

import threading
import time
from collections import Counter
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
from services.test_services import Killer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import SERVER
from tessera.protocols.epochs.messages import EpochKind
from tessera.services.deployment import open_leader
from tessera.services.group_leader import GroupLeaderService, epochs_in
from tessera.services.keyring import Keyring
from tessera.services.loopback import ReplayedGroups, simulation
from tessera.services.membership import groups_of

PLAN: Final = """
scheme = "secure-submodel"
cohort = {cohort}
federation = "waits"
seed = 3
[model]
dense = 5
[[table]]
name = "goods"
rows = 60
width = 2
[union]
max_rows = 12
[groups]
size = {size}
small = true
delay = {delay}
[service]
poll = 5
retry = 0.02
"""


def plan(*, cohort: int, size: int, delay: float = 0.0) -> str:
    return PLAN.format(cohort=cohort, size=size, delay=delay)


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as made:
        yield Path(made)


def simulated(deployment: Deployment, rounds: int) -> str:
    """The digest of the simulator's model after the epochs of the deployment, in its order."""
    bundle = deployment.bundle
    keyring = Keyring.read(deployment.keys / "leader", SERVER, bundle.digest)
    groups = groups_of(keyring.draws(bundle.plan), bundle.plan)
    made = simulation(bundle, ScriptedEntropy(SCRIPT.encode()), groups=groups)
    assert isinstance(made, ReplayedGroups)
    made.replay(epochs_in(deployment.state(SERVER)), rounds)
    return made.model.digest.hex()


def test_groups_over_loopback_with_kills(folder: Path) -> None:
    """Four clients in one group, the leader and clients killed four times."""
    deployment = Deployment(plan(cohort=4, size=4), folder, rounds=3)
    try:
        killer = Killer(deployment, 4, seed=11, every=9)
        deployment.tap.on_message = killer
        deployment.start_all()
        deployment.wait(90.0)
        deployment.tap.check()
        assert killer.left == 0, f"{killer.left} kills did not happen: too few messages"
        assert deployment.model() == simulated(deployment, 3)
    finally:
        deployment.close()


class Weather(threading.Thread):
    """A third of the clients is off at any time, by kill -9; so is the leader now and then."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        super().__init__(daemon=True)
        self.deployment, self.kills = deployment, Counter[str]()
        self.over = threading.Event()
        self._rng = np.random.default_rng(seed)

    def run(self) -> None:
        clients = self.deployment.cohort
        while not self.over.wait(0.3):
            running = self.deployment.running
            if self._rng.random() < 0.1:
                self.kills["leader"] += 1
                self.deployment.restart(SERVER)
                continue
            off = [client for client in clients if client not in running]
            if len(off) >= len(clients) // 3:
                self.deployment.start(off[int(self._rng.integers(len(off)))])
            there = [client for client in clients if client in running]
            self.kills["client"] += 1
            self.deployment.kill(there[int(self._rng.integers(len(there)))])


@pytest.mark.campaign
def test_twenty_processes_of_which_a_third_is_off_at_random(folder: Path) -> None:
    """Ten epochs of each group of four, and more than twenty kills."""
    deployment = Deployment(plan(cohort=20, size=4), folder, rounds=None)
    weather = Weather(deployment, seed=12)
    state, merged = deployment.state(SERVER), Counter[int]()
    try:
        deployment.start_all()
        deployment.until(lambda status: status["phase"] != "loading")
        weather.start()
        end = time.monotonic() + 900.0
        while min((merged[group] for group in range(5)), default=0) < 10:
            assert time.monotonic() < end, f"{merged}\n{deployment.log(SERVER)[-3000:]}"
            time.sleep(1.0)
            merged = Counter(
                each.part
                for each in epochs_in(state)
                if each.kind is EpochKind.UPDATE and each.closed is not None
            )
        weather.over.set()
        weather.join()
        deployment.tap.check()
        deployment.kill(SERVER)
        entropy = ScriptedEntropy(SCRIPT.encode())
        leader = open_leader(deployment.bundle, deployment.keys / "leader", state, entropy)
        assert isinstance(leader, GroupLeaderService)
        with leader.journal:
            print(f"{weather.kills}, epochs {dict(merged)} in {leader.next_round} rounds")
            assert weather.kills.total() >= 20 and not leader.retired
            assert leader.model.digest.hex() == simulated(deployment, leader.next_round)
    finally:
        weather.over.set()
        if weather.is_alive():
            weather.join()
        deployment.close()
