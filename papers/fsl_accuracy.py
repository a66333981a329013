"""Accuracy with the largest changes only: Tables 7 and 8 of Cui et al. 2022, on TREC and MNIST.

Every cell is a run between two servers, kept in the cache folder: what was stopped goes on. Rounds
are ideal, over the same quantised integers, but for the last, which goes through both servers; it
is also made once more as an ideal round, and both models have to be the same to the bit. Bytes
are those of a client's report in that round, beside what plain shares of everything would take:
with 22-bit words keys are fewer bytes only below about two per cent, whatever the paper's 10 %
suggest.

The paper trains for 500 rounds (TREC) and 6,000 (MNIST), we for 40 and 100, with settings tuned on
a held-out part of the training examples.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Final

from papers.cells import Cell, Request, no_data, plain, target, there
from papers.runs import Trainings
from papers.show import Layout
from tessera import tasks
from tessera.errors import ConfigError
from tessera.learning.training.vectorised.learner import single_threaded
from tessera.plan import Crypto, Plan, Scheme, SimulationPlan, TaskPlan, UpdatePlan
from tessera.runs.folder import CHECKPOINT
from tessera.runs.training import Training, complete
from tessera.tasks import Task

SCRIPT: Final = "fsl accuracy"
ACCURACY: Final = "accuracy (%)"
BYTES: Final = "report (MB)"
MB: Final = 1e6
"""As in runs and reports; the paper prints no bytes of its own for these tables."""


@dataclass(frozen=True, slots=True)
class Selecting:
    """One row of a table: what is sent, the paper's accuracy, and what ours is to reach."""

    name: str
    update: Mapping[str, Any] = field(default_factory=dict)
    paper: float | None = None
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A task, how many clients take part, how long, and what is selected."""

    task: str
    cohort: int
    rounds: int
    quick: int
    rows: tuple[Selecting, ...]


ALL: Final = "all"
TRIALS: Final = {
    "trec": Trial(
        "trec",
        4,
        40,
        3,
        (
            Selecting(ALL, {}, 89.60, 85.0),
            Selecting("10 %", {"top": 0.1}, 89.20),
            Selecting("1 % with error feedback", {"top": 0.01, "error_feedback": True}, None, 84.0),
            Selecting("1 % of rows", {"top": 0.01, "top_by": "row"}, 89.67, 84.0),
            Selecting("0.1 % of rows", {"top": 0.001, "top_by": "row"}, 88.60),
        ),
    ),
    "mnist": Trial(
        "mnist",
        10,
        100,
        2,
        (
            Selecting(ALL, {}, 97.47, 97.8),
            Selecting("10 %", {"top": 0.1}, 97.40, 97.2),
            Selecting(
                "5 % with error feedback", {"top": 0.05, "error_feedback": True}, 97.36, 97.0
            ),
        ),
    ),
}
PARTS: Final = tuple(TRIALS)
DEFAULT: Final = PARTS
TAKES: Final = ("seeds", "rounds", "variants", "data")
LAYOUT: Final = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRun:
    """What came of one run. `same`: its last round was the plain twin's, to the bit."""

    accuracy: float
    report: float
    whole: float
    way: str
    same: bool | None


