"""Set-up of a task before the first round: what clients draw for good, and a sum over all of them.

Negatives are drawn first, where the data has places for them (`data/examples.py`). The sum is a
statistic that a task may need (`learning/task_setup.py`).

Where a plan has noise per user, the sum has its share of the budget: a client's part is counted in
examples, scaled down to `counted` of them, and summed with noise. Else it is exact, and is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.data.examples import ClientData, draw
from tessera.ids import ClientId
from tessera.learning.bound_model import BoundModel
from tessera.learning.popularity import Popularity
from tessera.learning.tables.submodel import Ids
from tessera.learning.task_setup import Progress, Setup, SetupResult
from tessera.plan import Plan
from tessera.privacy.dp.events import THE_POPULARITY, THE_SETUP_SUM, ExactRelease, NoisySum
from tessera.privacy.dp.ledger import Ledger
from tessera.rounds.cohorts import FixedGroup, cohorts_of
from tessera.rounds.noise import noise_of
from tessera.rounds.root import lasting_secret
from tessera.runs.statistics import NoisyStatistic, population_sum
from tessera.tasks import Task

SetupProgress = Callable[[str, int, int], None]
"""(what is under way, how many clients are done, of how many)."""
Charge = Callable[[Iterable[ClientId]], None]

WHAT: Final = "set-up"


def uncharged(_: Iterable[ClientId]) -> None:
    """For data in one place, which nobody is charged for."""


def set_up(
    task: Task,
    plan: Plan,
    entropy: Entropy,
    on_progress: SetupProgress | None = None,
    charge: Charge = uncharged,
    groups: Sequence[FixedGroup] = (),
) -> tuple[Task, SetupResult | None]:
    """The task with the data that is trained on, once the sum over all clients is taken.

    What a client draws follows from its secret under `entropy`. `charge` is told whose parts are
    about to leave. With fixed `groups` the sum is over their members, group by group: who waits for
    a group is in no sum.
    """
    secret = partial(lasting_secret, entropy, plan.federation)
    task = replace(task, data=draw(task.data, secret))
    if task.setup is None:
        return task, None
    fitting = partial(on_progress, "fitting masks") if on_progress is not None else None
    if not task.setup.sums:
        ready = task.setup.finish(task.data, np.zeros(0, np.int64), secret, fitting)
        return replace(task, data=ready.data), ready
    clients = [
        ClientId(client)
        for client in range(task.data.clients)
        if task.data.offsets[client] < task.data.offsets[client + 1]
    ]
    clients = cohorts_of(plan).summed(clients, groups)
    charge(clients)
    summing = partial(on_progress, "adding up") if on_progress is not None else None
    if noise_of(plan).statistic_noise(THE_SETUP_SUM):
        total, about = _noisy(task.setup, task.data, plan, clients, entropy, summing)
    else:
        counts = {client: task.setup.count(task.data.of(int(client))) for client in clients}
        found = population_sum(counts, plan, WHAT, entropy, summing, groups)
        total = found.sum
        about = {"clients": found.clients, "groups": found.groups, "masked": found.secure_groups}
    ready = task.setup.finish(task.data, total, secret, fitting)
    ready = replace(ready, facts={**ready.facts, "sum": about})
    return replace(task, data=ready.data), ready


def _noisy(
    setup: Setup,
    data: ClientData,
    plan: Plan,
    clients: list[ClientId],
    entropy: Entropy,
    progress: Progress | None,
) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    """The sum with noise, in the numbers that a set-up counts in."""
    spans, counted = setup.spans(data), noise_of(plan).dp.counted
    statistic = NoisyStatistic(
        plan=plan,
        entropy=entropy,
        what=WHAT,
        noise=noise_of(plan).statistic_noise(THE_SETUP_SUM),
        words=len(spans),
    )
    total = statistic.over_all(
        clients, lambda c: setup.count(data.of(int(c))) / (spans * counted), progress
    )
    about = {
        "clients": total.clients,
        "groups": total.groups,
        "masked": total.secure_groups,
        "noise": total.deviation * counted,
    }
    return np.rint(total.sum * counted * spans).astype(np.int64), about


# --- selected rows --------------------------------------------------------------------------------
#
# Everybody's marks, summed with noise once before the first round.
#
# The sum and its noise are those of any statistic (`runs/statistics.py`); every client is
# charged for its marks before the first of them leaves.


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
    if not noise_of(plan).selects_rows:
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
            noise=noise_of(plan).statistic_noise(THE_POPULARITY),
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
            threshold=noise_of(self._plan).dp.threshold,
        )

    def marks(self, client: ClientId) -> Marks:
        return marked(self._bound.all_row_ids_of(self._data.of(int(client))), self._sizes)


def marked(rows: Mapping[str, Ids], sizes: Mapping[str, int]) -> Marks:
    """A client's marks over all tables, of norm 1 together, or 0 if it holds no row."""
    held = sum(len(rows[name]) for name in sizes)
    marks = np.zeros(sum(sizes.values()))
    start = 0
    for name, size in sizes.items():
        marks[rows[name].astype(np.int64) + start] = 1.0 / math.sqrt(max(held, 1))
        start += size
    return marks


# --- ledgers --------------------------------------------------------------------------------------
#
# Every simulated client's ledger, charged for what leaves it before the first round.
#
# A set-up sum and the popularity of rows are summed over all clients before there is a round. Each
# client is charged for its part first: a budget that does not cover it is an error before a word
# leaves anybody.


class Ledgers:
    """One for every client that was asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made: dict[ClientId, Ledger] = {}

    def of(self, client: ClientId) -> Ledger:
        if client not in self._made:
            self._made[client] = Ledger(bounds=noise_of(self._plan).bounds)
        return self._made[client]

    def charge_setup(self, clients: Iterable[ClientId]) -> None:
        """For their parts of a set-up sum; where it has no noise, every number is given it."""
        self._charge(clients, noise_of(self._plan).setup_events())

    def charge_selection(self, clients: Iterable[ClientId]) -> None:
        """For their marks, where rows are selected."""
        self._charge(clients, noise_of(self._plan).selection_events())

    def _charge(
        self, clients: Iterable[ClientId], events: Sequence[NoisySum | ExactRelease]
    ) -> None:
        limits = noise_of(self._plan).limits
        for client in clients:
            for event in events:
                reason = f"before the first round: {event.what}"
                self.of(client).spend(event, reason=reason, limits=limits)
