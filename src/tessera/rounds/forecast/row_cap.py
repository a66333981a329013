"""max_rows between two servers: up to where keys pay, and what a smaller cap would save."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any, Final

from tessera.rounds.forecast.forecast import Forecast
from tessera.rounds.plan import Plan
from tessera.rounds.two_server.write_cost import WriteCost, key_bytes

WORTH_IT: Final = 0.9
"""A smaller max_rows is proposed if it takes at most this share of the bytes."""


def break_evens(forecast: Forecast) -> dict[str, int]:
    """By table, the largest max_rows for which keys are fewer bytes than plain shares."""
    plan, traffic = forecast.plan, forecast.two_server
    found = zip(traffic.writing, traffic.params.tables, strict=True)
    return {cost.table: break_even(plan, cost, t.words) for cost, t in found}


def break_even(plan: Plan, cost: WriteCost, words: int) -> int:
    """The largest max_rows for which keys are fewer bytes than plain shares; 0 if none is."""
    if cost.keys is None:
        return 0
    return bisect_left(
        range(1, cost.rows),
        True,
        key=lambda most: key_bytes(plan, cost.rows, words, most) >= cost.shares,
    )


def with_max_rows(plan: Plan, most: int) -> Plan:
    return replace(plan, union=replace(plan.union, max_rows=most))


def smaller_cap(forecast: Forecast, most: int) -> dict[str, Any] | None:
    """What max_rows = `most` would take; None if it saves little."""
    plan = forecast.plan
    if most >= plan.union.max_rows:
        return None
    fewer = replace(forecast, plan=with_max_rows(plan, most))
    up, down = sum(fewer.bytes_up().values()), sum(fewer.bytes_down().values())
    now = sum(forecast.bytes_up().values()) + sum(forecast.bytes_down().values())
    if up + down > WORTH_IT * now:
        return None
    return {"max_rows": most, "total_up": up, "total_down": down}
