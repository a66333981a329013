"""`tessera mask-bound`: Theorem 1 of FedMMF (Yang et al. 2021) as a calculator.

The command parses and prints; every number comes from `tessera.privacy.masks`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from tessera.cli.format import AsJson
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
from tessera.report.terminal import Page, table

NOTHING: Final = 1.0
"""From this epsilon on the bound is empty: the indicator lies between 0 and 1."""
EMPTY: Final = "  an empty bound: the indicator is at most 1 in any case"


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
    """Figures, then what they rest on."""
    page, reached = Page(most=80), found["epsilon_of_ratings"]
    page.say(lead=f"Theorem 1 of FedMMF, {found['parameters']} parameters of {found['bits']} bits")
    lines = [
        (
            f"epsilon with {found['ratings']:,} ratings, delta {found['delta']:g}",
            INFINITE if isinstance(reached, str) else figure(reached),
        ),
        *([] if found["promises"] else [(EMPTY, "")]),
        (f"ratings needed for epsilon {found['epsilon']:g}", f"{found['samples_needed']:,}"),
        (
            "  by equation 23 of the paper, which lacks a factor of 2",
            f"{found['samples_as_printed']:,}",
        ),
    ]
    page.figures(lines)
    head = ("it assumes", "that is", "masks of tessera")
    page.table(table(head, [tuple(one.values()) for one in found["assumptions"]], left=3))
    page.say(found["meaning"])
