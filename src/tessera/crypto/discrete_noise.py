"""Integer noise: discrete Gaussian and Skellam integers, by table look-up, from a key stream.

Noise that is added inside a sum over Z_2^b has to be an integer before it is masked or shared. Two
distributions have accounts: the discrete Gaussian (Canonne, Kamath, Steinke 2020, arXiv
2004.00010), P(k) proportional to exp(-k^2 / (2 sigma^2)), and the Skellam distribution (Agarwal,
Kairouz, Liu 2021, arXiv 2110.04995), the difference of two Poisson variables, whose sums are
Skellam again.

Every sample takes the same steps whatever its value: one word of the stream picks a column of an
alias table (Walker 1977, Vose 1991) and one of the two values in it. No branch depends on the
value; which line of the table is read does, so a neighbour on the same CPU cache is not kept out.

**Distance to the ideal.** Probabilities are multiples of 2^-128: where the upper 64 bits of a draw
do not decide, once in 2^47 or rarer, a second word does. A table is computed with 60 digits and
cut where the tail is below 2^-140. `IntegerNoise.distance` bounds the total variation distance of
one sample; times the number of samples it belongs into delta.

Sample i is a function of (stream, i): a message that is sent again has the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Stream, uniform
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError

Integers = npt.NDArray[np.int64]
Limbs = npt.NDArray[np.uint64]

WORD: Final = Ring(64)
UNITS: Final = 128
"""Probabilities are multiples of 2^-UNITS."""
TAIL: Final = 140
"""Values that are together less likely than 2^-TAIL are left out."""
DIGITS: Final = 60
CHUNK: Final = 1 << 15  # samples at once: words, columns and values stay in the L2 cache
WIDEST_TABLE: Final = 4096.0
"""Standard deviation up to which one table does; wider Gaussians are two samples of tables."""
NARROW: Final = 1024.0
STEP: Final = 256
"""A wide Gaussian is x + STEP * y with x of deviation NARROW."""
WIDEST: Final = 1e6


@dataclass(frozen=True, slots=True)
class AliasTable:
    """Integers -reach .. reach with probabilities in multiples of 2^-128.

    A draw's upper bits pick a column; the rest, read as a fraction of the column, is below its
    threshold (`upper`, then `lower`) for the column's own value and not below for its alias.
    """

    reach: int
    variance: float
    upper: Limbs = field(repr=False)
    lower: Limbs = field(repr=False)
    alias: Integers = field(repr=False)

    @property
    def column_bits(self) -> int:
        return self.upper.size.bit_length() - 1

    def undecided(self, words: Limbs) -> npt.NDArray[np.bool_]:
        """Where a word's fraction equals its column's upper threshold: the lower one decides."""
        column, fraction = self._split(words)
        return np.equal(fraction, self.upper[column])

    def pick(self, words: Limbs, second: Limbs) -> Integers:
        """The values of these draws, of 64 + 64 bits each."""
        column, fraction = self._split(words)
        threshold = self.upper[column]
        own = (fraction < threshold) | ((fraction == threshold) & (second < self.lower[column]))
        return np.where(own, column, self.alias[column]) - self.reach

    def _split(self, words: Limbs) -> tuple[Integers, Limbs]:
        rest = np.uint64(64 - self.column_bits)
        return (words >> rest).astype(np.int64), words & np.uint64((1 << int(rest)) - 1)


@dataclass(frozen=True, slots=True)
class IntegerNoise:
    """A distribution of integers that can be sampled: the sum of `multiple` * table over parts."""

    name: str
    parts: tuple[tuple[int, AliasTable], ...]
    distance: float
    """Total variation distance of one sample from the distribution that `name` says, at most."""

    @property
    def variance(self) -> float:
        return math.fsum(multiple**2 * table.variance for multiple, table in self.parts)

    @property
    def reach(self) -> int:
        """No sample is farther from zero: what a group has to have room for."""
        return sum(multiple * table.reach for multiple, table in self.parts)

    def sample(self, stream: Stream, count: int, *, start: int = 0) -> Integers:
        """Samples start .. start + count: `sample(start=k)` equals `sample()[k:]`."""
        if count < 0 or start < 0:
            raise MisuseError(f"noise: {count} samples from {start} on")
        drawn = np.empty(count, dtype=np.int64)
        width = len(self.parts)
        for begin in range(0, count, CHUNK):
            size = min(CHUNK, count - begin)
            at = (start + begin) * width
            words = uniform(WORD, stream, size * width, start=at).reshape(size, width)
            second = np.zeros_like(words)
            if any(table.undecided(words[:, j]).any() for j, (_, table) in enumerate(self.parts)):
                second = uniform(WORD, stream.redraw(1), size * width, start=at).reshape(
                    size, width
                )
            part = drawn[begin : begin + size]
            part[:] = 0
            for j, (multiple, table) in enumerate(self.parts):
                part += multiple * table.pick(words[:, j], second[:, j])
        return drawn


@lru_cache(maxsize=16)  # a table takes up to a second to make
def discrete_gaussian(deviation: float) -> IntegerNoise:
    """P(k) proportional to exp(-k^2 / (2 deviation^2)) over all integers.

    A wide one is x + 256 y. Given the sum z, the y of the product of both densities is Gaussian of
    deviation s = (deviations of x and y multiplied) / deviation, around a centre that depends on z,
    and by Poisson summation its mass over the integers varies with the centre by a factor of at
    most (1 + d) / (1 - d), d = 2.1 exp(-2 pi^2 s^2): s is above 3.8 here, and d below 2^-400.
    """
    _check("standard deviation", deviation, WIDEST)
    name = f"discrete Gaussian, deviation {deviation:g}"
    if deviation <= WIDEST_TABLE:
        table = _table(_gaussian_weights(deviation))
        return IntegerNoise(name, ((1, table),), _distance(table))
    outer = math.sqrt(deviation**2 - NARROW**2) / STEP
    tables = _table(_gaussian_weights(NARROW)), _table(_gaussian_weights(outer))
    smooth = 10.0 * math.exp(-2.0 * (math.pi * NARROW * outer / deviation) ** 2)
    return IntegerNoise(
        name, ((1, tables[0]), (STEP, tables[1])), sum(map(_distance, tables)) + smooth
    )


@lru_cache(maxsize=16)
def skellam(variance: float) -> IntegerNoise:
    """The difference of two Poisson variables of mean variance / 2 each."""
    _check("variance", variance, WIDEST_TABLE**2)
    table = _table(_skellam_weights(variance / 2.0))
    return IntegerNoise(f"Skellam, variance {variance:g}", ((1, table),), _distance(table))


def _check(what: str, value: float, largest: float) -> None:
    if not 0.0 < value <= largest:  # also refuses nan
        raise ConfigError(
            f"integer noise: a {what} of {value} is not in (0, {largest:g}]",
            hint="choose a coarser step for the values that are rounded to integers",
        )


def _distance(table: AliasTable) -> float:
    """Each probability is off by less than one unit, value 0 by all of them; and the tail."""
    return float(2 * table.reach + 1) * 2.0**-UNITS + 2.0**-TAIL


# ---------------------------------------------------------------------------- probabilities

Weights = list[Decimal]
"""Of 0, 1, 2, ... up to the largest value; the distribution is symmetric."""


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


# ---------------------------------------------------------------------------- alias tables


def _table(weights: Weights) -> AliasTable:
    """Vose's construction over exact integers: every column holds the same number of units."""
    reach = len(weights) - 1
    units = _units(weights)
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
        shares[i] = full
    return AliasTable(
        reach=reach,
        variance=variance,
        upper=np.array([share >> 64 for share in shares], dtype=np.uint64),
        lower=np.array([share & (2**64 - 1) for share in shares], dtype=np.uint64),
        alias=np.array(alias, dtype=np.int64),
    )


def _units(weights: Weights) -> list[int]:
    """Probabilities as integers, 2^128 over both signs; what rounding leaves goes to 0."""
    with localcontext(Context(prec=DIGITS)):
        total = weights[0] + 2 * sum(weights[1:], Decimal(0))
        scale = Decimal(2) ** UNITS / total
        units = [int(weight * scale) for weight in weights]
    units[0] += (1 << UNITS) - units[0] - 2 * sum(units[1:])
    return units
