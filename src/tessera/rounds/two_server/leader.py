"""LeaderRound: the server that clients talk to, in one round between two servers.

It goes through the roles of the protocols one after the other: the union's sum where there is one,
the handshake, the retrieval, the write. Each judges itself which messages are due.
`leader_states.py` has what the round has come to, and what its roles are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.keys import Identity, SigningKey
from tessera.crypto.prg import Label
from tessera.errors import MisuseError, RoundAborted
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId, StageId
from tessera.learning.tables.arrays import Ids
from tessera.learning.tables.spec import DerivedMap
from tessera.learning.tables.table import StoredTable
from tessera.plan import Plan
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
from tessera.protocols.secagg import messages as secagg
from tessera.protocols.secagg.phases import StageSum
from tessera.protocols.secagg.server import Server
from tessera.protocols.two_server.handshake import PHASE as HANDSHAKE
from tessera.protocols.two_server.key_period import KeyStore
from tessera.protocols.two_server.messages import (
    CheckCoin,
    Exclusions,
    HandshakeConsent,
    HandshakeNonce,
    HelperAnswer,
    Query,
    SumShare,
    WriteReport,
)
from tessera.protocols.two_server.params import Servers
from tessera.protocols.two_server.read.row_tags import RowTagCache
from tessera.protocols.two_server.reports import SingleWorker, Workers
from tessera.rounds import encode, schemes, select
from tessera.rounds.ideal import IdealServer
from tessera.rounds.messages import UnionOpened, farewells
from tessera.rounds.root import draw_root
from tessera.rounds.two_server.domain import WriteCost, costs, opened_sum
from tessera.rounds.two_server.ideal import TrustedServers
from tessera.rounds.two_server.leader_states import (
    AddingReports,
    Agreeing,
    LeaderRoles,
    NotBegun,
    ReportsAdded,
    RoundRows,
    ServingRows,
    UnitingRows,
    WokenLeaderRoles,
)
from tessera.rounds.words import RoundResult
from tessera.wire.stored import Kept, Owner

REFUSED_QUERY: Final = "the helper refused its query"


class LeaderRound(Coordinator[Any]):
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
        given = (dense, tables, derived, servers, key, identity, workers, row_tags, key_store)
        owner = self._hold(plan, round_id, cohort, *given)
        self._begin(owner, self._first(draw_root(entropy, plan, round_id, SERVER)))

    def _first(self, root: RootedEntropy) -> NotBegun | UnitingRows:
        if not self.plan.narrows:
            return NotBegun(root=root)
        return UnitingRows(root=root, sum=self._roles.sum(root))

    def trusted(self) -> TrustedServers:
        """What an ideal round has in memory, over the model as it stands."""
        roles = self._roles
        return TrustedServers(self.plan, self.round_id, self.invited, roles.dense, roles.tables)

    def in_memory(self, party: TrustedServers) -> None:
        """Carry ideal roles instead of the real ones; before the start."""
        if not isinstance(self.state, NotBegun | UnitingRows):
            raise MisuseError("a round is ideal from its beginning, or not at all")
        self._roles.party = party
        self.state = self._first(self.state.root)

    @classmethod
    def wake(  # type: ignore[override]
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
        given = (dense, tables, derived, servers, key, identity, workers, row_tags, key_store)
        owner = leader._hold(plan, round_id, cohort, *given)
        leader._resume(snapshot, messages, owner, WokenLeaderRoles(leader._roles).given)
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
        identity: Identity | None,
        workers: Workers | None,
        row_tags: RowTagCache | None,
        key_store: KeyStore | None,
    ) -> Owner:
        schemes.check(type(self).__name__, plan, two_servers=True)
        if dense.shape != (plan.model.dense,) or tables.keys() != {t.name for t in plan.tables}:
            raise MisuseError("the model is not the plan's")
        self.plan, self.invited = plan, frozenset(cohort)
        self._roles = LeaderRoles(
            plan=plan,
            round_id=round_id,
            invited=self.invited,
            dense=dense,
            tables=tables,
            derived=derived or {},
            servers=servers,
            key=key,
            identity=identity,
            workers=workers or SingleWorker(),
            row_tags=row_tags,
            key_store=key_store,
        )
        # What follows from the state, worked out once.
        self._result: tuple[ReportsAdded, RoundResult] | None = None
        return self._owned(SERVER, round_id, plan.digest)

    # --- where the round stands -----------------------------------------------------------------

    @property
    def _role(self) -> Any:
        """The role that is at work, if one is."""
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
        phase: str = super().phase if self._role is None else self._role.phase
        return phase

    @property
    def expected(self) -> frozenset[Party]:
        due: frozenset[Party] = frozenset() if self._role is None else self._role.expected
        return due

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
        keys = self._roles.keys(state.over.domain, state.retrieval.header)
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
            again: list[Outbound] = self.state.write.resend()
        else:
            again = [] if self._role is None else self._role.resend()
        return again

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
        ids, residual = self._roles.union.opened_ids(plan, self.round_id, total)
        union = Kept.of(select.opened_union(plan, self.round_id, ids))
        following, offer = self._agree(state.root, total, residual, union)
        to_clients = self._roles.union.post(self._roles.clients(total), union)
        return following, [*out, *to_clients, Outbound.again(HELPER, union.data), *offer]

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

    # --- from one role to the next ----------------------------------------------------------------

    def _agree(
        self,
        root: RootedEntropy,
        total: Server | IdealServer | None,
        residual: int,
        union: Kept[UnionOpened] | None,
    ) -> Moved:
        domain = self._roles.domain(union)
        handshake = self._roles.handshake(domain, self._roles.clients(total), root)
        noise = root.secret(Label.SUM_NOISE) if domain.params.noise else None
        over = RoundRows(sum=total, residual=residual, domain=domain, noise=noise)
        return Agreeing(over=over, handshake=handshake), handshake.begin()

    def _after_handshake(self, state: Any) -> Any:
        signed = state.handshake.signed_header
        if not isinstance(state, Agreeing) or signed is None:
            return state
        over, clients = state.over, self._roles.clients(state.over.sum)
        retrieval = self._roles.retrieval(over.domain, signed.message.header, clients)
        return ServingRows(over=over, handshake=state.handshake, retrieval=retrieval)

    def _after_retrieval(self, state: Any) -> Any:
        if not isinstance(state, ServingRows) or state.retrieval.phase != "done":
            return state
        over, clients = state.over, self._roles.clients(state.over.sum)
        return AddingReports(
            over=over,
            handshake=state.handshake,
            retrieval=state.retrieval,
            write=self._roles.write(over.domain, state.retrieval.header, clients, over.noise),
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
