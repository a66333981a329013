"""What the demo found: its runs, what the server knows of one person, traffic at other sizes.

Three sentences sum it up, and are computed from the figures: a run that loses says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from tessera.audit.person import KnownRows
from tessera.errors import __version__
from tessera.privacy.index.bound import KNOWN_ROW
from tessera.report import charts, terminal
from tessera.report.comparison import against
from tessera.report.document import GENERATOR, document
from tessera.report.figures import RunFigures, waited
from tessera.report.lineup import baselines
from tessera.report.markup import Content, Markup, join, listing, table, tag
from tessera.report.numbers import (
    NOT_APPLICABLE,
    count,
    enumeration,
    plural,
    predictor,
    score,
    seconds,
    share,
    signed,
    size,
)
from tessera.report.sections import safety, summary
from tessera.report.sections.costs import traffic_of
from tessera.report.terminal import Page
from tessera.rounds.forecast.forecast import SizePoint
from tessera.rounds.schemes import SchemeEntry

NEXT: Final = "tessera init purchases.csv"
"""What to do after the demo."""
SHOWN: Final = 8
"""Items that are listed before "and ... more"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Runs in the order of the table. `stopped`: after how many rounds the full model was."""

    runs: Sequence[RunFigures] = field(repr=False)
    rounds: int
    group: int
    user: str
    items: Sequence[str]
    known: Sequence[KnownRows]
    names: Mapping[int, str] = field(repr=False)  # of her items, by row
    sizes: Mapping[str, Sequence[SizePoint]] = field(repr=False)
    stopped: int | None = None

    def _first(self, wanted: Callable[[SchemeEntry], bool]) -> RunFigures | None:
        return next((run for run in self.runs if wanted(run.entry)), None)

    @property
    def central(self) -> RunFigures | None:
        """All data in one place."""
        return self._first(lambda entry: not entry.federated)

    @property
    def full(self) -> RunFigures | None:
        """The full model in the clear: what the others are measured by."""
        return self._first(is_full)

    @property
    def clear(self) -> RunFigures | None:
        """Rows in the clear."""
        return self._first(lambda entry: entry.by_rows and not entry.hides)

    @property
    def secure(self) -> RunFigures | None:
        """Rows under secure sums."""
        return self._first(lambda entry: entry.randomises)

    @property
    def grouped(self) -> RunFigures | None:
        """The same, where its clients are in fixed groups."""
        rows = self.secure
        return rows if rows is not None and rows.plan.grouped else None

    @property
    def two(self) -> RunFigures | None:
        return self._first(lambda entry: entry.two_servers)

    @property
    def federated(self) -> list[RunFigures]:
        return [run for run in self.runs if not run.central]

    def was_stopped(self, run: RunFigures) -> bool:
        """Whether it is the full model, and was stopped before the last round."""
        return self.stopped is not None and is_full(run.entry)

    def named(self, known: KnownRows) -> list[str]:
        """The items that the server is sure of, by their ids."""
        return [self.names[int(row)] for row in known.sure]

    # --- in words -------------------------------------------------------------------------------

    def sentences(self) -> list[tuple[str, str]]:
        """What was gained, what is hidden, and the price: a word and a sentence each."""
        return [("Gained", self._gained()), ("Hidden", self._hidden()), ("Price", self._price())]

    def _gained(self) -> str:
        rows, whole = self.secure, self.full
        if rows is None or whole is None or not traffic(rows) or not traffic(whole):
            return "no traffic was measured."
        baseline = rows.best_baseline
        clear = self.clear
        beside = []
        if clear is not None:
            beside.append(f"{score(clear.final)} in the clear ({clear.label})")
        if self.central is not None:
            beside.append(
                f"{score(self.central.final)} with all data in one place ({self.central.label})"
            )
        if baseline is not None:
            beside.append(f"{score(baseline[1])} by the best baseline")
        return (
            f"under {rows.label} a client moves {size(traffic(rows))} a round, "
            f"{ratio(traffic(rows), traffic(whole))} of the full model's {size(traffic(whole))} "
            f"({whole.label}), and the {rows.metric} is {score(rows.final)}: {enumeration(beside)}."
        )

    def _hidden(self) -> str:
        of = plural(len(self.items), "item")
        read = [k.scheme for k in self.known if k.read and k.right == len(k.rows)]
        parts = (
            [f"of one user's {of} the server reads all under {enumeration(read)}"] if read else []
        )
        guesses = [known for known in self.known if not known.read]
        for known in guesses:
            guess = f"under {known.scheme} its best guess is right for {count(known.right)}"
            guess += f" ({count(known.by_chance)} by chance)"
            guess += f" and sure for {len(known.sure)}" if len(known.sure) else ", sure for none"
            parts.append(guess)
        told = "; ".join(parts) + (", each after all rounds." if guesses else ".")
        rows = self.grouped
        if rows is not None:
            told += f" Under {rows.label} {rows.plan.promise.in_words()}: {KNOWN_ROW}."
        return told

    def _price(self) -> str:
        parts = []
        rows, two = self.grouped, self.two
        if rows is not None:
            waits = waited(rows.rounds)
            parts.append(
                f"a group of {self.group} waits for its last member, "
                f"{waits['waited']['mean']:.1f} rounds on average, and ends if one leaves; "
                f"{share(waits['counted'])} of invitations counted"
            )
        if two is not None and traffic(two):
            parts.append(
                f"{two.label} moves {size(traffic(two))}, needs two servers that do not collude, "
                "and its exact sums identify holders over the rounds"
            )
        return "; ".join(parts) + "."

    def stop_note(self) -> str | None:
        """Why the full model was not trained to the end."""
        if self.stopped is None or self.full is None:
            return None
        return (
            f"{self.full.label} was stopped after {plural(self.stopped, 'round')} of "
            f"{self.rounds}: by then a client had moved more than under any other scheme in all "
            "rounds."
        )

    def person_note(self) -> str:
        rest = len(self.items) - SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        return (
            f"User {self.user} has {plural(len(self.items), 'item')}: "
            f"{', '.join(self.items[:SHOWN])}{more}. From all that it saw in all rounds the server "
            "guesses who holds each item, by the attacks of `tessera audit` and knowing none "
            "beforehand; counted are the items of this user for which the guess is right."
        )

    def summary(self) -> dict[str, Any]:
        """For machines."""
        return {
            "sentences": {word.lower(): text for word, text in self.sentences()},
            "stopped_after": self.stopped,
            "person": {
                "user": self.user,
                "items": list(self.items),
                "known": [
                    {
                        "scheme": known.scheme,
                        "rounds": known.rounds,
                        "read": known.read,
                        "right": known.right,
                        "sure": self.named(known),
                        "by_chance": known.by_chance,
                    }
                    for known in self.known
                ],
            },
            "by_size": {
                scheme: {str(point.rows): point.bytes_both_ways for point in points}
                for scheme, points in self.sizes.items()
            },
            "next": NEXT,
        }


def is_full(entry: SchemeEntry) -> bool:
    """Whether clients exchange the full model, in the clear."""
    return entry.federated and not entry.hides and not entry.by_rows


def traffic(run: RunFigures) -> float | None:
    """Bytes of one client in a round, both ways."""
    up, down = run.per_round("bytes_up"), run.per_round("bytes_down")
    return None if up is None or down is None else up + down


def ratio(part: float | None, whole: float | None) -> str:
    """ "1/35", or "2.1 times" where the part is the larger."""
    if not part or not whole:
        return "an unknown share"
    return f"1/{whole / part:.0f}" if part <= whole / 1.5 else f"{part / whole:.2g} times"


def known_in_words(known: KnownRows) -> tuple[str, str, str]:
    """Of one person's items: correctly attributed, with certainty, and by chance."""
    of = len(known.rows)
    if known.read:
        return f"{count(known.right)} of {of} read", f"{len(known.sure)} of {of}", ""
    return (
        f"{count(known.right)} of {of} guessed",
        f"{len(known.sure)} of {of}",
        f"{count(known.by_chance)} of {of}",
    )


