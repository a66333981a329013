"""Correlated noise: sensitivity by brute force, error of running sums, and the search for both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from tessera.crypto.correlated import FRACTION, BandedInverse
from tessera.errors import ConfigError
from tessera.privacy.dp.correlation import (
    TERMS,
    Correlation,
    banded_sensitivity,
    check_inverse,
    coefficients,
    inverse_of,
    optimised,
    pattern_length,
)
from tessera.privacy.dp.participation import Participation

Values = npt.NDArray[np.float64]
ROOT = np.array([1.0, 1 / 2, 3 / 8, 5 / 16])
"""The first coefficients of (1 - x)^(-1/2)."""


def bound(rounds: int, most: int, separation: int) -> Participation:
    return Participation(rounds=rounds, most=most, separation=separation)


def units(*terms: float) -> BandedInverse:
    return BandedInverse(tuple(round(r * 2**FRACTION) for r in terms))


def toeplitz(c: Values, rounds: int) -> Values:
    found = np.zeros((rounds, rounds))
    for at, value in enumerate(c[:rounds]):
        found += value * np.eye(rounds, k=-at)
    return found


def patterns(limits: Participation) -> Iterator[tuple[int, ...]]:
    """All sets of rounds that the bound allows."""
    for size in range(1, limits.most + 1):
        for chosen in combinations(range(limits.rounds), size):
            gaps = [b - a for a, b in pairwise(chosen)]
            if all(gap >= limits.separation for gap in gaps):
                yield chosen


def brute_force(c: Values, limits: Participation) -> float:
    """The longest C d over all allowed patterns and all signs."""
    matrix = toeplitz(c, limits.rounds)
    longest = 0.0
    for chosen in patterns(limits):
        for signs in product((1.0, -1.0), repeat=len(chosen)):
            longest = max(longest, float(np.linalg.norm(matrix[:, chosen] @ np.array(signs))))
    return longest


@pytest.mark.parametrize(
    ("limits", "width", "known"),
    [
        (bound(8, 2, 3), 3, 1.6677),
        (bound(10, 3, 4), 4, 2.0559),
        (bound(10, 3, 3), 4, 2.3906),  # a coefficient too many: columns of one client meet
    ],
)
def test_sensitivity_of_a_banded_matrix_is_that_of_brute_force(
    limits: Participation, width: int, known: float
) -> None:
    """jax-privacy 2.0.0 (toeplitz.minsep_sensitivity_squared): 1.66771, 2.05586, 2.39057."""
    c = np.zeros(limits.rounds)
    c[:width] = ROOT[:width]
    assert brute_force(c, limits) == pytest.approx(known, abs=5e-5)
    assert pattern_length(c, limits) == pytest.approx(known, abs=5e-5)
    if width <= limits.separation:
        assert banded_sensitivity(ROOT[:width], limits) == pytest.approx(known, abs=5e-5)
    else:
        short = math.sqrt(limits.most) * float(np.linalg.norm(ROOT[:width]))
        assert short == pytest.approx(2.1130, abs=5e-5)
        with pytest.raises(ConfigError, match="rounds apart"):
            banded_sensitivity(ROOT[:width], limits)


def test_sensitivity_of_a_banded_inverse_is_that_of_brute_force() -> None:
    """jax-privacy 2.0.0: 2.32004, by inverse_coef and minsep_sensitivity_squared."""
    limits = bound(10, 3, 4)
    found = Correlation(units(-1 / 2, -1 / 8), limits)
    assert found.sensitivity == pytest.approx(2.3200, abs=5e-5)
    assert brute_force(found.coefficients, limits) == pytest.approx(found.sensitivity, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_no_pattern_moves_a_training_further(
    shares: list[float], rounds: int, most: int, separation: int
) -> None:
    limits = bound(rounds, most, separation)
    found = Correlation(inverse_of(np.array(shares)), limits)  # which checks the inverse
    c = found.coefficients
    assert (c >= 0.0).all() and (np.diff(c) <= 1e-12).all()
    # A whole training stays within the longest, and the longest is reached.
    assert brute_force(c, limits) <= found.sensitivity
    assert brute_force(c, limits) == pytest.approx(found.sensitivity, rel=1e-9)


def test_coefficients_are_those_of_the_inverse_matrix() -> None:
    inverse = units(-0.5, -0.2, -0.1)
    terms = np.array([1.0, *(r / 2**FRACTION for r in inverse.terms)])
    for rounds in (1, 2, 127, 128, 129, 400):
        column = np.linalg.inv(toeplitz(terms, rounds))[:, 0]
        np.testing.assert_allclose(coefficients(inverse, rounds), column, atol=1e-13)


def test_noise_of_rounds_is_read_off_the_matrix() -> None:
    """Rows of C^-1 are one round's noise, rows of its running sums the model's."""
    inverse, rounds = units(-0.55, -0.2, -0.1), 30
    terms = np.array([1.0, *(r / 2**FRACTION for r in inverse.terms)])
    matrix = toeplitz(terms, rounds)
    sums = np.cumsum(matrix, axis=0)
    found = Correlation(inverse, bound(rounds, 1, rounds))
    assert found.one_round == pytest.approx(np.linalg.norm(matrix[-1]))
    assert found.all_rounds == pytest.approx(np.linalg.norm(sums[-1]))
    assert found.running_error == pytest.approx(math.sqrt((sums**2).sum() / rounds))
    assert found.operator_norm >= np.linalg.norm(np.linalg.inv(matrix), 2)


@pytest.mark.parametrize(
    "terms",
    [
        (0.5,),  # C alternates
        (-1.5,),  # C rises
        (-0.5, 0.1),
        (-0.5, -0.26),  # c_2 = 0.51 > c_1
        (-(2**23 + 1) / 2**24, -(2**22) / 2**24),  # by 2^-48
    ],
)
def test_coefficients_that_rise_or_are_negative_are_refused(terms: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="rise or are negative"):
        check_inverse(units(*terms))


def test_the_last_coefficient_that_does_not_rise_is_allowed() -> None:
    check_inverse(units(-0.5, -0.25))  # c_1 = c_2, exactly


CASES = (bound(60, 1, 60), bound(60, 3, 20), bound(200, 10, 20), bound(1000, 20, 50))
BANDED = (2.158819, 3.906077, 9.981529, 19.234373)
"""Errors of the optimal banded C of w = b coefficients by jax-privacy 2.0.0, in double precision:
root of mean(toeplitz.per_query_error) times toeplitz.minsep_sensitivity_squared, of what
toeplitz.optimize_banded_toeplitz(T, b, max_optimizer_steps=2000) gives."""


@pytest.mark.parametrize(
    ("terms", "most"), [(3, (1.08, 1.06, 1.08, 1.15)), (4, (1.05, 1.05, 1.07, 1.11))]
)
def test_errors_are_near_those_of_the_optimal_banded_matrix(
    terms: int, most: tuple[float, ...]
) -> None:
    for limits, best, ratio in zip(CASES, BANDED, most, strict=True):
        found = Correlation(optimised(limits, terms), limits)
        assert 1.0 < found.error / best <= ratio


def test_errors_are_those_that_were_known() -> None:
    """Independent noise, and a banded inverse of three terms."""
    for limits, alone, mixed in ((CASES[0], 5.52, 2.30), (CASES[2], 31.7, 10.7)):
        assert Correlation(BandedInverse(), limits).error == pytest.approx(alone, rel=2e-3)
        assert Correlation(optimised(limits, 3), limits).error == pytest.approx(mixed, rel=2e-3)


def banded_error(c: Values, limits: Participation) -> float:
    """Of a banded C, from its matrix alone."""
    matrix = toeplitz(c, limits.rounds)
    sums = np.tril(np.ones((limits.rounds, limits.rounds))) @ np.linalg.inv(matrix)
    return math.sqrt((sums**2).mean(axis=0).sum()) * banded_sensitivity(c, limits)


def test_the_optimal_banded_matrix_has_the_error_that_is_compared_with() -> None:
    """A second opinion on `BANDED`, by another optimiser."""
    limits = bound(20, 2, 10)
    known = 2.620419  # as `BANDED`
    start = np.cumprod(np.array([1.0, *((2 * k - 1) / (2 * k) for k in range(1, 10))]))[1:]
    found = minimize(lambda tail: banded_error(np.r_[1.0, tail], limits), start)
    assert found.fun == pytest.approx(known, rel=1e-4)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("limits", [CASES[0], CASES[1], bound(9, 1, 9), bound(500, 1, 500)])
def test_no_other_search_finds_less_error(limits: Participation, terms: int) -> None:
    def error(r: Values) -> float:
        inverse = units(*r)
        try:
            return Correlation(inverse, limits).error
        except ConfigError:
            return math.inf

    ours = Correlation(optimised(limits, terms), limits).error
    for start in ((-0.5, -0.12, -0.06), (-0.3, -0.2, -0.1), (-0.7, -0.1, -0.02)):
        other = minimize(error, start[: terms - 1], method="Nelder-Mead", options={"xatol": 1e-6})
        assert ours <= other.fun * (1.0 + 1e-4)


def test_nothing_is_gained_where_a_client_is_in_every_round() -> None:
    limits = bound(40, 40, 1)
    assert Correlation(optimised(limits, 3), limits).error == pytest.approx(
        Correlation(BandedInverse(), limits).error, rel=1e-6
    )


def test_independent_noise_is_for_as_many_releases_as_a_client_is_in() -> None:
    for rounds, most, separation, times in ((60, 1, 60, 1), (60, 3, 20, 3), (60, 9, 20, 3)):
        found = Correlation(BandedInverse(), bound(rounds, most, separation))
        assert found.sensitivity == pytest.approx(math.sqrt(times), rel=1e-9)


def test_ten_thousand_rounds_are_optimised() -> None:
    limits = bound(10_000, 100, 100)
    found = Correlation(optimised(limits, 4), limits)
    assert found.error == pytest.approx(93.184, rel=1e-3)
    assert Correlation(BandedInverse(), limits).error == pytest.approx(707.14, rel=1e-4)


@pytest.mark.parametrize("limits", [bound(0, 1, 1), bound(9, 0, 1), bound(9, 1, 0)])
def test_a_bound_that_is_none_is_refused(limits: Participation) -> None:
    with pytest.raises(ConfigError, match="a client is in"):
        Correlation(BandedInverse(), limits)


def test_other_numbers_of_terms_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 terms"):
        optimised(CASES[0], 2)
