"""A synthetic population: clients with random rows and random updates, for rounds without data.

Rows are drawn uniformly and updates are noise, both from the plan's seed and the client's id, so
that a client is the same in every process. Everything but the model is real: messages, bytes,
unions, answers and sums are those of the plan.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import SystemEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TableUpdate
from tessera.learning.tables.table import DerivedMap, LazyTable, Normal, StoredTable, TableSpec
from tessera.plan import Plan
from tessera.privacy.index.period import MemoryPeriods
from tessera.rounds import schemes
from tessera.rounds.party import LocalState
from tessera.simulation.subcohort import ClientTrainer, CohortTrainer, Participant, one_by_one

MOST_EXAMPLES = 5
"""The most examples that a synthetic client has for one row; the least is one."""


def participants(plan: Plan, clients: int, rows: int) -> dict[ClientId, Participant]:
    """Clients 0 .. clients - 1 with `rows` rows of every table that is not derived.

    Against an active server everybody has a signing key, and everybody knows the others'.
    """
    plan.check_population(clients, hint=f"use --clients {plan.cohort} or more, or a smaller cohort")
    everybody = [ClientId(client) for client in range(clients)]
    signers = schemes.of(plan).sum.signers(plan, everybody, SystemEntropy())
    maps = derived_maps(plan)
    return {
        client: Participant(
            LocalState(real=real_rows(plan, client, rows), periods=MemoryPeriods(), derived=maps),
            signers.get(client),
        )
        for client in everybody
    }


def real_rows(plan: Plan, client: ClientId, rows: int) -> dict[str, npt.NDArray[np.uint64]]:
    """The rows this client holds, by table; every row is as likely as any other."""
    if rows < 1:
        raise ConfigError(f"{rows} rows per client leave nothing to train", hint="use 1 or more")
    rng = np.random.default_rng([plan.seed, int(client), 1])
    found = {}
    for t in plan.roots:
        wanted = min(rows, t.rows)
        # `choice` permutes the whole table unless few rows of it are wanted
        drawn = rng.choice(t.rows, wanted, replace=False, shuffle=False)
        found[t.name] = np.sort(drawn).astype(np.uint64)
    return found


def cohort_trainer(plan: Plan, clients: int) -> CohortTrainer:
    """Every client by its own trainer."""
    return one_by_one({c: trainer(plan, c) for c in map(ClientId, range(clients))})


def trainer(plan: Plan, client: ClientId) -> ClientTrainer:
    """Noise for every row trained, and a few examples behind each; well within the clip."""
    scale = 0.1 * plan.quantizer.clip / MOST_EXAMPLES

    def train(submodel: Submodel) -> ModelUpdate:
        rng = np.random.default_rng([plan.seed, int(client), 2])
        tables = {
            name: TableUpdate(
                rng.normal(0.0, scale, (len(ids), plan.table(name).width)),
                rng.integers(1, MOST_EXAMPLES, len(ids), endpoint=True),
            )
            for name, ids in sorted(submodel.trained.items())
        }
        dense = rng.normal(0.0, scale, plan.model.dense)
        return ModelUpdate(dense, int(rng.integers(1, MOST_EXAMPLES, endpoint=True)), tables)

    return train


def tables(plan: Plan) -> dict[str, StoredTable]:
    """The model's tables before anybody trained them."""
    return {t.name: LazyTable(spec(plan, t.name)) for t in plan.tables}


def dense(plan: Plan) -> npt.NDArray[np.float32]:
    return np.zeros(plan.model.dense, dtype=np.float32)


def derived_maps(plan: Plan) -> dict[str, DerivedMap]:
    """Every derived table follows its parent by remainder: even, total, and of any size."""
    return {
        t.name: DerivedMap(
            spec(plan, t.derived_from),
            spec(plan, t.name),
            lambda ids, size=t.rows: ids % np.uint64(size),  # type: ignore[misc]
        )
        for t in plan.tables
        if t.derived_from
    }


def spec(plan: Plan, name: str) -> TableSpec:
    t = plan.table(name)
    return TableSpec(name=t.name, size=t.rows, width=t.width, initial=Normal(0.01), seed=plan.seed)