# --- demo page ------------------------------------------------------------------------------------
#
# The demo's page: what was gained and at what price, one person, your size; runs are linked.


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
        return [
            link(run, folder),
            f"{run.finished}, stopped" if found.was_stopped(run) else f"{run.finished}",
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
    rows = found.grouped
    return "" if rows is None else rows.plan.promise.corrupt_in_words()


def both_ways(points: Sequence[SizePoint], too_long: str) -> list[str]:
    """Bytes of one client in a round at each size, or why there are none."""
    known = (point.bytes_both_ways for point in points)
    return [too_long if sent is None else size(sent) for sent in known]


def at_your_size(found: Demonstration) -> list[Content]:
    rows = [point.rows for point in next(iter(found.sizes.values()))]
    head = ["scheme", *(f"{each:,}" for each in rows)]
    body = [[scheme, *both_ways(points, "too long")] for scheme, points in found.sizes.items()]
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


# --- demo text ------------------------------------------------------------------------------------
#
# The demo on a terminal: three sentences, and a table under each heading of the page.


TOO_LONG: Final = "-"
STOPPED: Final = "*"


def show(found: Demonstration, page: Path, shown: Page) -> None:
    shown.say(lead=found.runs[0].title)
    for word, text in found.sentences():
        shown.say(text, lead=f"{word}:")
    shown.table(schemes_table(found))
    scores = baselines(found.runs)
    listed = ", ".join(f"{predictor(name)} {score(value)}" for name, value in scores.items())
    shown.say(f"Per client and round; {found.runs[0].metric} of the baselines: {listed}.")
    if (note := found.stop_note()) is not None:
        shown.say(f"{STOPPED} {note}")
    shown.say()
    shown.say(lead="What the server knows about one person")
    shown.say(found.person_note())
    shown.table(person_table(found))
    shown.say("both ways, per client and round, by rows of the largest table", lead="At your size:")
    shown.table(size_table(found))
    if any(point.bytes_both_ways is None for each in found.sizes.values() for point in each):
        shown.say(f"{TOO_LONG} the full model does not fit one message.")
    shown.line(f"The page: {page}")
    shown.line(f"Next: {NEXT}  (a plan for a file of your own)")


def schemes_table(found: Demonstration) -> Table:
    head = ("rounds", found.runs[0].metric, "against\nbaseline", "up", "down", "server\ntime")
    rows = [
        (
            run.label,
            f"{run.finished}{STOPPED if found.was_stopped(run) else ''}",
            score(run.final),
            against(run),
            traffic_of(run, "bytes_up"),
            "" if run.central else traffic_of(run, "bytes_down"),
            seconds(run.per_round("server_seconds")),
            "" if run.central else share(run.dropouts),
        )
        for run in found.runs
    ]
    return terminal.table(("scheme", *head, "dropped\nout"), rows)


def person_table(found: Demonstration) -> Table:
    head = (
        "scheme",
        "rounds with\nthis user",
        "items found,\nall rounds",
        "sure\n(over 90%)",
        "right by\nchance",
    )
    return terminal.table(
        head, [(known.scheme, f"{known.rounds}", *known_in_words(known)) for known in found.known]
    )


def size_table(found: Demonstration) -> Table:
    rows = [point.rows for point in next(iter(found.sizes.values()))]
    return terminal.table(
        ["scheme", *(f"10^{len(str(each)) - 1}" for each in rows)],
        [
            [
                scheme,
                *(
                    TOO_LONG if p.bytes_both_ways is None else size(p.bytes_both_ways)
                    for p in points
                ),
            ]
            for scheme, points in found.sizes.items()
        ],
    )
