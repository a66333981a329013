"""LeaderRound: the server that clients talk to, in one round between two servers.

It goes through the roles of the protocols one after the other: the union's sum where there is one,
the handshake, the retrieval, the write. Each judges itself which messages are due. A role that is
done stays inside the state until the round is over: it recognises what is sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Final

from tessera import wire
from tessera.crypto.entropy import RootedEntropy
from tessera.errors import MisuseError, RoundAborted
from tessera.ids import HELPER, SERVER, ClientId, Party, StageId
from tessera.learning.tables.submodel import Ids
from tessera.plan import UNION
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
from tessera.protocols.two_server.handshake import PHASE as HANDSHAKE
from tessera.protocols.two_server.handshake import LeaderHandshake, LeaderHandshakeSetup
from tessera.protocols.two_server.key_period import keys_of, with_keys
from tessera.protocols.two_server.messages import (
    CheckCoin,
    Exclusions,
    HandshakeConsent,
    HandshakeNonce,
    Header,
    HelperAnswer,
    Query,
    SumShare,
    WriteReport,
)
from tessera.protocols.two_server.read.server import RetrievalLeader, RetrievalLeaderSetup
from tessera.protocols.two_server.write.leader import WriteLeader, WriteLeaderSetup
from tessera.protocols.two_server.write.sums import NoiseSecrets
from tessera.rounds import encode, schemes, select
from tessera.rounds.messages import RoundResult, UnionOpened, farewells
from tessera.rounds.party import ServerRoundSetup
from tessera.rounds.resolve import resolve
from tessera.rounds.root import StoredRoot, draw_root
from tessera.rounds.sums import ServerSetup, SumServer
from tessera.rounds.two_server import shared_sum
from tessera.rounds.two_server.domain import NAME as DOMAIN
from tessera.rounds.two_server.domain import (
    ModelToServe,
    RoundDomain,
    StoredDomain,
    WokenParts,
    WriteCost,
    check_stored,
    costs,
    opened_sum,
)
from tessera.rounds.two_server.shared_sum import shared
from tessera.wire.index_set import client_set
from tessera.wire.stored import Inner, Kept

UnionSum = Annotated[SumServer, Inner("sum")]
Handshake = Annotated[shared_sum.LeaderAgreement, Inner("handshake")]
Retrieval = Annotated[shared_sum.LeaderRetrieval, Inner("retrieval")]
Writing = Annotated[shared_sum.LeaderWrite, Inner("write")]


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
    sum: UnionSum


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRows:
    """Over which rows the round goes. `sum` is the union's, if there is one; `residual` counts the
    ids that its encoding could not give back."""

    sum: Annotated[SumServer | None, wire.Maybe(Inner("sum"))]
    residual: Annotated[int, wire.VARINT]
    domain: StoredDomain
    noise: NoiseSecrets = field(default=(), repr=False)


@wire.record(tag=0x02C2)
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreeing:
    """Agrees with the helper on a header."""

    over: RoundRows
    handshake: Handshake


@wire.record(tag=0x02C3)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRows:
    """Queries come in and are answered with the helper."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval


@wire.record(tag=0x02C4)
@dataclass(frozen=True, slots=True, kw_only=True)
class AddingReports:
    """Reports come in and are added up with the helper."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval
    write: Writing


@wire.record(tag=0x02C5)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsAdded:
    """The sum is opened, and its means are `result`; the helper may ask for it once more."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval
    write: Writing


REFUSED_QUERY: Final = "the helper refused its query"


