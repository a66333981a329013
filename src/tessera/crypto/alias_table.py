"""Alias tables: distributions of integers, of which one word of a key stream draws one integer.

Two distributions have accounts as noise inside a sum: the discrete Gaussian (Canonne, Kamath,
Steinke 2020, arXiv 2004.00010), P(k) proportional to exp(-k^2 / (2 sigma^2)), and the Skellam
distribution (Agarwal, Kairouz, Liu 2021, arXiv 2110.04995), the difference of two Poisson
variables. One word picks a column of the table (Walker 1977, Vose 1991) and one of the two values
in it; no branch depends on the value.

**Distance to the ideal.** Probabilities are multiples of 2^-128: where the 64 bits of a word do not
decide, once in 2^47 or rarer, a second word does. They are computed with 60 digits and cut where
the tail is below 2^-140, or where the caller wants a table to end. `AliasTable.distance` bounds the
total variation distance of one draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Context, Decimal, localcontext
from typing import Final

import numpy as np

from tessera.crypto.kernel.noise import AliasEntries

UNITS: Final = 128
"""Probabilities are multiples of 2^-UNITS."""
TAIL: Final = 140
"""Values that are together less likely than 2^-TAIL are left out."""
DIGITS: Final = 60

Weights = list[Decimal]
"""Of 0, 1, 2, ... up to the largest value; the distribution is symmetric."""


@dataclass(frozen=True, slots=True)
class AliasTable:
    """A symmetric distribution of integers, and how far it is from what it stands for."""

    entries: AliasEntries = field(repr=False)
    variance: float
    distance: float

    @property
    def reach(self) -> int:
        """No value is farther from zero."""
        return self.entries.reach


def gaussian_table(deviation: float, *, ends: int | None = None) -> AliasTable:
    """The discrete Gaussian of this deviation; `ends`: with values up to this size only."""
    return _table(_gaussian_weights(deviation), ends)


def skellam_table(variance: float) -> AliasTable:
    """The difference of two Poisson variables of mean variance / 2 each."""
    return _table(_skellam_weights(variance / 2.0))


# ---------------------------------------------------------------------------- probabilities


def _gaussian_weights(deviation: float) -> Weights:
    """exp(-k^2 / (2 s^2)): each from the one before by a ratio that itself falls geometrically."""
    reach = max(1, math.ceil(deviation * math.sqrt(2.0 * TAIL * math.log(2.0))))
    with localcontext(Context(prec=DIGITS)):
        fall = (-1 / Decimal(deviation) ** 2).exp()
        ratio = (-1 / (2 * Decimal(deviation) ** 2)).exp()
        weights = [Decimal(1)]
        for _ in range(reach):
            weights.append(weights[-1] * ratio)
            ratio *= fall
    return weights


def _skellam_weights(mean: float) -> Weights:
    """I_k(2 mean) by Miller's backward recurrence, I_(k-1) = I_(k+1) + (k / mean) I_k."""
    reach = _first(lambda k: _log_skellam_tail(k, mean) < -TAIL * math.log(2.0))
    begin = _first(lambda k: _log_skellam_tail(k, mean) < -3.0 * TAIL * math.log(2.0))
    with localcontext(Context(prec=DIGITS)):
        above, here, weights = Decimal(0), Decimal(1), []
        for k in range(begin, 0, -1):
            above, here = here, above + Decimal(k) / Decimal(mean) * here
            weights.append(here)
    return weights[::-1][: reach + 1]


def _log_skellam_tail(k: int, mean: float) -> float:
    """Chernoff's bound on ln P(X >= k), doubled for both tails."""
    t = math.asinh(k / (2.0 * mean))
    return math.log(2.0) + 2.0 * mean * (math.cosh(t) - 1.0) - t * k


def _first(holds: Callable[[int], bool]) -> int:
    """The smallest k >= 1 with a property that all larger ones have too."""
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# ---------------------------------------------------------------------------- columns


def _table(weights: Weights, ends: int | None = None) -> AliasTable:
    """Vose's construction over exact integers: every column holds the same number of units."""
    reach = len(weights) - 1 if ends is None else min(ends, len(weights) - 1)
    units, cut = _units(weights, reach)
    shares = units[:0:-1] + units  # values -reach .. reach
    variance = 2.0 * math.fsum(k * k * (u / 2.0**UNITS) for k, u in enumerate(units))
    columns = 1 << max(1, (len(shares) - 1).bit_length())
    shares += [0] * (columns - len(shares))
    full = (1 << UNITS) // columns
    alias = list(range(columns))
    small = [i for i, share in enumerate(shares) if share < full]
    large = [i for i, share in enumerate(shares) if share >= full]
    while small:
        poor, rich = small.pop(), large[-1]
        alias[poor] = rich
        shares[rich] -= full - shares[poor]
        if shares[rich] < full:
            small.append(large.pop())
    for i in large:
        shares[i] = 0  # all of it is its own, by way of the alias: a full share has a bit too many
    entries = AliasEntries.of(
        np.array([share >> 64 for share in shares], dtype=np.uint64),
        np.array([share & (2**64 - 1) for share in shares], dtype=np.uint64),
        np.array(alias, dtype=np.int64),
        reach,
    )
    # Each probability is off by less than one unit, value 0 by all of them; and both tails.
    distance = float(2 * reach + 1) * 2.0**-UNITS + 2.0**-TAIL + cut
    return AliasTable(entries, variance, distance)


def _units(weights: Weights, reach: int) -> tuple[list[int], float]:
    """Probabilities up to `reach` as integers, 2^128 over both signs; what is beyond, rounded up.

    What cutting and rounding leave goes to 0.
    """
    with localcontext(Context(prec=DIGITS)):
        total = weights[0] + 2 * sum(weights[1:], Decimal(0))
        beyond = 2 * sum(weights[reach + 1 :], Decimal(0)) / total
        scale = Decimal(2) ** UNITS / total
        units = [int(weight * scale) for weight in weights[: reach + 1]]
    units[0] += (1 << UNITS) - units[0] - 2 * sum(units[1:])
    return units, float(beyond) * (1.0 + 1e-12)
