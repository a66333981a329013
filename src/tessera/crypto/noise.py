"""Noise: integers from a key stream, by table look-up; how far they are from ideal.

Whatever noise is added to is an integer first, so that the sum is exact and no bit of a float says
where the noise was added (Mironov 2012, "On significance of the least significant bits").

- `IntegerNoise` has any deviation: `discrete_gaussian`, `skellam`. For sums over Z_2^b, where noise
  is added before masks or shares.
- `Gaussian` has one deviation, `DEVIATION`, about 30,640, for training: whoever adds it chooses the
  unit of his integers. `owed` draws what k such integers add up to, in one.

A wide discrete Gaussian is x + c y of two narrow ones, and what k integers add up to is a sum of
four with coefficients whose squares add up. Such a sum is again a discrete Gaussian (Micciancio,
Walter 2017, "Gaussian sampling over the integers", section 4): given z, the number of ways to reach
it is a sum of a Gaussian over the integers, whose mass hardly varies with its centre.

**Distance.** `IntegerNoise.distance` and `DISTANCE` bound the total variation distance of one
integer; `added_delta` is what they add to delta. A training that draws 2^27 integers adds 3e-11,
times 1 + e^epsilon; noise inside a sum adds nothing that a float can hold beside its delta.

Time does not tell the value: every integer takes the same steps, and no branch depends on it. Which
line of a table is read does, so a neighbour on the same CPU cache is not kept out. The words are
AES-128 in counter mode: noise is a function of the stream, and a message that is sent again has the
same noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Context, Decimal, localcontext
from functools import cache, lru_cache
from math import isqrt, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.group import Words
from tessera.crypto.kernel.noise import AliasEntries
from tessera.crypto.prg import Label, Stream, WordReader, uniform
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError

# --- alias table ----------------------------------------------------------------------------------
#
# Alias tables: distributions of integers, of which one word of a key stream draws one integer.
#
# Two distributions have accounts as noise inside a sum: the discrete Gaussian (Canonne, Kamath,
# Steinke 2020, arXiv 2004.00010), P(k) proportional to exp(-k^2 / (2 sigma^2)), and the Skellam
# distribution (Agarwal, Kairouz, Liu 2021, arXiv 2110.04995), the difference of two Poisson
# variables. One word picks a column of the table (Walker 1977, Vose 1991) and one of the two
# values in it; no branch depends on the value.
#
# **Distance to the ideal.** Probabilities are multiples of 2^-128: where the 64 bits of a word do
# not decide, once in 2^47 or rarer, a second word does. They are computed with 60 digits and cut
# where the tail is below 2^-140, or where the caller wants a table to end. `AliasTable.distance`
# bounds the total variation distance of one draw.


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


# --- noise ----------------------------------------------------------------------------------------

Integers = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]

WORD: Final = Ring(64)
CHUNK: Final = 1 << 16
"""Integers at once: more would not stay in the second-level cache, fewer are mostly calls."""
WIDEST_TABLE: Final = 4096.0
"""Standard deviation up to which one table does; wider Gaussians are two samples of tables."""
NARROW: Final = 2048.0
ONCE: Final = np.ones((1, 1), dtype=np.int32)
STEP: Final = 900
"""A wide Gaussian is x + STEP * y with x of deviation NARROW."""
WIDEST: Final = 2.0**35
"""Four samples of tables at most; no sample of it has more than 40 bits."""


def added_delta(distance: float, integers: int, epsilon: float) -> float:
    """What so many integers at this distance add to the delta of an epsilon.

    Both worlds are within t = integers * distance of the ideal, which costs t (1 + e^epsilon).
    """
    return integers * distance * (1.0 + math.exp(min(epsilon, 700.0)))


# ------------------------------------------------------------------------- any deviation


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
        """No sample is farther from zero."""
        return sum(multiple * table.reach for multiple, table in self.parts)

    def sample(self, stream: Stream, count: int, *, start: int = 0) -> Integers:
        """Samples start .. start + count: `sample(start=k)` equals `sample()[k:]`."""
        if count < 0 or start < 0:
            raise MisuseError(f"noise: {count} samples from {start} on")
        drawn = np.zeros(count, dtype=np.int64)
        for begin in range(0, count, CHUNK):
            part = drawn[begin : begin + CHUNK]
            self._add(stream, start + begin, part)
        return drawn

    def _add(self, stream: Stream, start: int, to: Integers) -> None:
        width = len(self.parts)

        def words(of: Stream) -> npt.NDArray[np.uint64]:
            read = uniform(WORD, of, to.size * width, start=start * width)
            return np.ascontiguousarray(read.reshape(to.size, width).T)

        first = words(stream)
        for which, (multiple, table) in enumerate(self.parts):
            drawn = kernel.active().alias_sums(
                first[which],
                ONCE,
                to.size,
                table.entries,
                lambda which=which: words(stream.redraw(1))[which],  # type: ignore[misc]
            )[0]
            wide = drawn.astype(np.int64)
            if multiple != 1:
                wide *= multiple
            to += wide


@lru_cache(maxsize=16)  # a table takes up to a second to make
def discrete_gaussian(deviation: float) -> IntegerNoise:
    """P(k) proportional to exp(-k^2 / (2 deviation^2)) over all integers.

    A wide one is x + 900 y, where y may be wide, too. Given the sum z, the y of the product of both
    densities is Gaussian of deviation s = (deviations of x and y multiplied) / deviation, around a
    centre that depends on z, and by Poisson summation its mass over the integers varies with the
    centre by a factor of at most (1 + d) / (1 - d), d = 2.1 exp(-2 pi^2 s^2): s is above 1.9 here,
    and d below 2^-100.
    """
    _check("standard deviation", deviation, WIDEST)
    name = f"discrete Gaussian, deviation {deviation:g}"
    if deviation <= WIDEST_TABLE:
        table = gaussian_table(deviation)
        return IntegerNoise(name, ((1, table),), table.distance)
    inner, width = gaussian_table(NARROW), math.sqrt(deviation**2 - NARROW**2) / STEP
    outer = discrete_gaussian(width)
    smooth = 10.0 * math.exp(-2.0 * (math.pi * NARROW * width / deviation) ** 2)
    distance = inner.distance + outer.distance + smooth
    parts = ((1, inner), *((STEP * multiple, table) for multiple, table in outer.parts))
    return IntegerNoise(name, parts, distance)


def add_noise(ring: Ring, deviation: float, words: Words, stream: Stream) -> Words:
    """Words of the ring with one source's discrete Gaussian of this deviation on each."""
    drawn = discrete_gaussian(deviation).sample(stream, words.size).reshape(words.shape)
    return ring.add(words, ring.from_ints(drawn))


