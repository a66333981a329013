"""The demo's page: what was gained and at what price, one person, your size; runs are linked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tessera import __version__
from tessera.privacy.bound import KNOWN_ROW
from tessera.report import charts
from tessera.report.demo_figures import NEXT, Demonstration, is_full, known_in_words
from tessera.report.document import GENERATOR, document
from tessera.report.figures import RunFigures
from tessera.report.markup import Content, Markup, join, listing, table, tag
from tessera.report.numbers import score, seconds, share, signed, size
from tessera.report.sections import safety, summary
from tessera.report.sections.costs import traffic_of
from tessera.report.words import NOT_APPLICABLE, predictor

REPORT = "report.html"


def page(found: Demonstration, folder: Path) -> str:
    """The whole document, in `folder` beside the runs."""
    runs = found.runs
    said = ((word, text.replace("`", "")) for word, text in found.sentences())
    points = [join([tag("b", f"{word}: "), text]) for word, text in said]
    after = join(["Next: ", tag("code", NEXT), " writes a plan for a file of your own."])
    return document(
        summary.heading(runs),
        brand=GENERATOR,
        top=(summary.banners(runs), listing(points, "lede"), tag("p", after)),
        sections=[
            ("schemes", "The schemes side by side", schemes(found, folder)),
            ("person", "What the server knows about one person", person(found)),
            ("size", "At your size", at_your_size(found)),
            ("knowledge", "Who learns what", safety.knowledge(runs)),
        ],
        foot=f"Trained and written by tessera {__version__}. Research code: tested against vectors "
        "and by attack, without external review.",
    )


def link(run: RunFigures, folder: Path) -> Content:
    """A run's label, with its own report behind it."""
    try:
        target = (run.folder / REPORT).relative_to(folder)
    except ValueError:
        return run.label
    return tag("a", run.label, href=target.as_posix())


def schemes(found: Demonstration, folder: Path) -> list[Content]:
    metric = found.runs[0].metric
    head = ["scheme", "rounds", metric, "against best baseline", "up", "down"]
    head += ["client time", "server time", "between servers", "dropped out"]

    def row(run: RunFigures) -> list[Content]:
        baseline = run.best_baseline
        ahead = None if baseline is None else run.margin_over(baseline[1])
        colour = "good" if ahead is not None and ahead > 0 else "bad"
        stopped = found.stopped is not None and is_full(run.entry)
        return [
            link(run, folder),
            f"{run.finished}, stopped" if stopped else f"{run.finished}",
            tag("b", score(run.final)),
            score(None) if ahead is None else tag("span", signed(ahead), class_=colour),
            traffic_of(run, "bytes_up"),
            traffic_of(run, "bytes_down"),
            NOT_APPLICABLE if run.central else seconds(run.per_round("client_seconds")),
            seconds(run.per_round("server_seconds")),
            size(run.bytes_between) if run.two_servers else NOT_APPLICABLE,
            NOT_APPLICABLE if run.central else share(run.dropouts),
        ]

    notes: list[Content] = [note] if (note := found.stop_note()) is not None else []
    notes.append(
        "Bytes and times are means per client and round, times CPU times of a simulation; a "
        "scheme's name leads to its run, with rows, privacy, data and plan."
    )
    return [
        tag(
            "figure",
            curves(found),
            curves(found, narrow=True),
            tag("figcaption", f"{metric} on the test part; dotted: references without rounds."),
        ),
        table("One model, the same users, by scheme", head, map(row, found.runs), class_="cards"),
        listing(notes, "note"),
    ]


def curves(found: Demonstration, *, narrow: bool = False) -> Markup:
    """Federated runs as curves; central and the best baseline as lines."""

    def named(label: str, value: float | None) -> str:
        return label if narrow else f"{label} {score(value)}"

    runs = [run for run in found.federated if run.curve]
    slots = summary.slots(runs)
    references = []
    if found.central is not None and found.central.final is not None:
        final = found.central.final
        references.append(charts.ReferenceLine(named(found.central.label, final), final))
    best = runs[0].best_baseline if runs else None
    if best is not None:
        references.append(charts.ReferenceLine(named(predictor(best[0]), best[1]), best[1]))
    scores = {} if best is None else {best[0]: best[1]}
    return charts.lines(
        [
            charts.Series(named(run.label, run.final), run.curve, slot)
            for run, slot in zip(runs, slots, strict=True)
        ],
        references,
        name="curves-narrow" if narrow else "curves",
        title=f"{found.runs[0].metric} by round",
        description=summary.curve_words(runs, scores),
        x_label="rounds",
        y_label=found.runs[0].metric,
        width=328.0 if narrow else 960.0,
        height=300.0 if narrow else 380.0,
        class_="narrow" if narrow else "wide full",
    )


