"""The page of `tessera reproduce subject-dp`: curves over epsilon, then the tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from papers.cells import Cell
from papers.subject_dp_shops import UNITS
from tessera import __version__
from tessera.report import charts
from tessera.report import page as report
from tessera.report.document import Section, document
from tessera.report.markup import Content, Markup, table, tag
from tessera.report.numbers import figure, score

TITLE: Final = "What privacy of people costs"
PAPER: Final = "Marathe, Kanani 2022, Subject Granular Differential Privacy in Federated Learning"
LEDE: Final = (
    "Twenty shops learn one bias per item from people who go to several of them. What leaves is a "
    "noisy sum per item; a person's own bias stays at its shops. The paper measures nothing: all "
    "figures are ours. Both of its algorithms are shown as printed; the epsilon beside them is "
    "their claim, and a person with many records does not have it."
)
USERS: Final = (
    "Where noise is per user, every figure is a training by a real plan: one bias per item over "
    "linear masks that clients fit again at home, three rounds with everybody, a tenth of the "
    "budget for the popularity of items."
)
ACROSS: Final = ("none", "sum of means", "sum", "the best model here without privacy")
"""What has no noise, and is drawn as a line across."""
COLUMN: Final = "epsilon "


def write(cells: Sequence[Cell], out: Path, *, quick: bool) -> Path:
    """Write the page, all of it or nothing; return where it is."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return report.save(page(cells, quick=quick), out)


def page(cells: Sequence[Cell], *, quick: bool) -> str:
    sections: list[Section] = []
    for place, name in enumerate(dict.fromkeys(cell.table for cell in cells)):
        inside = [cell for cell in cells if cell.table == name]
        content: list[Content] = [listed(name, inside)]
        if any(cell.column.startswith(COLUMN) for cell in inside):
            content.insert(0, plot(f"chart{place}", name, inside))
        sections.append((f"part{place}", name, content))
    banner = tag(
        "p", tag("strong", "A quick run."), " One seed, and fewer ways of shopping.",
        class_="banner", role="note",
    )  # fmt: skip
    return document(
        TITLE,
        brand="tessera reproduce",
        top=(
            banner if quick else None,
            tag("p", LEDE, class_="lede"),
            tag("p", USERS) if any("per user" in cell.table for cell in cells) else None,
        ),
        sections=sections,
        foot=f"Made by tessera {__version__}. Algorithms as printed: {PAPER}.",
    )


def listed(name: str, cells: Sequence[Cell]) -> Markup:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    noted = any(cell.note for cell in cells)
    body: list[list[Content]] = []
    for row in dict.fromkeys(cell.row for cell in cells):
        own = {cell.column: cell for cell in cells if cell.row == row}
        line: list[Content] = [row]
        for column in columns:
            cell = own.get(column)
            line.append("" if cell is None or cell.ours is None else number(cell))
        body.append([*line, next(iter(own.values())).note] if noted else line)
    head = ["", *columns, "note (of the first figure)"] if noted else ["", *columns]
    return table(name, head, body, class_="cards")


def number(cell: Cell) -> str:
    assert cell.ours is not None
    return score(cell.ours, digits=4) if cell.unit in UNITS.values() else figure(cell.ours)


def plot(name: str, title: str, cells: Sequence[Cell]) -> Markup:
    """Every variant over epsilon, and what needs no noise as lines across."""
    curves = dict.fromkeys(cell.row for cell in cells if cell.column.startswith(COLUMN))
    series = [charts.Series(row, points(row, cells), slot % 8) for slot, row in enumerate(curves)]
    references = [
        charts.ReferenceLine(row, cell.ours)
        for row in ACROSS
        for cell in cells
        if cell.row == row and cell.ours is not None
    ]
    words = "; ".join(
        f"{curve.label}: {', '.join(f'{y:.3f}' for _, y in curve.points)}" for curve in series
    )

    def chart(narrow: bool) -> Markup:
        return charts.lines(
            series,
            references,
            name=f"{name}-narrow" if narrow else name,
            title=f"{title}, over epsilon",
            description=f"At epsilon 1, 3 and 10: {words}.",
            x_label="ε",
            x_marks=charts.log_marks([x for curve in series for x, _ in curve.points]),
            y_label=title.split(", ")[1],
            width=328.0 if narrow else 736.0,
            height=300.0 if narrow else 420.0,
            class_="narrow" if narrow else "wide",
        )

    caption = "By the epsilon that is kept, or, as printed, claimed. Lines across have no noise."
    return tag("figure", chart(False), chart(True), tag("figcaption", caption))


def points(row: str, cells: Sequence[Cell]) -> list[tuple[float, float]]:
    return [
        (math.log10(float(cell.column.removeprefix(COLUMN))), cell.ours)
        for cell in cells
        if cell.row == row and cell.column.startswith(COLUMN) and cell.ours is not None
    ]
