"""Noise per person where clients hold several: ratings at shops, and what stays refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.api import Run, simulate
from tessera.data.examples import SUBJECT
from tessera.data.ratings import Attributes, RatingData
from tessera.data.subjects import at_clients, held_by
from tessera.errors import ConfigError
from tessera.learning.training.settings import LocalTraining
from tessera.plan import DPPlan, GroupsPlan, Plan, SimulationPlan, TaskPlan
from tessera.runs.folder import RunFolder
from tessera.runs.training import Training, complete
from tessera.tasks import Task, load, rating_task
from tessera.tasks.known import FACTORISED
from tests.learning.test_masked import ratings

PERSON = DPPlan(unit="subject", noise=2.0, clip=2.0, clients_per_subject=2)
TRAINING = LocalTraining(batch=60, rate=1.0, decay=1.0, table_rate=10.0)
SHOPS = 3


def shops() -> RatingData:
    """Twenty people's ratings at three shops, two of them each."""
    data = ratings((30,) * 20, tested=6)
    person = np.concatenate([data.train["user"], data.test["user"]])
    held = at_clients(person, clients=SHOPS, each=2, seed=0)
    moved = held_by(data, held, person, clients=SHOPS, subjects=20)
    return replace(data, profiles=Attributes.of({}, rows=SHOPS), **moved)


def task(data: RatingData | None = None, **model) -> Task:
    return rating_task(
        shops() if data is None else data,
        title="shops",
        recommended=replace(FACTORISED, cohort=SHOPS, max_rows=200),
        **({"factors": 0} | model),
    )


def planned(section: DPPlan, **more) -> Plan:
    more = {"scheme": "fedavg", "training": TRAINING} | more
    return Plan(
        cohort=SHOPS,
        task=TaskPlan(name="shops"),
        dp=section,
        simulation=SimulationPlan(rounds=4, min_examples=1),
        **more,
    )


@pytest.mark.parametrize("scheme", ["fedavg", "secure-fedavg", "submodel"])
@pytest.mark.parametrize("sampling", [1.0, 0.5])
def test_ratings_at_shops_train_with_a_number_per_person(
    tmp_path: Path, scheme: str, sampling: float
) -> None:
    section = replace(PERSON, sampling=sampling, steps=2)
    simulate(task(factors=2), planned(section, scheme=scheme), 2, out=tmp_path / "run")
    (_, last) = RunFolder.load(tmp_path / "run").rounds()
    assert 0.0 < last["noise_epsilon"] < 100.0
    assert "per subject" in last["noise_scope"]
    assert "at most 2 clients hold a person" in last["noise_scope"]
    assert "given the set-up sum" in last["noise_scope"] or "the set-up sum" in last["noise_scope"]
    Run(tmp_path / "run").report()


def test_with_little_noise_people_learn_from_each_other() -> None:
    """Items' biases, through the clipped sums: better than people's own means alone."""

    def error(rate: float) -> float:
        plan = planned(replace(PERSON, noise=0.01), training=replace(TRAINING, table_rate=rate))
        whole = task()
        with Training(whole, complete(plan, whole)) as run:
            list(run.run(4))
            return run.evaluation.metric(run.dense, run.tables | run.local)

    assert error(15.0) < error(1e-6)


@pytest.mark.parametrize(
    ("section", "data", "model", "says"),
    [
        (DPPlan(unit="item", noise=1.0), None, {}, "carry one example"),
        (DPPlan(unit="item", noise=1.0), ratings(), {"mask": "linear"}, "fit masks"),
        (
            DPPlan(unit="item", noise=1.0),
            ratings(),
            {"mask": "linear", "model": "linear"},
            "fit masks",
        ),
        (PERSON, None, {"mask": "linear"}, "a mask carries one person"),
        (PERSON, ratings(), {"mask": "linear", "refit": True}, "no step of theirs is clipped"),
    ],
    ids=["item", "item, mask", "item, mask, no factors", "mask of several", "fitted again"],
)
def test_what_stays_at_home_and_is_not_one_persons_is_refused(
    section: DPPlan, data: RatingData | None, model: dict, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as found:
        complete(planned(section), task(data, **model))
    assert found.value.hint


def test_a_local_row_of_two_people_is_refused() -> None:
    whole = task()
    user = np.where(whole.data.train["user"] == 1, 0, whole.data.train["user"])
    shared = replace(whole.data, train=whole.data.train.with_field("user", user))
    broken = replace(whole, data=shared)
    with pytest.raises(ConfigError, match="of several people") as found:
        Training(broken, complete(planned(PERSON), broken))
    assert found.value.hint


def test_one_person_per_client_is_free_to_keep_a_mask() -> None:
    """There a client's state is one person's, so that nothing of it has to be hidden again."""
    whole = task(ratings(), mask="linear")
    plan = replace(planned(replace(PERSON, clients_per_subject=1)), cohort=5)
    with Training(whole, complete(plan, whole)) as run:
        list(run.run(1))
    assert run.task.data.train.fields.get(SUBJECT) is None


def test_members_of_fixed_groups_are_charged_by_epochs_until_their_budget_is_spent(
    tmp_path: Path,
) -> None:
    """Epochs of a group have numbers of their own, which are not those of rounds."""
    plan = Plan(
        scheme="secure-submodel",
        cohort=10,
        groups=GroupsPlan(size=5, small=True),
        dp=DPPlan(unit="user", trust="local", noise=2.0, clip=1.0, epsilon=4.0),
        simulation=SimulationPlan(crypto="none", min_examples=1),
    )
    simulate(load("taobao-like", users=20, items=100), plan, 9, out=tmp_path / "run")
    spent = [line["noise_epsilon"] for line in RunFolder.load(tmp_path / "run").rounds()]
    assert 0.0 < spent[0] < spent[-1] <= 4.0
    assert len(spent) < 9, "training ends where one more round would pass the budget"
