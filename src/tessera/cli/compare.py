"""`tessera compare`: runs side by side, as a table in the terminal and as a page.

The command parses and prints; runs are read and put side by side by `tessera.report`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from tessera.cli.format import AsJson
from tessera.report import comparison
from tessera.report import page as report
from tessera.report.lineup import load_all

PAGE: Final = Path("compare.html")


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders of one task.")],
    out: Annotated[Path, typer.Option(help="File of the page.")] = PAGE,
    as_json: AsJson = False,
) -> None:
    """Put RUNs of one task side by side: a table here, and a page with their curves."""
    found = load_all(runs)
    page = report.save(report.page(found), out)
    if as_json:
        typer.echo(json.dumps(comparison.summary(found, page)))
    else:
        comparison.show(found, page, Console(highlight=False))
