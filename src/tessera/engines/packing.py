"""Making a bundle: of a named task, or of synthetic clients where the plan names none."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tessera.engines import population
from tessera.engines.bundle import Bundle, SyntheticClients
from tessera.errors import ConfigError
from tessera.learning.initial import Given
from tessera.privacy.subjects import Printed
from tessera.rounds.plan import Plan


def pack_synthetic(plan: Plan, clients: int, rows: int) -> Bundle:
    """Clients with random rows and NumPy noise for updates (`engines/population.py`)."""
    if not plan.is_complete:
        raise ConfigError(
            "the plan names neither a task nor tables", hint="add [task] name, or [[table]]s"
        )
    if plan.dp is not None and plan.dp.by_examples:
        raise ConfigError(
            f"[dp] unit = {plan.dp.unit!r}: synthetic clients have no examples",
            hint='name a [task], or use unit = "user"',
        )
    maps = population.derived_maps(plan)
    return Bundle(
        plan=plan,
        dense=population.dense(plan),
        specs={t.name: population.spec(plan, t.name) for t in plan.tables},
        maps={
            name: each.images(np.arange(each.parent.size, dtype=np.uint64))
            for name, each in maps.items()
        },
        clients=clients,
        synthetic=SyntheticClients(clients=clients, rows=rows),
    )


def pack_task(plan: Plan, data: Path | None) -> Bundle:
    """The plan completed by its task, and the task's first model. Needs PyTorch."""
    from tessera import tasks
    from tessera.engines.training import Clients, complete

    task = tasks.load(plan.task.name, data=data, **plan.task.options)
    if task.setup is not None:
        raise ConfigError(
            f"task {task.name!r} has a set-up over all clients, which is not part of a deployment "
            "yet",
            hint="`tessera run` simulates it",
        )
    if plan.dp is not None and plan.dp.printed is Printed.CENTRAL:
        raise ConfigError(
            "CentralSubDP has clients send Z beside their gradients, which services do not carry",
            hint="`tessera run` simulates it",
        )
    plan = complete(plan, task)
    module = task.build(plan.seed)
    bound = task.bind(module)
    names = [t.name for t in bound.tables if not t.local]
    specs = {name: bound.spec(name, seed=plan.seed) for name in names}
    maps = {name: each for name, each in bound.derived_maps().items() if name in names}
    return Bundle(
        plan=plan,
        dense=bound.pack(module),
        specs=specs,
        given={n: bound.initial(n) for n in names if isinstance(specs[n].initial, Given)},
        maps={
            name: each.images(np.arange(each.parent.size, dtype=np.uint64))
            for name, each in maps.items()
        },
        clients=int(max(Clients(task, bound, plan).eligible)) + 1,
    )
