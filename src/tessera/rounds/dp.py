"""Names of `rounds/noise.py` for those who have not come to ask `noise_of` yet."""

from __future__ import annotations

from tessera.plan import DPPlan, Plan
from tessera.privacy.dp.noise_setting import NoiseSetting
from tessera.rounds.noise import composed, delta_warning, noise_of, sight

__all__ = ["composed", "delta_warning", "noise_of", "section", "sight"]


def section(plan: Plan) -> DPPlan:
    return noise_of(plan).dp


def noise_setting(plan: Plan, *, setup: bool = False) -> NoiseSetting:
    return noise_of(plan).setting_with(setup=setup)


def exact(plan: Plan) -> tuple[str, ...]:
    return noise_of(plan).exact


def covers_rows(plan: Plan) -> bool:
    return noise_of(plan).covers_rows


def follows_from_rounds(plan: Plan) -> bool:
    return noise_of(plan).follows_from_rounds


def in_the_sum(plan: Plan) -> float:
    return noise_of(plan).in_the_sum


def lasts(plan: Plan) -> int | None:
    return noise_of(plan).lasts


def calibrated(plan: Plan) -> Plan:
    return noise_of(plan).calibrated()
