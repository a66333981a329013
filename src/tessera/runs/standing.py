"""The model of a run's last checkpoint, as it stands; of a task with two models their mixture.

A task may have a second model over the same sequences (`Task.beside`). It has a run of its own, in
a folder inside the run's, by a plan of its own (`plan_beside` in `plan/defaults.py`). A user's
scores of either are brought to one scale, and the weight of the second is the one with the best
NDCG on examples that neither was trained on; it is stored with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data.examples import Examples
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.learning.metrics import UNIT, gains, next_measures
from tessera.learning.rankers import AT_ONCE, placed, ranks
from tessera.learning.scores import ItemScores, evaluate
from tessera.plan import Metrics
from tessera.rounds import schemes
from tessera.rounds.cohorts import cohorts_of
from tessera.runs import central, training
from tessera.runs.central import CentralTraining
from tessera.runs.folder import BESIDE, CHECKPOINT, RunFolder, digest_of, entropy_of
from tessera.runs.statistics import population_sum
from tessera.runs.training import Training, complete, eligible
from tessera.tasks import Task

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIXTURE: Final = "mixture"
"""The fact of a run that says what its second model counts."""
WEIGHTS: Final = tuple(step / 20 for step in range(21))
"""Of the second model, that are tried."""
WHAT: Final = "weights of a mixture"
"""The sum by which clients choose one, among their other sums."""


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model of a run's last checkpoint: what it gives for examples, and for every item.

    Of a mixture `parts` has the two models by name.
    """

    rounds: int
    scores: Callable[[Examples], npt.NDArray[np.float32]]
    of_all_items: ItemScores
    parts: Mapping[str, ItemScores] = field(default_factory=dict)


@contextmanager
def standing(log: RunFolder, task: Task) -> Iterator[RunModel]:
    """The model as it stands, in one place or with everybody's own rows; or both models, mixed."""
    if task.beside is None:
        with _alone(log, task) as one:
            yield one
        return
    weight = float(log.fact(MIXTURE, "weight"))
    with both(log, task) as (one, other):
        models = one.of_all_items, other.of_all_items

        def scores(some: Examples) -> Doubles:
            return mixed(models[0](some), models[1](some), weight)

        parts = dict(zip(task.beside.names, models, strict=True))
        yield RunModel(one.rounds, one.scores, scores, parts)


@contextmanager
def both(log: RunFolder, task: Task) -> Iterator[tuple[RunModel, RunModel]]:
    """The two models of a run, each as it stands."""
    assert task.beside is not None
    inside = RunFolder.load(log.folder / BESIDE)
    check_run(inside, task.beside.task)
    with _alone(log, task) as one, _alone(inside, task.beside.task) as other:
        yield one, other


@contextmanager
def _alone(log: RunFolder, task: Task) -> Iterator[RunModel]:
    plan, checkpoint = complete(log.plan, task), log.folder / CHECKPOINT
    entropy = entropy_of(log)
    if not schemes.of(plan).federated:
        one = CentralTraining(task, plan, folder=checkpoint, entropy=entropy)
        known = one.central.parameters()
        yield RunModel(
            one.rounds_done,
            lambda some: evaluate(one.module, one.bound, known, some),
            lambda some: evaluate(one.module, one.bound, known, some, rank=False),
        )
        return
    with Training(task, plan, folder=checkpoint, entropy=entropy) as stood:
        tables = stood.tables | stood.local
        of_all_items = stood.evaluation.of_all_items(stood.dense, tables)
        yield RunModel(
            stood.rounds_done,
            lambda some: stood.evaluation.scores(stood.dense, tables, some),
            of_all_items,
        )


def model_file(log: RunFolder) -> Path:
    """Where a run's model is, once a round of it is checkpointed."""
    name = training.STORE if schemes.of(log.plan).federated else central.STATE
    return log.folder / CHECKPOINT / name


