"""RoundTraffic: bytes of one client in a round, up and down, by stage of the round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from tessera.ids import ClientId, StageId, TableId
from tessera.plan import Domain, Plan
from tessera.protocols.machine import RoundOutcome, RoundOver
from tessera.protocols.plain import PlainInput, PlainRows, SparsePlainInput
from tessera.protocols.secagg import messages
from tessera.protocols.secagg.mask_streams import KEY_BYTES
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds import schemes
from tessera.rounds.forecast.rows import ExpectedRows
from tessera.rounds.forecast.secagg import ROUND, SecAggTraffic, carried, length, some
from tessera.rounds.forecast.two_server import TwoServerTraffic
from tessera.rounds.messages import Download, UnionOpened
from tessera.rounds.sums import MaskedSum, PlainSum, SharedSum, Sum


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
        yield from UP[type(schemes.of(self.plan).sum)](self)

    def down(self) -> Iterator[tuple[str, float]]:
        yield from DOWN[type(schemes.of(self.plan).sum)](self)

    # --- in the clear ---------------------------------------------------------------------------

    def _plain_up(self) -> Iterator[tuple[str, float]]:
        me, (dense, parts) = ClientId(0), self._update
        if schemes.of(self.plan).by_rows:
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

    def _plain_down(self) -> Iterator[tuple[str, float]]:
        yield self._rows_down()
        yield "update", self._over

    def _rows_down(self) -> tuple[str, float]:
        plan, itemsize = self.plan, self.plan.model.precision.dtype.itemsize
        frame = Download(
            round_id=ROUND, dense=b"", tables={plan.table_id(t.name): b"" for t in plan.tables}
        )
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

    # --- masked ---------------------------------------------------------------------------------

    def _masked_up(self) -> Iterator[tuple[str, float]]:
        plan, (dense, parts) = self.plan, self._update
        yield from self.sums.keys_up()
        if schemes.of(plan).randomises:
            union = plan.stages[0]
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

    def _masked_down(self) -> Iterator[tuple[str, float]]:
        yield from self.sums.keys_down()
        if schemes.of(self.plan).randomises:
            yield from (("union", size) for size in self.sums.unmask_down())
            yield "union", length(messages.NextStage(round_id=ROUND, stage=StageId(1)))
            yield "union", self._union_length
            yield "choice", self.sums.row_groups(self.rows.tables)
        yield self._rows_down()
        yield from (("update", size) for size in self.sums.unmask_down())
        yield "update", self._over

    # --- two servers, with a union before them or without ---------------------------------------

    def _shared_up(self) -> Iterator[tuple[str, float]]:
        yield from self._union_up()
        yield from self.two_server.up()

    def _shared_down(self) -> Iterator[tuple[str, float]]:
        yield from self._union_down()
        yield from self.two_server.down()
        yield "update", self._over

    def _union_up(self) -> Iterator[tuple[str, float]]:
        if self.plan.narrows:
            yield from self.sums.keys_up()
            (union,) = self.sums.params.stages
            yield "union", self.sums.masked(packed_bytes(union.group, union.dense))
            yield from (("union", size) for size in self.sums.unmask_up())

    def _union_down(self) -> Iterator[tuple[str, float]]:
        if self.plan.narrows:
            yield from self.sums.keys_down()
            yield from (("union", size) for size in self.sums.unmask_down())
            yield "union", self._union_length

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

    def between(self) -> float:
        """Between two servers, for each client; none where there is one."""
        if not schemes.of(self.plan).two_servers:
            return 0.0
        union = self._union_length if self.plan.narrows else 0.0
        return self.two_server.between() + (union + self._over) / self.plan.cohort

    @property
    def _over(self) -> float:
        return length(RoundOver.of(ROUND, RoundOutcome.DONE))

    def _nothing(self) -> Iterator[tuple[str, float]]:
        return iter(())


UP: Final = {
    Sum: RoundTraffic._nothing,
    PlainSum: RoundTraffic._plain_up,
    MaskedSum: RoundTraffic._masked_up,
    SharedSum: RoundTraffic._shared_up,
}
DOWN: Final = {
    Sum: RoundTraffic._nothing,
    PlainSum: RoundTraffic._plain_down,
    MaskedSum: RoundTraffic._masked_down,
    SharedSum: RoundTraffic._shared_down,
}
"""What a kind of sum has clients send and receive."""
