"""Mechanism: one noisy release, as far as its privacy goes; no numbers are made here.

A clipped sum plus Gaussian noise moves, with one unit more or less, by a multiple of the clip C.
How large a multiple, and how likely, is all that an account needs to know: 1 for certain, 1 with
the probability that the unit was drawn, or a whole distribution where several records of one person
can be drawn. By Choquette-Choo, Ganesh, Steinke, Thakurta 2023 (arXiv 2310.15526, Corollary 4.7)
the scalar shifts dominate vectors of at most these norms, whatever their directions.

Sampling is described as it happened. Poisson sampling is a coin per unit that the observer does not
see; an order or a cohort that follows from a public seed is no sampling, and a batch of fixed size
is not Poisson.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError, MisuseError

# --- integer noise --------------------------------------------------------------------------------
#
# Noise that clients add in shares before their masks, or servers before their shares leave, is an
# integer. In several dimensions a discrete distribution cannot be turned onto one axis as a
# Gaussian can, so there is no privacy loss distribution to compose; there are bounds on its Rényi
# divergences:
#
# - the sum of n discrete Gaussians (Kairouz, Liu, Steinke 2021, arXiv 2102.06387, Theorem 1), which
#   is not a discrete Gaussian but close to one;
# - Skellam noise (Agarwal, Kairouz, Liu 2021, arXiv 2110.04995, Theorem 3.5), whose sums are
#   Skellam.
#
# Divergences of one order add up under composition, and give an epsilon at a delta by the
# conversion of Canonne, Kamath, Steinke 2020 (arXiv 2004.00010, Proposition 12). Orders are
# integers, for which all three hold.


Orders = npt.NDArray[np.float64]

ORDERS: Final[Orders] = np.unique(
    np.concatenate([np.arange(2, 2049), np.geomspace(2048, 2**24, 800).round()])
)
"""Rényi orders that are tried; an epsilon from fewer orders is larger, never too small."""
LEAST_ROUNDED: Final = 2.0
ROUNDED: Final = 1e-3
"""Over the fourth power of its deviation: how far a discrete Gaussian is from a rounded one."""
LEAST_DEVIATION: Final = 0.5
"""Below this a share's discrete Gaussian is too narrow for the bound on sums to say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianShares:
    """The sum of `shares` discrete Gaussians of one deviation each, on `words` integers.

    `moves` is how far one unit moves the integer vector, in L2; of the noise only the honest
    survivors' shares count.
    """

    deviation: float
    shares: int
    moves: float
    words: int

    def __post_init__(self) -> None:
        if not (self.deviation >= LEAST_DEVIATION and math.isfinite(self.deviation)):
            raise ConfigError(
                f"a share's noise of deviation {self.deviation} has no account",
                hint=f"round to smaller steps, so that a share is {LEAST_DEVIATION} or more",
            )
        if self.shares < 1 or self.words < 1:
            raise ConfigError(
                f"{self.shares} shares of noise on {self.words} words protect nothing",
                hint="both are counts from 1 up",
            )
        _check_moves(self.moves)

    @property
    def gap(self) -> float:
        """tau of the theorem: how far the sum is from one discrete Gaussian, per word."""
        rate = -2.0 * (math.pi * self.deviation) ** 2
        return 10.0 * math.fsum(math.exp(rate * k / (k + 1)) for k in range(1, self.shares))

    @property
    def concentrated(self) -> float:
        """The epsilon of the theorem: epsilon^2 / 2 concentrated differential privacy."""
        clean = self.moves / (math.sqrt(self.shares) * self.deviation)
        return min(
            math.sqrt(clean**2 + 0.5 * self.gap * self.words),
            clean + self.gap * math.sqrt(self.words),
        )

    def renyi(self, orders: Orders) -> Orders:
        """A bound on the Rényi divergence of each order."""
        return 0.5 * self.concentrated**2 * orders

    @property
    def rounded(self) -> tuple[float, float]:
        """One share as a continuous Gaussian that is rounded: its noise over `moves`, and how far.

        Integers plus a rounded Gaussian are a Gaussian around them, rounded: whatever holds for the
        continuous noise holds for it. A discrete Gaussian of variance s^2 is one of s^2 - 1/12 that
        is rounded, but for a distance in total variation of 4.9e-4 / s^4 per word: both have the
        same variance, and fourth cumulants that differ by 1/120. `ROUNDED` is above that from a
        deviation of 2 on (compared in 60 digits by the tests).
        """
        if self.shares != 1 or self.deviation < LEAST_ROUNDED:
            raise MisuseError(f"{self.shares} shares of deviation {self.deviation} are not rounded")
        noise = math.sqrt(self.deviation**2 - 1.0 / 12.0) / self.moves
        return noise, self.words * ROUNDED / self.deviation**4

    def grouped(self, size: int) -> GaussianShares:
        """The same release where everything moves by `size` times as much."""
        return replace(self, moves=size * self.moves)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkellamNoise:
    """Skellam noise of this variance on every word of a vector of integers.

    One unit moves the vector by `moves` in L2 and by `steps` in L1.
    """

    variance: float
    moves: float
    steps: float

    def __post_init__(self) -> None:
        if not (self.variance > 0.0 and math.isfinite(self.variance)):
            raise ConfigError(
                f"Skellam noise of variance {self.variance}",
                hint="a variance is above 0",
            )
        _check_moves(self.moves)
        if not self.steps >= self.moves:
            raise MisuseError(f"an L1 norm of {self.steps} is below the L2 norm, {self.moves}")

    @classmethod
    def on(cls, words: int, *, variance: float, moves: float) -> SkellamNoise:
        """For vectors of integers with this L2 norm: the L1 norm follows, by the smaller bound."""
        return cls(variance=variance, moves=moves, steps=min(moves**2, moves * math.sqrt(words)))

    def renyi(self, orders: Orders) -> Orders:
        """A bound on the Rényi divergence of each order."""
        gaussian = orders * self.moves**2 / (2.0 * self.variance)
        first = ((2.0 * orders - 1.0) * self.moves**2 + 6.0 * self.steps) / (4.0 * self.variance**2)
        return gaussian + np.minimum(first, 1.5 * self.steps / self.variance)

    def grouped(self, size: int) -> SkellamNoise:
        """The same release where everything moves by `size` times as much."""
        return replace(self, moves=size * self.moves, steps=size * self.steps)


