"""Forecast: what a round by a plan is expected to cost, under assumptions about its clients."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from tessera.crypto.group import Group
from tessera.errors import ConfigError
from tessera.plan import Plan
from tessera.privacy.index.exposure import Holders
from tessera.protocols.secagg.params import SecAggParams
from tessera.rounds import schemes
from tessera.rounds.forecast.rows import ExpectedRows, TableForecast
from tessera.rounds.forecast.traffic import RoundTraffic
from tessera.rounds.forecast.two_server import TwoServerTraffic
from tessera.rounds.two_server.domain import WriteCost, key_bytes

# --- work -----------------------------------------------------------------------------------------
#
# Work: what the masked sums of a round make processors do.


@dataclass(frozen=True, slots=True)
class MaskWork:
    """Keystream that one stage takes, in its own group."""

    group: Group
    client_bytes: float  # of one client
    server_bytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a round makes processors do, to be weighed with a machine's own figures."""

    agreements: float  # Diffie-Hellman operations of one client, a mask's stream derived from each
    boxes: float  # sealed and unsealed by one client
    masks: tuple[MaskWork, ...]  # by stage
    openings: float  # secrets that the server puts together from shares


def masked_sums(params: SecAggParams, tables: Sequence[TableForecast], dropout: float) -> Work:
    """The work of a round's secure sums, if this share of the cohort drops out."""
    degree, stages, n = params.topology.degree, params.stages, params.cohort
    gone = dropout * n
    masks = []
    for stage in stages:
        own = pairs = masked_bytes(stage.group, stage.dense)
        pairs *= degree
        for f, spec in zip(tables, stage.tables, strict=False):
            rows = masked_bytes(stage.group, f.included * spec.width)
            own, pairs = own + rows, pairs + rows * f.shared * (n - 1)
        masks.append(MaskWork(stage.group, own + pairs, (n - gone) * own + gone * pairs))
    return Work(
        agreements=degree * (1 + len(stages)),
        boxes=2 * degree * len(stages),
        masks=tuple(masks),
        openings=n * len(stages),
    )


def masked_bytes(group: Group, words: float) -> float:
    """Keystream behind so many words of a mask."""
    return words * group.word_bytes


# --- forecast -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """Rows, bytes and work of a round by this plan; rows are held evenly unless it is given how.

    Where clients meet in fixed groups, it is about one group: each has sums of its own.
    """

    plan: Plan
    rows_per_client: int
    given_holders: Holders | None = None
    dropout: float = 0.0
    groups: int = field(init=False, default=1)  # of a round, each with sums of its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.plan.cohort // self.plan.group_plan.cohort)
        object.__setattr__(self, "plan", self.plan.group_plan)
        _ = self.rows  # refuses what is not a number of rows

    @cached_property
    def rows(self) -> ExpectedRows:
        return ExpectedRows(self.plan, self.rows_per_client, self.given_holders, self.dropout)

    @cached_property
    def _traffic(self) -> RoundTraffic:
        return RoundTraffic(self.rows)

    @property
    def two_server(self) -> TwoServerTraffic:
        """The messages of two servers and their clients."""
        return self._traffic.two_server

    def bytes_up(self) -> dict[str, float]:
        """Of one client, by part of the round."""
        return _added(self._traffic.up())

    def bytes_down(self) -> dict[str, float]:
        """To one client, by part of the round."""
        return _added(self._traffic.down())

    def bytes_between(self) -> float:
        """Between two servers, for each client; none where there is one."""
        return self._traffic.between()

    @property
    def work(self) -> Work | None:
        """Of masked sums. None without one: a plain sum's work is too little to forecast."""
        if not schemes.of(self.plan).masks and not self.plan.narrows:
            return None
        return masked_sums(self._traffic.sums.params, self.rows.tables, self.dropout)


def _added(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, size in parts:
        total[name] = total.get(name, 0.0) + size
    return total


# --- by size --------------------------------------------------------------------------------------
#
# Traffic of one plan at other table sizes: what a client sends and receives in a round.


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


# --- row cap --------------------------------------------------------------------------------------
#
# max_rows between two servers: up to where keys pay, and what a smaller cap would save.


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
