"""Accounting: epsilon, delta and noise of composed mechanisms, by privacy loss distributions.

Composition is dp-accounting's (the extra `dp`): discrete privacy loss distributions, convolved. It
is given hockey-stick divergences at a grid of epsilons, from which "connect the dots" (Doroshenko
et al. 2022, arXiv 2207.04380) makes a distribution that is never better than the true one. So every
epsilon errs upwards; the grid is as fine as the losses of one release ask for.

We make the divergences ourselves for two reasons. The library inverts the loss of a mixture point
by point (28 s for three components where this takes .2 s). And its accountants differ under
replace-one: the RDP accountant takes the noise to be relative to the replaced sum's sensitivity,
the PLD accountant to the clip C, which a replaced unit moves by 2C. Here a multiple is always of C.

Under replace-one a sampled unit has the curve of Zhu, Dong, Wang 2022 (arXiv 2106.08567, Theorem
11), which holds for batches of fixed size and, as its proof only needs that presence and value of
one unit change the sum by at most 2C, for Poisson sampling. For several replaced units, each drawn
by its own coin, we know no such curve: they are accounted for as if the observer were told how many
were drawn, which is an upper bound and amplifies nothing beyond that.

Gaussian releases without sampling are one Gaussian, whose epsilon is a formula.

Integer noise (`integer_noise.py`) has bounds on Rényi divergences instead. They are added up over
releases, with the exact divergences of Gaussians that are not sampled; sampled releases beside them
keep their own account, and each of the two has half of delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError, install
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import (
    ORDERS,
    FixedSizeNoise,
    GaussianNoise,
    IntegerMechanism,
    Mechanism,
    NoAccount,
    Parts,
    PureLevel,
    Shifts,
    Unseen,
    epsilon_of,
)

Values = npt.NDArray[np.float64]

LEAST_DELTA: Final = 1e-12
ROUNDING: Final = 4e-16
"""Of delta, kept back for each composed release: a power of n in a discrete Fourier transform has a
relative error of about n times the machine's (seen: 1e-16 n at most, for n from 10^3 to 10^6)."""
LOG_TRUNCATED: Final = -50.0
"""ln of the probability that the noise of one release is beyond what is looked at; in delta."""
PER_DEVIATION: Final = 32
"""Grid points per standard deviation of one release's privacy loss."""
MOST_POINTS: Final = 2**21
"""Grid points that the composed loss may span; a wider one gets a coarser grid."""
FINEST: Final = -20
"""log2 of the finest grid."""
ACCOUNTED: Final = (GaussianNoise, FixedSizeNoise, IntegerMechanism, PureLevel, Unseen)
TAKEN_UP: Final = 1.001
"""Factor on what is charged for noise that is not ideal: it covers `EPSILON_TOLERANCE`."""
EPSILON_TOLERANCE: Final = 1e-6
ANALYTIC: Final = 1e-12
"""Relative, to which the epsilon of a Gaussian is solved, and by which floats may err in it."""
NOISE_TOLERANCE: Final = 1e-4
"""Calibrated noise is at most this much (relative) above the smallest that would do."""


def epsilon(parts: Iterable[tuple[Mechanism, int]], *, adjacency: Adjacency, delta: float) -> float:
    """The epsilon at this delta of all parts together, rounded upwards if at all."""
    return _epsilon(merged(parts), adjacency, delta)


