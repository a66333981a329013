"""Traffic of one plan at other table sizes: what a client sends and receives in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.errors import ConfigError
from tessera.rounds.forecast.forecast import Forecast
from tessera.rounds.plan import Plan

SIZES: Final = tuple(10**power for power in range(3, 10))
"""From a small shop to the largest tables in use."""


@dataclass(frozen=True, slots=True)
class SizePoint:
    """Bytes of one client in a round, both ways; None if no message holds that much."""

    rows: int
    bytes_both_ways: float | None


def by_size(
    plan: Plan, *, rows_per_client: int, sizes: Sequence[int] = SIZES
) -> Iterator[SizePoint]:
    """The plan's forecast with its largest table at these sizes, the others in proportion."""
    largest = max(table.rows for table in plan.tables)
    for rows in sizes:
        tables = tuple(replace(t, rows=max(1, t.rows * rows // largest)) for t in plan.tables)
        try:
            forecast = Forecast(replace(plan, tables=tables), rows_per_client=rows_per_client)
            both = sum(forecast.bytes_up().values()) + sum(forecast.bytes_down().values())
        except ConfigError:  # the full model is longer than a message may be
            yield SizePoint(rows, None)
            continue
        yield SizePoint(rows, both)
