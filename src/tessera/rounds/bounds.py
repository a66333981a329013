"""SumBounds: what honest clients can have summed to, as one function of the plan.

A secure sum hides who added what, so that one client could add anything. What it cannot do is stay
unnoticed beyond these bounds. A client's count of a row is between 0 and `max_count`; where it is
0 its delta is 0, and else the delta times the count is cut to `clip`. Over n clients a row with
count s has therefore at most min(n, s) clips behind it, and its mean is within one clip. The dense
part is bounded by the weight in the same way.

Where noise is integers on the sum, every client's vector is within a bound as a whole, and sums are
wider by the noise, which is in them before they are looked at. Counts have noise, too: they may be
negative, and a sum is divided by 1 at least. Where none are sent, it is divided by the number of
clients, or of those that asked for the row.

A row that is out of bounds is not merged and stays as it was; a round whose dense part is out of
bounds is not merged at all. Within its bounds a lying client still adds what it likes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.plan import Plan
from tessera.plan.noisy_vector import NoisyVector
from tessera.rounds.clipped_vector import Integers




@dataclass(frozen=True, slots=True, kw_only=True)
class SumBounds:
    """Of sums over `clients` inputs, in the integers of the quantiser."""

    clients: int
    top: int  # the integer that stands for `clip`
    max_count: int
    vector: NoisyVector | None = None  # where noise is on the sum

    @classmethod
    def of(cls, plan: Plan, clients: int) -> SumBounds:
        noisy = plan.noisy_vector
        if noisy is not None:
            return cls(
                clients=clients, top=noisy.top, max_count=plan.update.max_count, vector=noisy
            )
        return cls(clients=clients, top=plan.quantizer.top, max_count=plan.update.max_count)

    def rows_within(self, values: Integers, counts: Integers) -> npt.NDArray[np.bool_]:
        """For each row whether its values (rows, width) and its count are possible."""
        if self.vector is not None:
            most_each = self.clients * math.ceil(self.vector.bound) + self.vector.tail
            fits = (counts >= -self.vector.tail) & (counts <= most_each)
            return np.asarray(fits & (np.abs(values) <= most_each).all(axis=1), dtype=np.bool_)
        fits = (counts >= 0) & (counts <= self.clients * self.max_count)
        most = np.minimum(np.clip(counts, 0, None), self.clients) * self.top
        within: npt.NDArray[np.bool_] = fits & (np.abs(values) <= most[:, None]).all(axis=1)
        return within

    def examples(self, counts: Integers, asked: Integers | None = None) -> Integers:
        """The numbers that sums are divided by, from the sums of counts as they were opened.

        Under noise without counts they are of clients: all, or those that `asked` for a row.
        """
        if self.vector is None:
            return counts
        if not self.vector.counts:
            return np.maximum(np.full_like(counts, self.clients) if asked is None else asked, 1)
        return np.maximum(np.rint(counts / self.vector.count_scale), 1.0).astype(np.int64)

    def dense_within(self, values: Integers, weight: int) -> bool:
        """Whether these sums with this weight are possible."""
        return bool(self.rows_within(values[None, :], np.array([weight], dtype=np.int64))[0])
