"""Cells: figures of a paper beside ours, and how they are shown to people.

What every work that `tessera reproduce` knows ends in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tessera.report.numbers import figure, score
from tessera.rounds.events import Event

MEGABYTE: Final = 2.0**20
"""The papers': a vector of 2^20 words of 128 bits is 16 of those, as printed."""
STARS: Final = "stars"
"""The unit of errors of ratings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure. `paper` is None where the paper prints none."""

    table: str
    row: str
    column: str
    paper: float | None
    ours: float | None
    unit: str
    note: str = ""


class Watcher(Protocol):
    """Where the progress of one training run is shown."""

    def on_event(self, event: Event) -> None: ...

    def on_setup(self, what: str, done: int, of: int) -> None: ...


class Watch(Protocol):
    """Begins to show a training run of so many rounds."""

    def __call__(
        self, rounds: int, *, title: str, metric: str = "AUC"
    ) -> AbstractContextManager[Watcher]: ...


class Unwatched:
    """Shows nothing."""

    def on_event(self, event: Event) -> None: ...

    def on_setup(self, what: str, done: int, of: int) -> None: ...


def unwatched(rounds: int, *, title: str, metric: str = "AUC") -> AbstractContextManager[Watcher]:
    return nullcontext(Unwatched())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be reproduced, and how much of it; None: as the work itself has it."""

    parts: tuple[str, ...]
    cache: Path
    quick: bool = False
    seeds: tuple[int, ...] | None = None
    rounds: int | None = None
    sets: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    data: Path | None = None
    watch: Watch = unwatched


def stars(value: float) -> str:
    """Errors of ratings: four decimals tell two models apart."""
    return score(value, digits=4)


def ratio(ours: float, paper: float) -> str:
    share = ours / paper
    return f"{share:.2f}x" if share >= 0.05 else f"1/{1 / share:,.0f}"


def compared(
    table: str, row: str, column: str, paper: float | None, ours: float, unit: str, note: str = ""
) -> Cell:
    """A cell whose note begins with the ratio, where there is something to compare with."""
    parts = [ratio(ours, paper) if paper is not None and ours > 0 else "", note]
    joined = "; ".join(part for part in parts if part)
    return Cell(table=table, row=row, column=column, paper=paper, ours=ours, unit=unit, note=joined)


def plain(table: str, row: str, column: str, ours: float, unit: str, note: str = "") -> Cell:
    return Cell(table=table, row=row, column=column, paper=None, ours=ours, unit=unit, note=note)


def say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


# --- for people -----------------------------------------------------------------------------------


def show(cells: Sequence[Cell], console: Console) -> None:
    """Figures with a paper's beside them one to a line; the others as rows and columns."""
    for title in dict.fromkeys(cell.table for cell in cells):
        of_table = [cell for cell in cells if cell.table == title]
        compared = any(cell.paper is not None for cell in of_table)
        console.print(listed(title, of_table) if compared else spread(title, of_table))


def listed(title: str, cells: Sequence[Cell]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    table.add_column("setting", overflow="fold")
    table.add_column("paper", justify="right", no_wrap=True)
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for cell in cells:
        paper = "-" if cell.paper is None else figure(cell.paper)
        ours = "-" if cell.ours is None else f"{figure(cell.ours)} {cell.unit}"
        table.add_row(cell.row, cell.column, paper, ours, cell.note)
    return table


def spread(title: str, cells: Sequence[Cell]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    columns = list(dict.fromkeys(cell.column for cell in cells))
    for column in columns:
        table.add_column(column, justify="right")
    for row in dict.fromkeys(cell.row for cell in cells):
        values = {cell.column: cell.ours for cell in cells if cell.row == row}
        shown = (values.get(column) for column in columns)
        table.add_row(row, *("" if value is None else figure(value) for value in shown))
    return table
