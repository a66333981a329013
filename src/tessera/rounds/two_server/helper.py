"""HelperRound: the second server in one round, which exchanges messages with the leader only.

It holds its roles in the protocols: the handshake, the retrieval, the write. Each judges itself
which messages are due, and answers one that is repeated with the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Self

from tessera import wire
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.keys import SealingKey, SigningKey
from tessera.crypto.prg import Label
from tessera.errors import ConfigError, Malformed, MisuseError, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.learning.tables.arrays import Floats
from tessera.learning.tables.spec import DerivedMap
from tessera.learning.tables.table import StoredTable
from tessera.plan import Plan
from tessera.protocols.machine import (
    Follower,
    Left,
    Moved,
    Outbound,
    RoundOutcome,
    RoundOver,
    Steps,
    shortened,
)
from tessera.protocols.two_server.collector import ReplayGuard
from tessera.protocols.two_server.handshake import (
    HelperHandshake,
    HelperHandshakeSetup,
    ServedModel,
)
from tessera.protocols.two_server.key_period import KeyStore
from tessera.protocols.two_server.messages import (
    AnswersDue,
    CheckSums,
    Closing,
    Forwarded,
    HandshakeOffer,
    HandshakeReveal,
    Header,
    IncludedList,
    OpenedSum,
    Purpose,
)
from tessera.protocols.two_server.params import Servers
from tessera.protocols.two_server.read.row_tags import RowTagCache
from tessera.protocols.two_server.read.server import RetrievalHelper, RetrievalHelperSetup
from tessera.protocols.two_server.reports import SingleWorker, Workers
from tessera.protocols.two_server.write.helper import WriteHelper, WriteHelperSetup
from tessera.protocols.two_server.write.sums import TwoServerSum
from tessera.rounds import schemes, select
from tessera.rounds.messages import UnionOpened
from tessera.rounds.root import StoredRoot, draw_root
from tessera.rounds.two_server.domain import NAME as DOMAIN
from tessera.rounds.two_server.domain import (
    RoundDomain,
    StoredDomain,
    check_stored,
    opened_means,
    served,
)
from tessera.rounds.two_server.ideal import (
    IdealHelperHandshake,
    IdealHelperRetrieval,
    IdealHelperWrite,
    TrustedServers,
)
from tessera.rounds.words import RoundResult
from tessera.wire.stored import Inner, Kept, Owner


@dataclass(frozen=True, slots=True)
class HelperKeys:
    """What the helper has of its own: it signs, and it unseals what clients seal to it."""

    signing: SigningKey = field(repr=False)
    box: SealingKey = field(repr=False)


Handshake = Annotated[HelperHandshake | IdealHelperHandshake, Inner("handshake")]
Retrieval = Annotated[RetrievalHelper | IdealHelperRetrieval, Inner("retrieval")]
Writing = Annotated[WriteHelper | IdealHelperWrite, Inner("write")]


# --- the states, as a round happens ---------------------------------------------------------------


@wire.record(tag=0x02D0)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingUnion:
    """Waits for the union that the round goes over."""

    root: StoredRoot


@wire.record(tag=0x02D1)
@dataclass(frozen=True, slots=True, kw_only=True)
class Consenting:
    """Knows the rows; agrees with the leader on a header."""

    root: StoredRoot
    domain: StoredDomain
    handshake: Handshake


@wire.record(tag=0x02D2)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReports:
    """Takes what clients have sealed to it: queries to answer, reports to add up."""

    domain: StoredDomain
    handshake: Handshake
    retrieval: Retrieval
    write: Writing


@wire.record(tag=0x02D3)
@dataclass(frozen=True, slots=True, kw_only=True)
class SumShown:
    """The leader has shown it the sum; what comes afterwards takes nothing back."""

    domain: StoredDomain
    handshake: Handshake
    retrieval: Retrieval
    write: Writing


class HelperRound(Follower[Any]):
    """Handshake with the leader, answers to queries, the sum of reports, one share released.

    `dense` and `tables` are its own copy of the model. A helper that is woken is given the same.
    """

    _ideal: TrustedServers | None
    ROLE = "helper of a round"
    STATES = (AwaitingUnion, Consenting, ServingReports, SumShown, Left)
    PHASES: ClassVar = {SumShown: "done"}
    SETTLED = (SumShown,)
    FROM_SERVER = (
        UnionOpened,
        HandshakeOffer,
        HandshakeReveal,
        Forwarded,
        AnswersDue,
        Closing,
        CheckSums,
        IncludedList,
        OpenedSum,
    )

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        *,
        dense: Floats,
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap],
        servers: Servers,
        keys: HelperKeys,
        directory: Mapping[ClientId, bytes],
        replay_guard: ReplayGuard,
        entropy: Entropy,
        workers: Workers | None = None,
        row_tags: RowTagCache | None = None,
        key_store: KeyStore | None = None,
    ) -> None:
        """`row_tags` are this server's from earlier rounds."""
        self._model_given(plan, dense, tables, derived, servers)
        owner = self._hold(round_id, keys, directory, replay_guard, workers, row_tags, key_store)
        self._begin(owner, self._first(round_id, draw_root(entropy, plan, round_id, HELPER)))

    def _first(self, round_id: RoundId, root: RootedEntropy) -> AwaitingUnion | Consenting:
        if self.plan.narrows:
            return AwaitingUnion(root=root)
        return self._consenting(root, self._domain(round_id, None))

    def in_memory(self, party: TrustedServers) -> None:
        """Carry ideal roles instead of the real ones; before the first message."""
        if not isinstance(self.state, AwaitingUnion | Consenting):
            raise MisuseError("a round is ideal from its beginning, or not at all")
        self._ideal = party
        self.state = self._first(self.round_id, self.state.root)

    @classmethod
    def wake(  # type: ignore[override]
        cls,
        snapshot: bytes,
        messages: Mapping[bytes, bytes],
        plan: Plan,
        round_id: RoundId,
        *,
        dense: Floats,
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap],
        servers: Servers,
        keys: HelperKeys,
        directory: Mapping[ClientId, bytes],
        replay_guard: ReplayGuard,
        workers: Workers | None = None,
        row_tags: RowTagCache | None = None,
        key_store: KeyStore | None = None,
    ) -> Self:
        helper = cls.__new__(cls)
        helper._model_given(plan, dense, tables, derived, servers)
        owner = helper._hold(round_id, keys, directory, replay_guard, workers, row_tags, key_store)
        helper._resume(snapshot, messages, owner, _HelperRoles(helper, round_id).given)
        return helper

    def _model_given(
        self,
        plan: Plan,
        dense: Floats,
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap],
        servers: Servers,
    ) -> None:
        schemes.check(type(self).__name__, plan, two_servers=True)
        self.plan, self._servers = plan, servers
        self._dense, self._tables, self._derived = dense, tables, derived
        self._ideal = None
        # What follows from the state, worked out once.
        self._served: tuple[RoundDomain, ServedModel] | None = None
        self._result: RoundResult | None = None

    def _hold(
        self,
        round_id: RoundId,
        keys: HelperKeys,
        directory: Mapping[ClientId, bytes],
        replay_guard: ReplayGuard,
        workers: Workers | None,
        row_tags: RowTagCache | None,
        key_store: KeyStore | None,
    ) -> Owner:
        self._keys, self._directory, self._replay_guard = keys, directory, replay_guard
        self._workers: Workers = workers or SingleWorker()
        self._row_tags, self._key_store = row_tags, key_store
        return self._owned(HELPER, round_id, self.plan.digest)

    def _domain(self, round_id: RoundId, union: Kept[UnionOpened] | None) -> RoundDomain:
        def made() -> RoundDomain:
            return RoundDomain.of(self.plan, round_id, self._servers, union, self._derived)

        return made() if self._ideal is None else self._ideal.domain(union, made)

    def _model(self, domain: RoundDomain) -> ServedModel:
        if self._served is None or self._served[0] is not domain:
            model = served(self.plan, domain.params, self._dense, self._tables)
            self._served = (domain, model)
        return self._served[1]

    @property
    def _inbox(self) -> dict[str, Any]:
        """What it takes to unseal and check what clients send it."""
        return {
            "key": self._keys.signing,
            "box_key": self._keys.box,
            "directory": self._directory,
            "replay_guard": self._replay_guard,
            "workers": self._workers,
        }

    # --- what its roles are given, made or woken --------------------------------------------------

    def _handshake_setup(self, domain: RoundDomain) -> HelperHandshakeSetup:
        return HelperHandshakeSetup(
            params=domain.params,
            model=self._model(domain),
            key=self._keys.signing,
            replay_guard=self._replay_guard,
            key_store=self._key_store,
        )

    def _retrieval_setup(self, domain: RoundDomain, header: Header) -> RetrievalHelperSetup:
        return RetrievalHelperSetup(
            params=domain.params,
            header=header,
            model=self._model(domain),
            row_tags=self._row_tags,
            **self._inbox,
        )

    def _write_setup(self, domain: RoundDomain, header: Header) -> WriteHelperSetup:
        return WriteHelperSetup(
            params=domain.params, header=header, key_store=self._key_store, **self._inbox
        )

    # --- where the round stands -----------------------------------------------------------------

    @property
    def phase(self) -> str:
        match self.state:
            case Consenting(handshake=handshake):
                return handshake.phase
            case ServingReports(retrieval=retrieval, write=write):
                return write.phase if retrieval.phase == "done" else retrieval.phase
        return super().phase

    @property
    def expected(self) -> frozenset[Party]:
        waits = isinstance(self.state, AwaitingUnion | Consenting | ServingReports)
        return frozenset({SERVER}) if waits else frozenset()

    @property
    def total(self) -> TwoServerSum | None:
        """The sum, once the leader has sent it."""
        return self.state.write.total if isinstance(self.state, SumShown) else None

    @property
    def excluded(self) -> Mapping[ClientId, str]:
        """Clients that were left out after their list was closed, and why."""
        state = self.state
        return state.write.excluded if isinstance(state, ServingReports | SumShown) else {}

    @property
    def result(self) -> RoundResult | None:
        """The means that follow from the sum it was shown; None if it was shown none.

        In the process that was shown it they are known after the round is over, too.
        """
        if self._result is None and self.total is not None:
            self._result = opened_means(self.plan, self.total, self.state.domain.rows)
        return self._result

    def over(self, outcome: RoundOutcome, reason: str = "") -> None:
        self._result = self.result
        super().over(outcome, reason)

    def resend(self) -> list[Outbound]:
        """Its last answer again, byte for byte: the sealed boxes that are stored and no others."""
        match self.state:
            case Consenting(handshake=handshake):
                return handshake.resend()
            case ServingReports(handshake=handshake, retrieval=retrieval, write=write):
                return write.resend() or retrieval.resend() or handshake.resend()
        return []

    def _repeated(self, mark: bytes) -> list[Outbound]:
        return []  # a union has no answer; all else goes to a role, which knows what it has heard

    # --- messages -------------------------------------------------------------------------------

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """One message of the leader's, for one of the roles. `PeerError`: that client is left out.
        `ServerFault`: it has left the round, and releases nothing."""
        kind = wire.kind_of(data)
        if sender != SERVER or isinstance(self.state, Left) or kind in (UnionOpened, RoundOver):
            return super().receive(sender, data)
        self._check_open()
        step = self.STEPS.get((type(self.state), kind)) if kind else None
        try:
            if step is None:
                what = kind.__name__ if kind else "an invalid message"
                raise self._fault(f"sent {what}, which is not due")
            following, out = step(self, self.state, data)
        except ServerFault as fault:
            if not isinstance(self.state, self.SETTLED):
                self._end(Left(reason=shortened(fault.reason)))
            raise
        self._move(following, b"")
        return list(out)

    def _on_union(self, state: AwaitingUnion, union: Kept[UnionOpened]) -> Moved:
        message = union.message
        if message.round_id != self.round_id:
            raise self._fault(f"sent the union of round {message.round_id}")
        if flaw := select.union_flaw(self.plan, message):
            raise self._fault(flaw)
        try:
            domain = self._domain(self.round_id, union)
        except ConfigError as error:
            raise self._fault(f"sent a union that the plan cannot work with: {error}") from error
        return self._consenting(state.root, domain), []

    def _consenting(self, root: RootedEntropy, domain: RoundDomain) -> Consenting:
        handshake: HelperHandshake | IdealHelperHandshake
        if self._ideal is not None:
            handshake = IdealHelperHandshake(self._ideal, domain.params, self._key_store)
        else:
            handshake = HelperHandshake(self._handshake_setup(domain), entropy=root)
        return Consenting(root=root, domain=domain, handshake=handshake)

    def _at_handshake(self, state: Any, data: bytes) -> Moved:
        out = state.handshake.receive(SERVER, data)
        header = state.handshake.header
        if not isinstance(state, Consenting) or header is None:
            return state, out
        params, keys = state.domain.params, self._key_store
        retrieval: RetrievalHelper | IdealHelperRetrieval
        write: WriteHelper | IdealHelperWrite
        if self._ideal is not None:
            retrieval = IdealHelperRetrieval()
            write = IdealHelperWrite(self._ideal, params, header, keys)
            self._ideal.noise[HELPER] = state.root.secret(Label.SUM_NOISE)
        else:
            retrieval = RetrievalHelper(self._retrieval_setup(state.domain, header))
            write = WriteHelper(self._write_setup(state.domain, header), entropy=state.root)
        following = ServingReports(
            domain=state.domain, handshake=state.handshake, retrieval=retrieval, write=write
        )
        return following, out

    def _at_retrieval(self, state: Any, data: bytes) -> Moved:
        return state, state.retrieval.receive(SERVER, data)

    def _at_either(self, state: Any, data: bytes) -> Moved:
        """The purpose of a forwarded box is in the clear; the write refuses an invalid message."""
        if wire.first_field(data) is Purpose.RETRIEVE:
            return self._at_retrieval(state, data)
        return self._at_write(state, data)

    def _at_write(self, state: Any, data: bytes) -> Moved:
        out = state.write.receive(SERVER, data)
        if not isinstance(state, ServingReports) or state.write.total is None:
            return state, out
        following = SumShown(
            domain=state.domain,
            handshake=state.handshake,
            retrieval=state.retrieval,
            write=state.write,
        )
        return following, out


