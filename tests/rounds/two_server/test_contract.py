"""The contract of roles, kept by the three roles of a round between two servers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

import contract
from contract import CHECKS, Case, Tape, Wake
from rounds.population import trainer
from rounds.shops import Roles, two_server_plan
from tessera import wire
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.plan import DPPlan, Plan, Trust, UpdatePlan
from tessera.protocols.machine import Aborted, Left, Outbound
from tessera.protocols.two_server.key_period import MemoryStore
from tessera.rounds.party import LocalState
from tessera.rounds.two_server.client import NotJoined, TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound, NotBegun

COHORT = 4
GONE = ClientId(2)
FINISHED = {"done", "aborted"}
CUT = UpdatePlan(top=0.5, top_by="element")
NOISE = DPPlan(unit="user", noise=1.0, trust=Trust.EACH)
FINE = UpdatePlan(levels=2**12)


class Stores:
    """What a key period leaves with everybody; empty, and unused, where keys last one round."""

    def __init__(self, parties: Iterable[Party]) -> None:
        self.of: dict[Party, MemoryStore[Any]] = {party: MemoryStore() for party in parties}

    def copied(self, party: Party) -> MemoryStore[Any]:
        """As it is now: a role that is woken must not find what came later."""
        return copy.copy(self.of[party])


def wake_in(
    roles: Roles,
    settings: Plan,
    round_id: RoundId,
    party: Party,
    local: Any,
    stores: Stores | None = None,
) -> Wake:
    """What wakes a party of this plan and round, with what it remembers copied each time."""
    store = (stores or Stores([party])).copied(party)
    if party == SERVER:
        leader = replace(roles.leader_setup(round_id), plan=settings)
        return lambda snapshot, messages: LeaderRound.wake(
            snapshot,
            messages,
            replace(leader, own=replace(leader.own, key_store=copy.copy(store))),
        )
    if party == HELPER:
        helper = replace(roles.helper_setup(round_id), plan=settings)
        guard = copy.deepcopy(helper.own.replay_guard)
        return lambda snapshot, messages: HelperRound.wake(
            snapshot,
            messages,
            replace(
                helper,
                own=replace(
                    helper.own, replay_guard=copy.deepcopy(guard), key_store=copy.copy(store)
                ),
            ),
        )
    assert not isinstance(party, str)
    held: LocalState = copy.deepcopy(local)
    return lambda snapshot, messages: TwoServerClientRound.wake(
        snapshot,
        messages,
        replace(
            roles.client_setup(
                party,
                round_id,
                local=replace(copy.deepcopy(held), own_keys=copy.copy(store)),
            ),
            plan=settings,
        ),
    )


def recorded(
    name: str,
    settings: Plan,
    *,
    meddle: Callable[[Party, Outbound], list[bytes]] | None = None,
    rounds: int = 1,
) -> list[Case]:
    """Rounds in which one client fetches rows and does not report; the last one is looked at."""
    roles = Roles(settings)
    stores = Stores([SERVER, HELPER, *roles.signers])
    cases: list[Case] = []
    for number in range(rounds):
        cases = recorded_round(name, roles, RoundId(number), stores, meddle)
    return cases


def recorded_round(
    name: str,
    roles: Roles,
    number: RoundId,
    stores: Stores,
    meddle: Callable[[Party, Outbound], list[bytes]] | None,
) -> list[Case]:
    settings = roles.settings
    made: dict[Party, Any] = {
        SERVER: roles.leader(number, key_store=stores.of[SERVER]),
        HELPER: roles.helper(number, key_store=stores.of[HELPER]),
        **{c: roles.client(c, number, own_keys=stores.of[c]) for c in roles.signers},
    }
    first = {c: made[c].start() for c in roles.signers}

    def tape(party: Party) -> Tape:
        local = getattr(made[party], "_local", None)
        return Tape(
            f"{name}: {type(made[party]).__name__} of {party}",
            made[party],
            lambda: wake_in(roles, settings, number, party, local, stores),
            wake_in(roles, settings, RoundId(7), party, local),
            wake_in(roles, replace(settings, seed=settings.seed + 1), number, party, local),
        )

    tapes = {party: tape(party) for party in made if party != SERVER}
    greeting: list[Outbound] = []
    if settings.narrows:
        tapes[SERVER] = tape(SERVER)
    else:  # before it begins it takes no message at all
        greeting = made[SERVER].start()
        tapes[SERVER] = tape(SERVER)
    gone: set[Party] = set()

    def carry(sender: Party, out: list[Outbound]) -> None:
        waiting = [(sender, message) for message in out]
        while waiting:
            source, message = waiting.pop(0)
            if source in gone or message.to in gone:
                continue
            for data in [message.data] if meddle is None else meddle(source, message):
                try:
                    answers = tapes[message.to].receive(source, data)
                except contract.PeerError:
                    continue
                waiting += [(message.to, answer) for answer in answers]

    for c, out in first.items():
        carry(c, out)
    carry(SERVER, greeting)
    while tapes[SERVER].phase not in FINISHED:
        for c in sorted(roles.signers):
            if tapes[c].pending is not None:
                update = trainer(c)(tapes[c].pending)
                gone |= {c} & {GONE}
                carry(c, tapes[c].supply(update))
        try:
            out = tapes[SERVER].close_phase()
        except contract.RoundAborted:
            break
        carry(SERVER, out)
    return [tape.case for tape in tapes.values()]


def spoiled(source: Party, message: Outbound) -> list[bytes]:
    """A report of client 1 that the helper cannot unseal."""
    if message.kind == "Forwarded":
        found = wire.decode(message.data)
        if found.sender == ClientId(1) and found.purpose.value == "write":
            return [wire.encode(replace(found, box=bytes(len(found.box))))]
    return [message.data]


def silent(source: Party, message: Outbound) -> list[bytes]:
    """The helper's share is lost."""
    return [] if message.kind == "SumShare" else [message.data]


