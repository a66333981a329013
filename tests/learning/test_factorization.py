"""The factorised round against autograd, client by client, and what does not add up in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.func import functional_call, grad

from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.bound_model import Local, Table
from tessera.learning.models.factorization import Factorization, Factorizer, rating_loss
from tessera.learning.module_tables import Tables
from tessera.learning.rating_models import BIAS_SHARE
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job
from tessera.learning.training.settings import LocalTraining

ITEMS, USERS, FACTORS = 12, 4, 3
TRAINING = LocalTraining(batch=0, rate=0.5, decay=0.9, weight_decay=0.1, table_rate=0.2)


def module() -> Factorization:
    """As it is after some rounds: users begin alike, and do not stay so."""
    model = Factorization(ITEMS, USERS, factors=FACTORS, spread=0.5, seed=4)
    with torch.no_grad():
        model.users.weight.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(1))
    return model


BOUND = Tables({"items.weight": Table("item"), "users.weight": Local("user")}).bind(module())


def ratings(user: int, items: list[int], seed: int = 0) -> Examples:
    rng = np.random.default_rng([seed, user])
    return Examples(
        {
            "user": np.full(len(items), user),
            "item": np.array(items, np.int64),
            "label": rng.integers(1, 6, len(items)).astype(np.float32),
            "base": np.full(len(items), 3.5, np.float32),
        }
    )


def job(user: int, items: list[int], trained: list[int] | None = None, whole: bool = False) -> Job:
    """A client's job, with the rows it rated, some of them, or the whole table."""
    model = module()
    own = np.array(sorted(set(items if trained is None else trained)), np.uint64)
    held = np.arange(ITEMS, dtype=np.uint64) if whole else own
    values = model.items.weight.detach().numpy()[held.astype(int)]
    own_ids = np.array([user] if items else [], np.uint64)
    return Job(
        user,
        Submodel(np.zeros(0, np.float32), {"items": TablePart(held, values)}, {"items": own}),
        ratings(user, items),
        {"users": TablePart(own_ids, model.users.weight.detach().numpy()[own_ids.astype(int)])},
        coins=Secret(int(user).to_bytes(32, "big")),
    )


def by_autograd(user: int, items: list[int], training: LocalTraining, round_id: int):
    """The same client from the module and its loss alone, in double precision."""
    model = module().double()
    start = {name: p.detach() for name, p in model.named_parameters()}
    batch = {
        name: torch.from_numpy(np.asarray(column))
        for name, column in ratings(user, items).fields.items()
    }
    penalty = torch.full((FACTORS + 1,), training.weight_decay, dtype=torch.float64)
    penalty[-1] *= BIAS_SHARE

    def loss(users, table, mean):
        weights = {"items.weight": table, "users.weight": users}
        losses = rating_loss(functional_call(model, weights, (batch,)), batch)
        return losses.mean() if mean else losses.sum()

    users, table = start["users.weight"].clone(), start["items.weight"]
    rate = training.rate * training.decay**round_id
    for _ in range(training.epochs):
        up = grad(loss)(users, table, True)[user] + penalty * users[user]
        users[user] -= rate * up
    ups = grad(loss, argnums=1)(users, table, False)
    deltas = {i: -rate * training.table_rate * (ups[i] + penalty * table[i]).numpy() for i in items}
    return users[user].numpy(), deltas


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("round_id", [0, 5])
def test_every_client_takes_its_own_step_then_says_where_its_rows_go(epochs, round_id):
    training = LocalTraining(
        batch=0, rate=0.5, decay=0.9, weight_decay=0.1, table_rate=0.2, epochs=epochs
    )
    rated = {0: [1, 4, 7], 1: [4], 2: [0, 1, 2, 3, 4, 5, 11], 3: [7, 11]}
    jobs = [job(user, items, whole=user == 2) for user, items in rated.items()]
    outcomes = Factorizer(BOUND, training).train(jobs, round_id=round_id)
    for (user, items), found in zip(rated.items(), outcomes, strict=True):
        own, deltas = by_autograd(user, items, training, round_id)
        assert found.finite and found.examples == found.update.weight == len(items)
        assert_allclose(found.local["users"].values[0], own, rtol=2e-5, atol=2e-6)
        update = found.update.tables["items"]
        assert_array_equal(update.counts, np.ones(len(items)))
        assert_allclose(update.values, [deltas[i] for i in sorted(items)], rtol=2e-5, atol=2e-6)


def test_a_client_is_the_same_in_any_company():
    alone = Factorizer(BOUND, TRAINING).train([job(2, [3, 5, 6])], round_id=1)[0]
    company = [job(0, []), job(2, [3, 5, 6]), job(1, [3, 5]), job(3, [])]
    among = Factorizer(BOUND, TRAINING).train(company, round_id=1)[1]
    assert_array_equal(alone.update.tables["items"].values, among.update.tables["items"].values)
    assert_array_equal(alone.local["users"].values, among.local["users"].values)


def test_who_has_no_ratings_says_nothing_and_stays_as_it_was():
    found = Factorizer(BOUND, TRAINING).train([job(0, [1, 2]), job(1, [])], round_id=0)[1]
    assert found.finite and found.examples == 0 and found.update.weight == 0
    assert found.update.tables["items"].values.shape == (0, FACTORS + 1)


