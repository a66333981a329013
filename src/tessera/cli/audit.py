"""`tessera audit`: every attack on a recorded run, beside what its plan claims.

The command parses and prints; the attacks are in `tessera.audit`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tessera.audit.finding import LEVEL, Finding, Verdict
from tessera.audit.guesses import CLIENT
from tessera.audit.suite import audited
from tessera.audit.two_server_view import HELPER, LEADER
from tessera.cli.format import AsJson
from tessera.ids import SERVER
from tessera.report.numbers import in_unit, percent, share
from tessera.report.terminal import Cell, table
from tessera.runs.folder import AUDIT, RunFolder


def audit(
    run: Annotated[Path, typer.Argument(help="A run's folder, with views and truth.")],
    as_json: AsJson = False,
) -> None:
    """Attack the recorded views of RUN, and compare with what its plan claims.

    What it finds is kept in the folder (audit.json), where `tessera statement` reads it.
    """
    found = audited(run)
    kept = found.as_json()
    RunFolder.load(run).keep(AUDIT, kept)
    if as_json:
        typer.echo(json.dumps(kept))
    else:
        show(found.findings)
        show_tables(found.tables)


def show(found: Sequence[Finding]) -> None:
    """A table of figures, and under it what each means, at most 80 characters wide, on stdout."""
    console = Console(width=80)
    rounds = max((finding.rounds for finding in found), default=0)
    title = f"Attacks on {rounds:,} recorded rounds, by {attackers(found)}"
    guessed = any(not math.isnan(finding.chance) for finding in found)
    head = ["attack", "measured (CI)", "claimed", *(["chance"] if guessed else []), "verdict"]
    rows: list[list[Cell]] = []
    for finding in found:
        broken = finding.verdict is Verdict.BROKEN
        claimed = in_unit(finding.claimed, finding.unit) if finding.claims else "nothing"
        by_chance = "" if math.isnan(finding.chance) else share(finding.chance)
        verdict = Text(finding.verdict.value, "bold red" if broken else "")
        row = [finding.name, measured(finding), claimed, *([by_chance] if guessed else [])]
        rows.append([*row, verdict])
    console.print(table(head, rows, title=title if rounds else "Canaries through the trainer"))
    console.print(Padding(intervals(found, guessed), (0, 0, 1, 1)))
    for name, meaning in dict.fromkeys((f.kind or f.name, f.meaning) for f in found):
        console.print(Padding(f"{name}: [dim]{meaning}[/dim]", (0, 0, 0, 1)))


def intervals(found: Sequence[Finding], guessed: bool) -> str:
    """What the figures in brackets are, and the columns beside them."""
    tests = sum(finding.chance_can_break for finding in found)
    text = (
        f"CI: confidence intervals, corrected for {tests} claims: a run that keeps them all is "
        "reported as broken with a probability of 1% at most"
    )
    if tests < 2:
        text = f"CI: the {percent(LEVEL)} confidence interval"
    if not guessed:
        return f"{text}."
    return f"{text}. Chance: a random guess."


def attackers(found: Sequence[Finding]) -> str:
    """Who attacks: "the server", both of two, or also "one client"."""
    known = {finding.attacker for finding in found}
    names = [f"the {name}" for name in (SERVER, LEADER, HELPER) if name in known]
    return " and ".join([*names, *(["one client"] if CLIENT in known else [])])


def show_tables(tables: Mapping[str, Any]) -> None:
    """Tables 2 and 3 of Yang et al. 2021 for this run: clients by an attack's success."""
    if not tables:
        return
    console = Console(width=80)
    for name, title, first in (
        ("recovery", f"clients by recovery rate; error < g x {tables['step']:g}", "g"),
        ("ranking", "clients by hit ratio, as in Yang et al. 2021", "top"),
        ("ranking_fair", "clients by hit ratio, ties counted fairly", "top"),
    ):
        rows = [[setting, *(f"{part:.0%}" for part in s)] for setting, s in tables[name].items()]
        console.print(table((first, *tables["bins"]), rows, left=0, title=title))


def measured(finding: Finding) -> str:
    """The figure with its interval; a dash where nothing could be tried."""
    if finding.verdict is Verdict.UNTESTED:
        return "-"
    low, high = (
        in_unit(number, finding.unit).rstrip("%") for number in (finding.low, finding.high)
    )
    return f"{in_unit(finding.measured, finding.unit)} ({low}-{high})"
