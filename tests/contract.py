"""The contract of roles as checks over recorded rounds: what `protocols/machine.py` promises.

A `Tape` stands in for a role in a round and keeps, for every call, the role's bytes before and
after it and what came of it. A `Case` is one role's recording. `CHECKS` are the promises; each is a
function of a case, so that a layer above adds its own roles by recording them:

    @pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
    @pytest.mark.parametrize("case", cases(), ids=str)
    def test_contract(case, check):
        check(case)
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from recording import checksummed
from tessera import wire
from tessera.crypto.secret import Secret
from tessera.errors import (
    MisuseError,
    PeerError,
    RoundAborted,
    RoundIsOver,
    ServerFault,
    TesseraError,
    WireError,
    WrongSnapshot,
)
from tessera.ids import SERVER, Party
from tessera.protocols.machine import (
    Coordinator,
    Follower,
    Left,
    Outbound,
    RoundOutcome,
    RoundOver,
    StateMachine,
    message_mark,
)
from tessera.wire.stored import Kept

Wake = Callable[[bytes, Mapping[bytes, bytes]], Any]

SEALED = frozenset({"Query", "WriteReport", "HelperAnswer"})
"""Messages with a sealed box inside, which draws randomness of its own: made once, then stored."""

TAPED = (
    *("receive", "close_phase", "submit", "begin_stage", "prepare", "start", "supply"),
    *("deliver", "fix"),
)
REASON = "for a test"


@dataclass(frozen=True)
class Rest:
    """A role between two calls: its bytes, and how to wake it with what it was made with."""

    snapshot: bytes
    messages: dict[bytes, bytes]
    wake: Wake

    def woken(self) -> Any:
        return self.wake(bytes(self.snapshot), dict(self.messages))


@dataclass(frozen=True)
class Moment:
    """One call: the role before and after it, and what it returned or raised."""

    method: str
    given: tuple[Any, ...]
    named: dict[str, Any]
    before: Rest
    after: Rest
    out: list[Outbound] | None
    error: TesseraError | None

    def again(self, role: Any) -> list[Outbound]:
        return getattr(role, self.method)(*self.given, **self.named) or []

    @property
    def is_message(self) -> bool:
        return self.method == "receive" and self.error is None

    @property
    def is_sealed(self) -> bool:
        return any(out.kind in SEALED for out in self.out or ())


@dataclass
class Case:
    """One role in one recorded round."""

    name: str
    first: Rest
    moments: list[Moment] = field(default_factory=list)
    foreign: tuple[Wake, ...] = ()
    """Waking it as a role of another round, of other parameters, of another party."""

    def __str__(self) -> str:
        return self.name

    @property
    def rests(self) -> list[Rest]:
        """Every state it was in, each once."""
        found = {r.snapshot: r for m in self.moments for r in (m.before, m.after)}
        return list({self.first.snapshot: self.first, **found}.values())


class Tape:
    """A role that is recorded while others use it."""

    def __init__(self, name: str, role: Any, wake: Callable[[], Wake], *foreign: Wake) -> None:
        """`wake()` is asked before every call, for what the role was made with may change."""
        self.role, self._wake = role, wake
        self.case = Case(name, self._rest(), foreign=foreign)

    def _rest(self) -> Rest:
        return Rest(self.role.snapshot(), dict(self.role.messages), self._wake())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.role, name)
        return self._taped(name, found) if name in TAPED else found

    def _taped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            before = self._rest()
            out, error = None, None
            try:
                out = method(*given, **named)
                return out
            except TesseraError as raised:
                error = raised
                raise
            finally:
                said = None if out is None else list(out)  # the caller may add to its list
                moment = Moment(name, given, named, before, self._rest(), said, error)
                self.case.moments.append(moment)

        return call


# --- the promises ---------------------------------------------------------------------------------


def same(role: Any, rest: Rest) -> bool:
    return role.snapshot() == rest.snapshot and dict(role.messages) == rest.messages


def outcome(role: Any, moment: Moment) -> tuple[Any, str]:
    """What a call returns, and the error it raises, in a form that can be compared."""
    try:
        return moment.again(role), ""
    except TesseraError as error:
        return None, f"{type(error).__name__}: {error}"


def woken_it_says_the_same_bytes(case: Case) -> None:
    for moment in case.moments:
        role = moment.before.woken()
        assert same(role, moment.before), f"{moment.method}: another state after waking"
        out, error = outcome(role, moment)
        recorded = "" if moment.error is None else f"{type(moment.error).__name__}: {moment.error}"
        assert error == recorded, f"{moment.method}: {error} where {recorded or 'nothing'} was due"
        if moment.is_sealed:
            shape = [(m.to, m.kind, len(m.data)) for m in moment.out]
            assert [(m.to, m.kind, len(m.data)) for m in out] == shape
            assert moment.after.woken().resend() == moment.out, "the stored boxes, and no others"
            continue
        assert (out or []) == (moment.out or []), f"{moment.method}: other bytes after waking"
        assert same(role, moment.after), f"{moment.method}: another state after the call"


def a_repeated_message_changes_nothing(case: Case) -> None:
    taken = [moment for moment in case.moments if moment.is_message]
    for at, moment in enumerate(taken):
        for later in taken[at:]:
            role = later.after.woken()
            if isinstance(role.state, Left):
                continue
            again = moment.again(role)
            assert again in ([], moment.out), "another answer to the same bytes"
            assert same(role, later.after), "the same bytes changed the state"


def a_refused_message_leaves_the_state_alone(case: Case) -> None:
    """With any bit changed under a right checksum, a message is taken, or refused by name."""
    rng = np.random.default_rng(len(case.name))
    for moment in case.moments:
        if moment.method != "receive":
            continue
        sender, data = moment.given
        for changed in (data[:-1], *(flipped(data, rng) for _ in range(6))):
            assert_named(moment.before, sender, changed)


def a_message_that_is_no_step_is_a_named_error(case: Case) -> None:
    """Every state that it was in, and a message of every kind there is."""
    seen: set[type[Any]] = set()
    tried = examples(case)
    for rest in case.rests:
        role = rest.woken()
        if type(role.state) in seen:
            continue
        seen.add(type(role.state))
        handled = wire.decode(rest.snapshot, cap=1 << 36).handled
        for sender in senders(role):
            for data in tried:
                if wire.kind_of(data) is RoundOver:
                    continue
                woken, error = assert_named(rest, sender, data)
                if message_mark(sender, wire.digest_of(data)) in handled:
                    assert same(woken, rest), "the same bytes changed the state"
                elif (type(role.state), wire.kind_of(data)) not in role.STEPS:
                    assert error, f"took a {wire.kind_of(data)} that is no step"
        assert_no_phase_of_its_own(role)


def a_strange_snapshot_is_refused(case: Case) -> None:
    for rest in case.rests:
        for wake in case.foreign:
            with pytest.raises(WrongSnapshot):
                wake(rest.snapshot, rest.messages)
    own = wire.decode(case.first.snapshot, cap=1 << 36).owner
    for other in others():
        if wire.decode(other.snapshot, cap=1 << 36).owner != own:
            with pytest.raises(WrongSnapshot):
                case.first.wake(other.snapshot, other.messages)


def a_changed_snapshot_is_a_named_error(case: Case) -> None:
    """Or, under a right checksum, the very state that the changed bytes are of."""
    rng = np.random.default_rng(7)
    rests = case.rests
    for count in range(max(300, len(rests))):
        rest = rests[count % len(rests)]
        bare = bytearray(rest.snapshot)
        bare[int(rng.integers(len(bare)))] ^= 1 << int(rng.integers(8))
        for changed in (
            bytes(bare),
            flipped(rest.snapshot, rng),
            rest.snapshot[: int(rng.integers(len(rest.snapshot)))],
        ):
            try:
                woken = rest.wake(changed, rest.messages)
            except (WireError, MisuseError):
                continue
            assert woken.snapshot() == changed, "woken as something else than what was stored"
    for rest in rests:
        if not rest.messages:
            continue
        with pytest.raises(WireError):
            rest.wake(rest.snapshot, {})
        spoiled = {d: data[:-1] + bytes([data[-1] ^ 1]) for d, data in rest.messages.items()}
        with pytest.raises(WireError):
            rest.wake(rest.snapshot, spoiled)


def messages_of_a_phase_come_in_any_order(case: Case) -> None:
    """The first state of a phase and the messages taken in it, in another order: the same state."""
    phases: list[list[Moment]] = []
    for moment in case.moments:
        if moment.error is not None:
            continue
        before, after = moment.before.woken(), moment.after.woken()
        where = (type(before.state), before.phase)
        stays = moment.is_message and (type(after.state), after.phase) == where
        if not stays or not isinstance(before, Coordinator):
            phases.append([])
            continue
        if not phases:
            phases.append([])
        phases[-1].append(moment)
    for taken in filter(None, phases):
        role = taken[0].before.woken()
        for moment in reversed(taken):
            moment.again(role)
        assert same(role, taken[-1].after), "the order of messages shows in the state"


def the_end_leaves_a_tombstone(case: Case) -> None:
    for rest in case.rests:
        for ended in endings(rest):
            if isinstance(ended.state, Left):
                continue
            tombstone = ended.snapshot()
            assert len(tombstone) < 1000 and not ended.messages and ended.phase == "Over"
            public = wire.decode(tombstone).owner.params
            for secret in secrets_in(rest.woken().state) - {public}:
                assert secret not in tombstone, "a secret outlives the round"
            woken = rest.wake(tombstone, {})
            for sender in senders(woken):
                for data in (b"late", *[m.given[1] for m in case.moments if m.is_message][:3]):
                    with pytest.raises(RoundIsOver, match=REASON):
                        woken.receive(sender, data)
            assert woken.snapshot() == tombstone and not woken.expected
            with pytest.raises(MisuseError):
                woken.close_phase()
            woken.over(RoundOutcome.ABORTED, "another")
            assert woken.snapshot() == tombstone, "a round ends once"
            assert not states_beside(ended), "a state outlives the round in memory"


CHECKS = (
    woken_it_says_the_same_bytes,
    a_repeated_message_changes_nothing,
    a_refused_message_leaves_the_state_alone,
    a_message_that_is_no_step_is_a_named_error,
    a_strange_snapshot_is_refused,
    a_changed_snapshot_is_a_named_error,
    messages_of_a_phase_come_in_any_order,
    the_end_leaves_a_tombstone,
)


# --- what they stand on ---------------------------------------------------------------------------

_KNOWN: list[Case] = []


def known(cases: Iterable[Case]) -> list[Case]:
    """Make these cases known: their messages and snapshots are tried on all other roles."""
    made = list(cases)
    _KNOWN.extend(made)
    return made


def examples(case: Case) -> list[bytes]:
    """One message of every kind: this role's own, which fit it best, and of any recorded round."""
    found: dict[type[Any] | None, bytes] = {}
    for each in (case, *_KNOWN):
        for moment in each.moments:
            if moment.method == "receive":
                found.setdefault(wire.kind_of(moment.given[1]), moment.given[1])
    return list(found.values())


