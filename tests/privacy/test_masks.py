"""The indicator of private masks, and the bound of Theorem 1 against its own proof."""

from __future__ import annotations

from decimal import Decimal, getcontext
from math import inf, isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ConfigError, MisuseError
from tessera.privacy.masks import (
    ASSUMPTIONS,
    MEANING,
    epsilon_of,
    hypotheses_of,
    indicator,
    samples_as_printed,
    samples_needed,
)

epsilons = st.floats(0.01, 0.99)
deltas = st.floats(1e-9, 0.99)
classes = st.integers(1, 10**6) | st.builds(hypotheses_of, st.integers(1, 600), st.integers(1, 64))


def failure(n: int, epsilon: float, delta: float, hypotheses: int) -> Decimal:
    """By how much the proof misses delta: 2 |F| exp(-2 n e^2) - delta at e = epsilon / 2."""
    getcontext().prec = 60
    half = Decimal(epsilon) / 2
    return 2 * Decimal(hypotheses) * (-2 * n * half * half).exp() - Decimal(delta)


@given(epsilons, deltas, classes)
def test_the_bound_is_the_fewest_ratings_for_which_the_proof_goes_through(
    epsilon: float, delta: float, hypotheses: int
) -> None:
    n = samples_needed(epsilon, delta, hypotheses)
    assert failure(n, epsilon, delta, hypotheses) <= Decimal(delta) * Decimal("1e-9")
    assert failure(n - 1, epsilon, delta, hypotheses) > -Decimal(delta) * Decimal("1e-9")


@given(epsilons, deltas, classes)
def test_the_printed_equation_does_not_let_the_proof_through(
    epsilon: float, delta: float, hypotheses: int
) -> None:
    n = samples_as_printed(epsilon, delta, hypotheses)
    assert 2 * n - samples_needed(epsilon, delta, hypotheses) in (0, 1)
    if n > 3 / epsilon**2:  # so that rounding up to a whole rating does not decide
        assert failure(n, epsilon, delta, hypotheses) > 0


@given(st.integers(1, 10**9), deltas, classes)
def test_epsilon_and_ratings_are_each_others_inverse(n: int, delta: float, hypotheses: int) -> None:
    epsilon = epsilon_of(n, delta, hypotheses)
    assert samples_needed(epsilon * (1 + 1e-9), delta, hypotheses) <= n
    assert samples_needed(epsilon * (1 - 1e-6), delta, hypotheses) >= n


def test_a_known_answer() -> None:
    # ln(2 * 1000 / 0.05) = ln 40000 = 10.5966; 2 * 10.5966 / 0.01 = 2119.3
    assert samples_needed(0.1, 0.05, 1000) == 2120
    assert epsilon_of(2120, 0.05, 1000) == pytest.approx(0.1, abs=1e-4)


def test_the_best_of_a_class_is_found_as_often_as_the_bound_says() -> None:
    """Ratings 0 or 1, masks the constants 0, 1/7 .. 1: the minimiser against the best there is."""
    rng = np.random.default_rng(0)
    masks = np.linspace(0.0, 1.0, 8)
    epsilon, delta = 0.2, 0.1
    n = samples_needed(epsilon, delta, len(masks))
    for p in (0.1, 0.3, 0.5, 0.93):
        true = p * (1 - masks) ** 2 + (1 - p) * masks**2
        ones = rng.binomial(n, p, size=2000)[:, None] / n
        seen = ones * (1 - masks) ** 2 + (1 - ones) * masks**2
        excess = true[seen.argmin(1)] - true.min()
        assert (excess > epsilon).mean() <= delta


def test_no_rating_promises_nothing() -> None:
    assert epsilon_of(0, 0.05, 2) == inf


def test_a_class_too_large_for_a_float_still_has_a_bound() -> None:
    assert samples_needed(0.5, 0.05, hypotheses_of(1000, 64)) > 64_000 * 5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: samples_needed(0.0, 0.05, 2), "epsilon"),
        (lambda: samples_needed(float("nan"), 0.05, 2), "epsilon"),
        (lambda: samples_needed(0.1, 0.0, 2), "delta"),
        (lambda: samples_needed(0.1, 1.0, 2), "delta"),
        (lambda: epsilon_of(10, 0.05, 0), "class"),
        (lambda: epsilon_of(-1, 0.05, 2), "ratings"),
        (lambda: hypotheses_of(0, 32), "parameters"),
        (lambda: hypotheses_of(10**7, 32), "parameters"),
        (lambda: indicator(np.zeros(1), np.zeros(1), 5.0, 5.0), "scale"),
    ],
)
def test_what_cannot_be_is_refused_by_name(call, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=said):
        call()


def test_the_indicator_is_the_mean_square_on_a_scale_of_one() -> None:
    ratings = np.array([1, 5, 3], np.float32)
    masks = np.array([3, 5, 4], np.float32)
    assert indicator(ratings, masks, 1.0, 5.0) == pytest.approx((0.25 + 0.0 + 0.0625) / 3)
    assert indicator(ratings, ratings, 1.0, 5.0) == 0.0
    assert isnan(indicator(ratings[:0], masks[:0], 1.0, 5.0))


def test_the_indicator_wants_a_mask_for_every_rating() -> None:
    with pytest.raises(MisuseError, match="shape"):
        indicator(np.zeros(3), np.zeros(2), 1.0, 5.0)


def test_the_assumptions_stand_beside_the_figures() -> None:
    assert [one.name for one in ASSUMPTIONS] == [
        "finite class",
        "i.i.d. ratings",
        "loss in [0, 1]",
        "exact minimiser",
    ]
    assert "says nothing on what the masked ratings" in MEANING
