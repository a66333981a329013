"""Every role of `protocols/`, in every setting and with dropouts, against the one contract."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import contract
import harness
import two_servers
import waiting_group
from contract import CHECKS, Case, Tape
from tessera import wire
from tessera.crypto.ring import Ring
from tessera.errors import PeerError, RoundAborted, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId, TableId
from tessera.protocols.epochs.member import GroupMember
from tessera.protocols.epochs.server import GroupServer
from tessera.protocols.machine import Aborted, Left, Outbound
from tessera.protocols.plain import (
    NamingRows,
    PlainClient,
    PlainClientSetup,
    PlainRows,
    PlainServer,
    PlainServerSetup,
)
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.params import GraphKind, Threat
from tessera.protocols.secagg.server import SecAggServerSetup, Server
from tessera.protocols.secagg.standalone import Contributor
from tessera.protocols.secagg.states import Reveal
from tessera.protocols.two_server.handshake import (
    PHASE,
    AwaitingOffer,
    HelperHandshake,
    LeaderHandshake,
)
from tessera.protocols.two_server.params import Read
from tessera.protocols.two_server.read.client import RetrievalClient
from tessera.protocols.two_server.read.server import RetrievalHelper, RetrievalLeader
from tessera.protocols.two_server.write.client import WriteClient
from tessera.protocols.two_server.write.helper import WriteHelper
from tessera.protocols.two_server.write.leader import WriteLeader
from tessera.simulation.faults import Drop, Fault, Lie
from tessera.simulation.simulator import Simulator
from tessera.wire import stored

OTHER_PLAN = bytes(32)
ROLES = (
    Client,
    Server,
    PlainClient,
    PlainServer,
    LeaderHandshake,
    HelperHandshake,
    RetrievalClient,
    RetrievalLeader,
    RetrievalHelper,
    WriteClient,
    WriteLeader,
    WriteHelper,
    GroupMember,
    GroupServer,
)
WITH_HEADER = (RetrievalLeader, RetrievalHelper, WriteLeader, WriteHelper)


# --- secure sums ----------------------------------------------------------------------------------


class Stages(Tape):
    """A server whose stages follow each other, each in a call of its own."""

    def close_phase(self) -> Any:
        out = self._taped("close_phase", self.role.close_phase)()
        if self.role.phase == "between":
            return [*out, *self._taped("begin_stage", self.role.begin_stage)()]
        return out


def secure_round(name: str, cohort: harness.Cohort, faults: list[Fault]) -> list[Case]:
    params, clients = cohort.params, cohort.clients
    strange = (replace(params, round_id=RoundId(99)), replace(params, plan_hash=OTHER_PLAN))

    def client_wake(who: ClientId, settings=params):
        setup = SecAggClientSetup(settings, who, identity=cohort.identity(who))
        return lambda s, m: Client.wake(s, m, setup)

    def server_wake(settings=params):
        identity = cohort.identity(clients[0])
        setup = SecAggServerSetup(settings, clients, identity=identity)
        return lambda s, m: Server.wake(s, m, setup)

    tapes, members, first = [], {}, {}
    for who, neighbour in zip(clients, [*clients[1:], clients[0]], strict=True):
        joined, first[who] = cohort.join(who)
        tape = Tape(
            f"{name}: client {who}",
            joined.client,
            lambda who=who: client_wake(who),
            *(client_wake(who, other) for other in strange),
            client_wake(neighbour),
        )
        tapes.append(tape)
        members[who] = Contributor(tape, cohort.inputs[who])
    server = Stages(
        f"{name}: server",
        Server(cohort.server_setup(), entropy=harness.ScriptedEntropy(cohort.seed)),
        server_wake,
        *(server_wake(other) for other in strange),
    )
    Simulator(server, members, first, faults=faults).run()
    return [tape.case for tape in (*tapes, server)]


def secure_rounds() -> Iterator[Case]:
    def cohort(settings, seed: int) -> harness.Cohort:
        return harness.Cohort.of(settings, seed=seed, universe=6)

    rows, dense = harness.row_stage(Ring(32), 2, dense=3, tables=(0, 7)), harness.dense_stage()
    complete = cohort(harness.params(4, dense, rows), 1)
    yield from secure_round("complete", complete, [Drop(complete.clients[0], "collect")])
    active = cohort(harness.params(4, rows, dense, threat=Threat.ACTIVE, corrupt=1), 2)
    yield from secure_round("active", active, [Drop(active.clients[0], "unmask", after=True)])
    sparse = cohort(harness.params(8, graph=GraphKind.SPARSE, degree=4, threshold=3), 3)
    yield from secure_round("sparse", sparse, [Drop(sparse.clients[2], "share")])
    strict = cohort(harness.params(5, rows, strict_quorum=True), 4)
    yield from secure_round("strict quorum", strict, [Drop(strict.clients[1], "collect")])
    aborted = cohort(harness.params(3), 5)
    yield from secure_round("aborted", aborted, [Drop(aborted.clients[0], "collect")])
    fooled = cohort(harness.params(4), 6)
    lie = Lie(fooled.clients[0], "SurvivorList", without=fooled.clients[0])
    yield from secure_round("fooled", fooled, [lie])


# --- plain sums -----------------------------------------------------------------------------------


def plain_round() -> Iterator[Case]:
    """Three clients name rows and two of them send words."""
    spec, round_id = harness.row_stage(dense=2), RoundId(3)
    who = [ClientId(c) for c in (4, 9, 11)]

    def client_wake(me: ClientId, number: RoundId = round_id, width: int = 3):
        settings = harness.row_stage(dense=2, width=width)
        return lambda s, m: PlainClient.wake(s, m, PlainClientSetup(settings, number, me))

    def server_wake(number: RoundId = round_id, width: int = 3):
        settings = harness.row_stage(dense=2, width=width)
        setup = PlainServerSetup(settings, number, who, needed=2)
        return lambda s, m: PlainServer.wake(s, m, setup)

    server = Tape(
        "plain: server",
        PlainServer(PlainServerSetup(spec, round_id, who, needed=2)),
        server_wake,
        server_wake(RoundId(4)),
        server_wake(width=4),
    )
    clients = [
        Tape(
            f"plain: client {c}",
            PlainClient(PlainClientSetup(spec, round_id, c)),
            lambda c=c: client_wake(c),
            client_wake(c, RoundId(4)),
            client_wake(c, width=4),
            client_wake(ClientId(c + 1)),
        )
        for c in who
    ]
    for at, client in enumerate(clients):
        rows = np.arange(at, at + 2, dtype=np.uint64)
        server.receive(who[at], client.submit(Reveal(tables={TableId(0): rows}))[0].data)
    server.close_phase()
    for at, client in enumerate(clients[:2]):
        words = {TableId(0): spec.group.zeros((2, 3)) + np.uint32(at)}
        given = Input(dense=spec.group.zeros(2), tables=words)
        server.receive(who[at], client.submit(given)[0].data)
    server.close_phase()
    assert server.phase == "done"
    yield from (tape.case for tape in (server, *clients))


# --- two servers ----------------------------------------------------------------------------------


class Roles(dict[Party, Any]):
    """The roles of a network, recorded as they are put in."""

    def __init__(self, network: two_servers.Network, name: str) -> None:
        self.network, self.name, self.tapes = network, name, []

    def __setitem__(self, party: Party, role: Any) -> None:
        network = self.network

        header = getattr(role, "header", None) if party in (SERVER, HELPER) else None

        def wake_in(other: two_servers.Network, guard: Any = None):
            """`guard` is as the role left it: ids that it has used up are used up."""
            made = copy.copy(role)
            if isinstance(role, WITH_HEADER):
                context = other.params.context
                made.header = replace(header, round_id=other.params.round_id, context=context)
            setup = other.setup(party, made)

            def wake(snapshot: bytes, messages: Any) -> Any:
                given = setup
                if hasattr(setup, "replay_guard"):
                    unused = copy.deepcopy(guard or other.replay_guard)
                    given = replace(setup, replay_guard=unused)
                return type(role).wake(snapshot, messages, given)

            return wake

        strange = [copy.copy(network), copy.copy(network)]
        strange[0].params = replace(network.params, round_id=RoundId(99))
        strange[1].params = replace(network.params, plan_hash=OTHER_PLAN)
        tape = Tape(
            f"{self.name}: {type(role).__name__} of {party}",
            role,
            lambda: wake_in(network, copy.deepcopy(network.replay_guard)),
            *map(wake_in, strange),
        )
        self.tapes.append(tape)
        super().__setitem__(party, tape)


def two_server_round(name: str, *tables: Any, **more: Any) -> list[Case]:
    """Three clients fetch rows and two of them write; one of the reports does not unseal."""
    settings = two_servers.params(*tables, clients=4, **more)
    network = two_servers.Network.of(settings)
    network.roles = roles = Roles(network, name)
    header = network.handshake()
    assert header is not None
    network.reading(header)
    others = network.clients[1:]
    wanted = {t.table: two_servers.ids(1, 2) for t in settings.tables if t.reads_points}
    network.read(dict.fromkeys(others, wanted))
    network.writing(header)
    spoiled = others[-1]

    def spoil(source: Party, message: Any) -> list[bytes]:
        decoded = wire.decode(message.data)
        if message.kind == "Forwarded" and decoded.sender == spoiled:
            return [wire.encode(replace(decoded, box=bytes(len(decoded.box))))]
        return [message.data]

    network.meddle = spoil
    rows = {t.table: two_servers.ids(1, 2)[: t.max_rows] for t in settings.written}
    small = {t: ids if t != 9 else two_servers.ids(0) for t, ids in rows.items()}
    network.write({c: two_servers.update(settings, small, c) for c in others})
    assert network.total is not None and network.refused
    return [tape.case for tape in roles.tapes]


def aborted_write() -> list[Case]:
    """The helper never answers."""
    network = two_servers.Network.of(two_servers.params(round_id=RoundId(13)))
    network.roles = roles = Roles(network, "silent helper")
    network.meddle = lambda source, message: [] if message.kind == "SumShare" else [message.data]
    network.writing(network.handshake())
    wanted = {TableId(0): two_servers.ids(3)}
    network.write({c: two_servers.update(network.params, wanted, c) for c in network.clients})
    with pytest.raises(RoundAborted, match="the helper has not answered"):
        network.roles[SERVER].close_phase()
    return [tape.case for tape in roles.tapes]


def round_with_hints() -> list[Case]:
    """The second round of a key period."""
    first = two_servers.Network.of(two_servers.params(round_id=RoundId(20), key_rounds=5))
    first.writing(first.handshake())
    wanted = {TableId(0): two_servers.ids(3)}
    first.write({c: two_servers.update(first.params, wanted, c) for c in first.clients})
    network = first.later()
    network.roles = roles = Roles(network, "hints")
    network.writing(network.handshake())
    network.write({c: two_servers.update(network.params, wanted, c) for c in network.clients})
    assert network.total is not None and network.roles[SERVER].header.epoch == 1
    return [tape.case for tape in roles.tapes]


# --- groups that wait -----------------------------------------------------------------------------


class TapedGroup(waiting_group.Waiting):
    """A group whose roles are recorded, each epoch by itself: what was said in another is not a
    repetition but a message of another epoch."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        super().__init__(waiting_group.fixed_group(3))

    def begin(self, name: str, *parties: Party) -> None:
        """New tapes for these from here on."""
        for party in parties:
            role = self.server if party == SERVER else self.members[party]
            tape = self.taped(f"groups, {name}", party, getattr(role, "role", role))
            self.tapes.append(tape)
            if party == SERVER:
                self.server = tape
            else:
                self.members[party] = tape

    def taped(self, name: str, party: Party, role: Any) -> Tape:
        own = self.server_setup if party == SERVER else self.setups[party]
        strange = [
            replace(own, group=waiting_group.fixed_group(3, **changed))
            for changed in ({"number": 99}, {"plan": OTHER_PLAN})
        ]
        strange += [each for each in self.setups.values() if party not in (SERVER, each.party)]

        def wake(setup: Any) -> Any:
            return lambda s, m: type(role).wake(s, m, setup)

        return Tape(f"{name}: {party}", role, lambda: wake(own), *map(wake, strange))


