"""Clients of a named task, as members of a deployment: their examples, their local rows, PyTorch.

A client's rows of tables that never leave it are in its journal (`JournalRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tessera import tasks
from tessera.crypto.entropy import Entropy
from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, Examples, draw_own
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.own_rows import first_rows
from tessera.learning.tables.submodel import Ids, Submodel, TablePart
from tessera.learning.training.jobs import Trainable
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.period import PeriodStore
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.party import LocalState
from tessera.runs.client_training import ClientTraining, learner_of, own_rows, with_subjects
from tessera.runs.training import complete
from tessera.services.bundle import Bundle
from tessera.services.client import MakeLocal, Train, TrainingResult
from tessera.services.deployment import ClientMaker
from tessera.services.journal import Journal
from tessera.services.journal_stores import JournalExamples, JournalRows, own_secret
from tessera.services.link import name_of


class OwnExamples:
    """A client's examples: all that there are, and from its first period on those of the period.

    A period's are read when it begins, up to its cut-off, and stored: what comes later, or is found
    to be older later, is of the next period. Data without times are those of the first period for
    good. What cannot be read is left out: a client that stopped for it would show its data.
    """

    def __init__(
        self,
        data: ClientData,
        client: int,
        secret: Secret,
        store: JournalExamples,
        rows: Callable[[Examples, Secret], Mapping[str, Ids]],
        prepared: Callable[[ClientData], ClientData],
    ) -> None:
        """`prepared`: what is made of data before they are trained on."""
        self._data, self._client, self._secret = data, client, secret
        self._store, self._rows, self._prepared = store, rows, prepared
        self.load()

    def load(self) -> None:
        """As the journal has them."""
        stored = self._store.load()
        self.examples = stored if stored is not None else self._drawn(self._data, None)

    @property
    def timed(self) -> bool:
        return self._data.timeline is not None

    @property
    def rows(self) -> Mapping[str, Ids]:
        return self._rows(self.examples, self._secret)

    def up_to(self, cutoff: int) -> Mapping[str, Ids]:
        before, timeline = self._store.load(), self._data.timeline
        if timeline is not None:
            try:
                self.examples = self._drawn(self._prepared(timeline.up_to(cutoff)), before)
            except Exception:  # noqa: BLE001 (data that nobody foresaw raise any error)
                self.examples = self.examples.take(slice(0)) if before is None else before
        self._store.keep(self.examples)
        return self.rows

    def _drawn(self, data: ClientData, before: Examples | None) -> Examples:
        return draw_own(data, self._client, self._secret, before)


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

    def prepared(found: ClientData) -> ClientData:
        return with_subjects(replace(task, data=found), bound, plan).data

    def make(journal: Journal, client: ClientId) -> tuple[MakeLocal, Train]:
        if not 0 <= int(client) < task.data.clients:
            raise ConfigError(
                f"client {client}: task {task.name!r} has {task.data.clients}",
                hint="clients count from 0",
            )
        name = name_of(client)
        secret = own_secret(journal, name, entropy, plan.federation, int(client))
        rows = JournalRows(journal, name)
        own = OwnExamples(
            task.data,
            int(client),
            secret,
            JournalExamples(journal, name),
            partial(own_rows, bound),
            prepared,
        )
        names = tasks.own_names(
            task, plan.task.name, data=data, options=plan.task.options, client=int(client)
        )

        def local(periods: PeriodStore, ledger: Ledger) -> LocalState:
            own.load()
            return LocalState(
                real=own.rows,
                periods=periods,
                ledger=ledger,
                derived=maps,
                counts=bound.counts_digest,
                candidates=bound.union_candidates,
                names=names,
                rows=rows,
                data=own if plan.grouped else None,
            )

        def local_rows() -> dict[str, TablePart]:
            """As they were last trained in a round that counted, or as they begin."""
            found = {}
            for table, ids in bound.local_row_ids_of(own.examples).items():
                values = first_rows(bound, table, ids, secret)
                trained = rows.of(table, values.shape[1])
                kept = np.isin(trained.ids, ids)  # others are of examples that are gone
                values[np.searchsorted(ids, trained.ids[kept])] = trained.values[kept]
                found[table] = TablePart(ids, values)
            return found

        def train(round_id: RoundId, submodel: Submodel, coins: Secret) -> TrainingResult:
            at_home = local_rows()
            trained = client_training.alone(
                int(client), submodel, own.examples, at_home, coins, round_id
            )
            broken = trained.failed and f"round {round_id}: {trained.failed}"
            return TrainingResult(trained.update, trained.local, broken)

        return local, train

    return make
