"""Accounts of integer noise: never below the truth, where the truth can be added up.

The oracle is the exact Rényi divergence and the exact hockey-stick divergence of one-dimensional
distributions, summed over the integers in floating point.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ConfigError, MisuseError
from tessera.privacy.dp.accounting import epsilon
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import (
    ORDERS,
    GaussianNoise,
    GaussianShares,
    NoAccount,
    PureLevel,
    SkellamNoise,
    epsilon_of,
)

pytest.importorskip("dp_accounting")

Values = npt.NDArray[np.float64]
DELTA = 1e-5


def gaussian(deviation: float, reach: int) -> Values:
    k = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (k / deviation) ** 2)
    return np.asarray(weights / weights.sum())


def skellam(variance: float, reach: int) -> Values:
    """Both Poisson distributions, convolved."""
    mean = variance / 2.0
    poisson = np.array(
        [math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(2 * reach + 1)]
    )
    both = np.convolve(poisson, poisson[::-1])
    middle = both.size // 2
    return np.asarray(both[middle - reach : middle + reach + 1])


def summed(one: Values, times: int) -> Values:
    total = one
    for _ in range(times - 1):
        total = np.convolve(total, one)
    return total


def renyi(p: Values, shift: int, order: int) -> float:
    """Of the noise against the same noise moved by `shift`."""
    moved, kept = p[shift:], p[: p.size - shift]
    inside = (moved > 1e-290) & (kept > 1e-290)
    logs = order * np.log(moved[inside]) + (1 - order) * np.log(kept[inside])
    top = logs.max()
    return float((top + math.log(np.exp(logs - top).sum())) / (order - 1))


def hockey_stick(p: Values, shift: int, level: float) -> float:
    moved = np.concatenate([np.zeros(shift), p])
    kept = np.concatenate([p, np.zeros(shift)])
    return float(np.maximum(0.0, moved - math.exp(level) * kept).sum())


@pytest.mark.parametrize("variance", [2.0, 9.0, 64.0])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_skellam_noise_is_bounded_at_every_order(variance: float, shift: int) -> None:
    p = skellam(variance, int(30 * math.sqrt(variance) + 40))
    bound = SkellamNoise(variance=variance, moves=shift, steps=shift)
    for order in (2, 3, 5, 10):
        exact = renyi(p, shift, order)
        allowed = float(bound.renyi(np.array([float(order)]))[0])
        assert exact <= allowed
        assert allowed <= exact * (1.0 + 8.0 / variance) + 8.0 * shift / variance**2


@pytest.mark.parametrize("deviation", [0.6, 1.0, 2.5])
@pytest.mark.parametrize("shares", [1, 2, 6])
def test_sums_of_discrete_gaussians_are_bounded_at_every_order(
    deviation: float, shares: int
) -> None:
    p = summed(gaussian(deviation, int(25 * deviation) + 10), shares)
    bound = GaussianShares(deviation=deviation, shares=shares, moves=1.0, words=1)
    for order in (2, 3, 6):
        allowed = float(bound.renyi(np.array([float(order)]))[0])
        assert renyi(p, 1, order) <= allowed * (1.0 + 1e-9)  # equal, where there is no gap


def test_one_discrete_gaussian_needs_no_correction() -> None:
    alone = GaussianShares(deviation=2.0, shares=1, moves=3.0, words=10**6)
    assert alone.gap == 0.0
    assert alone.concentrated == pytest.approx(1.5)
    wide = GaussianShares(deviation=5.0, shares=100, moves=3.0, words=10**6)
    assert wide.concentrated == pytest.approx(3.0 / 50.0, rel=1e-9)
    narrow = GaussianShares(deviation=0.6, shares=100, moves=3.0, words=10**6)
    assert narrow.concentrated > 10.0  # the sum of so narrow ones is no Gaussian


@pytest.mark.parametrize("shift", [1, 4])
def test_an_epsilon_is_not_below_the_exact_one(shift: int) -> None:
    p = summed(gaussian(3.0, 120), 4)
    level = epsilon(
        [(GaussianShares(deviation=3.0, shares=4, moves=shift, words=1), 1)],
        adjacency=Adjacency.ZERO_OUT,
        delta=DELTA,
    )
    assert hockey_stick(p, shift, level) <= DELTA
    assert hockey_stick(p, shift, 0.8 * level) > DELTA  # and not far above it either


def test_composition_is_by_the_sum_of_divergences() -> None:
    shares = GaussianShares(deviation=10.0, shares=9, moves=30.0, words=50)
    once = epsilon([(shares, 1)], adjacency=Adjacency.ZERO_OUT, delta=DELTA)
    four = epsilon([(shares, 4)], adjacency=Adjacency.ZERO_OUT, delta=DELTA)
    double = epsilon([(shares.grouped(2), 1)], adjacency=Adjacency.ZERO_OUT, delta=DELTA)
    assert once == pytest.approx(
        min(
            0.5 * a + (math.log(1 / DELTA) + (a - 1) * math.log(1 - 1 / a) - math.log(a)) / (a - 1)
            for a in range(2, 3000)
        )
    )
    assert four == pytest.approx(double)


def test_with_a_gaussian_that_is_not_sampled_it_is_one_account() -> None:
    shares = GaussianShares(deviation=10.0, shares=9, moves=30.0, words=50)
    both = epsilon(
        [(shares, 1), (GaussianNoise(1.0), 1), (PureLevel(0.25), 2)],
        adjacency=Adjacency.ZERO_OUT,
        delta=DELTA,
    )
    assert both == pytest.approx(epsilon_of(1.0 * ORDERS, DELTA) + 0.5)


def test_beside_a_sampled_release_each_account_has_half_of_delta() -> None:
    shares = GaussianShares(deviation=10.0, shares=9, moves=30.0, words=50)
    drawn = GaussianNoise.poisson(1.0, 0.1)
    parts = [(shares, 1), (drawn, 3)]
    both = epsilon(parts, adjacency=Adjacency.ADD_OR_REMOVE, delta=DELTA)
    each = [epsilon([p], adjacency=Adjacency.ADD_OR_REMOVE, delta=DELTA / 2) for p in parts]
    assert both == pytest.approx(sum(each))


@given(
    variance=st.floats(1.0, 1e6),
    moves=st.integers(1, 100),
    times=st.integers(1, 50),
)
def test_more_noise_is_never_worse(variance: float, moves: int, times: int) -> None:
    def level(v: float, m: float, t: int) -> float:
        noise = SkellamNoise.on(1000, variance=v, moves=m)
        return epsilon([(noise, t)], adjacency=Adjacency.ZERO_OUT, delta=DELTA)

    here = level(variance, moves, times)
    assert level(2 * variance, moves, times) <= here
    assert level(variance, moves + 1, times) >= here
    assert level(variance, moves, times + 1) >= here


def test_the_l1_norm_of_integers_is_at_most_their_squared_l2_norm() -> None:
    assert SkellamNoise.on(10**6, variance=1.0, moves=3.0).steps == 9.0
    assert SkellamNoise.on(4, variance=1.0, moves=3.0).steps == 6.0


def test_what_has_no_account_is_refused() -> None:
    shares = GaussianShares(deviation=10.0, shares=9, moves=30.0, words=50)
    with pytest.raises(NoAccount, match="replace"):
        epsilon([(shares, 1)], adjacency=Adjacency.REPLACE, delta=DELTA)
    with pytest.raises(ConfigError):
        epsilon([(shares, 1)], adjacency=Adjacency.ZERO_OUT, delta=0.0)
    with pytest.raises(ConfigError):
        GaussianShares(deviation=0.3, shares=9, moves=1.0, words=1)
    with pytest.raises(ConfigError):
        GaussianShares(deviation=1.0, shares=0, moves=1.0, words=1)
    with pytest.raises(ConfigError):
        SkellamNoise(variance=math.nan, moves=1.0, steps=1.0)
    with pytest.raises(MisuseError):
        SkellamNoise(variance=1.0, moves=2.0, steps=1.0)


# --- a sample of integer noise --------------------------------------------------------------------


def rounded_distance(deviation: float) -> float:
    """Of a discrete Gaussian from a rounded one of the same variance, in 60 digits."""
    from mpmath import mp, mpf

    with mp.workdps(60):
        s = mpf(deviation)
        narrow = mp.sqrt(2 * (s**2 - mpf(1) / 12))
        reach = int(16 * s) + 2
        weights = [mp.exp(-(mpf(k) ** 2) / (2 * s**2)) for k in range(reach)]
        whole = 2 * mp.fsum(weights) - 1
        found = mpf(0)
        for k, weight in enumerate(weights):
            there = (mp.erf((k + mpf(1) / 2) / narrow) - mp.erf((k - mpf(1) / 2) / narrow)) / 2
            found += abs(weight / whole - there) * (2 if k else 1)
        return float(found / 2)


@pytest.mark.parametrize("deviation", [2.0, 2.5, 4.0, 9.0, 40.0])
def test_a_discrete_gaussian_is_a_rounded_one_but_for_the_stated_distance(deviation) -> None:
    shares = GaussianShares(deviation=deviation, shares=1, moves=1.0, words=3)
    noise, distance = shares.rounded
    assert noise**2 + 1 / 12 == pytest.approx(deviation**2)
    assert 0.4 * distance < 3 * rounded_distance(deviation) < distance


@pytest.mark.parametrize(("deviation", "moves"), [(2.0, 1), (5.0, 3), (30.0, 20)])
@pytest.mark.parametrize("rate", [0.01, 0.2, 0.7])
def test_the_account_of_a_sample_is_above_the_truth_in_one_dimension(
    deviation: float, moves: int, rate: float
) -> None:
    """One step: the hockey-stick divergence of the mixture and the noise, in both orders."""
    noise, distance = GaussianShares(deviation=deviation, shares=1, moves=moves, words=1).rounded
    alone = gaussian(deviation, 12 * math.ceil(deviation) + moves)
    mixed = (1 - rate) * alone
    mixed[moves:] += rate * alone[: alone.size - moves]
    for delta in (1e-3, 1e-4):
        claimed = epsilon(
            [(GaussianNoise(noise, ((0, 1 - rate), (1, rate)), distance=distance), 1)],
            adjacency=Adjacency.ZERO_OUT,
            delta=delta,
        )
        if math.isinf(claimed):
            assert (
                distance
                * (
                    1
                    + math.exp(
                        epsilon(
                            [(GaussianNoise.poisson(noise, rate), 1)],
                            adjacency=Adjacency.ZERO_OUT,
                            delta=delta,
                        )
                    )
                )
                > 0.4 * delta
            )  # so narrow that no number is given
            continue
        for p, q in ((mixed, alone), (alone, mixed)):
            assert np.maximum(p - math.exp(claimed) * q, 0.0).sum() <= delta
        # And not by far: with a hundredth less of the epsilon one of the orders passes delta.
        if rate > 0.1 and deviation > 10:
            worse = max(
                np.maximum(p - math.exp(0.99 * claimed) * q, 0.0).sum()
                for p, q in ((mixed, alone), (alone, mixed))
            )
            assert worse > delta


def test_only_one_wide_share_is_rounded() -> None:
    for shares, deviation in ((2, 10.0), (1, 1.0)):
        with pytest.raises(MisuseError, match="not rounded"):
            _ = GaussianShares(deviation=deviation, shares=shares, moves=1.0, words=3).rounded
