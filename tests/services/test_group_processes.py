"""Fixed groups that wait, as processes that are killed with SIGKILL at any instant."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "h11")):
    pytest.skip("the extra `http` is not installed", allow_module_level=True)

from services.processes import SCRIPT, Deployment
from services.test_services import Killer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import SERVER
from tessera.services.group_leader import epochs_in
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


def simulated(deployment: Deployment) -> str:
    """The digest of the simulator's model after the epochs of the deployment, in its order."""
    bundle = deployment.bundle
    keyring = Keyring.read(deployment.keys / "leader", SERVER, bundle.digest)
    groups = groups_of(keyring.draws(bundle.plan), bundle.plan)
    made = simulation(bundle, ScriptedEntropy(SCRIPT.encode()), groups=groups)
    assert isinstance(made, ReplayedGroups) and deployment.rounds is not None
    made.replay(epochs_in(deployment.state(SERVER)), deployment.rounds)
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
        assert deployment.model() == simulated(deployment)
    finally:
        deployment.close()


@pytest.mark.campaign
def test_twenty_processes_of_which_a_third_is_off_and_twenty_kills(folder: Path) -> None:
    """Ten epochs of each group and more; whoever is off comes back after a second or two."""
    deployment = Deployment(plan(cohort=20, size=4), folder, rounds=60)
    try:
        killer = Killer(deployment, 20, seed=12, every=40)
        deployment.tap.on_message = killer
        deployment.start_all()
        deployment.wait(600.0)
        deployment.tap.check()
        assert killer.left == 0
        assert deployment.model() == simulated(deployment)
    finally:
        deployment.close()
