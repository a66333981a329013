"""What a task fills in where a plan leaves it open: one table, walked in its order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runs import raters, toy
from tessera import Plan
from tessera.errors import ConfigError
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.training.settings import LocalTraining
from tessera.plan import DPPlan, UnionPlan, UpdatePlan
from tessera.plan.defaults import DEFAULTS, Filled, filled_in, with_defaults
from tessera.plan.dp import SETUP_SHARE
from tessera.plan.places import PACE, most_by_seed
from tessera.tasks import Recommended, Task
from tessera.tasks.task import PrivateSettings

USER = DPPlan(unit="user", epsilon=8.0, delta=1e-3, clip=3.0)
STEPS = DPPlan(unit="item", epsilon=8.0, delta=1e-3, sampling=0.5, steps=2)
PRIVATE = PrivateSettings(training=LocalTraining(rate=0.7), server=ServerStep(rate=0.3))


def task(**recommended: Any) -> Task:
    return replace(toy.task(), recommended=Recommended(**recommended))


def given(plan: Plan, to: Task) -> dict[str, Filled]:
    return {one.key: one for one in filled_in(plan, to)}


def test_a_plan_that_says_nothing_takes_all_from_its_task():
    found = given(Plan(scheme="fedavg", cohort=4), task(clip=7.0, max_rows=33))
    others = {"model.shapes", "dp.setup", "training.examples", "server.schedule_rounds"}
    others |= {"server.threshold", "update.levels"}  # of sums with noise
    others |= {"cohorts.separation", "cohorts.rounds_per_client"}  # of schedules, and of noise
    assert found.keys() == {line.key for line in DEFAULTS} - others
    assert found["update.clip"].value == 7.0 and found["union.max_rows"].value == 33
    assert all(one.because and one.text for one in found.values())


def test_what_a_plan_says_is_not_filled_in_and_a_complete_one_stays():
    plan = Plan(
        scheme="fedavg",
        cohort=4,
        training=LocalTraining(batch=3),
        server=ServerStep(rate=0.5),
        update=UpdatePlan(clip=2.0, average="examples"),
        union=UnionPlan(max_rows=9),
    )
    assert given(plan, task()).keys() == {"tables", "model.dense"}
    done = with_defaults(plan, filled_in(plan, task()))
    assert filled_in(done, task()) == [] and with_defaults(done, []) == done


def test_a_clip_of_rows_is_one_for_the_dense_part_too():
    plan = Plan(scheme="fedavg", cohort=4, update={"clip": 2.0})
    assert "update.dense_clip" not in given(plan, task())
    plan = Plan(scheme="fedavg", cohort=4, update={"dense_clip": 2.0})
    found = given(plan, task())
    assert "update.clip" in found and "update.dense_clip" not in found


@pytest.mark.parametrize("section", [None, USER, STEPS], ids=["no noise", "user", "item"])
def test_the_first_line_of_a_key_that_applies_is_taken(section):
    good = task(private=PRIVATE, shrinkage=4.0, average=Average.ROWS)
    plan = Plan(scheme="fedavg", cohort=4, dp=section, partial={"server": {"decay": 0.9}})
    found = given(plan, good)
    private = section is USER
    assert (found["training"].value.rate == 0.7) is private
    assert found["server"].value.decay == 0.9  # what is given of a section stays
    shrunk = 4.0 * 4 / good.data.clients
    assert found["server"].value.shrinkage == (0.0 if private else shrunk)
    assert found["update.clip"].value == (16.0 if section is None else max(1.0, section.clip))
    assert ("noise" in found["training"].because) is private


def test_work_in_groups_that_wait_is_bounded_by_what_most_clients_have():
    waiting = Plan(scheme="secure-submodel", cohort=4, groups={"size": 2})
    good = task()
    counts = np.sort(np.diff(good.data.offsets))
    (line,) = (one for one in filled_in(waiting, good) if one.key == "training.examples")
    assert line.value == counts[-1 - len(counts) // 20] and "95%" in line.because
    done = with_defaults(waiting, filled_in(waiting, good))
    assert done.training == replace(good.recommended.training, examples=line.value)
    assert "training.examples" not in given(done, good)


@pytest.mark.parametrize(
    "more",
    [
        {"scheme": "fedavg"},
        {"privacy": {"level": "cpp4"}},
        {"training": {"examples": 3}},
        {"training": LocalTraining(examples=3)},
        {"dp": replace(STEPS, trust="local")},
    ],
)
def test_other_plans_bound_no_work_or_do_so_themselves(more):
    plan = Plan(**{"scheme": "secure-submodel", "cohort": 4, **more})
    assert "training.examples" not in given(plan, task())


def test_a_task_that_bounds_work_itself_is_asked_first():
    plan = Plan(scheme="secure-submodel", cohort=4)
    assert "training.examples" not in given(plan, task(training=LocalTraining(examples=9)))
    said = replace(plan, training=LocalTraining(batch=2))
    assert "training.examples" in given(said, task(training=LocalTraining(examples=9)))


def test_secret_cohorts_divide_by_what_is_expected():
    secret = {"cohorts": {"drawn": "secret", "share": 0.5}, "dp": replace(USER, trust="server")}
    found = given(Plan(scheme="fedavg", cohort=4, **secret), task(average=Average.ROWS))
    assert found["update.average"].value is Average.EXAMPLES
    found = given(Plan(scheme="fedavg", cohort=4), task(average=Average.ROWS))
    assert found["update.average"].value is Average.ROWS


def test_a_schedule_is_a_pass_over_the_clients_of_the_task():
    everybody = task().data.clients
    plan = Plan(scheme="fedavg", cohort=2, cohorts={"drawn": "schedule"})
    for rounds in (1, 7, 40):
        found = given(plan.with_simulation(rounds=rounds), task())
        apart = found["cohorts.separation"].value
        assert apart == -(-everybody // 2)
        assert found["cohorts.rounds_per_client"].value == -(-rounds // apart)
    said = replace(plan, cohorts={"drawn": "schedule", "separation": 2, "rounds_per_client": 3})
    assert not {"cohorts.separation", "cohorts.rounds_per_client"} & given(said, task()).keys()


def test_a_round_of_a_schedule_under_noise_is_its_part_of_a_step():
    """A whole step in every round follows each cohort too far, and ends worse than no training."""
    everybody, noisy = task(private=PRIVATE), replace(USER, trust="server")
    plan = Plan(scheme="fedavg", cohort=2, dp=noisy, cohorts={"drawn": "schedule"})
    rounds = -(-everybody.data.clients // 2)
    assert rounds > 1
    assert given(plan, everybody)["server"].value.rate == round(0.3 * PACE / rounds, 4)
    seeded = replace(plan, cohorts={"drawn": "seed"})
    assert given(seeded, everybody)["server"].value.rate == 0.3
    alone = replace(plan, cohort=everybody.data.clients)
    assert given(alone, everybody)["server"].value.rate == 0.3  # one round is the whole step


def test_noise_for_a_budget_is_for_the_most_rounds_that_the_seed_gives_anybody():
    plan = Plan(scheme="fedavg", cohort=2, seed=3, dp=replace(USER, trust="server"))
    plan = plan.with_simulation(rounds=30)
    found = given(plan, task())["cohorts.rounds_per_client"].value
    assert found == most_by_seed(plan, task().data.clients) < 30
    for other in (replace(plan, dp=None), replace(plan, dp=replace(plan.dp, noise=2.0))):
        assert "cohorts.rounds_per_client" not in given(other, task())


def test_a_set_up_sum_has_its_share_of_a_budget_per_user():
    films = raters.task(mask="linear")
    found = given(Plan(scheme="secure-fedavg", cohort=4, dp=USER), films)
    assert found["dp.setup"].value == SETUP_SHARE
    said = replace(USER, setup=0.2)
    assert "dp.setup" not in given(Plan(scheme="secure-fedavg", cohort=4, dp=said), films)
    assert "dp.setup" not in given(Plan(scheme="secure-fedavg", cohort=4), films)


def test_a_plan_with_another_model_is_refused():
    done = with_defaults(
        plan := Plan(scheme="fedavg", cohort=4), filled_in(plan, other := toy.task())
    )
    wrong = replace(done, model=replace(done.model, dense=done.model.dense + 1))
    with pytest.raises(ConfigError, match="not those of task"):
        filled_in(wrong, other)
