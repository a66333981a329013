"""RoundTraffic: bytes of one client in a round, up and down, by stage of the round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tessera.ids import ClientId, StageId, TableId
from tessera.protocols.plainsum import PlainInput, PlainRows
from tessera.protocols.secagg import messages
from tessera.protocols.secagg.holdback import KEY_BYTES
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds.forecast.rows import ExpectedRows, TableForecast
from tessera.rounds.forecast.secagg import SecAggTraffic
from tessera.rounds.forecast.sizes import ROUND, carried, length, some
from tessera.rounds.forecast.two_server import TwoServerTraffic
from tessera.rounds.messages import Download, UnionOpened
from tessera.rounds.plan import Domain, Plan, Scheme


@dataclass(frozen=True)
class RoundTraffic:
    """The messages of a round, over tables of the expected sizes."""

    rows: ExpectedRows

    @property
    def plan(self) -> Plan:
        return self.rows.plan

    @cached_property
    def sums(self) -> SecAggTraffic:
        """The messages of the secure sum, in a scheme that has one."""
        plan = self.plan
        return SecAggTraffic(plan.union_sum(ROUND) if plan.narrows else plan.secagg(ROUND))

    @cached_property
    def two_server(self) -> TwoServerTraffic:
        """The messages of two servers and their clients."""
        plan = self.plan
        narrow = {f.name: some(f.union, plan.table(f.name).rows) for f in self.rows.tables}
        # Who writes a row holds it: decoys are in the union and not in the sum.
        bare = replace(
            plan, two_server=replace(plan.two_server, domain=Domain.WHOLE, row_limit=2**40)
        )
        written = {f.name: round(f.union) for f in replace(self.rows, plan=bare).tables}
        return TwoServerTraffic(plan, narrow if plan.narrows else None, written)

    def up(self) -> Iterator[tuple[str, float]]:
        plan, tables = self.plan, self.rows.tables
        if plan.scheme is Scheme.TWO_SERVER:
            if plan.narrows:
                yield from self.sums.keys_up()
                (union,) = self.sums.params.stages
                yield "union", self.sums.masked(packed_bytes(union.group, union.dense))
                yield from (("union", size) for size in self.sums.unmask_up())
            yield from self.two_server.up()
            return
        stage, me = plan.stages[-1], ClientId(0)
        dense = packed_bytes(stage.group, stage.dense)
        parts = tuple(
            packed_bytes(stage.group, round(f.included) * spec.width)
            for f, spec in zip(tables, stage.tables, strict=False)
        )
        if not plan.scheme.secure:
            if plan.scheme.by_rows:
                yield (
                    "choice",
                    length(PlainRows(round_id=ROUND, sender=me, tables=self._named(tables))),
                )
            frame = PlainInput(round_id=ROUND, sender=me, dense=b"", tables=(b"",) * len(parts))
            yield "update", length(frame) + carried(dense, *parts)
            return
        yield from self.sums.keys_up()
        if plan.scheme is Scheme.SECURE_SUBMODEL:
            union = plan.stages[0]
            yield "union", self.sums.masked(packed_bytes(union.group, union.dense))
            yield from (("union", size) for size in self.sums.unmask_up())
            yield (
                "choice",
                length(
                    messages.RevealedSet(
                        round_id=ROUND,
                        stage=StageId(1),
                        sender=me,
                        quorum=self.sums.params.quorum,
                        tables=self._named(tables),
                    )
                ),
            )
        yield "update", self.sums.masked(dense, *parts)
        yield from (("update", size) for size in self.sums.unmask_up())
        if plan.privacy.strict_quorum:
            keys = {TableId(i): bytes(KEY_BYTES * round(f.included)) for i, f in enumerate(tables)}
            yield "update", self.sums.shares(keys) - self.sums.shares({})

    def down(self) -> Iterator[tuple[str, float]]:
        plan, tables = self.plan, self.rows.tables
        itemsize = plan.model.precision.dtype.itemsize
        if plan.scheme is Scheme.TWO_SERVER:
            if plan.narrows:
                yield from self.sums.keys_down()
                yield from (("union", size) for size in self.sums.unmask_down())
                yield "union", self._union_length
            yield from self.two_server.down()
            return
        if plan.scheme.secure:
            yield from self.sums.keys_down()
        if plan.scheme is Scheme.SECURE_SUBMODEL:
            yield from (("union", size) for size in self.sums.unmask_down())
            yield "union", length(messages.NextStage(round_id=ROUND, stage=StageId(1)))
            yield "union", self._union_length
            yield "choice", self.sums.row_groups(tables)
        frame = Download(
            round_id=ROUND, dense=b"", tables={plan.table_id(t.name): b"" for t in plan.tables}
        )
        rows = [round(f.revealed) * plan.table(f.name).width * itemsize for f in tables]
        yield "rows down", length(frame) + carried(plan.model.dense * itemsize, *rows)
        if plan.scheme.secure:
            yield from (("update", size) for size in self.sums.unmask_down())

    def _named(self, tables: tuple[TableForecast, ...]) -> tuple[messages.RevealedRows, ...]:
        """The rows a client names: by place in the union where there is one, else by id."""
        within = self.plan.scheme is Scheme.SECURE_SUBMODEL
        return tuple(
            messages.RevealedRows(
                table=TableId(i),
                rows=some(f.revealed, round(f.union) if within else self.plan.tables[i].rows),
            )
            for i, f in enumerate(tables)
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

    def between(self) -> float:
        """Between two servers, for each client; none where there is one."""
        if self.plan.scheme is not Scheme.TWO_SERVER:
            return 0.0
        union = self._union_length if self.plan.narrows else 0.0
        return self.two_server.between() + union / self.plan.cohort
