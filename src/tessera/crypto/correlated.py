"""Noise that is correlated over rounds: the coefficients by which each round's noise is mixed.

A training adds y = C^-1 z to its sums, where z has one independent integer for every word and
round. The inverse is banded (Kalinin, McKenna, Upadhyay, Lampert 2025, arXiv 2505.12128): y_t is a
fixed combination of the last few z, so that no noise is stored and a round's can be drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FRACTION: Final = 24
"""Coefficients are integers over 2^FRACTION, the same for the account and for the noise."""


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
