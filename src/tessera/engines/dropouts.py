"""Dropouts: in which phases of a round a client can be missing, and who is, drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tessera.engines.faults import Drop, Fault
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId
from tessera.rounds import schemes
from tessera.rounds.ideal import Dropout
from tessera.rounds.plan import Plan

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
    return [(p.name, p.visit) for p in schemes.of(plan).phases(plan) if p.dropouts]


def random_dropouts(share: float, seed: int, plan: Plan) -> FaultScript:
    """Every client drops out of a round with this probability, at a phase drawn evenly.

    At most as many as the plan tolerates: with more, the round would be aborted. A fixed group
    tolerates none, and there all that are drawn drop out: such a group opens nothing.
    """
    tolerated = schemes.of(plan).hides and not plan.grouped
    places = dropout_places(plan)
    varies = plan.drawn_in_secret and schemes.of(plan).masks

    def script(round_id: RoundId, cohort: Sequence[ClientId]) -> list[Fault]:
        rng = np.random.default_rng([seed, int(round_id), 1])
        held = plan.part(secure=True, clients=len(cohort)) if varies else plan
        most = len(cohort) - held.least_survivors if tolerated else None
        gone = [c for c in cohort if rng.random() < share][:most]
        return [
            Drop(c, phase, stage=stage)
            for c in gone
            for phase, stage in [places[int(rng.integers(len(places)))]]
        ]

    return script
