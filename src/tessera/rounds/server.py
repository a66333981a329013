"""ServerRound: the same phases from the other side, and the means that come out of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.errors import MisuseError
from tessera.ids import ClientId, Party, RoundId, StageId, TableId, clients_in
from tessera.learning.arrays import Floats, Ids
from tessera.learning.derived_map import DerivedMap
from tessera.learning.tables import StoredTable
from tessera.protocols import wire
from tessera.protocols.machine import Outbound
from tessera.protocols.plainsum import PlainServer
from tessera.protocols.secagg.groups import distinct
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.phases import StageSum
from tessera.protocols.secagg.server import Server
from tessera.protocols.union.encoding import UnionResult
from tessera.rounds import encode, select
from tessera.rounds.delivery import SentModel, model_digest
from tessera.rounds.encode import RoundResult
from tessera.rounds.messages import Download
from tessera.rounds.plan import ONE_SERVER, UNION, Plan, Scheme, check_scheme


class ServerRound:
    """The server in one round of training.

    `dense` and `tables` are the model as it stands; they are read, and `result` is for the caller
    to merge.
    """

    SCHEMES: ClassVar = ONE_SERVER

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        cohort: Iterable[ClientId],
        *,
        dense: npt.NDArray[np.float32],
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap] | None = None,
        entropy: Entropy,
        identity: Identity | None = None,
    ) -> None:
        self._hold(plan, round_id, dense=dense, tables=tables, derived=derived)
        invited = tuple(cohort)
        self._sum: Server | PlainServer
        if plan.scheme.secure:
            self._sum = Server(
                plan.secagg(round_id),
                invited,
                entropy=entropy,
                identity=identity,
                sent=self._sent,
            )
        else:
            self._sum = PlainServer(plan.stages[0], round_id, invited, needed=plan.least_survivors)

    def _hold(
        self,
        plan: Plan,
        round_id: RoundId,
        *,
        dense: npt.NDArray[np.float32],
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap] | None,
    ) -> None:
        """The model of the round, and nothing of the union yet."""
        check_scheme(type(self).__name__, plan.scheme, self.SCHEMES)
        self.plan, self.round_id = plan, round_id
        self._dense, self._tables, self._derived = dense, tables, derived or {}
        if dense.shape != (plan.model.dense,) or tables.keys() != {t.name for t in plan.tables}:
            raise MisuseError("the model is not the plan's")
        self._union: dict[str, Ids] = {}
        self._decoded: UnionResult | None = None
        self._copy: tuple[Floats, dict[str, Floats]] | None = None
        self._sent = SentModel(StageId(len(plan.stages) - 1))

    @property
    def phase(self) -> str:
        return self._sum.phase

    @property
    def expected(self) -> frozenset[Party]:
        return self._sum.expected

    @property
    def sums(self) -> tuple[StageSum, ...]:
        return self._sum.sums

    @property
    def union(self) -> Mapping[str, Ids]:
        """The opened union by table, derived tables included; empty before, and without one."""
        return self._union

    def snapshot(self) -> bytes:
        """The sum's state alone: a round of training cannot be woken from it yet."""
        if not isinstance(self._sum, Server):
            raise MisuseError("only a secure sum has something to store")
        return self._sum.snapshot()

    def start(self) -> list[Outbound]:
        """Messages before any client has sent one: the model, if clients need all of it."""
        return [] if self.plan.scheme is not Scheme.FEDAVG else self._whole_model()

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        return self._sum.receive(sender, data)

    def close_phase(self) -> list[Outbound]:
        closing, revealed = self._sum.phase, dict(self._sum.revealed)
        out = self._sum.close_phase()
        if closing == "reveal":
            # Rows before groups: a client that knows its groups can train at once.
            return [*self._downloads(revealed), *out]
        if closing == "share" and self.plan.scheme is Scheme.SECURE_FEDAVG:
            return [*self._whole_model(), *out]
        if self._sum.phase == "between":
            return [*out, *self._begin_update()]
        return out

    # --- the union ------------------------------------------------------------------------------

    def _begin_update(self) -> list[Outbound]:
        assert isinstance(self._sum, Server)
        messages = self._decode_union(self._sum.sums[UNION])
        rows = {self.plan.table_id(name): len(ids) for name, ids in self._union.items()}
        context = hashlib.sha256(messages[0].data).digest()  # all survivors get it
        return [*messages, *self._sum.begin_stage(context, rows)]

    def _decode_union(self, total: StageSum) -> list[Outbound]:
        """The union from its sum, as messages to everybody whose rows are in it."""
        plan = self.plan
        self._decoded = plan.union_encoding(self.round_id).decode(total.dense)
        message = select.opened_union(plan, self.round_id, self._decoded.ids)
        self._union = select.union_rows(plan, message, self._derived)
        data = wire.encode(message)
        return [Outbound(ClientId(int(c)), type(message).__name__, data) for c in total.survivors]

    def take_union(self, roots: Mapping[str, Ids]) -> None:
        """The union by table; rows of derived tables follow."""
        self._union = select.with_derived(self.plan, roots, self._derived)

    # --- the rows -------------------------------------------------------------------------------

    def _downloads(self, revealed: Mapping[ClientId, Mapping[TableId, Ids]]) -> list[Outbound]:
        plan, dtype = self.plan, self.plan.model.precision.dtype
        dense = self._dense.astype(dtype).tobytes()
        # Each row is read once for the whole cohort, then cut out for each client.
        read: dict[TableId, tuple[Ids, npt.NDArray[np.generic]]] = {}
        for t in plan.tables:
            table = plan.table_id(t.name)
            wanted = distinct(
                np.concatenate(
                    [np.zeros(0, dtype=np.uint64), *(r[table] for r in revealed.values())]
                )
            )
            ids = self._union[t.name][wanted] if self._union else wanted
            read[table] = (wanted, self._tables[t.name].values(ids).astype(dtype))
        self._sent.model, self._sent.tables = model_digest(dense, {}), read
        out = []
        for client, by_table in revealed.items():
            tables = {
                table: read[table][1][np.searchsorted(read[table][0], rows)].tobytes()
                for table, rows in by_table.items()
            }
            out.append(
                Outbound.of(client, Download(round_id=self.round_id, dense=dense, tables=tables))
            )
        return out

    def _whole_model(self) -> list[Outbound]:
        plan, dtype = self.plan, self.plan.model.precision.dtype
        tables = {
            plan.table_id(t.name): self._tables[t.name]
            .values(np.arange(t.rows, dtype=np.uint64))
            .astype(dtype)
            .tobytes()
            for t in plan.tables
        }
        dense = self._dense.astype(dtype).tobytes()
        message = Download(round_id=self.round_id, dense=dense, tables=tables)
        self._sent.model = model_digest(dense, tables)
        data = wire.encode(message)
        return [Outbound(c, "Download", data) for c in sorted(clients_in(self.expected))]

    def fetch(self, requested: Mapping[str, Ids] | None) -> tuple[Floats, dict[str, Floats]]:
        """The dense part and these rows as a client would get them, or the whole model."""
        dtype = self.plan.model.precision.dtype
        if requested is None:
            if self._copy is None:
                every = {t.name: np.arange(t.rows, dtype=np.uint64) for t in self.plan.tables}
                self._copy = self.fetch(every)
            return self._copy
        dense = self._dense.astype(dtype).astype(np.float32)
        return dense, {
            name: self._tables[name].values(ids).astype(dtype).astype(np.float32)
            for name, ids in requested.items()
        }

    # --- the means ------------------------------------------------------------------------------

    @cached_property
    def result(self) -> RoundResult:
        """Per-row averages by counts (FedSubAvg), or the whole model's by training-set size.

        Worked out once: a carrier asks whenever somebody wants to know how the round stands.
        """
        if self.phase != "done":
            raise MisuseError(f"a round in phase {self.phase} has no result")
        return self.means(self._sum.sums[-1])

    def means(self, total: StageSum) -> RoundResult:
        """The means that follow from the round's last sum."""
        residual = 0 if self._decoded is None else self._decoded.residual
        return encode.means(self.plan, total, union=self._union, residual=residual)
