"""Forecast: what a round by a plan is expected to cost, under assumptions about its clients."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from tessera.errors import ConfigError
from tessera.ids import ClientId, StageId, TableId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Domain, Plan
from tessera.privacy.index.exposure import Holders
from tessera.privacy.index.identification_forecast import MOST_ROWS, IdentificationForecast, Setting
from tessera.privacy.index.response import LEVELS, IndexPrivacy
from tessera.protocols.machine import RoundOutcome, RoundOver
from tessera.protocols.plain import PlainInput, PlainRows, SparsePlainInput
from tessera.protocols.secagg import messages
from tessera.protocols.secagg.mask_streams import KEY_BYTES
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds import schemes
from tessera.rounds.forecast.epochs import EpochTraffic, Waiting, waiting
from tessera.rounds.forecast.rows import ExpectedRows, even_holders
from tessera.rounds.forecast.traffic import (
    ROUND,
    SecAggTraffic,
    TwoServerTraffic,
    Work,
    carried,
    length,
    masked_sums,
    some,
)
from tessera.rounds.messages import Download, UnionOpened
from tessera.rounds.sums import GroupSum, MaskedSum, PlainSum, Sum
from tessera.rounds.two_server.domain import WriteCost, key_bytes
from tessera.rounds.two_server.shared_sum import NarrowedSum, SharedSum

# --- traffic --------------------------------------------------------------------------------------
#
# RoundTraffic: bytes of one client in a round, up and down, by stage of the round.


@dataclass(frozen=True)
class RoundTraffic:
    """The messages of a round, over tables of the expected sizes. These are none."""

    rows: ExpectedRows

    @property
    def plan(self) -> Plan:
        return self.rows.plan

    def up(self) -> Iterator[tuple[str, float]]:
        """What a client sends."""
        return iter(())

    def down(self) -> Iterator[tuple[str, float]]:
        """What it receives."""
        return iter(())

    def between(self) -> float:
        """Between two servers, for each client; none where there is one."""
        return 0.0

    def union(self) -> tuple[float, float]:
        """Up and down of a union that opens once a period of a fixed group; none elsewhere."""
        return 0.0, 0.0

    @property
    def work(self) -> Work | None:
        """Of masked sums. None without one: a plain sum's work is too little to forecast."""
        return None

    def _rows_down(self) -> tuple[str, float]:
        plan, itemsize = self.plan, self.plan.model.precision.dtype.itemsize
        frame = Download(round_id=ROUND, dense=b"", tables=dict.fromkeys(plan.table_ids, b""))
        rows = [round(f.revealed) * plan.table(f.name).width * itemsize for f in self.rows.tables]
        return "rows down", length(frame) + carried(plan.model.dense * itemsize, *rows)

    @property
    def _update(self) -> tuple[int, tuple[int, ...]]:
        """Packed bytes of the update's dense part, and of the rows of each table."""
        stage = self.plan.stages[-1]
        parts = (
            packed_bytes(stage.group, round(f.included) * spec.width)
            for f, spec in zip(self.rows.tables, stage.tables, strict=False)
        )
        return packed_bytes(stage.group, stage.dense), tuple(parts)

    def _named(self, *, within_union: bool) -> tuple[messages.RevealedRows, ...]:
        """The rows a client names: by place in the union where there is one, else by id."""
        return tuple(
            messages.RevealedRows(
                table=TableId(i),
                rows=some(f.revealed, round(f.union) if within_union else self.plan.tables[i].rows),
            )
            for i, f in enumerate(self.rows.tables)
        )

    @property
    def _union_length(self) -> float:
        plan = self.plan
        roots = {
            plan.table_id(f.name): some(f.union, plan.table(f.name).rows)
            for f in self.rows.tables
            if not f.derived
        }
        return length(UnionOpened(round_id=ROUND, tables=roots))

    @property
    def _over(self) -> float:
        return length(RoundOver.of(ROUND, RoundOutcome.DONE))


