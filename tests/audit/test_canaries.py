"""Lower bounds from guesses: never above what was kept, and close to it where they can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.audit.canary_training import Guessing, likelihood_ratios, lower_bound, p_value
from tessera.errors import MisuseError
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import GaussianNoise


@given(st.integers(1, 60), st.floats(0.0, 1.0), st.floats(0.0, 8.0), st.floats(0.0, 8.0))
def test_without_a_delta_the_p_value_is_the_binomial_tail_and_falls_in_epsilon(
    guesses: int, share: float, small: float, large: float
) -> None:
    correct = round(share * guesses)
    found = p_value(small, canaries=99, guesses=guesses, correct=correct, delta=0.0)
    rate = 1.0 / (1.0 + math.exp(-small))
    assert found == pytest.approx(stats.binom.sf(correct - 1, guesses, rate), rel=1e-9, abs=1e-12)
    more = small + large
    assert p_value(more, canaries=99, guesses=guesses, correct=correct, delta=0.0) >= found - 1e-12
    looser = p_value(small, canaries=99, guesses=guesses, correct=correct, delta=1e-4)
    assert looser >= found


def test_the_bound_by_hand() -> None:
    """All of 1,000 right: (1 + e^-epsilon)^-1000 = 1 %, so epsilon = -ln(.01^(-1/1000) - 1)."""
    found = lower_bound(canaries=1_000, guesses=1_000, correct=1_000, delta=0.0, level=0.99)
    assert found == pytest.approx(-math.log(0.01 ** (-1 / 1_000) - 1), abs=2e-4)
    assert lower_bound(canaries=9, guesses=8, correct=4, delta=0.0, level=0.99) == 0.0
    with pytest.raises(MisuseError):
        lower_bound(canaries=9, guesses=8, correct=9, delta=0.0, level=0.99)


def test_randomised_response_is_bounded_in_as_many_runs_as_the_level_says() -> None:
    """Guesses that are right with e^2 / (1 + e^2): the bound at 95 % is above 2 in at most 5 % of
    2,000 runs; more than 138 of them has a probability of 1e-4 if 5 % is true."""
    rng, rate = np.random.default_rng(1), 1 / (1 + math.exp(-2))
    hits, times = np.unique(rng.binomial(400, rate, size=2_000), return_counts=True)
    above = sum(
        int(often)
        for hit, often in zip(hits.tolist(), times, strict=True)
        if lower_bound(canaries=400, guesses=400, correct=hit, delta=0.0, level=0.95) > 2.0
    )
    assert stats.binom.sf(138, 2_000, 0.05) < 1e-4
    assert above <= 138


@pytest.mark.parametrize(
    ("mechanism", "steps"),
    [
        (GaussianNoise.poisson(1.0, 0.05), 200),
        (GaussianNoise.records(1.5, 0.02, of=10, cap=2), 200),
        (GaussianNoise(2.0), 4),
    ],
)
def test_the_best_attack_stays_below_the_account_and_above_a_quarter_of_it(
    mechanism: GaussianNoise, steps: int
) -> None:
    """2,000 canaries; the bound is wrong with 1 % at most, by theorem, and has this seed."""
    rng = np.random.default_rng(4)
    present = rng.random(2_000) < 0.5
    multiples, chances = zip(*mechanism.shifts, strict=True)
    moved = rng.choice(multiples, p=chances, size=(steps, 2_000)) * present
    seen = moved + mechanism.noise * rng.standard_normal((steps, 2_000))
    guessing = Guessing(likelihood_ratios(seen, mechanism), present)
    kept = epsilon_of([(mechanism, steps)], adjacency=Adjacency.ADD_OR_REMOVE, delta=1e-6)
    found = guessing.bound(delta=1e-6, level=0.99)
    assert kept / 4 < found < kept


def test_scores_that_know_nothing_refute_nothing() -> None:
    rng = np.random.default_rng(9)
    guessing = Guessing(rng.random(1_000), rng.random(1_000) < 0.5)
    assert guessing.bound(delta=1e-6, level=0.99) == 0.0
    with pytest.raises(MisuseError):
        Guessing(np.zeros(3), np.zeros(4, np.bool_))
