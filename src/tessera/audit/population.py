"""Population: how many clients hold a row, counted from the truth, for the plan's claims.

The formulas of `privacy/index/exposure.py` average over the rows of a union by the number of their
holders. Rounds with equal numbers of clients are counted together; what they claim is averaged by
how many rows they have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera.privacy.index.exposure import Cohort, Holders


@dataclass(slots=True)
class HolderCounts:
    """For each number of clients how many rows have how many holders among them, from 1 up."""

    by_clients: dict[int, Counter[int]] = field(default_factory=dict)

    def add(self, clients: int, holders: npt.NDArray[np.int64]) -> None:
        found = self.by_clients.setdefault(clients, Counter())
        found.update(Counter(int(h) for h in holders if h))

    def claim(self, formula: Callable[[Cohort], float], *, min_group: int, dropout: float) -> float:
        """The mean of a formula over all the rows counted; 0 if there are none."""
        total, rows = 0.0, 0
        for clients, counted in self.by_clients.items():
            size = counted.total()
            if clients < 2 or not size:
                continue
            cohort = Cohort(
                clients=clients,
                holders=shares(counted),
                min_group=min(min_group, clients),
                dropout=dropout,
            )
            total, rows = total + size * formula(cohort), rows + size
        return total / rows if rows else 0.0


def shares(counted: Counter[int]) -> Holders:
    size = math.fsum(counted.values())
    return Holders.of({holders: rows / size for holders, rows in counted.items()})
