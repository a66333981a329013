"""Integer noise, as far as its privacy goes: bounds on Rényi divergences, and what they give.

Noise that clients add in shares before their masks, or servers before their shares leave, is an
integer. In several dimensions a discrete distribution cannot be turned onto one axis as a Gaussian
can, so there is no privacy loss distribution to compose; there are bounds on its Rényi divergences:

- the sum of n discrete Gaussians (Kairouz, Liu, Steinke 2021, arXiv 2102.06387, Theorem 1), which
  is not a discrete Gaussian but close to one;
- Skellam noise (Agarwal, Kairouz, Liu 2021, arXiv 2110.04995, Theorem 3.5), whose sums are Skellam.

Divergences of one order add up under composition, and give an epsilon at a delta by the conversion
of Canonne, Kamath, Steinke 2020 (arXiv 2004.00010, Proposition 12). Orders are integers, for which
all three hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError, MisuseError

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
                f"Skellam noise of variance {self.variance} is none",
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
