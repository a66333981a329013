"""Training: a plan's whole run over a task, with checkpoints from which it can be resumed.

The rounds are in `simulation/federation.py`. Here are the user's module as a dense part and tables,
the clients with their rows and local tables, the learner, the evaluation after a round, and the
checkpoint.

All secrets of a run are derived from one root secret, stored with the checkpoint. So a resumed run
sends the same messages again, permanent answers do not change within a period, and the final model
is the same to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.crypto.keys import Identity
from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, Examples, SecretOf, draw
from tessera.ids import ClientId, RoundId
from tessera.learning.bound_model import BoundModel, OwnRows
from tessera.learning.compression import Residual
from tessera.learning.tables.store import ModelStore
from tessera.learning.tables.submodel import Ids, ModelUpdate, Submodel, TablePart, TableUpdate
from tessera.learning.tables.table import LazyTable, StoredTable, TableSpec
from tessera.learning.training.jobs import HomeFitting, Job, Trainable
from tessera.plan import Plan
from tessera.plan.defaults import filled_in, with_defaults
from tessera.privacy.dp.ledger import BudgetExceeded
from tessera.privacy.index.period import MemoryPeriods
from tessera.rounds import schemes
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.events import Event, TrainingEnded
from tessera.rounds.noise import noise_of
from tessera.rounds.party import LocalState
from tessera.rounds.root import lasting_secret
from tessera.runs.client_training import (
    ChosenLearner,
    ClientTraining,
    Trainer,
    learner_of,
    own_rows,
    with_subjects,
)
from tessera.runs.evaluation import EarlyStopping, Evaluation
from tessera.runs.folder import check_round, owners_folder, run_root
from tessera.runs.setup import Ledgers, SetupProgress, select_rows, set_up
from tessera.simulation.epochs import EpochFederation, federation_for
from tessera.simulation.faults import random_dropouts
from tessera.simulation.subcohort import Participant, SimulatedRows, TrainingOutcome
from tessera.simulation.views import Views
from tessera.tasks import Task

STORE: Final = "model.sqlite"
RESIDUALS: Final = "residuals/"  # no parameter of a module is called so
SECONDS_BETWEEN_CHECKPOINTS: Final = 5.0


def complete(plan: Plan, task: Task) -> Plan:
    """The plan with all that it leaves to its task, and with the least noise that keeps its budget.

    `plan/defaults.py` has the table of what is filled in.
    """
    return noise_of(with_defaults(plan, filled_in(plan, task))).calibrated()


def eligible(data: ClientData, plan: Plan) -> list[ClientId]:
    """The clients with enough training examples to take part."""
    least = max(1, plan.simulation.min_examples)
    return [ClientId(int(c)) for c in np.flatnonzero(np.diff(data.offsets) >= least)]


class CutData:
    """The task's data up to the cut-offs of a simulation's periods, each read when it is needed.

    What clients have drawn beside the data of a period stays in the next one.
    """

    def __init__(self, task: Task, plan: Plan, bound: BoundModel, secret_of: SecretOf) -> None:
        timeline, simulation = task.data.timeline, plan.simulation
        assert timeline is not None, "a plan is checked with its task"
        self._task, self._plan, self._bound, self._secret_of = task, plan, bound, secret_of
        self._cutoffs: list[int] = []
        self._drawn: list[ClientData] = []
        self._prepared: dict[int, ClientData] = {}
        while (share := simulation.share_of(len(self._cutoffs) + 1)) is not None:
            last = self._cutoffs[-1] if self._cutoffs else -1
            self._cutoffs.append(max(timeline.moment(share), last + 1))

    def cutoff(self, period: int) -> int | None:
        """That of a period; None: there is no later one."""
        return self._cutoffs[period - 1] if period <= len(self._cutoffs) else None

    def of(self, client: int, cutoff: int) -> Examples:
        """What a client trains on in the period with this cut-off."""
        return self._at(self._cutoffs.index(cutoff)).of(client)

    def _at(self, place: int) -> ClientData:
        if place in self._prepared:
            return self._prepared[place]
        timeline = self._task.data.timeline
        assert timeline is not None
        while len(self._drawn) <= place:
            found = timeline.up_to(self._cutoffs[len(self._drawn)])
            before = self._drawn[-1] if self._drawn else None
            self._drawn.append(draw(found, self._secret_of, before))
        task = replace(self._task, data=self._drawn[place])
        task = with_subjects(EarlyStopping.of(task, self._plan)[0], self._bound, self._plan)
        self._prepared[place] = task.data
        return task.data


@dataclass(slots=True)
class SimulatedData:
    """One client's data up to the cut-off of its period."""

    client: int
    cut: CutData
    rows: Callable[[Examples], Mapping[str, Ids]]
    cutoff: int | None = None
    timed: bool = True

    def up_to(self, cutoff: int) -> Mapping[str, Ids]:
        self.cutoff = cutoff
        return self.rows(self.cut.of(self.client, cutoff))


