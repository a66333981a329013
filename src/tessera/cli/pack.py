"""`tessera pack`: a plan and its first model as one file, for all parties of a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.format import DataFolder
from tessera.plan import Plan
from tessera.services.bundle import pack_synthetic, pack_task


def pack(
    path: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan to deploy.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("bundle.npz"),
    data: DataFolder = None,
    clients: Annotated[
        int | None, typer.Option(help="Without a task: synthetic clients (default: a cohort).")
    ] = None,
    rows_per_client: Annotated[
        int, typer.Option(help="Without a task: rows a client holds of each table.")
    ] = 20,
) -> None:
    """Complete a plan by its task and pack it with the first model and public maps."""
    plan = Plan.read(path)
    if plan.task.name:
        bundle = pack_task(plan, data)
    else:
        bundle = pack_synthetic(plan, clients or plan.cohort, rows_per_client)
    bundle.write(out)
    typer.echo(f"{out}: bundle {bundle.digest.hex()[:16]}, plan {bundle.plan.digest.hex()[:16]}")
