"""Every party is killed at every step, before its commit and between commit and sending.

Nothing is lost and nothing doubled: the model, the outcome and what was charged are those of a
federation in which nobody was killed, and each number on a link has one content.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pytest

from rounds.population import federation, plan
from services.service_lab import SEED as LAB_SEED
from services.service_lab import Lab
from tessera.crypto.entropy import ScriptedEntropy, SystemEntropy
from tessera.crypto.keys import identities
from tessera.ids import Party, RoundId
from tessera.plan import DPPlan, SimulationPlan, Trust, TwoServerPlan


def noise(trust: str) -> DPPlan:
    """Per user, with a budget that lasts for the rounds here."""
    return DPPlan(unit="user", trust=Trust(trust), noise=2.0, clip=0.5, epsilon=50.0)


def correlated(trust: str) -> DPPlan:
    """By coefficients that are anybody's; a training is charged as a whole, with all its rounds."""
    terms = "-8388608, -2097152"
    return replace(noise(trust), correlated=True, coefficients=terms, noise=20.0)


SHORT: Final = SimulationPlan(rounds=3)
"""A training with correlated noise is charged as a whole."""
CASES: Final = {
    "submodel": plan("submodel", cohort=3),
    "secure-fedavg": plan("secure-fedavg", cohort=3),
    "secure-submodel, complete": plan("secure-submodel", cohort=3),
    "secure-submodel, sparse": plan(
        "secure-submodel", cohort=5, security={"graph": "sparse", "dropout": 0.05}
    ),
    "secure-submodel, strict quorum": plan(
        "secure-submodel", cohort=3, privacy={"level": "cpp4", "strict_quorum": True}
    ),
    "secure-submodel, active": plan("secure-submodel", cohort=3, security={"threat": "active"}),
    "two-server, whole": plan(
        "two-server", cohort=3, two_server=TwoServerPlan(domain="whole", write="dpf")
    ),
    "two-server, keys that last": plan(
        "two-server", cohort=3, two_server=TwoServerPlan(domain="whole", key_rounds=3)
    ),
    "two-server, union": plan("two-server", cohort=3, two_server=TwoServerPlan(domain="union")),
    "secure-fedavg, noise of the server": plan("secure-fedavg", cohort=3, dp=noise("server")),
    "submodel, noise of each client": plan("submodel", cohort=3, dp=noise("local")),
    "secure-fedavg, noise in shares": plan("secure-fedavg", cohort=4, dp=noise("shares")),
    "two-server, noise of each server": plan("two-server", cohort=3, dp=noise("each")),
    "secure-fedavg, correlated noise": plan(
        "secure-fedavg", cohort=3, dp=correlated("server"), simulation=SHORT
    ),
    "two-server, correlated noise": plan(
        "two-server", cohort=3, dp=correlated("each"), simulation=SHORT
    ),
}
IN_MAKE_TEST: Final = 200
"""Points over all cases; each has the same number, drawn from a fixed seed."""
SEED: Final = 20


class Uninterrupted:
    """A case's round in which nobody is killed: what must come out, and where one can be killed."""

    def __init__(self, case: str, folder: Path) -> None:
        self.plan, self.folder = CASES[case], folder
        self.runs = itertools.count()
        empty = Lab(self.plan, folder / "empty")
        for party in list(empty.parties):
            empty.kill(party)
        lab = self.lab()
        lab.run(1)
        self.facts = lab.facts()
        self.points: list[tuple[Party, int]] = [
            (party, at) for party, count in lab.moments.items() for at in range(count)
        ]
        lab.close()

    def lab(self, **more: Any) -> Lab:
        """New processes over new journals."""
        folder = self.folder / str(next(self.runs))
        shutil.copytree(self.folder / "empty", folder)
        return Lab(self.plan, folder, **more)

    def kill_at(self, point: tuple[Party, int]) -> None:
        lab = self.lab()
        lab.kill_at[point] = True
        lab.run(1)
        assert not lab.kill_at, "somebody was killed"
        assert lab.facts() == self.facts, point
        lab.close()


@pytest.fixture(scope="module", params=CASES)
def whole(request: pytest.FixtureRequest) -> Iterator[Uninterrupted]:
    # In memory where there is such a file system: a process is killed, not the machine.
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Uninterrupted(request.param, Path(folder))


def test_the_round_is_that_of_the_simulator(whole: Uninterrupted) -> None:
    simulated = federation(whole.plan, entropy_seed=LAB_SEED)
    signers = identities(list(simulated.participants), ScriptedEntropy(LAB_SEED), "tessera")
    for client, participant in simulated.participants.items():
        participant.identity = signers[client]
    list(simulated.run(1))
    assert simulated.model.digest.hex() == whole.facts["model"]


def test_a_party_that_is_killed_goes_on_as_if_it_had_only_been_slow(whole: Uninterrupted) -> None:
    each = -(-IN_MAKE_TEST // len(CASES))
    rng = np.random.default_rng(SEED)
    for at in rng.choice(len(whole.points), min(each, len(whole.points)), replace=False):
        whole.kill_at(whole.points[at])


@pytest.mark.slow
def test_a_party_may_be_killed_at_every_single_point(whole: Uninterrupted) -> None:
    for point in whole.points:
        whole.kill_at(point)


def test_everybody_is_killed_again_and_again_and_the_rounds_go_on(whole: Uninterrupted) -> None:
    """At every seventh point of each party, through three rounds."""
    calm, lab = whole.lab(), whole.lab()
    calm.run(3)
    for party, count in calm.moments.items():
        lab.kill_at.update({(party, at): True for at in range(3, count, 7)})
    lab.run(3)
    assert lab.facts() == calm.facts()
    calm.close()
    lab.close()


def test_with_real_entropy_no_number_gets_a_second_content(whole: Uninterrupted) -> None:
    """What was drawn is in the journal: the tap of the lab finds one content per number."""
    lab = whole.lab(entropy=SystemEntropy)
    for party in lab.parties:
        lab.kill_at.update({(party, at): True for at in range(1, 60, 5)})
    lab.run(2)
    survivors = lab.leader.outcome(RoundId(1))
    assert f'"survivors": {whole.plan.cohort}' in survivors
    lab.close()
