"""Which rows of a table, and how many, the clients of a task hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.data.examples import NONE
from tessera.ids import ClientId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.rounds.cohorts import cohorts_of
from tessera.runs.training import Clients
from tessera.tasks import Task

MOST_LOOKED_AT: Final = 2000
"""Clients whose rows are counted to find out how many they hold."""
ROUND_UP: Final = 16


def rows_of_clients(task: Task, plan: Plan) -> dict[ClientId, Ids]:
    """Every eligible client's rows, as ids of the one space of all tables (`Plan.offsets`)."""
    clients = Clients(task, task.tables.bind(task.build(plan.seed)), plan)
    return {
        c: np.sort(
            np.concatenate(
                [ids + np.uint64(plan.offsets[n]) for n, ids in clients[c].local.real.items()]
            )
        )
        for c in clients.eligible
    }


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of a table that a task's clients hold: on average, and at most.

    A negative that is not drawn yet counts as a row of its own, so that nothing here depends on
    what clients draw.
    """

    mean: int
    most: int
    clients: int = 0
    """How many there are with enough examples to take part."""
    looked_at: int = 0
    over_cap: int = 0
    """Of those looked at, who hold more than the plan's cap of a table."""

    @classmethod
    def of(cls, task: Task, plan: Plan) -> HeldRows:
        """Of all eligible clients, or of a sample where there are many."""
        trained = cohorts_of(plan).task_of(task)
        clients = Clients(task, trained.bind(trained.build(plan.seed)), plan)
        some = clients.eligible[:: max(1, len(clients) // MOST_LOOKED_AT)]
        held = [
            [len(ids) + _undrawn(task, c) for ids in clients[c].local.real.values()] for c in some
        ]
        counts = [count for of_client in held for count in of_client]
        mean = max(1, round(sum(counts) / max(1, len(counts))))
        over = sum(max(one, default=0) > plan.union.max_rows for one in held)
        return cls(mean, max(counts, default=1), len(clients), len(held), over)

    @property
    def fitting(self) -> int:
        """A max_rows that no client's rows exceed."""
        return -(-self.most // ROUND_UP) * ROUND_UP


def _undrawn(task: Task, client: ClientId) -> int:
    """Negatives that this client has yet to draw."""
    if task.data.undrawn is None:
        return 0
    return int((task.data.of(int(client))["item"] == NONE).sum())
