"""`tessera audit`: every attack on a recorded run, beside what its plan claims.

The command parses and prints; the attacks are in `tessera.audit`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from tessera.audit.finding import LEVEL, Finding, Unit, Verdict
from tessera.audit.record import Record
from tessera.audit.suite import run as run_attacks


def audit(
    run: Annotated[Path, typer.Argument(help="A run's folder, with views and truth.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Attack the recorded views of RUN, and compare with what its plan claims."""
    found = run_attacks(Record.open(run))
    if as_json:
        typer.echo(json.dumps({"attacks": [finding.as_json() for finding in found]}))
    else:
        show(found)


def show(found: Sequence[Finding]) -> None:
    """A table of figures, and under it what each means, at most 80 characters wide, on stdout."""
    console = Console(width=80)
    rounds = max((finding.rounds for finding in found), default=0)
    attackers = ", ".join(sorted({finding.attacker for finding in found}))
    table = Table(
        title=f"Attacks on {rounds:,} recorded rounds, by the {attackers}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("attack", overflow="fold")
    table.add_column(f"measured, {LEVEL:.0%}", justify="right", no_wrap=True)
    table.add_column("claimed", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for finding in found:
        verdict = finding.verdict.value
        if finding.verdict is Verdict.BROKEN:
            verdict = f"[bold red]{verdict}[/bold red]"
        table.add_row(finding.name, measured(finding), figure(finding.claimed, finding), verdict)
    console.print(table)
    for finding in found:
        console.print(Padding(f"{finding.name}: [dim]{finding.meaning}[/dim]", (0, 0, 0, 1)))


def measured(finding: Finding) -> str:
    """The figure with its interval; a dash where nothing could be tried."""
    if finding.verdict is Verdict.UNTESTED:
        return "-"
    low, high = (figure(number, finding).rstrip("%") for number in (finding.low, finding.high))
    return f"{figure(finding.measured, finding)} ({low}-{high})"


def figure(value: float, finding: Finding) -> str:
    """A level, or a share in per cent with a digit that still says something when it is small."""
    if finding.unit is Unit.EPSILON:
        return f"{value:.2f}"
    if 0.0 < value < 5e-4:
        return f"{100 * value:.0e}%"
    return f"{100 * value:.1f}%"
