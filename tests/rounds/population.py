"""A small federation over synthetic rows, for the tests of rounds, audits and carriers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import Identity
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TableUpdate
from tessera.learning.tables.table import DerivedMap, LazyTable, TableSpec, Uniform
from tessera.plan import ModelPlan, Plan, PrivacyPlan, Scheme, SecurityPlan, TablePlan, UnionPlan
from tessera.privacy.index.period import MemoryPeriods
from tessera.protocols.secagg.params import SecAggParams
from tessera.protocols.secagg.server import SecAggServerSetup, Server
from tessera.rounds.client import ClientRound
from tessera.rounds.noise import noise_of
from tessera.rounds.party import LocalState
from tessera.rounds.root import simulated_coins
from tessera.simulation.epochs import federation_for
from tessera.simulation.federation import Federation
from tessera.simulation.subcohort import Participant, TrainingOutcome, one_by_one
from tessera.simulation.views import Views

GOODS, CATEGORIES, WIDTH, DENSE = 200, 12, 3, 5


def plan(scheme: str = "secure-submodel", *, cohort: int = 8, **more) -> Plan:
    security = more.pop("security", {})
    level = "cpp5" if security.get("threat") == "active" else "cpp4"  # others are refused
    level = "groups" if "groups" in more else level
    privacy = {"level": level, **more.pop("privacy", {})}
    union = {"max_rows": 40, **more.pop("union", {})}
    return Plan(
        scheme=Scheme(scheme),
        cohort=cohort,
        tables=(
            TablePlan(name="goods", rows=GOODS, width=WIDTH),
            TablePlan(name="categories", rows=CATEGORIES, width=2, derived_from="goods"),
        ),
        model=ModelPlan(dense=DENSE),
        privacy=PrivacyPlan(**privacy),
        union=UnionPlan(**union),
        security=SecurityPlan(**security),
        **more,
    )


def specs() -> dict[str, TableSpec]:
    return {
        "goods": TableSpec(name="goods", size=GOODS, width=WIDTH, initial=Uniform(0.1), seed=5),
        "categories": TableSpec(name="categories", size=CATEGORIES, width=2),
    }


def derived() -> dict[str, DerivedMap]:
    table = specs()
    mapping = np.arange(GOODS, dtype=np.uint64) % CATEGORIES
    return {"categories": DerivedMap(table["goods"], table["categories"], mapping)}


def holdings(clients: int, seed: int = 0, each: int = 20) -> dict[ClientId, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        ClientId(i): np.sort(rng.choice(GOODS, each, replace=False)).astype(np.uint64)
        for i in range(clients)
    }


def contribution(client: ClientId, name: str, ids: np.ndarray, width: int) -> TableUpdate:
    """A client's rows, synthetic, so that a test can compute them again: a delta and a count."""
    counts = 1 + (ids.astype(np.int64) + int(client)) % 3
    columns = np.arange(width)
    values = np.sin(ids[:, None].astype(float) * 0.7 + columns + int(client) + len(name)) / 6
    return TableUpdate(values, counts)


def trainer(client: ClientId) -> Callable[[Submodel], ModelUpdate]:
    def train(sub: Submodel) -> ModelUpdate:
        for name, ids in sub.trained.items():
            part = sub.tables[name]
            assert np.isin(ids, part.ids).all(), "trained rows were fetched"
        tables = {
            name: contribution(client, name, ids, 3 if name == "goods" else 2)
            for name, ids in sub.trained.items()
        }
        return ModelUpdate(np.full(DENSE, np.cos(int(client)) / 8), 2 + int(client) % 3, tables)

    return train


def members(clients: int, seed: int = 0, each: int = 20, **local) -> dict[ClientId, Participant]:
    maps = derived()
    return {
        client: Participant(
            LocalState(real={"goods": rows}, periods=MemoryPeriods(), derived=maps, **local)
        )
        for client, rows in holdings(clients, seed, each).items()
    }


def federation(
    settings: Plan,
    *,
    clients: int = 0,
    seed: int = 0,
    each: int = 20,
    views: Views | None = None,
    entropy_seed: bytes = b"population",
    faults=None,
) -> Federation:
    participants = members(clients or settings.cohort, seed, each)
    entropy = ScriptedEntropy(entropy_seed)
    plain = one_by_one({client: trainer(client) for client in participants})

    def trained(round_id: RoundId, submodels: Mapping[ClientId, Submodel]) -> TrainingOutcome:
        """As its [dp] says."""
        outcome = plain(round_id, submodels)
        for client, update in outcome.updates.items():
            coins = simulated_coins(entropy, settings, round_id, client)
            outcome.updates[client] = noise_of(settings).contribution(update, coins)
        return outcome

    return federation_for(settings)(
        settings,
        participants,
        trainer=plain if settings.dp is None else trained,
        noisy=settings.dp is not None,
        dense=np.zeros(DENSE, dtype=np.float32),
        tables={name: LazyTable(spec) for name, spec in specs().items()},
        derived=derived(),
        entropy=entropy,
        views=views,
        faults=faults,
    )


def sum_union(
    clients: Mapping[ClientId, ClientRound],
    params: SecAggParams,
    identity: Identity | None = None,
) -> None:
    """Start these clients and carry their sum until all have done their part of the union's."""
    setup = SecAggServerSetup(params, clients, identity=identity)
    server = Server(setup, entropy=ScriptedEntropy(b"the union's server"))
    outbox = {c: client.start() for c, client in clients.items()}
    while {client.phase for client in clients.values()} - {"Resting", "Finished"}:
        for c, out in outbox.items():
            for message in out:
                server.receive(c, message.data)
        outbox = {c: [] for c in clients}
        for message in server.close_phase():
            outbox[message.to] += clients[message.to].receive(SERVER, message.data)
