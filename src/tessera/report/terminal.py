"""Figures on a terminal: one page writer and one kind of table for all commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

MOST: Final = 100
"""Longer lines are hard to read, however wide the terminal is."""

Cell = str | Text


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Cell] | str],
    *,
    left: int = 1,
    wrap: bool = False,
    title: str | None = None,
    first: int | None = None,
    least: int | None = None,
    foot: Sequence[str] = (),
    note: str = "",
) -> Table:
    """Columns under a line, one space between them: as many figures as fit 80 columns.

    The `left` first columns hold text, which folds; the others figures, on the right, which are
    broken at spaces only where `wrap` says so. A row that is one string begins a section. `first`
    is the least width of the first column, `least` that of the others; `foot` is a last row and
    `note` a line below.
    """
    made = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_header=any(head),
        show_footer=bool(foot),
        caption=note or None,
        caption_justify="left",
    )
    for at, name in enumerate(head):
        below = foot[at] if foot else ""
        if at < left:
            made.add_column(name, below, min_width=first if at == 0 else None, overflow="fold")
        else:
            made.add_column(name, below, justify="right", min_width=least, no_wrap=not wrap)
    for row in rows:
        if isinstance(row, str):
            made.add_section()
            made.add_row(Text(row, "bold"))
        else:
            made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


class Page:
    """What a command prints for people: sentences, tables and lists of facts."""

    def __init__(self, console: Console | None = None, *, most: int = MOST) -> None:
        self.console = console or Console(highlight=False)
        self.width = min(self.console.width, most)

    def say(self, text: str = "", *, lead: str = "", style: str = "", loud: str = "bold") -> None:
        """A paragraph; `lead` is its beginning, in the style `loud`."""
        line = Text.assemble((lead, loud), " " if lead and text else "", (text, style))
        self.console.print(line, width=self.width)

    def point(self, text: str) -> None:
        """A paragraph of a list."""
        self.console.print(Padding(Text(f"- {text}"), (0, 0, 0, 1)), width=self.width)

    def line(self, text: str, *, lead: str = "", style: str = "") -> None:
        """A line that is not broken: it ends in a path or a command, to be copied."""
        self.console.print(Text.assemble((lead, "bold"), (text, style)), soft_wrap=True)

    def table(self, made: Table) -> None:
        self.console.print(made, width=self.width)

    def figures(self, lines: Iterable[tuple[str, str]]) -> None:
        """(what, value), one to a line, values on the right."""
        made = Table(box=box.SIMPLE, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        made.add_column(min_width=32)
        made.add_column(justify="right", min_width=12)
        for caption, value in lines:
            made.add_row(Text(caption), Text(value))
        self.console.print(made)

    def facts(self, heading: str, lines: Iterable[tuple[str, str]]) -> None:
        """(what, value) under a heading, values as texts that fold."""
        self.say(lead=heading)
        grid = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
        grid.add_column()
        grid.add_column(overflow="fold")
        for caption, value in lines:
            grid.add_row(Text(caption), Text(value))
        self.console.print(grid, width=self.width)
        self.console.print()
