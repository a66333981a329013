"""NoisyVector: the integers that a client sends under noise inside the sum, and that noise.

Rows, dense part, counts and weight are one vector of real numbers by public scales, at most `clip`
long. It is scaled so that `clip` is `top` integers, and rounded up or down by coins until the
rounded vector is at most `bound` long (Kairouz, Liu, Steinke 2021, arXiv 2102.06387, section 4.2):
that is how far one client moves the sum, and what the noise is for. Everything here follows from
the plan, and nothing from data.

Each of `sources` that count adds a discrete Gaussian; together they are `noise` bounds deep. There
may be up to `most_sources` of them in a sum, for which the ring has room but for 2^-40. Noise that
is correlated over rounds is wider than what a round draws for itself, and has the room for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tessera.crypto.correlated import GRID
from tessera.crypto.noise import WIDEST
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError
from tessera.privacy.dp.mechanism import LEAST_DEVIATION

TAIL_BITS: Final = 40
"""The noise of a sum is beyond its `tail` somewhere with probability 2^-TAIL_BITS at most."""
MOST_BITS: Final = 62
"""Sums are read as 64-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyVector:
    """Of `words` integers, over at most `clients` clients."""

    words: int
    clients: int
    clip: float
    top: int
    noise: float
    sources: int
    most_sources: int
    counts: float = 0.0
    correlated: float = 0.0
    """Deviation of one round's noise over that of its own draw, where it has other rounds', too."""

    def __post_init__(self) -> None:
        if self.noise and not self.correlated and self.deviation < LEAST_DEVIATION:
            raise ConfigError(
                f"[dp] noise = {self.noise:g}: a share of it has a deviation of "
                f"{self.deviation:.3g} integers, too narrow for an account of the sum",
                hint="raise levels in [update]: the clip is half as many integers",
            )
        if self.correlated and self.deviation * 2.0**GRID > WIDEST:
            raise ConfigError(
                f"[dp] noise = {self.noise:g}: correlated, its own draw has a deviation of "
                f"{self.deviation:.3g} integers, wider than can be drawn on a grid of 2^-{GRID}",
                hint="lower levels in [update]: the clip is half as many integers",
            )
        if self.largest.bit_length() + 1 > MOST_BITS:
            raise ConfigError(
                f"[dp] noise = {self.noise:g} does not fit the ring: a sum has up to "
                f"{self.largest.bit_length() + 1} bits",
                hint="lower levels in [update], or the noise",
            )

    @property
    def bound(self) -> float:
        """How long a rounded vector is at most, in integers."""
        root, length = math.sqrt(self.words), float(self.top)
        likely = length**2 + self.words / 4.0 + length + root / 2.0
        return math.sqrt(min(likely, (length + root) ** 2))

    @property
    def deviation(self) -> float:
        """Of the noise that one source draws for each word of a round, in integers."""
        return self.noise * self.bound / math.sqrt(self.sources)

    @property
    def scale(self) -> float:
        """Integers per unit of what is clipped."""
        return self.top / self.clip

    @property
    def count_scale(self) -> float:
        """Integers that one count stands for; 0: counts are not sent."""
        return self.counts * self.scale

    @property
    def tail(self) -> int:
        """No word of a sum has noise beyond this, but for 2^-40 in all.

        A sum of discrete Gaussians is subgaussian with its own deviation (Canonne, Kamath, Steinke
        2020, arXiv 2004.00010, Corollary 17). Correlated noise is rounded, by each source.
        """
        if not self.noise:
            return 0
        deviation = self.deviation * (self.correlated or 1.0) * math.sqrt(self.most_sources)
        logs = math.log(2.0 * self.words) + TAIL_BITS * math.log(2.0)
        rounded = self.most_sources if self.correlated else 0
        return math.ceil(deviation * math.sqrt(2.0 * logs)) + rounded

    @property
    def largest(self) -> int:
        """No word of a sum is larger in size, noise included, but for 2^-40."""
        return self.clients * math.ceil(self.bound) + self.tail

    @property
    def ring(self) -> Ring:
        """The narrowest in which no sum wraps: half of it is for negatives."""
        return Ring(max(8, self.largest.bit_length() + 1))
