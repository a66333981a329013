"""Variants: whose privacy, by which account; each gives the noise that its epsilon asks for.

Noise is the least that keeps the budget over all releases of a run. Where only the sum is seen,
every shop adds its part, and the sum of all twenty has what the account needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np

from papers.subject_dp.biases import (
    KeyedDraws,
    Learning,
    PrintedLearning,
    Release,
    by_shop,
    learn,
    learn_as_printed,
)
from papers.subject_dp.market import DELTA, MOVIELENS, RETAIL, SHOPS, ShopData
from tessera.privacy.dp.guarantee import Observer, Trust, Unit
from tessera.privacy.dp.noise_setting import Coins, Drawn, NoiseSetting, Sampling, Visibility
from tessera.privacy.dp.subjects import Printed, PrintedNoise, SubjectSampler

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
        setting=NoiseSetting(unit=Unit.USER, noise=1.0, trust=Trust.CENTRAL, coins=Coins.PUBLIC),
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
    sources = 1 if setting.trust is Trust.CENTRAL else SHOPS
    return least_noise(setting, epsilon, releases) * math.sqrt(sources)


@lru_cache(maxsize=512)
def least_noise(setting: NoiseSetting, epsilon: float, releases: int) -> float:
    return setting.least_noise(epsilon=epsilon, delta=DELTA, rounds=releases)
