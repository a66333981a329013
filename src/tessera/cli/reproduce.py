"""`tessera reproduce`: a paper's figures beside ours, cell by cell.

sfsl         section 6 of Niu et al. 2020: bytes, seconds, memory, curves
fedmmf       section 4 of Yang et al. 2021: ratings under private masks
fsl-tables   section 7 of Cui et al. 2022: two servers, point functions
fsl-accuracy Tables 7 and 8 of the same: accuracy with the largest changes only
fedrec       recommenders of the literature beside ours, by both protocols of ranking
subject-dp   what Marathe and Kanani 2022 left to do: utility of privacy per person, measured

Each is a module of the same name in `papers/`, with the names of its `PARTS`, those that are made
by `DEFAULT`, the options it `TAKES`, `cells`, which makes its parts from what was asked, and the
`LAYOUT` by which they are shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Final

import typer
from rich.console import Console

from tessera.cli.format import AsJson, DataFolder
from tessera.errors import ConfigError, __version__
from tessera.report.progress import progress

WORKS: Final = ("sfsl", "fedmmf", "fsl-tables", "fsl-accuracy", "subject-dp", "fedrec")
"""Loaded when they are asked for: some need torch."""
CHECKOUT: Final = Path(__file__).resolve().parents[3]
"""Where this file lies in a checkout. An installed package has no `papers/` there."""


def reproduce(
    name: Annotated[str, typer.Argument(help=f"What to reproduce: {', '.join(WORKS)}.")],
    part: Annotated[
        str | None,
        typer.Option(
            help="Parts, separated by commas. sfsl: bytes, time, memory, and curves (takes hours, "
            "not a default); fedmmf: table4, attacks, figure4, paths; "
            "fsl-tables: table3, table4, table5, table6, din; fsl-accuracy: trec, mnist; "
            "subject-dp: utility, noise, users, schedule, index; "
            "fedrec: ml-100k, ml-1m, lastfm, amazon."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer settings; under ten minutes.")
    ] = False,
    cache: Annotated[
        Path, typer.Option(help="Finished rounds are cached here, and a stopped run continues.")
    ] = Path("runs/reproduce"),
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of training, separated by commas (default: by data set)."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds of training (curves: 200; 10 with --quick)."),
    ] = None,
    sets: Annotated[
        str, typer.Option(help="Training: only these data sets, separated by commas.")
    ] = "",
    variants: Annotated[
        str,
        typer.Option(
            help="Curves: only these of central, fedavg, cpp1 (no cover) to cpp5 (the whole "
            'union). fsl-accuracy: only these rows, such as "1 % of rows". fedrec: only these of '
            "baselines, FedMF, PFedRec, next+pairs."
        ),
    ] = "",
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """A paper's tables beside ours: the printed values and the ones measured here."""
    if name not in WORKS:
        raise ConfigError(f"reproduce: unknown name {name!r}", hint=f"try {', '.join(WORKS)}")
    work, cells_of, show = (_paper(module) for module in (name.replace("-", "_"), "cells", "show"))
    parts = work.DEFAULT if part is None else listing(part)
    for p in parts:
        if p not in work.PARTS:
            raise ConfigError(
                f"reproduce: unknown part {p!r}", hint=f"parts: {', '.join(work.PARTS)}"
            )
    if not parts:
        raise ConfigError("reproduce: no part was named", hint=f"parts: {', '.join(work.PARTS)}")
    given = {"seeds": seeds, "rounds": rounds, "sets": sets, "variants": variants, "data": data}
    for option, value in given.items():
        if value not in (None, "") and option not in work.TAKES:
            raise ConfigError(
                f"reproduce: {name} takes no --{option}",
                hint=f"leave it out; it takes {enumerated(work.TAKES)}",
            )
    cells = work.cells(
        cells_of.Request(
            parts=tuple(parts),
            cache=cache,
            quick=quick,
            seeds=None if seeds is None else whole_numbers(seeds),
            rounds=rounds,
            sets=listing(sets),
            variants=listing(variants),
            data=data,
            watch=partial(progress, Console(stderr=True, highlight=False)),
        )
    )
    if as_json:
        document = {"name": name, "version": __version__, "quick": quick}
        document["cells"] = [cell.printed() for cell in cells]
        typer.echo(json.dumps(document))
    else:
        show.terminal(cells, Console(highlight=False), work.LAYOUT)


def _paper(name: str) -> ModuleType:
    """A module of the folder `papers/` of the checkout: it is not installed."""
    if not (CHECKOUT / "papers" / f"{name}.py").is_file():
        raise ConfigError(
            "reproduce: the papers' tables are made by code that is not part of the package",
            hint="clone the repository, `make demo` once, and call .venv/bin/tessera there",
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return import_module(f"papers.{name}")


def enumerated(options: Sequence[str]) -> str:
    return ", ".join(["--part", "--quick", "--cache", *(f"--{option}" for option in options)])


def listing(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def whole_numbers(text: str) -> tuple[int, ...]:
    if not listing(text) or not all(seed.isdigit() for seed in listing(text)):
        raise ConfigError(f"reproduce: --seeds {text!r}", hint="such as --seeds 0,1,2")
    return tuple(int(seed) for seed in listing(text))
