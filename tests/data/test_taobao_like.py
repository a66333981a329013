"""The synthetic shop: the papers' numbers, and clicks that can be learned, but not by a mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata

from papers.sfsl_holdings import holders
from tessera.data.taobao_like import PAPERS, taobao_like
from tessera.errors import ConfigError


def auc(scores, labels) -> float:
    ranks, clicks = rankdata(scores), labels.sum()
    area = ranks[labels > 0].sum() - clicks * (clicks + 1) / 2
    return float(area / (clicks * (len(labels) - clicks)))


def means(data, field):
    """The smoothed click rate of each test example's user or item, from the training part."""
    train, size = data.train, data.sizes[field]
    clicks = np.bincount(train[field], weights=train["label"], minlength=size)
    rows = np.bincount(train[field], minlength=size)
    return ((clicks + 5 * train["label"].mean()) / (rows + 5))[data.test[field]]


def pair_means(data, prior):
    """User mean + item mean + what is left of the user's mean in the item's category."""
    user, item = data.train["user"], data.train["item"]
    categories = data.sizes["category"]
    assert data.category_of is not None
    guess = np.full(len(user), data.train["label"].mean())
    test = np.full(len(data.test), data.train["label"].mean())
    pair = user * categories + data.category_of[item]
    test_pair = data.test["user"] * categories + data.category_of[data.test["item"]]
    size = data.sizes["user"] * categories
    for rows, tested, weight in (
        (user, data.test["user"], 10),
        (item, data.test["item"], 12),
        (pair, test_pair, prior),
    ):
        left = np.bincount(rows, weights=data.train["label"] - guess, minlength=size)
        step = left / (np.bincount(rows, minlength=size) + weight)
        guess, test = guess + step[rows], test + step[tested]
    return test


@pytest.fixture(scope="module")
def market():
    return taobao_like(seed=1)


def test_the_best_possible_is_far_above_the_trivial_predictors(market):
    labels = market.test["label"]
    by_user, by_item = means(market, "user"), means(market, "item")
    assert market.facts["oracle AUC"] == pytest.approx(0.80, abs=0.02)
    assert 0.60 < auc(by_user, labels) < 0.68
    assert 0.54 < auc(by_item, labels) < 0.62
    assert 0.64 < auc(by_user + by_item, labels) < 0.70


def test_what_a_person_did_with_a_category_tells_more(market):
    labels = market.test["label"]
    baseline = auc(means(market, "user") + means(market, "item"), labels)
    assert auc(pair_means(market, prior=4), labels) > baseline + 0.04
    # And the history alone shows it: earlier clicks in the same category.
    category_of = market.category_of
    past = np.where(market.test["history"] >= 0, category_of[market.test["history"]], -1)
    same = (past == category_of[market.test["item"]][:, None]).sum(axis=1)
    assert auc(same, labels) > 0.57


def test_it_has_what_was_asked_for(market):
    assert market.clients == 2_000
    assert market.sizes == {"user": 2_000, "item": 20_000, "category": 666}
    assert len(market.train) / 2_000 == pytest.approx(100, rel=0.02)
    assert market.train["history"].shape[1] == 50
    assert np.unique(market.category_of).tolist() == list(range(666))
    counts = np.diff(market.offsets)
    assert counts.std() > 0.3 * counts.mean()  # some have far more than others
    per_good = np.sort(np.bincount(market.train["item"], minlength=20_000))
    assert per_good[-2_000:].sum() > 0.2 * per_good.sum()  # some are far more popular


def test_the_same_seed_gives_the_same_users_and_another_others():
    one, two, other = (taobao_like(60, 900, examples=20, seed=seed) for seed in (5, 5, 6))
    for part in ("train", "test"):
        for name, column in getattr(one, part).fields.items():
            assert (column == getattr(two, part)[name]).all()
    assert one.facts == two.facts
    assert len(one.train) != len(other.train) or (one.train["item"] != other.train["item"]).any()


@given(
    st.integers(1, 30),
    st.integers(1, 300),
    st.integers(1, 30),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.06, 0.2, 0.5]),
    st.data(),
)
@settings(max_examples=40)
def test_any_size_gives_ids_in_range(users, items, examples, history, share, data):
    categories = data.draw(st.integers(1, items))
    made = taobao_like(
        users, items, categories, examples=examples, history=history, test_share=share
    )
    assert made.clients == users
    assert (np.diff(made.offsets) >= 1).all()
    for part in (made.train, made.test):
        assert ((part["item"] >= 0) & (part["item"] < items)).all()
        assert ((part["history"] >= -1) & (part["history"] < items)).all()
        assert np.isin(part["label"], (0, 1)).all()
    assert len(made.category_of) == items
    assert made.category_of.max() < made.sizes["category"] == categories


@pytest.mark.parametrize(
    "bad",
    [
        {"users": 0},
        {"items": 0},
        {"items": 10, "categories": 11},
        {"categories": 0},
        {"examples": 0},
        {"history": 0},
        {"test_share": 1.0},
    ],
)
def test_a_population_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match="taobao-like: "):
        taobao_like(**bad)


@pytest.mark.slow
def test_at_full_size_it_has_the_numbers_of_the_papers():
    data = taobao_like(**PAPERS)
    assert data.clients == 49_023
    assert data.sizes == {"user": 49_023, "item": 143_534, "category": 4_815}
    # Table 2: 323 samples, 301 items and 117 categories per client, 15,854,357 samples in all.
    assert len(data.train) == pytest.approx(15_854_357, rel=0.005)
    items = []
    categories = []
    for client in range(2_000):
        own = data.of(client)
        held = np.union1d(own["item"], own["history"])
        items.append(held[held >= 0].astype(np.uint64))
        categories.append(len(np.unique(data.category_of[own["item"]])))
    assert np.mean([len(one) for one in items]) == pytest.approx(301, rel=0.02)
    assert np.mean(categories) == pytest.approx(117, rel=0.03)
    assert data.facts["items per client"] == pytest.approx(301, abs=3)
    # Section 6: of the union of 100 clients, 86.7 % with one holder and 11.0 % with two.
    cohorts = [holders(items[start : start + 100]) for start in range(0, 2_000, 100)]
    assert 0.86 < np.mean([cohort[1] for cohort in cohorts]) < 0.88
    assert np.mean([cohort[2] for cohort in cohorts]) == pytest.approx(0.11, abs=0.01)
    assert data.facts["oracle AUC"] == pytest.approx(0.81, abs=0.01)