def plan_for(trial: Trial, row: Selecting, seed: int, rounds: int) -> Plan:
    """Between two servers; all of a dense part without tables has no place there, and is open."""
    plan = Plan(
        scheme=Scheme.TWO_SERVER,
        cohort=trial.cohort,
        federation=f"fsl accuracy, {trial.task}",
        seed=seed,
        task=TaskPlan(name=trial.task, options={"seed": seed}),
        update=UpdatePlan(**row.update),
        simulation=SimulationPlan(
            rounds=rounds,
            evaluate_every=max(1, rounds // 5),
            crypto=Crypto.SAMPLED,
            crypto_every=max(1, rounds - 1),  # the first round, and the last
        ),
    )
    return plan if row.update else replace(plan, scheme=Scheme.FEDAVG)


def outcome(request: Request, task: Task, trial: Trial, row: Selecting, seed: int) -> AccuracyRun:
    """One run, from the cache as far as it is there."""
    rounds = request.rounds or (trial.quick if request.quick else trial.rounds)
    plan = complete(plan_for(trial, row, seed, rounds), task)
    trainings = Trainings(request.cache, SCRIPT, request.watch)
    place = trainings.place(f"fsl-accuracy-{trial.task}-{seed}", plan, rounds, request.data)
    title = f"{trial.task}, {row.name}, {seed}"
    twin = place.with_suffix(".twin")
    if rounds > 1 and row.update and not twin.exists():
        trainings.run(place, task, plan, rounds - 1, title=title)
        shutil.copytree(place / CHECKPOINT, twin)
    run = trainings.run(place, task, plan, rounds, title=title)
    gc.collect()  # a training that has ended is full of cycles, and the next one needs its room
    last = run.rounds[-1]
    if run.metric is None:
        raise ConfigError(f"{place}: its last round was not tested", hint="use more rounds")
    same = None
    if twin.exists():
        same = _is_the_twin(trainings, place, twin, task, plan, rounds)
    return AccuracyRun(
        accuracy=100 * run.metric,
        report=last["bytes_up"]["update"] / MB,
        whole=plan.ring.bits * (plan.model.dense + 1) / 8 / MB,
        way=next(iter(dict(last["writing"]).values()), "in the clear"),
        same=same,
    )


def _is_the_twin(
    trainings: Trainings, place: Path, twin: Path, task: Task, plan: Plan, rounds: int
) -> bool:
    """The last round once more, as a plain sum, from where it began."""

    def model(plan: Plan, checkpoint: Path) -> bytes:
        with trainings.reopened(task, plan, checkpoint) as training:
            for _ in training.run(rounds):
                continue
            assert isinstance(training, Training)
            return training.dense.tobytes()

    with single_threaded():
        plain = model(plan.with_simulation(crypto=Crypto.NONE), twin)
        gc.collect()  # what a hundred clients keep back is gigabytes, and need not be there twice
        return model(plan, place / CHECKPOINT) == plain


def cells(request: Request) -> list[Cell]:
    """Every row of every set that was asked for; a set without files is left out with a note."""
    found: list[Cell] = []
    for name in request.parts:
        trial, seeds = TRIALS[name], request.seeds_of()
        loaded = there(
            lambda: {seed: tasks.load(trial.task, data=request.data, seed=seed) for seed in seeds},  # noqa: B023
            name,
        )
        if loaded is not None:
            found += _of_set(request, trial, loaded)
    if not found:
        raise no_data("fsl-accuracy")
    return found


def _of_set(request: Request, trial: Trial, loaded: Mapping[int, Task]) -> Iterator[Cell]:
    rows = _asked_for(request, trial)
    if request.quick and not request.variants:
        rows = [row for row in rows if row.target is not None]
    rounds = request.rounds or (trial.quick if request.quick else trial.rounds)
    table = f"{trial.task}, {rounds} rounds, {len(loaded)} seeds: accuracy by what clients send"
    for row in rows:
        made = [outcome(request, task, trial, row, seed) for seed, task in loaded.items()]
        scores = [each.accuracy for each in made]
        notes = [f"+- {pstdev(scores):.2f}"] if len(scores) > 1 else []
        if row.target is not None and not request.quick:
            notes.append(target(f"{row.target:g}", met=mean(scores) >= row.target))
        if made[0].same is not None:
            same = all(each.same for each in made)
            notes.append(
                "last round through both servers: "
                + ("the plain twin's model" if same else "NOT the plain twin's model")
            )
        note = "; ".join(notes)
        yield plain(table, row.name, ACCURACY, mean(scores), "%", note, paper=row.paper)
        one = made[0]
        note = f"{one.report / one.whole:.0%} of plain shares of everything; {one.way}"
        yield plain(table, row.name, BYTES, one.report, "MB", note)


def _asked_for(request: Request, trial: Trial) -> list[Selecting]:
    """The rows that were named, or all; a name that no set has is refused."""
    known = {row.name: None for each in TRIALS.values() for row in each.rows}
    for name in request.variants:
        if name not in known:
            raise ConfigError(
                f"fsl-accuracy: unknown row {name!r}", hint=f"one of {'; '.join(known)}"
            )
    return [row for row in trial.rows if not request.variants or row.name in request.variants]
