"""A rating task small enough for tests: tastes of rank two, a genre that matters, few ratings."""

from __future__ import annotations

import numpy as np

from tessera.data.ratings import Attributes, RatingData, rating_data
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Plan, PrivacyPlan, SecurityPlan, SimulationPlan
from tessera.tasks import CentralSettings, Recommended, Task, rating_task

USERS, FILMS = 20, 40

RECOMMENDED = Recommended(
    training=LocalTraining(batch=0, rate=0.5, decay=1.0, weight_decay=0.05, table_rate=0.4),
    server=ServerStep(optimizer="momentum", momentum=0.7),
    shrinkage=0.1,
    central=CentralSettings(batch=16, rate=0.05, weight_decay=0.0),
    clip=2.0,
    average=Average.ROWS,
)


def films(users: int = USERS, each: int = 15, seed: int = 0, **changes) -> RatingData:
    rng = np.random.default_rng(seed)
    genre = rng.integers(0, 3, FILMS)
    liking = rng.normal(size=(users, 3))
    level, quality = rng.normal(scale=0.5, size=users), rng.normal(scale=0.7, size=FILMS)
    who = np.repeat(np.arange(users), each)
    what = np.concatenate([rng.choice(FILMS, each, replace=False) for _ in range(users)])
    taste = 3.3 + level[who] + quality[what] + 0.6 * liking[who, genre[what]]
    rating = np.clip(np.rint(taste + rng.normal(scale=0.3, size=len(who))), 1, 5)
    # An order and a test part of the set's own: what so few ratings show hangs on them.
    late = np.random.default_rng((seed, 0)).permutation(len(who))
    held = np.zeros(len(who), np.bool_)
    chosen = np.random.default_rng((seed, 1)).permutation(len(who))[: len(who) // 5]
    held[np.lexsort((late, who))[chosen]] = True
    settings = {
        "user": who,
        "item": what,
        "rating": rating,
        "users": users,
        "items": FILMS,
        "low": 1.0,
        "high": 5.0,
        "step": 1.0,
        "item_attributes": Attributes(("a", "b", "c"), np.eye(3, dtype=np.float32)[genre]),
        "profiles": Attributes(("level",), level[:, None].astype(np.float32)),
        "titles": [f"film {i}" for i in range(FILMS)],
        "seed": seed,
        "time": late,
        "split": "published",
        "held": held,
    }
    return rating_data("films", **{**settings, **changes})


def task(data: RatingData | None = None, **model) -> Task:
    return rating_task(
        films() if data is None else data,
        title="synthetic films",
        recommended=RECOMMENDED,
        **{"factors": 3, **model},
    )


def plan(scheme: str = "secure-submodel", *, cohort: int = 8, **more) -> Plan:
    simulation = SimulationPlan(**{"rounds": 4, "evaluate_every": 2, **more.pop("simulation", {})})
    privacy = PrivacyPlan(**{"level": "cpp4", **more.pop("privacy", {})})
    security = SecurityPlan(**more.pop("security", {}))
    return Plan(
        scheme=scheme,
        cohort=cohort,
        privacy=privacy,
        simulation=simulation,
        security=security,
        seed=3,
        **more,
    )