class _HelperRoles:
    """Wakes the roles inside a state in the order in which they are read: later ones are given what
    earlier ones have."""

    def __init__(self, helper: HelperRound, round_id: RoundId) -> None:
        self._helper, self._round_id = helper, round_id
        self._found: RoundDomain | None = None
        self._agreed: HelperHandshake | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {
            DOMAIN: self._domain,
            "handshake": self._handshake,
            "retrieval": self._retrieval,
            "write": self._write,
        }

    def _domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        check_stored(self._helper.plan, union)
        self._found = self._helper._domain(self._round_id, union)
        return self._found

    def _handshake(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> HelperHandshake:
        setup = self._helper._handshake_setup(self._over)
        self._agreed = HelperHandshake.wake(snapshot, messages, setup)
        return self._agreed

    def _retrieval(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> RetrievalHelper:
        setup = self._helper._retrieval_setup(self._over, self._header)
        return RetrievalHelper.wake(snapshot, messages, setup)

    def _write(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> WriteHelper:
        setup = self._helper._write_setup(self._over, self._header)
        return WriteHelper.wake(snapshot, messages, setup)

    @property
    def _over(self) -> RoundDomain:
        assert self._found is not None
        return self._found

    @property
    def _header(self) -> Header:
        if self._agreed is None or self._agreed.header is None:
            raise Malformed("a stored state is past its handshake, and has no header")
        return self._agreed.header


BEGUN: Final = (ServingReports, SumShown)
STEPS: Final[Steps] = {
    (AwaitingUnion, UnionOpened): HelperRound._on_union,
    **{
        (state, kind): HelperRound._at_handshake
        for state in (Consenting, *BEGUN)
        for kind in (HandshakeOffer, HandshakeReveal)
    },
    **{(state, AnswersDue): HelperRound._at_retrieval for state in BEGUN},
    **{(state, Forwarded): HelperRound._at_either for state in BEGUN},
    **{
        (state, kind): HelperRound._at_write
        for state in BEGUN
        for kind in (Closing, CheckSums, IncludedList, OpenedSum)
    },
}
"""Which role takes which message; a role that is done takes those it has handled, once more."""
HelperRound.STEPS = STEPS
