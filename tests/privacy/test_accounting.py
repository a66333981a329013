"""Accounts against closed forms, against integration, against the library, and among themselves."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from tessera.errors import ConfigError
from tessera.privacy.dp.accounting import (
    as_curve,
    deltas_of,
    epsilon,
    merged,
    noise_for,
    rounds_within,
)
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import FixedSizeNoise, GaussianNoise, NoAccount, PureLevel, Unseen

ADD = Adjacency.ADD_OR_REMOVE
REPLACE = Adjacency.REPLACE


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Of a Gaussian that moves by mu standard deviations (Balle and Wang 2018, Theorem 8)."""

    def excess(level: float) -> float:
        upper = stats.norm.logsf(level / mu - mu / 2)
        lower = level + stats.norm.logsf(level / mu + mu / 2)
        return math.exp(upper) - math.exp(lower) - delta

    return float(optimize.brentq(excess, 0.0, mu * mu / 2 + 40.0 * mu + 1.0, xtol=1e-13))


def integrated_delta(mechanism: GaussianNoise, level: float, *, removed: bool, scale: int) -> float:
    """The hockey-stick divergence of one release, by quadrature over its two densities."""

    def density(x: float) -> float:
        scaled = x / mechanism.noise
        return math.exp(-0.5 * scaled * scaled) / (mechanism.noise * math.sqrt(2.0 * math.pi))

    def mixture(x: float) -> float:
        return math.fsum(p * density(x - scale * s) for s, p in mechanism.shifts)

    def gain(x: float) -> float:
        worlds = (mixture(x), density(x)) if removed else (density(x), mixture(x))
        return max(0.0, worlds[0] - math.exp(level) * worlds[1])

    most = scale * mechanism.shifts[-1][0] + 12.0 * mechanism.noise
    least = -12.0 * mechanism.noise
    edges = np.linspace(least, most, 60)
    return math.fsum(
        integrate.quad(gain, a, b, limit=200, epsabs=1e-14)[0] for a, b in pairwise(edges)
    )


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adjacency", "moves"),
    [(Adjacency.ADD_OR_REMOVE, 1.0), (Adjacency.ZERO_OUT, 1.0), (Adjacency.REPLACE, 2.0)],
)
@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (0.3, 1), (30.0, 1000), (5.0, 7)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_without_sampling_the_account_is_the_closed_form(
    adjacency: Adjacency, moves: float, noise: float, times: int, delta: float
) -> None:
    closed = gaussian_epsilon(moves * math.sqrt(times) / noise, delta)
    found = epsilon([(GaussianNoise(noise), times)], adjacency=adjacency, delta=delta)
    assert closed <= found <= closed * 1.0005
    if adjacency is REPLACE:  # a batch that holds everybody is no sample
        whole = epsilon([(FixedSizeNoise(noise, 1.0), times)], adjacency=adjacency, delta=delta)
        assert whole == found


def test_replaced_units_move_by_two_clips_which_not_every_accountant_knows() -> None:
    """The library's RDP accountant takes C under replace-one, its PLD accountant 2C."""
    import dp_accounting
    from dp_accounting import dp_event, privacy_accountant
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    assert dp_accounting is not None
    replace = privacy_accountant.NeighboringRelation.REPLACE_ONE
    event = dp_event.GaussianDpEvent(1.0)
    by_pld = PLDAccountant(replace).compose(event).get_epsilon(1e-6)
    by_rdp = RdpAccountant(neighboring_relation=replace).compose(event).get_epsilon(1e-6)
    ours = epsilon([(GaussianNoise(1.0), 1)], adjacency=REPLACE, delta=1e-6)
    assert ours == pytest.approx(gaussian_epsilon(2.0, 1e-6), rel=1e-3)
    assert ours == pytest.approx(by_pld, rel=1e-3)
    assert by_rdp < 0.6 * ours  # what a careless caller would print
    halved = dp_event.GaussianDpEvent(0.5)
    again = RdpAccountant(neighboring_relation=replace).compose(halved).get_epsilon(1e-6)
    assert ours <= again <= 1.2 * ours  # RDP, asked rightly, is a little worse


