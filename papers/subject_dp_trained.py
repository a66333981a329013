"""What noise costs recommenders that are trained by a real plan, epsilon by epsilon.

Per user: one bias per item over masks that every client fits again at home, three rounds with
everybody, a tenth of the budget for the popularity of items (`tessera.tasks`, `PrivateSettings`).

Per index, on a made-up shop: a small recommender without anything that stays at home, a number per
item, and a few per category, which compare an item with what the user clicked before. Histories are
what makes an index more than a row's own words. At one epsilon both units have the noise that they
ask for, and all else is alike, but that per index examples are cut and clipped one by one and per
user all that a client sends is. A row is learnt if it ends closer to where a run without noise
takes it than to where it began.

Every figure is a run of the trainer with the plan's own noise, from the run's entropy; masks and
point functions are left out (`crypto = "none"`), which change no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from papers.cells import Cell, Request, plain
from papers.runs import Cache, Trainings
from papers.subject_dp_shops import DELTA, EPSILONS, NO_NOISE, column, summed
from tessera.api import Run
from tessera.crypto.shamir import MAX_HOLDERS
from tessera.data.examples import LABEL, ClientData, Examples
from tessera.data.movielens import movielens_1m, ratings_1m, ratings_100k
from tessera.data.ratings import Attributes, RatingData
from tessera.data.taobao_like import taobao_like
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.bound_model import Derived, Table
from tessera.learning.metrics import ClickMetric
from tessera.learning.module_tables import Tables
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised.learner import single_threaded
from tessera.plan import (
    Crypto,
    DPPlan,
    NoisyRows,
    Plan,
    Scheme,
    SecurityPlan,
    SimulationPlan,
    Trust,
    UpdatePlan,
)
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.protocols.secagg.params import GraphKind
from tessera.rounds import schemes
from tessera.rounds.noise import noise_of
from tessera.runs.folder import CHECKPOINT
from tessera.runs.training import Training, complete
from tessera.tasks import Task, rating_task
from tessera.tasks.known import known

SCRIPT: Final = "subject-dp"
HARDLY: Final = 0.01
"""Noise over the clip in runs without noise: clipped, selected and divided like all others."""
QUICK_EPSILONS: Final = (3.0,)
NO_MODEL: Final = "a trivial predictor, without privacy"


class Line(Protocol):
    """A line of a table: who is protected, how, and the plan of that."""

    @property
    def name(self) -> str: ...

    def plan(self, clients: int, epsilon: float, seed: int) -> Plan: ...


@dataclass(frozen=True, slots=True)
class NoisyRuns:
    """Trainings with noise and what they gave, kept by what was asked for."""

    cache: Cache
    request: Request

    def baselines(self, name: str, seed: int, task: Callable[[], Task]) -> dict[str, float]:
        def work() -> dict[str, Any]:
            made = task()
            return dict(made.metric.baselines(made.data))

        title = f"{name}, seed {seed}"
        return self.cache.get("trivial-noisy", {"set": name, "seed": seed}, work, title=title)

    def figures(
        self,
        name: str,
        line: Line,
        epsilon: float,
        seed: int,
        task: Callable[[], Task],
        read: Callable[[Trainings, Run], dict[str, Any]],
    ) -> dict[str, Any]:
        """The score, the noise over the clip, and what else is read of the run."""
        title = f"{name}, {line.name}, epsilon {epsilon:g}, seed {seed}"

        def work() -> dict[str, Any]:
            made = task()
            plan = complete(line.plan(made.data.clients, epsilon, seed), made)
            rounds = plan.simulation.rounds
            # The seed is in the text, so that every seed has noise of its own.
            script = f"{SCRIPT}, seed {seed}"
            trainings = Trainings(self.cache.folder, script, self.request.watch)
            place = trainings.place(title, plan, rounds, self.request.data)
            run = trainings.run(place, made, plan, rounds, title=title)
            assert plan.dp is not None
            return {"noise": plan.dp.noise, "score": run.metric, **read(trainings, run)}

        setting = {"set": name, "line": repr(line), "epsilon": epsilon, "seed": seed}
        return self.cache.get("noisy", setting, work, title=title)


# --- per user -------------------------------------------------------------------------------------

ML_100K, ML_1M, CLICKS, SHOP = (
    "MovieLens 100K",
    "MovieLens 1M",
    "MovieLens 1M as clicks",
    "made-up shop",
)
SETS: Final = (ML_100K, ML_1M, CLICKS, SHOP)
UNITS: Final = {ML_100K: "RMSE", ML_1M: "RMSE", CLICKS: "AUC", SHOP: "AUC"}
SHOP_SIZE: Final = {"users": 2_000, "items": 5_000, "categories": 20, "history": 1}

ALL: Final = -10.0
"""A threshold that every row is above."""
FACTORS_DECAY: Final = 0.1
FACTORS_SPREAD: Final = 0.1
"""Of runs with factors: the best of a few on the validation part of 100K, at epsilon 10."""
STEP_OF_ALL: Final = 40.0
"""The server's rate where sums are divided by the number of clients: a first guess, not tuned."""
ATTAINABLE: Final = {
    ML_100K: {1.0: 0.992, 3.0: 0.954, 10.0: 0.933, 0.0: 0.922},
    ML_1M: {1.0: 0.923, 3.0: 0.901, 10.0: 0.891, 0.0: 0.887},
}
"""Seen before in a throw-away simulation: one split, settings from its test part."""
BEST: Final = "the best model here without privacy"
WITHOUT: Final = {ML_100K: 0.902, ML_1M: 0.858}
"""What that reaches (docs/results.md, ratings)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedLine:
    """One line of a table: who adds the noise, on which rows, and the model."""

    name: str
    scheme: str
    trust: Trust = Trust.SERVER
    rows: NoisyRows = NoisyRows.SELECTED
    threshold: float = ALL
    factors: int = 0

    def plan(self, clients: int, epsilon: float, seed: int) -> Plan:
        """Three rounds with everybody; the cohort of a secure sum is everybody, too."""
        return Plan(
            scheme=schemes.named(self.scheme).scheme,
            cohort=clients,
            seed=seed,
            training=LocalTraining(
                batch=0, rate=1.0, decay=1.0, weight_decay=FACTORS_DECAY if self.factors else 0.0
            ),
            server=ServerStep(rate=STEP_OF_ALL if self.rows is NoisyRows.ALL else 1.0),
            security=SecurityPlan(
                graph=GraphKind.SPARSE if clients > MAX_HOLDERS else GraphKind.COMPLETE
            ),
            dp=DPPlan(
                unit=Unit.USER,
                epsilon=epsilon,
                noise=0.0 if epsilon else HARDLY,
                delta=DELTA,
                trust=self.trust,
                rows=self.rows,
                threshold=self.threshold if self.rows is NoisyRows.SELECTED else 2.0,
            ),
            simulation=SimulationPlan(rounds=3, evaluate_every=3, crypto=Crypto.NONE),
        )


TRUSTS: Final = (
    TrainedLine(name="a trusted server", scheme="fedavg"),
    TrainedLine(name="shares of clients", scheme="secure-fedavg", trust=Trust.SHARES),
    TrainedLine(name="each of two servers", scheme="two-server", trust=Trust.EACH),
    TrainedLine(name="every client for itself", scheme="fedavg", trust=Trust.LOCAL),
)
FACTORS: Final = tuple(
    TrainedLine(name=f"a trusted server, {k} factors", scheme="fedavg", factors=k) for k in (2, 4)
)
ROWS: Final = (
    TrainedLine(name="selected rows, over 2 deviations", scheme="fedavg", threshold=2.0),
    TrainedLine(name="every row, divided by popularity", scheme="fedavg"),
    TrainedLine(name="every row, divided by clients", scheme="fedavg", rows=NoisyRows.ALL),
)
TABLES: Final = {
    ML_100K: (*TRUSTS, *FACTORS),
    ML_1M: (*TRUSTS, *FACTORS),
    CLICKS: TRUSTS[:1],
    SHOP: ROWS,
}
QUICK: Final = {ML_100K: TRUSTS, SHOP: ROWS[:2]}


def user_cells(cache: Cache, request: Request) -> Iterator[Cell]:
    """Every set of the request, or of the tables."""
    tables = QUICK if request.quick else TABLES
    runs = NoisyRuns(cache, request)
    for name in filter(request.wants, SETS if request.sets else tables):
        yield from of_set(runs, name, tables.get(name, TABLES[name]))


def of_set(runs: NoisyRuns, name: str, lines: Sequence[TrainedLine]) -> Iterator[Cell]:
    table, unit, request = f"{name}, {UNITS[name]}, noise per user", UNITS[name], runs.request
    seeds = request.seeds_of()

    def task(seed: int, factors: int = 0) -> Callable[[], Task]:
        return lambda: loaded(name, seed, factors, request.data)

    guesses = [runs.baselines(name, seed, task(seed)) for seed in seeds]
    for row in guesses[0]:
        yield summed(table, row, NO_NOISE, [guess[row] for guess in guesses], unit, NO_MODEL)
    if name in WITHOUT:
        note = "64 factors over masks; five seeds on 100K, one on 1M"
        yield plain(table, BEST, NO_NOISE, WITHOUT[name], unit, note)
    for line in lines:
        for epsilon in (*(QUICK_EPSILONS if request.quick else EPSILONS), 0.0):
            if not epsilon and line.trust is not Trust.SERVER:
                continue
            found = [
                runs.figures(name, line, epsilon, seed, task(seed, line.factors), selected)
                for seed in seeds
            ]
            note = noted(name, line, epsilon, found[0])
            scores = [one["score"] for one in found]
            yield summed(table, line.name, column(epsilon), scores, unit, note)


def selected(trainings: Trainings, run: Run) -> dict[str, Any]:
    """How many rows were over the noise, where rows are selected."""
    tables = run.facts.get("selection", {}).get("tables", {})
    return dict(tables.get("items", {}))


def noted(name: str, line: TrainedLine, epsilon: float, found: dict[str, Any]) -> str:
    parts = [f"noise {found['noise']:.3g} clips"]
    if "selected" in found:
        parts.append(f"{found['selected']:,} of {found['rows']:,} rows")
    if line == TRUSTS[0] and name in ATTAINABLE:
        parts.append(f"attainable: {ATTAINABLE[name][epsilon]:.3f}")
    return "; ".join(parts)


@lru_cache(maxsize=2)
def loaded(name: str, seed: int, factors: int, data: Path | None, part: str = "test") -> Task:
    """The task of a set, with masks that are fitted again; `part` "validation" to tune on."""
    if name == ML_100K:
        found: RatingData = ratings_100k(data, seed=seed, part=part)
    elif name == ML_1M:
        found = ratings_1m(data, seed=seed, part=part)
    elif name == CLICKS:
        described = ratings_1m(data)
        found = as_ratings(movielens_1m(data), described.items, described.titles)
    else:
        held_out = seed if part == "test" else seed + 1_000  # other people to tune on
        shop = taobao_like(**SHOP_SIZE, seed=held_out)
        assert shop.category_of is not None
        kinds = np.eye(SHOP_SIZE["categories"], dtype=np.float32)[shop.category_of]
        names = tuple(f"category {k}" for k in range(kinds.shape[1]))
        found = as_ratings(shop, Attributes(names, kinds), [""] * len(kinds))
    task = rating_task(
        found,
        title=name,
        recommended=known("ratings-1m").recommended,
        mask="linear",
        factors=factors,
        spread=FACTORS_SPREAD,
        refit=True,
    )
    return replace(task, metric=ClickMetric()) if UNITS[name] == "AUC" else task


def as_ratings(data: ClientData, items: Attributes, titles: Sequence[str]) -> RatingData:
    """Clicks as ratings of 0 and 1, beside what is publicly known of the items."""

    def kept(examples: Examples) -> Examples:
        fields = ("user", "item", LABEL)
        return Examples({name: examples[name] for name in fields})

    return RatingData(
        name=data.name,
        train=kept(data.train),
        offsets=data.offsets,
        test=kept(data.test),
        test_offsets=data.test_offsets,
        sizes={kind: data.sizes[kind] for kind in ("user", "item")},
        facts=data.facts,
        low=0.0,
        high=1.0,
        step=1.0,
        items=items,
        profiles=Attributes.of({}, rows=data.clients),
        titles=titles,
    )


# --- per index ------------------------------------------------------------------------------------

SHELF: Final = {"users": 400, "items": 100, "categories": 10, "examples": 30, "history": 3}
WIDTH: Final = 4
SPREAD: Final = 0.5
CATEGORY, BASE = 0.2, 0.05
"""Of what all examples share the steps are smaller: as many more examples add up in them."""
ROUNDS: Final = 5
AUC: Final = "made-up shop, AUC, noise per index and for users"
LEARNT: Final = "made-up shop, rows learnt, noise per index and for users"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLine:
    """One line: the unit, how it is clipped, and the server's step; tuned on other people."""

    name: str
    unit: str
    clip: float
    step: float
    per_row: int = 0
    example_clip: float = 0.0

    def plan(self, clients: int, epsilon: float, seed: int) -> Plan:
        return Plan(
            scheme=Scheme.FEDAVG,
            cohort=clients,
            seed=seed,
            training=LocalTraining(batch=1 if self.unit == "index" else 0, rate=1.0, decay=1.0),
            server=ServerStep(rate=self.step),
            update=UpdatePlan(average=Average.EXAMPLES),
            dp=DPPlan(
                unit=self.unit,  # type: ignore[arg-type]
                epsilon=epsilon,
                noise=0.0 if epsilon else HARDLY,
                delta=DELTA,
                clip=self.clip,
                per_row=self.per_row,
                example_clip=self.example_clip,
                trust=Trust.SERVER,
                rows=NoisyRows.ALL,
            ),
            simulation=SimulationPlan(rounds=ROUNDS, evaluate_every=ROUNDS),
        )