def epsilon_of(divergences: Orders, delta: float) -> float:
    """The epsilon at this delta of something with these Rényi divergences at `ORDERS`."""
    if not 0.0 < delta < 1.0:
        raise MisuseError(f"integer noise has no epsilon at a delta of {delta}")
    less = np.log1p(-1.0 / ORDERS) + (-math.log(delta) - np.log(ORDERS)) / (ORDERS - 1.0)
    return max(0.0, float((divergences + less).min()))


def _check_moves(moves: float) -> None:
    if not (moves > 0.0 and math.isfinite(moves)):
        raise MisuseError(f"a unit moves a vector by more than 0, not by {moves}")


# --- Gaussian noise -------------------------------------------------------------------------------

Shifts = tuple[tuple[int, float], ...]
"""(multiple of C that the sum moves by, probability), in increasing order."""

NEGLIGIBLE: Final = 1e-20
"""Values of a binomial that are together less likely are left out, and charged to delta."""
LEAST_RATE: Final = 1e-9


class NoAccount(MisuseError):
    """There is no account for this: it is refused and never skipped."""


@dataclass(frozen=True, slots=True)
class GaussianNoise:
    """Gaussian noise of standard deviation `noise` * C on a sum that moves by `shifts`.

    `distance` is how far the noise of one release is from ideal, in total variation; `fails` the
    probability that the sum moves by more. Both are charged to delta.
    """

    noise: float
    shifts: Shifts = ((1, 1.0),)
    distance: float = 0.0
    fails: float = 0.0

    def __post_init__(self) -> None:
        check_noise(self.noise)
        total = math.fsum(p for _, p in self.shifts)
        multiples = [shift for shift, _ in self.shifts]
        if (
            not self.shifts
            or multiples != sorted(set(multiples))
            or multiples[0] < 0
            or any(not 0.0 < p <= 1.0 for _, p in self.shifts)
            or not 1.0 - 1e-9 <= total <= 1.0 + 1e-9
        ):
            raise MisuseError(f"shifts are increasing multiples with probabilities: {self.shifts}")

    @classmethod
    def poisson(cls, noise: float, rate: float) -> GaussianNoise:
        """The unit is in with probability `rate`, by a coin that the observer does not see."""
        return cls.records(noise, rate, of=1, cap=1)

    @classmethod
    def records(cls, noise: float, rate: float, *, of: int, cap: int) -> GaussianNoise:
        """Each of a person's records by a coin of its own, cut to `cap` and not refilled.

        The mixture over Binomial(of, rate) cut at `cap`. Where a person's gradients are added and
        clipped once, the cap is 1.
        """
        check_rate(rate)
        if of < 1 or cap < 1:
            raise ConfigError(
                f"{of} records of a person, at most {cap} in a batch: neither can be below 1",
                hint="both are counts from 1 up",
            )
        return cls(noise, binomial(of, rate, cap))

    @classmethod
    def clients(cls, noise: float, rate: float, *, of: int) -> GaussianNoise:
        """Only the sum over clients is seen, and each of a person's clients draws it or not.

        `noise` is that of the whole sum: of the honest survivors together.
        """
        return cls.records(noise, rate, of=of, cap=of)

    @property
    def sampled(self) -> bool:
        """Whether there is a chance that the unit does not count."""
        return self.shifts[0][0] == 0

    @property
    def tail(self) -> float:
        """At most what the shifts leave out, which is added to delta."""
        return self.fails + (NEGLIGIBLE if len(self.shifts) > 2 else 0.0)

    def scaled(self, factor: int) -> GaussianNoise:
        """The same release where everything moves by `factor` times as much."""
        return replace(
            self,
            shifts=tuple((factor * s, p) for s, p in self.shifts),
            fails=min(1.0, factor * self.fails),
        )

    def grouped(self, size: int) -> GaussianNoise:
        """The same release for `size` such units at once, each with coins of its own."""
        if size == 1:
            return self
        if len(self.shifts) == 1:
            return self.scaled(size)
        if [shift for shift, _ in self.shifts] == [0, 1]:
            shifts = binomial(size, self.shifts[1][1], size)
            return replace(self, shifts=shifts, fails=min(1.0, size * self.fails))
        one = np.zeros(self.shifts[-1][0] + 1)
        for shift, p in self.shifts:
            one[shift] = p
        total = np.ones(1)
        for _ in range(size):
            total = np.convolve(total, one)
        shifts = without_negligible(total.tolist())
        return replace(self, shifts=shifts, fails=min(1.0, size * self.fails))


