"""The contract of roles, kept by both roles of a round before one server, under every scheme."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import contract
from contract import CHECKS, Case, Tape, Wake
from rounds.population import DENSE, derived, holdings, plan, specs, trainer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.learning.tables.table import LazyTable
from tessera.plan import DPPlan, Plan, Trust, UpdatePlan
from tessera.privacy.index.period import MemoryPeriods
from tessera.protocols.machine import Left
from tessera.rounds.client import ClientRound, NotStarted, TrainedModel
from tessera.rounds.epochs.client import EpochClient
from tessera.rounds.epochs.server import EpochServer
from tessera.rounds.party import ClientRoundSetup, LocalState, ServerParty, ServerRoundSetup
from tessera.rounds.server import RoundStopped, ServerRound
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound
from tessera.simulation.faults import Drop, Fault, Lie
from tessera.simulation.simulator import Simulator
from tessera.simulation.subcohort import between_messages

COHORT, ROUND = 4, RoundId(1)
ENTROPY = ScriptedEntropy(b"contract of rounds")
SHARES = DPPlan(unit="user", noise=1.0, trust=Trust.SHARES)
FINE = UpdatePlan(levels=2**12)


class Roles:
    """What the roles of a round are made with, so that they can be made and woken."""

    def __init__(self, settings: Plan) -> None:
        self.settings = settings
        self.cohort = [ClientId(c) for c in range(settings.cohort)]
        self.signers = identities(self.cohort, ENTROPY, settings.federation)
        self.locals = {
            c: LocalState(real={"goods": rows}, periods=MemoryPeriods(), derived=derived())
            for c, rows in holdings(settings.cohort, each=6).items()
        }
        self.model = {
            "dense": np.zeros(DENSE, dtype=np.float32),
            "tables": {name: LazyTable(spec) for name, spec in specs().items()},
            "derived": derived(),
        }

    def server(self) -> ServerRound:
        return ServerRound(self.server_setup(self.settings, ROUND))

    def server_setup(self, settings: Plan, round_id: RoundId) -> ServerRoundSetup:
        return ServerRoundSetup(
            plan=settings,
            round_id=round_id,
            invited=self.cohort,
            own=ServerParty(entropy=ENTROPY),
            identity=self.signers[ClientId(0)],
            **self.model,
        )

    def client(self, me: ClientId) -> ClientRound:
        return ClientRound(self.client_setup(me, self.settings, ROUND))

    def client_setup(self, me: ClientId, settings: Plan, round_id: RoundId) -> ClientRoundSetup:
        return ClientRoundSetup(
            plan=settings,
            round_id=round_id,
            party=me,
            local=self.locals[me],
            entropy=ENTROPY,
            identity=self.signers[me],
        )

    def wake(self, party: Party, settings: Plan, round_id: RoundId) -> Wake:
        """What wakes a party of this plan and round, with what it remembers copied each time."""
        if party == SERVER:
            setup = self.server_setup(settings, round_id)
            return lambda snapshot, messages: ServerRound.wake(snapshot, messages, setup)
        assert not isinstance(party, str)
        held = copy.deepcopy(self.locals[party])
        given = self.client_setup(party, settings, round_id)
        return lambda snapshot, messages: ClientRound.wake(
            snapshot, messages, replace(given, local=copy.deepcopy(held))
        )

    def tape(self, name: str, party: Party, role: Any) -> Tape:
        other = replace(self.settings, seed=self.settings.seed + 1)
        foreign = [
            self.wake(party, self.settings, RoundId(9)),
            self.wake(party, other, ROUND),
        ]
        if party != SERVER:
            neighbour = self.cohort[(self.cohort.index(party) + 1) % len(self.cohort)]
            foreign.append(self.wake(neighbour, self.settings, ROUND))
        return Tape(
            f"{name}: {type(role).__name__} of {party}",
            role,
            lambda: self.wake(party, self.settings, ROUND),
            *foreign,
        )


def recorded(name: str, settings: Plan, faults: list[Fault]) -> list[Case]:
    roles = Roles(settings)
    made = {c: roles.client(c) for c in roles.cohort}
    first = {c: client.start() for c, client in made.items()}
    clients = {c: roles.tape(name, c, client) for c, client in made.items()}
    server = roles.tape(name, SERVER, roles.server())
    Simulator(
        server,
        clients,
        first,
        greeting=server.start(),
        faults=faults,
        work=between_messages(
            clients, lambda pending: {c: trainer(c)(sub) for c, sub in pending.items()}
        ),
    ).run()
    return [tape.case for tape in (*clients.values(), server)]


@lru_cache
def cases() -> tuple[Case, ...]:
    def of(scheme: str, **more: Any) -> Plan:
        dropout = {"dropout": 0.3, **more.pop("security", {})}
        return plan(scheme, cohort=COHORT, security=dropout, **more)

    gone = ClientId(2)
    active, strict = {"threat": "active"}, {"strict_quorum": True}
    fixed = {"size": COHORT}
    made = [
        *recorded("fedavg", of("fedavg"), [Drop(gone, "collect")]),
        *recorded("submodel", of("submodel"), [Drop(gone, "collect")]),
        *recorded("secure-fedavg", of("secure-fedavg"), [Drop(gone, "collect")]),
        *recorded("secure-submodel", of("secure-submodel"), [Drop(gone, "collect", stage=1)]),
        *recorded("active", of("secure-submodel", security=active), [Drop(gone, "unmask")]),
        *recorded("group", of("secure-submodel", groups=fixed).group_plan, []),
        *recorded("strict", of("secure-submodel", privacy=strict), [Drop(gone, "reveal")]),
        *recorded(
            "aborted",
            of("secure-submodel"),
            [Drop(ClientId(c), "collect", stage=1) for c in (0, 1, 2)],
        ),
        *recorded("noise", of("secure-fedavg", dp=SHARES, update=FINE), [Drop(gone, "collect")]),
        *recorded("fooled", of("secure-fedavg"), [Lie(gone, "SurvivorList", without=gone)]),
    ]
    return tuple(contract.known(made))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_no_role_of_the_rounds_is_left_out():
    """Others have recorded rounds of their own (`two_server/`, `epochs/`)."""
    others = {TwoServerClientRound, LeaderRound, HelperRound, EpochClient, EpochServer}
    assert contract.roles_in("tessera.rounds") == {ClientRound, ServerRound} | others


def test_the_recorded_rounds_have_both_roles_and_every_state_of_them():
    seen: dict[type[Any], set[type[Any]]] = {}
    for case in cases():
        for rest in case.rests:
            role = rest.woken()
            seen.setdefault(type(role), set()).add(type(role.state))
    assert seen.keys() == {ClientRound, ServerRound}
    assert set(ClientRound.STATES) - seen[ClientRound] == {NotStarted, TrainedModel}
    assert set(ServerRound.STATES) == seen[ServerRound]
    assert any(isinstance(r.woken().state, Left) for case in cases() for r in case.rests)
    assert any(isinstance(r.woken().state, RoundStopped) for case in cases() for r in case.rests)


@pytest.mark.parametrize("scheme", ["fedavg", "submodel", "secure-fedavg", "secure-submodel"])
def test_before_it_has_begun_a_client_wakes_too(scheme):
    roles = Roles(plan(scheme, cohort=COHORT))
    client = roles.client(ClientId(0))
    woken = roles.wake(ClientId(0), roles.settings, ROUND)(client.snapshot(), {})
    assert woken.snapshot() == client.snapshot() and woken.phase == "Invited"
    assert woken.start() == client.start() and woken.snapshot() == client.snapshot()


@pytest.mark.parametrize("scheme", ["secure-fedavg", "secure-submodel"])
def test_an_update_that_comes_before_the_sum_asks_for_it_is_kept_in_words(scheme):
    """The model overtakes the sum's own message on the way; training is done before that comes."""
    roles = Roles(plan(scheme, cohort=COHORT))
    clients = {c: roles.client(c) for c in roles.cohort}
    server = roles.server()
    sent = {c: client.start() for c, client in clients.items()}
    waited = 0
    while server.phase != "done":
        for c, out in sent.items():
            for message in out:
                server.receive(c, message.data)
        sent = {c: [] for c in clients}
        out = server.close_phase()
        for message in sorted(out, key=lambda message: message.kind != "Download"):
            client = clients[message.to]
            sent[message.to] += client.receive(SERVER, message.data)
            if client.pending is not None:
                sent[message.to] += client.supply(trainer(message.to)(client.pending))
            if isinstance(client.state, TrainedModel):
                waited += 1
                wake = roles.wake(message.to, roles.settings, ROUND)
                clients[message.to] = woken = wake(client.snapshot(), dict(client.messages))
                assert woken.snapshot() == client.snapshot() and woken.pending is None
    assert waited == COHORT and server.result.survivors == tuple(roles.cohort)


