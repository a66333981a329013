"""Residual: what a client has not sent of its updates, and adds to the next (error feedback).

Aji and Heafield 2017, Alg. 1: what the selection leaves is not lost but waits. Here it waits as
the integers that updates are quantised to. A client's update counts only if the round came to an
end with it in the sum; until it is told so (`settle`), nothing is given up: an update that was left
out goes back whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError
from tessera.learning.selection import Integers

Kept = npt.NDArray[np.int32]

LARGEST: Final = 1 << 23
"""A residual of this size is not kept: stores hold it as a float32, exactly up to here."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a client has sent in a round, of all that it had to send."""

    round_id: int
    total: Integers = field(repr=False)
    sent: Integers = field(repr=False)


@dataclass(slots=True)
class Residual:
    """One client's, for one dense part. `dropped` counts values that could not be kept."""

    kept: Kept = field(repr=False)
    offer: Offer | None = None
    dropped: int = 0

    @classmethod
    def nothing(cls, dense: int) -> Residual:
        return cls(np.zeros(dense, dtype=np.int32))

    @classmethod
    def stored(cls, values: npt.NDArray[np.float32]) -> Residual:
        """From a store. What is not a whole number that could have been kept is dropped."""
        fit = np.isfinite(values) & (np.abs(values) < LARGEST)
        fit &= values == np.where(fit, np.rint(values), 0)
        kept = np.where(fit, values, 0).astype(np.int32)
        return cls(kept, dropped=int(values.size - np.count_nonzero(fit)))

    def due(self, round_id: int, update: Integers) -> Integers:
        """What there is to send in a round: the update and what waited.

        Asked again in the same round, it is the same: what was offered then is forgotten.
        """
        if self.offer is not None and self.offer.round_id != round_id:
            raise MisuseError(f"round {self.offer.round_id} is not settled")
        self.offer = None
        return self.kept + update

    def offered(self, round_id: int, total: Integers, sent: Integers) -> None:
        """This was sent in a round, of all that was due."""
        self.offer = Offer(round_id, total, sent)

    def settle(self, round_id: int, *, counted: bool) -> None:
        """The round has ended, and the update was in its sum or was not."""
        offer = self.offer
        if offer is None or offer.round_id != round_id:
            return
        kept = offer.total - offer.sent if counted else offer.total
        fit = np.abs(kept) < LARGEST
        self.dropped += int(kept.size - np.count_nonzero(fit))
        self.kept, self.offer = np.where(fit, kept, 0).astype(np.int32), None
