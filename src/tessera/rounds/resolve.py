"""Resolve: a plan becomes an agreement of four objects, once; roles and engines ask these.

Rows    which rows a client fetches and writes, and what that releases (`select.py`)
Sum     how updates are added up, and the roles that do it (`sums.py`)
Noise   what is clipped, who adds noise to what, what is charged to whom (`noise.py`)
Cohorts who is drawn, who is summed with whom, what a client insists on (`cohorts.py`)

A new kind of one of them is a class in its file. What a scheme is called and what each party learns
under it is in `schemes.py`. What a task gives to a plan that leaves it open is written into the
plan before (`plan/defaults.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.plan import Plan
from tessera.rounds import schemes
from tessera.rounds.cohorts import CohortRule, cohorts_of
from tessera.rounds.no_noise import Noise
from tessera.rounds.noise import noise_of
from tessera.rounds.select import Rows
from tessera.rounds.sums import Sum


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """What a plan comes to."""

    plan: Plan
    rows: Rows
    sum: Sum
    noise: Noise
    cohorts: CohortRule


def resolve(plan: Plan) -> ResolvedPlan:
    """The agreement of a plan, made once."""
    known: ResolvedPlan | None = vars(plan).get("_agreement")
    if known is None:
        entry = schemes.of(plan)
        known = ResolvedPlan(plan, entry.rows, entry.sum, noise_of(plan), cohorts_of(plan))
        vars(plan)["_agreement"] = known
    return known
