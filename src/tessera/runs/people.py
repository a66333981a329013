"""People in a simulation: what a number per subject takes for granted is looked at before training.

In a deployment nobody sees all clients' data, and the bounds are assumptions. Here they can be
counted, and a run whose data break them is refused: its number would be about other data.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.data.subjects import check_local_rows, check_named, check_spread, one_unnamed
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel
from tessera.plan import DPPlan, Plan, Unknown
from tessera.privacy.dp.noise_setting import Drawn
from tessera.rounds.noise import noise_of
from tessera.tasks.task import Task


def check_home(section: DPPlan, task: Task) -> None:
    """Refuse state at home that would carry what noise is to hide past the noise.

    Per example nothing may stay that is not trained under noise; per person what belongs to one
    person may, as it comes and goes with the person.
    """
    own, unit = task.setup is not None and task.setup.keeps, section.unit.value
    several = task.data.train.subjects is not None
    if section.unit in ("index", "item") and (own or task.learner is not None):
        what = "fit masks" if own else "do not train by gradient descent"
        raise ConfigError(
            f"[dp] unit = {unit!r} with task {task.name!r}, whose clients {what}: what "
            "they keep would carry one example into all later updates",
            hint='use unit = "user" or "subject", or a task that trains by batches',
        )
    if own and several:
        raise ConfigError(
            f"[dp] unit = {unit!r} with task {task.name!r}, whose clients fit masks to the "
            "data of several people: a mask carries one person into the updates of the others",
            hint='leave mask out, or use unit = "user"',
        )
    if task.learner is not None and task.noisy_learner is None:
        raise ConfigError(
            f"[dp] unit = {unit!r} with task {task.name!r}, whose clients do not train by "
            "gradient descent: no step of theirs is clipped per person",
            hint='use unit = "user": where a client is one person it protects the same',
        )


def check_shared_rows(task: Task, bound: BoundModel) -> None:
    """Refuse a shared table with a row for each client, where a fixed group is to hide holders.

    Such a row says whose it is. Its values are in the model, and the updates of all other rows that
    its client holds follow from them: whoever compares finds the holder of each.
    """
    whose = np.repeat(np.arange(task.data.clients), np.diff(task.data.offsets))
    for table in bound.tables:
        roots = () if table.local or table.derived_from else table.fields
        columns = [task.data.train[name] for name in roots]
        if any(column.ndim == 1 and np.array_equal(column, whose) for column in columns):
            raise ConfigError(
                f'level = "groups" with table {table.name!r}, which has a row for each client: '
                "its group would not hide which rows the client holds",
                hint="leave share_users out (in a task of one's own, declare the table as Local), "
                "or name another level",
            )


def with_subjects(task: Task, bound: BoundModel, plan: Plan) -> Task:
    """The task with every record's subject known, where the plan protects subjects."""
    section = noise_of(plan).of_people
    if section is None:
        return task
    data = task.data
    if section.unknown is Unknown.ONE_SUBJECT:
        data = one_unnamed(data)
    check_named(data)
    check_spread(
        data,
        records=section.records_per_subject if section.drawn is Drawn.RECORDS else 0,
        clients=section.clients_per_subject,
    )
    check_local_rows(data, tuple(f for t in bound.tables if t.local for f in t.fields))
    return replace(task, data=data)
