"""What noise per user costs a recommender that is trained by a real plan, epsilon by epsilon.

One bias per item over masks that every client fits again at home, three rounds with everybody, a
tenth of the budget for the popularity of items (`tessera.tasks`, `PrivateSettings`). Every figure
is a run of the trainer with the plan's own noise, from the run's entropy; only masks and point
functions are left out (`crypto = "none"`), which change no sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from papers.cells import Cell, Request
from papers.runs import Cache
from papers.subject_dp_shops import DELTA, EPSILONS, NO_NOISE, SEEDS, summed
from tessera.crypto.shamir import MAX_HOLDERS
from tessera.data.examples import LABEL, ClientData, Examples
from tessera.data.movielens import movielens_1m, ratings_1m, ratings_100k
from tessera.data.ratings import Attributes, RatingData
from tessera.data.taobao_like import taobao_like
from tessera.errors import ConfigError
from tessera.learning.averaging import ServerStep
from tessera.learning.metrics import ClickMetric
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Crypto, DPPlan, NoiseFrom, NoisyRows, Plan, SecurityPlan, SimulationPlan
from tessera.protocols.secagg.params import GraphKind
from tessera.rounds import schemes
from tessera.rounds.events import RoundFinished
from tessera.runs.training import Training, complete
from tessera.tasks import Task, rating_task
from tessera.tasks.known import known

ML_100K, ML_1M, CLICKS, SHOP = (
    "MovieLens 100K",
    "MovieLens 1M",
    "MovieLens 1M as clicks",
    "made-up shop",
)
SETS: Final = (ML_100K, ML_1M, CLICKS, SHOP)
UNITS: Final = {ML_100K: "RMSE", ML_1M: "RMSE", CLICKS: "AUC", SHOP: "AUC"}
SHOP_SIZE: Final = {"users": 2_000, "items": 5_000, "categories": 20, "history": 1}

HARDLY: Final = 0.01
"""Noise over the clip in runs without noise: clipped, selected and divided like all others."""
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
WITHOUT: Final = {ML_100K: 0.902, ML_1M: 0.858}
"""The best model here without privacy (docs/results.md, ratings)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedLine:
    """One line of a table: who adds the noise, on which rows, and the model."""

    name: str
    scheme: str
    trust: NoiseFrom = NoiseFrom.SERVER
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
                unit="user",
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
    TrainedLine(name="shares of clients", scheme="secure-fedavg", trust=NoiseFrom.SHARES),
    TrainedLine(name="each of two servers", scheme="two-server", trust=NoiseFrom.EACH),
    TrainedLine(name="every client for itself", scheme="fedavg", trust=NoiseFrom.LOCAL),
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
QUICK_EPSILONS: Final = (3.0,)


def cells(cache: Cache, request: Request) -> Iterator[Cell]:
    seeds = request.seeds or ((0,) if request.quick else SEEDS)
    tables = QUICK if request.quick else TABLES
    for name in request.sets or tables:
        if name not in SETS:
            raise ConfigError(f"no set is called {name!r}", hint=f"one of {', '.join(SETS)}")
        yield from of_set(cache, request, name, tables.get(name, TABLES[name]), seeds)


def of_set(
    cache: Cache, request: Request, name: str, lines: Sequence[TrainedLine], seeds: Sequence[int]
) -> Iterator[Cell]:
    table, unit = f"{name}, {UNITS[name]}, noise per user", UNITS[name]
    guesses = [trivial(cache, name, seed, request.data) for seed in seeds]
    for row in guesses[0]:
        scores = [guess[row] for guess in guesses]
        yield summed(table, row, NO_NOISE, scores, unit, "a trivial predictor, without privacy")
    if name in WITHOUT:
        note = "the best model here without privacy"
        yield Cell(
            table=table, row=note, column=NO_NOISE, paper=None, ours=WITHOUT[name], unit=unit,
            note="64 factors over masks; five seeds on 100K, one on 1M",
        )  # fmt: skip
    for line in lines:
        for epsilon in (*(QUICK_EPSILONS if request.quick else EPSILONS), 0.0):
            if not epsilon and line.trust is not NoiseFrom.SERVER:
                continue
            found = [trained(cache, name, line, epsilon, seed, request.data) for seed in seeds]
            note = noted(name, line, epsilon, found[0])
            column = f"epsilon {epsilon:g}" if epsilon else NO_NOISE
            yield summed(table, line.name, column, [one["score"] for one in found], unit, note)


def noted(name: str, line: TrainedLine, epsilon: float, found: dict[str, Any]) -> str:
    parts = [f"noise {found['noise']:.3g} clips"]
    if "selected" in found:
        parts.append(f"{found['selected']:,} of {found['rows']:,} rows")
    if line == TRUSTS[0] and name in ATTAINABLE:
        parts.append(f"attainable: {ATTAINABLE[name][epsilon]:.3f}")
    return "; ".join(parts)


def trivial(cache: Cache, name: str, seed: int, data: Path | None) -> dict[str, float]:
    def work() -> dict[str, Any]:
        task = loaded(name, seed, 0, data)
        return dict(task.metric.baselines(task.data))

    title = f"{name}, seed {seed}"
    return cache.get("trivial-users", {"set": name, "seed": seed}, work, title=title)


def trained(
    cache: Cache, name: str, line: TrainedLine, epsilon: float, seed: int, data: Path | None
) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        return run(loaded(name, seed, line.factors, data), line, epsilon, seed)

    setting = {"set": name, "seed": seed, "line": line.name, "epsilon": epsilon}
    title = f"{name}, {line.name}, epsilon {epsilon:g}, seed {seed}"
    return cache.get("users", setting, work, title=title)


def run(task: Task, line: TrainedLine, epsilon: float, seed: int) -> dict[str, Any]:
    """One training by the real plan, and what it cost in noise."""
    plan = complete(line.plan(task.data.clients, epsilon, seed), task)
    assert plan.dp is not None
    found: dict[str, Any] = {"noise": plan.dp.noise}
    with Training(task, plan) as training:
        if training.popularity is not None:
            found["selected"] = len(training.popularity.selected["items"])
            found["rows"] = len(training.popularity.marks["items"])
        for event in training.run(plan.simulation.rounds):
            if isinstance(event, RoundFinished) and event.metric is not None:
                found["score"] = event.metric
    return found


# --- tasks ----------------------------------------------------------------------------------------


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
