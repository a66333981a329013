"""What noise leaves of a plan's model, as `tessera plan` and `tessera privacy dp` print it.

The formula is in `tessera.rounds.forecast.utility`; here is where its assumptions come from, and
how it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.errors import ConfigError
from tessera.plan import Plan
from tessera.report.numbers import count, figure
from tessera.rounds.forecast.utility import (
    CLICKS,
    RATINGS,
    Effects,
    NoisyTraining,
    RowPopularity,
    UtilityForecast,
)
from tessera.rounds.noise import noise_of

PopularityFile = Annotated[
    Path | None,
    typer.Option(
        "--popularity",
        metavar="FILE",
        help="With noise: how many users hold each row, one number to a line; public or charged "
        "counts, never exact ones (default: assumed, see --skew).",
    ),
]
Skew = Annotated[
    float,
    typer.Option(
        "--skew",
        help="With noise: exponent of the assumed popularity of rows; 0: all alike.",
    ),
]
SCALE: Final = 4.0
"""Of ratings from 1 to 5."""
OTHER: Final = ("sequences", "plays", "speakers", "trec", "mnist")
"""Tasks whose rows are not an effect on a label, so that the formula says nothing about them."""


def effects_of(task: str) -> Effects | None:
    """How much labels differ: of ratings, or of clicks; None where there are no such labels."""
    if task.startswith(OTHER):
        return None
    return RATINGS.scaled(SCALE) if task.startswith(("ratings", "shops")) else CLICKS


def popularity_of(
    path: Path | None, *, rows: int, held: float, users: int, skew: float
) -> RowPopularity:
    """As the file has it, or assumed."""
    if path is None:
        return RowPopularity.zipf(rows, min(held, rows), skew)
    try:
        counts = np.array([float(line) for line in path.read_text().split()], np.float64)
    except ValueError as error:
        raise ConfigError(
            f"{path}: not counts of holders ({error})", hint="one number to a line, for each row"
        ) from None
    if (counts < 0).any():
        raise ConfigError(f"{path}: a count is negative", hint="how many users hold each row")
    return RowPopularity.counted(counts, users, f"counts in {path.name}")


def utility_of(
    plan: Plan,
    *,
    users: int,
    rows: int,
    held: float,
    path: Path | None = None,
    skew: float = 1.0,
) -> UtilityForecast | None:
    """None where the formula says nothing: no noise on sums, no rows, or another kind of labels."""
    effects = effects_of(plan.task.name)
    training = NoisyTraining.of(noise_of(plan).calibrated(), users)
    if effects is None or training is None or not rows:
        return None
    popularity = popularity_of(path, rows=rows, held=held, users=users, skew=skew)
    return UtilityForecast(training, users, popularity, effects)


MUCH: Final = 1e4
HEADING: Final = "what noise leaves of the model: an expectation, not a promise"


def utility_facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Under the heading, one to a line."""
    over, holders = found["noise_over_signal"], found["holders"]
    lines = [
        (
            f"noise over signal, {name} row",
            f"{figure(over[name]) if over[name] < MUCH else 'very much'} "
            f"({count(holders[name])} holders)",
        )
        for name in over
    ]
    lines.append(("rows learnt at all", f"{count(found['rows_learnt'])} of {count(found['rows'])}"))
    for goal, key in (
        ("nothing shared", "users_to_beat_nothing_shared"),
        ("the sum of means", "users_to_beat_sum_of_means"),
    ):
        needed = "no number" if found[key] is None else count(found[key])
        lines.append((f"users to beat {goal}", f"{needed} (here {count(found['users'])})"))
    held = figure(found["rows_held"])
    return [
        *lines,
        ("popularity of rows", f"{found['popularity']}; a client holds {held}"),
        ("how much labels differ", f"assumed: {found['effects']}"),
    ]
