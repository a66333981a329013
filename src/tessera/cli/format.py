"""What several commands share: options, warnings, and tables for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tessera.crypto import kernel
from tessera.data.split import VALIDATION
from tessera.errors import ConfigError
from tessera.plan import Plan
from tessera.privacy.index.bound import ANY_ROUNDS
from tessera.privacy.index.exposure import Holders
from tessera.report.numbers import plural, score, share
from tessera.report.tables import as_csv
from tessera.report.terminal import Page, table
from tessera.rounds import schemes

if TYPE_CHECKING:
    from tessera.runs.ranking import FullRanking

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
AsCsv = Annotated[
    Path | None,
    typer.Option(
        "--csv",
        metavar="FILE",
        help="Write the figures as CSV; - is stdout, with nothing else on it.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Also figures of runs with [dp] that are outside the privacy budget, marked: not to "
        "be published.",
    ),
]
DataFolder = Annotated[
    Path | None, typer.Option(help="Folder of data sets (default: $TESSERA_DATA).")
]

SLOWER: Final = "about twenty times"
"""How much longer NumPy takes for point functions than compiled code; `tessera doctor` measures."""
PAPERS_HOLDERS: Final = "1=0.867,2=0.110,3=0.023"


def warn_if_slow(plan: Plan) -> None:
    """One line on stderr where two servers have no compiled kernel, and what to do."""
    if schemes.of(plan).two_servers and kernel.describe().name == kernel.REFERENCE:
        typer.echo(
            f"note: point functions run on NumPy here, {SLOWER} slower than compiled code; "
            "`tessera doctor` says why",
            err=True,
        )


def model_of(plan: Plan) -> str:
    """The name of the task's model, "" where it has none."""
    if not plan.task.name:
        return ""
    from tessera.tasks.known import model_of as known

    return known(plan.task.name, plan.task.options)


# --- options --------------------------------------------------------------------------------------


def parse_number(name: str, text: str) -> float:
    """A decimal or a fraction."""
    try:
        return float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"{name} = {text!r} is not a number", hint="write it as 0.9375 or as 15/16"
        ) from None


def parse_holders(text: str) -> Holders:
    """`1=0.867,2=0.110`: the share of the union's rows for each number of holders."""
    shares: dict[int, float] = {}
    for part in text.split(","):
        count, equals, held = part.partition("=")
        if not equals or not count.strip().isdecimal() or int(count) in shares:
            raise ConfigError(
                f"holders: {part.strip()!r} is not a new count=share",
                hint=f"write --holders {PAPERS_HOLDERS}",
            )
        shares[int(count)] = parse_number(f"holders: share of {count.strip()}", held)
    return Holders.of(shares)


# --- naming ---------------------------------------------------------------------------------------


def named(naming: Mapping[str, Any], rounds: int) -> str:
    """A naming forecast in one sentence, with what the bound supposes."""
    after = f"{rounds} round{'s' if rounds != 1 else ''}"
    words = str(naming["bound_in_words"])
    if naming["settings"]["group"]:
        words += f", {ANY_ROUNDS}"
    guess = share(naming["estimate"]["best_guess"])
    return f"{words[0].upper()}{words[1:]}; estimated after {after}: {guess}."


def bounds(naming: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(caption, B): one where it is 1 anyway, and else by members that work with the server."""
    if not naming["settings"]["group"]:
        return [("at most (B), row of one holder", share(naming["bound"]["server"]))]
    return [
        (f"at most (B), {plural(int(each), 'member')} with the server", share(value))
        for each, value in naming["bound_by_corrupt"].items()
    ]


# --- files ----------------------------------------------------------------------------------------


STDOUT: Final = Path("-")


def figures_written(records: Sequence[Mapping[str, Any]], path: Path | None) -> bool:
    """Write records as CSV where one is asked for; whether stdout has them, and nothing else."""
    if path == STDOUT:
        typer.echo(as_csv(records), nl=False)
    elif path is not None:
        write_new(path, as_csv(records))
    return path == STDOUT


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet."""
    check_new(path)
    path.write_text(text, encoding="utf-8")


def check_new(path: Path) -> None:
    """`ConfigError` where there is such a file, or no folder for it."""
    if path != STDOUT and path.exists():
        raise ConfigError(f"{path} is there already", hint="name another file, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder", hint="make it first")


def show_ranking(found: FullRanking, page: Page) -> None:
    """A line per predictor, the model first."""
    page.say(
        f"{found.task}: {found.scheme}, {plural(found.rounds, 'round')}; {found.targets:,} "
        f"targets of the {found.part} part, each among {found.candidates:,} candidates"
    )
    names = list(next(iter(found.figures.values())))
    rows = [
        [predictor, *(score(figures[name]) for name in names)]
        for predictor, figures in found.figures.items()
    ]
    page.table(table(["predictor", *names], rows))
    how = "Nothing is sampled: every candidate is ranked"
    if found.sampled:
        how = (
            f"Each target is ranked among {found.sampled:,} items sampled by a public seed, as "
            "papers do: figures are far above those among all items"
        )
    page.say(f"{how}, and ties count against the target.", style="dim")
    if found.part == VALIDATION:
        page.say(
            f"Choose settings by this part; `tessera rank {shlex.quote(found.run)} --test` then "
            "ranks the test part, once.",
        )
    if found.looks:
        page.say(
            f"The test part of this run was looked at {plural(found.looks, 'time')} before: a "
            "figure that settings were chosen by is no test.",
            style="yellow",
        )
