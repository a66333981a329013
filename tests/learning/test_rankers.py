"""Full ranking: against a count by hand, with ties against the target."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tessera.data.sequences import SEEN, Sequences, sequence_data
from tessera.errors import ConfigError
from tessera.learning.rankers import (
    EASE,
    POPULARITY,
    SUCCESSOR,
    WINDOWED,
    Followers,
    predictors,
    ranks,
    sampled,
)

USERS, ITEMS = 30, 25


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    own = [rng.permutation(ITEMS)[: rng.integers(4, 12)] for _ in range(USERS)]
    user = np.repeat(np.arange(USERS), [len(each) for each in own])
    events = Sequences.sorted(user, np.concatenate(own), None, users=USERS, items=ITEMS)
    return sequence_data("random", events, items=ITEMS, length=6)


def counted(scores, target, seen):
    """By hand: how many items that are not seen are as good as the target."""
    left = [i for i in range(ITEMS) if i not in seen and i != target]
    return sum(scores[i] >= scores[target] for i in left)


def test_ranks_are_counts_of_what_is_as_good_and_new(data):
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 4, (USERS, ITEMS)).astype(float)  # many ties
    found = ranks(lambda some: scores[some["user"]], data.test)
    for row, (user, target) in enumerate(zip(data.test["user"], data.test["item"], strict=True)):
        assert found[row] == counted(scores[user], target, set(data.test[SEEN][row].tolist()))


def test_a_score_that_knows_is_first_and_one_that_is_no_number_is_last(data):
    right = np.zeros((USERS, ITEMS))
    right[data.test["user"], data.test["item"]] = 1.0
    assert not ranks(lambda some: right[some["user"]], data.test).any()
    broken = ranks(lambda some: np.full((len(some), ITEMS), np.nan), data.test)
    seen = (data.test[SEEN] >= 0).sum(axis=1)
    assert (broken == ITEMS - 1 - seen).all()


def test_followers_are_counted_within_users_and_within_the_window():
    events = Sequences(np.array([0, 1, 2, 0, 2]), np.array([0, 3, 5]))
    assert Followers.of(events, 3, window=1).after(np.array([[0]])).tolist() == [[0, 1, 1]]
    assert Followers.of(events, 3, window=2).after(np.array([[0]])).tolist() == [[0, 1, 2]]
    assert Followers.of(events, 3, window=2).after(np.array([[0, 1]])).tolist() == [[0, 1, 3]]


def test_predictors_need_no_model(data):
    made = predictors(data.events, ITEMS)
    assert list(made) == [POPULARITY, SUCCESSOR, WINDOWED, EASE]
    times = np.bincount(data.events.item, minlength=ITEMS)
    popular = made[POPULARITY]()(data.test)
    assert (popular == times).all()
    last = data.test["history"][:, 0]
    scores = made[SUCCESSOR]()(data.test)
    for row in range(len(data.test)):
        after = np.zeros(ITEMS)
        for user in range(USERS):
            own = data.events.of(user).tolist()
            for first, second in pairwise(own):
                after[second] += first == last[row]
        assert np.floor(scores[row]).tolist() == after.tolist()
    for name in (WINDOWED, EASE):
        found = made[name]()(data.test)
        assert found.shape == (len(data.test), ITEMS) and np.isfinite(found).all()


def test_sampled_items_are_new_to_the_user_and_follow_from_a_public_seed(data):
    among = sampled(data.test, ITEMS, number=10)
    for row, target in enumerate(data.test["item"]):
        drawn = set(among[row].tolist())
        assert len(drawn) == 10 and target not in drawn
        assert not drawn & set(data.test[SEEN][row].tolist())
    half = data.test.take(slice(None, None, 2))
    assert np.array_equal(sampled(half, ITEMS, number=10), among[::2])
    assert not np.array_equal(sampled(data.test, ITEMS, number=10, seed=1), among)
    scores = np.random.default_rng(1).integers(0, 4, (USERS, ITEMS)).astype(float)
    found = ranks(lambda some: scores[some["user"]], data.test, among=among)
    for row, (user, target) in enumerate(zip(data.test["user"], data.test["item"], strict=True)):
        assert found[row] == (scores[user][among[row]] >= scores[user][target]).sum()
    with pytest.raises(ConfigError, match="of which 24 are drawn"):
        sampled(data.test, ITEMS, number=24)
