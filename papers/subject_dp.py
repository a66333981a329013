"""What privacy of people costs, cell by cell: what `tessera reproduce subject-dp` gives.

utility   error of ratings, AUC of clicks, for epsilon 1, 3 and 10: without noise, per item, per
          user, per subject by three accounts and two ways of drawing, by local differential privacy
          and by the algorithms of Marathe and Kanani 2022 as printed; trivial predictors beside it
users     the same for a recommender that is trained by a real plan, noise per user, by who adds it:
          a trusted server, clients in shares, each of two servers, every client for itself; and
          selected rows beside all; takes hours, and goes on where it was stopped
index     noise per index beside noise per user, on a made-up shop: AUC, and rows that are learnt
noise     the paper's noise by Z, what a person with 16 records really has under it, and what
          drawing records or people asks for

The paper measures nothing itself. Settings were chosen on a validation part (MovieLens 1M) and on
other made-up people (retail), with seed 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from papers import subject_dp_index, subject_dp_page, subject_dp_users
from papers.cells import Cell, Request, plain, say
from papers.runs import Cache
from papers.subject_dp_biases import NONE, PRINTED_RATE, PRINTED_STEPS, VARIANTS, Protection, run
from papers.subject_dp_shops import (
    DELTA,
    EPSILONS,
    MOVIELENS,
    NO_NOISE,
    SEEDS,
    SETS,
    UNITS,
    ShopData,
    market,
    summed,
    trivial,
)
from tessera.errors import ConfigError
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.accounting import noise_for
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.subjects import PrintedNoise
from tessera.report.numbers import figure, score

__all__ = ["DEFAULT", "PARTS", "TAKES", "cells", "show"]

PARTS: Final = ("utility", "noise", "users", "index")
DEFAULT: Final = ("utility", "noise")
TAKES: Final = ("seeds", "sets", "data")
PAGE: Final = "subject-dp.html"

EACH: Final = (1, 2, 3, 5)
QUICK_EACH: Final = (1, 3)
QUICK_PRINTED: Final = (3.0,)
SIZES: Final = (1, 2, 4, 8)
RECORDS: Final = 16
TARGET: Final = 4.0
ATTAINABLE: Final = {1: 0.922, 2: 0.931, 3: 0.937, 5: 0.948}
"""RMSE of `subject` at epsilon 3, by shops per person: seen before, with settings from the test
part."""


def cells(request: Request) -> list[Cell]:
    """The parts asked for; the page is written beside the cache."""
    known = subject_dp_users.SETS if request.parts == ("users",) else SETS
    for name in request.sets:
        if name not in known:
            raise ConfigError(f"no set is called {name!r}", hint=f"one of {', '.join(known)}")
    cache = Cache(request.cache / "subject-dp")
    found: list[Cell] = []
    if "noise" in request.parts:
        found += noise(cache)
    if "utility" in request.parts:
        found += utility(cache, request)
    if "users" in request.parts:
        found += subject_dp_users.cells(cache, request)
    if "index" in request.parts:
        found += subject_dp_index.cells(cache, request)
    written = subject_dp_page.write(found, request.cache / PAGE, quick=request.quick)
    say(f"page: {written}")
    return found


# --- utility --------------------------------------------------------------------------------------


def utility(cache: Cache, request: Request) -> Iterator[Cell]:
    seeds = request.seeds or ((0,) if request.quick else SEEDS)
    for name in request.sets or SETS:
        for each in QUICK_EACH if request.quick else EACH:
            table = title(name, each)
            yield from trivials(cache, table, name, each, seeds, request.data)
            for variant in VARIANTS:
                for epsilon in epsilons(variant, quick=request.quick):
                    scores = [
                        scored(cache, name, each, seed, variant.name, epsilon, request.data)
                        for seed in seeds
                    ]
                    column = f"epsilon {epsilon:g}" if epsilon else NO_NOISE
                    note = variant.about
                    if (name, variant.name, epsilon) == (MOVIELENS, "subject", 3.0):
                        note += f"; attainable: {score(ATTAINABLE[each])}"
                    yield summed(table, variant.name, column, scores, UNITS[name], note)


def epsilons(variant: Protection, *, quick: bool) -> Sequence[float]:
    """The paper's noise takes a minute to find for each epsilon: quickly there is one."""
    if variant.name == NONE:
        return (0.0,)
    return EPSILONS if variant.printed is None or not quick else QUICK_PRINTED


def title(name: str, each: int) -> str:
    return f"{name}, {UNITS[name]}, {each} {'shop' if each == 1 else 'shops'} per person"


