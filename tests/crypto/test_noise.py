"""Discrete Gaussian noise: its table against exact arithmetic, sums, and statistics of draws.

Statistics have fixed streams, and name the probability of failing by chance.
"""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import kernel
from tessera.crypto.kernel.noise import AliasEntries
from tessera.crypto.noise import (
    BASE,
    DEVIATION,
    DISTANCE,
    LARGEST,
    SQUARES,
    STRETCH,
    Gaussian,
    added_delta,
    coefficients,
    discrete_gaussian,
    table,
)
from tessera.crypto.prg import CoinStream, Stream
from tessera.errors import MisuseError

STREAM = Stream(bytes(range(16)), bytes(8))


def test_distance_is_what_is_added_to_delta() -> None:
    assert added_delta(DISTANCE, 2**27, 0.0) == 2.0**-34
    assert added_delta(discrete_gaussian(40.0).distance, 10**9, 10.0) < 1e-21
    assert added_delta(2.0**-62, 1, 1e6) > 1.0  # an epsilon that says nothing overflows nothing


def test_a_sum_of_two_is_a_discrete_gaussian_almost_exactly() -> None:
    """The number of ways to a value hardly depends on it."""
    width = BASE / sqrt(SQUARES)
    ways = [
        sum(np.exp(-((x - shift / 64) ** 2) / (2 * width**2)) for x in range(-40, 41))
        for shift in range(64)
    ]
    assert max(ways) / min(ways) - 1.0 < 1e-14
    assert 2 * np.exp(-2 * np.pi**2 * width**2) < 2.0**-71


@given(st.integers(1, 5000))
def test_squares_of_the_coefficients_add_up(k: int) -> None:
    found = coefficients(k)
    assert found[0] == 1 and sum(c * c for c in found) == k * SQUARES
    before = 1
    for coefficient in found[1:]:
        assert coefficient**2 <= STRETCH**2 * before
        before += coefficient**2


def test_noise_of_no_steps_is_refused_and_nothing_owed_is_zeros() -> None:
    with pytest.raises(MisuseError):
        coefficients(0)
    assert not Gaussian(STREAM).owed(np.zeros(3, np.int64), 4).any()


@pytest.mark.parametrize("name", kernel.available())
def test_all_kernels_draw_the_same(name: str) -> None:
    with kernel.use(name):
        source = Gaussian(STREAM)
        drawn = source.draw(40_001), source.owed(np.arange(300), 5), source.draw(3)
    expected = Gaussian(STREAM)
    again = expected.draw(40_001), expected.owed(np.arange(300), 5), expected.draw(3)
    for one, other in zip(drawn, again, strict=True):
        assert np.array_equal(one, other)


def test_no_word_is_read_twice() -> None:
    source, other = Gaussian(STREAM), Gaussian(STREAM)
    assert not np.array_equal(source.draw(100), source.draw(100))
    assert not np.array_equal(other.draw(100), other.owed(np.full(10, 1), 10).ravel())


def chance_of_moments(drawn: np.ndarray, deviation: float) -> float:
    """The largest of mean, variance and fourth moment in standard errors."""
    z = drawn.astype(np.float64).ravel() / deviation
    n = z.size
    return max(
        abs(z.mean()) * sqrt(n),
        abs((z**2).mean() - 1) * sqrt(n / 2),
        abs((z**4).mean() - 3) * sqrt(n / 96),
    )


@pytest.mark.parametrize("k", [1, 2, 7, 8, 100, 2000])
def test_moments_are_those_of_a_gaussian(k: int) -> None:
    """Beyond 5 standard errors with probability 2e-6 by chance."""
    drawn = Gaussian(STREAM).owed(np.full(50_000, k), 8)
    assert chance_of_moments(drawn, DEVIATION * sqrt(k)) < 5.0


def test_the_distribution_is_that_of_a_gaussian() -> None:
    """Kolmogorov's distance over 10^6 draws; above 2.5 / 1000 with probability 1e-5 by chance."""
    scipy = pytest.importorskip("scipy.stats")
    drawn = np.sort(Gaussian(STREAM).draw(1_000_000)) / DEVIATION
    expected = scipy.norm.cdf(drawn)
    assert np.abs(expected - np.arange(1, drawn.size + 1) / drawn.size).max() < 2.5e-3
    assert np.abs(drawn).max() * DEVIATION <= LARGEST


def test_low_bits_say_nothing() -> None:
    """Residues modulo 2, 3 and the stretch are uniform: chi-squared within 5 standard errors."""
    drawn = Gaussian(STREAM).draw(400_000)
    for modulus in (2, 3, STRETCH):
        counts = np.bincount(drawn % modulus, minlength=modulus)
        expected = drawn.size / modulus
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert chi < modulus - 1 + 5 * sqrt(2 * (modulus - 1)) + 5


def test_coins_fall_at_their_rate() -> None:
    coins = CoinStream(STREAM)
    assert coins.heads(1000, 1.0).all()
    rate = float(coins.heads(1_000_000, 0.03).mean())
    assert abs(rate - 0.03) < 5 * sqrt(0.03 * 0.97 / 1_000_000)
    uniform = coins.uniform(100_000)
    assert 0.0 <= uniform.min() <= uniform.max() < 1.0


def test_the_kernel_refuses_what_does_not_fit() -> None:
    backend, words = kernel.active(), np.zeros(12, np.uint64)
    by = np.array([[1, 2]], np.int32)
    for bad in (
        lambda: backend.alias_sums(words.astype(np.int64), by, 2, table().entries, words.copy),  # type: ignore[arg-type]
        lambda: backend.alias_sums(words, by.astype(np.int64), 2, table().entries, words.copy),  # type: ignore[arg-type]
        lambda: backend.alias_sums(words, by, 5, table().entries, words.copy),
        lambda: backend.alias_sums(words, by, 0, table().entries, words.copy),
        lambda: backend.alias_sums(
            words, np.array([[1 << 30, 1]], np.int32), 2, table().entries, words.copy
        ),
        lambda: backend.alias_sums(
            words, np.ones((2, 2), np.int32), 2, table().entries, words.copy
        ),
        lambda: AliasEntries(np.zeros(3, np.uint64), np.zeros(3, np.uint64), 1),
        lambda: AliasEntries(np.zeros(4, np.uint64), np.zeros(4, np.uint64), 2),
    ):
        with pytest.raises(MisuseError):
            bad()
