"""`tessera mask-bound`: Theorem 1 of FedMMF (Yang et al. 2021) as a calculator.

The command parses and prints; every number comes from `tessera.privacy.masks`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from tessera.cli.format import AsJson, figures_table
from tessera.privacy.dp.guarantee import json_number
from tessera.privacy.masks import (
    ASSUMPTIONS,
    MEANING,
    epsilon_of,
    hypotheses_of,
    samples_as_printed,
    samples_needed,
)
from tessera.report.numbers import INFINITE, figure

NOTHING: Final = 1.0
"""From this epsilon on the bound is empty: the indicator lies between 0 and 1."""


def mask_bound(
    ratings: Annotated[
        int, typer.Option(help="Ratings that the client's mask is fitted to.")
    ] = 100,
    epsilon: Annotated[
        float,
        typer.Option(
            help="Find the ratings needed for this epsilon: a distance from the best mask, not DP."
        ),
    ] = 0.05,
    delta: Annotated[float, typer.Option(help="Probability that the bound fails.")] = 0.05,
    parameters: Annotated[
        int, typer.Option(help="Parameters of a mask; 20 is a linear one on 18 genres and a year.")
    ] = 20,
    bits: Annotated[int, typer.Option(help="Bits per parameter.")] = 32,
    as_json: AsJson = False,
) -> None:
    """How close a private mask comes to the best of its class (Theorem 1, Yang et al. 2021)."""
    found = describe(ratings, epsilon, delta=delta, parameters=parameters, bits=bits)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show(found)


def describe(
    ratings: int, epsilon: float, *, delta: float, parameters: int, bits: int
) -> dict[str, Any]:
    """Everything the calculator knows, as plain JSON values."""
    hypotheses = hypotheses_of(parameters, bits)
    reached = epsilon_of(ratings, delta, hypotheses)
    return {
        "ratings": ratings,
        "epsilon": epsilon,
        "delta": delta,
        "parameters": parameters,
        "bits": bits,
        "log2_hypotheses": parameters * bits,
        "epsilon_of_ratings": json_number(reached),
        "promises": reached < NOTHING,
        "samples_needed": samples_needed(epsilon, delta, hypotheses),
        "samples_as_printed": samples_as_printed(epsilon, delta, hypotheses),
        "assumptions": [asdict(one) for one in ASSUMPTIONS],
        "meaning": MEANING,
    }


def show(found: dict[str, Any]) -> None:
    """Figures, then what they rest on, at most 80 characters wide, on stdout."""
    console = Console(width=80, highlight=False)
    title = f"Theorem 1 of FedMMF, {found['parameters']} parameters of {found['bits']} bits"
    figures = figures_table(title=title, show_header=False)
    figures.add_column("", width=60, overflow="fold")
    figures.add_column("", justify="right", min_width=12, no_wrap=True)
    reached = found["epsilon_of_ratings"]
    figures.add_row(
        f"epsilon with {found['ratings']:,} ratings, delta {found['delta']:g}",
        INFINITE if isinstance(reached, str) else figure(reached),
    )
    if not found["promises"]:
        figures.add_row("  an empty bound: the indicator is at most 1 in any case")
    figures.add_row(
        f"ratings needed for epsilon {found['epsilon']:g}", f"{found['samples_needed']:,}"
    )
    figures.add_row(
        "  by equation 23 as printed, which lacks a factor of 2",
        f"{found['samples_as_printed']:,}",
    )
    console.print(figures)
    rests = figures_table()
    for heading, width in (("it assumes", 15), ("that is", 28), ("masks of tessera", 32)):
        rests.add_column(heading, width=width, overflow="fold")
    for one in found["assumptions"]:
        # No markup: "[0, 1]" is text.
        rests.add_row(*(part.replace("[", r"\[") for part in one.values()))
    console.print(rests)
    console.print(found["meaning"])
