"""Biases: a model of one number per item, shared, and one per person at a shop, which stays there.

Little is released, so that little noise is needed: a sum per item of what its people's biases leave
over, `rounds` times, and before that a count per item. Contributions of one unit (a record, a
person at a shop, a shop) are clipped together, per release; noise is added to every item's sum; an
item's bias shrinks by the noise that the plan adds. Nothing else leaves a shop.

A person's bias is fitted at home to all its records, which is free per person and per shop. Per
record it is not: there the person's own sums and counts are clipped and made noisy with the rest.

Noise and coins come from a key stream, as in training (`draws.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from papers.subject_dp.market import Ints, Records, ShopData, Values
from tessera.crypto.coins import CoinStream
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.noise import DEVIATION, dense_noise
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.privacy.dp.subjects import (
    Printed,
    PrintedNoise,
    fixed_size_batch,
    largest_group,
    printed_mean,
)

# --- draws ----------------------------------------------------------------------------------------
#
# KeyedDraws: noise and coins of one run from a key stream, as the trainer takes them.
#
# The key follows from the run's seed, so that a run can be repeated: this measures utility, and
# protects nobody.


class KeyedDraws:
    """Standard normal values, in integers over their deviation, and numbers from [0, 1)."""

    def __init__(self, secret: Secret) -> None:
        self._noise = dense_noise(secret)
        self._coins = CoinStream(Stream.of(secret, Label.BATCH_COINS))

    @classmethod
    def of(cls, *run: int) -> KeyedDraws:
        """The draws of one run, named by numbers."""
        return cls(ScriptedEntropy(b"subject-dp").secret(Label.CLIENT_NOISE, *run))

    def standard_normal(self, count: int) -> Values:
        return self._noise.draw(count) / DEVIATION

    def random(self, count: int) -> Values:
        return self._coins.uniform(count)


# --- biases ---------------------------------------------------------------------------------------

SHRINK_ITEMS: Final = 5.0
SHRINK_PEOPLE: Final = 4.0
SHRINK_NOISE: Final = 3.5
"""Records that a bias shrinks by: a few, or so many for the deviation of the noise on its sum."""
LEAST_COUNT: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How the biases are learnt; tuned on a validation part, or on other made-up people."""

    rounds: int = 3
    clip: float = 2.0
    count_clip: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """How sums leave: whose contributions are clipped together, and the noise over the clip.

    `draw` gives the records of a release, each drawn with probability `rate`; without it all are
    in. `at_home`: people's own sums are made noisy, too.
    """

    group: Ints = field(repr=False)
    noise: float = 0.0
    rate: float = 1.0
    draw: Callable[[], Sequence[Ints]] | None = field(default=None, repr=False)
    at_home: bool = False

    def part(self, clip: float) -> float:
        """Of a clip, what falls to items' sums: at item level a record is in its person's, too."""
        return clip / math.sqrt(2.0) if self.at_home else clip

    def sums(
        self, found: ShopData, values: Values, clip: float, rng: KeyedDraws
    ) -> tuple[Values, float]:
        """Noisy sums per item, scaled to all records, and the deviation of their noise."""
        train = found.train
        item, group = train.item, self.group
        if self.draw is not None:
            places = np.concatenate(self.draw())
            item, values, group = item[places], values[places], group[places]
        if self.noise:
            values = values * clipped(values, item, group, self.part(clip))
        sums = np.bincount(item, weights=values, minlength=found.items)
        deviation = self.noise * clip
        noisy = sums + deviation * rng.standard_normal(found.items)
        return noisy / self.rate, deviation / self.rate


