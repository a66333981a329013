"""Cells for people: the same tables on a terminal and on a page.

A table is a line for every figure, or rows and columns. A work says in its `Layout` what differs
from that: what is said of a table, how its figures are written, which curves are drawn of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from papers.cells import FAILS, HOLDS, STARS, Cell, CellIndex, Claim, ratio, say, stars
from tessera.errors import __version__
from tessera.report import charts
from tessera.report import page as report
from tessera.report.document import Section, document
from tessera.report.markup import NBSP, Content, Markup, listing, table, tag
from tessera.report.numbers import NOT_APPLICABLE, figure, score

DEVIATION: Final = ", sd"
"""A column that ends so has the standard deviations of the one that is called so without it."""
PER_ROW: Final = "bins per row"
TEXTS: Final[Mapping[str, Callable[[float], str]]] = {
    STARS: stars,
    "RMSE": stars,
    "AUC": stars,
    PER_ROW: score,
}
"""How figures of a unit are written; all others have three digits."""
BY_RATIO: Final = ("ms", "MB")
"""Units of figures beside which stands their ratio to the paper's."""
SHORT: Final = 26
"""Characters of row labels that are not broken."""
MARKS: Final = 6
"""Marks for which a narrow axis has room; where there are more, those at powers of ten stay."""
COLOURS: Final = {HOLDS: "green", FAILS: "red"}
MISSING: Final = {"": NOT_APPLICABLE, "-": NOT_APPLICABLE}
CLASSES: Final = {HOLDS: "good", FAILS: "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over a logarithmic axis; `across` has values that do not depend on it."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    across: Mapping[str, float] = field(default_factory=dict)
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How the tables are shown whose titles begin with `of`; of two styles the longer one.

    As `lines` figures have their notes beside them; the default is that where the paper prints any.
    Otherwise rows and columns, `noted` with the note of a row's first figure at its end.
    """

    of: str = ""
    lines: bool | None = None
    noted: bool = False
    about: str | Callable[[Sequence[Cell]], str] = ""
    text: Callable[[float], str] | None = None
    charts: Callable[[str, Sequence[Cell]], Iterable[Chart]] | None = None
    section: str = ""  # the heading on a page of the tables that share it
    below: str = ""  # what a page says after the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a work's page says beside its tables."""

    title: str
    paper: str
    lede: Callable[[Sequence[Cell]], Sequence[str]]
    quick: str
    how: Callable[[bool], Sequence[str]] = lambda quick: ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the cells of a work are shown. `claims` follow from cells alone; `judged` says how."""

    styles: tuple[Style, ...] = ()
    page: Page | None = None
    claims: Callable[[Sequence[Cell]], Sequence[Claim]] = lambda cells: ()
    judged: str = ""

    def style(self, title: str) -> Style:
        fitting = [style for style in self.styles if title.startswith(style.of)]
        return max(fitting, key=lambda style: len(style.of), default=Style())


# --- tables ---------------------------------------------------------------------------------------


Heads = list[tuple[str, Literal["left", "right"]]]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text: heads with their alignment, then rows.

    The paper's figure of a row has a column of its own, or each of them stands in brackets.
    """

    title: str
    about: str
    head: Heads
    body: list[list[str]]


def grids(cells: Sequence[Cell], layout: Layout, *, notes: bool = False) -> list[Grid]:
    """Every table, in the order of the cells; with `notes` of rows that differ in them."""
    found = CellIndex(cells)
    return [grid(found, title, layout.style(title), notes=notes) for title in found.tables()]


def grid(cells: CellIndex, title: str, style: Style, *, notes: bool = False) -> Grid:
    inside = cells.of(title)
    about = style.about if isinstance(style.about, str) else style.about(inside)
    compared = any(cell.paper is not None for cell in inside)
    if compared if style.lines is None else style.lines:
        return Grid(title, about, *_lines(inside))
    noted = style.noted or (notes and len({cell.note for cell in inside}) > 1)
    columns = cells.columns(title)
    columns = [c for c in columns if c.removesuffix(DEVIATION) not in set(columns) - {c}]
    rows = {
        row: [cell for c in columns if (cell := cells.cell(title, row, c)) is not None]
        for row in cells.rows(title)
    }
    once = compared and all(len({c.paper for c in own} - {None}) < 2 for own in rows.values())
    head: Heads = [("", "left")]
    head += [(column, "right") for column in (*(["paper"] if once else []), *columns)]
    head += [("note", "left")] if noted else []
    body = []
    for row, own in rows.items():
        line = [row, *([_paper(own[0], style)] if once else [])]
        for column in columns:
            cell = cells.cell(title, row, column)
            deviation = cells.cell(title, row, f"{column}{DEVIATION}")
            line.append(_ours(cell, deviation, style, brackets=not once))
        body.append([*line, own[0].note] if noted else line)
    if compared and not once:
        about = f"{about} In brackets the paper's.".strip()
    return Grid(title, about, head, body)


def _lines(cells: Sequence[Cell]) -> tuple[Heads, list[list[str]]]:
    """A figure to a line, the paper's beside it."""
    head: Heads = [("", "left"), ("setting", "left")]
    head += [("paper", "right"), ("ours", "right"), ("note", "left")]
    body = []
    for cell in cells:
        paper = "-" if cell.paper is None else figure(cell.paper)
        ours = "-" if cell.ours is None else f"{figure(cell.ours)} {cell.unit}".strip()
        body.append([cell.row, cell.column, paper, ours, cell.note])
    return head, body


def written(value: float, cell: Cell, style: Style) -> str:
    return (style.text or TEXTS.get(cell.unit, figure))(value)


def _paper(cell: Cell, style: Style) -> str:
    if cell.paper is None:
        return "-"
    return written(cell.paper, cell, style) + ("*" if cell.doubtful else "")


def _ours(cell: Cell | None, deviation: Cell | None, style: Style, *, brackets: bool) -> str:
    if cell is None:
        return ""
    if cell.ours is None:
        return "-"
    off = cell.deviation if deviation is None else deviation.ours
    text = written(cell.ours, cell, style) + _off(off, cell, style)
    if cell.paper is not None and brackets:
        off = None if deviation is None else deviation.paper
        text += f" ({written(cell.paper, cell, style)}{_off(off, cell, style)})"
    elif cell.paper is not None and cell.unit in BY_RATIO:
        text += f" ({ratio(cell.ours, cell.paper)})"
    return text + (" MISSED" if cell.missed else "")


def _off(deviation: float | None, cell: Cell, style: Style) -> str:
    return "" if deviation is None else f"±{written(deviation, cell, style)}".replace("±0.", "±.")


# --- on a terminal --------------------------------------------------------------------------------


def terminal(cells: Sequence[Cell], console: Console, layout: Layout) -> None:
    """Every table, then what the paper claims and what came out."""
    for made in grids(cells, layout):
        console.print(f"[bold]{made.title}[/]")
        if made.about:
            console.print(made.about)
        shown = Table(box=SIMPLE_HEAD, pad_edge=False)
        labels = max(len(line[0]) for line in made.body)
        for at, (name, side) in enumerate(made.head):
            whole = name in ("paper", "ours") or (at == 0 and labels <= SHORT)
            shown.add_column(name, justify=side, overflow="fold", no_wrap=whole)
        for line in made.body:
            shown.add_row(*line)
        console.print(shown)
    for claim in layout.claims(cells):
        colour = COLOURS.get(claim.verdict, "yellow")
        console.print(f"[bold]{claim.claim}[/]: [{colour}]{claim.verdict}[/]")
        console.print(f"  {claim.evidence}\n")


# --- on a page ------------------------------------------------------------------------------------


def write(cells: Sequence[Cell], layout: Layout, out: Path, *, quick: bool) -> Path:
    """Write the work's page, all of it or nothing, and say where it is."""
    saved = report.save(page(cells, layout, quick=quick), out)
    say(f"page: {saved}")
    return saved


def page(cells: Sequence[Cell], layout: Layout, *, quick: bool) -> str:
    about = layout.page
    assert about is not None
    sections: list[Section] = []
    if claims := layout.claims(cells):
        head = "What holds, and what does not"
        sections.append(("claims", head, verdicts(claims, layout.judged)))
    every = enumerate(grids(cells, layout, notes=True))
    found = CellIndex(cells)
    for heading, inside in groupby(every, lambda at: heading_of(at[1], layout)):
        content = [
            part
            for at, made in inside
            for part in shown(f"chart{at}", made, found.of(made.title), layout.style(made.title))
        ]
        sections.append((f"part{len(sections)}", heading, content))
    if points := about.how(quick):
        sections.append(("how", "How the figures were made", [listing(points)]))
    banner = tag(
        "p",
        tag("strong", "A quick run."),
        f" {about.quick}",
        class_="banner",
        role="note",
    )
    first, *rest = about.lede(cells)
    return document(
        about.title,
        brand="tessera reproduce",
        top=(
            banner if quick else None,
            tag("p", first, class_="lede"),
            *(tag("p", text) for text in rest),
        ),
        sections=sections,
        foot=f"Made by tessera {__version__}. Figures of the paper: {about.paper}.",
    )


def heading_of(made: Grid, layout: Layout) -> str:
    return layout.style(made.title).section or made.title


def verdicts(claims: Sequence[Claim], judged: str) -> list[Content]:
    body: list[list[Content]] = [
        [c.claim, tag("b", c.verdict.replace(" ", NBSP), class_=CLASSES.get(c.verdict)), c.evidence]
        for c in claims
    ]
    head = ["claim", "here it", "the figures"]
    return [
        table("Claims of the paper", head, body, class_="cards prose", numeric=False),
        tag("p", judged, class_="note"),
    ]


def shown(name: str, made: Grid, cells: Sequence[Cell], style: Style) -> list[Content]:
    """Curves, the table, and what is said below it."""
    content: list[Content] = []
    for at, chart in enumerate(style.charts(made.title, cells) if style.charts else ()):
        content.append(drawn(f"{name}-{at}", chart))
    body: list[list[Content]] = [
        [
            tag("span", text, class_="free")
            if head == "note"
            else MISSING.get(text, unbroken(text, side))
            for text, (head, side) in zip(line, made.head, strict=True)
        ]
        for line in made.body
    ]
    caption = f"{made.title}. {made.about}" if made.about else made.title
    content.append(table(caption, [head for head, _ in made.head], body, class_="cards"))
    if style.below:
        content.append(tag("p", style.below, class_="note"))
    return content


def unbroken(text: str, side: str) -> str:
    """A figure and what stands in brackets beside it are on one line."""
    return text.replace(" ", NBSP) if side == "right" else text


def drawn(name: str, chart: Chart) -> Markup:
    """For wide screens and for narrow ones."""
    series = [
        charts.Series(label, [(math.log10(x), y) for x, y in points], slot % 8)
        for slot, (label, points) in enumerate(chart.curves.items())
    ]
    words = "; ".join(
        f"{label}: " + ", ".join(f"{x:g} {stars(y)}" for x, y in points)
        for label, points in chart.curves.items()
    )

    marks = charts.log_marks([x for curve in series for x, _ in curve.points])
    if len(marks) > MARKS:
        marks = [mark for mark in marks if mark[0].is_integer()]

    def lines(narrow: bool) -> Markup:
        return charts.lines(
            series,
            [charts.ReferenceLine(label, value) for label, value in chart.across.items()],
            name=f"{name}-narrow" if narrow else name,
            title=chart.title,
            description=f"By {chart.x_label}: {words}.",
            x_label=chart.x_label,
            x_marks=marks,
            y_label=chart.y_label,
            width=328.0 if narrow else 736.0,
            height=300.0 if narrow else 420.0,
            class_="narrow" if narrow else "wide",
        )

    return tag("figure", lines(False), lines(True), tag("figcaption", chart.caption))
