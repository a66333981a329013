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
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Final

from papers.cells import Cell, Request, say
from papers.runs import training_version
from tessera import tasks
from tessera.api import Run, simulate
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.learning.training.vectorised.learner import single_threaded
from tessera.plan import Crypto, Plan, Scheme, SimulationPlan, TaskPlan, UpdatePlan
from tessera.runs.folder import CHECKPOINT, PLAN
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
SEEDS: Final = (0, 1, 2)


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
    key = hashlib.sha256(f"{plan.digest.hex()} {rounds} {training_version()}".encode()).hexdigest()
    place = request.cache / f"fsl-accuracy-{trial.task}-{seed}-{key[:12]}"
    twin = place.with_suffix(".twin")

    def run_to(total: int) -> Run:
        run, started = Run(place), (place / PLAN).exists()
        if started and len(run.rounds) >= total:
            return run
        title = f"{trial.task}, {row.name}, {seed}"
        with request.watch(total, title=title, metric=task.metric.name) as watcher:
            return simulate(
                task,
                plan,
                total,
                out=place,
                resume=started,
                insecure_test_entropy=None if started else SCRIPT,
                on_event=watcher.on_event,
            )

    if rounds > 1 and row.update and not twin.exists():
        run_to(rounds - 1)
        shutil.copytree(place / CHECKPOINT, twin)
    run = run_to(rounds)
    gc.collect()  # a training that has ended is full of cycles, and the next one needs its room
    last = run.rounds[-1]
    if run.metric is None:
        raise ConfigError(f"{place}: its last round was not tested", hint="use more rounds")
    return AccuracyRun(
        accuracy=100 * run.metric,
        report=last["bytes_up"]["update"] / MB,
        whole=plan.ring.bits * (plan.model.dense + 1) / 8 / MB,
        way=next(iter(dict(last["writing"]).values()), "in the clear"),
        same=_is_the_twin(place, twin, task, plan, rounds) if twin.exists() else None,
    )


def _is_the_twin(place: Path, twin: Path, task: Task, plan: Plan, rounds: int) -> bool:
    """The last round once more, as a plain sum, from where it began."""
    entropy = ScriptedEntropy(SCRIPT.encode())
    ideal = plan.with_simulation(crypto=Crypto.NONE)
    with single_threaded():
        with Training(task, ideal, folder=twin, entropy=entropy) as training:
            for _ in training.run(rounds):
                continue
            plain = training.dense.tobytes()
        del training
        gc.collect()  # what a hundred clients keep back is gigabytes, and need not be there twice
        with Training(task, plan, folder=place / CHECKPOINT, entropy=entropy) as training:
            return training.dense.tobytes() == plain


def cells(request: Request) -> list[Cell]:
    """Every row of every set that was asked for; a set without files is left out with a note."""
    found: list[Cell] = []
    for name in request.parts:
        try:
            found += _of_set(request, TRIALS[name])
        except ConfigError as error:
            if "data folder" not in str(error) and " no " not in str(error):
                raise
            say(f"left out: {error}")
    if not found:
        raise ConfigError("fsl-accuracy: no data set is there", hint="see docs/data.md, or --data")
    return found


def _of_set(request: Request, trial: Trial) -> Iterator[Cell]:
    seeds = request.seeds or (SEEDS[:1] if request.quick else SEEDS)
    loaded = {seed: tasks.load(trial.task, data=request.data, seed=seed) for seed in seeds}
    rows = _asked_for(request, trial)
    if request.quick and not request.variants:
        rows = [row for row in rows if row.target is not None]
    rounds = request.rounds or (trial.quick if request.quick else trial.rounds)
    table = f"{trial.task}, {rounds} rounds, {len(seeds)} seeds: accuracy by what clients send"
    for row in rows:
        made = [outcome(request, loaded[seed], trial, row, seed) for seed in seeds]
        scores = [each.accuracy for each in made]
        notes = [f"+- {pstdev(scores):.2f}"] if len(scores) > 1 else []
        if row.target is not None and not request.quick:
            met = "met" if mean(scores) >= row.target else "MISSED"
            notes.append(f"target {row.target:g}: {met}")
        if made[0].same is not None:
            same = all(each.same for each in made)
            notes.append(
                "last round through both servers: "
                + ("the plain twin's model" if same else "NOT the plain twin's model")
            )
        paper, ours = row.paper, mean(scores)
        yield _cell(table, row.name, ACCURACY, paper, ours, "%", "; ".join(notes))
        one = made[0]
        note = f"{one.report / one.whole:.0%} of plain shares of everything; {one.way}"
        yield _cell(table, row.name, BYTES, None, one.report, "MB", note)


def _asked_for(request: Request, trial: Trial) -> list[Selecting]:
    """The rows that were named, or all; a name that no set has is refused."""
    known = {row.name: None for each in TRIALS.values() for row in each.rows}
    for name in request.variants:
        if name not in known:
            raise ConfigError(
                f"fsl-accuracy: unknown row {name!r}", hint=f"one of {'; '.join(known)}"
            )
    return [row for row in trial.rows if not request.variants or row.name in request.variants]


def _cell(
    table: str, row: str, column: str, paper: float | None, ours: float, unit: str, note: str
) -> Cell:
    return Cell(table=table, row=row, column=column, paper=paper, ours=ours, unit=unit, note=note)
