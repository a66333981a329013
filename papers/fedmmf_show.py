"""Cells of the FedMMF paper on a terminal: a line per model, ours and the paper's side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from papers.cells import STARS, Cell, stars
from papers.fedmmf_claims import FAILS, HOLDS, CellIndex, claims, gain, sets_of
from tessera.report.numbers import figure, score

COLOURS = {HOLDS: "green", FAILS: "red"}


def show(cells: Sequence[Cell], console: Console) -> None:
    """Tables in their order, then what the paper claims and what came out."""
    found = CellIndex(cells)
    errors = sets_of(found).values()
    for title in dict.fromkeys(cell.table for cell in cells):
        remark = about(found, title)
        console.print(f"[bold]{title}[/]{remark and f'; {remark}'}")
        if title in errors:
            console.print(errors_of(found, title))
        elif title.startswith("Table 4, gains"):
            console.print(gains_of(found, title))
        else:
            console.print(pivot(found, title))
    for claim in claims(cells):
        colour = COLOURS.get(claim.verdict, "yellow")
        console.print(f"[bold]{claim.claim}[/]: [{colour}]{claim.verdict}[/]")
        console.print(f"  {claim.evidence}\n")


def frame() -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    return table


def about(cells: CellIndex, of: str) -> str:
    """What goes for the whole table."""
    inside = [cell for cell in cells.every if cell.table == of]
    if of in sets_of(cells).values():
        missed = any("MISSED" in cell.note for cell in inside)
        return split_of(cells, of) + ("; * misses its target" if missed else "")
    parts = []
    if all(cell.unit == "%" for cell in inside):
        parts.append("per cent of clients")
    if any(cell.paper is not None for cell in inside) and inside[0].unit == "%":
        parts.append("in brackets the paper's")
    return "; ".join(parts)


def errors_of(cells: CellIndex, of: str) -> Table:
    table = frame()
    compared = any(cells.paper(of, row, "RMSE") is not None for row in cells.rows(of))
    for column in ("RMSE", "MAE"):
        table.add_column(column, justify="right", no_wrap=True)
        if compared:
            table.add_column("paper's", justify="right", no_wrap=True)
    for row in cells.rows(of):
        line = []
        for column in ("RMSE", "MAE"):
            pairs = [(cells.ours(of, row, name)) for name in (column, f"{column}, sd")]
            line.append(spread(*pairs))
            if compared:
                pairs = [(cells.paper(of, row, name)) for name in (column, f"{column}, sd")]
                line.append(spread(*pairs))
        note = cells.cell(of, row, "RMSE")
        missed = " *" if note is not None and "MISSED" in note.note else ""
        table.add_row(row + missed, *line)
    return table


def split_of(cells: CellIndex, of: str) -> str:
    """How the set was split, and how its models were trained: the notes of two rows."""
    first = cells.cell(of, cells.rows(of)[0], "RMSE")
    trained = cells.cell(of, "FedMF", "RMSE")
    notes = [cell.note.split("; ") for cell in (first, trained) if cell is not None]
    return "; ".join([*notes[0][1:], *(notes[1][:1] if len(notes) > 1 else [])])


def spread(value: float | None, off: float | None) -> str:
    if value is None:
        return "-"
    return stars(value) + ("" if off is None else f"±{stars(off)}".replace("0.", "."))


def gains_of(cells: CellIndex, of: str) -> Table:
    table = frame()
    for column in ("RMSE", "paper's"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("seeds", overflow="fold")
    for row in cells.rows(of):
        cell = cells.cell(of, row, "RMSE")
        if cell is not None and cell.ours is not None:
            paper = "-" if cell.paper is None else gain(cell.paper)
            table.add_row(row, gain(cell.ours), paper, cell.note)
    return table


def pivot(cells: CellIndex, of: str) -> Table:
    """Rows and columns as they are; the paper's in brackets."""
    table = frame()
    for column in cells.columns(of):
        table.add_column(column, justify="right", overflow="fold")
    for row in cells.rows(of):
        table.add_row(row, *(cell_text(cells.cell(of, row, c)) for c in cells.columns(of)))
    return table


def cell_text(cell: Cell | None) -> str:
    if cell is None or cell.ours is None:
        return ""
    if cell.unit == "%":
        paper = "" if cell.paper is None else f" ({cell.paper:.0f})"
        return f"{cell.ours:.0f}{paper}"
    if cell.unit == STARS:
        return stars(cell.ours)
    return score(cell.ours) if 0.1 <= cell.ours < 1 else figure(cell.ours)
