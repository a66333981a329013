"""The contract of roles, kept by a client and the server of a fixed group in training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

import contract
import group_training
from contract import CHECKS, Case, Tape
from tessera import wire
from tessera.errors import ServerFault
from tessera.ids import SERVER, Party
from tessera.protocols.machine import Left
from tessera.rounds.epochs.client import BetweenVisits, EpochClient, TrainingBase
from tessera.rounds.epochs.group import EpochWork
from tessera.rounds.epochs.server import EpochServer, ServingGroup


class Taped(group_training.Training):
    """Roles are recorded, each epoch by itself: what was said in another is another message."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        super().__init__(3)

    def begin(self, name: str, *parties: Party) -> None:
        for party in parties:
            role = self.server if party == SERVER else self.clients[party]
            tape = self.taped(f"training, {name}", party, getattr(role, "role", role))
            self.tapes.append(tape)
            if party == SERVER:
                self.server = tape
            else:
                self.clients[party] = tape

    def taped(self, name: str, party: Party, role: Any) -> Tape:
        own = self.server_setup if party == SERVER else self.setups[party]
        strange: list[Any] = [
            replace(own, group=group_training.group_of(self.plan, list(self.setups), number=99))
        ]
        strange += [each for each in self.setups.values() if party not in (SERVER, each.party)]

        def wake(setup: Any) -> Any:
            local = copy.deepcopy(getattr(setup, "local", None))

            def woken(snapshot: bytes, messages: Any) -> Any:
                given = setup
                if local is not None:
                    given = replace(setup, local=copy.deepcopy(local))
                return type(role).wake(snapshot, messages, given)

            return woken

        return Tape(f"{name}: {party}", role, lambda: wake(own), *map(wake, strange))


@lru_cache
def cases() -> tuple[Case, ...]:
    """Keys, a union and two updates; one that asks too early, one that asks again, a lie."""
    run = Taped()
    run.begin("keys", SERVER)
    run.join()
    run.begin("keys", *run.clients)
    first, second, third = run.setups
    for epoch in range(3):
        run.begin(f"epoch {epoch}", SERVER)
        for client in (second, first, third):
            run.begin(f"epoch {epoch}", client)
            sent = run.hear(client, run.ask(client))
            if epoch:
                assert not sent
                run.hear(client, run.ask(client))
                sent = run.train(client)
            assert run.hear(client, run.ask(client)) == sent  # the same bytes again
            run.say(client, sent)
            run.hear(client, run.ask(client))
        run.take()
    run.begin("fooled", SERVER, first)
    work = wire.decode(run.ask(first)[0].data, expect=(EpochWork,))
    lie = replace(work, record=replace(work.record, cutoff=7))
    with pytest.raises(ServerFault, match="other inputs"):
        run.clients[first].receive(SERVER, wire.encode(lie))
    return tuple(contract.known(tape.case for tape in run.tapes))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_the_recorded_epochs_have_both_roles_and_every_state_of_them():
    woken = [rest.woken() for case in cases() for rest in case.rests]
    seen = {(type(role), type(role.state)) for role in woken}
    states = {BetweenVisits, TrainingBase, Left}
    assert {state for role, state in seen if role is EpochClient} == states
    assert {state for role, state in seen if role is EpochServer} == {ServingGroup}
