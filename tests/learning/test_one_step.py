"""The step of a lag model that is written out trains as one client after the other does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.learning.bound_model import BoundModel, Table
from tessera.learning.models.lags import BIASES, ITEMS, LagModel
from tessera.learning.module_tables import Tables
from tessera.learning.softmax import SampledSoftmax, Softmax
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job, Trainable
from tessera.learning.training.local import Sequential
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised import lags
from tessera.learning.training.vectorised.check import best
from tessera.learning.training.vectorised.lags import OneStep

M = 40
SAMPLED = SampledSoftmax(ITEMS, BIASES, target="item", negatives=9, weights=np.arange(1.0, M + 1))
WHOLE = Softmax(ITEMS, BIASES, target="item", negatives=9)
TRAINING = LocalTraining(batch=6, rate=0.5, decay=0.9, weight_decay=0.01, table_rate=2.0)


def _cohort(
    loss: Softmax, training: LocalTraining = TRAINING, module: LagModel | None = None
) -> tuple[Trainable, list[Job]]:
    """Five clients: full batches, shorter ones, one without examples, one with other weights."""
    module = LagModel(M, length=7, width=19, seed=3) if module is None else module
    tables = {ITEMS: Table("item", "history"), BIASES: Table("item")}
    bound = Tables(tables).bind(module, loss)
    rng = np.random.default_rng(5)
    jobs = [_job(bound, module, rng, client, n) for client, n in enumerate((6, 1, 5, 0, 6))]
    other = (jobs[4].submodel.dense * 1.5).astype(np.float32)
    jobs[4] = replace(jobs[4], submodel=replace(jobs[4].submodel, dense=other))
    return Trainable(module, bound, loss, training), jobs


def _job(bound: BoundModel, module: LagModel, rng: np.random.Generator, client: int, n: int) -> Job:
    own = rng.choice(M, 12, replace=False)
    examples = Examples(
        {"item": rng.choice(own, n), "history": rng.choice(np.append(own, -1), (n, 7))}
    )
    # Two of its own rows it may not train: what needs them is cut.
    rows = np.union1d(own[:10], rng.choice(M, 9, replace=False)).astype(np.uint64)
    parts = {
        table.name: TablePart(rows, bound.initial(table.name)[rows] + np.float32(0.01))
        for table in bound.tables
    }
    submodel = Submodel(bound.pack(module), parts, dict.fromkeys(parts, rows))
    return Job(client, submodel, examples, coins=Secret(bytes([client + 1] * 32)))


@pytest.mark.parametrize("loss", [SAMPLED, WHOLE], ids=["sampled", "whole"])
@pytest.mark.parametrize("native", [True, False])
def test_it_trains_as_one_by_one_draws_included(loss, native, monkeypatch):
    if not native:
        monkeypatch.setattr(lags, "_library", lambda: None)
    elif lags._library() is None:
        pytest.skip("built without a C compiler")
    model, jobs = _cohort(loss)
    reference = Sequential(model)
    expected = reference.train(jobs, round_id=2)
    model.module.train()
    found = OneStep(model, reference).train(jobs, round_id=2)
    for one, other in zip(expected, found, strict=True):
        assert one.examples == other.examples and one.finite and other.finite
        assert_allclose(other.update.dense, one.update.dense, rtol=1e-3, atol=2e-6)
        for name, update in one.update.tables.items():
            assert_allclose(other.update.tables[name].values, update.values, rtol=1e-3, atol=2e-6)
            assert (other.update.tables[name].counts == update.counts).all()
        if one.examples:
            assert np.abs(one.update.dense).max() > 1e-3
            assert_allclose(other.loss, one.loss, rtol=1e-5)


def test_who_is_beside_a_client_changes_nothing():
    model, jobs = _cohort(SAMPLED)
    model.module.train()
    learner = OneStep(model, Sequential(model))
    together = learner.train(jobs, round_id=0)[2].update
    alone = learner.train([jobs[2]], round_id=0)[0].update
    assert_allclose(alone.dense, together.dense, rtol=1e-4, atol=1e-7)


def test_it_is_chosen_where_it_is_right_and_nowhere_else():
    model, jobs = _cohort(SAMPLED)
    assert isinstance(best(model, sample=jobs, compile=False), OneStep)
    whole = replace(model, training=replace(TRAINING, batch=0))
    assert isinstance(best(whole, sample=jobs, compile=False), OneStep)
    for training in (replace(TRAINING, epochs=2), replace(TRAINING, clip=1.0)):
        changed = replace(model, training=training)
        assert not isinstance(best(changed, sample=jobs, compile=False), OneStep)

    class Other(LagModel):
        """Somebody's own."""

    other, jobs = _cohort(SAMPLED, module=Other(M, length=7, width=19))
    assert not isinstance(best(other, sample=jobs, compile=False), OneStep)


