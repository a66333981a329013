"""Floats <-> group words: signed levels, stochastic rounding, and the room a cohort's sum needs.

A value in [-clip, clip] becomes one of `levels` integers, zero among them, so that a row nobody
trained adds exactly nothing. Rounding goes up with the probability that makes it right on average
(Niu et al. 2020, long version, VI); its random bits come from a cryptographic stream like every
other secret of a client, because they decide what the server sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Stream, uniform
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """`levels` values from -clip to clip, and counts up to `max_count`, in one ring."""

    levels: int
    clip: float
    max_count: int

    def __post_init__(self) -> None:
        if not 3 <= self.levels <= 2**24:
            raise ConfigError(f"update: levels = {self.levels}", hint="levels is 3 to 2^24")
        if not 0.0 < self.clip < float("inf"):
            raise ConfigError(f"update: clip = {self.clip}", hint="clip is above 0, and finite")
        if not 1 <= self.max_count < 2**31:
            raise ConfigError(
                f"update: max_count = {self.max_count}", hint="max_count is 1 to 2^31 - 1"
            )

    @property
    def top(self) -> int:
        """The integer that stands for `clip`."""
        return (self.levels - 1) // 2

    def ring(self, cohort: int) -> Ring:
        """The narrowest ring in which no sum of a cohort wraps: half of it is for negatives."""
        largest = cohort * max(self.top, self.max_count)
        return Ring(max(8, largest.bit_length() + 1))

    def encode(self, values: Floats, ring: Ring, coins: Stream) -> npt.NDArray[Any]:
        """Rounded at random to a level above or below; `coins` is a stream for this array alone."""
        if not np.isfinite(values).all():
            raise MisuseError("update: a value that is not finite cannot be quantised")
        scaled = np.clip(values, -self.clip, self.clip) * (self.top / self.clip)
        words = uniform(Ring(32), coins, values.size).reshape(values.shape)
        rounded = np.floor(scaled + words.astype(np.float64) * 2.0**-32).astype(np.int64)
        return ring.from_ints(np.clip(rounded, -self.top, self.top).reshape(-1)).reshape(
            values.shape
        )

    def encode_counts(self, counts: npt.NDArray[Any], ring: Ring) -> npt.NDArray[Any]:
        """Counts as they are, cut at `max_count`."""
        if (counts < 0).any():
            raise MisuseError("update: a count is negative")
        cut = np.minimum(counts, self.max_count).astype(np.int64)
        return ring.from_ints(cut.reshape(-1)).reshape(counts.shape)

    def decode(self, total: npt.NDArray[Any], ring: Ring) -> npt.NDArray[np.float64]:
        """A sum of encodings as floats."""
        return signed(total, ring).astype(np.float64) * np.float64(self.clip / self.top)


def signed(words: npt.NDArray[Any], ring: Ring) -> npt.NDArray[np.int64]:
    """Words of Z_2^b as integers in [-2^(b-1), 2^(b-1)); b is at most 63 here."""
    if ring.limbs or ring.bits > 63:
        raise MisuseError(f"update: sums of {ring.bits} bits do not fit 64-bit integers")
    values = words.astype(np.int64)
    return np.where(values >= 1 << (ring.bits - 1), values - (1 << ring.bits), values)
