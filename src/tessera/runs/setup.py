"""Set-up of a task before the first round: what clients draw for good, and a sum over all of them.

Negatives are drawn first, where the data has places for them (`data/negatives.py`). The sum is a
statistic that a task may need (`learning/task_setup.py`).

Where a plan has noise per user, the sum has its share of the budget: a client's part is counted in
examples, scaled down to `counted` of them, and summed with noise. Else it is exact, and is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.data.examples import ClientData
from tessera.data.negatives import draw
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.learning.task_setup import Progress, Setup, SetupResult
from tessera.plan import Plan
from tessera.rounds import dp
from tessera.rounds.fixed_groups import FixedGroup
from tessera.rounds.root import lasting_secret
from tessera.runs.noisy_statistics import NoisyStatistic
from tessera.runs.secure_statistics import population_sum
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
    if plan.grouped:
        if not groups:
            raise ConfigError(
                f"{len(clients)} clients with data make no group of {plan.privacy.group_size}",
                hint="more clients, or smaller groups",
            )
        clients = sorted(client for group in groups for client in group)
    charge(clients)
    summing = partial(on_progress, "adding up") if on_progress is not None else None
    if plan.dp is not None and plan.dp.setup:
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
    spans, counted = setup.spans(data), dp.section(plan).counted
    statistic = NoisyStatistic(
        plan=plan, entropy=entropy, what=WHAT, noise=dp.setup_noise(plan), words=len(spans)
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