INDEX: Final = UnitLine(
    name="per index", unit="index", clip=16.0, step=10.0, per_row=8, example_clip=0.5
)
USER: Final = UnitLine(name="per user", unit="user", clip=0.3, step=100.0)
UNIT_LINES: Final = (INDEX, USER)


class Shelf(nn.Module):
    """A number per item, and what its category has in common with those clicked before."""

    def __init__(self, items: int, categories: int, seed: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, 1)
        self.categories = nn.Embedding(categories, WIDTH)
        self.base = nn.Parameter(torch.zeros(1))
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.items.weight.zero_()
            self.categories.weight.normal_(0.0, SPREAD / CATEGORY, generator=draw)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        history = batch["history_category"]
        there = history.ge(0).unsqueeze(-1).float()
        past = (self.categories(history.clamp(min=0)) * there).sum(-2)
        past = past / there.sum(-2).clamp(min=1.0)
        match: Tensor = (past * self.categories(batch["category"])).sum(-1) * CATEGORY**2
        own: Tensor = self.items(batch["item"]).squeeze(-1)
        return match + own + BASE * self.base


@lru_cache(maxsize=2)
def shop(seed: int) -> Task:
    data = taobao_like(**SHELF, seed=seed)
    assert data.category_of is not None
    fields = {"category": "item", "history_category": "history"}
    return Task(
        name="shelf",
        title="a made-up shop",
        data=data,
        module=lambda: Shelf(SHELF["items"], SHELF["categories"], torch.initial_seed()),
        tables=Tables(
            {
                "items.weight": Table("item", "history"),
                "categories.weight": Derived("items.weight", data.category_of, fields),
            }
        ),
    )


