"""Federations between two servers, and their roles outside one, for the tests of their rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from rounds.population import DENSE, WIDTH, derived, plan, specs, sum_union
from tessera.crypto.entropy import Entropy, ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.ids import HELPER, SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TableUpdate
from tessera.learning.tables.table import LazyTable, TableSpec, Uniform
from tessera.plan import Plan, TablePlan, TwoServerPlan
from tessera.privacy.index.period import MemoryPeriods
from tessera.protocols.two_server.key_period import MemoryStore, OwnKeys
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.party import ClientRoundSetup, HelperRoundSetup, LocalState, ServerRoundSetup
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound
from tessera.simulation.federation import Federation
from tessera.simulation.subcohort import Participant, one_by_one
from tessera.simulation.two_server import TwoServerSetup
from tessera.simulation.views import Views

Break = Callable[[ModelUpdate], ModelUpdate | None]


def two_server_plan(way: Mapping[str, object] | None = None, **more) -> Plan:
    return plan("two-server", two_server=TwoServerPlan(**(way or {})), **more)


def model_of(fed: Federation) -> dict[str, bytes]:
    tables = {
        name: table.values(np.arange(table.size, dtype=np.uint64)).tobytes()
        for name, table in fed.tables.items()
    }
    return {"dense": fed.dense.tobytes(), **tables}


def finished(fed: Federation, rounds: int) -> list[RoundFinished | RoundAbort]:
    return [e for e in fed.run(rounds) if isinstance(e, RoundFinished | RoundAbort)]


SAME = (
    "survivors",
    "rows_opened",
    "weight",
    "union_rows",
    "rows_over_cap",
    "rows_exposed",
    "singleton_rows",
    "clipped",
    "epsilon",
    "condition",
)


def alike(ends: list[RoundFinished | RoundAbort]) -> list[tuple]:
    """What is the same of rounds that are run in another way: real or ideal, or after a restart."""
    return [
        (e.phase, e.answered, e.needed, e.reason)
        if isinstance(e, RoundAbort)
        else tuple(getattr(e, name) for name in SAME)
        for e in ends
    ]


def shop(
    settings: Plan,
    held: Mapping[int, list[int]],
    *,
    breaks: Mapping[ClientId, Break] = MappingProxyType({}),
    faults=None,
    views: Views | None = None,
    entropy: Entropy | None = None,
) -> Federation:
    """A federation over the plan's one table, in which everybody holds the given rows.

    Training `breaks` for some: what it is to give goes in, what it does instead comes out.
    """
    table = settings.tables[0]
    spec = TableSpec(
        name=table.name, size=table.rows, width=table.width, initial=Uniform(0.1), seed=5
    )

    def trainer(client: ClientId):
        def train(sub: Submodel) -> ModelUpdate:
            ids = sub.trained[table.name]
            values = np.sin(ids[:, None].astype(float) + int(client) + np.arange(table.width)) / 5
            rows = TableUpdate(values, 1 + (ids % 2).astype(int))
            update = ModelUpdate(np.full(settings.model.dense, 0.125), 1, {table.name: rows})
            return breaks[client](update) if client in breaks else update

        return train

    participants = {
        ClientId(c): Participant(
            LocalState(real={table.name: np.array(rows, dtype=np.uint64)}, periods=MemoryPeriods())
        )
        for c, rows in held.items()
    }
    return Federation(
        settings,
        participants,
        trainer=one_by_one({c: trainer(c) for c in participants}),
        dense=np.zeros(settings.model.dense, dtype=np.float32),
        tables={table.name: LazyTable(spec)},
        entropy=entropy or ScriptedEntropy(b"shop"),
        faults=faults,
        views=views,
    )


def one_table(scheme: str, rows: int, *, cohort: int = 4, max_rows: int = 40, **more) -> Plan:
    base = plan(scheme, cohort=cohort, union={"max_rows": max_rows}, **more)
    return replace(base, tables=(TablePlan(name="goods", rows=rows, width=WIDTH),))


FIRST, ROUND = ClientId(0), RoundId(0)


class Roles:
    """The three roles of one round, outside a federation."""

    def __init__(self, settings: Plan) -> None:
        entropy = ScriptedEntropy(b"roles")
        self.setup = TwoServerSetup.of(entropy, settings.federation)
        self.signers = identities(
            [ClientId(c) for c in range(settings.cohort)], entropy, settings.federation
        )
        self.settings, self.entropy = settings, entropy

    def model(self) -> dict:
        return {
            "dense": np.zeros(DENSE, dtype=np.float32),
            "tables": {name: LazyTable(spec) for name, spec in specs().items()},
            "derived": derived(),
        }

    def leader_setup(self, number: RoundId = ROUND, **own) -> ServerRoundSetup:
        """`own`: what differs of what the leader has for all rounds."""
        unused = {"row_tags": None, "key_store": None}
        return ServerRoundSetup(
            plan=self.settings,
            round_id=number,
            invited=self.signers,
            own=replace(self.setup.leader_party, **{**unused, **own}),
            identity=self.signers[FIRST],
            **self.model(),
        )

    def leader(self, number: RoundId = ROUND, **own) -> LeaderRound:
        return LeaderRound(self.leader_setup(number, **own))

    def helper_setup(
        self, number: RoundId = ROUND, model: dict | None = None, **own
    ) -> HelperRoundSetup:
        """The same of the helper."""
        unused = {"row_tags": None, "key_store": None}
        return HelperRoundSetup(
            plan=self.settings,
            round_id=number,
            own=replace(self.setup.helper_party, **{**unused, **own}),
            directory=self.signers[FIRST].directory,
            **{**self.model(), **(model or {})},
        )

    def helper(self, number: RoundId = ROUND, model: dict | None = None, **own) -> HelperRound:
        return HelperRound(self.helper_setup(number, model, **own))

    def client_setup(
        self,
        me: ClientId = FIRST,
        number: RoundId = ROUND,
        *,
        own_keys: MemoryStore[OwnKeys] | None = None,
        **changes,
    ) -> ClientRoundSetup:
        local = LocalState(
            real={"goods": np.array([1, 5], dtype=np.uint64)},
            periods=MemoryPeriods(),
            derived=derived(),
            own_keys=own_keys or MemoryStore(),
        )
        given = {"local": local, "identity": self.signers[me], **changes}
        return ClientRoundSetup(
            plan=self.settings,
            round_id=number,
            party=me,
            entropy=self.entropy,
            **{"servers": self.setup.servers, **given},
        )

    def client(
        self, me: ClientId = FIRST, number: RoundId = ROUND, **changes
    ) -> TwoServerClientRound:
        return TwoServerClientRound(self.client_setup(me, number, **changes))

    def summed_client(self) -> TwoServerClientRound:
        """Client 0, which has done its part of the union's sum and waits for the union."""
        clients = {c: self.client(c) for c in map(ClientId, range(self.settings.cohort))}
        sum_union(clients, self.settings.union_sum(RoundId(0)), self.signers[FIRST])
        return clients[FIRST]

    def opening(self, leader: LeaderRound, helper: HelperRound) -> bytes:
        """What the leader sends to client 0 once both servers have opened the round."""
        out, found = leader.start(), []
        while out:
            message = out.pop(0)
            if message.to == HELPER:
                for answer in helper.receive(SERVER, message.data):
                    out += leader.receive(HELPER, answer.data)
            elif message.to == ClientId(0):
                found.append(message.data)
        (data,) = found
        return data
