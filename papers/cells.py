"""Cells: figures of a paper beside ours, and what was asked for.

What every work that `tessera reproduce` knows begins and ends with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from tessera.errors import ConfigError, DataMissing
from tessera.report.numbers import score
from tessera.rounds.events import Event

T = TypeVar("T")

MEGABYTE: Final = 2.0**20
"""The papers': a vector of 2^20 words of 128 bits is 16 of those, as printed."""
STARS: Final = "stars"
"""The unit of errors of ratings."""
MISSED: Final = "MISSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure. `paper` is None where the paper prints none.

    `deviation` over seeds and that the paper's figure is `doubtful` are for tables; for machines
    the note says them.
    """

    table: str
    row: str
    column: str
    paper: float | None = None
    ours: float | None
    unit: str = ""
    note: str = ""
    deviation: float | None = None
    doubtful: bool = False

    @property
    def missed(self) -> bool:
        """Whether it misses its target (`target`)."""
        return MISSED in self.note

    def printed(self) -> dict[str, Any]:
        """What --json prints."""
        names = ("table", "row", "column", "paper", "ours", "unit", "note")
        return {name: getattr(self, name) for name in names}


class CellIndex:
    """Cells by table, row and column."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.every = list(cells)
        self._by = {(c.table, c.row, c.column): c for c in self.every}

    def cell(self, table: str, row: str, column: str) -> Cell | None:
        return self._by.get((table, row, column))

    def ours(self, table: str, row: str, column: str) -> float | None:
        found = self.cell(table, row, column)
        return None if found is None else found.ours

    def paper(self, table: str, row: str, column: str) -> float | None:
        found = self.cell(table, row, column)
        return None if found is None else found.paper

    def line(self, table: str, column: str) -> dict[str, float]:
        """Ours of one column, by row, where there are any."""
        return {c.row: c.ours for c in self.of(table) if c.column == column and c.ours is not None}

    def tables(self, start: str = "") -> list[str]:
        return list(dict.fromkeys(c.table for c in self.every if c.table.startswith(start)))

    def of(self, table: str) -> list[Cell]:
        return [cell for cell in self.every if cell.table == table]

    def rows(self, table: str) -> list[str]:
        return list(dict.fromkeys(c.row for c in self.of(table)))

    def columns(self, table: str) -> list[str]:
        return list(dict.fromkeys(c.column for c in self.of(table)))


# --- what is asked for ----------------------------------------------------------------------------


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

    def seeds_of(self, every: Sequence[int] = (0, 1, 2)) -> tuple[int, ...]:
        """Those that were named; otherwise these, and quickly the first of them."""
        return self.seeds or tuple(every[:1] if self.quick else every)

    def wants(self, *names: str) -> bool:
        """Whether the data set with these names is asked for."""
        return not self.sets or any(name in self.sets for name in names)


def say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def there(read: Callable[[], T], name: str) -> T | None:
    """What `read` reads; None, and a note, where the files of that data set are not there."""
    try:
        return read()
    except DataMissing as error:
        say(f"left out: {name}: {error}")
        return None


def no_data(work: str) -> ConfigError:
    return ConfigError(f"{work}: no data set is there", hint="see docs/data.md, or --data")


# --- making cells ---------------------------------------------------------------------------------


def stars(value: float) -> str:
    """Errors of ratings: four decimals tell two models apart."""
    return score(value, digits=4)


def ratio(ours: float, paper: float) -> str:
    share = ours / paper
    return f"{share:.2f}x" if share >= 0.05 else f"1/{1 / share:,.0f}"


def target(text: str, *, met: bool) -> str:
    """For a note: what was aimed at, and whether it was reached."""
    return f"target {text}: {'met' if met else MISSED}"


def compared(
    table: str, row: str, column: str, paper: float | None, ours: float, unit: str, note: str = ""
) -> Cell:
    """A cell whose note begins with the ratio, where there is something to compare with."""
    parts = [ratio(ours, paper) if paper is not None and ours > 0 else "", note]
    joined = "; ".join(part for part in parts if part)
    return plain(table, row, column, ours, unit, joined, paper=paper)


def plain(
    table: str,
    row: str,
    column: str,
    ours: float | None,
    unit: str = "",
    note: str = "",
    *,
    paper: float | None = None,
) -> Cell:
    return Cell(table=table, row=row, column=column, paper=paper, ours=ours, unit=unit, note=note)


def line(
    table: str, row: str, figures: Iterable[tuple[str, float, str]], note: str = ""
) -> Iterator[Cell]:
    """The cells of one row, (column, ours, unit) each, under one note."""
    for column, ours, unit in figures:
        yield plain(table, row, column, ours, unit, note)


# --- claims ---------------------------------------------------------------------------------------

HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold"


@dataclass(frozen=True, slots=True)
class Claim:
    """One of the paper's, how it comes out here, and the figures behind that."""

    claim: str
    verdict: str
    evidence: str
