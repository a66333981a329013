"""Clients of a task, as members of a deployment: their examples, their local rows, PyTorch.

A client reads its own interactions (`own_maker`), or those of its number in a published set
(`task_maker`). Its rows of tables that never leave it are in its journal (`JournalRows`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tessera import tasks
from tessera.crypto.entropy import Entropy
from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, Examples, draw_own
from tessera.data.interactions import UNKNOWN_IDS, UNKNOWN_LINES
from tessera.data.row_names import OwnNames
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.bound_model import first_rows
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
from tessera.tasks import Task
from tessera.tasks.own import NO_TIMES, OwnInteractions, id_key, names_in


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
        before, timeline, read = self._store.load(), self._data.timeline, b""
        if timeline is not None:
            try:
                found = timeline.up_to(cutoff)
                read = self._digest(found)
                self.examples = self._drawn(self._prepared(found), before)
            except Exception:  # noqa: BLE001 (data that nobody foresaw raise any error)
                self.examples = self.examples.take(slice(0)) if before is None else before
        self._store.keep(self.examples, cutoff, read)
        return self.rows

    def check_unchanged(self, what: str) -> None:
        """`ConfigError` if what there was at the period's cut-off is not what was read then.

        What is later is of the next period, and no change.
        """
        stored, timeline = self._store.cutoff, self._data.timeline
        if stored is None or timeline is None:
            return
        cutoff, read = stored
        try:
            now = self._digest(timeline.up_to(cutoff))
        except ConfigError:
            now = b""
        if now != read:
            since = datetime.fromtimestamp(cutoff, UTC).isoformat(timespec="seconds")
            raise ConfigError(
                f"{what}: lines up to {since} are not those that its period began with",
                hint="put them back; new lines are later than that, and wait for the next period",
            )

    def _digest(self, data: ClientData) -> bytes:
        """Of this client's examples, before anything is drawn, and of what is held out of them."""
        hashed = hashlib.sha256()
        for part in (data.of(self._client), data.test_of(self._client)):
            for name, column in sorted(part.fields.items()):
                hashed.update(f"{name} {column.dtype} {column.shape} ".encode())
                hashed.update(np.ascontiguousarray(column).tobytes())
        return hashed.digest()

    def _drawn(self, data: ClientData, before: Examples | None) -> Examples:
        return draw_own(data, self._client, self._secret, before)


def task_maker(bundle: Bundle, data: Path | None, entropy: Entropy) -> ClientMaker:
    """Clients of a published set, each with the lines of its number."""
    plan = bundle.plan
    task = tasks.load(plan.task.name, data=data, **plan.task.options)

    def own_of(client: int) -> tuple[ClientData, OwnNames | None]:
        if not 0 <= client < task.data.clients:
            raise ConfigError(
                f"client {client}: task {task.name!r} has {task.data.clients}",
                hint="clients count from 0",
            )
        names = tasks.own_names(
            task, plan.task.name, data=data, options=plan.task.options, client=client
        )
        return task.data, names

    return _maker(bundle, task, entropy, own_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSource:
    """Where a client's interactions are: a path, a folder, a frame, or a function that gives one.

    `person` tells whose rows they are where several people share a user account, `as_of` is its
    owner's word that nothing in it is later. `said` is called with what is worth saying.
    """

    source: Any = field(repr=False)
    person: str = ""
    as_of: int | None = None
    said: Callable[[str], None] = field(default=lambda _: None, repr=False)


def own_maker(
    bundle: Bundle,
    make: Callable[[OwnInteractions], Task],
    source_of: Callable[[int], OwnSource],
    entropy: Entropy,
) -> ClientMaker:
    """Clients that read interactions of their own, and nothing of anybody else's."""
    plan = bundle.plan
    nobody = OwnInteractions(
        clients=bundle.clients, catalogue=bundle.catalogue, key=id_key(plan.federation)
    )

    def own_of(client: int) -> tuple[ClientData, OwnNames | None]:
        found = source_of(client)
        own = replace(nobody, client=client, source=found.source, as_of=found.as_of)
        task, what = make(own), f"client {client}"
        if plan.grouped and task.data.timeline is None:
            raise ConfigError(
                f"{what}: its interactions have no times: {NO_TIMES}",
                hint="--as-of DATE is your word that it holds nothing later",
            )
        task.try_out(plan.seed)
        found.said(said_of(task.data, what))
        naming = [bundle.code.name] if bundle.code else [plan.task.name, plan.task.options]
        return task.data, names_in(task, own, person=found.person, naming=naming)

    return _maker(bundle, make(nobody), entropy, own_of, keeps=True)


def said_of(data: ClientData, what: str) -> str:
    """How much was read, and what the catalogue lacks."""
    unknown, lines = (data.facts.get(name, 0) for name in (UNKNOWN_IDS, UNKNOWN_LINES))
    lacks = f"; {unknown} {UNKNOWN_IDS}, {lines} {UNKNOWN_LINES}" if unknown else ""
    return f"{what}: {len(data.train):,} examples to train on{lacks}"


def _maker(
    bundle: Bundle,
    task: Task,
    entropy: Entropy,
    own_of: Callable[[int], tuple[ClientData, OwnNames | None]],
    *,
    keeps: bool = False,
) -> ClientMaker:
    """Clients one by one with the sequential trainer. `keeps`: whose data may not change in a
    period, but for what is later than its cut-off."""
    plan = bundle.plan
    if complete(plan, task).digest != plan.digest:
        raise ConfigError(
            f"task {task.name!r} is not the one that was packed",
            hint="is it the same data and the same tessera?",
        )
    task = cohorts_of(plan).task_of(task)
    module = task.build(plan.seed)
    bound = task.bind(module)
    training = plan.local_training
    learner = learner_of(plan, task, Trainable(module, bound, task.loss, training)).learner
    client_training = ClientTraining(plan, bound, training, learner)
    maps = bound.derived_maps()

    def prepared(found: ClientData) -> ClientData:
        return with_subjects(replace(task, data=found), bound, plan).data

    if not keeps:
        prepared(task.data)  # of everybody in a published set: refused before any client is made

    def make(journal: Journal, client: ClientId) -> tuple[MakeLocal, Train]:
        data, names = own_of(int(client))
        name = name_of(client)
        secret = own_secret(journal, name, entropy, plan.federation, int(client))
        rows = JournalRows(journal, name)
        own = OwnExamples(
            prepared(data),
            int(client),
            secret,
            JournalExamples(journal, name),
            partial(own_rows, bound),
            prepared,
        )
        if keeps:
            own.check_unchanged(f"client {client}")

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
