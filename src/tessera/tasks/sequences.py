"""What comes next: a lag model that is trained, pair counts that are summed up, or both.

All are over the same data (`data/sequences.py`) and are tested in the same way: where the held-out
item stands among all that its user does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tessera.data.clicks import offsets
from tessera.data.examples import ClientData, Examples
from tessera.data.sequences import SequenceData, with_held
from tessera.errors import ConfigError
from tessera.learning.architecture import build
from tessera.learning.averaging import ServerStep
from tessera.learning.bound_model import Table
from tessera.learning.compression import LEVELS
from tessera.learning.metrics import NextMetric
from tessera.learning.models.lags import BIASES, ITEMS
from tessera.learning.models.noisy_pairs import NoisyPairs, VectorCounter
from tessera.learning.models.pairs import CELL, KEPT, WEIGHT, PairCounter, PairModel, Pairs
from tessera.learning.module_tables import Tables
from tessera.learning.pair_chains import PairSums, known_row_figure
from tessera.learning.softmax import SampledSoftmax
from tessera.learning.tables.table import Zeros
from tessera.learning.training.settings import LocalTraining
from tessera.tasks.kinds import TaskKind
from tessera.tasks.task import Beside, CentralSettings, Recommended, Task

NEXT: Final = Recommended(
    training=LocalTraining(batch=50, examples=50, rate=1.0, decay=1.0),
    server=ServerStep(
        optimizer="adam", rate=0.01, dense_rate=0.003, epsilon=1e-6, schedule="linear"
    ),
    central=CentralSettings(rate=0.002, batch=256),
    clip=16.0,
    dense_clip=64.0,
    max_rows=3_000,
    rounds=160,
)
L2: Final = 0.01
"""On the rows of a client's step, beside the sum of its losses; chosen on validation parts."""
_SUMMED: Final = Recommended(
    training=LocalTraining(batch=0, rate=1.0, decay=1.0), server=ServerStep(optimizer="sum")
)
UNION, OWN = "union", "own"
CANDIDATES: Final = (UNION, OWN)
SMALL_CATALOGUE: Final = 3_000
"""Items, from which on 30 negatives of each member of a group are enough beside its union."""
SOLVE: Final = "solve"
"""The fact about what it takes."""
MOST_TOGETHER: Final = 1_000
"""Clients in a round of sums; of more, each is in one of several rounds."""


def sequence_task(
    data: ClientData,
    *,
    title: str,
    recommended: Recommended,
    model: str = "next",
    width: int = 64,
    negatives: int = 300,
    candidates: str = UNION,
    union_negatives: int = 0,
    power: float = 0.5,
    tau: float = 6.0,
    penalty: float = 250.0,
    min_holders: int = 5,
    exact_pairs: bool = False,
    any_order: bool = False,
) -> Task:
    """The next item, by a lag model ("next"), from sums of pair counts ("pairs"), or by both.

    Of "next": `negatives` are drawn from counts to the `power` (0: evenly). In fixed groups
    `candidates` are the rows of the union, with `union_negatives` of each member (0: 30, or 60 of
    less than 3,000 items), or a client's "own" negatives alone, as outside of groups. Of "pairs":
    `tau`, `penalty` and `min_holders` as in `learning/models/pairs.py` where their sums may be
    exact; else they have noise per user (`learning/models/noisy_pairs.py`). "next+pairs" trains the
    one and sums up the other, and mixes their scores (`runs/standing.py`). Data without times are a
    set of items for each user: "pairs" is EASE then, and "next" takes the order they come in, if
    `any_order` says so.
    """
    if not isinstance(data, SequenceData):
        raise ConfigError(f"task {data.name!r}: the data has no sequences")
    if model not in MODELS:
        raise ConfigError(f"task: model = {model!r}", hint=f"one of {', '.join(MODELS)}")
    metric = NextMetric(rows=data.sizes["item"], target="item", sequence="history")
    pairs = Pairs(items=data.sizes["item"], tau=tau if data.ordered else 0.0, penalty=penalty)
    if model == "pairs":
        if not exact_pairs:
            return _noisy_pairs(data, title, metric)
        return _pairs(data, title, metric, pairs, min_holders)
    if not (data.ordered or any_order):
        raise ConfigError(
            f"task {data.name!r}: no times, and what comes next has an order",
            hint='time = "COLUMN", or model = "pairs", which needs none, or any_order = true for '
            "the order of the file",
        )
    drawn = negatives, _in_union(candidates, union_negatives, data.sizes["item"])
    if model == "next":
        return _next(data, title, recommended, metric, width, drawn, power)
    if not exact_pairs:
        raise ConfigError(
            f"task {data.name!r}, model = {model!r}: exact sums of pairs go to the server, most "
            "pairs have one holder, and who knows an item of a history can follow it",
            hint='exact_pairs = true if that is acceptable, or model = "next"',
        )
    rest, held = with_held(data, HELD)
    trained = _next(rest, title, recommended, metric, width, drawn, power)
    summed = _pairs(rest, f"{title}, pairs", metric, pairs, min_holders)
    return replace(
        trained,
        data=replace(rest, facts=summed.data.facts),
        beside=Beside(("next", "pairs"), summed, held),
    )