def person(found: Demonstration) -> list[Content]:
    rows: list[Sequence[Content]] = []
    for known in found.known:
        found_rows, sure, by_chance = known_in_words(known)
        ids = found.named(known)
        listed = ", ".join(ids[:12]) + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")
        cells = [known.scheme, f"{known.rounds}", found_rows, sure, by_chance or "no guess"]
        rows.append([*cells, tag("span", listed or "no item", class_="free left")])
    head = ["scheme", "rounds with this user", "found after all rounds", "sure (over 90%)"]
    return [
        tag("p", found.person_note().replace("`", "")),
        table(
            "Items of this user",
            [*head, "right by chance", "items the server is sure of"],
            rows,
            class_="cards listed",
        ),
        tag(
            "p",
            "Over the rounds, exact sums identify the holders of rows wherever cohorts are drawn "
            "anew: a row changes when its holder takes part. In fixed groups all members take part "
            "together, and which of them holds a row stays a guess for a server that knows no row "
            f"of theirs beforehand; {KNOWN_ROW.replace('`', '')}. {corrupt(found)}",
            class_="note",
        ),
    ]


def corrupt(found: Demonstration) -> str:
    """B if members of a group work with the server, where there are groups."""
    rows = found.secure
    if rows is None or not rows.plan.grouped:
        return ""
    return rows.plan.promise.corrupt_in_words()


def at_your_size(found: Demonstration) -> list[Content]:
    rows = [point.rows for point in next(iter(found.sizes.values()))]
    head = ["scheme", *(f"{each:,}" for each in rows)]
    body = [
        [
            scheme,
            *("too long" if p.bytes_both_ways is None else size(p.bytes_both_ways) for p in points),
        ]
        for scheme, points in found.sizes.items()
    ]
    return [
        tag(
            "figure",
            size_chart(found),
            size_chart(found, narrow=True),
            tag(
                "figcaption",
                "Bytes of one client in a round, both ways, forecast for tables of 1,000 to "
                "1,000,000,000 rows and as many rows a client as here; both axes are logarithmic. "
                "The curve of the full model ends where it does not fit one message.",
            ),
        ),
        table("The same by rows of the largest table", head, body, class_="cards"),
    ]


def size_chart(found: Demonstration, *, narrow: bool = False) -> Markup:
    known = {
        scheme: [
            (math.log10(p.rows), math.log10(p.bytes_both_ways)) for p in points if p.bytes_both_ways
        ]
        for scheme, points in found.sizes.items()
    }
    step = 2 if narrow else 1
    exponents = [x for points in known.values() for x, _ in points]
    heights = [y for points in known.values() for _, y in points]
    powers = range(math.floor(min(heights)), math.ceil(max(heights)) + 1)
    return charts.lines(
        [
            charts.Series(scheme, points, summary.SLOTS[scheme])
            for scheme, points in known.items()
            if points
        ],
        name="sizes-narrow" if narrow else "sizes",
        title="Traffic of one client by table size",
        description=". ".join(
            f"{scheme}: {size(10 ** points[0][1])} at 10^{points[0][0]:.0f} rows, "
            f"{size(10 ** points[-1][1])} at 10^{points[-1][0]:.0f}"
            for scheme, points in known.items()
            if points
        ),
        x_label="rows of the table",
        y_label="bytes per client and round",
        x_marks=[
            (e, f"10^{e}") for e in range(round(min(exponents)), round(max(exponents)) + 1, step)
        ],
        y_marks=[(power, size(10.0**power)) for power in powers],
        width=328.0 if narrow else 960.0,
        height=300.0 if narrow else 360.0,
        class_="narrow" if narrow else "wide full",
    )
