"""`tessera rank`: where a run's model puts what came next, among everything there is."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.format import (
    AsCsv,
    AsJson,
    DataFolder,
    Exact,
    figures_written,
    show_ranking,
)
from tessera.report.terminal import Page
from tessera.rounds.events import NOT_CHARGED, is_charged, told
from tessera.runs.folder import RunFolder
from tessera.runs.ranking import USERS, full_ranking


def rank(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    top: Annotated[
        int, typer.Option(min=1, help="Length of the ranked lists of recall and NDCG.")
    ] = 10,
    users: Annotated[int, typer.Option(min=0, help="Most users to look at; 0: all.")] = USERS,
    sampled: Annotated[
        int,
        typer.Option(
            min=0, help="Rank among so many sampled items, as papers do with 99; 0: among all."
        ),
    ] = 0,
    test: Annotated[
        bool,
        typer.Option(
            "--test",
            help="Of a run that is tested on a validation part: the test part, to be looked at "
            "once. Looks are counted.",
        ),
    ] = False,
    data: DataFolder = None,
    csv: AsCsv = None,
    exact: Exact = False,
    as_json: AsJson = False,
) -> None:
    """Recall and NDCG of a run's model over all items, beside predictors that need none."""
    shown = sys.stderr.isatty() and not as_json

    def progress(done: int, every: int) -> None:
        if shown:
            print(f"\rranking: {done:,} of {every:,} users", end="", file=sys.stderr, flush=True)

    found = full_ranking(
        run, top=top, users=users, data=data, on_progress=progress, sampled=sampled, test=test
    )
    if shown:
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    plan = RunFolder.load(run).plan
    rows = [{"predictor": name, **own} for name, own in found.figures.items()]
    if figures_written([told(plan, row, exact=exact) for row in rows], csv):
        return
    if as_json:
        typer.echo(json.dumps(told(plan, asdict(found), exact=exact)))
        return
    page = Page()
    show_ranking(found, page)
    if not is_charged(plan, "figures"):
        page.say(f"{NOT_CHARGED}: all figures here", style="dim")
