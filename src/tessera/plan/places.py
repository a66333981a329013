"""Places: which clients a round has by what is public, the plan's seed or a schedule.

Clients are numbered here from 0, in the order of their ids; `rounds/cohorts.py` knows who they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tessera.learning.averaging import ServerStep

if TYPE_CHECKING:
    from tessera.plan.plan import Plan

PACE: Final = 1.5
"""Steps that all rounds of a pass are together, under noise on updates: what the validation part of
MovieLens 100K prefers among 1 to 3 (`docs/results.md`)."""


def drawn_by_seed(
    plan: Plan, round_id: int, clients: int, places: int | None = None
) -> npt.NDArray[np.int64]:
    """The cohort of a round, or so many of it, without replacement, in rising order."""
    first = round_id // plan.key_rounds * plan.key_rounds  # as long as keys last, so does a cohort
    rng = np.random.default_rng([plan.seed, first])
    size = plan.cohort if places is None else places
    return np.sort(rng.choice(clients, size, replace=False))


def most_by_seed(plan: Plan, clients: int) -> int:
    """The most rounds of a training that the seed gives to any of so many clients."""
    counts = np.zeros(clients, dtype=np.int64)
    for round_id in range(plan.simulation.rounds):
        counts[drawn_by_seed(plan, round_id, clients)] += 1
    return int(counts.max())


def rounds_of_a_pass(clients: int, cohort: int) -> int:
    """Rounds in which every client has one place."""
    return max(1, -(-clients // cohort))


def in_a_pass(step: ServerStep, clients: int, cohort: int) -> ServerStep:
    """The step of one round of a schedule: its part of the one that a pass is.

    Rows are divided by the noise of all rounds together, and a cohort has seen a part of everybody.
    """
    rounds = rounds_of_a_pass(clients, cohort)
    return step if rounds == 1 else replace(step, rate=round(step.rate * PACE / rounds, 4))
