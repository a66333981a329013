"""How good the model is after a round: on a test set in one place, or without one.

Where the held-out examples stay with their clients, each computes sufficient statistics of
its own, and only the secure sum of them over the cohort, or over each of its fixed groups, leaves
(`learning/metrics.py`). The sum is exact;
an AUC that follows from it is known to within the pairs of examples that share a bin. Where a plan
has noise per user the sum has noise, too, and every client is charged for it with its round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan

import numpy as np
import numpy.typing as npt
from torch import nn

from tessera.crypto.entropy import Entropy
from tessera.data.examples import ClientData, Examples
from tessera.data.split import with_validation
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.bound_model import BoundModel
from tessera.learning.rankers import ranks
from tessera.learning.scores import ItemScores, RowSource, SummedModel, evaluate
from tessera.learning.tables.table import StoredTable
from tessera.plan import Plan
from tessera.privacy.dp.events import THE_METRICS
from tessera.rounds.cohorts import FixedGroup
from tessera.rounds.events import Event, RoundFinished
from tessera.rounds.noise import noise_of
from tessera.runs.statistics import NoisyStatistic, cohort_sum
from tessera.tasks import Task

Floats = npt.NDArray[np.float32]

WHAT = "metrics"
VALIDATION = "validation metrics"
WHOLE = 1 << 20
"""Tables up to this many rows are copied once per test; larger ones are read batch by batch."""


class Evaluation:
    """ItemScores of the current model over held-out examples."""

    def __init__(
        self, task: Task, module: nn.Module, bound: BoundModel, deviation: float = 0.0
    ) -> None:
        """`deviation` is that of the noise on sums, where the task solves them."""
        self._task, self._module, self._bound = task, module, bound
        self._deviation = deviation

    def scores(
        self, dense: Floats, tables: Mapping[str, StoredTable], examples: Examples
    ) -> Floats:
        """Logits of these examples, each client's with its own local rows; ranks of a softmax."""
        if self._task.solve is not None:
            found = ranks(self._task.solve(SummedModel(dense, tables, self._deviation)), examples)
            return np.stack([found, np.zeros(len(found))], axis=1).astype(np.float32)
        parameters = self._parameters(dense, tables)
        return evaluate(self._module, self._bound, parameters, examples)

    def of_all_items(self, dense: Floats, tables: Mapping[str, StoredTable]) -> ItemScores:
        """ItemScores of every item: those of a softmax, or what the task solves."""
        if self._task.solve is not None:
            return self._task.solve(SummedModel(dense, tables, self._deviation))
        parameters = self._parameters(dense, tables)
        return lambda some: evaluate(self._module, self._bound, parameters, some, rank=False)

    def _parameters(
        self, dense: Floats, tables: Mapping[str, StoredTable]
    ) -> Mapping[str, Floats | RowSource]:
        sources = {
            name: table.values(np.arange(table.size, dtype=np.uint64))
            if table.size <= WHOLE
            else table
            for name, table in tables.items()
        }
        return self._bound.parameters(dense, sources)

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
        groups: Sequence[FixedGroup] = (),
        validation: ClientData | None = None,
    ) -> float | None:
        """The metric over held-out examples of `clients` (by their names in the round).

        Of their test parts, or of a `validation` part: another sum, with noise of its own. Each
        counts its own where they are; only the sum leaves. In fixed groups it is over the whole
        ones of `groups`. None if they are too few for noise in shares.
        """
        what = WHAT if validation is None else VALIDATION
        data = validation or self._task.data
        metric, noise = self._task.metric, noise_of(plan)
        held = {}
        for name, client in clients.items():
            own = data.test_of(int(client))
            scores = self.scores(dense, tables, own)
            if np.isnan(scores).any():  # such a client contributes nothing
                own, scores = own.take(slice(0, 0)), scores[:0]
            held[name] = scores, own
        if not noise.noisy_metrics:
            counts = {name: metric.statistics(*each) for name, each in held.items()}
            summed = cohort_sum(counts, groups, plan, what, round_id, entropy)
            return None if summed is None else metric.from_statistics(summed)
        few = {name: metric.few(*each) for name, each in held.items()}
        counted = noise.dp.counted
        total = NoisyStatistic(
            plan=plan,
            entropy=entropy,
            what=what,
            noise=noise.statistic_noise(THE_METRICS),
            words=len(next(iter(few.values()))),
            round_id=round_id,
        ).over_cohort(list(few), lambda name: few[name] / counted)
        return None if total is None else metric.from_few(total.sum * counted)


# --- early stopping -------------------------------------------------------------------------------
#
# Training ends when the validation part has had enough of it.
#
# With `[simulation] patience` the last tenth of every client's training part is held out
# (`data/split.py`) and tested on whenever the test part is. After so many tests without a
# better figure training ends. The test part has no say in it, and the model is that of the last
# round.
#
# When training ends shows what it was decided by. With `[dp]` that is a noisy sum over the clients
# of the round, which each is charged for as for the one over its test part (`rounds/noise.py`); a
# plan whose metric is not charged is refused (`plan/checks.py`).


@dataclass(slots=True)
class EarlyStopping:
    """What the tests on the validation part have shown so far."""

    patience: int
    lower_is_better: bool
    held: ClientData = field(repr=False)  # its test part is the validation part
    best: float | None = None
    since: int = 0

    @classmethod
    def of(cls, task: Task, plan: Plan) -> tuple[Task, EarlyStopping | None]:
        """The task without its validation part, where the plan asks for one."""
        if not plan.simulation.patience:
            return task, None
        data, held = with_validation(task.data)
        if not len(held.test):
            raise ConfigError(
                f"patience = {plan.simulation.patience}: no client of task {task.name!r} has the "
                "ten training examples of which one is held out",
                hint="leave patience out",
            )
        stopping = cls(plan.simulation.patience, task.metric.lower_is_better, held)
        return replace(task, data=data), stopping

    def seen(self, value: float) -> None:
        """One more test."""
        better = self.best is None or (
            value < self.best if self.lower_is_better else value > self.best
        )
        self.best, self.since = (value, 0) if better else (self.best, self.since + 1)

    def go_on_from(self, values: Iterable[float | None]) -> None:
        """The tests of an earlier process; not to be counted twice."""
        self.best, self.since = None, 0
        for value in values:
            if value is not None:
                self.seen(value)

    def after(self, event: Event, measure: Callable[[ClientData, RoundId], float | None]) -> Event:
        """The event, with the figure of the validation part where the model was tested."""
        if not isinstance(event, RoundFinished) or event.metric is None:
            return event
        value = measure(self.held, RoundId(event.round_id))
        if value is None or isnan(value):  # too few clients for noise in shares, or no figure
            return event
        self.seen(value)
        return replace(event, validation=value)

    @property
    def reason(self) -> str:
        """Why training ends now; "" if it does not."""
        if self.since < self.patience:
            return ""
        return f"{self.since} tests on the validation part were no better than {self.best:.4f}"
