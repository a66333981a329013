"""Saving a run's model as a folder that any torch program can read.

path = export_run("runs/shop", task)    # a task of one's own; a named one is found by its plan
tessera.load(path).predict({...})
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from tessera import tasks
from tessera.crypto.entropy import RootedEntropy
from tessera.errors import ConfigError, __version__
from tessera.learning.bound_model import BoundModel
from tessera.learning.machine import physical_memory
from tessera.learning.saved import AS_THEY_BEGAN, save, state_of
from tessera.learning.softmax import Softmax
from tessera.rounds import schemes
from tessera.rounds.events import is_charged
from tessera.runs.central import CentralTraining
from tessera.runs.folder import CHECKPOINT, MODEL, RunFolder, entropy_of
from tessera.runs.standing import model_file
from tessera.runs.training import Training, complete
from tessera.tasks import Task

OF_CLIENTS: Final = "as the simulated clients trained them"
IN_ONE_PLACE: Final = "trained in one place with the rest"


def export_run(
    folder: Path | str,
    task: Task | None = None,
    out: Path | str | None = None,
    with_local: bool = False,
    *,
    overwrite: bool = False,
) -> Path:
    """Save the model of a run's last checkpoint; the model's folder.

    `task` is the one that was trained; without it the plan names one. `out` is RUN/model if not
    given, and that one is the run's own to replace; another model is only with `overwrite`.
    """
    folder = Path(folder)
    log = RunFolder.load(folder)
    task = task or named_task(log)
    complete(log.plan, task)  # refuses a task with another model
    if task.solve is not None:
        raise ConfigError(
            f"{folder}: its sums are solved and not trained, and no module holds what comes of it",
            hint="tessera recommend and tessera rank read them from the run",
        )
    _check_version(log)
    if with_local and not is_charged(log.plan, "local rows"):
        raise ConfigError(
            f"{folder}: its plan has [dp], and the clients' local rows follow from their data "
            "without noise: nobody was charged for them",
            hint="export without them; in a real run they never leave their client",
        )
    if not model_file(log).is_file():  # to open a store that is not there would make one
        raise _nothing_yet(folder)
    with _restored(task, log, with_local) as stood:
        if not stood.rounds_done:
            raise _nothing_yet(folder)
        _check_memory(stood.bound)
        local_rows = OF_CLIENTS if with_local else AS_THEY_BEGAN
        if isinstance(stood, CentralTraining):
            local_rows = IN_ONE_PLACE
        return save(
            folder / MODEL if out is None else out,
            parameters=state_of(stood.module, stood.parameters(local=with_local)),
            tables=task.tables,
            architecture=task.architecture,
            about=_about(log, task, stood.rounds_done),
            examples=task.data.train,
            items=task.data.ids.get(task.loss.kind if isinstance(task.loss, Softmax) else "item"),
            local_rows=local_rows,
            overwrite=overwrite or out is None,
            softmax=task.loss if isinstance(task.loss, Softmax) else None,
        )


def named_task(log: RunFolder, data: Path | None = None) -> Task:
    """The task that the run's plan names, with its options."""
    wanted = log.plan.task
    if not wanted.name:
        raise ConfigError(
            f"{log.folder}: its plan names no task",
            hint="for a task of your own call export_run(folder, task); a run of synthetic rows "
            "trains no model",
        )
    return tasks.load(wanted.name, data=data, **wanted.options)


# --- the run as it stands -------------------------------------------------------------------------


def _restored(task: Task, log: RunFolder, with_local: bool) -> Training | CentralTraining:
    plan, checkpoint = log.plan, log.folder / CHECKPOINT
    if not schemes.of(plan).federated:  # its state holds the rows of what clients have drawn
        return CentralTraining(task, plan, folder=checkpoint, entropy=entropy_of(log))
    # No secret is needed to read a shared model: with entropy of its own no root is read, or made.
    # But the own rows of a client that no round has moved are as that client drew them.
    entropy = entropy_of(log) if with_local else RootedEntropy.fresh()
    return Training(task, plan, folder=checkpoint, entropy=entropy)


def _nothing_yet(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder}: no round of this run is checkpointed, so there is no model to export",
        hint="let it finish a round: tessera run --resume",
    )


def _check_version(log: RunFolder) -> None:
    version = log.facts.get("version", __version__)
    if version != __version__:
        raise ConfigError(
            f"{log.folder} was made by tessera {version}, this is {__version__}",
            hint="export it with the version it was made with",
        )


def _check_memory(bound: BoundModel) -> None:
    """A state_dict holds every row, also those of a large table that nobody has touched."""
    memory = physical_memory()
    whole = sum(4 * table.rows * table.width for table in bound.tables)
    if memory is not None and whole > memory:
        raise ConfigError(
            f"the tables with all their rows are {whole:,} bytes, this machine has {memory:,}",
            hint="export on a larger machine; a run's checkpoint holds only touched rows",
        )


def _about(log: RunFolder, task: Task, rounds: int) -> dict[str, Any]:
    value, after = _measured(log, rounds)
    if not is_charged(log.plan, "metric"):
        value, after = None, None
    history = task.data.train.fields.get("history")
    bound = task.bind(task.build(0))
    lengths = {
        task.data.train[name].shape[1]
        for table in bound.tables
        for name in table.fields
        if name in task.data.train.fields and task.data.train[name].ndim == 2
    }
    return {
        "sequence_length": max(lengths, default=None),
        "history_length": history.shape[1] if history is not None and history.ndim == 2 else None,
        "task": {
            "name": task.name,
            "title": task.title or task.name,
            "options": dict(log.plan.task.options),
        },
        "federation": log.plan.federation,
        "scheme": log.plan.scheme.value,
        "plan": log.plan.digest.hex(),
        "seed": log.plan.seed,
        "rounds": rounds,
        "metric": {
            "name": task.metric.name,
            "value": value,
            "after_rounds": after,
        },
    }


def _measured(log: RunFolder, rounds: int) -> tuple[float | None, int | None]:
    """The metric as last measured in the run, where each client has its own local rows."""
    value, after = None, None
    try:
        for line in log.rounds():
            metric = line.get("metric")
            if line["round_id"] < rounds and metric is not None and math.isfinite(metric):
                value, after = float(metric), line["round_id"] + 1
    except ConfigError:
        pass  # a run that was killed in the middle of a line; those before it are whole
    return value, after