def test_fixed_size_batches_stay_below_the_renyi_bound_at_two_clips() -> None:
    from dp_accounting import dp_event, privacy_accountant
    from dp_accounting.rdp import RdpAccountant

    def renyi(noise: float) -> float:
        accountant = RdpAccountant(
            neighboring_relation=privacy_accountant.NeighboringRelation.REPLACE_ONE
        )
        drawn = dp_event.SampledWithoutReplacementDpEvent(1000, 10, dp_event.GaussianDpEvent(noise))
        return float(accountant.compose(drawn, 1000).get_epsilon(1e-6))

    ours = epsilon([(FixedSizeNoise(1.5, 0.01), 1000)], adjacency=REPLACE, delta=1e-6)
    assert renyi(1.5) < ours < renyi(0.75)


def test_poisson_sampling_is_the_librarys_account_and_under_replacement_above_it() -> None:
    from dp_accounting import dp_event, privacy_accountant
    from dp_accounting.pld import PLDAccountant

    event = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(1.1))
    relation = privacy_accountant.NeighboringRelation
    mechanism = GaussianNoise.poisson(1.1, 0.05)
    theirs = PLDAccountant(relation.ADD_OR_REMOVE_ONE).compose(event, 100).get_epsilon(1e-5)
    ours = epsilon([(mechanism, 100)], adjacency=ADD, delta=1e-5)
    assert ours == pytest.approx(theirs, rel=1e-3)
    theirs = PLDAccountant(relation.REPLACE_ONE).compose(event, 100).get_epsilon(1e-5)
    assert epsilon([(mechanism, 100)], adjacency=REPLACE, delta=1e-5) >= theirs


# --- numerical integration ------------------------------------------------------------------------

RELEASES = [
    GaussianNoise(0.8),
    GaussianNoise.poisson(0.8, 0.1),
    GaussianNoise.records(1.3, 0.05, of=20, cap=3),
    GaussianNoise.clients(0.6, 0.3, of=4),
    GaussianNoise(1.0, ((1, 0.5), (3, 0.5))),
]


@pytest.mark.parametrize("mechanism", RELEASES, ids=str)
@pytest.mark.parametrize("removed", [True, False])
def test_one_releases_divergence_is_its_integral(mechanism: GaussianNoise, removed: bool) -> None:
    levels = np.array([-2.0, -0.5, -0.05, 0.0, 0.02, 0.1, 0.7, 2.0, 4.0])
    found = deltas_of(as_curve(mechanism, ADD), levels, removed=removed)
    for level, delta in zip(levels, found, strict=True):
        integral = integrated_delta(mechanism, level, removed=removed, scale=1)
        assert delta == pytest.approx(integral, rel=1e-6, abs=1e-11)


@pytest.mark.parametrize("level", [0.1, 1.0, 3.0])
def test_a_replaced_sampled_units_divergence_is_its_integral(level: float) -> None:
    mechanism = GaussianNoise.poisson(1.5, 0.1)
    for drawn in (mechanism, FixedSizeNoise(1.5, 0.1)):
        (found,) = deltas_of(as_curve(drawn, REPLACE), np.array([level]), removed=True)
        integral = integrated_delta(mechanism, level, removed=True, scale=2)
        assert found == pytest.approx(integral, rel=1e-6)


def plane(mechanism: GaussianNoise, level: float, *, removed: bool) -> float:
    """The divergence of two releases, by the midpoint rule over the plane of both outputs."""
    most = mechanism.shifts[-1][0] + 9.0 * mechanism.noise
    x, step = np.linspace(-9.0 * mechanism.noise, most, 4000, retstep=True)
    alone = stats.norm.pdf(x, 0.0, mechanism.noise)
    mixture = sum(p * stats.norm.pdf(x, s, mechanism.noise) for s, p in mechanism.shifts)
    first, second = (mixture, alone) if removed else (alone, mixture)
    both = np.outer(first, first) - math.exp(level) * np.outer(second, second)
    return float(np.maximum(0.0, both).sum() * step**2)


@pytest.mark.parametrize("mechanism", RELEASES[:4], ids=str)
def test_two_releases_compose_as_an_integral_over_both_says(mechanism: GaussianNoise) -> None:
    level = epsilon([(mechanism, 2)], adjacency=ADD, delta=1e-4)
    worse = max(plane(mechanism, level, removed=removed) for removed in (True, False))
    assert worse == pytest.approx(1e-4, rel=5e-3)
    assert worse <= 1e-4 * (1.0 + 1e-4)  # never more than was promised


