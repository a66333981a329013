"""Dropouts: in which phases of a round a client can be missing, and who is, drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tessera.engines.faults import Drop, Fault
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId
from tessera.protocols.secagg.params import Threat
from tessera.rounds.ideal import Dropout
from tessera.rounds.plan import Plan, Scheme

FaultScript = Callable[[RoundId, Sequence[ClientId]], Sequence[Fault]]
"""What goes wrong in a round with this cohort."""


def dropouts(faults: Sequence[Fault]) -> dict[ClientId, Dropout]:
    """Who leaves where; an ideal round knows no other faults."""
    found = {}
    for fault in faults:
        if not isinstance(fault, Drop) or fault.after:
            raise MisuseError(f"an ideal round knows dropouts only, not {fault}")
        found[fault.client] = Dropout(fault.phase, fault.stage)
    return found


def dropout_places(plan: Plan) -> list[tuple[str, int]]:
    """Every phase of the plan's rounds in which a client can be missing: (phase, visit)."""
    if plan.scheme is Scheme.TWO_SERVER:
        return [("query", 0), ("collect", 1 if plan.narrows else 0)]
    if not plan.scheme.secure:
        return [("reveal", 0), ("collect", 0)] if plan.scheme.by_rows else [("collect", 0)]
    each = ["collect", "unmask"]
    if plan.security.threat is Threat.ACTIVE:
        each.insert(1, "consistency")
    places = [("advertise", 0), ("share", 0), *((phase, 0) for phase in each)]
    if len(plan.stages) == 2:
        places += [("reveal", 0), *((phase, 1) for phase in each)]
    return places


def random_dropouts(share: float, seed: int, plan: Plan) -> FaultScript:
    """Every client drops out of a round with this probability, at a phase drawn evenly.

    At most as many as the plan tolerates: with more, the round would be aborted.
    """
    most = plan.cohort - plan.least_survivors if plan.scheme.hides else None
    places = dropout_places(plan)

    def script(round_id: RoundId, cohort: Sequence[ClientId]) -> list[Fault]:
        rng = np.random.default_rng([seed, int(round_id), 1])
        gone = [c for c in cohort if rng.random() < share][:most]
        return [
            Drop(c, phase, stage=stage)
            for c in gone
            for phase, stage in [places[int(rng.integers(len(places)))]]
        ]

    return script
