"""FedMF and PFedRec against autograd, and the table of all models over a few synthetic films."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from papers import fedrec, fedrec_models
from papers.cells import Request
from papers.fedrec_models import ITEMS, MODELS, OWN, BilinearLearner, baseline_task, scores_of
from reproduce import films
from tessera import tasks
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.learning.rankers import sampled
from tessera.plan import Plan, SimulationPlan
from tessera.runs.training import Training, complete

SMALL = {"width": 4, "negatives": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return films.write(tmp_path_factory.mktemp("films"))


@pytest.fixture(scope="module")
def data(folder):
    return tasks.load("sequences-100k", data=folder, negatives=10).data


def trained(data, name, rounds=2):
    task = baseline_task(data, name)
    simulation = SimulationPlan(rounds=rounds, crypto="none")
    plan = complete(Plan(scheme="submodel", cohort=films.USERS, simulation=simulation), task)
    training = Training(task, plan, entropy=ScriptedEntropy(b"fedrec"))
    for _ in training.run(rounds):
        pass
    return training


@pytest.mark.parametrize("name", MODELS)
def test_a_client_steps_down_the_gradient_of_its_own_cross_entropy(data, name):
    """PFedRec: first the score function, then the items with the new one."""
    training, tuned = trained(data, name, rounds=1), name == "PFedRec"
    settings = replace(training.plan.local_training, rate=0.7, table_rate=0.3)
    job = training.job(ClientId(3), training._whole(ClientId(3)))
    ids = job.submodel.trained[ITEMS].astype(np.int64)
    at = torch.tensor(np.searchsorted(ids, job.examples["item"]))
    label = torch.tensor(job.examples["label"], dtype=torch.float64)
    rows = torch.tensor(job.submodel.tables[ITEMS].of(job.submodel.trained[ITEMS])).double()
    own = torch.tensor(job.local[OWN].values[0]).double()
    own[-1] *= tuned
    rows.requires_grad_(), own.requires_grad_()

    def loss(own, rows):
        logits = rows[at] @ own[:-1] + own[-1]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")

    (slope,) = torch.autograd.grad(loss(own, rows), own)
    slope[-1] *= tuned
    stepped = (own - 0.7 * slope / len(label)).detach()
    (pull,) = torch.autograd.grad(loss(stepped if tuned else own.detach(), rows), rows)
    (found,) = BilinearLearner(settings, tuned=tuned).train([job], round_id=0)
    assert_allclose(found.local[OWN].values[0], stepped, atol=1e-5)
    assert_allclose(found.update.tables[ITEMS].values, -0.7 * 0.3 * pull, atol=1e-5)
    assert found.update.tables[ITEMS].counts.sum() == len(label)


def test_what_is_held_out_may_be_a_negative_and_what_is_owned_may_not(data):
    training = trained(data, "FedMF")
    drawn = training.task.data
    negatives = {
        (user, item)
        for user, item, label in zip(
            drawn.train["user"], drawn.train["item"], drawn.train["label"], strict=True
        )
        if not label
    }
    owned = {(u, i) for u in range(data.clients) for i in data.events.of(u)}
    assert not negatives & owned
    assert negatives & set(zip(data.test["user"], data.test["item"], strict=True))
    assert len(drawn.train) == len(data.train) * (1 + fedrec_models.NEGATIVES)


def test_pfedrec_predicts_with_the_items_as_each_user_has_tuned_them(data):
    plain, tuned = trained(data, "FedMF"), trained(data, "PFedRec")
    test = data.test
    for training, name in ((plain, "FedMF"), (tuned, "PFedRec")):
        items = training.tables[ITEMS].values(np.arange(films.FILMS, dtype=np.uint64))
        own = training.local[OWN].values(test["user"].astype(np.uint64))
        shared = own[:, :-1] @ items.T + (own[:, -1:] if name == "PFedRec" else 0.0)
        differs = np.abs(scores_of(training, name)(test) - shared).max()
        assert (differs > 1e-3) == (name == "PFedRec")


def test_every_model_has_a_row_in_both_protocols_and_is_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fedrec, "sampled", partial(sampled, number=8))
    small = replace(fedrec.SETS["ml-100k"], quick=2, quick_others=2, options=SMALL)
    monkeypatch.setitem(fedrec.SETS, "ml-100k", small)
    request = Request(parts=fedrec.DEFAULT, cache=tmp_path, quick=True, data=folder)
    found = fedrec.cells(request)
    for table, columns in (
        (fedrec.ALL, {"NDCG@10", "recall@10", "recall@20"}),
        (fedrec.AMONG, {"HR@10", "NDCG@10"}),
        (fedrec.TRAFFIC, {"rounds", "up", "down"}),
    ):
        own = [cell for cell in found if cell.table == f"MovieLens 100K, {table}"]
        rows = {cell.row for cell in own}
        assert {"FedMF", "PFedRec", "next", "pairs", "next+pairs"} <= rows
        assert ("EASE" in rows) == (table != fedrec.TRAFFIC)
        assert {cell.column for cell in own} == columns
        assert all(cell.ours is not None and cell.ours > 0 for cell in own if table != fedrec.ALL)
    by = {(cell.table, cell.row, cell.column): cell.ours for cell in found}
    sent = f"MovieLens 100K, {fedrec.TRAFFIC}"
    both = by[sent, "next", "up"] + by[sent, "pairs", "up"]
    assert by[sent, "next+pairs", "up"] == pytest.approx(both)
    assert by[sent, "pairs", "rounds"] == 1.0
    monkeypatch.setattr(fedrec, "predictors", None)  # nothing is computed again
    monkeypatch.setattr(fedrec, "baseline_task", None)
    assert [cell.printed() for cell in fedrec.cells(request)] == [c.printed() for c in found]


def test_published_figures_say_where_they_are_from():
    for (part, table), rows in fedrec.PUBLISHED.items():
        assert part in fedrec.SETS and table in (fedrec.ALL, fedrec.AMONG)
        for columns in rows.values():
            for figure in columns.values():
                assert figure.source and ("secondary" in figure.note) == figure.secondary


def test_an_unknown_row_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown row"):
        fedrec.cells(Request(parts=("ml-100k",), cache=tmp_path, variants=("MF",)))
