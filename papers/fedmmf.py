"""Section 4 of Yang et al. 2021 (FedMMF), cell by cell: what `tessera reproduce fedmmf` gives.

table4    errors of every model on every set, mean and standard deviation over seeds
attacks   Tables 2 and 3 on the masked ratings of those runs, counted in the paper's way and fairly
figure4   what a mask leaves of the ratings, and the error, over the mask's penalty
paths     who sends unmasked updates by the indicator, and that the model stays the same

Settings of the factors and of linear masks were tuned on a validation part of the training ratings;
those of the federated models of attributes and of central training are first guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Final

import numpy as np

from papers import fedmmf_models as fedmmf
from papers import show
from papers.cells import STARS, Cell, Request, line, no_data, plain, say, stars, target, there
from papers.fedmmf_claims import J_HELD_BACK, J_SHARED, LAYOUT, MASKS_ALONE
from papers.fedmmf_models import (
    BY_ATTRIBUTES,
    CENTRAL,
    FEDMF,
    MASKED,
    MODELS,
    ORDERS,
    TITLES,
    Bench,
    RatingSet,
    Result,
    prepared,
)
from papers.show import DEVIATION
from tessera.audit.ratings.plain_uploads import (
    BINS,
    PROPORTIONS,
    HitRates,
    Numbers,
    liked,
    ranking,
    recovery,
)
from tessera.data.ratings import RatingData
from tessera.plan import Crypto, Sharing
from tessera.rounds import schemes

__all__ = ["DEFAULT", "LAYOUT", "PARTS", "TAKES", "cells"]

PARTS: Final = ("table4", "attacks", "figure4", "paths")
DEFAULT: Final = PARTS
TAKES: Final = ("seeds", "rounds", "sets", "data")
PAGE: Final = "fedmmf.html"

# Yang et al., Table 4: (RMSE, its standard deviation, MAE, its standard deviation), ten runs each.
Printed = tuple[float, float, float, float]
PAPER: Final[Mapping[str, Mapping[str, Printed]]] = {
    "MovieLens 100K": {
        "fedmf": (0.9491, 0.0040, 0.7412, 0.0027),
        "local-linear": (1.0107, 0.0025, 0.8040, 0.0022),
        "fed-linear": (1.0796, 0.0081, 0.8844, 0.0058),
        "fedmmf-linear": (0.9340, 0.0043, 0.7340, 0.0035),
        "local-fm": (1.0083, 0.0019, 0.8054, 0.0019),
        "fed-fm": (1.0628, 0.0070, 0.8644, 0.0053),
        "fedmmf-fm": (0.9218, 0.0037, 0.7250, 0.0030),
        "local-network": (1.0114, 0.0021, 0.8087, 0.0017),
        "fed-network": (1.0945, 0.0074, 0.9176, 0.0060),
        "fedmmf-network": (0.9319, 0.0025, 0.7317, 0.0018),
    },
    "MovieLens 10M": {
        "fedmf": (0.7753, 0.0034, 0.5827, 0.0015),
        "local-linear": (0.8818, 0.0023, 0.6766, 0.0011),
        "fed-linear": (0.9703, 0.0020, 0.7497, 0.0012),
        "fedmmf-linear": (0.7695, 0.0013, 0.5808, 0.0008),
        "local-fm": (0.8938, 0.0023, 0.6862, 0.0012),
        "fed-fm": (0.9639, 0.0022, 0.7445, 0.0015),
        "fedmmf-fm": (0.7720, 0.0013, 0.5827, 0.0007),
        "local-network": (0.8819, 0.0020, 0.6816, 0.0009),
        "fed-network": (0.9756, 0.0024, 0.7689, 0.0028),
        "fedmmf-network": (0.7648, 0.0016, 0.5772, 0.0008),
    },
    "LastFM": {
        "fedmf": (1.2235, 0.0068, 0.8780, 0.0047),
        "local-linear": (1.1081, 0.0099, 0.8163, 0.0085),
        "fed-linear": (1.5448, 0.0110, 1.3538, 0.0137),
        "fedmmf-linear": (1.0886, 0.0109, 0.8066, 0.0092),
        "local-fm": (1.0845, 0.0130, 0.7988, 0.0035),
        "fed-fm": (1.5301, 0.0133, 1.3369, 0.0117),
        "fedmmf-fm": (1.0842, 0.0090, 0.7964, 0.0031),
        "local-network": (1.1007, 0.0068, 0.8007, 0.0123),
        "fed-network": (1.5461, 0.0060, 1.3598, 0.0075),
        "fedmmf-network": (1.0860, 0.0055, 0.7933, 0.0070),
    },
}

# Tables 2 and 3, per cent of clients by recovery rate and by hit ratio; two order, MovieLens 10M.
TABLE_2: Final = (
    (99, 1, 0, 0, 0),
    (95, 4, 1, 0, 0),
    (66, 28, 5, 1, 0),
    (7, 25, 37, 25, 6),
    (0, 1, 2, 14, 83),
)
TABLE_3: Final = (
    (53, 37, 7, 1, 2),
    (0, 34, 55, 8, 3),
    (0, 0, 41, 52, 7),
    (0, 0, 0, 72, 28),
    (0, 0, 0, 0, 100),
)
STEP: Final = 0.5
"""The paper's error levels are in steps of its scale, which are half stars."""