def test_a_hundred_releases_compose_as_a_simulation_says() -> None:
    mechanism, times, rng = (
        GaussianNoise.records(2.0, 0.05, of=10, cap=2),
        100,
        np.random.default_rng(0),
    )
    shifts, chances = zip(*mechanism.shifts, strict=True)
    moved = rng.choice(shifts, p=chances, size=(40_000, times))
    x = moved + mechanism.noise * rng.standard_normal(moved.shape)
    ratio = sum(p * np.exp(s * (x - s / 2) / mechanism.noise**2) for s, p in mechanism.shifts)
    losses = np.log(ratio).sum(axis=1)
    level = epsilon([(mechanism, times)], adjacency=ADD, delta=0.01)
    gains = np.maximum(0.0, 1.0 - np.exp(level - losses))
    error = 4.0 * gains.std() / math.sqrt(gains.size)  # false alarm below 1e-4
    assert abs(gains.mean() - 0.01) < error < 0.002


def revealed(mechanism: GaussianNoise, times: int, level: float) -> float:
    """delta of `times` releases where every shift is told: an average over all numbers of draws."""
    (_, none), *drawn = mechanism.shifts
    total = 0.0
    for counts in product(range(times + 1), repeat=len(drawn)):
        rest = times - sum(counts)
        if rest < 0:
            continue
        ways = math.factorial(times) / math.prod(map(math.factorial, (rest, *counts)))
        chance = (
            ways * none**rest * math.prod(p**k for k, (_, p) in zip(counts, drawn, strict=True))
        )
        mu = (
            2.0
            / mechanism.noise
            * math.sqrt(sum(k * s * s for k, (s, _) in zip(counts, drawn, strict=True)))
        )
        if mu:
            upper, lower = stats.norm.sf(level / mu - mu / 2), stats.norm.sf(level / mu + mu / 2)
            total += chance * (upper - math.exp(level) * lower)
    return total


@pytest.mark.parametrize("times", [1, 6])
def test_several_replaced_units_are_accounted_for_as_if_their_number_were_told(times: int) -> None:
    mechanism = GaussianNoise.poisson(3.0, 0.1).grouped(2)
    level = epsilon([(mechanism, times)], adjacency=REPLACE, delta=1e-4)
    assert revealed(mechanism, times, level) == pytest.approx(1e-4, rel=5e-3)
    assert revealed(mechanism, times, level) <= 1e-4
    alone = epsilon([(GaussianNoise.poisson(3.0, 0.1), times)], adjacency=REPLACE, delta=1e-4)
    certain = epsilon([(GaussianNoise(3.0).grouped(2), times)], adjacency=REPLACE, delta=1e-4)
    assert alone < level < certain


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "cap", "level"),
    [(1, 1, 1.0598), (10, 1, 13.140), (10, 2, 14.354), (100, 1, 159.49)],
)
def test_a_person_with_many_records_under_the_account_of_one(
    records: int, cap: int, level: float
) -> None:
    """Rate 1 %, noise 1.5, 1,000 steps, delta 1e-6: item level says 1.06 for all of them."""
    drawn = GaussianNoise.records(1.5, 0.01, of=records, cap=cap)
    found = epsilon([(drawn, 1000)], adjacency=ADD, delta=1e-6)
    assert found == pytest.approx(level, rel=1e-3)


# --- noise from budget and back -------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", [ADD, Adjacency.ZERO_OUT, REPLACE])
@pytest.mark.parametrize(("wanted", "rate", "steps"), [(3.0, 0.02, 500), (0.5, 1.0, 10)])
def test_noise_found_for_a_budget_keeps_it_and_hardly_less_would(
    adjacency: Adjacency, wanted: float, rate: float, steps: int
) -> None:
    def level(noise: float) -> float:
        drawn = GaussianNoise.poisson(noise, rate)
        return epsilon([(drawn, steps)], adjacency=adjacency, delta=1e-6)

    noise = noise_for(
        lambda noise: [(GaussianNoise.poisson(noise, rate), steps)],
        adjacency=adjacency,
        epsilon=wanted,
        delta=1e-6,
    )
    assert wanted * 0.999 <= level(noise) <= wanted
    assert level(noise * 0.999) > wanted


