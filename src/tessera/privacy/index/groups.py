"""Figures about fixed groups that were drawn by chance: corrupt members, and members that leave.

A share f of all clients works with the server, and a beacon puts clients into groups of g. Then an
honest client has Binomial(g - 1, f) corrupt members beside it, and B is that of the honest rest
(`bound.py`). The number is exact for a large snapshot; in a small one the draw is without
replacement, and large counts of corrupt members are rarer. Whoever can make a snapshot void by
withholding a value of the beacon draws again: v void ones multiply the probability of a bad group
by 1 + v at most (a union bound).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from tessera.errors import MisuseError
from tessera.privacy.index.bound import holder_bound

CORRUPT_SHARES: Final = (0.2, 0.3)
"""Shares of corrupt clients for which the figures are always printed."""

WEAK: Final = 0.2
"""The B from which on a client is counted as weakly protected."""

LEAVING: Final = (0.01, 0.02, 0.05)
"""Shares of members that leave in a month, for which the figure is always printed."""

MONTHS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroups:
    """Groups of `size` clients, drawn by a beacon after `void` snapshots without one."""

    size: int
    void: int = 0

    def __post_init__(self) -> None:
        if self.size < 2 or self.void < 0:
            raise MisuseError(f"groups of {self.size} after {self.void} void snapshots")

    def mean_bound(self, corrupt: float) -> float:
        """B of an honest client, averaged over one draw, for this share of corrupt clients."""
        return math.fsum(
            chance * holder_bound(holders=1, alike=self.size - count)
            for count, chance in enumerate(self._beside(corrupt))
        )

    def weak_share(self, corrupt: float, *, least: float = WEAK) -> float:
        """The share of honest clients with B >= `least`, times 1 + void snapshots; 1 at most."""
        weak = math.fsum(
            chance
            for count, chance in enumerate(self._beside(corrupt))
            if holder_bound(holders=1, alike=self.size - count) >= least
        )
        return min(1.0, (1 + self.void) * weak)

    def alive(self, leaving: float, *, months: int = MONTHS) -> float:
        """The share of groups that nobody has left after so many months.

        `leaving` is the share of members that leave in a month, each by itself. A group that one
        member has left is retired.
        """
        _check_share("leaving in a month", leaving)
        return float((1.0 - leaving) ** (months * self.size))

    def in_words(self, corrupt: float) -> str:
        """Both figures as a sentence for pages."""
        some = "1 void snapshot" if self.void == 1 else f"{self.void} void snapshots"
        again = f", after {some}" if self.void else ""
        mean, weak = self.mean_bound(corrupt), 100.0 * self.weak_share(corrupt)
        share = f"{weak:.2g}" if weak < 99.5 else "100"
        return (
            f"with {100.0 * corrupt:.3g}% of all clients corrupt B is {mean:.3f} on average, "
            f"and {WEAK:.3g} or more for {share}% of clients{again}"
        )

    def as_json(self) -> dict[str, Any]:
        """The figures that are always printed."""
        return {
            "void": self.void,
            "alive_after_a_year": {f"{each:g}": self.alive(each) for each in LEAVING},
            "corrupt": {
                f"{each:g}": {"mean": self.mean_bound(each), "weak": self.weak_share(each)}
                for each in CORRUPT_SHARES
            },
        }

    def _beside(self, corrupt: float) -> list[float]:
        """The probability of 0, 1, .. g - 1 corrupt members beside an honest one."""
        _check_share("corrupt", corrupt)
        others = self.size - 1
        return [
            math.comb(others, count) * corrupt**count * (1.0 - corrupt) ** (others - count)
            for count in range(self.size)
        ]


def _check_share(what: str, share: float) -> None:
    if not 0.0 <= share <= 1.0:  # also refuses nan
        raise MisuseError(f"the share {what} is from 0 to 1, not {share}")