# QUALITY targets of the reproduction: RMSE at most.
TARGETS: Final[Mapping[tuple[str, str], float]] = {
    ("MovieLens 100K", "fedmmf-linear"): 0.905,
    ("MovieLens 100K", "fedmmf-fm"): 0.905,
    ("MovieLens 100K", "fedmmf-network"): 0.908,
    ("MovieLens 100K", "fedmf"): 0.911,
    ("Last.fm 2K", "fedmmf-linear"): 0.838,
    ("Last.fm 2K", "fedmf"): 0.843,
}
GAIN: Final = -0.002
"""FedMMF, one order, less FedMF on MovieLens 100K: at most, on average over seeds."""

GAINS: Final = "Table 4, gains: FedMMF less FedMF, on the same seeds"
PENALTIES: Final = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 10_000.0)
QUICK_PENALTIES: Final = (3.0, 30.0, 300.0, 3000.0)
QUICK_ROUNDS: Final = 15
THRESHOLDS: Final = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
PATH_ROUNDS: Final = 10
PATH_COHORT: Final = 100
BASELINES: Final = {"user mean": "user mean", "item mean": "item mean", "sum": "both means"}


def cells(request: Request) -> list[Cell]:
    """The requested parts, and the page about them."""
    bench = Bench.of(request)
    makers = {"table4": table4, "attacks": attacks, "figure4": figure4, "paths": paths}
    found: list[Cell] = []
    for part in request.parts:
        found += makers[part](bench, request)
    if not found:
        raise no_data("fedmmf")
    show.write(found, LAYOUT, bench.cache.folder / PAGE, quick=request.quick)
    return found


def wanted(request: Request) -> Iterator[RatingSet]:
    return (each for each in fedmmf.SETS if request.wants(each.name, each.task))


def readable(bench: Bench, of: RatingSet, seed: int) -> bool:
    """Whether its files are there; if not, a note says so."""
    options = {**of.options, "seed": seed}
    return there(lambda: bench.data.read(of.task, options), of.name) is not None


# --- Table 4 --------------------------------------------------------------------------------------


def table4(bench: Bench, request: Request) -> Iterator[Cell]:
    """Errors of every model, by set; then what the masks gain over FedMF, seed by seed."""
    every: dict[str, dict[str, list[Result]]] = {}
    for of in wanted(request):
        seeds = request.seeds_of(of.seeds)
        chosen = of.quick_models if request.quick else of.models
        if not readable(bench, of, seeds[0]):
            continue
        # Seed by seed, so that the data of one is read once.
        results: dict[str, list[Result]] = {}
        for seed in seeds:
            for model in (m for m in MODELS if m.key in chosen):
                results.setdefault(model.key, []).append(bench.result(of, model, seed))
        every[of.name] = results
        yield from set_cells(of, results, quick=request.quick)
    for of in fedmmf.SETS:
        if of.name in every:
            yield from gain_cells(of, every[of.name])


