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

from dataclasses import dataclass
from typing import Any, Final

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
