"""Training with correlated noise: charged once, for the rounds that a client has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runs import raters
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.learning.averaging import ServerStep
from tessera.plan import CohortsPlan, DPPlan, Plan
from tessera.rounds.events import RoundFinished
from tessera.rounds.noise import noise_of
from tessera.runs.training import Training, complete

SERVER = {"fedavg": "server", "two-server": "each"}


def planned(scheme: str = "fedavg", **section) -> Plan:
    dp = {"unit": "user", "epsilon": 3.0, "delta": 1e-3, "trust": SERVER[scheme]}
    return raters.plan(
        scheme,
        cohort=5,
        privacy={"level": "cpp1"},
        simulation={"rounds": 8, "evaluate_every": 8},
        cohorts=CohortsPlan(drawn="schedule"),
        server=ServerStep(),
        dp=DPPlan(**dp | {"correlated": True} | section),
    )


@pytest.mark.parametrize("scheme", SERVER)
def test_every_client_is_charged_the_training_once(scheme: str) -> None:
    task = raters.task()
    plan = complete(planned(scheme), task)
    over = plan.correlation
    passes = -(-8 // over.participation.separation)
    assert over.participation.most == passes > 1
    with Training(task, plan, entropy=ScriptedEntropy(b"correlated")) as training:
        ends = [e for e in training.run(8) if isinstance(e, RoundFinished)]
        ledgers = [training.clients[c].local.ledger for c in training.clients.eligible]
    assert len(ends) == 8
    sums = [[e.event for e in ledger.entries if e.event.what == "noisy sums"] for ledger in ledgers]
    assert {len(each) for each in sums} == {1}
    noise = noise_of(plan)
    for ledger in ledgers:
        spent = noise.guarantee(ledger)
        assert spent is not None and 2.9 < spent.epsilon <= 3.0 + 1e-6


def test_noise_is_less_than_independent_noise_for_the_same_promise() -> None:
    task = raters.task()
    plan = complete(planned(), task)
    alone = complete(planned(correlated=False), task)
    assert plan.participation == alone.participation
    mixed = noise_of(plan).setting.over_training()
    other = noise_of(alone).setting.over_training()
    assert mixed is not None and other is not None
    assert mixed["independent_of_all_rounds"] == pytest.approx(
        other["noise_of_all_rounds"], rel=2e-2
    )
    assert mixed["noise_of_all_rounds"] < 0.8 * other["noise_of_all_rounds"]


def test_a_task_that_steps_otherwise_is_refused_with_a_hint() -> None:
    plan = replace(planned(), server=None)
    task = raters.task()
    stepped = replace(task, recommended=replace(task.recommended, server=ServerStep(decay=0.9)))
    with pytest.raises(ConfigError, match=r"decay = 0\.9") as refused:
        complete(plan, stepped)
    assert "decay = 1 in [server]" in (refused.value.hint or "")
