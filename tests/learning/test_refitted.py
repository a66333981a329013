"""Masks fitted again each round: against plain least squares, client by client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.bound_model import Local, Table
from tessera.learning.models.refitted import Refitted, Refitter
from tessera.learning.module_tables import Tables
from tessera.learning.rating_models import BIAS_SHARE, INTERCEPT
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import HomeFitting, Job
from tessera.learning.training.settings import LocalTraining

ITEMS, USERS, COLUMNS, PENALTY = 12, 4, 3, 2.0
TRAINING = LocalTraining(batch=0, rate=0.5, decay=0.9, weight_decay=0.1, table_rate=0.2)
ATTRIBUTES = np.random.default_rng(5).normal(size=(ITEMS, COLUMNS)).astype(np.float32)


def module(factors: int) -> Refitted:
    model = Refitted(ITEMS, USERS, columns=COLUMNS, factors=factors, spread=0.5, seed=4)
    with torch.no_grad():
        model.items.weight[:, -1].normal_(generator=torch.Generator().manual_seed(1))
    return model


def refitter(factors: int, training: LocalTraining = TRAINING) -> Refitter:
    tables = Tables({"items.weight": Table("item"), "users.weight": Local("user")})
    return Refitter(tables.bind(module(factors)), training, penalty=PENALTY)


def job(user: int, items: list[int], factors: int, trained: list[int] | None = None) -> Job:
    model, rng = module(factors), np.random.default_rng(user)
    own = np.array(sorted(set(items if trained is None else trained)), np.uint64)
    values = model.items.weight.detach().numpy()[own.astype(int)]
    own_ids = np.array([user] if items else [], np.uint64)
    examples = Examples(
        {
            "user": np.full(len(items), user),
            "item": np.array(items, np.int64),
            "label": rng.integers(1, 6, len(items)).astype(np.float32),
            "base": np.full(len(items), 3.0, np.float32),
            "features": ATTRIBUTES[np.array(items, np.int64)].reshape(-1, COLUMNS),
        }
    )
    local = model.users.weight.detach().numpy()[own_ids.astype(int)]
    return Job(
        user,
        Submodel(np.zeros(0, np.float32), {"items": TablePart(own, values)}, {"items": own}),
        examples,
        {"users": TablePart(own_ids, local)},
        coins=Secret(int(user).to_bytes(32, "big")),
    )


def by_least_squares(one: Job, factors: int, round_id: int):
    """The same client by stacking penalties under its ratings, and the errors it is left with."""
    items = one.examples["item"]
    rows = module(factors).items.weight.detach().numpy()[items].astype(np.float64)
    design = np.hstack([rows[:, :-1], one.examples["features"], np.ones((len(items), 1))])
    left = one.examples["label"] - one.examples["base"] - rows[:, -1]
    penalties = [TRAINING.weight_decay * len(items)] * factors + [PENALTY] * COLUMNS + [INTERCEPT]
    stacked = np.vstack([design, np.diag(np.sqrt(penalties))])
    own = np.linalg.lstsq(stacked, np.append(left, np.zeros(len(penalties))), rcond=None)[0]
    errors = left - design @ own
    rate = TRAINING.rate * TRAINING.decay**round_id * TRAINING.table_rate
    decay = np.full(factors + 1, TRAINING.weight_decay)
    decay[-1] *= BIAS_SHARE
    partner = np.append(own[:factors], 1.0)
    return own, rate * (errors[:, None] * partner - decay * rows)


@pytest.mark.parametrize("factors", [0, 2])
def test_own_rows_are_least_squares_and_items_step_along_their_errors(factors):
    rated = {0: [1, 4, 7], 1: [4], 2: [0, 1, 2, 3, 4, 5, 11]}
    jobs = [job(user, items, factors) for user, items in rated.items()]
    learner = refitter(factors)
    assert isinstance(learner, HomeFitting)
    homes = learner.fitted(jobs)
    for one, found, home in zip(jobs, learner.train(jobs, round_id=2), homes, strict=True):
        own, deltas = by_least_squares(one, factors, 2)
        assert_allclose(found.local["users"].values[0], own, rtol=1e-4, atol=1e-5)
        assert_array_equal(home["users"].values, found.local["users"].values)
        assert_allclose(found.update.tables["items"].values, deltas, rtol=1e-3, atol=1e-5)
        assert found.update.weight == len(one.examples["item"]) == found.examples


def test_the_module_predicts_what_the_own_row_was_fitted_to():
    one, model = job(2, [0, 3, 5, 8, 9], 2), module(2)
    ((own),) = refitter(2).fitted([one])
    with torch.no_grad():
        model.users.weight[2] = torch.from_numpy(own["users"].values[0])
        batch = {name: torch.from_numpy(column) for name, column in one.examples.fields.items()}
        error = one.examples["label"] - model(batch).numpy()
    fitted, _ = by_least_squares(one, 2, 0)
    rows = model.items.weight.detach().numpy()[one.examples["item"]]
    design = np.hstack([rows[:, :-1], one.examples["features"], np.ones((5, 1))])
    assert_allclose(error, one.examples["label"] - 3.0 - rows[:, -1] - design @ fitted, atol=1e-4)


def test_a_client_is_the_same_in_any_company_and_on_its_own_rows_only():
    alone = refitter(0).train([job(2, [3, 5, 6], 0)], round_id=1)[0]
    company = [job(0, [], 0), job(2, [3, 5, 6], 0), job(1, [3, 5], 0)]
    among = refitter(0).train(company, round_id=1)
    assert_array_equal(among[1].update.tables["items"].values, alone.update.tables["items"].values)
    assert among[0].examples == among[0].update.weight == 0
    cut = refitter(0).train([job(2, [3, 5, 6, 7], 0, trained=[3, 5, 6])], round_id=1)[0]
    assert cut.examples == 3


def test_a_rating_that_is_no_number_costs_its_client_alone():
    bad = job(1, [2, 4], 0)
    bad.examples["label"][0] = np.nan
    found = refitter(0).train([bad, job(2, [2, 3], 0)], round_id=0)
    assert not found[0].finite and not found[0].update.tables["items"].values.any()
    assert_array_equal(found[0].local["users"].values, bad.local["users"].values)
    assert found[1].finite


def test_what_cannot_be_fitted_again_is_refused():
    for wrong in (LocalTraining(batch=8), LocalTraining(batch=0, epochs=2)):
        with pytest.raises(ConfigError, match="fitted again"):
            refitter(0, wrong)
    two = job(0, [1], 0)
    people = TablePart(np.array([0, 1], np.uint64), np.zeros((2, COLUMNS + 1), np.float32))
    with pytest.raises(MisuseError, match="several people"):
        shop = Job(0, two.submodel, two.examples, {"users": people}, coins=Secret(bytes(32)))
        refitter(0).train([shop], round_id=0)
    with pytest.raises(ConfigError, match="-1 factors"):
        Refitted(3, 3, columns=2, factors=-1)
