"""LeaderRound: the server that clients talk to, in one round between two servers.

It goes through the roles of the protocols one after the other: the union's sum where there is one,
the handshake, the retrieval, the write. Each judges itself which messages are due. A role that is
done stays inside the state until the round is over: it recognises what is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.keys import SigningKey
from tessera.errors import Malformed, MisuseError, RoundAborted
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId, StageId
from tessera.learning.arrays import Floats, Ids
from tessera.learning.derived_map import DerivedMap
from tessera.learning.submodel import TablePart
from tessera.learning.tables import StoredTable
from tessera.protocols import wire
from tessera.protocols.index_set import client_set
from tessera.protocols.machine import (
    Aborted,
    Closes,
    Coordinator,
    Moved,
    Outbound,
    RoundOutcome,
    RoundOver,
    Steps,
    to_all,
)
from tessera.protocols.retrieval.messages import HelperAnswer, Query
from tessera.protocols.retrieval.row_tags import RowTagCache
from tessera.protocols.retrieval.server import RetrievalLeader
from tessera.protocols.scatter.leader import WriteLeader
from tessera.protocols.scatter.messages import CheckCoin, Exclusions, SumShare, WriteReport
from tessera.protocols.secagg import messages as secagg
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.phases import StageSum
from tessera.protocols.secagg.server import Server
from tessera.protocols.stored import Inner, Kept, Owner
from tessera.protocols.two_server.handshake import PHASE as HANDSHAKE
from tessera.protocols.two_server.handshake import LeaderHandshake
from tessera.protocols.two_server.key_period import KeyStore, keys_of
from tessera.protocols.two_server.messages import HandshakeConsent, HandshakeNonce, Header
from tessera.protocols.two_server.model import ServedModel
from tessera.protocols.two_server.params import Servers, TwoServerParams
from tessera.protocols.two_server.workers import Workers
from tessera.rounds import encode, schemes, select
from tessera.rounds.encode import RoundResult
from tessera.rounds.farewell import farewells
from tessera.rounds.messages import UnionOpened
from tessera.rounds.plan import UNION, Plan
from tessera.rounds.root import StoredRoot, draw_root
from tessera.rounds.two_server.domain import NAME as DOMAIN
from tessera.rounds.two_server.domain import RoundDomain, StoredDomain, check_stored
from tessera.rounds.two_server.opened import opened_sum
from tessera.rounds.two_server.params import served
from tessera.rounds.two_server.write_cost import WriteCost, costs

REFUSED_QUERY: Final = "the helper refused its query"


# --- the states, as a round happens ---------------------------------------------------------------


@wire.record(tag=0x02C0)
@dataclass(frozen=True, slots=True, kw_only=True)
class NotBegun:
    """Has no union to wait for, and has sent nothing."""

    root: StoredRoot


@wire.record(tag=0x02C1)
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitingRows:
    """Carries the union's sum."""

    root: StoredRoot
    sum: Annotated[Server, Inner("sum")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRows:
    """Over which rows the round goes. `sum` is the union's, if there is one; `residual` counts the
    ids that its encoding could not give back."""

    sum: Annotated[Server | None, wire.Maybe(Inner("sum"))]
    residual: Annotated[int, wire.VARINT]
    domain: StoredDomain


@wire.record(tag=0x02C2)
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreeing:
    """Agrees with the helper on a header."""

    over: RoundRows
    handshake: Annotated[LeaderHandshake, Inner("handshake")]


@wire.record(tag=0x02C3)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRows:
    """Queries come in and are answered with the helper."""

    over: RoundRows
    handshake: Annotated[LeaderHandshake, Inner("handshake")]
    retrieval: Annotated[RetrievalLeader, Inner("retrieval")]


@wire.record(tag=0x02C4)
@dataclass(frozen=True, slots=True, kw_only=True)
class AddingReports:
    """Reports come in and are added up with the helper."""

    over: RoundRows
    handshake: Annotated[LeaderHandshake, Inner("handshake")]
    retrieval: Annotated[RetrievalLeader, Inner("retrieval")]
    write: Annotated[WriteLeader, Inner("write")]


@wire.record(tag=0x02C5)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsAdded:
    """The sum is opened, and its means are `result`; the helper may ask for it once more."""

    over: RoundRows
    handshake: Annotated[LeaderHandshake, Inner("handshake")]
    retrieval: Annotated[RetrievalLeader, Inner("retrieval")]
    write: Annotated[WriteLeader, Inner("write")]


class LeaderRound(Coordinator):
    """The leader: [union ->] handshake -> query -> answer -> collect -> check -> exclude -> open.

    `dense` and `tables` are the model as it stands; they are read, and `result` is for the caller
    to merge. A leader that is woken is given the same model.
    """

    ROLE = "leader of a round"
    STATES = (
        NotBegun,
        UnitingRows,
        Agreeing,
        ServingRows,
        AddingReports,
        ReportsAdded,
        Aborted,
    )
    PHASES: ClassVar = {NotBegun: HANDSHAKE, ReportsAdded: "done", Aborted: "aborted"}
    FROM_CLIENT = (*secagg.FROM_CLIENT, Query, WriteReport)
    FROM_HELPER = (
        HandshakeNonce,
        HandshakeConsent,
        HelperAnswer,
        CheckCoin,
        Exclusions,
        SumShare,
    )

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
        key_store: KeyStore | None = None,
    ) -> None:
        """`identity` has the directory for a union's signatures; `row_tags` and `key_store` have
        this server's from earlier rounds."""
        self._workers, self._row_tags, self._key_store = workers, row_tags, key_store
        owner = self._hold(plan, round_id, cohort, dense, tables, derived, servers, key)
        root = draw_root(entropy, plan, round_id, SERVER)
        begun: NotBegun | UnitingRows = NotBegun(root=root)
        if plan.narrows:
            params = plan.union_sum(round_id)
            total = Server(params, self.invited, entropy=root, identity=identity)
            begun = UnitingRows(root=root, sum=total)
        self._begin(owner, begun)

    @classmethod
    def wake(
        cls,
        snapshot: bytes,
        messages: Mapping[bytes, bytes],
        plan: Plan,
        round_id: RoundId,
        cohort: Iterable[ClientId],
        *,
        dense: npt.NDArray[np.float32],
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap] | None = None,
        servers: Servers,
        key: SigningKey,
        identity: Identity | None = None,
        workers: Workers | None = None,
        row_tags: RowTagCache | None = None,
        key_store: KeyStore | None = None,
    ) -> Self:
        leader = cls.__new__(cls)
        leader._workers, leader._row_tags, leader._key_store = workers, row_tags, key_store
        owner = leader._hold(plan, round_id, cohort, dense, tables, derived, servers, key)
        inside = _LeaderRoles(leader, round_id, identity)
        leader._resume(snapshot, messages, owner, inside.given)
        return leader

    def _hold(
        self,
        plan: Plan,
        round_id: RoundId,
        cohort: Iterable[ClientId],
        dense: npt.NDArray[np.float32],
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap] | None,
        servers: Servers,
        key: SigningKey,
    ) -> Owner:
        schemes.check(type(self).__name__, plan, schemes.TWO_SERVERS)
        if dense.shape != (plan.model.dense,) or tables.keys() != {t.name for t in plan.tables}:
            raise MisuseError("the model is not the plan's")
        self.plan, self.invited = plan, frozenset(cohort)
        self._dense, self._tables, self.derived = dense, tables, derived or {}
        self._servers, self._key = servers, key
        # What follows from the state, worked out once.
        self._served: tuple[RoundDomain, ServedModel] | None = None
        self._result: tuple[ReportsAdded, RoundResult] | None = None
        return self._owned(SERVER, round_id, plan.digest)

    def _domain(self, round_id: RoundId, union: Kept[UnionOpened] | None) -> RoundDomain:
        return RoundDomain.of(self.plan, round_id, self._servers, union, self.derived)

    def _model(self, domain: RoundDomain) -> ServedModel:
        if self._served is None or self._served[0] is not domain:
            model = served(self.plan, domain.params, self._dense, self._tables)
            self._served = (domain, model)
        return self._served[1]

    def _clients(self, total: Server | None) -> frozenset[ClientId]:
        """Those who go on: whose rows are in the union, where there is one."""
        if total is None:
            return self.invited
        return client_set(total.sums[UNION].survivors)

    def _members(self, over: RoundRows, header: Header) -> frozenset[ClientId]:
        """Those of them who have keys, where the round is written with earlier ones."""
        keys = keys_of(over.domain.params, header, self._key_store)
        clients = self._clients(over.sum)
        return clients if keys is None else clients & keys.clients.keys()

    # --- where the round stands -----------------------------------------------------------------

    @property
    def _role(self) -> Server | LeaderHandshake | RetrievalLeader | WriteLeader | None:
        """The role that is at work."""
        match self.state:
            case UnitingRows(sum=total):
                return total
            case Agreeing(handshake=handshake):
                return handshake
            case ServingRows(retrieval=retrieval):
                return retrieval
            case AddingReports(write=write):
                return write
        return None

    @property
    def phase(self) -> str:
        return super().phase if self._role is None else self._role.phase

    @property
    def expected(self) -> frozenset[Party]:
        return frozenset() if self._role is None else self._role.expected

    @property
    def sums(self) -> tuple[StageSum, ...]:
        """The union's, where there is one, and the update's, as soon as each is opened."""
        state = self.state
        if isinstance(state, UnitingRows):
            return state.sum.sums
        over: RoundRows | None = getattr(state, "over", None)
        if over is None:
            return ()
        union = () if over.sum is None else over.sum.sums
        if not isinstance(state, ReportsAdded):
            return union
        assert state.write.total is not None
        stage = StageId(len(union))
        return (*union, opened_sum(self.plan, stage, state.write.total, over.domain.rows))

    @property
    def union(self) -> Mapping[str, Ids]:
        """The opened union by table, derived tables included; empty before, and without one."""
        over: RoundRows | None = getattr(self.state, "over", None)
        return {} if over is None else over.domain.rows

    @property
    def result(self) -> RoundResult:
        """Per-row averages by counts (FedSubAvg)."""
        state = self.state
        if not isinstance(state, ReportsAdded):
            raise MisuseError(f"a round in phase {self.phase} has no result")
        if self._result is None or self._result[0] is not state:
            rows, residual = state.over.domain.rows, state.over.residual
            means = encode.means(self.plan, self.sums[-1], union=rows, residual=residual)
            self._result = (state, means)
        return self._result[1]

    @property
    def excluded(self) -> Mapping[ClientId, str]:
        """Clients that the helper refused, and why, as far as the helper says."""
        state = self.state
        if not isinstance(state, AddingReports | ReportsAdded):
            return {}
        return {**dict.fromkeys(state.retrieval.refused, REFUSED_QUERY), **state.write.excluded}

    @property
    def absent(self) -> frozenset[ClientId]:
        """Clients whose keys last and that are not in the sum."""
        state = self.state
        if not isinstance(state, ReportsAdded):
            return frozenset()
        keys = keys_of(state.over.domain.params, state.retrieval.header, self._key_store)
        members = frozenset() if keys is None else frozenset(keys.clients)
        return members - set(self.result.survivors)

    @property
    def writing(self) -> list[WriteCost]:
        """How each table is written in this round, and what the other way would cost."""
        over: RoundRows | None = getattr(self.state, "over", None)
        if over is None:
            raise MisuseError(f"a round in phase {self.phase} does not know its rows")
        return costs(self.plan, over.domain.params)

    # --- messages and the clock -----------------------------------------------------------------

    def resend(self) -> list[Outbound]:
        """Its last message to the helper again, byte for byte."""
        if isinstance(self.state, ReportsAdded):
            return self.state.write.resend()
        return [] if self._role is None else self._role.resend()

    def start(self) -> list[Outbound]:
        """Messages before any client has sent one: the helper's first, if there is no union."""
        if not isinstance(self.state, NotBegun):
            return []
        following, out = self._agree(self.state.root, None, 0, None)
        self._move(following, b"")
        return out

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """One message, for one of the roles; one of the helper's may have an answer at once."""
        self._kinds_from(sender)  # a stranger's message is not read
        self._check_open()
        if isinstance(self.state, NotBegun):
            raise MisuseError("a round is started before it receives")
        kind = wire.kind_of(data)
        step = self.STEPS.get((type(self.state), kind)) if kind else None
        if step is None:
            what = kind.__name__ if kind else "an invalid message"
            raise self._refuse(sender, f"sent {what}, which is not due")
        try:
            following, out = step(self, self.state, sender, data)
        except RoundAborted as error:
            self._end(self._aborted(error))
            raise
        self._move(following, b"")
        return list(out)

    def _at_sum(self, state: Any, sender: Party, data: bytes) -> Moved:
        total = state.sum if isinstance(state, UnitingRows) else state.over.sum
        if total is None:
            raise self._refuse(sender, "sent a message of a union, and there is none")
        return state, total.receive(sender, data)

    def _at_handshake(self, state: Any, sender: Party, data: bytes) -> Moved:
        out = state.handshake.receive(sender, data)
        return self._after_handshake(state), out

    def _at_retrieval(self, state: Any, sender: Party, data: bytes) -> Moved:
        out = state.retrieval.receive(sender, data)
        return self._after_retrieval(state), out

    def _at_write(self, state: Any, sender: Party, data: bytes) -> Moved:
        out = state.write.receive(sender, data)
        return self._after_write(state), out

    def _close_union(self, state: UnitingRows) -> Moved:
        """The union to everybody, the helper too; then both servers begin the round over it."""
        plan, total = self.plan, state.sum
        out = total.close_phase()
        if total.phase != "done":
            return state, out
        opened = total.sums[UNION]
        decoded = plan.union_encoding(self.round_id).decode(opened.dense)
        union = Kept.of(select.opened_union(plan, self.round_id, decoded.ids))
        following, offer = self._agree(state.root, total, decoded.residual, union)
        to_helper = Outbound.again(HELPER, union.data)
        return following, [*out, *to_all(self._clients(total), union), to_helper, *offer]

    def _close_handshake(self, state: Agreeing) -> Moved:
        return state, state.handshake.close_phase()

    def _close_retrieval(self, state: ServingRows) -> Moved:
        out = state.retrieval.close_phase()
        return self._after_retrieval(state), out

    def _close_write(self, state: AddingReports) -> Moved:
        out = state.write.close_phase()
        return self._after_write(state), out

    def farewell(self) -> list[Outbound]:
        """To everybody, when the round has ended and its outcome is stored: secrets may go."""
        state = self.state
        if isinstance(state, ReportsAdded):
            to_helper = Kept.of(RoundOver.of(self.round_id, RoundOutcome.DONE))
            to_clients = farewells(self.round_id, self.invited, self.result)
        elif isinstance(state, Aborted):
            to_helper = Kept.of(RoundOver.of(self.round_id, RoundOutcome.ABORTED, state.reason))
            to_clients = to_all(self.invited, to_helper)
        else:
            raise MisuseError(f"a round in phase {self.phase} has not ended")
        return [*to_clients, Outbound.again(HELPER, to_helper.data)]

    def fetch(self, requested: Mapping[str, Ids]) -> tuple[Floats, dict[str, TablePart]]:
        """The dense part and these rows as a client would get them, in an ideal round."""
        dtype = self.plan.model.precision.dtype
        dense = self._dense.astype(dtype).astype(np.float32)
        return dense, {
            name: TablePart(ids, self._tables[name].values(ids).astype(dtype).astype(np.float32))
            for name, ids in requested.items()
        }

    # --- from one role to the next ----------------------------------------------------------------

    def _agree(
        self,
        root: RootedEntropy,
        total: Server | None,
        residual: int,
        union: Kept[UnionOpened] | None,
    ) -> Moved:
        domain = self._domain(self.round_id, union)
        handshake = LeaderHandshake(
            domain.params,
            self._model(domain),
            self._clients(total),
            key=self._key,
            entropy=root,
            key_store=self._key_store,
        )
        over = RoundRows(sum=total, residual=residual, domain=domain)
        return Agreeing(over=over, handshake=handshake), handshake.begin()

    def _after_handshake(self, state: Any) -> Any:
        signed = state.handshake.signed_header
        if not isinstance(state, Agreeing) or signed is None:
            return state
        retrieval = RetrievalLeader(
            state.over.domain.params,
            signed.message.header,
            self._model(state.over.domain),
            self._members(state.over, signed.message.header),
            row_tags=self._row_tags,
            workers=self._workers,
        )
        return ServingRows(over=state.over, handshake=state.handshake, retrieval=retrieval)

    def _after_retrieval(self, state: Any) -> Any:
        if not isinstance(state, ServingRows) or state.retrieval.phase != "done":
            return state
        write = WriteLeader(
            state.over.domain.params,
            state.retrieval.header,
            self._members(state.over, state.retrieval.header),
            key=self._key,
            workers=self._workers,
            key_store=self._key_store,
        )
        return AddingReports(
            over=state.over, handshake=state.handshake, retrieval=state.retrieval, write=write
        )

    def _after_write(self, state: Any) -> Any:
        if not isinstance(state, AddingReports) or state.write.total is None:
            return state
        return ReportsAdded(
            over=state.over,
            handshake=state.handshake,
            retrieval=state.retrieval,
            write=state.write,
        )


