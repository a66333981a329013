"""The page of `tessera reproduce fedmmf`: what the paper claims and what came out, then the tables.

It is made from cells alone, those that `--json` prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from papers.cells import STARS, Cell, stars
from papers.fedmmf_claims import FAILS, HOLDS, CellIndex, claims, gain, sets_of
from tessera import __version__
from tessera.report import charts
from tessera.report import page as report
from tessera.report.document import Section, document
from tessera.report.markup import NBSP, Content, Markup, listing, table, tag
from tessera.report.numbers import NOT_APPLICABLE, figure, plural, score, share

TITLE: Final = "FedMMF: ratings under private masks"
PAPER: Final = (
    "Yang et al. 2021, Practical and Secure Federated Recommendation with Personalized Masks"
)
SAMPLED: Final = (
    "Cryptography is sampled: on MovieLens the first round of FedMF's first seed is really masked, "
    "with all its clients; all other rounds add the same integers in the clear, which changes no "
    "bit of a model.",
    "The whole model is summed with a count per row (secure-fedavg). On Last.fm that is more than "
    "a million values from each client, and no round of 1,000 clients was masked.",
)
QUICKLY: Final = (
    "The runs of Table 4 and Figure 4 have no real round: sums are of the same integers that "
    "clients would mask. Really masked rounds, of 100 clients, are under “Masked, unmasked, "
    "mixed”.",
    *SAMPLED[1:],
)
LOUD: Final = {HOLDS: "good", FAILS: "bad"}


def write(cells: Sequence[Cell], out: Path, *, quick: bool) -> Path:
    """Write the page, all of it or nothing; return where it is."""
    return report.save(page(cells, quick=quick), out)


def page(cells: Sequence[Cell], *, quick: bool) -> str:
    found = CellIndex(cells)
    parts: Sequence[tuple[str, str, list[Content]]] = (
        ("claims", "What holds, and what does not", verdicts(cells)),
        ("errors", "Errors (Table 4)", errors(found)),
        ("attacks", "Attacks on masked ratings (Tables 2 and 3)", attacks(found)),
        ("penalty", "Indicator and error over the penalty (Figure 4)", penalty(found)),
        ("paths", "Masked, unmasked, mixed", paths(found)),
        ("how", "How the figures were made", how(quick=quick)),
    )
    shown: list[Section] = [part for part in parts if part[2]]
    return document(
        TITLE,
        brand="tessera reproduce",
        top=(banner() if quick else None, lede(cells)),
        sections=shown,
        foot=f"Made by tessera {__version__}. Figures of the paper: {PAPER}.",
    )


def banner() -> Markup:
    return tag(
        "p",
        tag("strong", "A quick run."),
        " One seed, fewer rounds than the settings were tuned for, fewer models on the larger "
        "sets, and in the runs of Table 4 and Figure 4 nothing is masked. Errors are above those "
        "of a full run, and verdicts on them are of these runs only.",
        class_="banner",
        role="note",
    )


def lede(cells: Sequence[Cell]) -> Markup:
    every = claims(cells)
    counts = {verdict: [c for c in every if c.verdict == verdict] for verdict in (HOLDS, FAILS)}
    other = len(every) - sum(map(len, counts.values()))
    text = (
        f"Every client fits a small model to its own ratings, subtracts its predictions, and "
        f"federates the rest. Of {plural(len(every), 'claim')} that our figures reach, "
        f"{len(counts[HOLDS])} hold, {other} hold in part and {len(counts[FAILS])} do not."
    )
    return tag("p", text, class_="lede")


def verdicts(cells: Sequence[Cell]) -> list[Content]:
    body: list[list[Content]] = [
        [c.claim, tag("b", c.verdict.replace(" ", NBSP), class_=LOUD.get(c.verdict)), c.evidence]
        for c in claims(cells)
    ]
    head = ["claim", "here it", "the figures"]
    note = (
        "The sentences follow from the cells below by fixed rules: differences in RMSE up to 0.001 "
        "count as none, and less than half of a printed gain counts as “holds in part”."
    )
    return [
        table(
            "Claims, by set and order of the masks", head, body, class_="cards prose", numeric=False
        ),
        tag("p", note, class_="note"),
    ]


# --- Table 4 --------------------------------------------------------------------------------------


def errors(cells: CellIndex) -> list[Content]:
    content: list[Content] = []
    for name, of in sets_of(cells).items():
        head = ["model", "RMSE", "paper's", "MAE", "paper's MAE", "how"]
        compared = any(cells.paper(of, row, "RMSE") is not None for row in cells.rows(of))
        body: list[list[Content]] = []
        for row in cells.rows(of):
            line: list[Content] = [row]
            for column in ("RMSE", "MAE"):
                line.append(tag("b", spread(cells, of, row, column)))
                if compared:
                    line.append(spread(cells, of, row, column, paper=True))
            body.append([*line, tag("span", made(cells, of, row), class_="free")])
        if not compared:
            head = ["model", "RMSE", "MAE", "how"]
        content += [
            tag("h3", name),
            table(caption(cells, of), head, body, class_="cards"),
        ]
    for of in cells.tables("Table 4, gains"):
        body = []
        for row in cells.rows(of):
            cell = cells.cell(of, row, "RMSE")
            if cell is not None and cell.ours is not None:
                paper = NOT_APPLICABLE if cell.paper is None else gain(cell.paper)
                body.append([row, tag("b", gain(cell.ours)), paper, cell.note])
        head = ["set and mask", "RMSE, difference", "paper's", "seeds"]
        content += [
            tag("h3", "What masks gain"),
            table("FedMMF less FedMF, on the same seeds", head, body, class_="cards"),
        ]
    return content


def caption(cells: CellIndex, of: str) -> str:
    """The split, and over how many seeds: the same for all rows."""
    first = cells.cell(of, cells.rows(of)[0], "RMSE")
    _, *rest = first.note.split("; ") if first else [""]
    return f"Mean and standard deviation over seeds; {', '.join(rest)}"


def made(cells: CellIndex, of: str, row: str) -> str:
    """How a row came about, without what the caption says."""
    cell = cells.cell(of, row, "RMSE")
    parts = cell.note.split("; ") if cell else []
    return parts[0] if parts[:1] == ["no model"] else "; ".join(parts[:-1])


def spread(cells: CellIndex, of: str, row: str, column: str, *, paper: bool = False) -> str:
    """A mean with its standard deviation."""
    value = (cells.paper if paper else cells.ours)(of, row, column)
    off = (cells.paper if paper else cells.ours)(of, row, f"{column}, sd")
    if value is None:
        return NOT_APPLICABLE
    return stars(value) + ("" if off is None else f"{NBSP}±{NBSP}{stars(off)}")


# --- attacks --------------------------------------------------------------------------------------


def attacks(cells: CellIndex) -> list[Content]:
    content: list[Content] = []
    for of in cells.tables("What masked ratings give away"):
        columns = cells.columns(of)
        body: list[list[Content]] = [
            [row, *(area(cells.ours(of, row, column)) for column in columns)]
            for row in cells.rows(of)
        ]
        content.append(table(of, ["masks", *columns], body, class_="cards"))
    if content:
        content.append(
            tag(
                "p",
                "A masked rating is the rating less the client's own prediction of it: what a "
                "client with an unmasked update shares, once the server has solved the update for "
                "ratings. A correlation of 1 means that the mask hides nothing.",
                class_="note",
            )
        )
    for number, what in (("2", "recovery rate"), ("3", "hit ratio")):
        tables = cells.tables(f"Table {number}")
        details: list[Content] = []
        for of in tables:
            head = ["", *cells.columns(of)]
            body = [
                [row, *(beside(cells.cell(of, row, c)) for c in cells.columns(of))]
                for row in cells.rows(of)
            ]
            caption = f"{of}. Per cent of clients by {what}"
            compared = any(cells.paper(of, row, head[1]) is not None for row in cells.rows(of))
            if compared:
                caption += "; in brackets the paper's, on MovieLens 10M"
            details.append(table(caption, head, body))
        if details:
            content += [tag("h3", f"Table {number}"), *details]
    return content


def beside(cell: Cell | None) -> str:
    if cell is None or cell.ours is None:
        return NOT_APPLICABLE
    ours = f"{cell.ours:.0f}"
    return ours if cell.paper is None else f"{ours}{NBSP}({cell.paper:.0f})"


def area(value: float | None) -> str:
    return NOT_APPLICABLE if value is None else score(value)


# --- Figure 4 -------------------------------------------------------------------------------------


def penalty(cells: CellIndex) -> list[Content]:
    content: list[Content] = []
    for of in cells.tables("Figure 4"):
        for name, title, columns in (
            ("indicator", "privacy indicator J", ("J, ratings shared", "J, held-back ratings")),
            ("error", "RMSE", ("RMSE", "RMSE of the masks alone")),
        ):
            content.append(drawn(cells, of, name, title, columns))
        body: list[list[Content]] = [
            [row, *(area(cells.ours(of, row, c)) for c in cells.columns(of))]
            for row in cells.rows(of)
        ]
        first = cells.cell(of, cells.rows(of)[0], "RMSE")
        content.append(
            table(f"{of}. {first.note if first else ''}", ["penalty", *cells.columns(of)], body)
        )
        content.append(
            tag(
                "p",
                "J is the mean squared difference of rating and mask on a scale from 0 to 1 "
                "(Definition 3.1), so a small J means a mask that predicts well, and says nothing "
                "more: the order of a client's ratings survives it. The paper reads its own J off "
                "the ratings that are shared, where it can only rise with the penalty.",
                class_="note",
            )
        )
    return content


def drawn(cells: CellIndex, of: str, name: str, title: str, columns: Sequence[str]) -> Markup:
    series = {
        column: [
            (math.log10(float(row)), value)
            for row in cells.rows(of)
            if (value := cells.ours(of, row, column)) is not None and float(row) >= 1.0
        ]
        for column in columns
    }
    words = "; ".join(
        f"{column}: " + ", ".join(f"{10**x:.0f} {stars(y)}" for x, y in points)
        for column, points in series.items()
    )

    def chart(narrow: bool) -> Markup:
        return charts.lines(
            [
                charts.Series(short(c), points, slot)
                for slot, (c, points) in enumerate(series.items())
            ],
            name=f"{name}-narrow" if narrow else name,
            title=f"{title} over the mask's penalty",
            description=f"By penalty: {words}.",
            x_label="penalty, as a power of ten",
            y_label=title,
            width=328.0 if narrow else 736.0,
            height=240.0 if narrow else 300.0,
            class_="narrow" if narrow else "wide",
        )

    caption = f"{title[:1].upper()}{title[1:]} over the penalty of everybody's mask."
    return tag("figure", chart(False), chart(True), tag("figcaption", caption))


def short(column: str) -> str:
    names = {
        "J, ratings shared": "ratings shared",
        "J, held-back ratings": "held back",
        "RMSE": "FedMMF",
        "RMSE of the masks alone": "masks alone",
    }
    return names.get(column, column)


# --- paths ----------------------------------------------------------------------------------------


def paths(cells: CellIndex) -> list[Content]:
    content: list[Content] = []
    for of in cells.tables("Paths: "):
        columns = cells.columns(of)
        body: list[list[Content]] = []
        for row in cells.rows(of):
            line: list[Content] = [row]
            for column in columns:
                cell = cells.cell(of, row, column)
                line.append(NOT_APPLICABLE if cell is None else cell_text(cell))
            first = cells.cell(of, row, columns[0])
            body.append([*line, first.note if first else ""])
        content.append(
            table(of.removeprefix("Paths: "), ["", *columns, "note"], body, class_="cards")
        )
    return content


def cell_text(cell: Cell) -> str:
    if cell.ours is None:
        return NOT_APPLICABLE
    if cell.unit == STARS:
        return stars(cell.ours)
    if cell.unit == "%":
        return share(cell.ours / 100)
    return figure(cell.ours)


# --- how ------------------------------------------------------------------------------------------


def how(*, quick: bool) -> list[Content]:
    points: list[Content] = [
        "RMSE and MAE are over all test ratings, predictions cut to the scale. The split is in "
        "each table; the paper does not state its own.",
        "Settings of the factors and of linear masks were tuned on a tenth of the training "
        "ratings, with the test part left unread, and are the same for FedMF and FedMMF. Those of "
        "the federated models of attributes and of training in one place are first guesses: "
        "these rows are weaker baselines than they could be.",
        *(QUICKLY if quick else SAMPLED),
        "The global mean, and in every round the number of raters of each item, are released to "
        "the server; both are taken through the secure sum where there is one.",
        "Local models are the masks without a federation. They know the global mean.",
        "MovieLens 10M is not at hand: our 1M stands beside it, and is other data. The paper bins "
        "the plays of Last.fm in a way that it does not state; ours are quintiles of all plays.",
        "All secrets of these runs are derived from a fixed text, so that figures are "
        "reproducible. Accuracy is valid; there is no privacy in them.",
    ]
    return [listing(points)]
