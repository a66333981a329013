"""Noise that is correlated over rounds: the coefficients by which each round's noise is mixed.

A training adds y = C^-1 z to its sums, where z has one independent integer for every word and
round. The inverse is banded (Kalinin, McKenna, Upadhyay, Lampert 2025, arXiv 2505.12128): y_t is a
fixed combination of the last few z, so that no noise is stored and a round's can be drawn again.

z is a discrete Gaussian on a grid of 2^-GRID ring units. The part of earlier rounds is a sum in
fixed point that is rounded to the same grid before z_t is added, so that y_t is an integer of the
grid whatever came before: rounded at the end only, sums over different pasts would lie on different
sets of numbers, and tell them apart. What is added to a word of the ring is floor(y + 1/2). All of
it is integer arithmetic without overflow: whoever has the secrets computes the same bits.

Rows are addressed by their ids: a row's z in a round depends on the round's secret, the table, the
id and the width, and not on which other rows are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Words
from tessera.crypto.noise import IntegerNoise, Integers, discrete_gaussian
from tessera.crypto.prg import Label, Stream
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError

FRACTION: Final = 24
"""Coefficients are integers over 2^FRACTION, the same for the account and for the noise."""
GRID: Final = 15
"""z and y are multiples of 2^-GRID ring units."""
CHUNK: Final = 1 << 16
"""Integers at once: they stay in the second-level cache, and take no memory beside the words."""
GAP: Final = 128
"""Rows that are drawn and left out are cheaper than another call, up to so many in a row."""

Ids = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BandedInverse:
    """C^-1 of a training: y_t = z_t + r_1 z_(t-1) + ... + r_(p-1) z_(t-p+1).

    `terms` has r_1 .. r_(p-1) over 2^FRACTION; none of them is independent noise.
    """

    terms: tuple[int, ...] = ()

    @property
    def draws(self) -> int:
        """How many rounds' noise one round's sum has: p."""
        return 1 + len(self.terms)


INDEPENDENT: Final = BandedInverse()


def noise_streams(secrets: Sequence[Secret], at: int, sender: str, part: int | str) -> list[Stream]:
    """Of round `at` and those before it, newest first, each under the secret of its own round."""
    return [
        Stream.of(secret, Label.CORRELATED_NOISE, at - back, sender, part)
        for back, secret in enumerate(secrets)
    ]


@dataclass(frozen=True, slots=True)
class CorrelatedNoise:
    """y of one round. `source` draws z in units of the grid."""

    inverse: BandedInverse
    source: IntegerNoise

    def __post_init__(self) -> None:
        most = sum(map(abs, self.inverse.terms)) * self.source.reach + (1 << (FRACTION - 1))
        if most >> 63 or self.source.reach + (most >> FRACTION) >= 1 << 62:
            raise ConfigError(
                f"correlated noise: {self.source.name} on a grid of 2^-{GRID} has sums of more "
                "than 63 bits",
                hint="lower levels in [update]: the clip is half as many integers",
            )

    @property
    def distance(self) -> float:
        """Total variation distance of one z from a discrete Gaussian, at most."""
        return self.source.distance

    def sample(self, streams: Sequence[Stream], count: int, *, start: int = 0) -> Integers:
        """y of so many integers from `start` on, in units of the grid.

        `streams` are this round's and those of the rounds before it; before the first round there
        is none.
        """
        own, past = streams[0], streams[1:]
        drawn = self.source.sample(own, count, start=start)
        if past:
            total = np.full(count, 1 << (FRACTION - 1), dtype=np.int64)
            for term, stream in zip(self.inverse.terms, past, strict=False):
                z = self.source.sample(stream, count, start=start)
                z *= term
                total += z
            total >>= FRACTION
            drawn += total
        return drawn

    def add(
        self, ring: Ring, words: Words, streams: Sequence[Stream], rows: Ids | None = None
    ) -> Words:
        """Words of the ring with floor(y + 1/2) on each.

        The first axis has rows: those with these ascending ids, or all from 0 on.
        """
        if not 1 <= len(streams) <= self.inverse.draws:
            raise MisuseError(f"correlated noise of {len(streams)} rounds")
        if ring.limbs:
            raise MisuseError(f"no noise in {ring.name}")
        found = np.array(words, dtype=ring.dtype, order="C")
        width = found[:1].size
        if not width:
            return found
        for part, first, places in _windows(len(found), rows, max(1, CHUNK // width)):
            span = int(places[-1]) + 1 if places is not None else part.stop - part.start
            y = self.sample(streams, span * width, start=first * width)
            y += 1 << (GRID - 1)
            y >>= GRID
            if places is not None:
                y = y.reshape(span, width)[places]
            # A cast between integers is a reduction modulo the stored width.
            found[part] += y.astype(ring.dtype).reshape(found[part].shape)
        ring.reduce(found)
        return found


Window = tuple[slice, int, npt.NDArray[np.int64] | None]


def _windows(count: int, rows: Ids | None, at_once: int) -> Iterator[Window]:
    """Places of an array, the row that drawing begins at, and which of the rows from there on they
    are; None: all."""
    if rows is None:
        for begin in range(0, count, at_once):
            yield slice(begin, min(count, begin + at_once)), begin, None
        return
    if len(rows) != count:
        raise MisuseError(f"correlated noise: {len(rows)} ids for {count} rows")
    ids = rows.astype(np.int64)
    steps = np.diff(ids)
    if (steps <= 0).any() or (count and ids[0] < 0):
        raise MisuseError("correlated noise: ids of rows ascend")
    bounds = [0, *(np.flatnonzero(steps > GAP) + 1).tolist(), count]
    for low, high in pairwise(bounds):
        begin = low
        while begin < high:
            first = int(ids[begin])
            end = begin + int(np.searchsorted(ids[begin:high], first + at_once))
            dense = int(ids[end - 1]) - first == end - 1 - begin
            yield slice(begin, end), first, None if dense else ids[begin:end] - first
            begin = end


@lru_cache(maxsize=16)
def correlated_noise(inverse: BandedInverse, deviation: float) -> CorrelatedNoise:
    """Where z has this deviation, in ring units."""
    return CorrelatedNoise(inverse, discrete_gaussian(deviation * 2.0**GRID))
