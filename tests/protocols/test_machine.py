"""The transition tables: every pair of state and message, on states and messages of real rounds."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import recording
from tessera import wire
from tessera.errors import MisuseError, PeerError, ServerFault, WireError
from tessera.ids import SERVER, ClientId, Party
from tessera.protocols.machine import Left, RoundOver, message_mark
from tessera.protocols.secagg import client as client_side
from tessera.protocols.secagg import server as server_side
from tessera.protocols.secagg.client import STATES, Client
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.messages import FROM_CLIENT, FROM_SERVER, Roster
from tessera.protocols.secagg.phases import PHASE_NAMES, PHASES
from tessera.protocols.secagg.server import CLOSES, Server
from tessera.protocols.secagg.states import Reveal

STRANGER = ClientId(4_000_000_000)
SENTINEL = b"SENTINEL"


@dataclass(frozen=True)
class Stored:
    """A role at rest in one of the recorded rounds."""

    kept: recording.Recording
    snapshot: bytes
    me: ClientId | None = None

    def client(self) -> Client:
        assert self.me is not None
        return Client.wake(
            self.snapshot,
            self.kept.kept,
            self.kept.cohort.setup(self.me),
        )

    def server(self) -> Server:
        return Server.wake(self.snapshot, self.kept.kept, self.kept.cohort.server_setup())

    def has_handled(self, sender: Party, data: bytes) -> bool:
        mark = message_mark(sender, wire.digest_of(data))
        return mark in wire.decode(self.snapshot).handled


@lru_cache
def clients_in(state: type[Any]) -> tuple[Stored, ...]:
    return tuple(
        Stored(kept, snapshot, me)
        for kept in recording.rounds()
        for me, snapshot in kept.clients[state.__name__]
    )


@lru_cache
def servers_in(phase: type[Any]) -> tuple[Stored, ...]:
    return tuple(
        Stored(kept, snapshot)
        for kept in recording.rounds()
        for snapshot in kept.server[PHASE_NAMES[phase]]
    )


@lru_cache
def examples() -> dict[type[Any], tuple[bytes, ...]]:
    """Encodings of every registered record, from the recorded rounds."""
    found: dict[type[Any], dict[bytes, None]] = {kind: {} for kind in wire.records().values()}
    for kept in recording.rounds():
        for data in (*(m[3] for m in kept.messages), *kept.stored()):
            found[wire.kind_of(data)][data] = None
    for data in recording.round_messages():
        found[wire.kind_of(data)][data] = None
    return {kind: tuple(some) for kind, some in found.items()}


def some_of(kind: type[Any], count: int = 4) -> tuple[bytes, ...]:
    """A few examples, spread over the rounds."""
    every = examples()[kind]
    return every[:: max(1, len(every) // count)]


def test_the_recorded_rounds_have_every_state_and_every_record():
    assert all(clients_in(state) for state in STATES)
    assert all(servers_in(phase) for phase in PHASES)
    # States of rounds that name their roles' messages are recorded with the rounds.
    assert all(
        some
        for kind, some in examples().items()
        if kind.__module__.startswith("tessera.protocols.") or recording.stands_alone(kind)
    )


def test_the_tables_name_states_and_messages_of_the_protocol_and_leave_none_out():
    submitted = {Reveal, Input}
    assert {state for state, _ in client_side.STEPS} == set(STATES) - {
        client_side.Finished,
        Left,
    }
    assert {message for _, message in client_side.STEPS} == set(FROM_SERVER) | submitted
    assert {phase for phase, _ in server_side.STEPS} == set(CLOSES)
    assert {message for _, message in server_side.STEPS} == set(FROM_CLIENT)


# -- clients


def assert_left_for_good(client: Client, stored: Stored) -> None:
    """Whatever comes now, also what was handled before, is refused; and a restart changes nothing.

    Nothing of the round is in what a client that has left would store.
    """
    assert client.phase == "Left" and client.setup.party == stored.me
    for kind in FROM_SERVER:
        with pytest.raises(ServerFault):
            client.receive(SERVER, some_of(kind)[0])
        assert client.phase == "Left" and client.wants is None
    for contribution in (Reveal(tables={}), Input()):
        with pytest.raises(MisuseError):
            client.submit(contribution)
    before = client.snapshot()
    assert not client.messages and len(before) < 1000
    woken = replace(stored, snapshot=before).client()
    assert woken.phase == "Left"
    with pytest.raises(ServerFault):
        woken.receive(SERVER, some_of(FROM_SERVER[0])[0])
    assert woken.snapshot() == before


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_message_that_is_not_due_makes_a_client_leave_for_good(state):
    for kind in wire.records().values():
        if (state, kind) in client_side.STEPS:
            continue
        stored = clients_in(state)[len(kind.__name__) % len(clients_in(state))]
        for data in some_of(kind):
            client = stored.client()
            if stored.has_handled(SERVER, data) or kind is RoundOver:
                continue
            with pytest.raises(ServerFault) as caught:
                client.receive(SERVER, data)
            assert caught.value.round_id == stored.kept.cohort.params.round_id
            assert caught.value.phase == state.__name__
            assert_left_for_good(client, stored)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_repetition_is_ignored_by_everybody_who_has_not_left(state):
    for stored in clients_in(state):
        mine = [data for _, to, _, data in stored.kept.messages if to == stored.me]
        client = stored.client()
        for data in mine:
            if stored.has_handled(SERVER, data):
                assert client.receive(SERVER, data) == []
        assert client.snapshot() == stored.snapshot


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("contribution", [Reveal(tables={}), Input()], ids=["Reveal", "Input"])
def test_a_contribution_that_is_not_due_is_the_callers_mistake(state, contribution):
    for stored in clients_in(state):
        client = stored.client()
        with pytest.raises(MisuseError):
            client.submit(contribution)
        assert client.snapshot() == stored.snapshot


def test_a_due_message_takes_a_client_along_the_table():
    """The pairs that are in the table: some recorded message moves some client on."""
    taken = set()
    for (state, kind), _ in client_side.STEPS.items():
        for stored in clients_in(state):
            for _, to, name, data in stored.kept.messages:
                if to == stored.me and name == kind.__name__:
                    client = stored.client()
                    try:
                        client.receive(SERVER, data)
                    except ServerFault:  # of another stage, or a lie
                        assert client.phase == "Left"
                        continue
                    if client.phase != state.__name__:
                        taken.add((state, kind))
    assert taken == {step for step in client_side.STEPS if step[1] in FROM_SERVER}


# -- the server


def text_of(error: BaseException | None) -> str:
    """An error's words, and those of what it came from."""
    return "" if error is None else f"{error} | {text_of(error.__cause__)}"


