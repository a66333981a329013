"""Ratings under every scheme: they are learnt, secure and plain agree, and stopped runs go on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import tessera
from runs import raters
from tessera.api import simulate
from tessera.cli.run_summary import summary
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.runs.folder import LABELS
from tessera.runs.training import Training, complete

SCHEMES = ["fedavg", "submodel", "secure-fedavg", "secure-submodel"]


def go(folder, scheme, rounds=6, task=None, plan=None, **more):
    return simulate(
        task or raters.task(),
        plan or raters.plan(scheme, cohort=20, simulation={"evaluate_every": 1}),
        rounds,
        out=folder,
        insecure_test_entropy="ratings",
        **more,
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ratings_are_learnt_under_every_scheme(tmp_path, scheme):
    run = go(tmp_path / "run", scheme, rounds=25)
    first, last = run.curve[0][1], run.metric
    trivial = run.facts["trivial"]
    assert run.facts["metric"] == "RMSE" and set(trivial) == {"user mean", "item mean", "sum"}
    assert last < first - 0.1
    assert last < trivial["user mean"] and last < trivial["item mean"]
    assert run.facts["learner"] == {"name": "factorised", "reason": "the task's own"}


@pytest.mark.parametrize(
    ("scheme", "refit"),
    [
        ("fedavg", True),
        ("submodel", False),
        ("secure-fedavg", False),
        ("secure-submodel", True),
        ("two-server", True),
    ],
)
def test_biases_alone_are_learnt_under_every_scheme(tmp_path, scheme, refit):
    task = raters.task(factors=0, mask="linear", penalty=1.0, refit=refit)
    plan = raters.plan(scheme, cohort=20, simulation={"evaluate_every": 1, "rounds": 3})
    run = go(tmp_path / "run", scheme, rounds=3, task=task, plan=plan)
    with Training(task, complete(plan, task)) as training:
        assert training.parameters()["items.weight"].shape == (raters.FILMS, 1)
    assert run.metric < min(run.facts["trivial"].values())


def test_masks_that_are_fitted_again_take_no_sum_and_end_at_the_last_model(tmp_path):
    """The own rows that are tested and stored are those of the model that is."""
    task = raters.task(factors=0, mask="linear", penalty=1.0, refit=True)
    whole = go(tmp_path / "whole", "secure-fedavg", rounds=4, task=task)
    assert whole.facts["setup"] == {"mean": 3.0} and whole.facts["learner"]["name"] == (
        "refitted at home"
    )
    go(tmp_path / "parts", "secure-fedavg", rounds=2, task=task)
    parts = go(tmp_path / "parts", "secure-fedavg", rounds=4, task=task, resume=True)
    assert [r["metric"] for r in parts.rounds] == [r["metric"] for r in whole.rounds]
    assert tessera.load(whole.export(task)) is not None
    best = whole.recommend(0, 3, task=task)
    assert len(best) == 3 and all(1.0 <= rating <= 5.0 for _, rating in best)


def test_only_linear_masks_of_single_people_are_fitted_again():
    for settings in ({}, {"mask": "fm"}, {"mask": "linear", "model": "linear"}):
        with pytest.raises(ConfigError, match="refit = true"):
            raters.task(refit=True, **settings)


def test_all_schemes_end_with_one_model(tmp_path):
    """Lossless: at cpp5, without decoys, and with one entropy the integers are the same."""
    everything = raters.plan("secure-submodel", cohort=20, privacy={"level": "cpp5", "decoys": 0.0})
    ends = [go(tmp_path / s, s, rounds=3).metric for s in SCHEMES[:3]]
    ends.append(go(tmp_path / "rows", "secure-submodel", rounds=3, plan=everything).metric)
    assert len(set(ends)) == 1


def test_secure_and_plain_sums_differ_by_no_more_than_rounding(tmp_path):
    """Real secrets this time: other coins in every run."""
    models = {}
    for scheme in ("submodel", "secure-fedavg"):
        plan = complete(raters.plan(scheme, cohort=20), raters.task())
        with Training(raters.task(), plan) as training:
            list(training.run(1))
            models[scheme] = training.parameters()["items.weight"]
    step = plan.quantizer.clip / plan.quantizer.top
    # One step, where one client rated an item; the models are float32, and so is the difference.
    rounded = step + np.finfo(np.float32).eps * np.abs(models["submodel"]).max()
    assert 0 < np.abs(models["submodel"] - models["secure-fedavg"]).max() <= rounded


@pytest.mark.parametrize("mask", ["none", "linear"])
def test_a_stopped_run_ends_as_if_it_had_not_been(tmp_path, mask):
    task = raters.task(mask=mask, penalty=1.0)
    whole = go(tmp_path / "whole", "secure-submodel", rounds=4, task=task)
    go(tmp_path / "parts", "secure-submodel", rounds=2, task=task)
    parts = go(tmp_path / "parts", "secure-submodel", rounds=4, task=task, resume=True)
    assert [r["metric"] for r in parts.rounds] == [r["metric"] for r in whole.rounds]
    assert parts.facts["setup"] == whole.facts["setup"]


def test_a_mask_is_taken_off_before_anything_is_federated(tmp_path):
    task = raters.task(mask="linear", penalty=1.0)
    run = go(tmp_path / "run", "secure-submodel", rounds=15, task=task)
    assert run.facts["setup"]["mask"]["order"] == "linear"
    plan = complete(raters.plan(cohort=20), task)
    with Training(task, plan) as training:
        base = training.task.data.train["base"]
        ratings = training.task.data.train["label"]
        assert len(np.unique(base)) > raters.USERS  # one per genre and user, not one for all
        assert np.mean((ratings - base) ** 2) < 0.7 * ratings.var()
        indicator = training.setup.indicator
    assert indicator.shape == (raters.USERS,) and (indicator[np.isfinite(indicator)] >= 0).all()
    assert run.metric < run.curve[0][1]


def test_clients_go_in_the_open_as_their_own_masks_say(tmp_path):
    task = raters.task(mask="linear", penalty=1.0)
    plan = complete(raters.plan(cohort=20), task)
    with Training(task, plan, entropy=ScriptedEntropy(b"ratings")) as training:
        middle = float(np.nanmedian(training.setup.indicator))
        below = int((training.setup.indicator <= middle).sum())
    assert 3 <= below <= 17
    plan = raters.plan(cohort=20, security={"sharing": "auto", "indicator": middle})
    run = go(tmp_path / "run", "secure-submodel", rounds=2, task=task, plan=plan)
    assert [r["unmasked"] for r in run.rounds] == [below, below]
    assert [r["survivors"] for r in run.rounds] == [20, 20]


def test_recorded_runs_have_the_truth_about_their_labels(tmp_path):
    run = go(tmp_path / "run", "submodel", rounds=2, record_views=True)
    truth = json.loads((run.folder / LABELS).read_text())
    own = raters.task().data.of(7)
    assert truth["7"]["item"] == own["item"].tolist()
    assert truth["7"]["label"] == own["label"].tolist()
    assert truth["7"]["base"] == pytest.approx([run.facts["setup"]["mean"]] * len(own), abs=1e-6)


def test_a_client_without_ratings_and_a_constant_one_do_no_harm(tmp_path):
    data = raters.films()
    ratings = data.train["label"].copy()
    ratings[data.offsets[3] : data.offsets[4]] = 4.0
    constant = replace(data, train=data.train.with_field("label", ratings))
    keep = np.ones(len(ratings), bool)
    keep[constant.offsets[5] : constant.offsets[6]] = False
    counts = np.diff(constant.offsets)
    counts[5] = 0
    without = replace(
        constant,
        train=constant.train.take(keep),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
    )
    task = raters.task(without, mask="linear")
    plan = raters.plan(cohort=19, simulation={"evaluate_every": 1})
    run = go(tmp_path / "run", "secure-submodel", rounds=3, task=task, plan=plan)
    assert np.isfinite(run.metric) and run.rounds[-1]["not_finite"] == 0


@pytest.mark.parametrize("model", ["linear", "fm", "network"])
def test_models_of_attributes_alone_are_all_dense_and_learn(tmp_path, model):
    task = raters.task(model=model)
    plan = raters.plan("secure-fedavg", cohort=20, simulation={"evaluate_every": 1})
    run = go(tmp_path / "run", "secure-fedavg", rounds=6, task=task, plan=plan)
    assert run.facts["model"]["tables"] == []
    assert run.metric < run.curve[0][1]


def test_a_small_cohort_gets_its_part_of_the_pull():
    task = replace(raters.task(), recommended=replace(raters.RECOMMENDED, shrinkage=0.8))
    whole = complete(raters.plan(cohort=20), task)
    half = complete(raters.plan(cohort=10), task)
    assert (whole.server.shrinkage, half.server.shrinkage) == (0.8, 0.4)
    assert complete(half, task) == half


def test_ratings_in_one_place_are_the_reference(tmp_path):
    plan = raters.plan("central", cohort=20, simulation={"evaluate_every": 1})
    run = go(tmp_path / "run", "central", rounds=8, plan=plan)
    assert run.metric < run.facts["trivial"]["user mean"]
    assert run.facts["setup"]["sum"]["masked"] == 0


def test_the_best_round_is_the_one_with_the_smallest_error(tmp_path):
    run = go(tmp_path / "run", "submodel", rounds=4)
    curve = [value for _, value in run.curve]
    assert min(curve) < max(curve)
    facts = summary(tmp_path / "run")
    assert facts["metric"] == "RMSE" and facts["best"] == min(curve)