def waiting_rounds() -> list[Case]:
    """Keys and two epochs; a member that asks too early, one that asks again, and late copies."""
    run = TapedGroup()
    run.begin("keys", SERVER)
    run.join()
    run.begin("keys", *run.members)
    first, second, third = run.group.members
    for client in (first, first, third):
        run.fetch(client)
    for epoch in (1, 2):
        run.begin(f"epoch {epoch}", SERVER)
        run.fix(waiting_group.header(epoch, inputs={}))
        run.fix(waiting_group.header(epoch))
        for client in (second, first, third):
            run.begin(f"epoch {epoch}", client)
            run.fetch(client)
            run.fetch(client)
            sent = run.compute(client)
            assert run.fetch(client) == sent
            run.say(client, sent)
            run.fetch(client)
        assert run.server.opened is not None
        with pytest.raises(PeerError):
            run.say(first, [replace(sent[0], data=run.members[second].resend()[0].data)])
    run.begin("fooled", SERVER, first)
    run.fix(waiting_group.header(3))
    answer = wire.decode(run.ask(first)[0].data)
    short = replace(answer.certificate, entries=answer.certificate.entries[:2])
    with pytest.raises(ServerFault):
        run.members[first].receive(SERVER, wire.encode(replace(answer, certificate=short)))
    return [tape.case for tape in run.tapes]


