"""People in a simulation: what a number per subject takes for granted is looked at before training.

In a deployment nobody sees all clients' data, and the bounds are assumptions. Here they can be
counted, and a run whose data break them is refused: its number would be about other data.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.data.subjects import check_local_rows, check_named, check_spread, one_unnamed
from tessera.learning.bound_model import BoundModel
from tessera.privacy.guarantee import Unit
from tessera.privacy.noise_setting import Drawn
from tessera.rounds.plan import Plan, Unknown
from tessera.tasks.task import Task


def with_subjects(task: Task, bound: BoundModel, plan: Plan) -> Task:
    """The task with every record's subject known, where the plan protects subjects."""
    section = plan.dp
    if section is None or section.protects is not Unit.SUBJECT:
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