def check_run(log: RunFolder, task: Task) -> None:
    """`ConfigError` where the run has no model yet, or was trained on other data."""
    if log.facts.get("data") != digest_of(task):
        raise ConfigError(
            f"{log.folder} was trained on other data than is here now",
            hint="name the folder it was trained on with --data",
        )
    missing = task.setup is not None and "setup" not in log.facts
    if not model_file(log).is_file() or missing:
        raise ConfigError(
            f"{log.folder}: no round of this run is checkpointed, so there is no model",
            hint="let it finish a round: tessera run --resume",
        )
    if task.beside is not None and MIXTURE not in log.facts:
        raise ConfigError(
            f"{log.folder}: its second model is not there yet",
            hint="let it finish: tessera run --resume",
        )


# --- mixing ---------------------------------------------------------------------------------------


def mixed(one: npt.NDArray[Any], other: npt.NDArray[Any], weight: float) -> Doubles:
    """Scores (N, m) of two models in one: each user's at mean 0 and deviation 1 over all items."""
    return np.asarray((1.0 - weight) * _standard(one) + weight * _standard(other))


def _standard(scores: npt.NDArray[Any]) -> Doubles:
    whole = scores.astype(np.float64)
    spread = whole.std(axis=1, keepdims=True)
    return np.asarray((whole - whole.mean(axis=1, keepdims=True)) / np.maximum(spread, 1e-12))


def weighed(log: RunFolder, task: Task) -> dict[str, Any]:
    """What the second model is to count, and how it came out: a fact of the run.

    With `metrics = "federated"` each client computes its gain for every weight, and only the sum
    over all clients, or over each fixed group, leaves; the test part is looked at in one place only
    where the plan tests the model there.
    """
    beside, plan = task.beside, log.plan
    assert beside is not None
    names = (*beside.names, "+".join(beside.names))
    federated = plan.simulation.metrics is Metrics.FEDERATED
    with both(log, task) as (one, other):
        gained = _gained(one.of_all_items, other.of_all_items, beside.held)
        total = _over_clients(log, task, gained) if federated else gained.sum(axis=0)
        best = WEIGHTS[int(np.argmax(total))]
        models = (
            one.of_all_items,
            other.of_all_items,
            lambda some: mixed(one.of_all_items(some), other.of_all_items(some), best),
        )
        tested = {
            name: next_measures(ranks(model, task.data.test))
            for name, model in zip(names, models, strict=True)
            if not federated
        }
    return {
        "names": list(beside.names),
        "weight": best,
        "users": len(beside.held),
        "curve": [
            [weight, float(each) * UNIT / len(beside.held)]
            for weight, each in zip(WEIGHTS, total, strict=True)
        ],
        "test": tested,
    }


def _gained(one: ItemScores, other: ItemScores, held: Examples) -> Ints:
    """What each weight gains each of these examples, (N, weights), in units."""
    found = np.zeros((len(held), len(WEIGHTS)), np.int64)
    for low in range(0, len(held), AT_ONCE):
        some = held.take(slice(low, low + AT_ONCE))
        given = one(some), other(some)
        for at, weight in enumerate(WEIGHTS):
            scores = mixed(*given, weight)
            found[low : low + len(some), at] = np.rint(gains(placed(scores, some), 10) / UNIT)
    return found


def _over_clients(log: RunFolder, task: Task, gained: Ints) -> Ints:
    """Their sum under the plan's security; who has no such example adds zeros."""
    assert task.beside is not None
    plan = complete(log.plan, task)
    clients = eligible(task.data, plan)
    groups = cohorts_of(plan).formed(clients)
    vectors = {client: np.zeros(len(WEIGHTS), np.int64) for client in clients}
    for user, own in zip(task.beside.held["user"].tolist(), gained, strict=True):
        vectors[ClientId(user)] = own
    if groups:
        vectors = {client: vectors[client] for group in groups for client in group}
    found = population_sum(vectors, plan, WHAT, entropy_of(log), groups=groups)
    return found.sum