def rounds_within(
    release: Iterable[tuple[Mechanism, int]],
    *,
    adjacency: Adjacency,
    epsilon: float,
    delta: float,
    most: int = 10**7,
    once: Parts = (),
) -> int:
    """How often these releases can be made, all of them each time, before epsilon is passed.

    Releases that are made `once`, whatever the number, are part of it.
    """
    each = merged(release)

    def fits(times: int) -> bool:
        total = merged([*once, *((mechanism, times * count) for mechanism, count in each)])
        return _epsilon(total, adjacency, delta) <= epsilon

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    if high > most:
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def noise_for(
    release: Callable[[float], Iterable[tuple[Mechanism, int]]],
    *,
    adjacency: Adjacency,
    epsilon: float,
    delta: float,
) -> float:
    """The smallest noise (within `NOISE_TOLERANCE`) whose releases keep this epsilon and delta.

    `release` gives the parts for a noise multiplier.
    """
    if not (epsilon > 0.0 and math.isfinite(epsilon)):
        raise ConfigError(
            f"no noise gives epsilon {epsilon}", hint="ask for an epsilon above 0, such as 3"
        )

    def fits(noise: float) -> bool:
        return _epsilon(merged(release(noise)), adjacency, delta) <= epsilon

    high = 1.0
    while not fits(high):
        high *= 2.0
        if high > 2.0**24:
            raise ConfigError(
                f"epsilon {epsilon} at delta {delta} is out of reach of any noise",
                hint="something else is released at a higher level; ask for a larger epsilon",
            )
    low = high / 2.0
    while low > 2.0**-10 and fits(low):
        low, high = low / 2.0, low
    while high > low * (1.0 + NOISE_TOLERANCE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def merged(parts: Iterable[tuple[Mechanism, int]]) -> Parts:
    """Equal mechanisms counted together, in an order that does not depend on theirs."""
    counts: dict[Mechanism, int] = {}
    for mechanism, times in parts:
        if not isinstance(mechanism, ACCOUNTED):
            raise NoAccount(f"no account for {type(mechanism).__name__}")
        if times and not isinstance(mechanism, Unseen):
            counts[mechanism] = counts.get(mechanism, 0) + times
    return tuple(sorted(counts.items(), key=repr))


def check_delta(delta: float) -> None:
    if not LEAST_DELTA <= delta < 1.0:
        raise ConfigError(
            f"delta = {delta} is not between {LEAST_DELTA:g} and 1",
            hint="use less than one over the number of people, such as 1e-6",
        )


# ------------------------------------------------------------------------------- composition


@lru_cache(maxsize=4096)  # a ledger asks again with every client of a cohort
def _epsilon(parts: Parts, adjacency: Adjacency, delta: float) -> float:
    """The least epsilon with what noise that is not ideal adds to delta, too.

    Where the noise of all releases is within t of ideal in both worlds, an (epsilon, d) of the
    ideal is (epsilon, d + t (1 + e^epsilon)) of the real. It is infinite where this takes more than
    half of delta: for an epsilon that large the noise is not fine enough. Levels that are known
    already have no noise, and are added afterwards.
    """
    known = math.fsum(m.epsilon * times for m, times in parts if isinstance(m, PureLevel))
    if math.isinf(known):
        return known
    noisy = tuple(part for part in parts if not isinstance(part[0], PureLevel))
    ideal, distance = without_distance(noisy)
    found = _ideal_epsilon(ideal, adjacency, delta)
    while distance and math.isfinite(found):
        left = delta - TAKEN_UP * distance * (1.0 + math.exp(min(found, 700.0)))
        if left < delta / 2.0:
            return math.inf
        before, found = found, max(found, _ideal_epsilon(ideal, adjacency, left))
        if found <= before * (1.0 + EPSILON_TOLERANCE):
            break
    return known + found


def without_distance(parts: Parts) -> tuple[Parts, float]:
    """The same releases with ideal noise, and how far all of them together are from it."""
    ideal: dict[Mechanism, int] = {}
    distances: list[float] = []
    for mechanism, times in parts:
        if isinstance(mechanism, GaussianNoise | FixedSizeNoise):
            distances.append(times * mechanism.distance)
            mechanism = replace(mechanism, distance=0.0)
        ideal[mechanism] = ideal.get(mechanism, 0) + times
    return tuple(ideal.items()), math.fsum(distances)


@lru_cache(maxsize=4096)
def _ideal_epsilon(parts: Parts, adjacency: Adjacency, delta: float) -> float:
    integer = [(m, times) for m, times in parts if isinstance(m, IntegerMechanism)]
    noisy = as_one_gaussian(
        [
            (as_curve(m, adjacency), times)
            for m, times in parts
            if not isinstance(m, IntegerMechanism)
        ]
    )
    if not integer:
        return composed_curves(noisy, delta)
    if adjacency is Adjacency.REPLACE:
        raise NoAccount(
            f"integer noise has no account under {adjacency.value}: its bounds are for a unit that "
            "is there or is not"
        )
    check_delta(delta)
    sampled = [(curve, times) for curve, times in noisy if len(curve.shifts) > 1]
    part = delta / 2.0 if sampled else delta  # two accounts of different kinds share delta
    whole = part - math.fsum(times * curve.tail for curve, times in noisy if len(curve.shifts) == 1)
    if whole <= 0.0:
        return math.inf
    divergences = np.zeros_like(ORDERS)
    for mechanism, times in integer:
        divergences += times * mechanism.renyi(ORDERS)
    for curve, times in noisy:
        if len(curve.shifts) == 1:
            divergences += times * 0.5 * (curve.shifts[0][0] / curve.noise) ** 2 * ORDERS
    return epsilon_of(divergences, whole) + composed_curves(sampled, part)


def composed_curves(noisy: list[tuple[Curve, int]], delta: float) -> float:
    """The epsilon of these curves together, by their privacy loss distributions."""
    if not noisy:
        return 0.0
    check_delta(delta)
    if len(noisy) == 1 and len(noisy[0][0].shifts) == 1:
        (curve, times) = noisy[0]
        mean = math.sqrt(times) * curve.shifts[0][0] / curve.noise
        return gaussian_epsilon(mean, delta - times * curve.tail)
    grid = grid_of(noisy)
    total: Any = None
    for curve, times in noisy:
        one = distribution(curve, grid).self_compose(times)
        total = one if total is None else total.compose(one)
    kept_back = ROUNDING * (1000 + sum(times for _, times in noisy))
    if kept_back > 0.5 * delta:
        raise ConfigError(
            f"delta = {delta:g} is too small to account for so many releases in double precision",
            hint=f"use {2.0 * kept_back:.0e} or more",
        )
    return float(total.get_epsilon_for_delta(delta - kept_back))


def gaussian_epsilon(mean: float, delta: float) -> float:
    """The epsilon of N(mean, 1) beside N(0, 1): of any Gaussian releases without sampling.

    Balle and Wang 2018 (arXiv 1805.06530, Theorem 8), solved for epsilon from above.
    """
    if delta <= 0.0:
        return math.inf

    def fits(epsilon: float) -> bool:
        low, high = epsilon / mean - mean / 2.0, epsilon / mean + mean / 2.0
        found = math.exp(log_tail(low)) - math.exp(epsilon + log_tail(high))
        return found * (1.0 + ANALYTIC) <= delta

    if fits(0.0):
        return 0.0
    low, high = 0.0, max(1.0, mean**2)
    while not fits(high):
        low, high = high, 2.0 * high
    while high - low > ANALYTIC * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def log_tail(x: float) -> float:
    """ln of the probability that a normal variable is above x."""
    if x < 30.0:
        return math.log(0.5 * math.erfc(x / math.sqrt(2.0)))
    series = -(x**-2) + 3.0 * x**-4 - 15.0 * x**-6 + 105.0 * x**-8
    return -0.5 * x * x - math.log(x * math.sqrt(2.0 * math.pi)) + math.log1p(series)


class Pair(Enum):
    """Which two distributions a curve compares."""

    MIXTURE = auto()
    """The mixture and N(0); both orders are composed, and the worse counts."""
    REPLACED = auto()
    """One distribution for both orders: the mixture and N(0) above 0, mirrored below."""
    REVEALED = auto()
    """The shift is told with the output: N(shift) and N(0), by the shift's probability."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The dominating pair of one release: (mixture of N(s, noise^2), N(0, noise^2)), s >= 0."""

    noise: float
    shifts: Shifts
    tail: float = 0.0
    pair: Pair = Pair.MIXTURE


def as_curve(mechanism: Mechanism, adjacency: Adjacency) -> Curve:
    """What is composed for this mechanism; under replace-one every unit moves by 2C."""
    replaced = adjacency is Adjacency.REPLACE
    if isinstance(mechanism, FixedSizeNoise):
        if not replaced:
            raise NoAccount(
                f"a batch of fixed size has no account under {adjacency.value}: it never loses a "
                f"unit, and {Adjacency.REPLACE.value} is what it has"
            )
        if mechanism.rate == 1.0:
            return Curve(mechanism.noise, ((2, 1.0),))
        drawn = ((0, 1.0 - mechanism.rate), (2, mechanism.rate))
        return Curve(mechanism.noise, drawn, pair=Pair.REPLACED)
    if not isinstance(mechanism, GaussianNoise):
        raise NoAccount(f"no account for {type(mechanism).__name__}")
    if not replaced:
        return Curve(mechanism.noise, mechanism.shifts, mechanism.tail)
    doubled, pair = mechanism.scaled(2), Pair.REVEALED
    if len(mechanism.shifts) == 1:
        pair = Pair.MIXTURE
    elif [shift for shift, _ in mechanism.shifts] == [0, 1]:
        pair = Pair.REPLACED
    return Curve(doubled.noise, doubled.shifts, doubled.tail, pair)


def as_one_gaussian(noisy: list[tuple[Curve, int]]) -> list[tuple[Curve, int]]:
    """Releases without sampling put together: n of them are one with its noise over root n."""
    sampled = [(curve, times) for curve, times in noisy if len(curve.shifts) > 1]
    certain = math.fsum(
        times * (curve.shifts[0][0] / curve.noise) ** 2
        for curve, times in noisy
        if len(curve.shifts) == 1
    )
    if not certain:
        return sampled
    tail = math.fsum(times * curve.tail for curve, times in noisy if len(curve.shifts) == 1)
    return [*sampled, (Curve(certain**-0.5, ((1, 1.0),), min(1.0, tail)), 1)]


def grid_of(noisy: list[tuple[Curve, int]]) -> float:
    """The grid for all of them, a power of two: fine for each, and not too long for the total."""
    finest, span, variance = math.inf, 0.0, 0.0
    for curve, times in noisy:
        mean, deviation, reach = loss_scale(curve)
        finest = min(finest, deviation / PER_DEVIATION)
        span += times * abs(mean) + reach
        variance += times * deviation**2
    span += 10.0 * math.sqrt(variance)
    wanted = max(finest, span / MOST_POINTS)
    return 2.0 ** max(FINEST, math.floor(math.log2(wanted)))


def loss_scale(curve: Curve) -> tuple[float, float, float]:
    """Mean and standard deviation of one release's loss under the mixture, and its largest."""
    if curve.pair is Pair.REVEALED:
        return revealed_scale(curve)
    low, high = reach_of(curve)
    x = np.linspace(low, high, 4001)
    loss = loss_at(curve, x)
    density = np.zeros_like(x)
    for shift, p in curve.shifts:
        density += p * np.exp(-0.5 * ((x - shift) / curve.noise) ** 2)
    density /= density.sum()
    mean = float((density * loss).sum())
    return mean, math.sqrt(float((density * (loss - mean) ** 2).sum())), float(abs(loss).max())


def revealed_scale(curve: Curve) -> tuple[float, float, float]:
    """The same where the shift s is told: a loss of m + sqrt(2 m) z with m = (s / noise)^2 / 2."""
    each = [(p, 0.5 * (shift / curve.noise) ** 2) for shift, p in curve.shifts]
    mean = math.fsum(p * m for p, m in each)
    square = math.fsum(p * (m**2 + 2.0 * m) for p, m in each)
    most = max(
        m + math.sqrt(2.0 * m * max(0.0, 2.0 * (math.log(p) - LOG_TRUNCATED))) for p, m in each
    )
    return mean, math.sqrt(square - mean**2), most


def reach_of(curve: Curve) -> tuple[float, float]:
    """Outputs below and above which nothing is looked at."""
    z = curve.noise * math.sqrt(-2.0 * LOG_TRUNCATED)  # sf(z) < exp(-z^2 / 2)
    most = max(
        shift + curve.noise * math.sqrt(max(0.0, 2.0 * (math.log(p) - LOG_TRUNCATED)))
        for shift, p in curve.shifts
    )
    return -z, max(most, z)


def loss_at(curve: Curve, x: Values) -> Values:
    """ln of the mixture's density over N(0, noise^2)'s at x; increasing and convex in x."""
    variance = curve.noise**2
    total = np.full_like(x, -np.inf)
    for shift, p in curve.shifts:
        total = np.logaddexp(total, math.log(p) + shift * (x - 0.5 * shift) / variance)
    return total


def output_at(curve: Curve, loss: Values) -> Values:
    """The outputs with these losses; -inf for a loss that even the smallest output exceeds."""
    variance = curve.noise**2
    (first, p_first), (last, p_last) = curve.shifts[0], curve.shifts[-1]
    floor = math.log(p_first) if first == 0 else -math.inf
    x = np.full_like(loss, -np.inf)
    above = loss > floor
    wanted = loss[above]
    if len(curve.shifts) == 1 or (len(curve.shifts) == 2 and first == 0):
        drawn = wanted if first else wanted + np.log(-np.expm1(floor - wanted))
        x[above] = (drawn - math.log(p_last)) * variance / last + 0.5 * last
        return x
    # No closed form. Bracket by a table, then safeguarded Newton: the loss is convex in x, and an
    # error of the output only enters its delta squared.
    low, high = reach_of(curve)
    table = np.linspace(low - 2.0 * (high - low), high + 1.0, 1 << 15)
    losses = loss_at(curve, table)
    at = np.clip(np.searchsorted(losses, wanted), 1, table.size - 1)
    left, right = table[at - 1].copy(), table[at].copy()
    guess = 0.5 * (left + right)
    for _ in range(40):
        value, slope = loss_at(curve, guess), slope_at(curve, guess)
        too_high = value > wanted
        right, left = np.where(too_high, guess, right), np.where(too_high, left, guess)
        step = guess - (value - wanted) / slope
        bisected = 0.5 * (left + right)
        following = np.where((step > left) & (step < right), step, bisected)
        if np.all(np.abs(following - guess) <= 1e-10 * curve.noise):
            break
        guess = following
    x[above] = guess
    return x


def slope_at(curve: Curve, x: Values) -> Values:
    """The derivative of the loss."""
    variance = curve.noise**2
    logs = [math.log(p) + s * (x - 0.5 * s) / variance for s, p in curve.shifts]
    total = np.logaddexp.reduce(logs, axis=0)
    slope = np.zeros_like(x)
    for (shift, _), log in zip(curve.shifts, logs, strict=True):
        slope += shift / variance * np.exp(log - total)
    return np.maximum(slope, np.finfo(np.float64).tiny)


def deltas_of(curve: Curve, epsilons: Values, *, removed: bool) -> Values:
    """The hockey-stick divergence at each epsilon: of (mixture, N(0)), or of (N(0), mixture)."""
    log_ndtr = special().log_ndtr

    if removed:
        x = output_at(curve, epsilons)
        mixed = _mixed(curve, lambda shift: log_ndtr((shift - x) / curve.noise))
        alone = log_ndtr(-x / curve.noise)
        deltas = np.exp(mixed) * -np.expm1(np.minimum(0.0, epsilons + alone - mixed))
    else:
        x = output_at(curve, -epsilons)
        mixed = _mixed(curve, lambda shift: log_ndtr((x - shift) / curve.noise))
        alone = log_ndtr(x / curve.noise)
        with np.errstate(invalid="ignore"):  # -inf - -inf where no output is left
            ratio = np.minimum(0.0, epsilons + mixed - alone)
        deltas = np.where(np.isneginf(x), 0.0, np.exp(alone) * -np.expm1(ratio))
    return np.asarray(np.clip(deltas + curve.tail, 0.0, 1.0), dtype=np.float64)


def _mixed(curve: Curve, log_tail: Callable[[int], Values]) -> Values:
    terms = [math.log(p) + log_tail(shift) for shift, p in curve.shifts]
    return np.asarray(np.logaddexp.reduce(terms, axis=0), dtype=np.float64)


@lru_cache(maxsize=32)
def distribution(curve: Curve, grid: float) -> Any:
    """dp-accounting's privacy loss distribution of one release, on multiples of `grid`."""
    losses, pmf = library()

    def dots(lower: float, upper: float, deltas: Callable[[Values], Values]) -> Any:
        first, last = math.floor(lower / grid), math.ceil(upper / grid)
        values = deltas(np.arange(first, last + 1, dtype=np.float64) * grid)
        falling = np.minimum.accumulate(values)  # rounding may have left a rise of 1e-17
        return pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, falling)

    low, high = reach_of(curve)
    least, most = (float(v) for v in loss_at(curve, np.array([low, high])))
    if curve.pair is Pair.MIXTURE:
        return losses.PrivacyLossDistribution(
            dots(least, most, lambda e: deltas_of(curve, e, removed=True)),
            dots(-most, -least, lambda e: deltas_of(curve, e, removed=False)),
        )
    above = replaced_deltas
    if curve.pair is Pair.REVEALED:
        above, most = revealed_deltas, revealed_scale(curve)[2]

    def both(epsilons: Values) -> Values:
        """H(e) for e >= 0, and 1 - exp(e) + exp(e) H(-e) below: the same in both orders."""
        there = above(curve, np.abs(epsilons))
        below = -np.expm1(epsilons) + np.exp(np.minimum(0.0, epsilons)) * there
        return np.where(epsilons >= 0.0, there, below).clip(0.0, 1.0)

    return losses.PrivacyLossDistribution(dots(-most, most, both))


