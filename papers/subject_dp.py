"""What privacy of people costs, cell by cell: what `tessera reproduce subject-dp` gives.

utility   error of ratings, AUC of clicks, for epsilon 1, 3 and 10: without noise, per item, per
          user, per subject by three accounts and two ways of drawing, by local differential privacy
          and by the algorithms of Marathe and Kanani 2022 as printed; trivial predictors beside it
users     the same for a recommender that is trained by a real plan, noise per user, by who adds it:
          a trusted server, clients in shares, each of two servers, every client for itself; and
          selected rows beside all; takes hours, and goes on where it was stopped
schedule  the same in cohorts of a hundred, each client in one round: a public schedule, and noise
          that is correlated over rounds
index     noise per index beside noise per user, on a made-up shop: AUC, and rows that are learnt
noise     the paper's noise by Z, what a person with 16 records really has under it, and what
          drawing records or people asks for

The paper measures nothing itself. Settings were chosen on a validation part (MovieLens 1M) and on
other made-up people (retail), with seed 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from papers import show
from papers import subject_dp_schedule as schedule
from papers import subject_dp_trained as trained
from papers.cells import Cell, Request, plain
from papers.runs import Cache
from papers.show import Chart, Layout, Page, Style
from papers.subject_dp_biases import NONE, PRINTED_RATE, PRINTED_STEPS, VARIANTS, Protection, run
from papers.subject_dp_shops import (
    DELTA,
    EPSILONS,
    MOVIELENS,
    NO_NOISE,
    SETS,
    UNITS,
    ShopData,
    column,
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
from tessera.report.numbers import score

PARTS: Final = ("utility", "noise", "users", "schedule", "index")
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


LEDE: Final = (
    "Twenty shops learn one bias per item from people who go to several of them. What leaves is a "
    "noisy sum per item; a person's own bias stays at its shops. The paper measures nothing: all "
    "figures are ours. Both of its algorithms are shown as printed; the epsilon beside them is "
    "their claim, and a person with many records does not have it."
)
USERS: Final = (
    "Where noise is per user, every figure is a training by a real plan: one bias per item over "
    "linear masks that clients fit again at home, three rounds with everybody, a tenth of the "
    "budget for the popularity of items."
)
ACROSS: Final = (NONE, "sum of means", "sum", trained.BEST)
"""What has no noise, and is drawn as a line across."""
COLUMN: Final = column(1.0).removesuffix("1")


def lede(found: Sequence[Cell]) -> tuple[str, ...]:
    return (LEDE, USERS) if any("per user" in cell.table for cell in found) else (LEDE,)


def over_epsilon(title: str, found: Sequence[Cell]) -> Iterator[Chart]:
    """Every variant over epsilon, and what needs no noise as lines across."""
    noisy = [cell for cell in found if cell.column.startswith(COLUMN)]
    if noisy:
        yield Chart(
            title=f"{title}, over epsilon",
            x_label="ε",
            y_label=title.split(", ")[1],
            curves={
                row: [
                    (float(cell.column.removeprefix(COLUMN)), cell.ours)
                    for cell in noisy
                    if cell.row == row and cell.ours is not None
                ]
                for row in dict.fromkeys(cell.row for cell in noisy)
            },
            across={c.row: c.ours for c in found if c.row in ACROSS and c.ours is not None},
            caption="By the epsilon that is kept, or, as printed, claimed. Lines across have no "
            "noise.",
        )


LAYOUT: Final = Layout(
    styles=(Style(charts=over_epsilon),),
    page=Page(
        title="What privacy of people costs",
        paper="Marathe, Kanani 2022, Subject Granular Differential Privacy in Federated Learning; "
        "it prints algorithms, and no figures",
        lede=lede,
        quick="One seed, and fewer ways of shopping.",
    ),
)


def cells(request: Request) -> list[Cell]:
    """The parts asked for; the page is written beside the cache."""
    known = [
        *(SETS if "utility" in request.parts else ()),
        *(trained.SETS if "users" in request.parts else ()),
        *(schedule.SETS if "schedule" in request.parts else ()),
    ]
    for name in request.sets:
        if name not in known:
            raise ConfigError(f"no set is called {name!r}", hint=f"one of {', '.join(known)}")
    cache = Cache(request.cache / "subject-dp")
    makers = {
        "noise": noise,
        "utility": utility,
        "users": trained.user_cells,
        "schedule": schedule.schedule_cells,
        "index": trained.index_cells,
    }
    found = [
        cell
        for part, make in makers.items()
        if part in request.parts
        for cell in make(cache, request)
    ]
    show.write(found, LAYOUT, request.cache / PAGE, quick=request.quick)
    return found


# --- utility --------------------------------------------------------------------------------------


def utility(cache: Cache, request: Request) -> Iterator[Cell]:
    seeds = request.seeds_of()
    for name in filter(request.wants, SETS):
        for each in QUICK_EACH if request.quick else EACH:
            table = title(name, each)
            yield from trivials(cache, table, name, each, seeds, request.data)
            for variant in VARIANTS:
                for epsilon in epsilons(variant, quick=request.quick):
                    scores = [
                        scored(cache, name, each, seed, variant, epsilon, request.data)
                        for seed in seeds
                    ]
                    note = variant.about
                    if (name, variant.name, epsilon) == (MOVIELENS, "subject", 3.0):
                        note += f"; attainable: {score(ATTAINABLE[each])}"
                    yield summed(table, variant.name, column(epsilon), scores, UNITS[name], note)


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
            partial(without_model, name, each, seed, data),
            title=f"{table}, seed {seed}",
        )
        for seed in seeds
    ]
    for row in found[0]:
        scores = [one[row] for one in found]
        yield summed(table, row, NO_NOISE, scores, UNITS[name], "a trivial predictor")


def without_model(name: str, each: int, seed: int, data: Path | None) -> dict[str, Any]:
    return dict(trivial(loaded(name, each, seed, data)))


def scored(
    cache: Cache,
    name: str,
    each: int,
    seed: int,
    variant: Protection,
    epsilon: float,
    data: Path | None,
) -> float:
    def work() -> float:
        found = loaded(name, each, seed, data)
        return run(variant, found, epsilon=epsilon, each=each, seed=seed)

    which = variant.name
    setting = {"set": name, "each": each, "seed": seed, "variant": which, "epsilon": epsilon}
    told = f"{name}, {each} per person, {which}, epsilon {epsilon:g}, seed {seed}"
    return cache.number("utility", setting, work, title=told)


@lru_cache(maxsize=1)
def loaded(name: str, each: int, seed: int, data: Path | None) -> ShopData:
    return market(name, each=each, seed=seed, data=data)


# --- noise ----------------------------------------------------------------------------------------


def noise(cache: Cache, request: Request) -> Iterator[Cell]:
    """At the paper's kind of target: rate 1 %, 1,000 steps."""
    table = f"noise over the clip for epsilon {TARGET:g}, delta {DELTA:g}, rate 1 %, 1,000 steps"
    printed = PrintedNoise(TARGET, DELTA, PRINTED_RATE, PRINTED_STEPS)
    for size in SIZES:
        sigma = cache.number(
            "sigma", {"size": size}, partial(printed.sigma, size), title=f"Z = {size}"
        )
        yield plain(table, f"as printed, Z = {size}", "noise", sigma, "clips")
    for row, records in (
        (f"records drawn, {RECORDS} of a person, one in a batch", RECORDS),
        ("people drawn", 1),
    ):
        sigma = cache.number("sound", {"records": records}, partial(sound, records), title=row)
        yield plain(table, row, "noise", sigma, "clips")
    table = f"a person with {RECORDS} records, one in a batch, under the paper's noise for Z = 1"
    for epsilon in EPSILONS:
        title = f"what epsilon {epsilon:g} keeps"
        left = cache.number("kept", {"epsilon": epsilon}, partial(kept, epsilon), title=title)
        yield plain(table, f"epsilon {epsilon:g} as claimed", "kept", left, "epsilon")


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