def others() -> list[Rest]:
    return [case.first for case in _KNOWN]


def senders(role: Any) -> list[Party]:
    """Whom this role may hear."""
    if isinstance(role, Coordinator):
        clients = sorted(role.invited)[:1]
        return [*clients, *(["helper"] if role.FROM_HELPER else [])]
    return [SERVER]


def assert_named(rest: Rest, sender: Party, data: bytes) -> tuple[Any, TesseraError | None]:
    """Taken, or refused by an error that says whose move it is; never anything else."""
    role = rest.woken()
    try:
        role.receive(sender, data)
    except (PeerError, RoundAborted) as error:
        if isinstance(role, Coordinator) and isinstance(error, PeerError):
            assert same(role, rest), f"a refusal changed the state: {error}"
        return role, error
    except ServerFault as fault:
        assert isinstance(role, Follower), "a server has no server to blame"
        if not isinstance(role.state, role.SETTLED):
            assert isinstance(role.state, Left) and not role.messages
            assert len(role.snapshot()) < 1000
            left = rest.wake(role.snapshot(), {})
            with pytest.raises(ServerFault):
                left.receive(sender, data)
            assert left.snapshot() == role.snapshot(), "it left once, for good"
        return role, fault
    return role, None


def assert_no_phase_of_its_own(role: Any) -> None:
    if isinstance(role, Follower):
        with pytest.raises(MisuseError):
            role.close_phase()
        assert role.expected <= {SERVER}


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    """These bytes with one bit changed, and a checksum that says nothing of it."""
    body = bytearray(data[: -wire.CHECKSUM_BYTES])
    body[int(rng.integers(3, len(body)))] ^= 1 << int(rng.integers(8))
    return checksummed(body)


