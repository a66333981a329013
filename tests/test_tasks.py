"""Tasks by name: what they hold, and what they refuse."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch

from tessera import tasks
from tessera.data.taobao_like import taobao_like
from tessera.errors import ConfigError
from tessera.learning.averaging import ServerStep
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Plan, UpdatePlan
from tessera.runs.client_training import Trainer
from tessera.runs.training import Training, complete

SMALL = {"users": 20, "items": 90, "examples": 8, "history": 4}


def test_a_task_has_data_a_model_and_tables_that_fit_each_other():
    task = tasks.load("taobao-like", **SMALL)
    bound = task.tables.bind(task.build(0))
    assert {t.name: t.local for t in bound.tables} == {
        "items": False,
        "categories": False,
        "biases": False,
        "users": True,
    }
    rows = bound.row_ids_of(task.data.of(3))
    assert set(rows) == {"items"}
    assert len(rows["items"]) >= len(np.unique(task.data.of(3)["item"]))


def test_a_plain_model_has_no_biases_and_reads_no_rate():
    plain = tasks.load("taobao-like", **SMALL, model="din")
    bound = plain.tables.bind(plain.build(0))
    assert [t.name for t in bound.tables] == ["items", "categories", "users"]


def test_the_papers_size_has_exactly_their_dense_parameters():
    task = tasks.load("taobao-like", **SMALL, size="papers", model="din")
    assert task.tables.bind(task.build(0)).dense_size == 64_327


def test_the_first_model_follows_from_the_seed_and_from_nothing_else():
    task = tasks.load("taobao-like", **SMALL)
    before = torch.get_rng_state()
    one, two, other = task.build(1).state_dict(), task.build(1).state_dict(), task.build(2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["items.weight"], other.state_dict()["items.weight"])


def test_a_plan_takes_what_it_leaves_out_from_the_task():
    task = tasks.load("taobao-like", **SMALL)
    good = task.recommended
    plan = complete(Plan(scheme="submodel", cohort=5), task)
    assert [t.name for t in plan.tables] == ["items", "categories", "biases"]
    assert (plan.training, plan.server) == (good.training, good.server)
    assert (plan.update.clip, plan.update.dense_clip) == (good.clip, good.dense_clip)
    own = Plan(
        scheme="submodel",
        cohort=5,
        training=LocalTraining(batch=3),
        server=ServerStep(rate=0.5),
        update=UpdatePlan(clip=2.0, average="examples"),
    )
    kept = complete(own, task)
    assert (kept.training, kept.server, kept.update) == (own.training, own.server, own.update)
    assert complete(kept, task) == kept


@pytest.mark.parametrize("form", ["dictionary", "file"])
def test_keys_that_a_section_leaves_out_are_the_tasks(form):
    task = tasks.load("taobao-like", **SMALL)
    good = complete(Plan(scheme="submodel", cohort=5), task)
    assert good.training.table_rate != LocalTraining().table_rate  # or it would tell nothing
    if form == "file":
        plan = Plan.parse(
            'scheme = "submodel"\ncohort = 5\n[task]\nname = "taobao-like"\n'
            "[training]\nlearning_rate = 0.07\n[server]\ndecay = 0.9\n"
        )
    else:
        sections = {"training": {"learning_rate": 0.07}, "server": {"decay": 0.9}}
        plan = Plan(scheme="submodel", cohort=5, **sections)
    assert plan.training is None and plan.server is None
    if form == "file":
        assert Plan.parse(plan.to_toml()) == plan
    assert plan.digest != replace(plan, partial={}).digest
    done = complete(plan, task)
    assert done.training == replace(good.training, rate=0.07)
    assert done.server == replace(good.server, decay=0.9)
    assert complete(done, task) == done and not done.partial
    named = replace(plan, training=LocalTraining(batch=3))  # a record is taken as it is
    assert complete(named, task).training == LocalTraining(batch=3)


def test_completed_plans_read_back_from_their_file():
    plan = complete(
        Plan(scheme="secure-submodel", cohort=5, index_privacy="cpp2"),
        tasks.load("taobao-like", **SMALL),
    )
    assert Plan.parse(plan.to_toml()) == plan


def test_an_option_that_was_renamed_is_refused_with_its_new_name():
    with pytest.raises(ConfigError, match="'taobao-like' has no option 'goods'") as caught:
        tasks.load("taobao-like", users=20, goods=90)
    assert caught.value.hint == "it is called items now"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("taobao-liek", {}, "nothing is called 'taobao-liek'"),
        ("taobao-like", {"user": 3}, "no option 'user'"),
        ("taobao-like", {"users": "many"}, "is not of type int"),
        ("taobao-like", {"users": True}, "is not of type int"),
        ("taobao-like", {**SMALL, "size": "huge"}, "size = 'huge'"),
        ("interactions", {}, "no path"),
    ],
)
def test_what_is_not_there_is_refused_with_a_way_out(name, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        tasks.load(name, **options)
    assert caught.value.hint


def test_a_missing_set_says_what_to_fetch_and_into_which_folder(tmp_path):
    with pytest.raises(ConfigError, match="MovieLens 1M") as caught:
        tasks.load("movielens", data=tmp_path)
    assert "ml-1m" in caught.value.hint


def test_own_interactions_become_a_task(tmp_path):
    path = tmp_path / "own.csv"
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(["who", "what", "stars"])
        for _ in range(300):
            lines.writerow([f"p{rng.integers(9)}", f"t{rng.integers(30)}", rng.integers(1, 6)])
    task = tasks.load(
        "interactions", path=str(path), user="who", item="what", label="stars", threshold=4.0
    )
    assert task.data.clients == 9
    task.tables.bind(task.build(0))


def test_data_without_click_rates_gets_a_model_that_does_not_ask_for_them():
    data = taobao_like(20, 90, examples=8, history=4)
    bare = type(data)(
        name="bare",
        train=type(data.train)({k: v for k, v in data.train.fields.items() if k != "rate"}),
        offsets=data.offsets,
        test=data.test,
        test_offsets=data.test_offsets,
        sizes=data.sizes,
        category_of=data.category_of,
    )
    task = tasks.click_task(bare, title="bare", recommended=tasks.Recommended())
    assert "trust" not in dict(task.build(0).named_parameters())


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_every_task_has_options_a_summary_and_recommendations(name):
    task = tasks.known(name)
    own = {"model", "mask", "split"} if name.startswith("ratings-") else {"width", "history"}
    if name == "shops-1m":  # its clients have no attributes, hence no masks
        own = {"factors", "split", "shops", "shops_each"}
    if name in ("trec", "mnist"):
        own = {"clients", "part", "seed"}
    if name.startswith("sequences"):
        own = {"model", "history", "part", "negatives", "tau", "exact_pairs"}
    if name in ("plays", "speakers-like"):
        own = {"speakers", "length", "part", "negatives"}
    assert own <= set(task.options) and "folder" not in task.options
    assert task.summary.endswith(".")
    rated = name.startswith(("ratings-", "shops-"))
    assert (task.recommended.training.batch == 0) == rated


def test_shops_train_the_rows_of_all_their_people():
    small = {"users": 40, "items": 60, "examples": 10, "history": 3, "shops": 4, "shops_each": 2}
    task = tasks.load("retail", **small, size="tiny")
    assert task.data.clients == 4 and task.data.subjects == 40
    plan = complete(Plan(scheme="submodel", cohort=4), task)
    with Training(task, plan, trainer=Trainer.SEQUENTIAL) as training:
        every = np.arange(task.data.sizes["user"], dtype=np.uint64)
        before = training.local["users"].values(every).copy()
        list(training.run(1))
        assert (training.local["users"].values(every) != before).any(axis=1).all()