def set_cells(
    of: RatingSet, results: Mapping[str, Sequence[Result]], *, quick: bool
) -> Iterator[Cell]:
    first = next(iter(results.values()))[0]
    table = f"Table 4, {of.name}"
    runs = next(iter(results.values()))
    split = first.split
    if len(runs) > 1:
        split = split.replace(f"(seed {first.seed})", "(by seed)")
    for name, title in BASELINES.items():
        values = [r.baselines[name] for r in runs]
        yield from errors(table, title, values, None, ["no model", split])
    for key, title, found, alone in rows(results):
        values = [(r.alone or {}) if alone else r.measures for r in found]
        printed = PAPER.get(of.paper, {}).get(key)
        notes = [
            "no rounds: each client by itself" if alone else how(found[0]),
            "" if printed is None or of.same else f"paper: {of.paper}, which is other data",
            "" if printed is None or not of.same else of_paper(values, printed),
            "" if quick else aimed_at(of, key, values),
        ]
        yield from errors(table, title, values, printed, notes)


def rows(
    results: Mapping[str, Sequence[Result]],
) -> Iterator[tuple[str, str, Sequence[Result], bool]]:
    """(key, title, runs, whether it is their masks alone) in the order of the page."""
    if FEDMF.key in results:
        yield FEDMF.key, FEDMF.name, results[FEDMF.key], False
    for mask, title in TITLES.items():
        if f"fedmmf-{mask}" in results:
            yield f"local-{mask}", f"local {title}", results[f"fedmmf-{mask}"], True
    for model in (*BY_ATTRIBUTES, *MASKED, CENTRAL):
        if model.key in results:
            yield model.key, model.name, results[model.key], False


def errors(
    table: str,
    row: str,
    values: Sequence[Mapping[str, float]],
    printed: Printed | None,
    notes: Sequence[str],
) -> Iterator[Cell]:
    """RMSE and MAE, each with its standard deviation over seeds."""
    seeds = "one seed" if len(values) == 1 else f"{len(values)} seeds"
    note = "; ".join(filter(None, (*notes, seeds)))
    for at, name in enumerate(("RMSE", "MAE")):
        found = [value[name] for value in values]
        paper = (None, None) if printed is None else printed[2 * at : 2 * at + 2]
        yield plain(table, row, name, mean(found), STARS, note, paper=paper[0])
        off = pstdev(found) if len(found) > 1 else None
        yield plain(table, row, name + DEVIATION, off, STARS, seeds, paper=paper[1])


def how(result: Result) -> str:
    if not schemes.named(result.scheme).federated:
        return f"{result.rounds} rounds of a cohort's examples"
    text = f"{result.scheme}, {result.rounds} rounds of {result.cohort} of {result.clients} clients"
    return text if result.real else f"{text}, none of them masked"


def of_paper(values: Sequence[Mapping[str, float]], printed: Printed) -> str:
    return f"{mean(v['RMSE'] for v in values) - printed[0]:+.4f} to the paper"


def aimed_at(of: RatingSet, key: str, values: Sequence[Mapping[str, float]]) -> str:
    most = TARGETS.get((of.name, key))
    if most is None:
        return ""
    return target(f"<= {most:g}", met=mean(v["RMSE"] for v in values) <= most)


