"""Ratings from gradients: a client's uploads are solved for what it rated, to the last digit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.factors import TRAINING, Rater
from tessera.audit.ratings.gradient import Profile, Upload, bias_before, on_scale, solve
from tessera.learning.rating_models import BIAS_SHARE
from tessera.learning.training.settings import LocalTraining

MEAN = 3.5


def uploads(
    ratings: list[float],
    rounds: int,
    *,
    training: LocalTraining = TRAINING,
    quantum: float = 0.0,
    factors: int = 6,
    seed: int = 0,
) -> tuple[Rater, list[Upload]]:
    """A client in several rounds, while others move its items' rows, too."""
    rng = np.random.default_rng(seed)
    n = len(ratings)
    me = Rater(range(n), np.array(ratings) - MEAN, rng.normal(0, 0.1, factors))
    rows = np.column_stack([rng.normal(0, 0.1, (n, factors)), np.zeros(n)])
    seen = []
    for t in range(rounds):
        deltas = me.train(rows, training, t)
        if quantum:
            deltas = np.floor(deltas / quantum + rng.random(deltas.shape)) * quantum
        seen.append(Upload(t, me.items, rows.copy(), deltas, np.ones(n)))
        rows = rows + deltas + rng.normal(0, 0.05, rows.shape)
    return me, seen


def read(
    seen: list[Upload], training: LocalTraining = TRAINING, unseen: tuple[int, ...] = ()
) -> Profile:
    profile = Profile(training)
    for i, upload in enumerate(seen):
        profile.take(upload, unseen=i in unseen)
    return profile


def test_one_upload_gives_errors_factors_and_ratings_less_the_clients_own_level() -> None:
    me, (seen,) = uploads([1, 5, 3, 4, 2], 1)
    found = solve(seen, TRAINING)
    np.testing.assert_allclose(found.errors, me.errors(seen.rows), atol=1e-12)
    np.testing.assert_allclose(found.factors, me.factors, atol=1e-12)
    np.testing.assert_allclose(found.ratings, me.values - me.bias, atol=1e-12)


@given(
    st.lists(st.integers(1, 5).map(float), min_size=1, max_size=20),
    st.integers(1, 3),
    st.sampled_from([1.0, 0.97]),
    st.integers(0, 99),
)
def test_two_uploads_give_everything(
    ratings: list[float], epochs: int, decay: float, seed: int
) -> None:
    training = replace(TRAINING, epochs=epochs, decay=decay)
    me, seen = uploads(ratings, 2, training=training, seed=seed)
    profile = read(seen, training)
    assert profile.levelled
    np.testing.assert_allclose(profile.ratings()[1], me.values, atol=1e-6)


@pytest.mark.parametrize("rounds", [2, 6])
def test_rounding_does_not_get_in_the_way(rounds: int) -> None:
    rng = np.random.default_rng(4)
    ratings = rng.integers(1, 6, 40).astype(float).tolist()
    _, seen = uploads(ratings, rounds, quantum=0.5 / 2**14)
    _, found = read(seen).ratings()
    assert np.abs(found + MEAN - ratings).max() < 0.02
    assert on_scale(found + MEAN, 1.0, 5.0, 1.0).tolist() == ratings


def test_the_clients_bias_follows_from_a_step_down_and_not_up_as_printed() -> None:
    _, (first, second) = uploads([1, 5, 3, 4, 2], 2)
    me, _ = uploads([1, 5, 3, 4, 2], 1)  # as it was after the first
    before, after = solve(first, TRAINING), solve(second, TRAINING)
    change = float(np.mean(before.ratings - after.ratings))
    assert bias_before(change, before, after, second, TRAINING) == pytest.approx(me.bias, abs=1e-9)
    # Equation 7 has a plus where a step goes down: change = g (lambda c - mean of e).
    errors = before.ratings - second.rows[:, :-1] @ before.factors - second.rows[:, -1]
    printed = (change / TRAINING.rate + errors.mean()) / (BIAS_SHARE * TRAINING.weight_decay)
    assert abs(printed - me.bias) > 1.0


def test_a_round_that_was_not_seen_says_nothing_of_the_level() -> None:
    me, seen = uploads([1, 5, 3, 4, 2, 2], 3)
    missed = read([seen[0], seen[2]], unseen=(1,))
    assert not missed.levelled
    _, found = missed.ratings()
    off = me.values - found
    np.testing.assert_allclose(off, off[0], atol=1e-9)  # one number, the same for all
    deceived = read([seen[0], seen[2]])  # who takes them for neighbours is wrong
    assert np.abs(deceived.ratings()[1] - me.values).max() > 0.1


def test_after_a_gap_later_rounds_give_the_level_of_all() -> None:
    me, seen = uploads([1, 5, 3, 4, 2, 2], 5)
    profile = read([seen[0], *seen[2:]], unseen=(1,))
    np.testing.assert_allclose(profile.ratings()[1], me.values, atol=1e-9)


def test_without_a_penalty_the_level_is_nowhere() -> None:
    training = replace(TRAINING, weight_decay=0.0)
    _, seen = uploads([1, 5, 3, 4], 4, training=training)
    assert not read(seen, training).levelled


def test_an_item_that_is_told_of_once_is_known_as_well() -> None:
    me, seen = uploads([1, 5, 3, 4, 2, 2], 3)
    first = seen[0]
    seen[0] = Upload(0, first.items[1:], first.rows[1:], first.deltas[1:], first.counts[1:])
    np.testing.assert_allclose(read(seen).ratings()[1], me.values, atol=1e-9)


def test_nothing_that_moves_says_nothing() -> None:
    still = Upload(0, np.arange(2, dtype=np.uint64), np.zeros((2, 4)), np.zeros((2, 4)), np.ones(2))
    profile = read([still, still])
    assert not profile.levelled and not len(profile.ratings()[0])


@given(
    st.lists(st.integers(1, 5).map(float), min_size=3, max_size=30),
    st.floats(-0.45, 0.45),
    st.integers(0, 99),
)
def test_values_with_one_common_shift_find_their_scale(
    ratings: list[float], shift: float, seed: int
) -> None:
    noisy = np.array(ratings) + shift + np.random.default_rng(seed).normal(0, 0.01, len(ratings))
    assert on_scale(noisy, 1.0, 5.0, 1.0).tolist() == ratings


def test_a_shift_of_more_than_a_step_shows_where_it_leaves_the_scale() -> None:
    ratings = np.array([1.0, 2.0, 4.0, 5.0])
    assert on_scale(ratings + 1.2, 1.0, 5.0, 1.0).tolist() == ratings.tolist()
    assert on_scale(ratings / 2 - 0.55, 0.5, 2.5, 0.5).tolist() == (ratings / 2).tolist()
