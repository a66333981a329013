"""Runs side by side, as a table for a terminal and as one object for machines."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from tessera.privacy.dp.mechanism import NoAccount
from tessera.report.figures import RunFigures
from tessera.report.lineup import baselines, differing
from tessera.report.numbers import (
    NOT_APPLICABLE,
    NOT_MEASURED,
    enumeration,
    epsilon,
    predictor,
    score,
    seconds,
    share,
    signed,
)
from tessera.report.sections.costs import between, epsilons, helper_time, naming, traffic_of
from tessera.report.sections.safety import PRESETS, presets_named
from tessera.report.sections.summary import banners_in_words
from tessera.report.terminal import Cell, Page, table
from tessera.rounds.events import NOT_CHARGED
from tessera.rounds.noise import composed

WIDE: Final = 138
"""Columns from which all figures of a run fit one line."""
WIDEST: Final = 156
"""The same where two servers have figures of their own."""
MOST: Final = 158


def summary(runs: Sequence[RunFigures], page: Path) -> dict[str, Any]:
    return {
        "task": runs[0].task.get("name"),
        "metric": runs[0].metric,
        "trivial": baselines(runs),
        "differing": differing(runs),
        "runs": [run.summary() for run in runs],
        "together": in_all(runs),
        "page": str(page),
    }


def text(runs: Sequence[RunFigures], width: int = 80) -> str:
    """What `show` prints, without a page, as plain text."""
    console = Console(
        width=width,
        highlight=False,
        color_system=None,
        file=io.StringIO(),
        force_jupyter=False,  # in a notebook rich would show it by itself, and leave no text
    )
    show(runs, None, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def show(runs: Sequence[RunFigures], page: Path | None, console: Console) -> None:
    """The runs in one table, or in three under each other where the terminal is narrow."""
    shown = Page(console, most=MOST)
    shown.say(lead=runs[0].title)
    for title, text in banners_in_words(runs):
        shown.say(text, lead=title, loud="bold red")
    scores = baselines(runs)
    if scores:
        listed = ", ".join(f"{predictor(name)} {score(value)}" for name, value in scores.items())
        shown.say(f"Baselines: {listed}")
    parts = [learning(runs), times(runs), protection(runs)]
    if shown.width >= (WIDEST if any(run.two_servers for run in runs) else WIDE):
        parts = [[column for part in parts for column in part]]
    for columns in parts:
        rows = [
            [run.label, *(said(run, cells[at]) for _, cells in columns)]
            for at, run in enumerate(runs)
        ]
        shown.table(table(["scheme", *(name for name, _ in columns)], rows, wrap=True))
    for bound in dict.fromkeys(run.bound_in_words for run in runs if run.bound_in_words):
        shown.say(f"Holder identified: {bound}.")
    if presets_named(runs):
        shown.say(PRESETS)
    if together := in_all(runs):
        shown.say(together)
    exact = [run.label for run in runs if run.uncharged("metric", "seconds")]
    if exact:
        shown.say(
            f"{NOT_CHARGED} (of {enumeration(exact)}): all figures here but ε, unless their "
            "metric has noise."
        )
    if any(run.sampled for run in runs):
        shown.say(
            "Bytes and protocol times are of the rounds with cryptography on; the page says which."
        )
    for line in differences(runs):
        shown.line(f"Differs: {line}")
    if page is not None:
        shown.line(f"The page: {page}")


def said(run: RunFigures, cell: Cell) -> Cell:
    return run.said(cell) if isinstance(cell, str) else cell


def differences(runs: Sequence[RunFigures]) -> Iterator[str]:
    """Settings that differ, one to a line; a section that some plans lack is one line."""
    bare = [run.label for run in runs if not run.noisy]
    some = 0 < len(bare) < len(runs)
    if some:
        yield f"[dp], a section that is not in the plan of {enumeration(bare)}"
    for name, values in differing(runs).items():
        if not (some and name.startswith("dp.")):
            yield f"{name} = {', '.join(dict.fromkeys(map(str, values)))}"


def in_all(runs: Sequence[RunFigures]) -> str:
    """What runs with noise over the same people add up to; nothing where there is only one."""
    noisy = [(run.plan, run.finished + run.aborted) for run in runs if run.noisy]
    if len(noisy) < 2 or any(run.test_entropy for run in runs):
        return ""
    try:
        found = composed(noisy)
    except NoAccount:
        return (
            f"The {len(noisy)} runs with noise are over the same people, and protect different "
            "units or against different observers: there is no one ε for all of them."
        )
    return (
        f"The {len(noisy)} runs with noise are over the same people, and together they have "
        f"spent {found}. Choosing the best of them by exact figures is not in it."
    )


Columns = list[tuple[str, Sequence[Cell]]]


def learning(runs: Sequence[RunFigures]) -> Columns:
    metric = runs[0].metric
    return [
        ("rounds", [f"{run.finished:,}" for run in runs]),
        (metric, [score(run.final) for run in runs]),
        ("best", [score(None if run.best is None else run.best[1]) for run in runs]),
        ("against\nbaseline", [against(run) for run in runs]),
        ("up per\nclient", [traffic_of(run, "bytes_up") for run in runs]),
        ("down per\nclient", [traffic_of(run, "bytes_down") for run in runs]),
    ]


def times(runs: Sequence[RunFigures]) -> Columns:
    return [
        (
            "client\ntime",
            [
                NOT_APPLICABLE if run.central else seconds(run.per_round("client_seconds"))
                for run in runs
            ],
        ),
        ("server\ntime", [seconds(run.per_round("server_seconds")) for run in runs]),
        *helper(runs),
    ]


def protection(runs: Sequence[RunFigures]) -> Columns:
    columns: Columns = [("holder\nidenti-\nfied", [naming(run) for run in runs])]
    if any(run.answers_differ for run in runs):
        columns += [
            ("ε per\nround", [epsilons(run)[0] for run in runs]),
            ("longitu-\ndinal ε", [epsilons(run)[1] for run in runs]),
            ("ε\nspent", [spent(run) for run in runs]),
        ]
    if any(run.noisy for run in runs):
        columns.append(("ε of\nnoise", [of_noise(run) for run in runs]))
    return [
        *columns,
        (
            "below\nquorum",
            [share(run.below_quorum) if run.entry.randomises else NOT_APPLICABLE for run in runs],
        ),
        (
            "dropped\nout",
            [NOT_APPLICABLE if run.central else share(run.dropouts) for run in runs],
        ),
    ]


def helper(runs: Sequence[RunFigures]) -> Columns:
    """What only two servers have."""
    if not any(run.two_servers for run in runs):
        return []
    return [
        ("helper\ntime", [helper_time(run) for run in runs]),
        ("between\nservers", [between(run) for run in runs]),
    ]


def spent(run: RunFigures) -> str:
    return epsilon(run.epsilon_spent) if run.answers_differ else NOT_APPLICABLE


def of_noise(run: RunFigures) -> str:
    if not run.noisy:
        return NOT_APPLICABLE
    return NOT_MEASURED if run.noise_spent is None else epsilon(run.noise_spent[0])


def against(run: RunFigures) -> Cell:
    """The margin over the best baseline, coloured where the terminal has colours."""
    baseline = run.best_baseline
    margin = None if baseline is None else run.margin_over(baseline[1])
    if margin is None:
        return NOT_MEASURED
    return Text(signed(margin), "green" if margin > 0 else "red")
