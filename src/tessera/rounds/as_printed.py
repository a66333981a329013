"""Names of `rounds/noise.py` for those who have not come to ask `noise_of` yet."""

from __future__ import annotations

from typing import Any

from tessera.plan import Plan
from tessera.rounds.noise import noise_of
from tessera.rounds.noise import paper_notes as notes

__all__ = ["facts", "notes"]


def facts(plan: Plan) -> dict[str, Any] | None:
    return noise_of(plan).paper_facts()