def replaced_deltas(curve: Curve, epsilons: Values) -> Values:
    return deltas_of(curve, epsilons, removed=True)


def revealed_deltas(curve: Curve, epsilons: Values) -> Values:
    """The divergences of the single shifts, averaged by their probabilities."""
    total = np.full_like(epsilons, curve.tail)
    for shift, p in curve.shifts:
        if shift:
            total += p * deltas_of(Curve(curve.noise, ((shift, 1.0),)), epsilons, removed=True)
        else:
            total += p * -np.expm1(np.minimum(0.0, epsilons))
    return total.clip(0.0, 1.0)


# ---------------------------------------------------------------------------------- the library


def library() -> tuple[ModuleType, ModuleType]:
    """dp-accounting, loaded where a number is made and nowhere else."""
    try:
        return (
            import_module("dp_accounting.pld.privacy_loss_distribution"),
            import_module("dp_accounting.pld.pld_pmf"),
        )
    except ImportError as error:
        raise ConfigError(
            "privacy accounting needs dp-accounting, which is not installed",
            hint=install("dp"),
        ) from error


def special() -> ModuleType:
    """SciPy's special functions, which come with dp-accounting."""
    library()
    return import_module("scipy.special")


def delta_flaw(delta: float, people: int) -> str:
    """The rule that a delta breaks among so many people, if it does; 0: unknown."""
    if not people or delta < 1.0 / people:
        return ""
    return (
        f"delta {delta:g} is not below one over {people:,} people: publishing one person's data "
        "outright would keep it"
    )


def check_people(delta: float, people: int) -> None:
    """Refuse a delta that promises nothing to so many people; 0: unknown."""
    if flaw := delta_flaw(delta, people):
        raise ConfigError(flaw, hint=f"a delta of {0.1 / people:.0e}, or another well below it")