def trivials(
    cache: Cache, table: str, name: str, each: int, seeds: Sequence[int], data: Path | None
) -> Iterator[Cell]:
    found = [
        cache.get(
            "trivial",
            {"set": name, "each": each, "seed": seed},
            lambda seed=seed: dict(trivial(loaded(name, each, seed, data))),  # type: ignore[misc]
            title=f"{table}, seed {seed}",
        )
        for seed in seeds
    ]
    for row in found[0]:
        scores = [one[row] for one in found]
        yield summed(table, row, NO_NOISE, scores, UNITS[name], "a trivial predictor")


def scored(
    cache: Cache,
    name: str,
    each: int,
    seed: int,
    which: str,
    epsilon: float,
    data: Path | None,
) -> float:
    variant = next(one for one in VARIANTS if one.name == which)

    def work() -> dict[str, Any]:
        found = loaded(name, each, seed, data)
        return {"score": run(variant, found, epsilon=epsilon, each=each, seed=seed)}

    setting = {"set": name, "each": each, "seed": seed, "variant": which, "epsilon": epsilon}
    told = f"{name}, {each} per person, {which}, epsilon {epsilon:g}, seed {seed}"
    return float(cache.get("utility", setting, work, title=told)["score"])


@lru_cache(maxsize=1)
def loaded(name: str, each: int, seed: int, data: Path | None) -> ShopData:
    return market(name, each=each, seed=seed, data=data)


# --- noise ----------------------------------------------------------------------------------------


def noise(cache: Cache) -> Iterator[Cell]:
    """At the paper's kind of target: rate 1 %, 1,000 steps."""
    table = f"noise over the clip for epsilon {TARGET:g}, delta {DELTA:g}, rate 1 %, 1,000 steps"
    printed = PrintedNoise(TARGET, DELTA, PRINTED_RATE, PRINTED_STEPS)
    for size in SIZES:
        found = cache.get(
            "sigma",
            {"size": size},
            lambda size=size: {"sigma": printed.sigma(size)},  # type: ignore[misc]
            title=f"Z = {size}",
        )
        yield plain(table, f"as printed, Z = {size}", "noise", found["sigma"], "clips")
    for row, records in (
        (f"records drawn, {RECORDS} of a person, one in a batch", RECORDS),
        ("people drawn", 1),
    ):
        found = cache.get(
            "sound",
            {"records": records},
            lambda records=records: {"sigma": sound(records)},  # type: ignore[misc]
            title=row,
        )
        yield plain(table, row, "noise", found["sigma"], "clips")
    table = f"a person with {RECORDS} records, one in a batch, under the paper's noise for Z = 1"
    for epsilon in EPSILONS:
        found = cache.get(
            "kept",
            {"epsilon": epsilon},
            lambda epsilon=epsilon: {"kept": kept(epsilon)},  # type: ignore[misc]
            title=f"what epsilon {epsilon:g} keeps",
        )
        yield plain(table, f"epsilon {epsilon:g} as claimed", "kept", found["kept"], "epsilon")


def sound(records: int) -> float:
    return noise_for(
        lambda sigma: [
            (GaussianNoise.records(sigma, PRINTED_RATE, of=records, cap=1), PRINTED_STEPS)
        ],
        adjacency=Adjacency.ADD_OR_REMOVE,
        epsilon=TARGET,
        delta=DELTA,
    )


def kept(epsilon: float) -> float:
    sigma = PrintedNoise(epsilon, DELTA, PRINTED_RATE, PRINTED_STEPS).sigma(1)
    person = GaussianNoise.records(sigma, PRINTED_RATE, of=RECORDS, cap=1)
    return epsilon_of([(person, PRINTED_STEPS)], adjacency=Adjacency.ADD_OR_REMOVE, delta=DELTA)


# --- for people -----------------------------------------------------------------------------------


def show(found: Sequence[Cell], console: Console) -> None:
    """A table per market, variants by epsilon, deviations beside the means."""
    for name in dict.fromkeys(cell.table for cell in found):
        inside = [cell for cell in found if cell.table == name]
        table = Table(title=name, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("", overflow="fold")
        columns = list(dict.fromkeys(cell.column for cell in inside))
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for row in dict.fromkeys(cell.row for cell in inside):
            own = {cell.column: shown(cell) for cell in inside if cell.row == row}
            table.add_row(row, *(own.get(column, "") for column in columns))
        console.print(table)


def shown(cell: Cell) -> str:
    if cell.ours is None:
        return "-"
    if cell.unit not in UNITS.values():
        return figure(cell.ours)
    spread = cell.note.split(" over ")[0] if cell.note.startswith("+-") else ""
    return f"{score(cell.ours, digits=4)} {spread}".strip()
