"""Trainings in fixed groups to attack: the demo's shop (or a part of it), its sums and a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessera import tasks
from tessera.audit.epochs import EpochReplay
from tessera.audit.factors import OpenedFactors, bias_of
from tessera.audit.finding import Finding
from tessera.audit.guesses import GuessTrials
from tessera.audit.knowledge import PublicKnowledge
from tessera.audit.record import decoded
from tessera.audit.values import ValueAttacks
from tessera.cli.demo import MAX_ROWS, SHOP
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import SERVER, ClientId, RoundId
from tessera.plan import GroupsPlan, Plan, Scheme, SimulationPlan, TaskPlan, UnionPlan
from tessera.protocols.epochs.messages import EpochKind
from tessera.rounds.epochs.group import GroupEpochs
from tessera.rounds.events import RoundFinished
from tessera.rounds.messages import RoundResult
from tessera.runs import training as engine
from tessera.runs.held import rows_of_clients
from tessera.runs.training import Training, complete
from tessera.simulation.epochs import EpochFederation
from tessera.simulation.views import RoundViews
from tessera.tasks import Task

GROUP = 10
ONE_SIDED = 0.998
"""Level of the intervals: the lower end is above the truth once in a thousand tests."""


def shop(users: int, **options: object) -> Task:
    return tasks.load("taobao-like", **{**SHOP, "users": users, "seed": 0, **options})


def plan_for(task: Task, cohort: int, *, crypto: str = "none", examples: int = 0) -> Plan:
    """The demo's plan over a task; its sums are ideal unless `crypto` is "every"."""
    shops = task.data.name == "taobao-like"
    base = Plan(
        scheme=Scheme.SECURE_SUBMODEL,
        cohort=cohort,
        federation="attacked",
        groups=GroupsPlan(size=GROUP),
        union=UnionPlan(max_rows=MAX_ROWS) if shops else UnionPlan(),
        task=TaskPlan(name=task.name),
        simulation=SimulationPlan(evaluate_every=1000, crypto=crypto),
    )
    plan = complete(base, task)
    assert plan.training is not None
    return replace(plan, training=replace(plan.training, examples=examples))


def knowing(task: Task, plan: Plan) -> ValueAttacks:
    truth = rows_of_clients(task, plan)
    return ValueAttacks(plan.group_plan, truth, PublicKnowledge.of(plan, task))


def recorded(task: Task, plan: Plan, rounds: int, *, in_a_row: int = 0) -> ValueAttacks:
    """What a server sees of a run with real messages.

    With `in_a_row` one group after the other has so many rounds, alone: nobody else moves the model
    between two downloads of its members.
    """
    attacks, views, replay = knowing(task, plan), RoundViews({SERVER}), EpochReplay(plan)
    with Training(task, plan, entropy=ScriptedEntropy(b"shop"), views=views) as run:
        if in_a_row:
            take_turns(run, in_a_row)
        for event in run.run(rounds):
            if isinstance(event, RoundFinished):
                for view in replay.take(decoded(views.taken(SERVER))):
                    attacks.take(view)
    return attacks


def take_turns(run: Training, in_a_row: int) -> None:
    """One group after the other has so many rounds, alone."""
    assert isinstance(run.federation, EpochFederation)
    course = run.federation.epochs

    def due(round_id: RoundId, kind: EpochKind) -> list[ClientId]:
        group = course.group(int(round_id) // in_a_row)
        return sorted(group.due) if group.next_kind is kind else []

    course.unions = lambda round_id: due(round_id, EpochKind.UNION)
    course.invited = lambda round_id: due(round_id, EpochKind.UPDATE)


def summed(patch: pytest.MonkeyPatch, task: Task, plan: Plan, rounds: int) -> ValueAttacks:
    """The same with ideal sums, which open the same values."""
    attacks, original = knowing(task, plan), GroupEpochs.take
    root = next(t for t in plan.roots)
    bias, step = bias_of(plan, root), plan.quantizer.clip / plan.quantizer.top

    def watched(self: GroupEpochs, *given: Any) -> RoundResult | None:
        assert self.at.open is not None
        number, result = int(self.at.open.round_id), original(self, *given)
        if result is not None:
            biases = None if bias is None else result.tables[bias.name]
            moves, members = result.tables[root.name], tuple(sorted(self.group.members))
            one = OpenedFactors.of_means(number, members, moves, biases, step=step)
            attacks.add(one, last=members[-1])
        return result

    patch.setattr(GroupEpochs, "take", watched)
    with Training(task, plan, entropy=ScriptedEntropy(b"shop")) as run:
        for _ in run.run(rounds):
            pass
    patch.setattr(GroupEpochs, "take", original)
    return attacks


def best(trials: GuessTrials) -> Finding:
    """The share of right best guesses, with its one-sided interval at 99.9 %."""
    found, _ = trials.findings("attack", SERVER, meaning="", claim="")
    return found.at(ONE_SIDED)


def draw_in_public(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """The protection off: what clients draw follows from the seed and their numbers."""
    from tessera.audit.knowledge import public_secret

    patch.setattr(engine, "lasting_secret", lambda entropy, name, c: public_secret(plan, int(c)))
    patch.setattr(
        EpochFederation, "coins", lambda _, round_id, c: public_secret(plan, int(round_id), int(c))
    )