def assert_refused(stored: Stored, server: Server, sender: ClientId, data: bytes) -> PeerError:
    with pytest.raises(PeerError) as caught:
        server.receive(sender, data)
    assert server.snapshot() == stored.snapshot
    error = caught.value
    told = stored.kept.cohort.params.round_id, server.phase, sender
    assert (error.round_id, error.phase, error.peer) == told
    start = f"round {told[0]}, {told[1]}: client {sender} "
    assert str(error) == start + error.reason and len(error.reason) > 5
    return error


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_message_that_is_not_due_is_refused_and_changes_nothing(phase):
    for kind in wire.records().values():
        if (phase, kind) in server_side.STEPS:
            continue
        stored = servers_in(phase)[len(kind.__name__) % len(servers_in(phase))]
        server = stored.server()
        round_id = stored.kept.cohort.params.round_id
        for data in some_of(kind):
            for sender in (*stored.kept.cohort.clients[:2], STRANGER):
                if not stored.has_handled(sender, data):
                    assert_refused(stored, server, sender, data)
                if kind in FROM_CLIENT:
                    # In the right round and in its sender's own name: still not due.
                    own = wire.encode(replace(wire.decode(data), sender=sender, round_id=round_id))
                    if stored.has_handled(sender, own):
                        assert server.receive(sender, own) == []
                        assert server.snapshot() == stored.snapshot
                        continue
                    error = assert_refused(stored, server, sender, own)
                    due = "is not in this cohort" if sender == STRANGER else "which is not due"
                    assert due in error.reason


def test_a_due_message_is_taken_once_and_from_those_who_were_asked():
    taken = set()
    for phase, kind in server_side.STEPS:
        for stored in servers_in(phase):
            server = stored.server()
            for sender, _, name, data in stored.kept.messages:
                if name != kind.__name__ or sender not in server.expected:
                    continue
                at = getattr(server.state, "at", None)
                if at is not None and wire.decode(data).stage != at.stage:
                    if not stored.has_handled(sender, data):
                        assert_refused(stored, server, sender, data)
                    continue
                server.receive(sender, data)
                taken.add((phase, kind))
                after = server.snapshot()
                assert server.receive(sender, data) == []
                assert server.snapshot() == after and sender not in server.expected
                stored = replace(stored, snapshot=after)
    assert taken == set(server_side.STEPS)


