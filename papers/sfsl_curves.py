"""Learning curves: AUC by round, central, with every preset of index privacy, and full-model.

Figure 4 of Niu et al. (long version, VI-A) on data that anybody can have: two public sets and a
synthetic shop like the papers'. Presets run in the papers' setting: rows are opened for a single
client, and there are no decoys. That is insecure, and labelled so; with scripted entropy CPP1 and
CPP5 then train the same model. Cryptography is sampled; the other rounds are ideal.

Every cell is a run with a checkpoint, kept in the cache folder: what was stopped goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Final

from papers.cells import Cell, Request, no_data, plain, say, there
from papers.runs import Trainings, slug
from tessera import tasks
from tessera.learning.averaging import ServerStep
from tessera.learning.training.settings import LocalTraining
from tessera.plan import (
    Crypto,
    Plan,
    PrivacyPlan,
    Scheme,
    SecurityPlan,
    SimulationPlan,
    TaskPlan,
    UpdatePlan,
)
from tessera.report import page as report
from tessera.report.numbers import score
from tessera.rounds import schemes
from tessera.runs.folder import RunFolder
from tessera.runs.training import complete
from tessera.tasks import Task

LEVELS: Final = ("cpp1", "cpp2", "cpp3", "cpp4", "cpp5")


# A curve's variant is known by its preset of index privacy, or by its scheme where it has none.
CENTRAL: Final = Scheme.CENTRAL.value
FULL_MODEL: Final = Scheme.FEDAVG.value
VARIANTS: Final = (CENTRAL, *LEVELS, FULL_MODEL)
PERSONAL: Final = (CENTRAL, "cpp1", "cpp4")
QUICK: Final = (CENTRAL, "cpp1", "cpp4", "cpp5", FULL_MODEL)
COHORT: Final = 100
ROUNDS_AT: Final = 200
QUICK_ROUNDS: Final = 10
CURVES = SCRIPT = "curves"

# Niu et al., long version, VI-A: the highest AUC on the industrial data, which was never released.
PAPER: Final = {CENTRAL: 0.641, "cpp2": 0.615, "cpp4": 0.601, FULL_MODEL: 0.543}

FEDERATIONS: Final = {"synthetic shop": "made-up shop"}
"""A federation's name enters keys and coins: this one stays as it was."""

NAMES: Final = {CENTRAL: CENTRAL, FULL_MODEL: "full-model averaging"}


def title(variant: str) -> str:
    return NAMES.get(variant, variant.upper())


@dataclass(frozen=True, slots=True)
class DataSet:
    """A task with one of its models, and how a client trains it."""

    name: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[str, ...] = VARIANTS
    quick: Mapping[str, Any] = field(default_factory=dict)
    model: str = "din"
    training: LocalTraining | None = None  # None: as the task recommends, the server's step too

    def plan_task(self, variant: str, quick: bool) -> TaskPlan:
        """Full-model averaging averages the full model, user rows too, as in the papers.

        Averaged by rows, a user's row is changed by its own client only, and may stay local.
        """
        options: dict[str, Any] = {**self.options, **(self.quick if quick else {})}
        options |= {"model": self.model, "share_users": variant == FULL_MODEL}
        return TaskPlan(name=self.task, options=options)

    def load(self, variant: str, data: Path | None, quick: bool) -> Task:
        plan = self.plan_task(variant, quick)
        return tasks.load(plan.name, data=data, **plan.options)


SETS: Final = (
    DataSet(
        "Amazon electronics", "amazon", training=LocalTraining(batch=4, rate=0.1, table_rate=10.0)
    ),
    DataSet("MovieLens 1M", "movielens", model="biased", training=LocalTraining(batch=8, rate=0.3)),
    DataSet(
        "synthetic shop",
        "taobao-like",
        {"users": 5_000, "items": 20_000, "examples": 60, "history": 20},
        quick={"users": 1_000, "items": 6_000, "examples": 40},
        model="personal",
        training=LocalTraining(batch=8, rate=0.1, table_rate=6.0),
    ),
    DataSet("Amazon electronics (personal)", "amazon", variants=PERSONAL, model="personal"),
    DataSet("MovieLens 1M (personal)", "movielens", variants=PERSONAL, model="personal"),
)


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """One run: which set, which variant, which seed, and its AUC by round."""

    set: str
    variant: str
    seed: int
    points: Mapping[int, float]
    folder: Path


def plan_for(data: DataSet, variant: str, seed: int, rounds: int, quick: bool) -> Plan:
    """The papers' setting: a row is opened for a single client, no decoys, no dropouts.

    Schemes are compared under plain averaging, as in the papers; the personal model is trained as
    its task recommends.
    """
    return Plan(
        scheme=schemes.DEFAULT if variant in LEVELS else schemes.named(variant).scheme,
        cohort=COHORT,
        federation=f"curves, {FEDERATIONS.get(data.name, data.name)}",
        seed=seed,
        task=data.plan_task(variant, quick),
        training=data.training,
        server=None if data.training is None else ServerStep(),
        update=UpdatePlan() if data.training is None else UpdatePlan(clip=32.0, dense_clip=256.0),
        privacy=PrivacyPlan(
            level=variant if variant in LEVELS else "cpp1",
            decoys=0.0,
            min_group=1,
            insecure_small_groups=True,
            period_rounds=10_000,
        ),
        security=SecurityPlan(dropout=0.2),
        simulation=SimulationPlan(
            rounds=rounds,
            crypto=Crypto.SAMPLED,
            crypto_every=100_000,  # the first round only: it shows that the real one works
            evaluate_every=5 if quick else 10,
        ),
    )


