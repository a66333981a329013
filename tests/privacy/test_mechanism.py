"""How far a sum moves, and how likely: binomials cut at a cap, groups, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.errors import ConfigError, MisuseError
from tessera.privacy.dp.mechanism import (
    NEGLIGIBLE,
    FixedSizeNoise,
    GaussianNoise,
    PureLevel,
    binomial,
)


@given(st.integers(1, 300), st.floats(1e-6, 0.999), st.integers(1, 300))
def test_shifts_are_a_binomial_cut_at_the_cap(trials: int, rate: float, cap: int) -> None:
    found = dict(binomial(trials, rate, cap))
    exact = stats.binom(trials, rate)
    cap = min(cap, trials)
    for k in range(cap + 1):
        wanted = exact.pmf(k) if k < cap else exact.sf(cap - 1)
        assert found.get(k, 0.0) == pytest.approx(wanted, rel=1e-9, abs=NEGLIGIBLE)
    assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-15)


def test_a_person_is_met_by_far_more_batches_than_one_record() -> None:
    (_, ((_, _), (_, met))) = (1.0, GaussianNoise.records(1.0, 0.01, of=100, cap=1).shifts)
    assert met == pytest.approx(1.0 - 0.99**100)


def test_what_is_drawn_for_certain_is_not_sampled() -> None:
    assert GaussianNoise.poisson(1.0, 1.0) == GaussianNoise(1.0)
    assert not GaussianNoise(1.0).sampled
    assert GaussianNoise.poisson(1.0, 0.5).sampled


def test_a_group_adds_up_its_members() -> None:
    assert GaussianNoise(2.0).grouped(5).shifts == ((5, 1.0),)
    one = GaussianNoise.poisson(2.0, 0.01)
    assert one.grouped(3) == GaussianNoise.records(2.0, 0.01, of=3, cap=3)
    assert one.grouped(1) == one
    assert FixedSizeNoise(2.0, 0.01).grouped(3) == GaussianNoise(2.0, ((3, 1.0),))
    capped = GaussianNoise.records(1.0, 0.1, of=3, cap=2)
    twice = dict(capped.grouped(2).shifts)
    (_, none), (_, once), (_, more) = capped.shifts
    assert twice == pytest.approx(
        {
            0: none**2,
            1: 2 * none * once,
            2: once**2 + 2 * none * more,
            3: 2 * once * more,
            4: more**2,
        }
    )


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_noise_is_a_positive_number(noise: float) -> None:
    with pytest.raises(ConfigError, match="noise"):
        GaussianNoise(noise)
    with pytest.raises(ConfigError, match="noise"):
        FixedSizeNoise(noise, 0.5)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_a_rate_is_a_probability(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        GaussianNoise.poisson(1.0, rate)
    with pytest.raises(ConfigError, match="rate"):
        FixedSizeNoise(1.0, rate)


@pytest.mark.parametrize("shifts", [(), ((1, 0.5),), ((1, 0.5), (0, 0.5)), ((-1, 1.0),)])
def test_shifts_that_are_no_distribution_are_refused(shifts) -> None:
    with pytest.raises(MisuseError, match="shifts"):
        GaussianNoise(1.0, shifts)


def test_counts_start_at_one_and_levels_at_zero() -> None:
    with pytest.raises(ConfigError, match="records"):
        GaussianNoise.records(1.0, 0.1, of=0, cap=1)
    with pytest.raises(ConfigError, match="records"):
        GaussianNoise.records(1.0, 0.1, of=3, cap=0)
    with pytest.raises(MisuseError, match="level"):
        PureLevel(-1.0)