def test_rounds_found_for_a_budget_fit_and_one_more_does_not() -> None:
    once = [(GaussianNoise.poisson(1.0, 0.05), 4)]
    rounds = rounds_within(once, adjacency=ADD, epsilon=2.0, delta=1e-5)
    assert rounds > 1

    def level(times: int) -> float:
        return epsilon([(once[0][0], 4 * times)], adjacency=ADD, delta=1e-5)

    assert level(rounds) <= 2.0 < level(rounds + 1)
    assert rounds_within(once, adjacency=ADD, epsilon=0.01, delta=1e-5) == 0
    assert rounds_within(once, adjacency=ADD, epsilon=2.0, delta=1e-5, most=3) == 3


def test_a_budget_that_another_level_uses_up_is_out_of_reach() -> None:
    with pytest.raises(ConfigError, match="out of reach"):
        noise_for(
            lambda noise: [(GaussianNoise(noise), 1), (PureLevel(2.0), 1)],
            adjacency=ADD,
            epsilon=1.0,
            delta=1e-5,
        )
    with pytest.raises(ConfigError, match="no noise"):
        noise_for(lambda n: [(GaussianNoise(n), 1)], adjacency=ADD, epsilon=0.0, delta=1e-5)


# --- monotone, and what composes ------------------------------------------------------------------

noises = st.floats(0.5, 20.0)
rates = st.floats(1e-3, 1.0)


def level_of(noise: float, rate: float, records: int, cap: int, steps: int, delta: float) -> float:
    drawn = GaussianNoise.records(noise, rate, of=records, cap=cap)
    return epsilon([(drawn, steps)], adjacency=ADD, delta=delta)


@settings(max_examples=25, deadline=None)
@given(noises, rates, st.integers(1, 12), st.integers(1, 4), st.integers(1, 300), st.data())
def test_more_of_anything_but_noise_and_delta_never_costs_less(
    noise: float, rate: float, records: int, cap: int, steps: int, data: st.DataObject
) -> None:
    """Up to the grid, which may change by a factor of two with any of them: 5e-4 of epsilon."""
    base = level_of(noise, rate, records, cap, steps, 1e-5)
    more = {
        "noise": lambda: level_of(1.2 * noise, rate, records, cap, steps, 1e-5),
        "delta": lambda: level_of(noise, rate, records, cap, steps, 1e-4),
    }
    less = {
        "rate": lambda: level_of(noise, min(1.0, 1.2 * rate), records, cap, steps, 1e-5),
        "records": lambda: level_of(noise, rate, records + 1, cap, steps, 1e-5),
        "cap": lambda: level_of(noise, rate, records, cap + 1, steps, 1e-5),
        "steps": lambda: level_of(noise, rate, records, cap, steps + 10, 1e-5),
    }
    name = data.draw(st.sampled_from([*more, *less]))
    slack = 5e-4 * base + 1e-6
    if name in more:
        assert more[name]() <= base + slack
    else:
        assert less[name]() >= base - slack


def test_a_cap_of_one_is_a_poisson_sample_at_the_persons_own_rate() -> None:
    met = 1.0 - (1.0 - 0.03) ** 7
    capped = epsilon(
        [(GaussianNoise.records(1.0, 0.03, of=7, cap=1), 50)], adjacency=ADD, delta=1e-5
    )
    drawn = epsilon([(GaussianNoise.poisson(1.0, met), 50)], adjacency=ADD, delta=1e-5)
    assert capped == pytest.approx(drawn, rel=1e-9)


def test_equal_mechanisms_are_counted_together_whatever_their_order() -> None:
    one, other = GaussianNoise(2.0), GaussianNoise.poisson(1.0, 0.1)
    parts = [(one, 1), (other, 2), (one, 3), (Unseen(), 9), (PureLevel(0.5), 0)]
    assert (
        merged(parts) == merged(reversed(parts)) == tuple(sorted([(one, 4), (other, 2)], key=repr))
    )


def test_different_mechanisms_compose_to_more_than_each_and_less_than_their_sum() -> None:
    parts = [(GaussianNoise(4.0), 5), (GaussianNoise.poisson(1.0, 0.05), 50), (PureLevel(0.25), 2)]
    whole = epsilon(parts, adjacency=ADD, delta=1e-5)
    alone = [epsilon([part], adjacency=ADD, delta=1e-5) for part in parts]
    assert max(alone) < whole < sum(alone)
    assert alone[2] == 0.5