def states_beside(role: Any) -> list[Any]:
    """States that a role refers to beside its own: what follows from them was worked out once."""
    kept = [value for name, value in vars(role).items() if name != "state"]
    inside = [each for value in kept for each in (value if isinstance(value, tuple) else (value,))]
    return [each for each in inside if isinstance(each, type(role).STATES)]


def endings(rest: Rest) -> Iterable[StateMachine]:
    """The role, told that the round is over, in every way that it can be told."""
    told = rest.woken()
    for name in ("pending", "fetched"):  # what is worked out from the state when it is asked for
        getattr(told, name, None)
    told.over(RoundOutcome.DONE, REASON)
    yield told
    heard = rest.woken()
    if isinstance(heard, Follower):
        message = RoundOver.of(heard.round_id, RoundOutcome.ABORTED, REASON)
        assert heard.receive(SERVER, wire.encode(message)) == []
        assert heard.receive(SERVER, wire.encode(message)) == []
        yield heard


def secrets_in(value: Any) -> set[bytes]:
    """Every secret in a state, and every run of bytes that was sent to its owner alone."""
    if isinstance(value, Secret):
        return {value.reveal()}
    if isinstance(value, Kept):
        return {value.data}
    if isinstance(value, bytes) and len(value) >= 32:
        return {value}
    if isinstance(value, Mapping):
        return set().union(*map(secrets_in, value.values()))
    if isinstance(value, tuple):
        return set().union(*map(secrets_in, value))
    if is_dataclass(value) and not isinstance(value, type):
        inner = (getattr(value, f.name) for f in fields(value) if f.name != "params")
        return set().union(*map(secrets_in, inner))
    return set()


def roles_in(package: str) -> set[type[Any]]:
    """Every class under this package that is a role, whoever has thought of it or not."""
    found: set[type[Any]] = set()
    for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
        for each in vars(import_module(module.name)).values():
            role = isinstance(each, type) and issubclass(each, StateMachine)
            if role and "ROLE" in vars(each) and each.__module__ == module.name:
                found.add(each)
    return found
