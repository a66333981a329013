"""Early stopping: training ends when the validation part has had enough of it.

With `[simulation] patience` the last tenth of every client's training part is held out
(`data/split.py`) and tested on whenever the test part is. After so many tests without a better
figure training ends. The test part has no say in it, and the model is that of the last round.

When training ends shows what it was decided by. With `[dp]` that is a noisy sum over the clients of
the round, which each is charged for as for the one over its test part (`rounds/dp.py`); a plan
whose metric is not charged is refused (`plan/checks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import isnan

from tessera.data.examples import ClientData
from tessera.data.split import with_validation
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.plan import Plan
from tessera.rounds.events import Event, RoundFinished
from tessera.tasks import Task


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