def one_of_each(cases: list[Case]) -> list[Case]:
    """Both servers and a client."""
    return [case for case in cases if case.name.endswith(("server", "helper", " 0"))]


@lru_cache
def cases() -> tuple[Case, ...]:
    def plan(**way: Any) -> Plan:
        two = {"write": "dpf", "min_cohort": 2, **way}
        security = {"dropout": 0.4}  # one of three may be excluded
        return two_server_plan(two, cohort=COHORT, union={"max_rows": 5}, security=security)

    made = [
        *recorded("whole", plan(domain="whole"), meddle=spoiled),
        *recorded("union", plan(domain="union")),
        *recorded("aborted", plan(domain="whole"), meddle=silent),
        *one_of_each(recorded("hints", plan(domain="whole", key_rounds=3), rounds=2)),
        *one_of_each(recorded("cuts", replace(plan(domain="whole"), update=CUT))),
        *one_of_each(recorded("noise", replace(plan(domain="whole"), dp=NOISE, update=FINE))),
    ]
    return tuple(contract.known(made))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_the_recorded_rounds_have_every_role_and_every_state_of_it():
    seen: dict[type[Any], set[type[Any]]] = {}
    for case in cases():
        for rest in case.rests:
            role = rest.woken()
            seen.setdefault(type(role), set()).add(type(role.state))
    assert seen.keys() == {TwoServerClientRound, LeaderRound, HelperRound}
    for kind, states in seen.items():
        assert set(kind.STATES) - states <= {Left, Aborted, NotJoined, NotBegun}, kind


@pytest.mark.parametrize("domain", ["whole", "union"])
def test_before_it_has_begun_a_role_wakes_too(domain):
    roles = Roles(two_server_plan({"domain": domain}, cohort=COHORT))
    for party, role in ((ClientId(0), roles.client()), (SERVER, roles.leader())):
        wake = wake_in(roles, roles.settings, RoundId(0), party, getattr(role, "_local", None))
        woken = wake(role.snapshot(), dict(role.messages))
        assert woken.snapshot() == role.snapshot()
        assert woken.start() == role.start() and woken.snapshot() == role.snapshot()


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


def test_a_client_that_seals_its_query_anew_is_noticed(monkeypatch):
    monkeypatch.setattr(TwoServerClientRound, "resend", lambda self: [])
    assert_noticed(contract.woken_it_says_the_same_bytes, "TwoServerClientRound")


def test_a_helper_that_forgets_its_answers_is_noticed(monkeypatch):
    real = HelperRound._resume

    def forgetful(self, *given):
        real(self, *given)
        if hasattr(self.state, "retrieval"):
            self.state.retrieval._handled.clear()

    monkeypatch.setattr(HelperRound, "_resume", forgetful)
    assert_noticed(contract.woken_it_says_the_same_bytes, "HelperRound")


def test_a_leader_that_keeps_its_roles_is_noticed(monkeypatch):
    monkeypatch.setattr(LeaderRound, "over", lambda self, outcome, reason="": None)
    assert_noticed(contract.the_end_leaves_a_tombstone, "LeaderRound")