# --- the suite is worth something: promises broken once, in one role ------------------------------


def assert_noticed(check: Callable[[Case], None], role: str) -> None:
    noticed = 0
    for case in cases():
        if role in case.name:
            try:
                check(case)
            except (AssertionError, KeyError, pytest.fail.Exception):
                noticed += 1
    assert noticed, f"{check.__name__} did not notice"


def test_a_client_that_rounds_with_other_coins_is_noticed(monkeypatch):
    real = ClientRound._on_update
    count = iter(range(10_000))

    def other_coins(self, state, supplied):
        root = type(state.root)(state.root.secret(str(next(count))))
        return real(self, replace(state, root=root), supplied)

    monkeypatch.setattr(ClientRound, "_on_update", other_coins)
    assert_noticed(contract.woken_it_says_the_same_bytes, "ClientRound")


def test_a_server_that_forgets_the_union_is_noticed(monkeypatch):
    real = ServerRound._resume

    def forgetful(self, *given):
        real(self, *given)
        if getattr(self.state, "union", None) is not None:
            self.state = replace(self.state, union=None)

    monkeypatch.setattr(ServerRound, "_resume", forgetful)
    assert_noticed(contract.woken_it_says_the_same_bytes, "ServerRound")


def test_a_client_that_keeps_its_round_is_noticed(monkeypatch):
    monkeypatch.setattr(ClientRound, "over", lambda self, outcome, reason="": None)
    assert_noticed(contract.the_end_leaves_a_tombstone, "ClientRound")


def test_a_server_that_takes_a_snapshot_of_another_plan_is_noticed(monkeypatch):
    real = ServerRound._owned.__func__
    monkeypatch.setattr(
        ServerRound,
        "_owned",
        classmethod(lambda cls, party, round_id, params: real(cls, party, round_id, bytes(32))),
    )
    with pytest.raises(pytest.fail.Exception):
        for case in recorded("careless", plan("submodel", cohort=COHORT), []):
            contract.a_strange_snapshot_is_refused(case)