def sentinelled(value: Any) -> Any:
    """The same record with every run of bytes replaced by one that would be recognised."""
    if isinstance(value, bytes):
        return (SENTINEL * (len(value) // 8 + 1))[: len(value)]
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: sentinelled(getattr(value, f.name)) for f in fields(value)}
        return replace(value, **changed)
    if isinstance(value, tuple):
        return tuple(map(sentinelled, value))
    if isinstance(value, dict):
        return {key: sentinelled(inner) for key, inner in value.items()}
    return value


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_refusal_names_round_phase_and_peer_and_never_repeats_the_payload(phase):
    revealing = (SENTINEL.decode(), SENTINEL.hex(), str(list(SENTINEL))[1:-1])
    refusals = 0
    for stored in servers_in(phase)[:3]:
        server, round_id = stored.server(), stored.kept.cohort.params.round_id
        sender = next(iter(sorted(server.expected)), stored.kept.cohort.clients[0])
        for kind in FROM_CLIENT:
            message = replace(wire.decode(some_of(kind)[0]), sender=sender, round_id=round_id)
            whole = wire.encode(sentinelled(message))
            for data in (whole, whole[:-9], whole + SENTINEL, SENTINEL * 9, whole[:3] + SENTINEL):
                try:
                    stored.server().receive(sender, data)
                except PeerError:
                    text = text_of(assert_refused(stored, server, sender, data))
                    assert not any(sign in text for sign in revealing)
                    refusals += 1
    assert refusals > 25


# -- anything, at any time


class Anything:
    """Random messages: real ones, those with a few changed bits under a right checksum, noise."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pick(self, some: Any) -> Any:
        return some[int(self.rng.integers(len(some)))]

    def message(self, kinds: tuple[type[Any], ...], kept: recording.Recording) -> bytes:
        """One of these kinds, every other time from this very round."""
        data = bytearray(self.pick(examples()[self.pick(kinds)]))
        if self.rng.integers(2):
            names = {kind.__name__ for kind in kinds}
            data = bytearray(self.pick([m[3] for m in kept.messages if m[2] in names]))
        choice = self.rng.integers(4)
        if choice == 0:
            return bytes(data)
        if choice == 1:
            return self.rng.bytes(int(self.rng.integers(64)))
        for _ in range(self.rng.integers(1, 3)):
            data[int(self.rng.integers(3, len(data) - 8))] ^= 1 << int(self.rng.integers(8))
        return recording.checksummed(data[:-8])


def test_any_message_in_any_state_is_a_step_or_the_end_for_a_client():
    anything, steps, faults = Anything(5), 0, 0
    for _ in range(3000):
        state = anything.pick(STATES)
        stored = anything.pick(clients_in(state))
        client, data = stored.client(), anything.message(FROM_SERVER, stored.kept)
        try:
            client.receive(SERVER, data)
        except ServerFault as fault:
            faults += 1
            assert client.phase == "Left" and client.state.reason == fault.reason
            assert replace(stored, snapshot=client.snapshot()).client().phase == "Left"
        else:
            steps += 1
            assert replace(stored, snapshot=client.snapshot()).has_handled(SERVER, data)
            assert (state, type(wire.decode(data))) in client_side.STEPS or (
                client.snapshot() == stored.snapshot
            )
    assert steps > 100 and faults > 1000


def test_any_message_in_any_phase_is_taken_or_refused_by_a_server():
    anything, taken, refused = Anything(6), 0, 0
    for _ in range(3000):
        phase = anything.pick(PHASES)
        stored = anything.pick(servers_in(phase))
        server, data = stored.server(), anything.message(FROM_CLIENT, stored.kept)
        sender = anything.pick((*stored.kept.cohort.clients, STRANGER))
        if anything.rng.integers(8):
            sender = getattr(decoded_or_none(data), "sender", sender)
        waiting = server.expected
        try:
            server.receive(sender, data)
        except PeerError:
            refused += 1
            assert server.snapshot() == stored.snapshot
        else:
            if stored.has_handled(sender, data):
                assert server.snapshot() == stored.snapshot
                continue
            taken += 1
            assert (phase, type(wire.decode(data))) in server_side.STEPS
            assert server.expected == waiting - {sender}
    assert taken > 30 and refused > 1000


def decoded_or_none(data: bytes) -> Any:
    try:
        return wire.decode(data)
    except WireError:
        return None


@pytest.mark.parametrize(
    "key",
    [bytes(32), b"\x01" + bytes(31), b"\xff" * 32],
    ids=["zero", "order 1", "not reduced"],
)
def test_a_roster_with_a_key_that_is_no_point_makes_a_client_leave(key):
    stored = clients_in(client_side.Advertised)[0]
    roster = next(
        wire.decode(data)
        for _, to, kind, data in stored.kept.messages
        if to == stored.me and kind == Roster.__name__
    )
    *others, last = roster.members
    assert last.client != stored.me
    forged = replace(roster, members=(*others, replace(last, channel_key=key)))
    client = stored.client()
    with pytest.raises(ServerFault):
        client.receive(SERVER, wire.encode(forged))
    assert_left_for_good(client, stored)