class PlainTraffic(RoundTraffic):
    """In the clear."""

    def up(self) -> Iterator[tuple[str, float]]:
        me, (dense, parts) = ClientId(0), self._update
        if parts:
            named = self._named(within_union=False)
            yield "choice", length(PlainRows(round_id=ROUND, sender=me, tables=named))
        frame = PlainInput(round_id=ROUND, sender=me, dense=b"", tables=(b"",) * len(parts))
        whole = length(frame) + carried(dense, *parts)
        yield "update", min(whole, self._sparse_up(parts)) if self.plan.selects else whole

    def _sparse_up(self, parts: Sequence[int]) -> float:
        """The same with a selection, evenly spread: what is sent of each part, and the weight."""
        stage, cuts = self.plan.stages[-1], self.plan.cuts
        places = np.ones(stage.dense, dtype=np.bool_)
        for cut in cuts:
            rows = np.zeros((cut.rows, cut.width), dtype=np.bool_)
            rows[np.arange(cut.most) * cut.rows // cut.most] = True
            places[cut.start : cut.stop] = rows.reshape(-1)
        found = np.flatnonzero(places).astype(np.uint64)
        frame = SparsePlainInput(
            round_id=ROUND, sender=ClientId(0), places=found, dense=b"", tables=(b"",) * len(parts)
        )
        return length(frame) + carried(packed_bytes(stage.group, len(found)), *parts)

    def down(self) -> Iterator[tuple[str, float]]:
        yield self._rows_down()
        yield "update", self._over


class MaskedTraffic(RoundTraffic):
    """Under masks, with a union before the update or without."""

    @cached_property
    def sums(self) -> SecAggTraffic:
        """The messages of the secure sum."""
        return SecAggTraffic(self.plan.secagg(ROUND))

    @property
    def work(self) -> Work:
        return masked_sums(self.sums.params, self.rows.tables, self.rows.dropout)

    def up(self) -> Iterator[tuple[str, float]]:
        plan, (dense, parts) = self.plan, self._update
        yield from self.sums.keys_up()
        *before, _ = plan.stages
        for union in before:
            yield "union", self.sums.masked(packed_bytes(union.group, union.dense))
            yield from (("union", size) for size in self.sums.unmask_up())
            revealed = messages.RevealedSet(
                round_id=ROUND,
                stage=StageId(1),
                sender=ClientId(0),
                quorum=self.sums.params.quorum,
                tables=self._named(within_union=True),
            )
            yield "choice", length(revealed)
        yield "update", self.sums.masked(dense, *parts)
        yield from (("update", size) for size in self.sums.unmask_up())
        if plan.privacy.strict_quorum:
            keys = {
                TableId(i): bytes(KEY_BYTES * round(f.included))
                for i, f in enumerate(self.rows.tables)
            }
            yield "update", self.sums.shares(keys) - self.sums.shares({})

    def down(self) -> Iterator[tuple[str, float]]:
        yield from self.sums.keys_down()
        for _ in self.plan.stages[:-1]:
            yield from (("union", size) for size in self.sums.unmask_down())
            yield "union", length(messages.NextStage(round_id=ROUND, stage=StageId(1)))
            yield "union", self._union_length
            yield "choice", self.sums.row_groups(self.rows.tables)
        yield self._rows_down()
        yield from (("update", size) for size in self.sums.unmask_down())
        yield "update", self._over


class SharedTraffic(RoundTraffic):
    """Of two servers and their clients."""

    @cached_property
    def two_server(self) -> TwoServerTraffic:
        """The messages of two servers and their clients."""
        # Who writes a row holds it: decoys are in a union and not in the sum.
        whole = replace(self.plan.two_server, domain=Domain.WHOLE, row_limit=2**40)
        bare = replace(self.plan, two_server=whole)
        written = {f.name: round(f.union) for f in replace(self.rows, plan=bare).tables}
        return TwoServerTraffic(self.plan, self._domain, written)

    @property
    def _domain(self) -> dict[str, Ids] | None:
        """The rows that the servers look at; None: all."""
        return None

    def up(self) -> Iterator[tuple[str, float]]:
        return self.two_server.up()

    def down(self) -> Iterator[tuple[str, float]]:
        yield from self.two_server.down()
        yield "update", self._over

    def between(self) -> float:
        return self.two_server.between() + self._over / self.plan.cohort


class NarrowedTraffic(SharedTraffic):
    """Likewise, with a union before them."""

    @property
    def _domain(self) -> dict[str, Ids]:
        return {f.name: some(f.union, self.plan.table(f.name).rows) for f in self.rows.tables}

    @cached_property
    def sums(self) -> SecAggTraffic:
        """The messages of the union's secure sum."""
        return SecAggTraffic(self.plan.union_sum(ROUND))

    @property
    def work(self) -> Work:
        return masked_sums(self.sums.params, self.rows.tables, self.rows.dropout)

    def up(self) -> Iterator[tuple[str, float]]:
        yield from self.sums.keys_up()
        (union,) = self.sums.params.stages
        yield "union", self.sums.masked(packed_bytes(union.group, union.dense))
        yield from (("union", size) for size in self.sums.unmask_up())
        yield from super().up()

    def down(self) -> Iterator[tuple[str, float]]:
        yield from self.sums.keys_down()
        yield from (("union", size) for size in self.sums.unmask_down())
        yield "union", self._union_length
        yield from super().down()

    def between(self) -> float:
        return self.two_server.between() + (self._union_length + self._over) / self.plan.cohort


TRAFFIC: Final[dict[type[Sum], Callable[[ExpectedRows], RoundTraffic | EpochTraffic]]] = {
    Sum: RoundTraffic,
    PlainSum: PlainTraffic,
    MaskedSum: MaskedTraffic,
    GroupSum: EpochTraffic,
    SharedSum: SharedTraffic,
    NarrowedSum: NarrowedTraffic,
}
"""By the kind of sum."""


# --- forecast -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """Rows, bytes and work of a round by this plan; rows are held evenly unless it is given how.

    Where clients are in fixed groups, it is about one update of one group: each has sums of its
    own, and a union once a period (`union_bytes`).
    """

    plan: Plan
    rows_per_client: int
    given_holders: Holders | None = None
    dropout: float = 0.0
    groups: int = field(init=False, default=1)  # of a round, each with sums of its own
    invited: int = field(init=False, default=0)  # clients of a round, of all groups

    def __post_init__(self) -> None:
        full = round(self.plan.cohort / self.plan.group_plan.cohort)
        object.__setattr__(self, "invited", self.plan.cohort)
        object.__setattr__(self, "groups", max(1, full))
        object.__setattr__(self, "plan", self.plan.group_plan)
        _ = self.rows  # refuses what is not a number of rows

    @cached_property
    def rows(self) -> ExpectedRows:
        return ExpectedRows(self.plan, self.rows_per_client, self.given_holders, self.dropout)

    @cached_property
    def _traffic(self) -> RoundTraffic | EpochTraffic:
        return TRAFFIC[type(schemes.of(self.plan).sum)](self.rows)

    @property
    def two_server(self) -> TwoServerTraffic:
        """The messages of two servers and their clients."""
        assert isinstance(self._traffic, SharedTraffic)
        return self._traffic.two_server

    @property
    def union_bytes(self) -> tuple[float, float]:
        """Of one client up and down, once a period of its fixed group; nothing elsewhere."""
        return self._traffic.union()

    def waiting(self, *, absent: float, population: int = 0) -> Waiting:
        """How long fixed groups wait, if this share of invited clients is absent."""
        size = self.plan.cohort
        groups = max(1, (population or 2 * self.invited) // size)
        return waiting(cohort=self.invited, size=size, absent=absent, groups=groups)

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
        return self._traffic.work


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


HASHED_OFTEN: Final = 1 << 22
"""Rows of a table that is hashed for every max_rows that is tried: a larger one takes long."""
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
    if cost.rows > HASHED_OFTEN:  # in proportion: keys are as long as there are bins
        return min(cost.rows, plan.union.max_rows * cost.shares // cost.keys)
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


# --- identification -------------------------------------------------------------------------------
#
# How likely a plan lets a holder be identified: the setting in which that is estimated.


MOST_ROUNDS: Final = 200
"""Rounds of a federation that are simulated; after so many hardly anything is left to learn."""
LEAST_SHARE: Final = 1e-3
"""Numbers of holders that fewer rows have are left out of the simulation."""


def answers(plan: Plan) -> IndexPrivacy:
    """Where a scheme asks for no answers, a client's trace is that of one who names every row."""
    if schemes.of(plan).randomises:
        return plan.privacy.index
    return LEVELS["cpp5"]


def identification_forecast(
    forecast: Forecast, *, rounds: int, population: int = 0
) -> IdentificationForecast:
    """For the first table whose rows a client chooses, after `rounds` rounds of each client.

    Where clients are in fixed groups it is about one of them, as the forecast is.
    """
    plan = forecast.plan
    clients = plan.cohort if plan.grouped else max(population, plan.cohort)
    table = plan.roots[0]
    held = min(forecast.rows_per_client, table.rows)
    randomised = schemes.of(plan).randomises
    setting = Setting(
        privacy=answers(plan),
        cohort=plan.cohort,
        population=clients,
        rounds=min(MOST_ROUNDS, max(1, round(rounds * clients / plan.cohort))),
        holders=forecast.given_holders or _common(even_holders(table.rows, clients, held)),
        period_rounds=plan.privacy.period_rounds if randomised else 0,
        perturbation=plan.privacy.perturbation if randomised else None,
        min_group=plan.quorum,
        group=plan.promise.group,
    )
    return IdentificationForecast.of(
        setting, plan.promise, dropout=forecast.dropout, rows=MOST_ROWS // 2
    )


def _common(holders: Holders) -> Holders:
    shares = {count: share for count, share in holders.by_row if share >= LEAST_SHARE}
    total = sum(shares.values())
    return Holders.of({count: share / total for count, share in shares.items()})
