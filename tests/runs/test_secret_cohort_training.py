"""Whole runs whose cohorts are drawn in secret: by a trusted server, and in secure sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runs import toy
from tessera.api import Run, simulate
from tessera.audit import record
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import SERVER, ClientId, RoundId
from tessera.plan import CohortsPlan, DPPlan, Plan, Trust, UpdatePlan
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.rounds.events import RoundFinished, RoundStarted, TrainingEnded
from tessera.rounds.noise import noise_of
from tessera.runs.folder import RunFolder
from tessera.runs.training import Training, complete
from tessera.simulation.faults import random_dropouts
from tessera.simulation.views import Views

USERS, COHORT = 44, 22
SECTION = DPPlan(unit="user", noise=4.0, delta=1e-5, trust=Trust.SERVER)
COHORTS = CohortsPlan(drawn="secret", share=0.5)


def planned(scheme: str, section: DPPlan = SECTION, **more) -> Plan:
    plan = toy.plan(scheme, simulation={"crypto": "none", **more})
    more = {"dp": section, "cohorts": COHORTS, "training": None, "update": UpdatePlan()}
    return replace(plan, cohort=COHORT, **more)


@pytest.mark.parametrize("scheme", ["fedavg", "secure-fedavg"])
def test_a_run_that_was_stopped_draws_the_same_cohorts_and_has_the_same_model(
    tmp_path: Path, scheme: str
) -> None:
    task, plan = toy.task(users=USERS), planned(scheme, dropout=0.1)
    models, cohorts = [], []
    for name, ends in (("whole", [4]), ("parts", [2, 4])):
        folder, seen = tmp_path / name, []
        for at, end in enumerate(ends):
            entropy = None if at else "a test"
            simulate(
                task, plan, end, out=folder, resume=bool(at), on_event=seen.append,
                insecure_test_entropy=entropy,
            )  # fmt: skip
        cohorts.append([e.cohort for e in seen if isinstance(e, RoundStarted)])
        assert all(isinstance(e, RoundFinished | RoundStarted) for e in seen)
        with Training(
            task, RunFolder.load(folder).plan, folder=folder / "checkpoint",
            entropy=ScriptedEntropy(b"not asked"),
        ) as training:  # fmt: skip
            models.append({k: v.tobytes() for k, v in training.parameters(local=True).items()})
    assert models[0] == models[1] and cohorts[0] == cohorts[1]
    assert len({len(each) for each in cohorts[0]}) > 1


def test_everybody_is_charged_and_the_page_says_what_has_to_stay_secret(tmp_path: Path) -> None:
    task, plan = toy.task(users=USERS), complete(planned("fedavg"), toy.task(users=USERS))
    with Training(task, plan) as training:
        list(training.run(3))
        for client in training.clients:
            ledger = training.clients[client].local.ledger
            assert len(ledger.entries) == 3
            found = ledger.guarantee(unit=Unit.USER, against=Observer.READERS, delta=1e-5)
            alone = noise_of(plan).setting.ledger(3)
            assert found == alone.guarantee(unit=Unit.USER, against=Observer.READERS, delta=1e-5)
    simulate(task, planned("fedavg"), 2, out=tmp_path / "run")
    Run(tmp_path / "run").report()
    assert "tells nobody who was drawn" in (tmp_path / "run" / "report.html").read_text()


def test_when_a_budget_ends_training_does_not_follow_from_who_was_drawn() -> None:
    """A client that was in every round would have ended it at the same round as one in none."""
    task = toy.task(users=USERS)
    section = replace(SECTION, epsilon=1.5)
    plan = complete(planned("secure-fedavg", section), task)
    lasts = noise_of(plan).lasts
    assert lasts is not None and 2 <= lasts <= 12
    for seed in (b"a", b"b"):
        with Training(task, plan, entropy=ScriptedEntropy(seed)) as training:
            events = list(training.run(lasts + 4))
        (end,) = (e for e in events if isinstance(e, TrainingEnded))
        assert end.round_id == lasts and f"up to {lasts} rounds" in end.reason


def test_drawn_dropouts_never_end_a_round() -> None:
    plan = complete(planned("secure-fedavg"), toy.task(users=USERS))
    script = random_dropouts(0.9, 1, plan)
    for clients in (plan.fewest_clients, 11, 22, 40):
        part = plan.part(secure=True, clients=clients)
        gone = script(RoundId(clients), [ClientId(c) for c in range(clients)])
        assert clients - len(gone) >= part.least_survivors


def test_the_views_of_a_secure_sum_are_read_with_the_cohort_that_was_drawn(tmp_path: Path) -> None:
    """Its size is in every key of the round: a replay with another would open nothing."""
    task = toy.task(users=USERS)
    plan = complete(replace(planned("secure-fedavg"), simulation=toy.plan().simulation), task)
    seen, views = [], Views()
    with Training(task, plan, views=views, entropy=ScriptedEntropy(b"views")) as training:
        seen = list(training.run(1))
    (end,) = (e for e in seen if isinstance(e, RoundFinished))
    (view,) = record.replays(plan, RoundId(0), list(record.decoded(views.by_party[SERVER])))
    assert view.finished and len(view.sums[-1].survivors) == end.survivors != COHORT
