"""What Marathe and Kanani 2022 state about subjects, and what does not hold; with figures.

Target (4, 1e-5), sampling rate 1 %, 1,000 steps throughout.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.errors import ConfigError
from tessera.privacy.dp.accounting import epsilon, noise_for
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.subjects import changed_epsilon, group_level, member_level, noise_as_printed

ADD = Adjacency.ADD_OR_REMOVE
TARGET, DELTA, RATE, STEPS = 4.0, 1e-5, 0.01, 1000


@cache
def printed(size: int) -> float:
    return noise_as_printed(epsilon=TARGET, delta=DELTA, size=size, rate=RATE, steps=STEPS)


def level(mechanism: GaussianNoise, times: int = STEPS) -> float:
    return epsilon([(mechanism, times)], adjacency=ADD, delta=DELTA)


# --- the arithmetic -------------------------------------------------------------------------------


@given(st.floats(0.01, 20.0), st.floats(1e-9, 1e-2), st.integers(1, 64))
def test_the_calibration_is_the_papers_to_twelve_digits(
    target: float, delta: float, size: int
) -> None:
    with localcontext() as context:
        context.prec = 60
        e, d, z = Decimal(target), Decimal(delta), Decimal(size)
        each = e / z
        rest = d / (z * ((z - 1) * e / z).exp())
        whole = (z * each, z * ((z - 1) * each).exp() * rest)
    found = member_level(target, delta, size=size)
    assert found == pytest.approx((float(each), float(rest)), rel=1e-12)
    assert group_level(*found, size=size) == pytest.approx(
        (float(whole[0]), float(whole[1])), rel=1e-12
    )
    assert group_level(*found, size=size) == pytest.approx((target, delta), rel=1e-12)


def test_the_calibration_by_hand() -> None:
    assert member_level(4.0, 1e-5, size=2) == pytest.approx((2.0, 6.766764161830634e-07), rel=1e-12)
    assert member_level(4.0, 1e-5, size=1) == (4.0, 1e-5)
    with pytest.raises(ConfigError, match="group of 0"):
        member_level(4.0, 1e-5, size=0)


# --- records that change ---


def test_examples_that_change_cost_more_than_examples_that_vanish() -> None:
    drawn = GaussianNoise.poisson(3.0, RATE)

    def gone(size: int, delta: float) -> float:
        return epsilon([(drawn.grouped(size), STEPS)], adjacency=ADD, delta=delta)

    for size in (1, 4):
        found = changed_epsilon(drawn, size=size, times=STEPS, delta=DELTA)
        replaced = epsilon([(drawn.grouped(size), STEPS)], adjacency=Adjacency.REPLACE, delta=DELTA)
        assert gone(size, DELTA) < found <= replaced
    assert found < replaced  # the way over nobody is the shorter one here
    # and it is a way: half of it, at a delta that leaves room for both halves
    half = found / 2.0
    share = DELTA / (1.0 + math.exp(half))
    assert gone(4, share) <= half * 1.01


def test_where_no_way_over_nobody_fits_the_delta_replacement_counts() -> None:
    found = changed_epsilon(GaussianNoise(1.0), size=20, times=10, delta=1e-6)
    assert found == epsilon(
        [(GaussianNoise(1.0).grouped(20), 10)], adjacency=Adjacency.REPLACE, delta=1e-6
    )


# --- Theorem 3.2 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8])
def test_theorem_3_2_is_false_as_printed(size: int) -> None:
    """Randomised response on "is anybody there?" keeps (epsilon, 0) for groups of every size.

    One record alone makes all the difference there is, so that (epsilon/g, Delta/(g e^..)) would
    be needed, and is not kept.
    """
    truth = math.exp(TARGET) / (1.0 + math.exp(TARGET))

    def divergence(at: float) -> float:
        return max(0.0, truth - math.exp(at) * (1.0 - truth))

    assert divergence(TARGET) <= DELTA  # any two data sets, so any group
    each, rest = member_level(TARGET, DELTA, size=size)
    assert divergence(each) > 0.5 > rest  # two data sets that differ in one record


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_calibration_is_sound_for_a_group_of_fixed_size(size: int) -> None:
    """Theorem 3.1, the right way round: noise for one at (eps/Z, ..) keeps the target for Z."""
    each, rest = member_level(TARGET, DELTA, size=size)
    noise = noise_for(
        lambda noise: [(GaussianNoise(noise), 10)], adjacency=ADD, epsilon=each, delta=rest
    )
    together = level(GaussianNoise(noise).grouped(size), times=10)
    assert together <= TARGET * 1.0005
    if size > 1:
        assert together < 0.99 * TARGET  # and wasteful: sensitivity Z C has a closed account


# --- the rate of one record for a person with many ------------------------------------------------


@pytest.mark.parametrize(("size", "noise"), [(1, 0.735), (2, 1.04), (4, 1.69), (8, 3.12)])
def test_noise_per_group_as_printed(size: int, noise: float) -> None:
    assert printed(size) == pytest.approx(noise, rel=4e-3)


def test_a_person_with_sixteen_records_one_per_batch_has_far_more_than_the_target() -> None:
    assert level(GaussianNoise.records(printed(1), RATE, of=16, cap=1)) == pytest.approx(
        78.6, rel=2e-3
    )


def test_drawing_records_needs_seven_times_the_noise_of_drawing_subjects() -> None:
    by_records = noise_for(
        lambda noise: [(GaussianNoise.records(noise, RATE, of=16, cap=1), STEPS)],
        adjacency=ADD,
        epsilon=TARGET,
        delta=DELTA,
    )
    by_subjects = noise_for(
        lambda noise: [(GaussianNoise.poisson(noise, RATE), STEPS)],
        adjacency=ADD,
        epsilon=TARGET,
        delta=DELTA,
    )
    assert by_records == pytest.approx(5.17, rel=2e-3)
    assert by_subjects == pytest.approx(0.735, rel=2e-3)


# --- noise that depends on the batch's Z ----------------------------------------------------------


def test_the_length_of_the_noise_alone_tells_one_record_from_two() -> None:
    """AUC of the squared length under sigma_1 against sigma_2: a ratio of chi-squares."""

    def auc(parameters: int) -> float:
        return float(stats.f.sf((printed(1) / printed(2)) ** 2, parameters, parameters))

    assert auc(100) > 0.99
    assert auc(64_327) == pytest.approx(1.0)
    assert auc(10) < 0.9


# --- "the same privacy" across clients ------------------------------------------------------------


@pytest.mark.parametrize(("clients", "spent"), [(2, 5.4), (3, 6.6), (10, 12.5)])
def test_a_target_kept_by_each_client_is_not_kept_for_a_person_at_several(
    clients: int, spent: float
) -> None:
    drawn = GaussianNoise.poisson(printed(1), RATE)
    assert level(drawn) <= TARGET
    assert level(drawn, times=clients * STEPS) == pytest.approx(spent, abs=0.05)


@pytest.mark.parametrize(("clients", "spent"), [(2, 8.5), (3, 13.3), (10, 57.6)])
def test_where_only_the_sum_is_seen_noise_for_one_client_is_even_further_off(
    clients: int, spent: float
) -> None:
    """The sum carries one client's noise, and the person once per client that drew it."""
    found = level(GaussianNoise.clients(printed(1), RATE, of=clients))
    assert found == pytest.approx(spent, abs=0.06)
    # every client's noise in the sum: it adds up as the root, a person's signal linearly
    summed = level(GaussianNoise.clients(printed(1) * math.sqrt(clients), RATE, of=clients))
    assert summed < found
    if clients > 2:
        assert summed > TARGET


@pytest.mark.parametrize("clients", [2, 3, 10])
def test_local_noise_likewise_costs_a_person_once_per_client(clients: int) -> None:
    """User level with the client's own noise: whole updates, no sampling, 2C for a person."""
    noise = noise_for(
        lambda noise: [(GaussianNoise(noise), 10)],
        adjacency=Adjacency.REPLACE,
        epsilon=TARGET,
        delta=DELTA,
    )
    one = epsilon([(GaussianNoise(noise), 10)], adjacency=Adjacency.REPLACE, delta=DELTA)
    person = level(GaussianNoise(noise, ((2, 1.0),)), times=10 * clients)
    assert one <= TARGET < person <= clients * TARGET