def index_cells(cache: Cache, request: Request) -> Iterator[Cell]:
    """Both units beside each other: scores, and rows that are learnt."""
    runs, seeds = NoisyRuns(cache, request), request.seeds_of()

    def found_for(line: UnitLine, epsilon: float) -> list[dict[str, Any]]:
        return [
            runs.figures("shop", line, epsilon, seed, partial(shop, seed), partial(items_of, line))
            for seed in seeds
        ]

    guesses = [runs.baselines("shop", seed, partial(shop, seed)) for seed in seeds]
    for row in guesses[0]:
        yield summed(AUC, row, NO_NOISE, [guess[row] for guess in guesses], "AUC", NO_MODEL)
    for line in UNIT_LINES:
        without = found_for(line, 0.0)
        for epsilon in (*(QUICK_EPSILONS if request.quick else EPSILONS), 0.0):
            found = found_for(line, epsilon)
            note = f"noise {found[0]['noise'] * line.clip:.3g} on every sum"
            if epsilon and "index" in found[0]:
                note += f"; per user epsilon {found[0]['user']:.3g}"
            scores = [one["score"] for one in found]
            yield summed(AUC, line.name, column(epsilon), scores, "AUC", note)
            rows = [
                float(learnt(one["items"], other["items"]))
                for one, other in zip(found, without, strict=True)
            ]
            of = f"of {SHELF['items']:,}"
            yield summed(LEARNT, line.name, column(epsilon), rows, "rows", of)


def items_of(line: UnitLine, trainings: Trainings, run: Run) -> dict[str, Any]:
    """The items' numbers at the end, and both epsilons."""
    assert run.task is not None
    checkpoint = run.folder / CHECKPOINT
    with single_threaded(), trainings.reopened(run.task, run.plan, checkpoint) as training:
        assert isinstance(training, Training)
        every = np.arange(SHELF["items"], dtype=np.uint64)
        values = training.tables["items"].values(every)[:, 0]
    found: dict[str, Any] = {"items": [round(float(v), 6) for v in values]}
    ledger = noise_of(run.plan).setting.ledger(ROUNDS)
    for unit in (Unit.INDEX, Unit.USER) if line.unit == "index" else (Unit.USER,):
        spent = ledger.guarantee(unit=unit, against=Observer.READERS, delta=DELTA)
        found[unit.value] = spent.epsilon
    return found


def learnt(items: list[float], without: list[float]) -> int:
    """Rows that are closer to those of the run without noise than to zero, where they began."""
    found, aim = np.array(items), np.array(without)
    return int(np.count_nonzero(np.abs(found - aim) < np.abs(aim)))
