"""HelperRound: the second server in one round, which exchanges messages with the leader only.

It holds its roles in the protocols: the handshake, the retrieval, the write. Each judges itself
which messages are due, and answers one that is repeated with the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from tessera import wire
from tessera.crypto.entropy import RootedEntropy
from tessera.errors import ConfigError, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, Party
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
from tessera.protocols.two_server.handshake import (
    HelperHandshake,
    HelperHandshakeSetup,
)
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
from tessera.protocols.two_server.read.server import RetrievalHelper, RetrievalHelperSetup
from tessera.protocols.two_server.write.helper import WriteHelper, WriteHelperSetup
from tessera.protocols.two_server.write.sums import TwoServerSum
from tessera.rounds import schemes, select
from tessera.rounds.messages import RoundResult, UnionOpened
from tessera.rounds.party import HelperRoundSetup
from tessera.rounds.resolve import resolve
from tessera.rounds.root import StoredRoot, draw_root
from tessera.rounds.sums import InnerRole
from tessera.rounds.two_server import shared_sum
from tessera.rounds.two_server.domain import NAME as DOMAIN
from tessera.rounds.two_server.domain import (
    ModelToServe,
    RoundDomain,
    StoredDomain,
    WokenParts,
    check_stored,
    opened_means,
)
from tessera.wire.stored import Inner, Kept

Handshake = Annotated[shared_sum.HelperAgreement, Inner("handshake")]
Retrieval = Annotated[InnerRole, Inner("retrieval")]
Writing = Annotated[shared_sum.Adding, Inner("write")]


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


class HelperRound(Follower[HelperRoundSetup]):
    """Handshake with the leader, answers to queries, the sum of reports, one share released."""

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

    def __init__(self, setup: HelperRoundSetup) -> None:
        self._set_up(setup)
        self._begin(self._first(draw_root(setup.own.entropy, self.plan, self.round_id, HELPER)))

    def _set_up(self, setup: HelperRoundSetup) -> None:
        super()._set_up(setup)
        schemes.check(type(self).__name__, setup.plan, two_servers=True)
        self.plan, self._own = setup.plan, setup.own
        self._rows = resolve(setup.plan).rows
        self._sum, self._model = shared_sum.shared(setup.sum), ModelToServe(setup)
        # What follows from the state, worked out once.
        self._result: RoundResult | None = None

    def _supplied(self) -> Mapping[str, Any]:
        """Roles are woken in the order in which they are read: the handshake has the header."""
        found = WokenParts()

        def domain(union: Kept[UnionOpened] | None) -> RoundDomain:
            check_stored(self._rows, union)
            return self._domain(union)

        def handshake(snapshot: bytes, messages: Mapping[bytes, bytes]) -> HelperHandshake:
            return HelperHandshake.wake(snapshot, messages, self._handshake_setup(found[DOMAIN]))

        def agreed() -> tuple[RoundDomain, Header]:
            return found[DOMAIN], found.header(lambda role: role.header)

        return {
            DOMAIN: found.keeping(DOMAIN, domain),
            "handshake": found.keeping("handshake", handshake),
            "retrieval": lambda snapshot, messages: RetrievalHelper.wake(
                snapshot, messages, self._retrieval_setup(*agreed())
            ),
            "write": lambda snapshot, messages: WriteHelper.wake(
                snapshot, messages, self._write_setup(*agreed())
            ),
        }

    def _first(self, root: RootedEntropy) -> AwaitingUnion | Consenting:
        if self._rows.union:
            return AwaitingUnion(root=root)
        return self._consenting(root, self._domain(None))

    def _domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        def made() -> RoundDomain:
            servers, derived = self._own.servers, self.setup.derived
            return RoundDomain.of(self.plan, self.round_id, servers, union, derived)

        return self._sum.once(union, made)

    @property
    def _inbox(self) -> dict[str, Any]:
        """What it takes to unseal and check what clients send it."""
        return {
            "key": self._own.keys.signing,
            "box_key": self._own.keys.box,
            "directory": self.setup.directory,
            "replay_guard": self._own.replay_guard,
            "workers": self._own.workers,
        }

    # --- what its roles are given, made or woken --------------------------------------------------

    def _handshake_setup(self, domain: RoundDomain) -> HelperHandshakeSetup:
        return HelperHandshakeSetup(
            params=domain.params,
            model=self._model.over(domain),
            key=self._own.keys.signing,
            replay_guard=self._own.replay_guard,
            key_store=self._own.key_store,
        )

    def _retrieval_setup(self, domain: RoundDomain, header: Header) -> RetrievalHelperSetup:
        return RetrievalHelperSetup(
            params=domain.params,
            header=header,
            model=self._model.over(domain),
            row_tags=self._own.row_tags,
            **self._inbox,
        )

    def _write_setup(self, domain: RoundDomain, header: Header) -> WriteHelperSetup:
        return WriteHelperSetup(
            params=domain.params, header=header, key_store=self._own.key_store, **self._inbox
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
            domain = self._domain(union)
        except ConfigError as error:
            raise self._fault(f"sent a union that the plan cannot work with: {error}") from error
        return self._consenting(state.root, domain), []

    def _consenting(self, root: RootedEntropy, domain: RoundDomain) -> Consenting:
        handshake = self._sum.consent(self._handshake_setup(domain), root)
        return Consenting(root=root, domain=domain, handshake=handshake)

    def _at_handshake(self, state: Any, data: bytes) -> Moved:
        out = state.handshake.receive(SERVER, data)
        header = state.handshake.header
        if not isinstance(state, Consenting) or header is None:
            return state, out
        retrieval = self._sum.help_retrieve(self._retrieval_setup(state.domain, header))
        noise = self.setup.noise_secrets(state.root) if state.domain.params.noise else ()
        write = self._sum.help_add_up(self._write_setup(state.domain, header), state.root, noise)
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
