"""Rows selected with noise: everybody's marks, summed once before the first round.

The sum and its noise are those of any statistic (`runs/noisy_statistics.py`); every client is
charged for its marks before the first of them leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.data.examples import ClientData
from tessera.ids import ClientId
from tessera.learning.bound_model import BoundModel
from tessera.learning.popularity import Popularity
from tessera.learning.tables.arrays import Ids
from tessera.learning.task_setup import Progress
from tessera.plan import NoisyRows, Plan
from tessera.rounds import dp
from tessera.runs.noisy_statistics import NoisyStatistic
from tessera.runs.setup import Charge

Marks = npt.NDArray[np.float64]


SELECTION: Final = "selection"


def select_rows(
    data: ClientData,
    bound: BoundModel,
    plan: Plan,
    clients: list[ClientId],
    entropy: Entropy,
    charge: Charge,
    progress: Progress | None = None,
) -> Popularity | None:
    """The popularity of all rows by the plan's noise; None where it selects none."""
    if plan.dp is None or plan.dp.rows is not NoisyRows.SELECTED:
        return None
    selection = RowSelection(data, bound, plan, entropy)
    charge(clients)
    return selection.popularity(clients, progress)


class RowSelection:
    """One histogram over all tables of a model."""

    def __init__(self, data: ClientData, bound: BoundModel, plan: Plan, entropy: Entropy) -> None:
        self._data, self._bound, self._plan = data, bound, plan
        self._sizes = {t.name: t.rows for t in plan.tables}
        self.statistic = NoisyStatistic(
            plan=plan,
            entropy=entropy,
            what=SELECTION,
            noise=dp.selection_noise(plan),
            words=sum(self._sizes.values()),
        )

    def popularity(self, clients: list[ClientId], progress: Progress | None) -> Popularity:
        total = self.statistic.over_all(clients, self.marks, progress)
        marks, start = {}, 0
        for name, rows in self._sizes.items():
            marks[name] = total.sum[start : start + rows]
            start += rows
        return Popularity(
            marks=marks,
            clients=total.clients,
            deviation=total.deviation,
            threshold=dp.section(self._plan).threshold,
        )

    def marks(self, client: ClientId) -> Marks:
        return marked(self._bound.all_row_ids_of(self._data.of(int(client))), self._sizes)


def marked(rows: Mapping[str, Ids], sizes: Mapping[str, int]) -> Marks:
    """A client's marks over all tables, 1 long together, or 0 if it holds no row."""
    held = sum(len(rows[name]) for name in sizes)
    marks = np.zeros(sum(sizes.values()))
    start = 0
    for name, size in sizes.items():
        marks[rows[name].astype(np.int64) + start] = 1.0 / math.sqrt(max(held, 1))
        start += size
    return marks