@lru_cache
def cases() -> tuple[Case, ...]:
    made = [
        *secure_rounds(),
        *plain_round(),
        *two_server_round(
            "checked", two_servers.table(), two_servers.small_table(), dense=2, dense_bytes=3
        ),
        *two_server_round("unchecked", two_servers.table(read=Read.POINTS)),
        *aborted_write(),
        *round_with_hints(),
        *waiting_rounds(),
    ]
    return tuple(contract.known(made))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_no_role_of_the_protocols_is_left_out():
    assert contract.roles_in("tessera.protocols") == set(ROLES)


def test_the_recorded_rounds_have_every_role_and_every_state_of_it():
    seen: dict[type[Any], set[type[Any]]] = {}
    for case in cases():
        for rest in case.rests:
            role = rest.woken()
            seen.setdefault(type(role), set()).add(type(role.state))
    assert seen.keys() == set(ROLES)
    missing = {kind.__name__: set(kind.STATES) - seen[kind] for kind in seen}
    assert {name: some for name, some in missing.items() if some - {Left, Aborted}} == {}


def test_a_leader_waits_for_the_helper_by_name():
    waiting = {
        role.phase
        for case in cases()
        for rest in case.rests
        if HELPER in (role := rest.woken()).expected
    }
    assert waiting == {PHASE, "answer", "check", "exclude", "open"}


