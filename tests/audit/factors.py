"""Matrix factorisation at one client, written out once more, for attacks to be tried on.

The rule is the product's (`learning/models/factorization.py`), the code is not: one client, one
rating after the other where that is clearer. `Rater` keeps its own row between rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.learning.rating_models import BIAS_SHARE
from tessera.learning.training.settings import LocalTraining

TRAINING = LocalTraining(batch=1, rate=0.5, table_rate=0.2, decay=1.0, weight_decay=0.1)


class Rater:
    """A client with ratings (less their base), factors of its own and a bias of its own."""

    def __init__(self, items: Sequence[int], values: Sequence[float], factors: np.ndarray) -> None:
        self.items = np.array(items, dtype=np.uint64)
        self.values = np.array(values, dtype=np.float64)
        self.factors, self.bias = factors.copy(), 0.0

    def errors(self, rows: np.ndarray) -> np.ndarray:
        return self.values - (rows[:, :-1] @ self.factors + rows[:, -1] + self.bias)

    def train(
        self, rows: np.ndarray, training: LocalTraining = TRAINING, round_id: int = 0
    ) -> np.ndarray:
        """Own steps first; then how far each item's row is to move."""
        rate, penalty = training.rate_in(round_id), training.weight_decay
        for _ in range(training.epochs):
            left = self.errors(rows)
            pull = sum(e * q for e, q in zip(left, rows[:, :-1], strict=True)) / len(left)
            self.factors = self.factors - rate * (penalty * self.factors - pull)
            self.bias = self.bias - rate * (penalty * BIAS_SHARE * self.bias - left.mean())
        deltas = np.empty_like(rows)
        for i, (e, row) in enumerate(zip(self.errors(rows), rows, strict=True)):
            deltas[i, :-1] = -(penalty * row[:-1] - e * self.factors)
            deltas[i, -1] = -(penalty * BIAS_SHARE * row[-1] - e)
        return training.table_rate * rate * deltas