def clipped(values: Values, item: Ints, group: Ints, clip: float) -> Values:
    """The factor that cuts each group's contribution to the clip, for every record.

    A contribution is a sum per item: records of one group about one item add up before its length
    is taken.
    """
    items = int(item.max(initial=0)) + 1
    pairs, pair = np.unique(group * items + item, return_inverse=True)
    sums = np.bincount(pair.reshape(-1), weights=values)
    norms = np.sqrt(np.bincount(pairs // items, weights=sums * sums))
    factor: Values = np.minimum(1.0, clip / np.maximum(norms, 1e-12))
    return factor[group]


def learn(found: ShopData, release: Release, how: Learning, rng: KeyedDraws) -> float:
    """Train, and score on the test records."""
    train = found.train
    counts, _ = release.sums(found, np.ones(len(train)), how.count_clip, rng)
    counts = np.maximum(counts, LEAST_COUNT)
    home = People(found, release, how, rng)
    biases = np.zeros(found.items)
    for _ in range(how.rounds):
        left = train.value - biases[train.item]
        left = left - home.fit(left)[train.person]
        sums, deviation = release.sums(found, left, how.clip, rng)
        biases = biases + sums / (counts + max(SHRINK_ITEMS, SHRINK_NOISE * deviation))
    people = home.fit(train.value - biases[train.item])
    return found.score(biases[found.test.item] + people[found.test.person])


class People:
    """The biases of people at their shops, fitted at home."""

    def __init__(self, found: ShopData, release: Release, how: Learning, rng: KeyedDraws) -> None:
        self.person, self.size, self.how, self.rng = found.train.person, found.people, how, rng
        self.noise = release.noise if release.at_home else 0.0
        self.part = release.part(how.clip)
        counts = np.bincount(self.person, minlength=self.size).astype(np.float64)
        noisy = counts + self.noise * how.count_clip * rng.standard_normal(self.size)
        self.counts = np.maximum(noisy, 0.0)

    def fit(self, left: Values) -> Values:
        if self.noise:
            left = np.clip(left, -self.part, self.part)
        sums = np.bincount(self.person, weights=left, minlength=self.size)
        deviation = self.noise * self.how.clip
        noisy = sums + deviation * self.rng.standard_normal(self.size)
        shrink = max(SHRINK_PEOPLE, SHRINK_NOISE * deviation)
        return np.asarray(noisy / (self.counts + shrink))


# --- as printed -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedLearning:
    """Settings of the paper's algorithms; the learning rate was chosen on the validation part."""

    noise: PrintedNoise
    rounds: int = 50
    clip: float = 1.0
    learning_rate: float = 1.0


def learn_as_printed(
    which: Printed, found: ShopData, how: PrintedLearning, rng: KeyedDraws
) -> float:
    """Algorithm 1 or 2 over all shops in every round, people's biases fitted at home."""
    shops = by_shop(found.train)
    steps = how.noise.steps // how.rounds // (len(shops) if which is Printed.CENTRAL else 1)
    biases = np.zeros(found.items)
    people = np.zeros(found.people)
    counts = np.bincount(found.train.person, minlength=found.people)

    def fitted(at: Values) -> Values:
        left = found.train.value - at[found.train.item]
        sums = np.bincount(found.train.person, weights=left, minlength=found.people)
        return np.asarray(sums / (counts + SHRINK_PEOPLE))

    def noisy(shop: Records, at: Values) -> Values:
        size = max(1, round(how.noise.rate * len(shop)))
        batch = fixed_size_batch(len(shop), size, rng.random)
        item, person = shop.item[batch], shop.person[batch]
        left = np.clip(shop.value[batch] - at[item] - people[person], -how.clip, how.clip)
        return printed_mean(
            which,
            np.asarray(np.bincount(item, weights=left, minlength=found.items), np.float64),
            batch=size,
            most=largest_group(shop.subject[batch]),
            clip=how.clip,
            noise=how.noise,
            normal=rng.standard_normal,
        )

    for _ in range(how.rounds):
        people = fitted(biases)
        moved = np.zeros_like(biases)
        for shop in shops:
            local = biases.copy()
            for _ in range(max(1, steps)):
                local += how.learning_rate * noisy(shop, local)
            moved += local - biases
        biases = biases + moved / len(shops)
    people = fitted(biases)
    return found.score(biases[found.test.item] + people[found.test.person])


def by_shop(records: Records) -> list[Records]:
    parts = [np.flatnonzero(records.shop == shop) for shop in np.unique(records.shop)]
    return [
        Records(
            records.item[at],
            records.person[at],
            records.subject[at],
            records.shop[at],
            records.value[at],
        )
        for at in parts
    ]