class Clients(Mapping[ClientId, Participant]):
    """The task's clients, each made when first asked for; those with too little are left out."""

    def __init__(
        self,
        task: Task,
        bound: BoundModel,
        plan: Plan,
        entropy: Entropy | None = None,
        indicator: npt.NDArray[np.float64] | None = None,
        ledgers: Ledgers | None = None,
        local: Mapping[str, StoredTable] | None = None,
        cut: CutData | None = None,
    ) -> None:
        """Against an active server `entropy` gives everybody a signing key that all others know.

        `indicator` has for each client what it thinks of its own mask. Without `entropy` rows can
        be counted, but their draws are others in every process. `ledgers` are charged for what was
        summed up before the first round. `local` are the tables whose rows never leave a client.
        With `cut` clients have data from their first period on, those up to its cut-off.
        """
        self._cut = cut
        self._secrets_from = entropy or SystemEntropy()
        self._local = {} if local is None else local
        self._data, self._bound, self._indicator = task.data, bound, indicator
        self._plan, self._ledgers = plan, ledgers or Ledgers(plan)
        self._derived = bound.derived_maps()
        self._made: dict[ClientId, Participant] = {}
        self.eligible = eligible(task.data, plan)
        self._known = frozenset(self.eligible)
        self._identities: dict[ClientId, Identity] = {}
        if entropy is not None:
            self._identities = schemes.of(plan).sum.signers(plan, self.eligible, entropy)

    def __getitem__(self, client: ClientId) -> Participant:
        if client not in self._known:
            raise KeyError(client)
        if client not in self._made:
            secret = self.secret_of(client)
            rows = partial(own_rows, self._bound, secret=secret)
            cut = None if self._cut is None else SimulatedData(int(client), self._cut, rows)
            local = LocalState(
                real=rows(self._data.of(int(client))),
                data=cut,
                secret=secret,
                rows=SimulatedRows(self._local),
                periods=MemoryPeriods(),
                ledger=self._ledgers.of(client),
                derived=self._derived,
                counts=self._bound.counts_digest,
                candidates=self._bound.union_candidates,
                indicator=None if self._indicator is None else float(self._indicator[client]),
            )
            identity = self._identities[client] if self._identities else None
            self._made[client] = Participant(local, identity)
        return self._made[client]

    def examples_of(self, client: ClientId) -> Examples:
        """What a client trains on: all that it has, or that up to its period's cut-off."""
        found = self[client].local.data if client in self._made else None
        if isinstance(found, SimulatedData) and found.cutoff is not None:
            return found.cut.of(int(client), found.cutoff)
        return self._data.of(int(client))

    def secret_of(self, client: int) -> Secret:
        """A client's lasting secret."""
        return lasting_secret(self._secrets_from, self._plan.federation, client)

    def residuals(self) -> Iterator[tuple[ClientId, npt.NDArray[np.int32]]]:
        """What those who were asked for have not sent yet."""
        for client, made in self._made.items():
            if made.local.residual is not None:
                yield client, made.local.residual.kept

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.eligible)

    def __len__(self) -> int:
        return len(self.eligible)


