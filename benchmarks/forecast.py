"""Ten plans with noise per user, and what training them gives beside what `tessera plan` says.

    python benchmarks/forecast.py --out rows.json    # kept as they come; it can be stopped
    python benchmarks/forecast.py --only 1,4         # some of them

The plans were written down before the forecast was (`rounds/forecast/utility.py`). Each is one bias
per item over masks that are fitted at home, on MovieLens 100K or on a synthetic shop, through the
trainer's own rounds without messages. A plan is *useful* if its model is better than the sum of
means, which looks at everybody's data, and *useless* if it is no better than masks alone, where
nothing is shared; the forecast is right if it says the same of a plan as its training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cohort import note
from papers.subject_dp_trained import as_ratings
from tessera.api import simulate
from tessera.data.ratings import Attributes, RatingData
from tessera.data.taobao_like import taobao_like
from tessera.learning.averaging import ServerStep
from tessera.learning.metrics import ClickMetric
from tessera.learning.training.settings import LocalTraining
from tessera.plan import CohortsPlan, Crypto, DPPlan, Plan, SimulationPlan, Trust
from tessera.plan.scheme import Scheme
from tessera.rounds.forecast.utility import (
    CLICKS,
    RATINGS,
    NoisyTraining,
    RowPopularity,
    UtilityForecast,
)
from tessera.runs.held import HeldRows
from tessera.runs.training import complete
from tessera.tasks import Task, load
from tessera.tasks.kinds import rating_task
from tessera.tasks.known import known

ALL: Final = -10.0
"""A threshold that every row is above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """One of the ten. `cohort` 0: everybody; `threshold` as [dp] has it."""

    name: str
    data: str
    trust: str
    epsilon: float
    cohort: int = 0
    rounds: int = 3
    drawn: str = "seed"
    threshold: float = ALL


SHOPS: Final[dict[str, dict[str, Any]]] = {
    "small shop": {"users": 500, "items": 300, "categories": 10, "history": 1},
    "long shelf": {"users": 500, "items": 3_000, "categories": 10, "history": 1},
    "large shop": {"users": 3_000, "items": 300, "categories": 10, "history": 1},
}
FILMS: Final = "MovieLens 100K"

PLANS: Final = (
    NamedPlan(name="everybody, a trusted server", data=FILMS, trust="server", epsilon=2.0),
    NamedPlan(name="everybody, each of two servers", data=FILMS, trust="each", epsilon=1.0),
    NamedPlan(
        name="cohorts by the seed",
        data=FILMS,
        trust="each",
        epsilon=3.0,
        cohort=105,
        rounds=9,
    ),
    NamedPlan(
        name="cohorts by a schedule",
        data=FILMS,
        trust="server",
        epsilon=3.0,
        cohort=105,
        rounds=9,
        drawn="schedule",
    ),
    NamedPlan(name="every client for itself", data=FILMS, trust="local", epsilon=1.0),
    NamedPlan(name="a small budget", data=FILMS, trust="server", epsilon=0.2),
    NamedPlan(name="a small shop", data="small shop", trust="server", epsilon=3.0),
    NamedPlan(name="a long shelf, every row", data="long shelf", trust="server", epsilon=1.0),
    NamedPlan(
        name="a long shelf, selected rows",
        data="long shelf",
        trust="server",
        epsilon=1.0,
        threshold=2.0,
    ),
    NamedPlan(
        name="a large shop by a schedule",
        data="large shop",
        trust="each",
        epsilon=3.0,
        cohort=100,
        rounds=30,
        drawn="schedule",
    ),
)

SCHEMES: Final = {
    "server": Scheme.FEDAVG,
    "each": Scheme.TWO_SERVER,
    "local": Scheme.FEDAVG,
}
MASKED: Final[dict[str, Any]] = {"mask": "linear", "factors": 0, "refit": True}


def task_of(data: str, seed: int) -> Task:
    if data == FILMS:
        return load("ratings-100k", seed=seed, **MASKED)
    shop = taobao_like(**SHOPS[data], seed=seed)
    assert shop.category_of is not None
    kinds = np.eye(SHOPS[data]["categories"], dtype=np.float32)[shop.category_of]
    names = tuple(f"category {k}" for k in range(kinds.shape[1]))
    found: RatingData = as_ratings(shop, Attributes(names, kinds), [""] * len(kinds))
    recommended = known("ratings-1m").recommended
    task = rating_task(found, title=data, recommended=recommended, **MASKED)
    return replace(task, metric=ClickMetric())