def gain_cells(of: RatingSet, results: Mapping[str, Sequence[Result]]) -> Iterator[Cell]:
    """Masked less plain, paired by seed: below 0 the mask helps."""
    unmasked = results.get(FEDMF.key, ())
    for model in MASKED:
        found = results.get(model.key, ())
        pairs = [
            a.measures["RMSE"] - b.measures["RMSE"] for a, b in zip(found, unmasked, strict=False)
        ]
        if not pairs:
            continue
        printed = PAPER.get(of.paper, {})
        paper = printed[model.key][0] - printed[FEDMF.key][0] if printed else None
        note = f"below 0 on {sum(p < 0 for p in pairs)} of {len(pairs)}"
        if len(pairs) > 1:
            note += f"; sd {stars(pstdev(pairs))}"
        if not of.same:
            note += f"; paper: {of.paper}"
        if (of.name, model.key, len(pairs)) == ("MovieLens 100K", "fedmmf-linear", 5):
            met = mean(pairs) <= GAIN and sum(p < 0 for p in pairs) >= 4
            note += f"; {target(f'<= {GAIN:g}, on 4 of 5 below 0', met=met)}"
        row = f"{of.name}: {ORDERS[str(model.mask)]}"
        yield plain(GAINS, row, "RMSE", mean(pairs), STARS, note, paper=paper)


# --- Tables 2 and 3 -------------------------------------------------------------------------------


def attacks(bench: Bench, request: Request) -> Iterator[Cell]:
    """On what clients would share unmasked: each training rating less its mask."""
    for of in wanted(request):
        if of.options or of.task not in ("ratings-100k", "ratings-1m"):
            continue
        if request.quick and of.task != "ratings-100k":
            continue
        seed = (request.seeds or of.seeds)[0]
        if not readable(bench, of, seed):
            continue
        summary = f"What masked ratings give away, {of.name}"
        for mask in ("fm", "linear"):
            say(f"attacks: {of.name}, {ORDERS[mask]}")
            task = bench.data.task(of.task, {**of.options, "seed": seed}, {"mask": mask})
            ready = prepared(task, of)
            assert isinstance(ready.data, RatingData)
            yield from attack_cells(of, mask, ready.data, seed, summary)


def attack_cells(
    of: RatingSet, mask: str, data: RatingData, seed: int, summary: str
) -> Iterator[Cell]:
    true = data.train["label"].astype(np.float64)
    masked = true - data.train["base"]
    rng = np.random.default_rng(seed)
    levels = tuple(STEP * g for g in range(1, 6))
    recovered = recovery(masked, true, data.offsets, within=levels)
    ranks = {
        fair: ranking(masked, true, data.offsets, rng=rng, fair=fair) for fair in (False, True)
    }
    who = f"{of.name}, {ORDERS[mask]}"
    names = [f"g = {g}, off by less than {STEP * g:g}" for g in range(1, 6)]
    paper = TABLE_2 if mask == "fm" else None
    yield from binned(f"Table 2, recovery: {who}", names, recovered, paper)
    names = [f"h = {h:g}" for h in PROPORTIONS]
    for fair, rates in ranks.items():
        counted = "ties counted fairly" if fair else "as in the paper"
        paper = TABLE_3 if mask == "fm" else None
        yield from binned(f"Table 3, ranking, {counted}: {who}", names, rates, paper)
    least = data.high - 0.25 * (data.high - data.low)
    by_client = liked(masked, true, data.offsets, least=least)
    summaries = {
        "correlation with the rating": float(np.corrcoef(masked, true)[0, 1]),
        "correlation, within a client": within(masked, true, data),
        f"AUC for rated {least:g} or more": float(np.nanmean(by_client)),
        "recovered to half a star": float(recovered.pooled[0]),
        "top tenth found, as in the paper": float(ranks[False].pooled[0]),
        "top tenth found, fairly": float(ranks[True].pooled[0]),
    }
    for column, value in summaries.items():
        yield plain(summary, ORDERS[mask], column, value)


def within(masked: Numbers, true: Numbers, data: RatingData) -> float:
    """The correlation of deviations from each client's own means."""
    owner = data.train["user"]
    count = np.maximum(np.bincount(owner, minlength=data.clients), 1)
    a, b = (v - (np.bincount(owner, v, data.clients) / count)[owner] for v in (masked, true))
    return float(np.corrcoef(a, b)[0, 1])


