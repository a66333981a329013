"""`tessera export`: the model of a run as a folder that any torch program can read, or that of a
leader's state in safetensors."""

from __future__ import annotations

import json
import signal
import threading
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
from tessera.services import model_export
from tessera.services.bundle import Bundle
from tessera.services.journal import LOCK
from tessera.services.journal import NAME as STATE_FILE


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a leader's folder of state.")],
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
    bundle: Annotated[Path, typer.Option(help="Of a state: the bundle that is led by it.")] = Path(
        "bundle.npz"
    ),
    every: Annotated[
        int,
        typer.Option(min=0, help="Of a state: go on, and write the model of every N rounds."),
    ] = 0,
    rows: Annotated[
        int, typer.Option(min=0, help="Of a state: the N most popular items only (0: all).")
    ] = 0,
    parquet: Annotated[
        bool,
        typer.Option("--parquet", help="Of a state: item vectors as Parquet, too."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of RUN as a plain state_dict, or of a leader's state as safetensors."""
    if (run / STATE_FILE).exists() or (run / LOCK).exists():
        export_state(run, out or Path("models"), bundle, every, rows, parquet, as_json)
        return
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


def export_state(
    state: Path, out: Path, bundle: Path, every: int, rows: int, parquet: bool, as_json: bool
) -> None:
    """Of a leader that leads or has led: its process is not disturbed."""
    packed = Bundle.read(bundle)

    def said(path: Path) -> None:
        found: dict[str, Any] = {"model": str(path), "bytes": path.stat().st_size}
        typer.echo(json.dumps(found) if as_json else f"{path}  {size(found['bytes'])}")

    model = model_export.exported(state, packed, rows=rows)
    said(model_export.write(model, out))
    if parquet:
        said(model_export.write_vectors(model, packed, out))
    if every:
        stop = threading.Event()
        for which in (signal.SIGTERM, signal.SIGINT):
            signal.signal(which, lambda *_: stop.set())
        model_export.follow(
            state, packed, out, every=every, rows=rows, stop=stop, written=said, last=model.round_id
        )


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
