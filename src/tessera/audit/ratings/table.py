"""Flat ratings of many clients, and what an attack gets right of each client's.

Ratings of all clients stand in one array, one client's after the other's; client c has those from
`offsets[c]` to `offsets[c + 1]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError

Numbers: TypeAlias = npt.NDArray[np.floating[Any]]
Offsets: TypeAlias = npt.NDArray[np.integer[Any]]
Counts: TypeAlias = npt.NDArray[np.int64]

BINS: Final = ("0-.2", ".2-.4", ".4-.6", ".6-.8", ".8-1")
"""The bins of Tables 2 and 3 in Yang et al. 2021; the last one includes 1."""


@dataclass(frozen=True, slots=True)
class HitRates:
    """For each setting of an attack (an error level, a proportion) and client: hits of trials."""

    settings: tuple[float, ...]
    hits: Counts = field(repr=False)  # (settings, clients)
    trials: Counts = field(repr=False)

    @property
    def binned(self) -> npt.NDArray[np.float64]:
        """(settings, bins): the share of clients with a rate in each bin; clients without a
        trial are in none."""
        with_any = self.trials > 0
        # In whole numbers, so that 2 of 5 is not a hair below .4.
        bins = np.minimum(len(BINS) * self.hits // np.maximum(self.trials, 1), len(BINS) - 1)
        counted = [
            np.bincount(row[kept], minlength=len(BINS))
            for row, kept in zip(bins, with_any, strict=True)
        ]
        return np.asarray(np.array(counted) / np.maximum(with_any.sum(axis=1), 1)[:, None])

    @property
    def pooled(self) -> npt.NDArray[np.float64]:
        """For each setting the rate over all ratings."""
        return np.asarray(self.hits.sum(axis=1) / np.maximum(self.trials.sum(axis=1), 1))

    @property
    def by_client(self) -> npt.NDArray[np.float64]:
        """For each setting the mean of the clients' rates."""
        with_any = self.trials > 0
        rates = self.hits / np.maximum(self.trials, 1)
        return np.asarray(rates.sum(axis=1) / np.maximum(with_any.sum(axis=1), 1))


def owners(offsets: Offsets, *arrays: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Whose each rating is, by place; refuses arrays that are not as long as the offsets say."""
    sizes = np.diff(offsets)
    if len(offsets) < 1 or offsets[0] != 0 or (sizes < 0).any():
        raise MisuseError("ratings: offsets begin at 0 and do not fall")
    if any(array.shape != (int(offsets[-1]),) for array in arrays):
        raise MisuseError("ratings: not one value per rating")
    return np.repeat(np.arange(len(sizes)), sizes)


def extremes(values: Numbers, offsets: Offsets) -> tuple[Numbers, Numbers]:
    """The least and the greatest value of each client; NaN for one that has none."""
    low, high = (np.full(len(offsets) - 1, np.nan) for _ in range(2))
    some = np.flatnonzero(np.diff(offsets) > 0)
    if some.size:
        starts = np.asarray(offsets, np.int64)[some]
        low[some] = np.minimum.reduceat(values, starts)
        high[some] = np.maximum.reduceat(values, starts)
    return low, high