def test_ratings_of_rows_that_may_not_be_trained_are_left_out():
    cut = Factorizer(BOUND, TRAINING).train([job(1, [2, 8, 9], trained=[2, 9])], round_id=0)
    assert cut[0].examples == 2
    assert_array_equal(cut[0].update.tables["items"].counts, [1, 1])
    cover = Factorizer(BOUND, TRAINING).train([job(1, [2], trained=[2, 9])], round_id=0)
    assert_array_equal(cover[0].update.tables["items"].counts, [1, 0])
    assert not cover[0].update.tables["items"].values[1].any()


def test_an_item_rated_twice_moves_by_the_mean_and_counts_twice():
    twice = job(1, [5, 5])
    found = Factorizer(BOUND, TRAINING).train([twice], round_id=0)[0]
    own, deltas = by_autograd(1, [5, 5], TRAINING, 0)
    assert_allclose(found.local["users"].values[0], own, rtol=2e-5)
    update = found.update.tables["items"]
    assert_array_equal(update.counts, [2])
    model = module()
    penalty = np.array([0.1] * FACTORS + [0.1 * BIAS_SHARE])
    # autograd adds both ratings, and the penalty once: the mean of two deltas has it once, too
    row = model.items.weight.detach().numpy()[5]
    added = -deltas[5] / (0.5 * 0.2) - penalty * row
    assert_allclose(update.values[0], -0.5 * 0.2 * (added / 2 + penalty * row), rtol=2e-5)


def test_a_rating_that_is_no_number_costs_its_client_alone():
    sick = job(0, [1, 2])
    sick.examples["label"][0] = np.nan
    found = Factorizer(BOUND, TRAINING).train([sick, job(1, [1, 2])], round_id=0)
    assert not found[0].finite and found[0].update.weight == 0
    assert not found[0].update.tables["items"].values.any()
    assert_array_equal(found[0].local["users"].values, sick.local["users"].values)
    assert found[1].finite and np.isfinite(found[1].update.tables["items"].values).all()


def test_a_shop_is_its_people_each_alone_and_the_mean_of_what_they_say_about_an_item():
    rated = {1: [2, 5, 5], 2: [5, 7], 3: [0]}
    alone = {
        user: Factorizer(BOUND, TRAINING).train([job(user, items)], round_id=2)[0]
        for user, items in rated.items()
    }
    model, ids = module(), np.array(sorted({i for own in rated.values() for i in own}), np.uint64)
    people = np.array(sorted(rated), np.uint64)
    parts = [ratings(user, items) for user, items in rated.items()]
    mixed = np.random.default_rng(3).permutation(sum(map(len, parts)))
    shop = Job(
        0,
        Submodel(
            np.zeros(0, np.float32),
            {"items": TablePart(ids, model.items.weight.detach().numpy()[ids.astype(int)])},
            {"items": ids},
        ),
        Examples(
            {
                name: np.concatenate([part[name] for part in parts])[mixed]
                for name in parts[0].fields
            }
        ),
        {"users": TablePart(people, model.users.weight.detach().numpy()[people.astype(int)])},
        coins=Secret(bytes(32)),
    )
    other = job(0, [5, 7])
    found = Factorizer(BOUND, TRAINING).train([other, shop], round_id=2)[1]
    assert found.examples == found.update.weight == 6
    update = found.update.tables["items"]
    for place, user in enumerate(people):
        own = alone[int(user)].local["users"].values[0]
        assert_allclose(found.local["users"].values[place], own, rtol=2e-5, atol=1e-6)
    for place, item in enumerate(ids):
        said = []
        for user, items in rated.items():
            if int(item) in items:
                own = alone[user].update.tables["items"]
                at = sorted(set(items)).index(int(item))
                said += [own.values[at]] * int(own.counts[at])
        assert update.counts[place] == len(said)
        assert_allclose(update.values[place], np.mean(said, axis=0), rtol=2e-5, atol=1e-6)


def test_factors_are_trained_on_whole_sets_of_people_whose_rows_are_at_hand():
    with pytest.raises(ConfigError, match="batch = 8"):
        Factorizer(BOUND, LocalTraining(batch=8))
    two = job(0, [1])
    others = TablePart(np.array([1, 2], np.uint64), np.zeros((2, FACTORS + 1), np.float32))
    with pytest.raises(MisuseError, match="without a row"):
        Factorizer(BOUND, TRAINING).train(
            [Job(0, two.submodel, two.examples, {"users": others}, coins=Secret(bytes(32)))],
            round_id=0,
        )


def test_a_module_begins_without_biases_and_by_its_seed():
    one, other = Factorization(5, 2, factors=4, seed=1), Factorization(5, 2, factors=4, seed=2)
    assert not one.items.weight[:, -1].any() and not one.users.weight.any()
    assert (one.items.weight[:, :-1] != other.items.weight[:, :-1]).all()
    biases = Factorization(5, 2, factors=0)
    assert biases.items.weight.shape == (5, 1) and not biases.items.weight.any()
    with pytest.raises(ConfigError, match="-1 factors"):
        Factorization(5, 2, factors=-1)