def test_levels_alone_need_no_delta_and_nothing_costs_nothing() -> None:
    assert epsilon([(PureLevel(0.5), 3)], adjacency=ADD, delta=0.0) == 1.5
    assert (
        epsilon([(PureLevel(math.inf), 1), (GaussianNoise(1.0), 1)], adjacency=ADD, delta=0.0)
        == math.inf
    )
    assert epsilon([], adjacency=ADD, delta=0.0) == 0.0
    assert epsilon([(Unseen(), 5)], adjacency=ADD, delta=0.0) == 0.0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.0, 1e-13, 1.0, math.nan])
def test_a_delta_that_no_account_can_keep_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta") as refused:
        epsilon([(GaussianNoise(1.0), 1)], adjacency=ADD, delta=delta)
    assert refused.value.hint is not None


def test_so_many_releases_at_so_small_a_delta_are_refused_rather_than_rounded() -> None:
    with pytest.raises(ConfigError, match="double precision"):
        epsilon([(GaussianNoise.poisson(5.0, 0.01), 10**6)], adjacency=ADD, delta=1e-10)


def test_what_has_no_account_is_refused_by_name() -> None:
    with pytest.raises(NoAccount, match=r"fixed size.*add or remove"):
        epsilon([(FixedSizeNoise(1.0, 0.1), 1)], adjacency=ADD, delta=1e-5)
    with pytest.raises(NoAccount, match="str"):
        epsilon([("laplace", 1)], adjacency=ADD, delta=1e-5)  # type: ignore[list-item]


def test_without_the_library_the_extra_is_named_and_levels_still_work() -> None:
    code = """
import sys
sys.modules["dp_accounting"] = None
from tessera.errors import ConfigError
from tessera.privacy.dp.accounting import epsilon
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import GaussianNoise, PureLevel
assert epsilon([(PureLevel(2.0), 1)], adjacency=Adjacency.ZERO_OUT, delta=0.0) == 2.0
assert "scipy" not in sys.modules
assert epsilon([(GaussianNoise(1.0), 1)], adjacency=Adjacency.ZERO_OUT, delta=1e-5) > 4.0
try:
    epsilon([(GaussianNoise.poisson(1.0, 0.1), 1)], adjacency=Adjacency.ZERO_OUT, delta=1e-5)
except ConfigError as error:
    print(error, error.hint)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "dp-accounting" in told.stdout
    assert "tessera-fl[dp]" in told.stdout


def ideal(noise: float, rate: float, times: int) -> tuple[tuple[GaussianNoise, int], ...]:
    return ((GaussianNoise.poisson(noise, rate), times),)


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_noise_that_is_not_ideal_costs_its_distance_in_both_worlds(rate: float) -> None:
    times, delta, distance = 10, 1e-6, 2e-10
    exact = ideal(3.0, rate, times)
    (one, _), *_ = exact
    real = [(replace(one, distance=distance), times)]
    level = epsilon(real, adjacency=ADD, delta=delta)
    assert level > epsilon(exact, adjacency=ADD, delta=delta)
    # At this level the ideal has what is left of delta, and hardly more is charged than that.
    taken = times * distance * (1.0 + math.exp(level))
    assert epsilon(exact, adjacency=ADD, delta=delta - taken) <= level * (1 + 1e-9)
    assert epsilon(exact, adjacency=ADD, delta=delta - 1.01 * taken) >= level * (1 - 1e-5)


def test_noise_that_is_not_fine_enough_for_its_epsilon_promises_nothing() -> None:
    coarse = [(GaussianNoise(0.3, distance=1e-12), 5)]
    assert epsilon(coarse, adjacency=ADD, delta=1e-6) == math.inf
    assert math.isfinite(epsilon([(GaussianNoise(0.3), 5)], adjacency=ADD, delta=1e-6))


def test_a_contribution_that_may_be_longer_costs_its_probability_each_time() -> None:
    times, delta, fails = 7, 1e-6, 1e-8
    real = epsilon([(GaussianNoise(2.0, fails=fails), times)], adjacency=ADD, delta=delta)
    left = epsilon([(GaussianNoise(2.0), times)], adjacency=ADD, delta=delta - times * fails)
    assert real == pytest.approx(left, rel=1e-6)
