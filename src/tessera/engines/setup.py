"""Set-up of a task: a statistic over all clients, before the first round (`learning/setup.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.engines.secure_statistics import population_sum
from tessera.ids import ClientId
from tessera.learning.setup import SetupResult
from tessera.rounds.plan import Plan
from tessera.tasks import Task

SetupProgress = Callable[[str, int, int], None]
"""(what is under way, how many clients are done, of how many)."""


def set_up(
    task: Task, plan: Plan, entropy: Entropy | None = None, on_progress: SetupProgress | None = None
) -> tuple[Task, SetupResult | None]:
    """The task with the data that is trained on, once the sum over all clients is taken."""
    if task.setup is None:
        return task, None
    fitting = partial(on_progress, "fitting masks") if on_progress is not None else None
    if not task.setup.sums:
        ready = task.setup.finish(task.data, np.zeros(0, np.int64), fitting)
        return replace(task, data=ready.data), ready
    counts = {
        ClientId(client): task.setup.count(task.data.of(client))
        for client in range(task.data.clients)
        if task.data.offsets[client] < task.data.offsets[client + 1]
    }
    summing = partial(on_progress, "adding up") if on_progress is not None else None
    total = population_sum(counts, plan, "set-up", entropy or SystemEntropy(), summing)
    ready = task.setup.finish(task.data, total.sum, fitting)
    about = {"clients": total.clients, "groups": total.groups, "masked": total.secure_groups}
    ready = replace(ready, facts={**ready.facts, "sum": about})
    return replace(task, data=ready.data), ready
