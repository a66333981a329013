"""A plan with a paper's algorithm as printed: its noise, its claim, and what holds instead.

Marathe and Kanani 2022, `CentralSubDP` and `LocalSubDP` (`privacy/dp/subjects.py`). Neither has an
account: noise goes by the batch. The claim stands wherever a number would, and is named as printed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from tessera.errors import MisuseError
from tessera.plan import DPPlan, Plan
from tessera.privacy.dp.accounting import epsilon
from tessera.privacy.dp.guarantee import Adjacency, json_number
from tessera.privacy.dp.subjects import Printed, PrintedNoise

SIZES: Final = (1, 2, 4, 8)
"""Records of one person in a batch, for which the noise is shown."""


def section(plan: Plan) -> DPPlan:
    if plan.dp is None:
        raise MisuseError("a plan without [dp] has no noise")
    return plan.dp


def noise(plan: Plan) -> PrintedNoise:
    """sigma_Z of a paper's algorithm over all rounds of this plan (section 3.1 and 3.2).

    Mini-batches are those of all clients of all rounds where the server adds the noise (sR), and a
    client's own otherwise (TR).
    """
    dp = section(plan)
    each = plan.cohort if dp.printed is Printed.CENTRAL else dp.steps
    return PrintedNoise(dp.epsilon, dp.delta, dp.sampling, each * plan.simulation.rounds)


def claim(plan: Plan) -> str:
    """What stands beside the number that the ledger has for a paper's algorithm."""
    dp = section(plan)
    return (
        f"with {dp.printed.value}, whose epsilon {dp.epsilon:g} is as printed by the paper and "
        "does not hold"
    )


def person(plan: Plan) -> float | None:
    """The epsilon of a person with as many records as the plan states, one of them in a batch.

    As if nobody could tell a batch's Z from the length of its noise; None if none are stated.
    """
    dp = section(plan)
    if not dp.records_per_subject:
        return None
    assert plan.training is not None
    central = dp.printed is Printed.CENTRAL
    one = noise(plan).one_in_a_batch(
        records=dp.records_per_subject, batch=plan.training.batch if central else 1
    )
    times = plan.simulation.rounds * dp.steps * dp.clients_per_subject
    return epsilon([(one, times)], adjacency=Adjacency.ADD_OR_REMOVE, delta=dp.delta)


def facts(plan: Plan) -> dict[str, Any] | None:
    """A paper's algorithm beside what holds, as plain values; None for a plan without one."""
    dp = section(plan)
    if dp.printed is Printed.NONE:
        return None
    sigmas, kept = noise(plan), person(plan)
    why = "the length of its noise shows how many records of one person a batch has"
    if dp.printed is Printed.CENTRAL:
        why += ", and the server sees every client's gradient without noise"
    return {
        "algorithm": dp.printed.label,
        "epsilon_as_printed": dp.epsilon,
        "epsilon": json_number(math.inf),
        "why": why,
        "noise_by_most_of_a_person": {size: sigmas.sigma(size) for size in SIZES},
        "records": dp.records_per_subject or None,
        "epsilon_one_record_in_a_batch": None if kept is None else json_number(kept),
    }


def notes(facts: Mapping[str, Any] | None) -> list[str]:
    """The same in sentences."""
    if facts is None:
        return []
    sigmas = facts["noise_by_most_of_a_person"]
    found = [
        f"{facts['algorithm']} by the paper: epsilon {facts['epsilon_as_printed']:g}, at noise of "
        f"{' / '.join(f'{sigma:.3g}' for sigma in sigmas.values())} for "
        f"{' / '.join(map(str, sigmas))} records of one person in a batch",
        f"what holds: no finite epsilon, as {facts['why']}",
    ]
    if facts["records"]:
        found.append(
            f"and if nobody could tell: a person with {facts['records']} records, of which a batch "
            f"has one at most, has epsilon {float(facts['epsilon_one_record_in_a_batch']):.3g}"
        )
    return found
