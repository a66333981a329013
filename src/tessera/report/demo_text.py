"""The demo on a terminal: three sentences, and a table under each heading of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tessera.report.comparison import against
from tessera.report.demo_figures import NEXT, Demonstration, is_full, known_in_words
from tessera.report.numbers import score, seconds, share, size
from tessera.report.sections.costs import traffic_of
from tessera.report.sections.summary import baselines
from tessera.report.words import predictor

MOST: Final = 100
"""Longer lines are hard to read, however wide the terminal is."""
TOO_LONG: Final = "-"
STOPPED: Final = "*"


def show(found: Demonstration, page: Path, console: Console) -> None:
    width = min(console.width, MOST)

    def say(text: str) -> None:
        console.print(text, width=width)

    say(f"[bold]{escape(found.runs[0].title)}[/]")
    for word, text in found.sentences():
        say(f"[bold]{word}:[/] {escape(text)}")
    console.print(schemes_table(found))
    scores = baselines(found.runs)
    listed = ", ".join(f"{predictor(name)} {score(value)}" for name, value in scores.items())
    say(f"Per client and round; {found.runs[0].metric} of the baselines: {escape(listed)}.")
    if (note := found.stop_note()) is not None:
        say(f"{STOPPED} {escape(note)}")
    say("\n[bold]What the server knows about one person[/]")
    say(escape(found.person_note()))
    console.print(person_table(found))
    say("[bold]At your size[/]: both ways, per client and round, by rows of the largest table")
    console.print(size_table(found))
    if any(point.bytes_both_ways is None for each in found.sizes.values() for point in each):
        say(f"{TOO_LONG} the full model does not fit one message.")
    console.print(f"The page: {escape(str(page))}", soft_wrap=True)
    console.print(f"Next: [bold]{NEXT}[/]  (a plan for a file of your own)", soft_wrap=True)


def plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def schemes_table(found: Demonstration) -> Table:
    table = plain_table()
    table.add_column("scheme", no_wrap=True)
    head = ("rounds", found.runs[0].metric, "against\nbaseline", "up", "down", "server\ntime")
    for name in (*head, "dropped\nout"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found.runs:
        stopped = found.stopped is not None and is_full(run.entry)
        table.add_row(
            run.label,
            f"{run.finished}{STOPPED}" if stopped else f"{run.finished}",
            score(run.final),
            against(run),
            traffic_of(run, "bytes_up"),
            "" if run.central else traffic_of(run, "bytes_down"),
            seconds(run.per_round("server_seconds")),
            "" if run.central else share(run.dropouts),
        )
    return table


def person_table(found: Demonstration) -> Table:
    table = plain_table()
    table.add_column("scheme", no_wrap=True)
    head = (
        "rounds with\nthis user",
        "items found,\nall rounds",
        "sure\n(over 90%)",
        "right by\nchance",
    )
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    for known in found.known:
        table.add_row(known.scheme, f"{known.rounds}", *known_in_words(known))
    return table


def size_table(found: Demonstration) -> Table:
    table = plain_table()
    table.add_column("scheme", no_wrap=True)
    rows = [point.rows for point in next(iter(found.sizes.values()))]
    for each in rows:
        table.add_column(f"10^{len(str(each)) - 1}", justify="right", no_wrap=True)
    for scheme, points in found.sizes.items():
        cells = [TOO_LONG if p.bytes_both_ways is None else size(p.bytes_both_ways) for p in points]
        table.add_row(scheme, *cells)
    return table