def test_a_step_that_differs_is_found_and_not_used(monkeypatch):
    model, jobs = _cohort(SAMPLED)
    right = lags.lag_sums

    def wrong(rows: torch.Tensor, *rest: torch.Tensor) -> None:
        right(rows * 1.001, *rest)

    monkeypatch.setattr(lags, "lag_sums", wrong)
    assert not isinstance(best(model, sample=jobs, compile=False), OneStep)


def test_more_examples_than_a_batch_are_trained_by_the_other_learner():
    model, jobs = _cohort(SAMPLED, replace(TRAINING, batch=5))
    model.module.eval()
    expected = Sequential(model).train(jobs, round_id=0)
    found = best(model, sample=jobs, compile=False).train(jobs, round_id=0)
    assert [each.examples for each in found] == [each.examples for each in expected]


def test_sums_over_histories_are_the_same_in_c():
    if lags._library() is None:
        pytest.skip("built without a C compiler")
    generator = torch.Generator().manual_seed(0)
    for width in (1, 16, 19, 64):
        rows, weights = (torch.randn(k, width, generator=generator) for k in (11, 5))
        history = torch.randint(-1, 11, (4, 3), generator=generator)  # shorter than the lags
        up = torch.randn(4, width, generator=generator)
        found, expected = [], []
        for kind, out in ((torch.float32, found), (torch.float64, expected)):
            r, w, u = (x.to(kind) for x in (rows, weights, up))
            of_rows, of_lags = torch.ones_like(r), torch.ones_like(w)
            out.append(torch.empty(4, width, dtype=kind))
            lags.lag_sums(r, history, w, out[-1])
            lags.add_lag_gradients(r, history, w, u, of_rows, of_lags)
            out += [of_rows, of_lags]
        for one, other in zip(found, expected, strict=True):
            assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "whole"])
def test_the_softmax_is_the_same_in_c(sampled):
    """More examples than are taken at once, widths and candidates that fill no vector."""
    if lags._library() is None:
        pytest.skip("built without a C compiler")
    generator = torch.Generator().manual_seed(1)
    for rows, width, examples in ((1, 1, 1), (7, 19, 3), (30, 64, 50), (133, 96, 101)):
        target = torch.randint(rows, (examples,), generator=generator)
        values, bias, h, weights = (
            torch.randn(*shape, generator=generator)
            for shape in ((rows, width), (rows, 1), (examples, width), (rows,))
        )
        if sampled:
            weights[torch.rand(rows, generator=generator) < 0.3] = -torch.inf
        found, expected = [], []
        for kind, out in ((torch.float32, found), (torch.float64, expected)):
            step = SimpleNamespace(
                rows=values.to(kind),
                bias=bias.to(kind),
                weights=weights.to(kind),
                of_rows=torch.ones(rows, width, dtype=kind),
                of_bias=torch.ones(rows, 1, dtype=kind),
                target=target,
                losses=torch.empty(examples, dtype=kind),
                sampled=sampled,
            )
            up = torch.full((examples, width), torch.nan, dtype=kind)
            lags.softmax(step, h.to(kind), up)
            out += [step.losses, up, step.of_rows, step.of_bias]
        for one, other in zip(found, expected, strict=True):
            assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("native", [True, False])
def test_a_client_without_finite_numbers_takes_nobody_with_it(native, monkeypatch):
    if not native:
        monkeypatch.setattr(lags, "_library", lambda: None)
    elif lags._library() is None:
        pytest.skip("built without a C compiler")
    model, jobs = _cohort(SAMPLED)
    model.module.train()
    learner = OneStep(model, Sequential(model))
    expected = learner.train(jobs, round_id=0)
    parts = dict(jobs[0].submodel.tables)
    broken = parts["items"].values.copy()
    broken[0] = np.inf
    parts["items"] = replace(parts["items"], values=broken)
    jobs[0] = replace(jobs[0], submodel=replace(jobs[0].submodel, tables=parts))
    found = learner.train(jobs, round_id=0)
    assert not found[0].finite and found[0].update.weight == 0 and not found[0].update.dense.any()
    for one, other in zip(expected[1:], found[1:], strict=True):
        assert other.finite and np.array_equal(one.update.dense, other.update.dense)


@pytest.mark.parametrize("native", [True, False])
def test_a_step_back_says_whether_it_is_finite(native, monkeypatch):
    if not native:
        monkeypatch.setattr(lags, "_library", lambda: None)
    elif lags._library() is None:
        pytest.skip("built without a C compiler")
    for flaw in (0.0, np.nan, np.inf, -np.inf, 3e38):  # the last overflows
        values, gradient = torch.ones(37), torch.arange(37.0)
        gradient[35] = flaw
        expected = -2.0 * (gradient + 0.5)
        assert lags.step_back(values, gradient, 0.5, 2.0) == (flaw == 0.0)
        assert_allclose(gradient, expected)
