"""One fixed group in training: its clients and its server as roles, stored and killed at will.

`Training` plays carrier for everybody: a role's snapshot is stored before what the role returned is
sent, and a killed role is woken from what was stored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from rounds.population import DENSE, derived, members, plan, specs, trainer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.machine import Outbound
from tessera.rounds.epochs.client import EpochClient, EpochClientSetup
from tessera.rounds.epochs.server import EpochServer, EpochServerSetup
from tessera.rounds.messages import RoundResult
from tessera.rounds.party import ServerModel

ENTROPY = ScriptedEntropy(b"group in training")


def grouped(size: int, **more: Any) -> Plan:
    return plan(cohort=size, groups={"size": size}, **more)


def group_of(settings: Plan, clients: Any, **changed: Any) -> FixedGroup:
    signers = identities(clients, ENTROPY, settings.federation)
    leaves = tuple(
        Leaf(federation=settings.federation, client=c, key=signers[c].directory[c], serial=int(c))
        for c in clients
    )
    made: dict[str, Any] = {
        "federation": settings.federation,
        "plan": settings.lasting_digest,
        "number": 3,
        "snapshot": 1,
        "snapshot_digest": b"s" * 32,
        "values": (b"1" * 32, b"2" * 32),
        "beacon": b"b" * 32,
        "leaves": leaves,
    }
    return FixedGroup(**{**made, **changed})


def empty_model(settings: Plan) -> ServerModel:
    return ServerModel(
        settings,
        dense=np.zeros(DENSE, dtype=np.float32),
        tables={name: LazyTable(spec) for name, spec in specs().items()},
        derived=derived(),
    )


class Training:
    """Everybody in one group, their disks, the model, and the numbers of visits."""

    def __init__(self, size: int = 3, settings: Plan | None = None) -> None:
        self.plan = settings or grouped(size)
        self.participants = members(size)
        self.group = group_of(self.plan, list(self.participants))
        self.model = empty_model(self.plan)
        signers = identities(self.participants, ENTROPY, self.plan.federation)
        self.setups = {
            c: EpochClientSetup(
                plan=self.plan,
                group=self.group,
                party=c,
                key=signers[c].key,
                local=each.local,
                entropy=ENTROPY,
            )
            for c, each in self.participants.items()
        }
        self.server_setup = EpochServerSetup(plan=self.plan, group=self.group, wait=60)
        self.server: Any = EpochServer(self.server_setup)
        self.clients: dict[ClientId, Any] = {}
        self.stored: dict[Any, tuple[bytes, Mapping[bytes, bytes]]] = {}
        self.visits, self.round = 0, 0
        self.store(SERVER)

    # --- disks ----------------------------------------------------------------------------------

    def store(self, party: Any) -> None:
        role = self.server if party == SERVER else self.clients[party]
        self.stored[party] = (role.snapshot(), dict(role.messages))

    def kill(self, party: Any) -> None:
        """What was not stored is gone."""
        if party == SERVER:
            self.server = EpochServer.wake(*self.stored[SERVER], self.server_setup)
        else:
            self.clients[party] = EpochClient.wake(*self.stored[party], self.setups[party])

    # --- messages -------------------------------------------------------------------------------

    def say(self, client: ClientId, out: list[Outbound]) -> list[Outbound]:
        """A client's messages to the server; the answers, once the server has stored."""
        answers: list[Outbound] = []
        for message in out:
            self.server.open_next(self.model, RoundId(self.round))
            answers += self.server.receive(client, message.data)
        self.store(SERVER)
        return answers

    def join(self) -> None:
        for client, setup in self.setups.items():
            self.clients[client], out = EpochClient.join(setup)
            self.store(client)
            self.say(client, out)

    def ask(self, client: ClientId) -> list[Outbound]:
        """The server's answer to a client that comes."""
        self.visits += 1
        return self.say(client, self.clients[client].fetch(self.visits))

    def hear(self, client: ClientId, answers: list[Outbound]) -> list[Outbound]:
        """What a client says to what it was answered, stored and not yet sent."""
        out = [o for a in answers for o in self.clients[client].receive(SERVER, a.data)]
        self.store(client)
        return out

    def train(self, client: ClientId) -> list[Outbound]:
        """A client's delivery, stored and not yet sent."""
        role = self.clients[client]
        assert role.pending is not None
        out = role.supply(trainer(client)(role.pending))
        self.store(client)
        return list(out)

    def visit(self, client: ClientId) -> None:
        """A client comes, and delivers if something is due."""
        self.say(client, self.hear(client, self.ask(client)))
        if self.clients[client].pending is not None:
            self.say(client, self.train(client))

    def take(self) -> RoundResult | None:
        """What the full epoch came to; an update is stepped into the model."""
        assert self.server.full
        result: RoundResult | None = self.server.take(self.model, ENTROPY.secret("noise"))
        if result is not None:
            self.model.step(result, RoundId(self.round))
            self.round += 1
        self.store(SERVER)
        return result

    def epoch(self, order: list[ClientId] | None = None) -> RoundResult | None:
        for client in order or list(self.setups):
            self.visit(client)
        return self.take()

    def held(self, client: ClientId) -> Any:
        """A copy of what a client has of its own."""
        return copy.deepcopy(self.setups[client].local)


def model_values(model: ServerModel) -> list[np.ndarray]:
    every = {n: np.arange(t.size, dtype=np.uint64) for n, t in model.tables.items()}
    return [model.dense, *(t.values(every[n]) for n, t in model.tables.items())]
