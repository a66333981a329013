"""Forecast: what a round by a plan is expected to cost, under assumptions about its clients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from tessera.privacy.exposure import Holders
from tessera.rounds import schemes
from tessera.rounds.forecast.rows import ExpectedRows
from tessera.rounds.forecast.traffic import RoundTraffic
from tessera.rounds.forecast.two_server import TwoServerTraffic
from tessera.rounds.forecast.work import Work, masked_sums
from tessera.rounds.plan import Plan


@dataclass(frozen=True)
class Forecast:
    """Rows, bytes and work of a round by this plan; rows are held evenly unless it is given how.

    Where clients meet in fixed groups, it is about one group: each has sums of its own.
    """

    plan: Plan
    rows_per_client: int
    given_holders: Holders | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
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
