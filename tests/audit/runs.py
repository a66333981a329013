"""Recorded runs to attack: small populations, every message by the real roles, scripted entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TableUpdate
from tessera.learning.tables.table import LazyTable, TableSpec
from tessera.plan import (
    CohortsPlan,
    GroupsPlan,
    ModelPlan,
    Plan,
    PrivacyPlan,
    Scheme,
    SecurityPlan,
    TablePlan,
    UnionPlan,
)
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.period import MemoryPeriods
from tessera.privacy.index.response import IndexPrivacy
from tessera.rounds.party import LocalState
from tessera.runs.folder import TRUTH, VIEWS, RunFolder
from tessera.runs.truth import write_truth
from tessera.simulation.epochs import federation_for
from tessera.simulation.faults import Drop, Fault, FaultScript
from tessera.simulation.subcohort import Participant, one_by_one
from tessera.simulation.views import StreamedViews

WIDTH = 3
Rows = np.ndarray


def plan_of(
    *,
    cohort: int = 6,
    rows: int = 200,
    security: SecurityPlan | None = None,
    seed: int = 0,
    scheme: Scheme = Scheme.SECURE_SUBMODEL,
    group: int = 0,
    cohorts: Mapping[str, object] | None = None,
    **privacy: object,
) -> Plan:
    chosen = {"level": "cpp3", "period_rounds": 10, **privacy}
    return Plan(
        scheme=scheme,
        cohort=cohort,
        seed=seed,
        tables=(TablePlan(name="goods", rows=rows, width=WIDTH),),
        model=ModelPlan(dense=0),
        privacy=PrivacyPlan(**chosen),  # type: ignore[arg-type]
        groups=GroupsPlan(size=group),
        cohorts=CohortsPlan(**(cohorts or {})),  # type: ignore[arg-type]
        union=UnionPlan(max_rows=rows),
        security=security or SecurityPlan(dropout=0.4),
    )


def train(submodel: Submodel) -> ModelUpdate:
    ids = submodel.trained["goods"]
    values = TableUpdate(np.full((len(ids), WIDTH), 0.25), np.full(len(ids), 2))
    return ModelUpdate(np.zeros(0), 1, {"goods": values})


def train_of(client: int):
    """Training whose deltas point in a direction of the client's own, as factor models' do."""
    towards = np.random.default_rng([client, 3]).normal(size=WIDTH)
    towards /= np.abs(towards).max()

    def train(submodel: Submodel) -> ModelUpdate:
        ids = submodel.trained["goods"]
        much = 0.2 + 0.7 * np.random.default_rng([client, 4]).random(len(ids))
        values = TableUpdate(much[:, None] * towards, np.full(len(ids), 1))
        return ModelUpdate(np.zeros(0), 1, {"goods": values})

    return train


def uniform_sets(plan: Plan, clients: int, each: int, seed: int) -> list[Rows]:
    rng = np.random.default_rng([seed, 7])
    domain = plan.table("goods").rows
    return [
        np.sort(rng.choice(domain, each, replace=False)).astype(np.uint64) for _ in range(clients)
    ]


def late_drops(share: float, seed: int, most: int) -> FaultScript:
    """Everybody, on its own, is gone after it has named its rows; at most `most` in a round."""

    def script(round_id: RoundId, cohort: Sequence[ClientId]) -> list[Fault]:
        rng = np.random.default_rng([seed, int(round_id), 5])
        gone = [c for c in cohort if rng.random() < share][:most]
        return [Drop(c, "collect", stage=1) for c in gone]

    return script


def record(
    folder: Path,
    plan: Plan,
    rounds: int,
    *,
    clients: int | None = None,
    each: int = 20,
    drops: float = 0.0,
    faults: FaultScript | None = None,
    chosen: IndexPrivacy | None = None,
    seed: int = 0,
    own_direction: bool = False,
    pool: bool = False,
    newcomers: Mapping[int, int] | None = None,
    moving: int = 0,
) -> Path:
    """A run's folder with the server's view and the truth; memory is that of one round.

    `newcomers` are numbers of clients that join before a round. `moving` rows of every client are
    others every `period_rounds` rounds; the truth has all that it ever held.
    """
    start = clients or 2 * plan.cohort
    everybody = start + sum((newcomers or {}).values())
    sets = uniform_sets(plan, everybody, each, seed)
    public = {"goods": np.arange(plan.table("goods").rows, dtype=np.uint64)} if pool else {}
    members = {
        ClientId(i): Participant(
            LocalState(real={"goods": real}, periods=MemoryPeriods(), privacy=chosen, pool=public)
        )
        for i, real in enumerate(sets)
    }
    ever = {c: set(m.local.real["goods"].tolist()) for c, m in members.items()}
    here = {c: m for c, m in members.items() if int(c) < start}
    log = RunFolder.create(folder, plan)
    if drops:
        faults = late_drops(drops, seed, plan.cohort - plan.secagg(RoundId(0)).min_survivors)
    trainers = {c: train_of(int(c)) if own_direction else train for c in members}
    with StreamedViews(folder / VIEWS, [SERVER]) as views:
        federation = federation_for(plan)(
            plan,
            here,
            dense=np.zeros(0, np.float32),
            tables={
                "goods": LazyTable(
                    TableSpec(name="goods", size=plan.table("goods").rows, width=WIDTH)
                )
            },
            trainer=one_by_one(trainers),
            entropy=ScriptedEntropy(b"audit %d" % seed),
            faults=faults,
            views=views,
        )
        for number in range(rounds):
            joined = (newcomers or {}).get(number, 0)
            if joined:
                known = len(federation.participants)
                later = map(ClientId, range(known, known + joined))
                federation.admit({c: members[c] for c in later})
            if moving and number and number % plan.privacy.period_rounds == 0:
                for c, member in members.items():
                    member.local.real = {"goods": moved(plan, member, int(c), number, moving)}
                    ever[c] |= set(member.local.real["goods"].tolist())
            for event in federation.round():
                log.append(event)
            for member in members.values():
                member.local.ledger = Ledger()  # what was spent is asked for elsewhere
    for c, member in members.items():
        member.local.real = {"goods": np.array(sorted(ever[c]), dtype=np.uint64)}
    write_truth(folder / TRUTH, members)
    return folder


def moved(plan: Plan, member: Participant, client: int, number: int, many: int) -> Rows:
    """The rows of a client, some of them exchanged for others."""
    rng = np.random.default_rng([client, number, 11])
    kept = rng.permutation(member.local.real["goods"])[many:]
    fresh = rng.choice(plan.table("goods").rows, many, replace=False).astype(np.uint64)
    return np.unique(np.concatenate([kept, fresh]))