MODELS: Final = ("next", "pairs", "next+pairs")
HELD: Final = 1_000
"""Users by whom the weight of two models is chosen, at most."""


def _in_union(candidates: str, negatives: int, items: int) -> int:
    """Negatives that a member of a group draws; 0: as many as elsewhere, as its only candidates."""
    if candidates not in CANDIDATES:
        raise ConfigError(
            f"task: candidates = {candidates!r}", hint=f"one of {', '.join(CANDIDATES)}"
        )
    if negatives < 0:
        raise ConfigError(f"task: union_negatives = {negatives}", hint="0 (by the items) or more")
    if candidates == OWN:
        return 0
    return negatives or (30 if items >= SMALL_CATALOGUE else 60)


def _next(
    data: SequenceData,
    title: str,
    recommended: Recommended,
    metric: NextMetric,
    width: int,
    drawn: tuple[int, int],
    power: float,
) -> Task:
    """`drawn` are negatives of a client by itself, and of a member of a group beside its union."""
    items, (negatives, in_union) = data.sizes["item"], drawn
    if not 1 <= negatives < items:
        raise ConfigError(
            f"task {data.name!r}: {negatives} negatives among {items:,} items",
            hint=f"1 to {items - 1:,}",
        )
    if not 0.0 <= power <= 1.0:
        raise ConfigError(f"task {data.name!r}: power = {power}", hint="0 (evenly) to 1")
    public, times = data.popularity, data.popularity
    if times is None:
        times = np.bincount(data.events.item, minlength=items).astype(np.float64)
    longest = -(-(int(data.events.counts.max(initial=0)) + negatives) // 16) * 16
    architecture = {
        "name": "lags",
        "items": items,
        "length": data.train["history"].shape[1],
        "width": width,
    }
    return Task(
        name=data.name,
        title=title,
        data=data,
        module=lambda: build({**architecture, "seed": torch.initial_seed()}),
        tables=Tables({ITEMS: Table("item", "history"), BIASES: Table("item")}),
        loss=SampledSoftmax(
            ITEMS,
            BIASES,
            target="item",
            negatives=negatives,
            weights=_weights(times, power, data.waiting),
            # Of a user each item counts once. Evenly drawn, nothing follows from counts; and how
            # many users hold an item is not what a public list of popularity says.
            held=times / data.events.users if power and public is None else None,
            union_negatives=min(in_union, negatives),
        ),
        metric=metric,
        recommended=replace(
            _penalised(recommended, data), max_rows=max(recommended.max_rows, longest)
        ),
        architecture=architecture,
    )


def _weights(times: npt.NDArray[np.float64], power: float, waiting: int) -> npt.NDArray[np.float64]:
    """By which negatives are drawn; the last rows, which have no item yet, are none."""
    found = np.power(times + 1.0, power)
    found[len(found) - waiting :] = 0.0
    return found


def _penalised(recommended: Recommended, data: SequenceData) -> Recommended:
    """With L2 on the rows of a step, where a step adds up the losses of its examples.

    Here it takes their mean: hence the number of examples that a client trains on, on average.
    A set of its own may have another one.
    """
    if recommended.training.weight_decay:
        return recommended
    counts = data.events.counts
    if not counts.any():  # of nobody: a catalogue
        counts = np.array([recommended.training.examples])
    each = float(np.minimum(counts[counts > 0], recommended.training.examples).mean())
    decay = float(f"{L2 / each:.2g}")
    return replace(recommended, training=replace(recommended.training, weight_decay=decay))


def _pairs(
    data: SequenceData,
    title: str,
    metric: NextMetric,
    pairs: Pairs,
    min_holders: int,
) -> Task:
    user, cell, weight = pairs.counts(data.events)
    counts = np.bincount(user, minlength=data.clients).astype(np.int64)
    order = np.argsort(cell, kind="stable")
    first = np.flatnonzero(np.diff(cell[order], prepend=-1))
    holders = np.diff(first, append=len(cell))
    weights = np.add.reduceat(weight[order], first)
    seen = PairSums.of_rows(pairs, cell[order][first], weights, holders)
    followed = known_row_figure(seen, data.events)
    alone = f"{100 * np.mean(holders == 1):.0f} %"
    if min_holders < 1:
        raise ConfigError(f"task: min_holders = {min_holders}", hint="1 or more")
    step, clip = _whole_steps(float(weight.max(initial=1.0)))
    model = PairModel(pairs, min_holders)
    rounds = -(-data.clients // MOST_TOGETHER)
    return Task(
        name=data.name,
        title=title,
        data=replace(
            data,
            train=Examples({CELL: cell, WEIGHT: (np.rint(weight / step) * step).astype("f4")}),
            offsets=offsets(counts),
            facts={
                **data.facts,
                "pairs": f"{len(holders):,} with a holder, {counts.mean():,.0f} of a client on "
                f"average, {counts.max():,} at most",
                "pairs with one holder": alone,
                "read from one known item": f"{100 * followed:.0f} % of a history on average, by "
                "whoever has the exact sums (the known-row figure)",
                "published": f"the {KEPT} largest weights of each item, from pairs with "
                f"{min_holders} holders or more",
                SOLVE: model.cost,
            },
        ),
        module=lambda: build({"name": "pairs"}),
        tables=Tables({"pairs.weight": Table(CELL, size=pairs.cells, initial=Zeros())}),
        metric=metric,
        learner=lambda bound, training: PairCounter(),
        solve=model.solved,
        recommended=replace(
            _SUMMED,
            clip=clip,
            max_rows=int(counts.max()),
            rounds=rounds,
            cohort=data.clients // rounds,
        ),
        architecture={"name": "pairs"},
    )


def _whole_steps(most: float) -> tuple[float, float]:
    """A power of two that weights up to this are multiples of, and the clip that makes it one level
    of the quantiser: then nothing is rounded by coins, and all schemes have the same sums."""
    top = (LEVELS - 1) // 2
    step = 2.0 ** -np.floor(np.log2(top / most))
    return float(step), float(step * top)


def _noisy_pairs(data: SequenceData, title: str, metric: NextMetric) -> Task:
    """Sums that are for noise per user: one vector of length 1 of each client, in one round."""
    pairs = NoisyPairs(data.sizes["item"], data.attributes, data.ordered)
    counts, entries = pairs.entries(data.events)
    architecture = {"name": "noisy-pairs", "dense": pairs.dense}
    catalogue = "a public list" if data.public_rows else "the items of the data, taken as public"
    return Task(
        name=data.name,
        title=title,
        data=replace(
            data,
            train=entries,
            offsets=offsets(counts),
            facts={
                **data.facts,
                "catalogue": catalogue,
                "cells": f"{pairs.cells:,} of pairs, {pairs.dense:,} of attributes and popularity, "
                "each with noise",
                "attributes": ", ".join(
                    f"{name} ({classes.shape[1]} classes)"
                    for name, classes in data.attributes.items()
                )
                or "none: pairs and popularity have their share",
            },
        ),
        module=lambda: build(architecture),
        tables=Tables({"pairs.weight": Table(CELL, size=pairs.cells, initial=Zeros())}),
        metric=metric,
        learner=lambda bound, training: VectorCounter(),
        solve=pairs.solved,
        recommended=replace(
            _SUMMED, max_rows=pairs.most_pairs, rounds=1, cohort=data.clients, noisy_only=True
        ),
        architecture=architecture,
    )


_EXPLAINED: Final[Mapping[str, str]] = {
    "history": "Items before an item that the model looks at.",
    "least": "Times that an item occurs to be in the catalogue.",
    "seed": "Of Last.fm, whose file has no times: seed of the order of each user's artists.",
    "part": 'What the model is tested on: each user\'s last item ("test"), or the one before '
    '("validation") to tune settings.',
    "model": '"next" (a lag model that is trained), "pairs" (pair counts that are summed) or '
    '"next+pairs" (both, their scores mixed).',
    "width": "Columns of an item's row.",
    "negatives": "Items that a client draws beside its own, once, from its own secret.",
    "candidates": 'In fixed groups: "union" (all rows of the group\'s union, and some negatives of '
    'each member) or "own" (a client\'s own negatives alone, as elsewhere).',
    "union_negatives": "Of each member of a fixed group beside its union; 0: 30, or 60 of less "
    "than 3,000 items. With power = 0.0 candidates are own negatives.",
    "power": "Negatives are drawn from how often items occur, to this power; 0: evenly.",
    "tau": "Of pairs: places after which an item counts a third.",
    "penalty": "Of pairs: what is added to the diagonal before the solve.",
    "min_holders": "Of pairs: clients that hold a pair that is published, at least.",
    "any_order": "Of next without times: whether items may be taken in the order they come in.",
    "exact_pairs": "Of pairs: whether the server may have their exact sums; else they take [dp].",
}

SEQUENCES: Final = TaskKind(
    sequence_task,
    (
        "model",
        "width",
        "negatives",
        "candidates",
        "union_negatives",
        "power",
        "tau",
        "penalty",
        "min_holders",
        "exact_pairs",
        "any_order",
    ),
    _EXPLAINED,
)
SETS: Final = replace(SEQUENCES, make=partial(sequence_task, any_order=True, negatives=600))
"""Of data whose order is a public draw; negatives by Last.fm's validation part."""


def is_about_next(kind: TaskKind) -> bool:
    """Whether it is one of these kinds, whatever its options are."""
    return kind.make in (SEQUENCES.make, SETS.make)
