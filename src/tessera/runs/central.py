"""Central training: all data in one place, the accuracy that other schemes are compared with.

A round takes as many examples as a cohort has on average (Niu et al. 2020, long version, section
VI-A), so that the curves of all schemes share one axis. There are no messages, cohorts or privacy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Self
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.data.examples import ClientData, Examples
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.bound_model import BoundTable, OwnRows
from tessera.learning.scores import evaluate
from tessera.learning.tables.submodel import read_npz
from tessera.learning.tables.table import StoredTable
from tessera.learning.training.jobs import Trainable
from tessera.learning.training.pooled import CentralTrainer, round_size
from tessera.plan import Plan
from tessera.rounds.events import Event, RoundFinished, TrainingEnded
from tessera.rounds.root import lasting_secret
from tessera.runs.evaluation import EarlyStopping
from tessera.runs.folder import run_root
from tessera.runs.setup import SetupProgress, set_up
from tessera.tasks import Task

STATE: Final = "central.npz"
SECONDS_BETWEEN_CHECKPOINTS: Final = 5.0


class CentralTraining:
    """The same task without a federation; used like `Training`."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        *,
        folder: Path | None = None,
        entropy: Entropy | None = None,
        on_setup: SetupProgress | None = None,
    ) -> None:
        """What clients would draw for themselves is drawn here as in a federated run.

        So under the same entropy both have the same examples. Without one the run has a root of its
        own, which is in its `folder`.
        """
        entropy = entropy or run_root(folder)
        task, self.setup = set_up(task, plan, entropy, on_setup)
        self.prepared = task
        task, self.stopping = EarlyStopping.of(task, plan)
        self.task, self.plan = task, plan
        self.module = task.build(plan.seed)
        self.bound = task.bind(self.module)
        settings = task.recommended.central
        training = plan.local_training
        if settings.weight_decay is not None:
            training = replace(training, weight_decay=settings.weight_decay)
        self.central = CentralTrainer(
            Trainable(
                self.module, self.bound, task.loss, replace(training, table_rate=1.0)
            ),  # it is for clients' few examples
            examples=task.data.train,
            tables={t.name: self._begins(t, entropy) for t in self.bound.tables},
            coins=entropy.secret(Label.CENTRAL_COINS, plan.federation),
            batch=settings.batch,
            optimizer=settings.optimizer,
            rate=settings.rate,
            negatives=settings.negatives,
        )
        self.how = f"{settings.optimizer}, rate {settings.rate:g}, in batches of {settings.batch}"
        self._examples = round_size(task.data, plan.cohort, training.examples)
        self._path = None if folder is None else folder / STATE
        self._saved = 0
        if self._path is not None and self._path.exists():
            self._load(self._path)

    def _begins(self, table: BoundTable, entropy: Entropy) -> StoredTable:
        """A table before training; a client's own rows begin as they do in a federation."""
        if not table.local:
            return self.bound.table(table.name, seed=self.plan.seed)
        secret_of = partial(lasting_secret, entropy, self.plan.federation)
        return OwnRows(self.bound, table.name, self.task.data, secret_of)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    @property
    def rounds_done(self) -> int:
        return self.central.rounds

    def run(self, rounds: int) -> Iterator[Event]:
        """Go on until `rounds` rounds are done in all, and leave a checkpoint."""
        saved = time.monotonic()
        while self.rounds_done < rounds:
            event = self._round(rounds)
            yield event if self.stopping is None else self.stopping.after(event, self._on)
            if self.stopping is not None and self.stopping.reason:
                yield TrainingEnded(round_id=self.rounds_done, reason=self.stopping.reason)
                break
            if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                self.save()
                saved = time.monotonic()
        self.save()

    def _round(self, rounds: int) -> RoundFinished:
        started, spent = time.monotonic(), time.process_time()
        before = self.central.not_finite
        loss = self.central.run(self._examples)
        spent = time.process_time() - spent
        done = self.rounds_done
        due = self.plan.simulation.due(done, rounds)
        return RoundFinished(
            round_id=done - 1,
            cohort=0,
            survivors=0,
            weight=self._examples,
            server_seconds={"train": spent},
            epsilon=float("inf"),
            metric=self.measures()[self.task.metric.name] if due else None,
            loss=None if np.isnan(loss) else loss,
            not_finite=self.central.not_finite - before,
            seconds=time.monotonic() - started,
        )

    def measures(self) -> dict[str, float]:
        """Every figure of the task's metric on the test part."""
        return self._measured(self.task.data.test)

    def _measured(self, examples: Examples) -> dict[str, float]:
        scores = evaluate(self.module, self.bound, self.central.parameters(), examples)
        return self.task.metric.measures(scores, examples)

    def _on(self, held: ClientData, _: RoundId) -> float:
        return self._measured(held.test)[self.task.metric.name]

    def parameters(self, *, local: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """The trained module's parameters by name; nothing is anybody's own here."""
        every = {t.parameter: np.arange(t.rows, dtype=np.uint64) for t in self.bound.tables}
        return {
            name: part if isinstance(part, np.ndarray) else part.values(every[name])
            for name, part in self.central.parameters().items()
        }

    # --- the checkpoint -------------------------------------------------------------------------

    def save(self) -> None:
        if self._path is None or self._saved == self.rounds_done:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".tmp.npz")
        mark = np.frombuffer(self.plan.digest, dtype=np.uint8)
        with fresh.open("wb") as out:
            np.savez(out, plan=mark, **self.central.state())  # type: ignore[arg-type]
        fresh.replace(self._path)
        self._saved = self.rounds_done

    def _load(self, path: Path) -> None:
        try:
            state = read_npz(path)
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise ConfigError(
                f"{path}: not a checkpoint: {error}", hint="start a new run"
            ) from error
        if state.pop("plan", np.zeros(0)).tobytes() != self.plan.digest:
            raise ConfigError(
                f"{path}: it belongs to another plan",
                hint="resume with the plan it was started with, or start a new run",
            )
        self.central.load(state)
        self._saved = self.rounds_done
