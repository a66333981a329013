"""ShopData: shops, the people in them and what they said about items, as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Final

import numpy as np
import numpy.typing as npt

from papers.cells import Cell, plain
from tessera.data.examples import LABEL, SUBJECT, ClientData, Examples
from tessera.data.movielens import shops_1m
from tessera.data.taobao_like import taobao_like
from tessera.errors import ConfigError
from tessera.learning.scores import auc

Ints = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

SHOPS: Final = 20
MOVIELENS, RETAIL = "MovieLens 1M", "retail"
SETS: Final = (MOVIELENS, RETAIL)
UNITS: Final = {MOVIELENS: "RMSE", RETAIL: "AUC"}
RETAIL_SIZE: Final = {"users": 2_000, "items": 1_000, "examples": 100, "history": 1}


@dataclass(frozen=True, slots=True)
class Records:
    """One entry per record. `person` is somebody at one shop, `subject` somebody anywhere."""

    item: Ints = field(repr=False)
    person: Ints = field(repr=False)
    subject: Ints = field(repr=False)
    shop: Ints = field(repr=False)
    value: Values = field(repr=False)  # less the base

    def __len__(self) -> int:
        return len(self.item)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopData:
    """What shops train on and are tested on; `base` is a constant, and no mean of the data."""

    name: str
    train: Records
    test: Records
    items: int
    people: int
    base: float
    low: float
    high: float

    def score(self, predicted: Values) -> float:
        """Of the test records: RMSE of ratings, AUC of clicks."""
        if UNITS[self.name] == "AUC":
            return auc(predicted, self.test.value + self.base)
        bounded = np.clip(predicted + self.base, self.low, self.high) - self.base
        return float(np.sqrt(np.mean((bounded - self.test.value) ** 2)))


def market(
    name: str, *, each: int, seed: int, part: str = "test", data: Path | None = None
) -> ShopData:
    """The market of this name where every person goes to `each` of the shops."""
    if name == MOVIELENS:
        found: ClientData = shops_1m(data, shops=SHOPS, shops_each=each, seed=seed, part=part)
        base, low, high = 3.5, 1.0, 5.0
    elif name == RETAIL:
        held_out = seed if part == "test" else seed + 1_000  # other people to tune on
        found = taobao_like(**RETAIL_SIZE, shops=SHOPS, shops_each=each, seed=held_out)
        base, low, high = 0.5, 0.0, 1.0
    else:
        raise ConfigError(f"no set is called {name!r}", hint=f"one of {', '.join(SETS)}")

    def records(examples: Examples, begins: Ints) -> Records:
        return Records(
            examples["item"],
            examples["user"],
            examples[SUBJECT],
            np.repeat(np.arange(found.clients), np.diff(begins)),
            examples[LABEL].astype(np.float64) - base,
        )

    return ShopData(
        name=name,
        train=records(found.train, found.offsets),
        test=records(found.test, found.test_offsets),
        items=found.sizes["item"],
        people=found.sizes["user"],
        base=base,
        low=low,
        high=high,
    )


def trivial(found: ShopData) -> dict[str, float]:
    """What predictors without a model reach, and without privacy; means shrink by five records."""
    train, test = found.train, found.test
    mean = float(train.value.mean())

    def deviation(of: Ints, where: Ints, size: int, values: Values) -> Values:
        total = np.bincount(of, weights=values, minlength=size)
        shrunk: Values = total / (np.bincount(of, minlength=size) + 5.0)
        return shrunk[where]

    by_item = deviation(train.item, test.item, found.items, train.value - mean)
    by_person = deviation(train.person, test.person, found.people, train.value - mean)
    return {
        "mean of all": found.score(np.full(len(test), mean)),
        "mean of the item": found.score(mean + by_item),
        "mean of the person at the shop": found.score(mean + by_person),
        "sum of means": found.score(mean + by_item + by_person),
    }


# --- summary --------------------------------------------------------------------------------------
#
# What all parts of `tessera reproduce subject-dp` share: epsilons, seeds, means over seeds.


DELTA: Final = 1e-5
EPSILONS: Final = (1.0, 3.0, 10.0)
NO_NOISE: Final = "no noise"


def column(epsilon: float) -> str:
    return f"epsilon {epsilon:g}" if epsilon else NO_NOISE


def summed(
    table: str, row: str, column: str, scores: Sequence[float], unit: str, note: str
) -> Cell:
    """The mean over seeds; the note begins with the deviation."""
    off = stdev(scores) if len(scores) > 1 else None
    spread = "one seed" if off is None else f"+-{off:.4f} over {len(scores)} seeds"
    made = plain(table, row, column, mean(scores), unit, f"{spread}; {note}")
    return replace(made, deviation=off)