@lru_cache(maxsize=16)
def skellam(variance: float) -> IntegerNoise:
    """The difference of two Poisson variables of mean variance / 2 each; sums are Skellam, too."""
    _check("variance", variance, WIDEST_TABLE**2)
    table = skellam_table(variance)
    return IntegerNoise(f"Skellam, variance {variance:g}", ((1, table),), table.distance)


def _check(what: str, value: float, largest: float) -> None:
    if not 0.0 < value <= largest:  # also refuses nan
        raise ConfigError(
            f"integer noise: a {what} of {value} is not in (0, {largest:g}]",
            hint="choose a coarser step for the values that are rounded to integers",
        )


# ------------------------------------------------------------------------- one deviation

BASE: Final = 222
"""Deviation of the table: y of it, z = y0 + STRETCH y1."""
STRETCH: Final = 138
SQUARES: Final = 1 + STRETCH**2
DEVIATION: Final = BASE * sqrt(SQUARES)
"""Of one integer. Its privacy loss is that of continuous noise but for 1 / DEVIATION^2."""
ENDS: Final = 2047
"""Largest value of the table, at 9.2 deviations: 4,096 columns stay in the first-level cache."""
LARGEST: Final = (1 + STRETCH) * ENDS
"""No integer of noise is larger in size."""
DISTANCE: Final = 2.0**-62
"""Of one integer, `owed` ones too: four draws of the table at 2^-64.8, and sums to 2^-71."""


