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

from tessera.errors import ConfigError, MisuseError
from tessera.privacy.dp.integer_noise import GaussianShares, SkellamNoise

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
