"""What every role promises, whatever carries its messages; and what all roles do alike.

A role is a state machine over encoded messages. It takes bytes and returns bytes with addresses;
it has no clock, no socket and no thread. A dropout is a message that did not come before somebody
called `close_phase`, in a test exactly as in the field. Between any two calls a role can be put to
bytes with `snapshot` and `messages`, and woken from them in another process.

The carrier of messages stores the snapshot before it sends what the call returned. A client
woken from an earlier state does not know what it has sent since and would answer again: given
two lists of survivors, it would reveal both shares of a peer. While a server collects, its state
follows from the first snapshot of the phase and the messages accepted since, in any order.

Whose fault something is decides what happens (`tessera.errors`): a bad message *from a client*
raises `PeerError` at the server and changes nothing; a bad message *from the server* raises
`ServerFault` at the client, which is then in its terminal state and stays there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Generic, Protocol, Self, TypeVar

from tessera import wire
from tessera.errors import (
    MisuseError,
    PeerError,
    RoundAborted,
    RoundIsOver,
    ServerFault,
    WireError,
)
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.wire import stored
from tessera.wire.stored import MARK_BYTES, Context, Kept, Owner

MAXREASON: Final = 500
"""Bytes of a reason that a tombstone keeps, so that it stays under 1 kB."""

REASON: Final = wire.Converted(
    wire.UpTo(MAXREASON), lambda text: text.encode(), lambda raw: raw.decode()
)


@dataclass(frozen=True, slots=True)
class Outbound:
    """One encoded message on its way; `kind` is the record's name, for logs and byte counts."""

    to: Party
    kind: str
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, to: Party, message: Any) -> Outbound:
        return cls(to, type(message).__name__, wire.encode(message))

    @classmethod
    def again(cls, to: Party, data: bytes) -> Outbound:
        """A message that is encoded already."""
        kind = wire.kind_of(data)
        return cls(to, kind.__name__ if kind else "", data)


def to_all(clients: Iterable[ClientId], message: Any) -> list[Outbound]:
    """One encoding for everybody: the message does not depend on who reads it."""
    data = message.data if isinstance(message, Kept) else wire.encode(message)
    return [Outbound.again(c, data) for c in sorted(clients)]


class Receiver(Protocol):
    """What a carrier hands messages to."""

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """Take one message; a client and a helper hear `SERVER` only.

        Bytes that were handled before change nothing: they return nothing, or the same bytes as
        before. `PeerError` at a server: refused, and this role is as it was; at a helper: that
        client is excluded. `ServerFault`: this role has left the round for good. `RoundIsOver`:
        the message came too late.
        """


class Clocked(Receiver, Protocol):
    """What a carrier with a clock drives."""

    def close_phase(self) -> list[Outbound]:
        """Go on with whoever has answered. `RoundAborted`: too few, and nothing was revealed.

        `MisuseError`: there is no phase to close, as always at a client or a helper.
        """

    @property
    def phase(self) -> str:
        """The name of its state or phase."""

    @property
    def expected(self) -> frozenset[Party]:
        """Whose messages are due and have not come; `HELPER` and `SERVER` may be among them."""


# --- how a round ends -----------------------------------------------------------------------------


class RoundOutcome(Enum):
    """How a round ended, for whoever is told."""

    DONE = "done"
    LEFT_OUT = "left out"
    """It came to a sum, without what this client sent, or with a sum that is not merged."""
    ABORTED = "aborted"


@wire.record(tag=0x0011)
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOver:
    """Server to everybody: the round has ended, and what belongs to it may be erased."""

    round_id: Annotated[RoundId, wire.U64]
    outcome: Annotated[RoundOutcome, wire.choice(RoundOutcome)]
    reason: Annotated[str, REASON] = ""

    @classmethod
    def of(cls, round_id: RoundId, outcome: RoundOutcome, reason: str = "") -> RoundOver:
        return cls(round_id=round_id, outcome=outcome, reason=shortened(reason))


@wire.record(tag=0x0012)
@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A tombstone: the round has ended, and nothing else is left of it."""

    outcome: Annotated[RoundOutcome, wire.choice(RoundOutcome)]
    reason: Annotated[str, REASON]


@wire.record(tag=0x0013)
@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The server broke the protocol and this role has left the round, for good."""

    reason: Annotated[str, REASON]


@wire.record(tag=0x0014)
@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """Too few answered in a phase; what was collected is deleted and nothing was opened."""

    phase: Annotated[str, wire.TEXT]
    reason: Annotated[str, REASON]


def shortened(reason: str) -> str:
    """As much of a reason as a tombstone keeps."""
    return reason.encode()[:MAXREASON].decode(errors="ignore")


# --- the diagram as data --------------------------------------------------------------------------