def plan_of(named: NamedPlan, clients: int, seed: int) -> Plan:
    return Plan(
        scheme=SCHEMES[named.trust],
        cohort=named.cohort or clients,
        seed=seed,
        training=LocalTraining(batch=0, rate=1.0, decay=1.0),
        server=ServerStep(),
        cohorts=CohortsPlan(drawn=named.drawn),
        dp=DPPlan(
            unit="user",
            epsilon=named.epsilon,
            delta=1e-5,
            trust=Trust(named.trust),
            rows="selected",
            threshold=named.threshold,
        ),
        simulation=SimulationPlan(
            rounds=named.rounds, evaluate_every=named.rounds, crypto=Crypto.NONE
        ),
    )


def forecast_of(named: NamedPlan, plan: Plan, task: Task) -> UtilityForecast:
    """As `tessera plan` has it: users and rows of a client, and an assumed popularity."""
    users = task.data.clients
    training = NoisyTraining.of(plan, users)
    assert training is not None
    rows = max(table.rows for table in plan.roots)
    popularity = RowPopularity.zipf(rows, min(rows, HeldRows.of(task, plan).mean))
    effects = RATINGS.scaled(4.0) if named.data == FILMS else CLICKS
    return UtilityForecast(training, users, popularity, effects)


def trained(plan: Plan, task: Task) -> tuple[float, dict[str, float]]:
    """The metric after the last round, and those of baselines."""
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(task, plan, out=Path(folder) / "run", progress=False)
        assert run.metric is not None
        return run.metric, dict(run.facts["trivial"])


def masks_alone(named: NamedPlan, task: Task, seed: int) -> float:
    """The same model where nothing is shared: biases stay at zero."""
    plan = plan_of(replace(named, cohort=0, rounds=1, drawn="seed"), task.data.clients, seed)
    still = replace(plan, dp=None, scheme=Scheme.FEDAVG, server=ServerStep(rate=1e-12))
    return trained(complete(still, task), task)[0]


def row_of(number: int, seed: int) -> dict[str, Any]:
    named, began = PLANS[number], time.monotonic()
    task = task_of(named.data, seed)
    plan = complete(plan_of(named, task.data.clients, seed), task)
    said = forecast_of(named, plan, task)
    value, baselines = trained(plan, task)
    alone, means = masks_alone(named, task, seed), baselines["sum"]
    lower = task.metric.lower_is_better
    useful = [value < other if lower else value > other for other in (alone, means)]
    foreseen = [said.beats_nothing, said.beats_means]
    return {
        "plan": number + 1,
        **asdict(named),
        "seed": seed,
        "noise": said.training.noise,
        "forecast": said.as_json(),
        "metric": value,
        "masks_alone": alone,
        "sum_of_means": means,
        "beats": useful,
        "foreseen": foreseen,
        "right": all(useful) == all(foreseen),
        "right_both": useful == foreseen,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="numbers of plans, from 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file of rows, read and added to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(given.out.read_text()) if given.out and given.out.exists() else []
    done = {(row["plan"], row["seed"]) for row in rows}
    wanted = [int(each) - 1 for each in given.only.split(",") if each] or range(len(PLANS))
    for number in wanted:
        if (number + 1, given.seed) in done:
            continue
        rows.append(row_of(number, given.seed))
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1) + "\n")
        last = rows[-1]
        note(f"{number + 1} {last['name']}: {last['metric']:.3f}, right: {last['right']}")
    print(f"{'plan':<36}{'noise':>7}{'metric':>8}{'masks':>8}{'means':>8}  beats  foreseen  right")
    for row in rows:
        beats, foreseen = (
            "".join("+" if b else "-" for b in row[k]) for k in ("beats", "foreseen")
        )
        print(
            f"{row['plan']:>2} {row['name']:<33}{row['noise']:>7.2f}{row['metric']:>8.3f}"
            f"{row['masks_alone']:>8.3f}{row['sum_of_means']:>8.3f}  {beats:<6} {foreseen:<8}  "
            f"{'yes' if row['right'] else 'no'}{'' if row['right_both'] else ' (one of two)'}"
        )
    print(f"right: {sum(row['right'] for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