def run_all(request: Request) -> list[LearningCurve]:
    """Every cell, cached, in the order of the sets; a set without files is skipped with a note."""
    quick = request.quick
    rounds = request.rounds or (QUICK_ROUNDS if quick else ROUNDS_AT)
    trainings = Trainings(request.cache / CURVES, SCRIPT, request.watch)
    found = []
    for each in (one for one in SETS if request.wants(one.name, one.task)):
        kinds = (FULL_MODEL, "cpp1")
        loaded = there(lambda: {k: each.load(k, request.data, quick) for k in kinds}, each.name)  # noqa: B023
        if loaded is None:
            continue
        asked = request.variants or (QUICK if quick else VARIANTS)
        for seed in request.seeds_of():
            for variant in (v for v in each.variants if v in asked):
                task = loaded[FULL_MODEL if variant == FULL_MODEL else "cpp1"]
                plan = complete(plan_for(each, variant, seed, rounds, quick), task)
                place = trainings.place(f"{each.name}-{variant}-{seed}", plan, rounds, request.data)
                title = f"{each.name}, {variant}, {seed}"
                run = trainings.run(place, task, plan, rounds, title=title)
                found.append(LearningCurve(each.name, variant, seed, dict(run.curve), place))
    if not found:
        raise no_data(CURVES)
    return found


def pages(curves: Sequence[LearningCurve], folder: Path) -> list[Path]:
    """A page per set, with the curves of its first seed."""
    made = []
    for name in dict.fromkeys(curve.set for curve in curves):
        of_set = [curve for curve in curves if curve.set == name]
        first = [curve.folder for curve in of_set if curve.seed == of_set[0].seed]
        out = folder / f"{slug(name)}.html"
        made.append(report.write(first, out))
    return made


# --- cells ----------------------------------------------------------------------------------------


def cells(request: Request) -> Iterator[Cell]:
    """AUC at the last round over seeds, baselines beside it; then the curves. A page per set."""
    drawn = run_all(request)
    for name in dict.fromkeys(curve.set for curve in drawn):
        yield from set_cells(name, [curve for curve in drawn if curve.set == name])
    for page in pages(drawn, request.cache / CURVES):
        say(f"page: {page}")


def set_cells(name: str, drawn: Sequence[LearningCurve]) -> Iterator[Cell]:
    found = figures(drawn)
    last = max(at for _, at in found)
    table = f"AUC at round {last}, {name} (long version, VI-A)"
    baselines: dict[str, float] = RunFolder.load(drawn[0].folder).fact("trivial")
    for predictor, value in baselines.items():
        yield plain(table, f"{predictor}, no model", "test part", value)
    central = found.get((CENTRAL, last))
    for (variant, at), values in found.items():
        if at != last:
            continue
        ours, seeds = mean(values), len(values)
        off = score(pstdev(values), digits=4)
        notes = ["one seed" if seeds == 1 else f"+- {off} over {seeds} seeds"]
        if central is not None and variant != CENTRAL:
            notes.append(f"{ours - mean(central):+.4f} to central")
        if variant == "cpp5" and (same := same_model(drawn)) is not None:
            notes.append("CPP1's to the last digit" if same else "NOT CPP1's")
        if variant == FULL_MODEL:
            notes.append("user rows averaged too")
        if variant in PAPER:
            notes.append("paper: highest, industrial data")
        column = f"seeds {', '.join(str(c.seed) for c in drawn if c.variant == variant)}"
        note, paper = "; ".join(notes), PAPER.get(variant)
        yield plain(table, title(variant), column, ours, "", note, paper=paper)
    for (variant, at), values in found.items():
        yield plain(f"AUC by round, {name}", title(variant), str(at), mean(values))


def figures(drawn: Sequence[LearningCurve]) -> dict[tuple[str, int], list[float]]:
    """Of one set: for each variant and round the values of all seeds, in order."""
    found = {}
    for variant in dict.fromkeys(c.variant for c in drawn):
        points = [c.points for c in drawn if c.variant == variant]
        for at in sorted(set.intersection(*map(set, points))):
            found[variant, at] = [own[at] for own in points]
    return found


def same_model(drawn: Sequence[LearningCurve]) -> bool | None:
    """Whether CPP1 and CPP5 have the same metrics in every round, to the last digit."""
    first, last = ({c.seed: c.points for c in drawn if c.variant == v} for v in ("cpp1", "cpp5"))
    shared = first.keys() & last.keys()
    if not shared:
        return None
    return all(json.dumps(first[seed]) == json.dumps(last[seed]) for seed in shared)
