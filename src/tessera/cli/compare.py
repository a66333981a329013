"""`tessera compare`: runs side by side, as a table in the terminal and as a page.

The command parses and prints; runs are read and put side by side by `tessera.report`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from tessera.cli.format import AsCsv, AsJson, Exact, check_new, figures_written, write_new
from tessera.report import comparison, tables
from tessera.report import page as report
from tessera.report.lineup import load_all
from tessera.report.sections.summary import curve_chart

PAGE: Final = Path("compare.html")


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders of the same data.")
    ],
    out: Annotated[Path, typer.Option(help="File of the page.")] = PAGE,
    csv: AsCsv = None,
    svg: Annotated[Path | None, typer.Option(help="Write the curves as SVG.")] = None,
    exact: Exact = False,
    as_json: AsJson = False,
) -> None:
    """Put RUNs on the same data side by side: a table here, and a page with their curves."""
    for file in (csv, svg):
        if file is not None:
            check_new(file)  # before anything is written
    found = load_all(runs, exact=exact)
    page = report.save(report.page(found), out)
    if svg is not None:
        write_new(svg, tables.standalone(curve_chart(found)))
    if figures_written([run.summary() for run in found], csv):
        return
    if as_json:
        typer.echo(json.dumps(comparison.summary(found, page)))
    else:
        comparison.show(found, page, Console(highlight=False))
