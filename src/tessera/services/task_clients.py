"""Clients of a named task, as members of a deployment: their examples, their local rows, PyTorch.

A client's rows of tables that never leave it are in its journal (`JournalRows`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tessera import tasks
from tessera.crypto.entropy import Entropy
from tessera.crypto.secret import Secret
from tessera.data.negatives import draw_own
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.own_rows import first_rows
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Trainable
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.period import PeriodStore
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.local_state import LocalState
from tessera.runs.client_training import ClientTraining, learner_of, own_rows
from tessera.runs.noisy import with_subjects
from tessera.runs.training import complete
from tessera.services.bundle import Bundle
from tessera.services.client import MakeLocal, Train, TrainingResult
from tessera.services.deployment import ClientMaker
from tessera.services.journal import Journal
from tessera.services.journal_stores import JournalRows, own_secret
from tessera.services.link import name_of


def task_maker(bundle: Bundle, data: Path | None, entropy: Entropy) -> ClientMaker:
    """Clients of the bundle's task, one by one with the sequential trainer."""
    plan = bundle.plan
    task = tasks.load(plan.task.name, data=data, **plan.task.options)
    if complete(plan, task).digest != plan.digest:
        raise ConfigError(
            f"task {plan.task.name!r} is not the one that was packed",
            hint="is it the same data and the same tessera?",
        )
    task = cohorts_of(plan).task_of(task)
    module = task.build(plan.seed)
    bound = task.bind(module)
    task = with_subjects(task, bound, plan)
    training = plan.local_training
    learner = learner_of(plan, task, Trainable(module, bound, task.loss, training)).learner
    client_training = ClientTraining(plan, bound, training, learner)
    maps = bound.derived_maps()

    def make(journal: Journal, client: ClientId) -> tuple[MakeLocal, Train]:
        if not 0 <= int(client) < task.data.clients:
            raise ConfigError(
                f"client {client}: task {task.name!r} has {task.data.clients}",
                hint="clients count from 0",
            )
        name = name_of(client)
        secret = own_secret(journal, name, entropy, plan.federation, int(client))
        rows = JournalRows(journal, name)
        examples = draw_own(task.data, int(client), secret)
        real = own_rows(bound, examples, secret)
        names = tasks.own_names(
            task, plan.task.name, data=data, options=plan.task.options, client=int(client)
        )

        def local(periods: PeriodStore, ledger: Ledger) -> LocalState:
            return LocalState(
                real=real,
                periods=periods,
                ledger=ledger,
                derived=maps,
                counts=bound.counts_digest,
                candidates=bound.union_candidates,
                names=names,
                rows=rows,
            )

        def local_rows() -> dict[str, TablePart]:
            """As they were last trained in a round that counted, or as they begin."""
            found = {}
            for table, ids in bound.local_row_ids_of(examples).items():
                values = first_rows(bound, table, ids, secret)
                trained = rows.of(table, values.shape[1])
                kept = np.isin(trained.ids, ids)  # others are of examples that are gone
                values[np.searchsorted(ids, trained.ids[kept])] = trained.values[kept]
                found[table] = TablePart(ids, values)
            return found

        def train(round_id: RoundId, submodel: Submodel, coins: Secret) -> TrainingResult:
            own = local_rows()
            trained = client_training.alone(int(client), submodel, examples, own, coins, round_id)
            broken = trained.failed and f"round {round_id}: {trained.failed}"
            return TrainingResult(trained.update, trained.local, broken)

        return local, train

    return make