@dataclass(frozen=True, slots=True)
class FixedSizeNoise:
    """Gaussian noise on the sum of a batch of fixed size, drawn in secret without replacement.

    Only `Adjacency.REPLACE` has an account, as a batch of fixed size never loses a unit: it moves
    by 2C. `rate` is the batch over all there are.
    """

    noise: float
    rate: float
    distance: float = 0.0

    def __post_init__(self) -> None:
        check_noise(self.noise)
        check_rate(self.rate)

    def grouped(self, size: int) -> GaussianNoise:
        """For a group without amplification: with the batch known, at most all of it moves."""
        return GaussianNoise(self.noise, ((size, 1.0),), distance=self.distance)


@dataclass(frozen=True, slots=True)
class PureLevel:
    """A release whose epsilon is known already, such as randomised answers; delta is 0."""

    epsilon: float

    def __post_init__(self) -> None:
        if not self.epsilon >= 0.0:
            raise MisuseError(f"a level is an epsilon of 0 or more, not {self.epsilon}")


@dataclass(frozen=True, slots=True)
class Unseen:
    """What an observer does not get to see at all."""


IntegerMechanism = GaussianShares | SkellamNoise
Mechanism = GaussianNoise | FixedSizeNoise | IntegerMechanism | PureLevel | Unseen
Parts = tuple[tuple[Mechanism, int], ...]
"""Mechanisms and how often each was applied."""


def check_noise(noise: float) -> None:
    if not (noise > 0.0 and math.isfinite(noise)):
        raise ConfigError(
            f"noise {noise} is not a noise multiplier",
            hint="it is the noise's standard deviation over the clip, and above 0",
        )


def check_rate(rate: float) -> None:
    if not LEAST_RATE <= rate <= 1.0:
        raise ConfigError(
            f"sampling rate {rate} is not a probability from {LEAST_RATE:g} to 1",
            hint="it is the expected share of all units that a batch holds",
        )


def binomial(trials: int, rate: float, cap: int) -> Shifts:
    """Binomial(trials, rate) cut at `cap`, without values of negligible probability."""
    cap = min(cap, trials)
    if rate == 1.0:
        return ((cap, 1.0),)
    if trials == 1:
        return ((0, 1.0 - rate), (1, rate))
    log_odds = math.log(rate) - math.log1p(-rate)
    probabilities: list[float] = []
    log_p = trials * math.log1p(-rate)
    for k in range(trials + 1):
        probabilities.append(math.exp(log_p))
        log_p += log_odds + (math.log((trials - k) / (k + 1)) if k < trials else 0.0)
    return without_negligible([*probabilities[:cap], math.fsum(probabilities[cap:])])


def without_negligible(probabilities: list[float]) -> Shifts:
    """(value, probability) of those that are likely enough, whose probabilities sum to 1."""
    least = NEGLIGIBLE / len(probabilities)
    kept = [(k, p) for k, p in enumerate(probabilities) if p >= least]
    total = math.fsum(p for _, p in kept)  # 1 but for rounding
    return tuple((k, p / total) for k, p in kept)