# --- the suite is worth something: each promise broken once, in one role --------------------------


def of_role(name: str) -> list[Case]:
    return [case for case in cases() if name in case.name]


def assert_noticed(check: Callable[[Case], None], role: str) -> None:
    """The check fails for some of these cases, and does so by an assertion or by a bare error."""
    noticed = 0
    for case in of_role(role):
        try:
            check(case)
        except (AssertionError, KeyError, pytest.fail.Exception):
            noticed += 1
    assert noticed, f"{check.__name__} did not notice"


def test_a_role_that_forgets_what_it_has_handled_is_noticed(monkeypatch):
    real = Server._resume

    def forgetful(self, *given):
        real(self, *given)
        self._handled.clear()

    monkeypatch.setattr(Server, "_resume", forgetful)
    assert_noticed(contract.woken_it_says_the_same_bytes, "server")


def test_a_role_that_draws_anew_when_woken_is_noticed(monkeypatch):
    real = HelperHandshake._resume

    def fresh(self, *given):
        real(self, *given)
        if isinstance(self.state, AwaitingOffer):
            self.state = AwaitingOffer(nonce=bytes(32))

    monkeypatch.setattr(HelperHandshake, "_resume", fresh)
    assert_noticed(contract.woken_it_says_the_same_bytes, "HelperHandshake")


def test_a_role_that_answers_a_repetition_anew_is_noticed(monkeypatch):
    monkeypatch.setattr(Client, "_repeated", lambda self, mark: [Outbound.again(SERVER, b"new")])
    assert_noticed(contract.a_repeated_message_changes_nothing, "client")


def test_a_role_that_takes_a_message_before_it_checks_it_is_noticed(monkeypatch):
    real = PlainServer._take_rows

    def hasty(self, state, kept):
        state.answers[kept.message.sender] = kept
        return real(self, state, kept)

    monkeypatch.setattr(PlainServer, "STEPS", {**PlainServer.STEPS, (NamingRows, PlainRows): hasty})
    assert_noticed(contract.a_refused_message_leaves_the_state_alone, "plain: server")


def test_a_role_that_trips_over_a_message_is_noticed(monkeypatch):
    def careless(self, sender, message):
        return self.state.answers[sender]

    monkeypatch.setattr(Server, "_check_due", careless)
    assert_noticed(contract.a_message_that_is_no_step_is_a_named_error, "server")


def test_a_role_that_takes_any_snapshot_is_noticed(monkeypatch):
    real = stored.unpacked

    def trusting(data, owner, states, context):
        return real(data, wire.decode(data, cap=1 << 36).owner, states, context)

    monkeypatch.setattr(stored, "unpacked", trusting)
    assert_noticed(contract.a_strange_snapshot_is_refused, "RetrievalHelper")


def test_a_snapshot_that_trips_its_reader_is_noticed(monkeypatch):
    def careless(self, source):
        kinds = {wire.tag_of(kind): kind for kind in self.kinds}
        return wire.Nested(kinds[wire.TAG.read(source)]).read(source)

    monkeypatch.setattr(wire.OneOf, "read", careless)
    assert_noticed(contract.a_changed_snapshot_is_a_named_error, "RetrievalClient")


def test_a_role_in_whose_state_the_order_shows_is_noticed(monkeypatch):
    real = Server._move

    def orderly(self, following, mark):
        real(self, following, mark)
        self._last = mark

    monkeypatch.setattr(Server, "_move", orderly)
    assert_noticed(contract.messages_of_a_phase_come_in_any_order, "server")


def test_a_role_that_keeps_its_secrets_is_noticed(monkeypatch):
    monkeypatch.setattr(Client, "over", lambda self, outcome, reason="": None)
    assert_noticed(contract.the_end_leaves_a_tombstone, "client")
    real = LeaderHandshake._end

    def clinging(self, state):
        kept = getattr(self.state, "nonce", bytes(32))
        real(self, state)
        self._handled = {kept[:16], kept[16:]}

    monkeypatch.setattr(LeaderHandshake, "_end", clinging)
    assert_noticed(contract.the_end_leaves_a_tombstone, "LeaderHandshake")
