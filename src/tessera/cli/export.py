"""`tessera export`: the model of a run as a folder that any torch program can read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.format import AsJson, DataFolder
from tessera.data.examples import LABEL, Examples
from tessera.learning.saved import ABOUT, AS_THEY_BEGAN, MAPS, STATE, load
from tessera.report.numbers import score, size
from tessera.runs.export import OF_CLIENTS, export_run, named_task
from tessera.runs.folder import RunFolder


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the model (default: RUN/model).")
    ] = None,
    data: DataFolder = None,
    with_local: Annotated[
        bool,
        typer.Option(
            "--with-local", help="Include the simulated clients' own rows; no real run has them."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is already in --out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of RUN as a plain state_dict, and show how to use it."""
    task = named_task(RunFolder.load(run), data)
    folder = export_run(run, task, out, with_local=with_local, overwrite=overwrite)
    model = load(folder)
    if with_local and model.about["local_rows"] == OF_CLIENTS:
        typer.echo(
            "warning: this model holds the clients' local rows. Only a simulation "
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


def show(folder: Path, files: Mapping[str, int], about: Mapping[str, Any]) -> None:
    """What was written, and what it is."""
    metric, rounds = about["metric"], about["rounds"]
    typer.echo(f"{folder}")
    for name, what in (
        (STATE, "parameters, for torch.load(..., weights_only=True)"),
        (ABOUT, "what it is"),
        (MAPS, "public maps of derived tables"),
    ):
        typer.echo(f"  {name:<14} {size(files[name]):>9}   {what}")
    typer.echo(f"\n  {about['task']['title']}")
    outcome = f"{about['scheme']}, {rounds} round{'s' if rounds > 1 else ''}"
    if metric["value"] is not None:
        outcome += (
            f", {metric['name']} {score(metric['value'])} after round {metric['after_rounds']}"
        )
    typer.echo(f"  {outcome}")
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