Step = Callable[..., Any]
Steps = Mapping[tuple[type[Any], type[Any]], Step]
"""A protocol's diagram as data: (state, message) -> the transition that takes the one to the next.

A combination that is not in the table is not a step of the protocol. Documentation is drawn from
the same table, and a test walks every combination.
"""

Closes = Mapping[type[Any], Step]
"""What ends each phase, in the order of a round."""

Moved = tuple[Any, list[Outbound]]
"""What a transition returns: the next state, and what to send."""


class RoleSetup(Protocol):
    """What a role is given when it is made, and again when it is woken: it is not stored.

    Each kind of role has a frozen record of its own, which checks what it is given.
    """

    @property
    def party(self) -> Party:
        """Whose role it is."""

    @property
    def round_id(self) -> RoundId: ...

    @property
    def context(self) -> bytes:
        """A digest of the parameters: a snapshot made under others is refused."""


class Parameters(Protocol):
    """What everybody in a round agrees on."""

    @property
    def round_id(self) -> RoundId: ...

    @property
    def context(self) -> bytes:
        """A digest of them."""


class UnderParams:
    """Of a set-up record: its round and its digest are those of its parameters."""

    params: Parameters

    @property
    def round_id(self) -> RoundId:
        return self.params.round_id

    @property
    def context(self) -> bytes:
        return self.params.context


S = TypeVar("S", bound=RoleSetup)


class StateMachine(Generic[S]):
    """What all roles do alike: store and wake, look up steps, recognise repetitions, end."""

    ROLE: ClassVar[str]
    """Names the role in its snapshots."""

    STATES: ClassVar[tuple[type[Any], ...]]
    STEPS: ClassVar[Steps]
    CLOSES: ClassVar[Closes] = {}
    PHASES: ClassVar[Mapping[type[Any], str]] = {}
    """What states are called, where it is not the name of their class."""

    state: Any

    def __init__(self, setup: S, state: Any) -> None:
        """A role that begins in this state."""
        self._set_up(setup)
        self._begin(state)

    @classmethod
    def wake(cls, snapshot: bytes, messages: Mapping[bytes, bytes], setup: S) -> Self:
        """The role that this is a snapshot of, given once more what it was made with."""
        role = cls.__new__(cls)
        role._set_up(setup)
        role._resume(snapshot, messages)
        return role

    def _set_up(self, setup: S) -> None:
        """Before there is a state: keep what is given. What follows from the state comes later."""
        self.setup = setup
        self._owner = self._owned(setup.party, setup.round_id, setup.context)

    def _supplied(self) -> Mapping[str, Any]:
        """What its states leave out, by name: what is read in place of it when it is woken."""
        return {}

    def _begin(self, state: Any) -> None:
        self.state = state
        self._handled: set[bytes] = set()
        self._last = b""

    def _resume(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> None:
        context = Context(messages, self._supplied())
        self.state, found = stored.unpacked(snapshot, self._owner, (*self.STATES, Over), context)
        self._handled, self._last = set(found.handled), found.last

    @classmethod
    def _owned(cls, party: Party, round_id: RoundId, params: bytes) -> Owner:
        return Owner(role=cls.ROLE, party=party, round_id=round_id, params=params)

    @property
    def round_id(self) -> RoundId:
        return self._owner.round_id

    @property
    def phase(self) -> str:
        kind = type(self.state)
        return self.PHASES.get(kind, kind.__name__)

    def snapshot(self) -> bytes:
        return stored.packed(self._owner, self.state, frozenset(self._handled), self._last)

    @property
    def messages(self) -> Mapping[bytes, bytes]:
        return stored.references(self.state)

    def over(self, outcome: RoundOutcome, reason: str = "") -> None:
        if isinstance(self.state, Over | Left):
            return
        self._end(Over(outcome=outcome, reason=shortened(reason)))

    def resend(self) -> list[Outbound]:
        """What led out of its last state, again, byte for byte, where this role keeps that."""
        return []

    def close_phase(self) -> list[Outbound]:
        close = self.CLOSES.get(type(self.state))
        if close is None:
            raise MisuseError(f"there is no phase to close: {self.phase}")
        try:
            following, out = close(self, self.state)
        except RoundAborted as error:
            self._end(self._aborted(error))
            raise
        self._move(following, b"")
        return list(out)

    # -- for the two kinds below

    def _move(self, following: Any, mark: bytes) -> None:
        if mark:
            self._handled.add(mark)
        if type(following) is not type(self.state):
            self._last = mark
        self.state = following

    def _end(self, state: Any) -> None:
        """Nothing is left of the round but this."""
        self.state, self._handled, self._last = state, set(), b""

    def _aborted(self, error: RoundAborted) -> Any:
        return Aborted(phase=error.phase, reason=shortened(error.reason))

    def _repeated(self, mark: bytes) -> list[Outbound]:
        """To the message that led to this state the same answer again; to earlier ones none."""
        return self.resend() if mark == self._last else []

    def _check_open(self) -> None:
        if isinstance(self.state, Over):
            raise RoundIsOver(
                round_id=self.round_id,
                outcome=self.state.outcome.value,
                reason=self.state.reason,
            )


class Follower(StateMachine[S]):
    """A role that hears one server: a client, or the helper. A fault of the server's ends it."""

    FROM_SERVER: ClassVar[tuple[type[Any], ...]]
    SETTLED: ClassVar[tuple[type[Any], ...]] = ()
    """States in which the role has done its part: a later fault of the server changes nothing."""

    @property
    def expected(self) -> frozenset[Party]:
        waits = any((type(self.state), kind) in self.STEPS for kind in self.FROM_SERVER)
        return frozenset({SERVER}) if waits else frozenset()

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        if sender != SERVER:
            raise MisuseError(f"a {self.ROLE} hears the server only, not {sender}")
        if wire.kind_of(data) is RoundOver and self._is_last_word(data):
            return []
        self._check_open()
        if isinstance(self.state, Left):
            raise self._fault(self.state.reason)
        try:
            try:
                message, digest = wire.opened(data, expect=self.FROM_SERVER)
            except WireError as error:
                raise self._fault(f"sent an invalid message: {error}") from error
            mark = message_mark(sender, digest)
            if mark in self._handled:
                return self._repeated(mark)
            self._check_message(message)
            step = self.STEPS.get((type(self.state), type(message)))
            if step is None:
                raise self._fault(f"sent {type(message).__name__}, which is not due")
            following, out = self._apply(step, Kept.received(message, data, digest))
        except ServerFault as fault:
            if not isinstance(self.state, self.SETTLED):
                self._end(Left(reason=shortened(fault.reason)))
            raise
        self._move(following, mark)
        return out

    def _is_last_word(self, data: bytes) -> bool:
        """Take the message that ends the round; False if it is not a valid one of this round."""
        try:
            message = wire.decode(data, expect=[RoundOver])
        except WireError:
            return False
        if message.round_id != self.round_id:
            return False
        self._told(message.outcome)
        self.over(message.outcome, message.reason)
        return True

    def _told(self, outcome: RoundOutcome) -> None:
        """The server says how the round ended for this party."""

    def _check_message(self, message: Any) -> None:
        """`ServerFault` for a message that is wrong in every state."""

    def _apply(self, step: Step, message: Any) -> Moved:
        following, out = step(self, self.state, message)
        return following, out

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.round_id, phase=self.phase)