def binned(
    table: str, names: Sequence[str], rates: HitRates, paper: Sequence[Sequence[int]] | None
) -> Iterator[Cell]:
    """Per cent of the clients with a rate in each bin."""
    note = "" if paper is None else "paper: two order, MovieLens 10M"
    for at, (name, shares) in enumerate(zip(names, rates.binned, strict=True)):
        for column, value in enumerate(shares):
            printed = None if paper is None else float(paper[at][column])
            yield plain(table, name, BINS[column], 100 * float(value), "%", note, paper=printed)


# --- Figure 4 -------------------------------------------------------------------------------------


def figure4(bench: Bench, request: Request) -> Iterator[Cell]:
    """Two-order FedMMF on MovieLens 100K, one seed, the same penalty for every client's mask."""
    of = next((each for each in wanted(request) if each.name == "MovieLens 100K"), None)
    if of is None or not readable(bench, of, (request.seeds or of.seeds)[0]):
        return
    model = next(m for m in MASKED if m.mask == "fm")
    table = f"Figure 4, indicator and error over the mask's penalty: {of.name}, two order"
    for penalty in QUICK_PENALTIES if request.quick else PENALTIES:
        found = bench.result(
            of,
            model,
            (request.seeds or of.seeds)[0],
            options={"penalty": penalty},
            rounds=QUICK_ROUNDS if request.quick else None,
        )
        assert found.indicator is not None
        figures = (
            (J_SHARED, found.indicator["shared"], ""),
            (J_HELD_BACK, found.indicator["estimated"], ""),
            ("RMSE", found.measures["RMSE"], STARS),
            (MASKS_ALONE, (found.alone or {})["RMSE"], STARS),
        )
        yield from line(table, f"{penalty:g}", figures, how(found))


# --- paths ----------------------------------------------------------------------------------------


def paths(bench: Bench, request: Request) -> Iterator[Cell]:
    """Who would send unmasked updates, by the indicator; and one model trained each way."""
    of = next((each for each in wanted(request) if each.name == "MovieLens 100K"), None)
    seed = (request.seeds or (0,))[0]
    if of is None or not readable(bench, of, seed):
        return
    table = f"Paths: clients with unmasked updates by the indicator, {of.name}"
    for mask in ("linear", "fm"):
        task = bench.data.task(of.task, {**of.options, "seed": seed}, {"mask": mask})
        ready = prepared(task, of)
        assert ready.indicator is not None
        for threshold in THRESHOLDS:
            share = float(np.mean(ready.indicator <= threshold))  # NaN is not
            note = "each of them reveals that its mask is at least so good"
            row = f"indicator = {threshold:g}"
            yield plain(table, row, ORDERS[mask], 100 * share, "%", note)
        if mask == "linear":
            middle = float(np.nanmedian(ready.indicator))
    yield from path_runs(bench, of, seed, round(middle, 4))


def path_runs(bench: Bench, of: RatingSet, seed: int, threshold: float) -> Iterator[Cell]:
    model = next(m for m in MASKED if m.mask == "linear")
    rounds = bench.rounds or PATH_ROUNDS
    table = f"Paths: {of.name}, one order, {rounds} rounds of {PATH_COHORT} clients"
    start: Any = None
    for sharing in Sharing:
        plan = bench.plan(replace(of, cohort=PATH_COHORT), model, seed, rounds)
        plan = replace(
            plan,
            security=replace(plan.security, sharing=sharing, indicator=threshold),
            simulation=replace(plan.simulation, crypto=Crypto.SAMPLED, crypto_every=5),
        )
        found = bench.result(of, model, seed, plan=plan, rounds=rounds)
        items = np.load(Path(found.folder) / fedmmf.ITEMS)
        start = items if start is None else start
        note = {
            Sharing.SECURE: "rounds 1 and 6 really masked, the others add the same integers",
            Sharing.PLAIN: "no client masked",
            Sharing.AUTO: f"unmasked with an indicator up to {threshold:g}, their median",
        }[sharing]
        figures = (
            ("RMSE", found.measures["RMSE"], STARS),
            ("largest difference of an item's factor", float(np.abs(items - start).max()), ""),
            ("unmasked clients, per round", found.unmasked, ""),
        )
        yield from line(table, sharing.value, figures, note)
