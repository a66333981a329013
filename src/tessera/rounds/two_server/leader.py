"""LeaderRound: the leader of two servers in one round, and the means that come out of it.

It carries what clients and helper have for each other, and sees of it what is in the clear: public
parts of keys, sealed boxes, and at the end one sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import SigningKey
from tessera.errors import MisuseError, PeerError
from tessera.ids import HELPER, ClientId, Party, RoundId, StageId
from tessera.learning.arrays import Floats, Ids
from tessera.learning.derived_map import DerivedMap
from tessera.learning.tables import StoredTable
from tessera.protocols.machine import Outbound, RoundOutcome, RoundOver
from tessera.protocols.retrieval.row_tags import RowTagCache
from tessera.protocols.retrieval.server import RetrievalLeader
from tessera.protocols.scatter.leader import WriteLeader
from tessera.protocols.scatter.sums import TwoServerSum
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.phases import StageSum
from tessera.protocols.secagg.server import Server
from tessera.protocols.two_server.handshake import PHASE as HANDSHAKE_PHASE
from tessera.protocols.two_server.handshake import LeaderHandshake
from tessera.protocols.two_server.model import ServedModel
from tessera.protocols.two_server.params import Servers, TwoServerParams
from tessera.protocols.two_server.workers import Workers
from tessera.rounds import encode, schemes, select
from tessera.rounds.encode import RoundResult
from tessera.rounds.plan import UNION, Plan
from tessera.rounds.two_server.opened import opened_sum
from tessera.rounds.two_server.params import served, two_server_params
from tessera.rounds.two_server.write_cost import WriteCost, write_cost


class LeaderRound:
    """The leader: [union ->] handshake -> query -> answer -> collect -> exclude -> open."""

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
        servers: Servers,
        key: SigningKey,
        identity: Identity | None = None,
        workers: Workers | None = None,
        row_tags: RowTagCache | None = None,
    ) -> None:
        """`identity` has the directory for a union's signatures; `row_tags` are this server's
        from earlier rounds."""
        schemes.check(type(self).__name__, plan, schemes.TWO_SERVERS)
        if dense.shape != (plan.model.dense,) or tables.keys() != {t.name for t in plan.tables}:
            raise MisuseError("the model is not the plan's")
        self.plan, self.round_id = plan, round_id
        self._dense, self._tables, self._derived = dense, tables, derived or {}
        self._union: dict[str, Ids] = {}
        self._residual = 0
        self._invited = self._cohort = tuple(cohort)
        self._entropy, self._servers, self._key, self._workers = entropy, servers, key, workers
        self._row_tags = row_tags
        self._params: TwoServerParams | None = None
        self._model: ServedModel | None = None
        self._unanswered: dict[ClientId, str] = {}
        self._union_sum: Server | None = None
        if plan.narrows:
            self._union_sum = Server(
                plan.union_sum(round_id), self._invited, entropy=entropy, identity=identity
            )
        self._role: Server | LeaderHandshake | RetrievalLeader | WriteLeader | None = (
            self._union_sum
        )

    @property
    def phase(self) -> str:
        return HANDSHAKE_PHASE if self._role is None else self._role.phase

    @property
    def expected(self) -> frozenset[Party]:
        return frozenset() if self._role is None else self._role.expected

    @property
    def sums(self) -> tuple[StageSum, ...]:
        """The union's, where there is one, and the update's, as soon as each is opened."""
        union = () if self._union_sum is None else self._union_sum.sums
        total = self._total
        return (
            union
            if total is None
            else (*union, opened_sum(self.plan, StageId(len(union)), total, self._union))
        )

    @property
    def _total(self) -> TwoServerSum | None:
        return self._role.total if isinstance(self._role, WriteLeader) else None

    def snapshot(self) -> bytes:
        """The state of the sum under way: a round of training cannot be woken from it yet."""
        if not isinstance(self._role, Server | WriteLeader):
            raise MisuseError(f"a leader in phase {self.phase} has no sum to store")
        return self._role.snapshot()

    @property
    def excluded(self) -> Mapping[ClientId, str]:
        """Clients that the helper refused, and why, as far as the helper says."""
        later = self._role.excluded if isinstance(self._role, WriteLeader) else {}
        return {**self._unanswered, **later}

    @property
    def writing(self) -> list[WriteCost]:
        """How each table is written in this round, and what the other way would cost."""
        assert self._params is not None
        plan, specs = self.plan, self._params.tables
        return [write_cost(plan, plan.tables[spec.table], spec.rows) for spec in specs]

    def start(self) -> list[Outbound]:
        return [] if self.plan.narrows else self._begin(None)

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """One message; one of the helper's may have an answer at once."""
        if isinstance(self._role, Server):
            if isinstance(sender, str):
                raise PeerError(
                    "sends before the union is opened",
                    round_id=self.round_id,
                    phase=self.phase,
                    peer=sender,
                )
            self._role.receive(sender, data)
            return []
        if self._role is None:
            raise MisuseError("a round is started before it receives")
        out = self._role.receive(sender, data)
        return out + self._next()

    def close_phase(self) -> list[Outbound]:
        assert self._role is not None
        out = self._role.close_phase()
        if isinstance(self._role, Server):
            return out if self._role.phase != "done" else [*out, *self._after_union(self._role)]
        return out + self._next()

    # --- from one part of the round to the next ---------------------------------------------------

    def _after_union(self, summed: Server) -> list[Outbound]:
        """The union to everybody, the helper too; then both servers begin the round over it."""
        plan, total = self.plan, summed.sums[UNION]
        decoded = plan.union_encoding(self.round_id).decode(total.dense)
        message = select.opened_union(plan, self.round_id, decoded.ids)
        self._residual = decoded.residual
        self._union = select.union_rows(plan, message, self._derived)
        self._invited = tuple(ClientId(int(c)) for c in total.survivors)
        everybody: list[Party] = [*self._invited, HELPER]
        out = [Outbound.of(party, message) for party in everybody]
        return [*out, *self._begin(self._union)]

    @property
    def union(self) -> Mapping[str, Ids]:
        """The opened union by table, derived tables included; empty before, and without one."""
        return self._union

    def _begin(self, domain: Mapping[str, Ids] | None) -> list[Outbound]:
        self._params = two_server_params(self.plan, self.round_id, self._servers, domain)
        self._model = served(self.plan, self._params, self._dense, self._tables)
        role = LeaderHandshake(
            self._params, self._model, self._invited, key=self._key, entropy=self._entropy
        )
        self._role = role
        return role.begin()

    def _next(self) -> list[Outbound]:
        """The role after one that is done. Only the last is done for good."""
        role = self._role
        if isinstance(role, LeaderHandshake) and role.signed_header is not None:
            assert self._params is not None and self._model is not None
            self._header = role.signed_header.message.header
            self._role = RetrievalLeader(
                self._params,
                self._header,
                self._model,
                self._invited,
                row_tags=self._row_tags,
                workers=self._workers,
            )
        elif isinstance(role, RetrievalLeader) and role.phase == "done":
            assert self._params is not None
            self._unanswered = dict.fromkeys(role.refused, "the helper refused its query")
            self._role = WriteLeader(
                self._params, self._header, self._invited, key=self._key, workers=self._workers
            )
        return []

    # --- the means ------------------------------------------------------------------------------

    @cached_property
    def result(self) -> RoundResult:
        if self._total is None:
            raise MisuseError(f"a round in phase {self.phase} has no result")
        return self.means(self.sums[-1])

    def farewell(self) -> list[Outbound]:
        """To everybody, when the round has ended and its outcome is stored: secrets may go."""
        outcome = RoundOutcome.ABORTED if self._total is None else RoundOutcome.DONE
        everybody: list[Party] = [*sorted(self._cohort), HELPER]
        return [Outbound.of(party, RoundOver.of(self.round_id, outcome)) for party in everybody]

    def means(self, total: StageSum) -> RoundResult:
        """The means that follow from the round's last sum."""
        return encode.means(self.plan, total, union=self._union, residual=self._residual)

    # --- ideal rounds ---------------------------------------------------------------------------

    def take_union(self, roots: Mapping[str, Ids]) -> None:
        """The union by table; rows of derived tables follow."""
        self._union = select.with_derived(self.plan, roots, self._derived)

    def fetch(self, requested: Mapping[str, Ids]) -> tuple[Floats, dict[str, Floats]]:
        """The dense part and these rows as a client would get them."""
        dtype = self.plan.model.precision.dtype
        dense = self._dense.astype(dtype).astype(np.float32)
        return dense, {
            name: self._tables[name].values(ids).astype(dtype).astype(np.float32)
            for name, ids in requested.items()
        }
