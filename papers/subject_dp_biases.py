"""Biases: a model of one number per item, shared, and one per person at a shop, which stays there.

Little is released, so that little noise is needed: a sum per item of what its people's biases leave
over, `rounds` times, and before that a count per item. Contributions of one unit (a record, a
person at a shop, a shop) are clipped together, per release; noise is added to every item's sum; an
item's bias shrinks by the noise that the plan adds. Nothing else leaves a shop.

A person's bias is fitted at home to all its records, which is free per person and per shop. Per
record it is not: there the person's own sums and counts are clipped and made noisy with the rest.

Noise and coins come from a key stream, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np

from papers.subject_dp_shops import DELTA, MOVIELENS, RETAIL, SHOPS, Ints, Records, ShopData, Values
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.noise import DEVIATION, dense_noise
from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.privacy.dp.guarantee import Observer, Trust, Unit
from tessera.privacy.dp.noise_setting import Coins, Drawn, NoiseSetting, Sampling, Visibility
from tessera.privacy.dp.subjects import (
    Printed,
    PrintedNoise,
    SubjectSampler,
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


# --- variants -------------------------------------------------------------------------------------
#
# Variants: whose privacy, by which account; each gives the noise that its epsilon asks for.
#
# Noise is the least that keeps the budget over all releases of a run. Where only the sum is seen,
# every shop adds its part, and the sum of all twenty has what the account needs.


RATE: Final = 0.2
SAMPLED_ROUNDS: Final = 12
CAP: Final = 4
PRINTED_RATE: Final = 0.01
PRINTED_STEPS: Final = 1_000
NONE: Final = "none"
OPEN: Final = Visibility(one_by_one=frozenset({Observer.LEADER}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """A way of protecting people, or of claiming to."""

    name: str
    about: str
    setting: NoiseSetting | None = None
    printed: Printed | None = None
    learning: Mapping[str, Learning] = field(default_factory=dict)


def _learning(films: Learning, retail: Learning) -> dict[str, Learning]:
    return {MOVIELENS: films, RETAIL: retail}


_PEOPLE = _learning(Learning(rounds=4), Learning(clip=1.0, count_clip=2.0))
_RECORDS = _learning(
    Learning(clip=2.5, count_clip=math.sqrt(2.0)), Learning(clip=0.9, count_clip=math.sqrt(2.0))
)
_DRAWN = _learning(Learning(clip=1.0, count_clip=1.0), Learning(clip=0.5, count_clip=1.0))
_SHOPS = _learning(Learning(clip=100.0, count_clip=250.0), Learning(clip=100.0, count_clip=500.0))


def _sampled(base: Mapping[str, Learning]) -> dict[str, Learning]:
    return {name: replace(how, rounds=SAMPLED_ROUNDS) for name, how in base.items()}


VARIANTS: Final = (
    Protection(name=NONE, about="no noise, nothing clipped", learning=_PEOPLE),
    Protection(
        name="item",
        about="one record more or less; only the sum seen; people's own biases are noisy, too",
        setting=NoiseSetting(unit=Unit.ITEM, noise=1.0, sources=SHOPS),
        learning=_RECORDS,
    ),
    Protection(
        name="user",
        about="a shop sends its sums, or zeros; a trusted server adds the noise",
        setting=NoiseSetting(unit=Unit.USER, noise=1.0, trust=Trust.SERVER, coins=Coins.PUBLIC),
        learning=_SHOPS,
    ),
    Protection(
        name="subject",
        about="a person more or less, all in every round; only the sum seen",
        setting=NoiseSetting(unit=Unit.SUBJECT, noise=1.0, sources=SHOPS),
        learning=_PEOPLE,
    ),
    Protection(
        name="subject, each shop seen",
        about="the same against a server that sees every shop's noisy sums",
        setting=NoiseSetting(unit=Unit.SUBJECT, noise=1.0, sight=OPEN),
        learning=_PEOPLE,
    ),
    Protection(
        name="subject, people drawn",
        about=f"people by coins, {RATE:.0%} of them in each of {SAMPLED_ROUNDS} rounds",
        setting=NoiseSetting(
            unit=Unit.SUBJECT, noise=1.0, sources=SHOPS, sampling=Sampling.POISSON, rate=RATE
        ),
        learning=_sampled(_PEOPLE),
    ),
    Protection(
        name="subject, records drawn",
        about=f"records by coins at {RATE:.0%}, cut to {CAP} of a person, each clipped",
        setting=NoiseSetting(
            unit=Unit.SUBJECT,
            noise=1.0,
            sources=SHOPS,
            sampling=Sampling.POISSON,
            rate=RATE,
            drawn=Drawn.RECORDS,
            records=1,  # of whoever has most: put in for each market
            cap=CAP,
        ),
        learning=_sampled(_DRAWN),
    ),
    Protection(
        name="local DP",
        about="a shop sends noisy sums, or noisy zeros: nobody but itself is trusted",
        setting=NoiseSetting(unit=Unit.USER, noise=1.0, coins=Coins.PUBLIC, sight=OPEN),
        learning=_SHOPS,
    ),
    Protection(
        name=Printed.CENTRAL.label, about="claims epsilon, keeps less", printed=Printed.CENTRAL
    ),
    Protection(name=Printed.LOCAL.label, about="claims epsilon, keeps less", printed=Printed.LOCAL),
)
"""In the order of the tables."""

LEARNING_RATES: Final = {
    (MOVIELENS, Printed.CENTRAL): 0.0005,
    (RETAIL, Printed.CENTRAL): 0.0005,
    (MOVIELENS, Printed.LOCAL): 3.0,
    (RETAIL, Printed.LOCAL): 0.3,
}


def run(variant: Protection, found: ShopData, *, epsilon: float, each: int, seed: int) -> float:
    """Train one variant, and score it."""
    rng = KeyedDraws.of(seed, each)
    if variant.printed is not None:
        noise = PrintedNoise(epsilon, DELTA, PRINTED_RATE, PRINTED_STEPS)
        rate = LEARNING_RATES[found.name, variant.printed]
        how = PrintedLearning(noise=noise, learning_rate=rate)
        return learn_as_printed(variant.printed, found, how, rng)
    learning = variant.learning[found.name]
    if variant.setting is None:
        return learn(found, Release(group=found.train.person), learning, rng)
    setting = setting_of(variant.setting, found, each)
    release = Release(
        group=groups(setting, found),
        noise=noise_of_sum(setting, epsilon, learning.rounds),
        rate=setting.rate,
        at_home=setting.unit is Unit.ITEM,
    )
    if setting.rate < 1.0:
        samplers = [
            (
                np.flatnonzero(found.train.shop == shop),
                SubjectSampler(
                    own.person,
                    rate=setting.rate,
                    cap=setting.cap if setting.by_records else 0,
                    drawn=setting.drawn,
                ),
            )
            for shop, own in enumerate(by_shop(found.train))
        ]
        release = replace(
            release,
            draw=lambda: [at[sampler.draw(rng.random).places] for at, sampler in samplers],
        )
    return learn(found, release, learning, rng)


def setting_of(setting: NoiseSetting, found: ShopData, each: int) -> NoiseSetting:
    """The account of this market: at most `each` shops hold a person."""
    if setting.unit is not Unit.SUBJECT:
        return setting
    setting = replace(setting, clients=each)
    if setting.by_records:
        setting = replace(setting, records=int(np.bincount(found.train.person).max()))
    return setting


def groups(setting: NoiseSetting, found: ShopData) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Whose contributions are clipped together."""
    if setting.unit is Unit.ITEM or setting.by_records:
        return np.arange(len(found.train))
    return found.train.shop if setting.unit is Unit.USER else found.train.person


def noise_of_sum(setting: NoiseSetting, epsilon: float, rounds: int) -> float:
    """The noise on a sum over all shops, over the clip: counts once, then a sum every round.

    Per item people's biases are fitted once more at the end, which is a release of its own.
    """
    releases = rounds + (2 if setting.unit is Unit.ITEM else 1)
    sources = 1 if setting.trust is Trust.SERVER else SHOPS
    return least_noise(setting, epsilon, releases) * math.sqrt(sources)


@lru_cache(maxsize=512)
def least_noise(setting: NoiseSetting, epsilon: float, releases: int) -> float:
    return setting.least_noise(epsilon=epsilon, delta=DELTA, rounds=releases)
