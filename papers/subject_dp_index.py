"""What noise per index costs on a made-up shop, beside noise per user and none.

A small recommender without anything that stays at home: a number per item, and a few per category,
which compare an item with what the user clicked before. Histories are what makes an index more than
a row's own words. Every figure is a run of the trainer by a real plan, with a trusted server's
noise from the run's entropy and everybody in every round. At one epsilon both units have the noise
that they ask for, and all else is alike, but that per index examples are cut and clipped one by one
and per user all that a client sends is.

A row is learnt if it ends closer to where a run without noise takes it than to where it began.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from papers.cells import Cell, Request
from papers.runs import Cache
from papers.subject_dp_shops import DELTA, EPSILONS, NO_NOISE, SEEDS, summed
from tessera.data.taobao_like import taobao_like
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.bound_model import Derived, Table
from tessera.learning.module_tables import Tables
from tessera.learning.training.settings import LocalTraining
from tessera.plan import DPPlan, NoiseFrom, NoisyRows, Plan, Scheme, SimulationPlan, UpdatePlan
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.rounds import dp
from tessera.rounds.events import RoundFinished
from tessera.runs.training import Training, complete
from tessera.tasks import Task

SHOP: Final = {"users": 400, "items": 100, "categories": 10, "examples": 30, "history": 3}
WIDTH: Final = 4
SPREAD: Final = 0.5
CATEGORY, BASE = 0.2, 0.05
"""Of what all examples share the steps are smaller: as many more examples add up in them."""
ROUNDS: Final = 5
HARDLY: Final = 0.01
"""Noise over the clip in runs without noise, which are cut and clipped like the others."""
AUC: Final = "made-up shop, AUC, noise per index and for users"
LEARNT: Final = "made-up shop, rows learnt, noise per index and for users"
QUICK: Final = (3.0,)


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
                trust=NoiseFrom.SERVER,
                rows=NoisyRows.ALL,
            ),
            simulation=SimulationPlan(rounds=ROUNDS, evaluate_every=ROUNDS),
        )


INDEX: Final = UnitLine(
    name="per index", unit="index", clip=16.0, step=10.0, per_row=8, example_clip=0.5
)
USER: Final = UnitLine(name="per user", unit="user", clip=0.3, step=100.0)
LINES: Final = (INDEX, USER)


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
    data = taobao_like(**SHOP, seed=seed)
    assert data.category_of is not None
    fields = {"category": "item", "history_category": "history"}
    return Task(
        name="shelf",
        title="a made-up shop",
        data=data,
        module=lambda: Shelf(SHOP["items"], SHOP["categories"], torch.initial_seed()),
        tables=Tables(
            {
                "items.weight": Table("item", "history"),
                "categories.weight": Derived("items.weight", data.category_of, fields),
            }
        ),
    )


def run(line: UnitLine, epsilon: float, seed: int, data_seed: int | None = None) -> dict[str, Any]:
    """One training: its AUC, the items' numbers at the end, and both epsilons."""
    task = shop(seed if data_seed is None else data_seed)
    plan = complete(line.plan(task.data.clients, epsilon, seed), task)
    assert plan.dp is not None
    found: dict[str, Any] = {"noise": plan.dp.noise}
    with Training(task, plan) as training:
        for event in training.run(ROUNDS):
            if isinstance(event, RoundFinished) and event.metric is not None:
                found["score"] = event.metric
        every = np.arange(SHOP["items"], dtype=np.uint64)
        found["items"] = [round(float(v), 6) for v in training.tables["items"].values(every)[:, 0]]
    ledger = dp.noise_setting(plan).ledger(ROUNDS)
    for unit in (Unit.INDEX, Unit.USER) if line.unit == "index" else (Unit.USER,):
        spent = ledger.guarantee(unit=unit, against=Observer.READERS, delta=DELTA)
        found[unit.value] = spent.epsilon
    return found


def learnt(items: list[float], without: list[float]) -> int:
    """Rows that are closer to those of the run without noise than to zero, where they began."""
    found, aim = np.array(items), np.array(without)
    return int(np.count_nonzero(np.abs(found - aim) < np.abs(aim)))


def cells(cache: Cache, request: Request) -> Iterator[Cell]:
    seeds = request.seeds or ((0,) if request.quick else SEEDS)
    epsilons = QUICK if request.quick else EPSILONS
    guesses = [trivial(cache, seed) for seed in seeds]
    for row in guesses[0]:
        scores = [guess[row] for guess in guesses]
        yield summed(AUC, row, NO_NOISE, scores, "AUC", "a trivial predictor, without privacy")
    for line in LINES:
        without = [trained(cache, line, 0.0, seed) for seed in seeds]
        for epsilon in (*epsilons, 0.0):
            found = [trained(cache, line, epsilon, seed) for seed in seeds]
            column = f"epsilon {epsilon:g}" if epsilon else NO_NOISE
            note = f"noise {found[0]['noise'] * line.clip:.3g} on every sum"
            if epsilon and "index" in found[0]:
                note += f"; per user epsilon {found[0]['user']:.3g}"
            scores = [one["score"] for one in found]
            yield summed(AUC, line.name, column, scores, "AUC", note)
            rows = [
                float(learnt(one["items"], other["items"]))
                for one, other in zip(found, without, strict=True)
            ]
            yield summed(LEARNT, line.name, column, rows, "rows", f"of {SHOP['items']:,}")


def trivial(cache: Cache, seed: int) -> dict[str, float]:
    def work() -> dict[str, Any]:
        task = shop(seed)
        return dict(task.metric.baselines(task.data))

    return cache.get("trivial-rows", {**SHOP, "seed": seed}, work, title=f"shop, seed {seed}")


def trained(cache: Cache, line: UnitLine, epsilon: float, seed: int) -> dict[str, Any]:
    setting = {"line": repr(line), "epsilon": epsilon, "seed": seed, "shop": SHOP, "rounds": ROUNDS}
    title = f"shop, {line.name}, epsilon {epsilon:g}, seed {seed}"
    return cache.get("rows", setting, lambda: run(line, epsilon, seed), title=title)