class Training:
    """A federated run: `with Training(...) as run: for event in run.run(50): ...`."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        *,
        folder: Path | None = None,
        entropy: Entropy | None = None,
        trainer: Trainer = Trainer.AUTO,
        rounds: int | None = None,
        views: Views | None = None,
        on_setup: SetupProgress | None = None,
    ) -> None:
        """With a `folder` the run is checkpointed there, and goes on where its checkpoint is.

        `rounds` are those to come, the plan's if nothing is said: compiling has to pay off in
        them. `on_setup` is called as the set-up progresses.
        """
        self.entropy: Entropy = entropy or run_root(folder)
        ledgers, given = Ledgers(plan), task
        # Of those who train, once a validation part is held out.
        groups = cohorts_of(plan).formed(eligible(EarlyStopping.of(task, plan)[0].data, plan))
        charged = ledgers.charge_setup
        task, self.setup = set_up(task, plan, self.entropy, on_setup, charged, groups)
        self.prepared = task
        task, self.stopping = EarlyStopping.of(task, plan)
        task = cohorts_of(plan).task_of(task)
        self.module = task.build(plan.seed)
        self.bound = task.bind(self.module)
        task = with_subjects(task, self.bound, plan)
        self.task, self.plan = task, plan
        self.tables: dict[str, StoredTable] = {}
        self.local: dict[str, StoredTable] = {}
        indicator = None if self.setup is None else self.setup.indicator
        secret_of = partial(lasting_secret, self.entropy, plan.federation)
        cut = None
        if plan.simulation.cuts_data:
            cut = CutData(given, plan, self.bound, secret_of)
        self.clients = Clients(
            task, self.bound, plan, self.entropy, indicator, ledgers, self.local, cut
        )
        for t in self.bound.tables:
            if t.local:
                self.local[t.name] = OwnRows(self.bound, t.name, task.data, self.clients.secret_of)
            else:
                self.tables[t.name] = self.bound.table(t.name, seed=plan.seed)
        self.evaluation = Evaluation(task, self.module, self.bound, noise_of(plan).on_a_sum)
        selecting = partial(on_setup, "selecting rows") if on_setup is not None else None
        self.popularity = select_rows(
            task.data,
            self.bound,
            plan,
            self.clients.eligible,
            self.entropy,
            ledgers.charge_selection,
            selecting,
        )
        self._agreed, plan = plan, noise_of(plan).with_selected(self.popularity)
        self.plan = plan
        dense = self.bound.pack(self.module)
        self.trainer, self._to_come = trainer, rounds or plan.simulation.rounds
        dropout = plan.simulation.dropout
        self.federation = federation_for(plan)(
            plan,
            self.clients,
            dense=dense,
            tables=self.tables,
            trainer=self._train_cohort,
            derived=self.bound.derived_maps(),
            counts=self.bound.counts_digest,
            entropy=self.entropy,
            faults=random_dropouts(dropout, plan.seed, plan) if dropout else None,
            views=views,
            evaluate=self._tested,
            noisy=True,
            popularity=self.popularity,
        )
        if cut is not None:
            assert isinstance(self.federation, EpochFederation), "a plan is checked with its task"
            self.federation.cutoffs = cut.cutoff
        self.last_round = 0
        self.residuals: LazyTable | None = None
        if plan.kept_back and folder is not None:
            self.residuals = LazyTable(
                TableSpec(name=RESIDUALS, size=task.data.clients, width=plan.model.dense)
            )
        self._store = self._open(folder) if folder is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @property
    def rounds_done(self) -> int:
        return self.federation.next_round

    @property
    def dense(self) -> npt.NDArray[np.float32]:
        return self.federation.dense

    @cached_property
    def learner(self) -> ChosenLearner:
        """Who trains a cohort; found out when it is first needed."""
        return learner_of(
            self.plan,
            self.task,
            Trainable(self.module, self.bound, self.task.loss, self.plan.local_training),
            self.trainer,
            sample=lambda: [self.job(c, self._whole(c)) for c in self.clients.eligible[:3]],
            rounds=self._to_come,
        )

    # --- rounds ---------------------------------------------------------------------------------

    def run(self, rounds: int) -> Iterator[Event]:
        """Go on until `rounds` rounds are done in all, and leave a checkpoint.

        With noise it ends before the round that would pass a client's budget; with patience when
        the validation part has had enough.
        """
        self.last_round = rounds - 1
        saved = time.monotonic()
        begun = self.rounds_done
        while self.rounds_done < rounds:
            following = RoundId(self.rounds_done)
            if spent := self._must_afford(following):
                if self.rounds_done == begun:
                    raise BudgetExceeded(
                        spent, hint="a spent budget stays spent; `tessera privacy dp` plans one"
                    )
                yield TrainingEnded(round_id=int(following), reason=spent)
                break
            for event in self.federation.round():
                yield event if self.stopping is None else self.stopping.after(event, self._on)
            if self.stopping is not None and self.stopping.reason:
                yield TrainingEnded(round_id=self.rounds_done, reason=self.stopping.reason)
                break
            if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                self.save()
                saved = time.monotonic()
        self.save()

    def _train_cohort(
        self, round_id: RoundId, submodels: Mapping[ClientId, Submodel]
    ) -> TrainingOutcome:
        jobs = [self.job(client, submodel, round_id) for client, submodel in submodels.items()]
        started = time.process_time()
        trained = self._client_training.train(jobs, round_id)
        spent = time.process_time() - started
        outcome, noise = TrainingOutcome(), noise_of(self.plan)
        every = max(1, sum(t.examples for t in trained))
        for client, job, result in zip(submodels, jobs, trained, strict=True):
            update = self._selected(submodels[client], result.update)
            outcome.updates[client] = noise.contribution(update, job.coins)
            outcome.seconds[client] = spent * result.examples / every
            outcome.groups_not_finite += result.not_finite
            if result.most:
                outcome.largest[client] = result.most
            if result.failed:
                outcome.failed[client] = result.failed
            elif not result.finite:
                outcome.not_finite += 1
            elif result.examples:
                outcome.loss += result.loss * result.examples
                outcome.examples += result.examples
            self.clients[client].local.keep_pending(round_id, result.local)
        return outcome

    @cached_property
    def _client_training(self) -> ClientTraining:
        return ClientTraining(self.plan, self.bound, self.plan.local_training, self.learner.learner)

    def _selected(self, submodel: Submodel, update: ModelUpdate) -> ModelUpdate:
        """Without the rows that are not learnt: they would take a part of the clip."""
        if self.popularity is None:
            return update
        tables, chosen = {}, self.popularity.selected
        for name, part in update.tables.items():
            kept = np.isin(submodel.trained[name], chosen[name], assume_unique=True)
            tables[name] = TableUpdate(np.where(kept[:, None], part.values, 0.0), part.counts)
        return replace(update, tables=tables)

    def _must_afford(self, round_id: RoundId) -> str:
        """Why this round cannot be, as its noise would pass a client's budget; "" if it can."""
        noise, cohorts = noise_of(self.plan), self.federation.cohorts

        def short(round_id: RoundId) -> bool:
            possible = self.federation.possible(round_id).items()
            there = [(self.clients[c].local, at) for c, at in possible]
            return any(
                not noise.affords(local.ledger, at, local.training(self.plan))
                for local, at in there
            )

        return noise.refusal(lambda: cohorts.rule.spent(round_id, noise.lasts, short))

    def job(self, client: ClientId, submodel: Submodel, round_id: RoundId | None = None) -> Job:
        """What this client trains: the submodel, its examples, its own local rows and its coins;
        outside a round all its examples, and nobody's coins."""
        examples = self.clients.examples_of(client)
        own = {
            name: TablePart(ids, self.local[name].values(ids))
            for name, ids in self.bound.local_row_ids_of(examples).items()
        }
        if round_id is None:
            return Job(int(client), submodel, examples, own, coins=Secret(bytes(32)))
        coins = self.federation.coins(round_id, client)
        return self._client_training.job(int(client), submodel, examples, own, coins)

    def _whole(self, client: ClientId) -> Submodel:
        """All that a client's examples touch, as it is now."""
        softmax = self.bound.candidates
        rows = self.bound.all_row_ids_of(
            self.clients.examples_of(client),
            None if softmax is None else self.clients[client].local.real[softmax.root],
        )
        parts = {
            name: TablePart(rows[name], table.values(rows[name]))
            for name, table in self.tables.items()
        }
        return Submodel(self.dense, parts, {name: part.ids for name, part in parts.items()})

    def _tested(self, round_id: RoundId) -> float | None:
        due = (int(round_id) + 1) % self.plan.simulation.evaluate_every == 0
        if not due and int(round_id) != self.last_round:
            return None
        self._fit_at_home()
        dense, tables = self.federation.dense, self.tables | self.local
        if not self.plan.simulation.clients_test:
            return self.evaluation.metric(dense, tables)
        if not noise_of(self.plan).may_test(round_id):
            return None  # nobody was charged for it
        return self.evaluation.federated(
            self.plan,
            round_id,
            self.federation.survivors,
            dense,
            tables,
            self.entropy,
            self.federation.cohorts.groups,
        )

    def _fit_at_home(self) -> None:
        """Own rows that follow from the model alone are those of the model that is tested."""
        learner = self.learner.learner
        if not isinstance(learner, HomeFitting):
            return
        jobs = [self.job(client, self._whole(client)) for client in self.clients.eligible]
        for local in learner.fitted(jobs):
            for name, part in local.items():
                self.local[name].put(part.ids, part.values, np.ones(len(part.ids), np.int64))

    def _on(self, held: ClientData, round_id: RoundId) -> float | None:
        """The metric over a validation part: with noise a sum over the round's clients."""
        dense, tables = self.federation.dense, self.tables | self.local
        if noise_of(self.plan).noisy_metrics:
            return self.evaluation.federated(
                self.plan,
                round_id,
                self.federation.survivors,
                dense,
                tables,
                self.entropy,
                validation=held,
            )
        scores = self.evaluation.scores(dense, tables, held.test)
        return self.task.metric.measures(scores, held.test)[self.task.metric.name]

    # --- the model ------------------------------------------------------------------------------

    def parameters(self, *, local: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """The trained module's parameters by name; local tables as they began, unless asked for."""
        found = {
            name: part.numpy().copy()
            for name, part in self.bound.unpack(torch.from_numpy(self.dense.copy())).items()
        }
        for t in self.bound.tables:
            every = np.arange(t.rows, dtype=np.uint64)
            if t.local and not local:
                found[t.parameter] = self.bound.table(t.name, seed=self.plan.seed).values(every)
            else:
                found[t.parameter] = (self.local if t.local else self.tables)[t.name].values(every)
        return found

    # --- the checkpoint -------------------------------------------------------------------------

    def _open(self, folder: Path) -> ModelStore:
        owners_folder(folder)
        model = self.federation.model
        store = ModelStore.open(
            folder / STORE,
            plan_hash=self._agreed.digest,
            tables=[
                *self.tables.values(),
                *self.local.values(),
                *model.averaging.state,
                *([] if self.residuals is None else [self.residuals]),
            ],
        )
        if self.residuals is not None:
            for client in self.residuals.touched_ids:
                (kept,) = self.residuals.values(np.array([client], dtype=np.uint64))
                self.clients[ClientId(int(client))].local.residual = Residual.stored(kept)
        if store.round_id is not None:
            model.restore(store.dense())
            check_round(folder, int(store.round_id))
            self.federation.go_on_at(int(store.round_id) + 1, store.engine())
        return store

    def save(self) -> None:
        """Write down the last round; nothing, if it was already."""
        if self._store is None or not self.rounds_done:
            return
        last = RoundId(self.rounds_done - 1)
        if self._store.round_id is None or last > self._store.round_id:
            self._put_residuals()
            model, at_rest = self.federation.model, self.federation.at_rest()
            self._store.commit(last, model.dense_parts, at_rest)

    def _put_residuals(self) -> None:
        """What clients have not sent yet goes into the checkpoint, where it has changed."""
        if self.residuals is None:
            return
        for client, kept in self.clients.residuals():
            ids = np.array([client], dtype=np.uint64)
            if not np.array_equal(self.residuals.values(ids)[0], kept):
                self.residuals.put(ids, kept.astype(np.float32)[None], np.ones(1, np.int64))