@cache
def table() -> AliasTable:
    """The discrete Gaussian of deviation `BASE`."""
    return gaussian_table(BASE, ends=ENDS)


@cache
def coefficients(k: int) -> tuple[int, ...]:
    """Of what k integers add up to: a 1 first, and squares that add up to k * SQUARES.

    Each is small enough for those before it, so that no value is left out or favoured: at most
    STRETCH times the root of the sum of their squares. Three squares do not reach every number
    (Legendre): the others are one integer and the rest.
    """
    if k < 1:
        raise MisuseError(f"noise of {k} steps")
    if k == 1:
        return 1, STRETCH
    rest = k * SQUARES - 1
    while rest % 4 == 0:
        rest //= 4
    if rest % 8 == 7:
        return 1, STRETCH, *coefficients(k - 1)
    for first in range(STRETCH, 1, -1):
        rest = k * SQUARES - 1 - first * first
        for second in range(isqrt(rest // 2), 0, -1):
            third = isqrt(rest - second * second)
            if second * second + third * third == rest and _smooth(first, second, third):
                return 1, first, second, third
    raise MisuseError(f"noise of {k} steps is no sum of squares that are small enough")


def _smooth(*after: int) -> bool:
    before = 1
    for coefficient in after:
        if coefficient**2 > STRETCH**2 * before:
            return False
        before += coefficient**2
    return True


class Gaussian(WordReader):
    """Noise out of one stream, integer after integer."""

    def draw(self, count: int) -> Narrow:
        """The next `count` integers."""
        out = np.empty(count, dtype=np.int32)
        by = np.array([(1, STRETCH)], dtype=np.int32)
        at_once = CHUNK // 2
        for begin in range(0, count, at_once):
            part = out[begin : begin + at_once]
            part[:] = self._sums(by, part.size)[0]
        return out

    def owed(self, steps: npt.NDArray[np.int64], width: int) -> Narrow:
        """For each row what its number of steps adds up to, `width` integers; 0 steps are zeros."""
        out = np.zeros((len(steps), width), dtype=np.int32)
        due = np.flatnonzero(steps)
        if not out[due].size:  # no noise is due, or rows have no values
            return out
        distinct, which = np.unique(steps[due], return_inverse=True)
        terms = np.array([len(coefficients(int(k))) for k in distinct])
        for many in np.unique(terms):
            by = np.zeros((distinct.size, many), dtype=np.int32)
            for at in np.flatnonzero(terms == many):
                by[at] = coefficients(int(distinct[at]))
            rows = due[terms[which] == many]
            chosen = by[which[terms[which] == many]]
            at_once = max(1, CHUNK // (int(many) * width))
            for begin in range(0, rows.size, at_once):
                some = slice(begin, begin + at_once)
                out[rows[some]] = self._sums(np.ascontiguousarray(chosen[some]), width)
        return out

    def _sums(self, by: Narrow, width: int) -> Narrow:
        """As many rows as coefficients, of this width."""
        at = self.block
        return kernel.active().alias_sums(
            self.words(by.size * width),
            by,
            width,
            table().entries,
            lambda: self.second_words(at, by.size * width),
        )


def dense_noise(secret: Secret) -> Gaussian:
    """Noise on a model's dense part, of whoever has this secret for one round."""
    return Gaussian(Stream.of(secret, Label.DENSE_NOISE))


def row_noise(secret: Secret, table: str) -> Gaussian:
    """The same on the rows of a table."""
    return Gaussian(Stream.of(secret, Label.ROW_NOISE, table))