class Coordinator(StateMachine[S]):
    """A role that hears clients, and the helper where there is one. It refuses what is wrong."""

    FROM_CLIENT: ClassVar[tuple[type[Any], ...]] = ()
    FROM_HELPER: ClassVar[tuple[type[Any], ...]] = ()
    invited: frozenset[ClientId]

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        self._check_open()
        kinds = self._kinds_from(sender)  # a stranger's message is not decoded
        try:
            message, digest = wire.opened(data, expect=kinds)
        except WireError as error:
            raise self._refuse(sender, f"sent an invalid message: {error}") from error
        mark = message_mark(sender, digest)
        if mark in self._handled:
            return self._repeated(mark)
        name = type(message).__name__
        if getattr(message, "sender", sender) != sender:
            raise self._refuse(sender, "sent a message in another client's name")
        if not self._is_of_this_round(message):
            raise self._refuse(sender, f"sent {name} of another round")
        step = self.STEPS.get((type(self.state), type(message)))
        if step is None:
            raise self._refuse(sender, f"sent {name}, which is not due")
        self._check_due(sender, message)
        try:
            following, out = step(self, self.state, Kept.received(message, data, digest))
        except RoundAborted as error:
            self._end(self._aborted(error))
            raise
        self._move(following, mark)
        return list(out)

    def _kinds_from(self, sender: Party) -> tuple[type[Any], ...]:
        if sender == HELPER and self.FROM_HELPER:
            return self.FROM_HELPER
        if isinstance(sender, str) or sender not in self.invited:
            raise self._refuse(sender, "is not in this cohort")
        return self.FROM_CLIENT

    def _is_of_this_round(self, message: Any) -> bool:
        return bool(message.round_id == self.round_id)

    def _check_due(self, sender: Party, message: Any) -> None:
        """`PeerError` for a message that is not due from this sender; its kind is due."""

    def _too_few(self, answered: int, needed: int, reason: str = "") -> RoundAborted:
        return RoundAborted(
            round_id=self.round_id,
            phase=self.phase,
            answered=answered,
            needed=needed,
            reason=reason,
        )

    def _refuse(self, peer: Party, reason: str) -> PeerError:
        return PeerError(reason, round_id=self.round_id, phase=self.phase, peer=peer)


def message_mark(sender: Party, digest: bytes) -> bytes:
    """128 bits by which a role recognises a message that it has handled, and whose it was."""
    return hashlib.sha256(f"{sender}\0".encode() + digest).digest()[:MARK_BYTES]
