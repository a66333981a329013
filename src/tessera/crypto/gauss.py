"""Gaussian noise as integers, from a key stream: how it is drawn, and how far from ideal it is.

The noise is a discrete Gaussian: an integer z with probability proportional to exp(-z^2 / 2 S^2),
S = `DEVIATION`, about 30,640. Whoever adds it rounds what is protected to integers first, in units
of the wanted deviation over S. So the sum is exact, and no bit of a float says where the noise was
added (Mironov 2012, "On significance of the least significant bits"; Canonne, Kamath, Steinke 2020,
arXiv 2004.00010, for discrete noise). At this S its privacy loss is that of the continuous one up
to a relative 1 / S^2, about 1e-9.

How: y from a table of the discrete Gaussian of deviation 222, by Walker's alias method, one 64-bit
word each; z = y0 + 138 y1. Such a sum is again a discrete Gaussian (Micciancio, Walter 2017,
"Gaussian sampling over the integers", section 4): given z, the number of ways to reach it is a sum
of a Gaussian of deviation 222 / 138 over the integers, constant but for a factor 1 +- 2^-72.
`owed` draws what k such integers add up to, in one: y0 + c1 y1 + c2 y2 + c3 y3 with coefficients
whose squares add up to k (1 + 138^2), exactly.

Distance: the table's probabilities are multiples of 2^-64, each within 2^-65, and end at 9.2
deviations (2^-65 beyond); its total variation distance is 2^-55.0 (a test adds it up). An integer
of noise is within 2^-54 of ideal, what is owed within 2^-52. A training that draws 2^27 of them
(64,327 words, 2,000 steps) so adds 2^-27 = 7.5e-9, times 1 + e^epsilon, to delta at most. The words
are AES-128 in counter mode.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache
from math import isqrt, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.kernel.noise import COLUMNS, REST_BITS, AliasEntries
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError

BASE: Final = 222
"""Deviation of the table's discrete Gaussian."""
STRETCH: Final = 138
"""The coefficient of the second draw of an integer."""
SQUARES: Final = 1 + STRETCH**2
DEVIATION: Final = BASE * sqrt(SQUARES)
"""Deviation of one integer of noise."""
LARGEST: Final = (1 + STRETCH) * COLUMNS // 2
"""No integer of noise is larger in size."""
WORDS_AT_ONCE: Final = 1 << 15
"""Of key stream: 256 kB, which stay in the second-level cache."""

Integers = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


@cache
def table() -> AliasEntries:
    """The discrete Gaussian of deviation `BASE`, in multiples of 2^-64."""
    half, total = COLUMNS // 2, 1 << 64
    with localcontext() as context:
        context.prec = 50
        scale = Decimal(2 * BASE * BASE)
        weights = [(-Decimal(x * x) / scale).exp() for x in range(half + 1)]
        whole = weights[0] + 2 * sum(weights[1:])
        units = [int((w / whole * total).to_integral_value()) for w in weights]
    mass = [units[abs(column - half)] for column in range(COLUMNS)]
    mass[half] += total - sum(mass)  # what rounding left, to the value 0
    return _alias(mass)


def _alias(mass: list[int]) -> AliasEntries:
    """Vose's table, in integers: every column holds 2^52 units of two values at most."""
    room = 1 << REST_BITS
    thresholds = np.zeros(COLUMNS, dtype=np.uint64)
    others = np.arange(COLUMNS)  # a column that is all its own shares with itself
    left = list(mass)
    small = [c for c in range(COLUMNS) if left[c] < room]
    large = [c for c in range(COLUMNS) if left[c] >= room]
    while small:
        low, high = small.pop(), large[-1]
        thresholds[low] = left[low]
        others[low] = high
        left[high] -= room - left[low]
        if left[high] < room:
            small.append(large.pop())
    return AliasEntries.of(thresholds, others)


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


class WordReader:
    """The words of one stream, in order; none is read twice."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._block = 0

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next words; a block has two, and one that was begun is not gone on with."""
        words = np.empty(count, dtype=np.uint64)
        kernel.active().keystream(
            self._stream.key, self._stream.nonce, self._block, words.view(np.uint8)
        )
        self._block += -(-count // 2)
        return words


class Gaussian(WordReader):
    """Noise out of one stream, integer after integer."""

    def draw(self, count: int) -> Integers:
        """The next `count` integers."""
        out = np.empty(count, dtype=np.int32)
        by = np.array([(1, STRETCH)], dtype=np.int32)
        at_once = WORDS_AT_ONCE // 2
        for begin in range(0, count, at_once):
            part = out[begin : begin + at_once]
            words = self.words(2 * part.size)
            part[:] = kernel.active().alias_sums(words, by, part.size, table())[0]
        return out

    def owed(self, steps: Counts, width: int) -> Integers:
        """For each row what its number of steps adds up to, `width` integers; 0 steps are zeros."""
        out = np.zeros((len(steps), width), dtype=np.int32)
        due = np.flatnonzero(steps)
        if not out[due].size:  # nothing owes, or rows have no values
            return out
        distinct, which = np.unique(steps[due], return_inverse=True)
        terms = np.array([len(coefficients(int(k))) for k in distinct])
        for many in np.unique(terms):
            by = np.zeros((distinct.size, many), dtype=np.int32)
            for at in np.flatnonzero(terms == many):
                by[at] = coefficients(int(distinct[at]))
            rows = due[terms[which] == many]
            chosen = by[which[terms[which] == many]]
            at_once = max(1, WORDS_AT_ONCE // (int(many) * width))
            for begin in range(0, rows.size, at_once):
                some = slice(begin, begin + at_once)
                words = self.words(int(many) * width * len(rows[some]))
                out[rows[some]] = kernel.active().alias_sums(words, chosen[some], width, table())
        return out


def dense_noise(secret: Secret) -> Gaussian:
    """Noise on a model's dense part, of whoever has this secret for one round."""
    return Gaussian(Stream.of(secret, Label.DENSE_NOISE))


def row_noise(secret: Secret, table: str) -> Gaussian:
    """The same on the rows of a table."""
    return Gaussian(Stream.of(secret, Label.ROW_NOISE, table))


class CoinStream(WordReader):
    """Independent coins out of one stream; its words also serve to order or cut by chance."""

    def heads(self, count: int, probability: float) -> npt.NDArray[np.bool_]:
        """Which of `count` coins fall on a side of this probability, rounded down to 2^-64."""
        words = self.words(count)
        if probability >= 1.0:
            return np.ones(count, dtype=np.bool_)
        return words < np.uint64(int(probability * 2**64))

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Numbers from [0, 1), multiples of 2^-53."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
