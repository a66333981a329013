"""How good the model is after a round: on a test set in one place, or without one.

Where the held-out examples stay with their clients, each computes sufficient statistics of
its own, and only the cohort's secure sum of them leaves (`learning/metrics.py`). The sum is exact;
an AUC that follows from it is known to within the pairs of examples that share a bin.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import nn

from tessera.crypto.entropy import Entropy
from tessera.data.examples import Examples
from tessera.engines.secure_statistics import secure_sum
from tessera.ids import ClientId, RoundId
from tessera.learning.bound_model import BoundModel
from tessera.learning.scores import evaluate
from tessera.learning.tables import StoredTable
from tessera.rounds.plan import Plan
from tessera.tasks import Task

Floats = npt.NDArray[np.float32]

WHOLE = 1 << 20
"""Tables up to this many rows are copied once per test; larger ones are read batch by batch."""


class Evaluation:
    """Scores of the current model over held-out examples."""

    def __init__(self, task: Task, module: nn.Module, bound: BoundModel) -> None:
        self._task, self._module, self._bound = task, module, bound

    def scores(
        self, dense: Floats, tables: Mapping[str, StoredTable], examples: Examples
    ) -> Floats:
        """Logits of these examples, each client's with its own local rows."""
        sources = {
            name: table.values(np.arange(table.size, dtype=np.uint64))
            if table.size <= WHOLE
            else table
            for name, table in tables.items()
        }
        parameters = self._bound.parameters(dense, sources)
        return evaluate(self._module, self._bound, parameters, examples)

    def measures(self, dense: Floats, tables: Mapping[str, StoredTable]) -> dict[str, float]:
        """Figures over everybody's held-out examples, in one place: only a simulation can do it."""
        test = self._task.data.test
        return self._task.metric.measures(self.scores(dense, tables, test), test)

    def metric(self, dense: Floats, tables: Mapping[str, StoredTable]) -> float:
        """The task's main metric."""
        return self.measures(dense, tables)[self._task.metric.name]

    def federated(
        self,
        plan: Plan,
        round_id: RoundId,
        clients: Mapping[ClientId, ClientId],
        dense: Floats,
        tables: Mapping[str, StoredTable],
        entropy: Entropy,
    ) -> float:
        """The metric over held-out examples of `clients` (by their names in the round).

        Each counts its own where they are; only the sum leaves.
        """
        metric, statistics = self._task.metric, {}
        for name, client in clients.items():
            own = self._task.data.test_of(int(client))
            scores = self.scores(dense, tables, own)
            if np.isnan(scores).any():  # such a client contributes nothing
                own, scores = own.take(slice(0, 0)), scores[:0]
            statistics[name] = metric.statistics(scores, own)
        return metric.from_statistics(secure_sum(statistics, plan, "metrics", round_id, entropy))
