"""Costs of each scheme beside its accuracy: the table, then bytes and seconds by category."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from tessera.privacy.index.exposure import epsilon_longitudinal, epsilon_per_round
from tessera.report import charts
from tessera.report.figures import RunFigures
from tessera.report.lineup import baselines
from tessera.report.markup import Content, Markup, join, listing, table, tag
from tessera.report.numbers import (
    LONGITUDINAL,
    NOT_APPLICABLE,
    NOT_MEASURED,
    epsilon,
    percent,
    plural,
    score,
    seconds,
    share,
    signed,
    size,
)
from tessera.rounds.schemes import SCHEMES

IN_THE_CLEAR: Final = "in clear"
"""For a scheme that has nothing to bound an epsilon with: its server reads everything."""
CATEGORIES: Final = {
    "keys": "public keys and shares of secrets; with two servers, their handshake",
    "union": "private set union of the cohort's rows",
    "choice": "each client's randomised set of rows and the groups that follow from these; with "
    "two servers, DPF keys that select rows",
    "rows down": "download of the rows a client named, and of the dense part",
    "train": "local training",
    "update": "the client's update: masked, or in two shares, where the scheme is secure",
    "unmask": "the survivors' shares that unmask the sum; with two servers, their shares of it",
}


# --- schemes ------------------------------------------------------------------------------------


def schemes(runs: Sequence[RunFigures]) -> list[Content]:
    metric = runs[0].metric
    scores = baselines(runs)
    best = min if runs[0].lower_is_better else max
    baseline = best(scores.values()) if scores else None
    head = ["scheme", f"{metric}, final", f"{metric}, best (round)", "against best baseline"]
    head += ["bytes up", "bytes down", "client time", "server time"]
    two = any(run.two_servers for run in runs)
    head += ["helper time", "between servers"] if two else []
    random = any(run.answers_differ for run in runs)
    head += ["holder identified", *(["ε per round", LONGITUDINAL] if random else [])]
    head += ["rows below quorum", "dropouts"]

    def row(run: RunFigures) -> list[Content]:
        found = run.best
        ahead = None if baseline is None else run.margin_over(baseline)
        colour = "good" if ahead is not None and ahead > 0 else "bad"
        once, ever = epsilons(run)
        cells: list[Content] = [
            run.label,
            tag("b", run.said(score(run.final))),
            score(None) if found is None else f"{score(found[1])} ({found[0]:.0f})",
            score(None) if ahead is None else tag("span", signed(ahead), class_=colour),
            traffic_of(run, "bytes_up"),
            traffic_of(run, "bytes_down"),
            seconds(run.per_round("client_seconds")) if not run.central else NOT_APPLICABLE,
            seconds(run.per_round("server_seconds")),
            *((helper_time(run), between(run)) if two else ()),
            naming(run),
            *((once, ever) if random else ()),
            share(run.below_quorum) if run.entry.randomises else NOT_APPLICABLE,
            NOT_APPLICABLE if run.central else share(run.dropouts),
        ]
        return [run.said(cell) if type(cell) is str else cell for cell in cells]

    notes = [
        "“Best” is chosen by these scores and so is optimistic; “final” is not.",
        *(
            [f"A lower {metric} is better. Against the best baseline, + is better."]
            if runs[0].lower_is_better
            else []
        ),
        "Times are CPU times of a simulation on one machine; bytes are those of encoded messages.",
        f"Holder identified: {the_bound(runs)}",
        *(
            [
                "ε (epsilon): local differential privacy of a client's answers about one row, "
                "given the union; per round, and longitudinally over all rounds of a period. “In "
                "clear”: the server sees each client's own rows and updates. "
                f"{no_epsilon()}"
            ]
            if random
            else []
        ),
        *figures_from(runs),
    ]
    return [
        table(
            "Means per round: bytes and time of one client, time of the server",
            head,
            [row(run) for run in runs],
            class_="cards",
        ),
        listing(notes, "note"),
    ]


def the_bound(runs: Sequence[RunFigures]) -> str:
    """What the column of identified holders says, with the conditions of a bound."""
    bounds = dict.fromkeys(run.bound_in_words for run in runs if run.bound_in_words)
    text = "whether the server can tell in the end whose a row is"
    return f"{'; '.join([text, *bounds])}."


def no_epsilon() -> str:
    """Under which schemes that hide updates there are no answers to have an epsilon, and why."""
    found = [
        f"under {entry.name}, {entry.no_epsilon_because}"
        for entry in SCHEMES.values()
        if entry.hides and not entry.randomises
    ]
    return f"No ε applies {', nor '.join(found)}."


def traffic_of(run: RunFigures, name: str) -> str:
    if run.central:
        return "all data" if name == "bytes_up" else NOT_APPLICABLE
    return size(run.per_round(name))


def helper_time(run: RunFigures) -> str:
    return seconds(run.per_round("helper_seconds")) if run.two_servers else NOT_APPLICABLE


def between(run: RunFigures) -> str:
    return size(run.bytes_between) if run.two_servers else NOT_APPLICABLE


def naming(run: RunFigures) -> str:
    """Whether the server can tell whose a row is after many rounds; or with which probability."""
    if run.noise.covers_rows:
        return "in its ε"
    return "yes" if run.naming_bound >= 1.0 else f"≤ {percent(run.naming_bound)}"


def epsilons(run: RunFigures) -> tuple[str, str]:
    """The level of one round and of any number of them, or why there is none."""
    privacy = run.index_privacy
    if privacy is not None and not run.answers_differ:
        return NOT_APPLICABLE, NOT_APPLICABLE
    if privacy is not None:
        return epsilon(epsilon_per_round(privacy)), epsilon(epsilon_longitudinal(privacy))
    if run.entry.randomises:
        return NOT_MEASURED, NOT_MEASURED
    word = NOT_APPLICABLE if run.entry.hides else IN_THE_CLEAR
    return word, word


def figures_from(runs: Sequence[RunFigures]) -> list[str]:
    """Which figures come from which rounds, where cryptography was on some of them only."""
    sampled = [run for run in runs if run.sampled and run.finished]
    if not sampled:
        return []
    counts = [
        (f"{run.label}: " if len(runs) > 1 else "")
        + f"{len(run.measured_rounds):,} of {plural(run.finished, 'round')}"
        for run in sampled
    ]
    masked = " and really masked" if any(run.secure for run in sampled) else ""
    return [
        f"Cryptography was sampled ({'; '.join(counts)}): bytes and protocol times come only from "
        f"rounds that were simulated message by message{masked}. The others are ideal rounds: they "
        f"add the same quantised integers in the clear. {runs[0].metric}, training time, "
        "rows and dropouts come from all rounds."
    ]


# --- traffic and time ---------------------------------------------------------------------------


def traffic(runs: Sequence[RunFigures]) -> list[Content]:
    shown = [run for run in runs if not run.central]
    content: list[Content] = []
    if shown:
        content.append(
            bar_figure(
                "traffic",
                "Bytes of one client in one round, by cost category",
                shown,
                (("up", "bytes_up"), ("down", "bytes_down")),
                size,
                "Bytes are exact: a message has one encoding, in simulation and deployment alike.",
            )
        )
    else:
        content.append(tag("p", "Nothing was sent: all data is in one place."))
    if shown:
        for who, kind, of in (
            ("one client", "client_seconds", shown),
            ("the server", "server_seconds", shown),
            ("the helper", "helper_seconds", [run for run in shown if run.two_servers]),
        ):
            content.append(
                bar_figure(
                    kind.partition("_")[0],
                    f"Time of {who} in one round, by cost category",
                    of,
                    (("", kind),),
                    seconds,
                    "CPU time, measured on the machine that simulated all parties.",
                )
            )
    content += writing(shown)
    for run in runs:
        if run.central and run.per_round("server_seconds") is not None:
            content.append(
                tag(
                    "p",
                    f"Under {run.label} the server does all the training: "
                    f"{seconds(run.per_round('server_seconds'))} for a round.",
                    class_="note",
                )
            )
    used = {
        category: None
        for run in runs
        for name in ("bytes_up", "bytes_down", "client_seconds", "server_seconds", "helper_seconds")
        for category in run.by_category(name)
    }
    names = [category for category in CATEGORIES if category in used]
    if names:
        terms = [join([tag("dt", name), tag("dd", CATEGORIES[name])]) for name in names]
        content += [tag("h3", "Cost categories"), tag("dl", *terms, class_="categories")]
        content.append(category_tables(runs))
    return content


def writing(runs: Sequence[RunFigures]) -> list[Content]:
    """How tables were written with two servers, and why."""
    content: list[Content] = []
    for run in runs:
        if not run.two_servers or not run.writing:
            continue
        content += [
            tag("h3", f"How tables are written, {run.label}"),
            listing(
                [join([tag("b", name), f": {reason}"]) for name, reason in run.writing.items()]
            ),
            tag(
                "p",
                "A client writes a table either by DPF keys (distributed point functions), whose "
                "size grows with the rows it may hold, or as two additive shares of the whole "
                "table. The plan names one, or takes the one with fewer bytes. On average "
                f"{size(run.bytes_between)} went between the servers per client.",
                class_="note",
            ),
        ]
    return content


def categories(runs: Sequence[RunFigures], names: Sequence[str]) -> list[str]:
    """Known categories in the order of a round, then any other."""
    found = {category: None for run in runs for name in names for category in run.by_category(name)}
    return [*CATEGORIES, *(category for category in found if category not in CATEGORIES)]


def bar_figure(
    name: str,
    title: str,
    runs: Sequence[RunFigures],
    kinds: Sequence[tuple[str, str]],
    say: Callable[[float | None], str],
    note: str,
) -> Markup | None:
    bars = [
        charts.Bar(run.label, label, run.by_category(kind), say(run.per_round(kind)))
        for run in runs
        for label, kind in kinds
    ]
    if not bars:
        return None
    descriptions = [
        f"{bar.group}{bar.label and ', '}{bar.label}: "
        + (", ".join(f"{k} {say(v)}" for k, v in bar.parts.items()) or NOT_MEASURED)
        for bar in bars
    ]
    chart = partial(
        charts.bars,
        bars,
        categories(runs, [kind for _, kind in kinds]),
        title=title,
        description="; ".join(descriptions) + ".",
    )
    return join([tag("h3", title), charts.figure(name, chart, note)])


def category_tables(runs: Sequence[RunFigures]) -> Markup:
    """The bars as figures."""
    kinds = (
        ("bytes_up", size),
        ("bytes_down", size),
        ("client_seconds", seconds),
        ("server_seconds", seconds),
        ("helper_seconds", seconds),
    )
    tables: list[Content] = []
    for run in runs:
        shown = kinds if run.two_servers else kinds[:-1]
        found = [(run.by_category(kind), say) for kind, say in shown]
        rows: list[list[Content]] = [
            [category, *(say(by[category]) if category in by else "-" for by, say in found)]
            for category in categories([run], [kind for kind, _ in kinds])
            if any(category in by for by, _ in found)
        ]
        if rows:
            head = ["category", "up", "down", "client", "server", "helper"][: len(shown) + 1]
            tables.append(table(f"{run.label}, means per round", head, rows))
    note = "A dash: nothing is sent or computed under this category."
    return tag(
        "details", tag("summary", "The bars as figures"), *tables, tag("p", note, class_="note")
    )
