"""`tessera export`: the model of a run as a folder that any torch program can read.

path = export_run("runs/shop", task)    # a task of one's own; a named one is found by its plan
tessera.load(path).predict({...})
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tessera import __version__, tasks
from tessera.cli.doctor import physical_memory
from tessera.cli.privacy import size
from tessera.crypto.entropy import RootedEntropy
from tessera.data.examples import LABEL, Examples
from tessera.engines import central, training
from tessera.engines.central import CentralTraining
from tessera.engines.runs import CHECKPOINT, MODEL, RunFolder
from tessera.engines.training import Training, complete
from tessera.errors import ConfigError
from tessera.learning.binding import Binding
from tessera.learning.saved import ABOUT, AS_THEY_BEGAN, MAPS, STATE, load, save, state_of
from tessera.rounds.plan import Plan, Scheme
from tessera.tasks import Task

OF_CLIENTS: Final = "as the simulated clients trained them"
IN_ONE_PLACE: Final = "trained in one place with the rest"


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[
        Path | None, typer.Option(help="The model's folder (default: RUN/model).")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The folder of data sets (default: TESSERA_DATA).")
    ] = None,
    with_local: Annotated[
        bool,
        typer.Option("--with-local", help="Keep the simulated clients' own rows: in no real run."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is in --out already.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Write the model that RUN has trained so far as a plain state_dict, and say how to use it."""
    task = named_task(RunFolder.load(run), data)
    folder = export_run(run, task, out, with_local=with_local, overwrite=overwrite)
    model = load(folder)
    if with_local and model.about["local_rows"] == OF_CLIENTS:
        typer.echo(
            "warning: this model holds the rows that clients keep to themselves. Only a simulation "
            "has them in one place; in a real run they never leave their client.",
            err=True,
        )
    files = {name: (folder / name).stat().st_size for name in (STATE, ABOUT, MAPS)}
    if as_json:
        kept = ("task", "scheme", "rounds", "metric", "local_rows", "tessera")
        facts = {name: model.about[name] for name in kept}
        values = sum(value.numel() for value in model.module.state_dict().values())
        typer.echo(json.dumps({"model": str(folder), "files": files, "values": values} | facts))
    else:
        show(folder, files, model.about)
        typer.echo(usage(folder, task.data.train, model.fields))


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
    _check_version(log)
    _check_checkpoint(folder, log.plan)
    with _restored(task, log.plan, folder / CHECKPOINT) as stood:
        if not stood.rounds_done:
            raise _nothing_yet(folder)
        _check_memory(stood.binding)
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
            local_rows=local_rows,
            overwrite=overwrite or out is None,
        )


def named_task(log: RunFolder, data: Path | None = None) -> Task:
    """The task that the run's plan names, with its options."""
    wanted = log.plan.task
    if not wanted.name:
        raise ConfigError(
            f"{log.folder}: its plan names no task",
            hint="for a task of your own call export_run(folder, task); a plan that only moves "
            "made-up rows trains no model",
        )
    return tasks.load(wanted.name, data=data, **wanted.options)


# --- the run as it stands -------------------------------------------------------------------------


def _restored(task: Task, plan: Plan, checkpoint: Path) -> Training | CentralTraining:
    if plan.scheme is Scheme.CENTRAL:
        return CentralTraining(task, plan, folder=checkpoint)
    # No secret is needed to read a model. With entropy of its own no root is read, or made.
    return Training(task, plan, folder=checkpoint, entropy=RootedEntropy.fresh())


def _check_checkpoint(folder: Path, plan: Plan) -> None:
    """Before anything is opened: opening a store that is not there would make one."""
    name = central.STATE if plan.scheme is Scheme.CENTRAL else training.STORE
    if not (folder / CHECKPOINT / name).is_file():
        raise _nothing_yet(folder)


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


def _check_memory(binding: Binding) -> None:
    """A state_dict holds every row, also those of a large table that nobody has touched."""
    memory = physical_memory()
    whole = sum(4 * table.rows * table.width for table in binding.tables)
    if memory is not None and whole > memory:
        raise ConfigError(
            f"the tables with all their rows are {size(whole)}, this machine has {size(memory)}",
            hint="export on a larger machine; a run's checkpoint holds only touched rows",
        )


def _about(log: RunFolder, task: Task, rounds: int) -> dict[str, Any]:
    value, after = _measured(log, rounds)
    return {
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
            "name": task.judge.metric,
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


# --- what is printed ------------------------------------------------------------------------------


def show(folder: Path, files: Mapping[str, int], about: Mapping[str, Any]) -> None:
    """What was written, and what it is."""
    metric, rounds = about["metric"], about["rounds"]
    typer.echo(f"{folder}")
    for name, what in (
        (STATE, "every parameter, for torch.load(..., weights_only=True)"),
        (ABOUT, "what it is"),
        (MAPS, "public maps of derived tables"),
    ):
        typer.echo(f"  {name:<14} {size(files[name]):>9}   {what}")
    typer.echo(f"\n  {about['task']['title']}")
    said = f"{about['scheme']}, {rounds} round{'s' if rounds > 1 else ''}"
    if metric["value"] is not None:
        said += f", {metric['name']} {metric['value']:.4f} after round {metric['after_rounds']}"
    typer.echo(f"  {said}")
    local = [t["parameter"] for t in about["tables"] if t["kind"] == "local"]
    if local:
        typer.echo(f"  local rows ({', '.join(local)}): {about['local_rows']}")
        if about["local_rows"] == AS_THEY_BEGAN:
            name = local[0].removesuffix(".weight")
            typer.echo(f'  a client predicts with its own: predict(..., local={{"{name}": row}})')


def usage(folder: Path, examples: Examples, fields: Sequence[str]) -> str:
    """Three lines to paste."""
    columns = []
    for name in fields:
        if name == LABEL or name not in examples.fields:
            continue
        column = examples[name]
        entry = "0" if column.dtype.kind in "iu" else "0.5"
        columns.append(f'"{name}": ' + (f"[{entry}]" if column.ndim == 1 else f"[[{entry}]]"))
    return (
        "\n  import tessera\n"
        f'  model = tessera.load("{folder}")\n'
        f"  model.predict({{{', '.join(columns)}}})"
    )