class LeaderRound(Coordinator[ServerRoundSetup]):
    """The leader: [union ->] handshake -> query -> answer -> collect -> check -> exclude -> open.

    `result` is for the caller to merge.
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

    def __init__(self, setup: ServerRoundSetup) -> None:
        self._set_up(setup)
        self._begin(self._first(draw_root(setup.own.entropy, self.plan, self.round_id, SERVER)))

    def _set_up(self, setup: ServerRoundSetup) -> None:
        super()._set_up(setup)
        plan, own = setup.plan, setup.own
        schemes.check(type(self).__name__, plan, two_servers=True)
        if own.servers is None or own.key is None:
            raise MisuseError("the leader of two servers has a key, and the helper's")
        self.plan, self.invited = plan, frozenset(setup.invited)
        self._rows = resolve(plan).rows
        self._servers, self._key = own.servers, own.key
        self._sum, self._model = shared(setup.sum), ModelToServe(setup)
        self._union = ServerSetup(
            plan=plan, round_id=setup.round_id, invited=self.invited, identity=setup.identity
        )
        # What follows from the state, worked out once.
        self._result: tuple[ReportsAdded, RoundResult] | None = None

    def _first(self, root: RootedEntropy) -> NotBegun | UnitingRows:
        if not self._rows.union:
            return NotBegun(root=root)
        return UnitingRows(root=root, sum=self._sum.union.serve(self._union, root))

    # --- what its roles are given, made or woken ------------------------------------------------

    def _domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        def made() -> RoundDomain:
            servers, maps = self._servers, self.setup.derived
            return RoundDomain.of(self.plan, self.round_id, servers, union, maps)

        return self._sum.once(union, made)

    def _clients(self, total: SumServer | None) -> frozenset[ClientId]:
        """Those who go on: whose rows are in the union, where there is one."""
        return self.invited if total is None else client_set(total.sums[UNION].survivors)

    def _handshake_setup(
        self, domain: RoundDomain, total: SumServer | None
    ) -> LeaderHandshakeSetup:
        return LeaderHandshakeSetup(
            params=domain.params,
            invited=self._clients(total),
            key=self._key,
            key_store=self.setup.own.key_store,
        )

    def _leading(
        self, domain: RoundDomain, total: SumServer | None, header: Header
    ) -> dict[str, Any]:
        """What the leader is given for reading and for writing."""
        store, ideal = self.setup.own.key_store, self._sum.in_memory
        return {
            "params": domain.params,
            "header": header,
            "invited": with_keys(domain.params, header, store, self._clients(total), ideal=ideal),
            "workers": self.setup.own.workers,
        }

    def _retrieval_setup(
        self, domain: RoundDomain, total: SumServer | None, header: Header
    ) -> RetrievalLeaderSetup:
        return RetrievalLeaderSetup(
            model=self._model.over(domain),
            row_tags=self.setup.own.row_tags,
            **self._leading(domain, total, header),
        )

    def _write_setup(
        self, domain: RoundDomain, total: SumServer | None, header: Header
    ) -> WriteLeaderSetup:
        return WriteLeaderSetup(
            key=self._key,
            key_store=self.setup.own.key_store,
            **self._leading(domain, total, header),
        )

    def _supplied(self) -> Mapping[str, Any]:
        """Roles are woken in the order in which they are read: the handshake has the header."""
        found = WokenParts(sum=None)

        def domain(union: Kept[UnionOpened] | None) -> RoundDomain:
            check_stored(self._rows, union)
            return self._domain(union)

        def handshake(snapshot: bytes, messages: Mapping[bytes, bytes]) -> LeaderHandshake:
            setup = self._handshake_setup(found[DOMAIN], found["sum"])
            return LeaderHandshake.wake(snapshot, messages, setup)

        def agreed() -> tuple[RoundDomain, SumServer | None, Header]:
            return found[DOMAIN], found["sum"], found.header(_header_of)

        return {
            "sum": found.keeping("sum", partial(self._sum.union.wake_server, self._union)),
            DOMAIN: found.keeping(DOMAIN, domain),
            "handshake": found.keeping("handshake", handshake),
            "retrieval": lambda snapshot, messages: RetrievalLeader.wake(
                snapshot, messages, self._retrieval_setup(*agreed())
            ),
            "write": lambda snapshot, messages: WriteLeader.wake(
                snapshot, messages, self._write_setup(*agreed())
            ),
        }

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
        params, store = state.over.domain.params, self.setup.own.key_store
        keys = keys_of(params, state.retrieval.header, store, ideal=self._sum.in_memory)
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
        ids, residual = self._sum.union.opened_ids(plan, self.round_id, total)
        union = Kept.of(select.opened_union(plan, self.round_id, ids))
        following, offer = self._agree(state.root, total, residual, union)
        to_clients = self._sum.union.post(self._clients(total), union)
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
        total: SumServer | None,
        residual: int,
        union: Kept[UnionOpened] | None,
    ) -> Moved:
        domain = self._domain(union)
        setup = self._handshake_setup(domain, total)
        handshake = self._sum.handshake(setup, self._model.over(domain), root)
        noise = self.setup.noise_secrets(root) if domain.params.noise else ()
        over = RoundRows(sum=total, residual=residual, domain=domain, noise=noise)
        return Agreeing(over=over, handshake=handshake), handshake.begin()

    def _after_handshake(self, state: Any) -> Any:
        signed = state.handshake.signed_header
        if not isinstance(state, Agreeing) or signed is None:
            return state
        over = state.over
        setup = self._retrieval_setup(over.domain, over.sum, signed.message.header)
        retrieval = self._sum.retrieve(setup)
        return ServingRows(over=over, handshake=state.handshake, retrieval=retrieval)

    def _after_retrieval(self, state: Any) -> Any:
        if not isinstance(state, ServingRows) or state.retrieval.phase != "done":
            return state
        over = state.over
        setup = self._write_setup(over.domain, over.sum, state.retrieval.header)
        return AddingReports(
            over=over,
            handshake=state.handshake,
            retrieval=state.retrieval,
            write=self._sum.add_up(setup, over.noise),
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


def _header_of(handshake: LeaderHandshake) -> Header | None:
    signed = handshake.signed_header
    return None if signed is None else signed.message.header


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