class _LeaderRoles:
    """Wakes the roles inside a state in the order in which they are read: later ones are given what
    earlier ones have."""

    def __init__(self, leader: LeaderRound, round_id: RoundId, identity: Identity | None) -> None:
        self._leader, self._round_id, self._identity = leader, round_id, identity
        self._total: Server | None = None
        self._found: RoundDomain | None = None
        self._agreed: LeaderHandshake | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {
            "sum": self._sum,
            DOMAIN: self._domain,
            "handshake": self._handshake,
            "retrieval": self._retrieval,
            "write": self._write,
        }

    def _sum(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> Server:
        params = self._leader.plan.union_sum(self._round_id)
        self._total = Server.wake(
            snapshot, messages, params, self._leader.invited, identity=self._identity
        )
        return self._total

    def _domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        check_stored(self._leader.plan, union)
        self._found = self._leader._domain(self._round_id, union)
        return self._found

    def _handshake(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> LeaderHandshake:
        self._agreed = LeaderHandshake.wake(
            snapshot,
            messages,
            self._params,
            self._clients,
            key=self._leader._key,
            key_store=self._leader._key_store,
        )
        return self._agreed

    def _retrieval(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> RetrievalLeader:
        return RetrievalLeader.wake(
            snapshot,
            messages,
            self._params,
            self._header,
            self._model,
            self._members,
            row_tags=self._leader._row_tags,
            workers=self._leader._workers,
        )

    def _write(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> WriteLeader:
        return WriteLeader.wake(
            snapshot,
            messages,
            self._params,
            self._header,
            self._members,
            key=self._leader._key,
            workers=self._leader._workers,
            key_store=self._leader._key_store,
        )

    @property
    def _params(self) -> TwoServerParams:
        assert self._found is not None
        return self._found.params

    @property
    def _model(self) -> ServedModel:
        assert self._found is not None
        return self._leader._model(self._found)

    @property
    def _clients(self) -> frozenset[ClientId]:
        return self._leader._clients(self._total)

    @property
    def _members(self) -> frozenset[ClientId]:
        assert self._found is not None
        over = RoundRows(sum=self._total, residual=0, domain=self._found)
        return self._leader._members(over, self._header)

    @property
    def _header(self) -> Header:
        if self._agreed is None or self._agreed.signed_header is None:
            raise Malformed("a stored state is past its handshake, and has no header")
        return self._agreed.signed_header.message.header


AFTER_UNION: Final = (Agreeing, ServingRows, AddingReports, ReportsAdded)
STEPS: Final[Steps] = {
    **{
        (state, kind): LeaderRound._at_sum
        for state in (UnitingRows, *AFTER_UNION)
        for kind in secagg.FROM_CLIENT
    },
    **{
        (state, kind): LeaderRound._at_handshake
        for state in AFTER_UNION
        for kind in (HandshakeNonce, HandshakeConsent)
    },
    **{
        (state, kind): LeaderRound._at_retrieval
        for state in AFTER_UNION[1:]
        for kind in (Query, HelperAnswer)
    },
    **{
        (state, kind): LeaderRound._at_write
        for state in AFTER_UNION[2:]
        for kind in (WriteReport, CheckCoin, Exclusions, SumShare)
    },
}
"""Which role takes which message; a role that is done takes those it has handled, once more."""

CLOSES: Final[Closes] = {
    UnitingRows: LeaderRound._close_union,
    Agreeing: LeaderRound._close_handshake,
    ServingRows: LeaderRound._close_retrieval,
    AddingReports: LeaderRound._close_write,
}
LeaderRound.STEPS, LeaderRound.CLOSES = STEPS, CLOSES
