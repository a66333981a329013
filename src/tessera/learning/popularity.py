"""Popularity of rows: a noisy histogram of who holds them, and what it is good for.

Every client marks the rows it holds; its marks are equally long, and together of length 1. Summed
over all clients and with noise this says which rows enough clients hold to be learnt under noise
(those over a threshold), and what the sums of a round are to be divided by. A client's update is
clipped to a length, too, so that it reaches a row by about as much as its mark: where everybody is
clipped, sum over popularity is the mean of the row's holders, each by the root of its rows.

Nothing else is known of how many hold a row. What was made from the histogram follows from it, and
costs no more than it did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.learning.tables.submodel import Ids

LEAST: Final = 1.0
NOISY: Final = 5.0
"""A row's sum is divided by its popularity plus the larger of `LEAST` and `NOISY` standard
deviations of the noise: rows that few hold move less. Tuned on validation parts of MovieLens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Popularity:
    """Of every row of each table, in clients' marks; `deviation` is that of its noise.

    `clients` have marked their rows. Rows up to `threshold` deviations are not selected.
    """

    marks: Mapping[str, npt.NDArray[np.float64]] = field(repr=False)
    clients: int
    deviation: float
    threshold: float

    @property
    def selected(self) -> dict[str, Ids]:
        """The rows that are learnt, ascending."""
        least = self.threshold * self.deviation
        return {
            name: np.flatnonzero(marks > least).astype(np.uint64)
            for name, marks in self.marks.items()
        }

    @property
    def false_positives(self) -> float:
        """Probability that a row that nobody holds is selected."""
        return 0.5 * math.erfc(self.threshold / math.sqrt(2.0)) if self.deviation else 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """For a run's folder, as plain JSON values."""
        return {
            "clients": self.clients,
            "deviation": self.deviation,
            "threshold": self.threshold,
            "false_positives": self.false_positives,
            "tables": {
                name: {"rows": len(self.marks[name]), "selected": len(ids)}
                for name, ids in self.selected.items()
            },
        }

    def divisors(
        self, name: str, ids: Ids, clients: npt.NDArray[Any], *, clip: float, noise: float
    ) -> npt.NDArray[np.float64]:
        """What the sums of these rows over `clients` are divided by; infinite: not selected.

        `noise` is the deviation on a sum over the clip. A cohort has its part of the marks.
        """
        part = clients / self.clients
        marks = np.maximum(self.marks[name][ids], 0.0) * part
        divided = clip * (marks + np.maximum(LEAST * part, NOISY * noise))
        return np.where(self.marks[name][ids] > self.threshold * self.deviation, divided, np.inf)
