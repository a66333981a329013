"""Subjects: how batches are drawn and noise is sized where a person has several records.

Two ways that keep what they account for, both with noise and steps that follow from the plan alone:

- **draw subjects** (the default): every person is in a batch by one coin, at the plan's rate, with
  all its records or `cap` of them. Their gradients are added and clipped once: a person moves the
  sum by C at most, and the account needs no bound on its records (`GaussianNoise.poisson`);
- **draw records**: every record by a coin of its own. More than `cap` of one person are cut and not
  refilled, and each is clipped: a mixture over Binomial(records, rate) cut at the cap
  (`GaussianNoise.records`; arXiv 2401.10294).

And two as printed by Marathe and Kanani 2022, for comparison and labelled so: `CentralSubDP` and
`LocalSubDP` draw batches of fixed size and size the noise by the most records of one person in the
batch. Neither keeps what it says (`docs/protocols/subject-privacy.md`).

Coins and noise are asked for, as the data's owner has to draw them where nobody can foresee them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.accounting import noise_for
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import GaussianNoise, check_rate
from tessera.privacy.dp.noise_setting import Drawn

# --- groups of records ----------------------------------------------------------------------------
#
# The arithmetic of Marathe and Kanani 2022 for several records of one person.
#
# Theorem 3.1 leads from one record to a group of g: (epsilon, delta) becomes (g epsilon, g
# exp((g-1) epsilon) delta). Both algorithms of the paper ask for noise backwards along it, so that
# a group of Z keeps the target. That is sound for a group of fixed size. Theorem 3.2, which states
# the converse for any algorithm, is false as printed, and the noise is calibrated with the
# sampling rate of one record, which a person with many does not have: `docs/protocols/subject-
# privacy.md`.


LEAST_SHARE: Final = 1e-10
"""Of delta, the least that one way of a change is given: below it rounding counts."""


def group_level(epsilon: float, delta: float, *, size: int) -> tuple[float, float]:
    """What a group of `size` keeps if one record has this level (Theorem 3.1)."""
    check_size(size)
    return size * epsilon, size * math.exp((size - 1) * epsilon) * delta


def member_level(epsilon: float, delta: float, *, size: int) -> tuple[float, float]:
    """The level that one record needs so that a group of `size` keeps this one (section 3.1)."""
    check_size(size)
    each = epsilon / size
    return each, delta / (size * math.exp((size - 1) * each))


def changed_epsilon(mechanism: GaussianNoise, *, size: int, times: int, delta: float) -> float:
    """The epsilon of `size` records that change into others, each drawn by its own coin.

    Such as the examples that one interaction stands in. The lower of two bounds: all of them
    replaced; or removed and then others added, which keeps (2 epsilon, (1 + e^epsilon) delta) if
    one way keeps (epsilon, delta).
    """
    check_size(size)
    parts = [(mechanism.grouped(size), times)]
    replaced = epsilon_of(parts, adjacency=Adjacency.REPLACE, delta=delta)

    def one_way(share: float) -> tuple[float, float]:
        level = epsilon_of(parts, adjacency=Adjacency.ADD_OR_REMOVE, delta=share)
        return 2.0 * level, (1.0 + math.exp(min(level, 700.0))) * share

    low, high = math.log(LEAST_SHARE), math.log(delta)
    best, spent = one_way(LEAST_SHARE)
    if delta <= 2.0 * LEAST_SHARE or spent > delta:
        return replaced
    while high - low > 0.05:
        middle = 0.5 * (low + high)
        both, spent = one_way(math.exp(middle))
        if spent <= delta:
            low, best = middle, both
        else:
            high = middle
    return min(best, replaced)


def noise_as_printed(*, epsilon: float, delta: float, size: int, rate: float, steps: int) -> float:
    """sigma_Z of Algorithms 1 and 2: the noise multiplier where a batch has Z = `size` of a person.

    As printed: calibrated for one record drawn at `rate`. Not an account of a person.
    """
    each, rest = member_level(epsilon, delta, size=size)
    return noise_for(
        lambda noise: [(GaussianNoise.poisson(noise, rate), steps)],
        adjacency=Adjacency.ADD_OR_REMOVE,
        epsilon=each,
        delta=rest,
    )


def check_size(size: int) -> None:
    if size < 1:
        raise ConfigError(f"a group of {size} records", hint="use 1 or more")


# --- batches --------------------------------------------------------------------------------------

Ints: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.float64]
Uniform: TypeAlias = Callable[[int], Values]
"""So many numbers from [0, 1), independent and unforeseen."""
PARTS: Final = 100
"""Independent parts of the printed noise for Z = 1; larger ones have more of them."""


@dataclass(frozen=True, slots=True)
class SubjectBatch:
    """A batch: places of its examples, and for each the group that is added up and clipped once."""

    places: Ints = field(repr=False)
    groups: Ints = field(repr=False)

    @property
    def size(self) -> int:
        """How many groups there are, numbered from 0."""
        return int(self.groups[-1]) + 1 if len(self.groups) else 0


class SubjectSampler:
    """Draws batches from one client's examples, given whom each is about."""

    def __init__(
        self, subjects: Ints, *, rate: float, cap: int = 0, drawn: Drawn = Drawn.SUBJECTS
    ) -> None:
        """`cap` is the most records of a person in a batch; 0: all."""
        check_rate(rate)
        if cap < 0 or (drawn is Drawn.RECORDS and not cap):
            raise ConfigError(
                f"at most {cap} records of a person in a batch",
                hint="1 or more; 0, for all of them, only where subjects are drawn",
            )
        self.rate, self.cap, self.drawn = rate, cap, drawn
        self._order = np.argsort(subjects, kind="stable")  # examples person by person
        self._starts = np.flatnonzero(np.diff(subjects[self._order], prepend=-2))
        self._counts = np.diff(self._starts, append=len(subjects))

    @property
    def people(self) -> int:
        return len(self._starts)

    def draw(self, uniform: Uniform) -> SubjectBatch:
        """The next batch, by coins of its own."""
        if self.drawn is Drawn.RECORDS:
            return self._records(uniform)
        chosen = np.flatnonzero(uniform(self.people) < self.rate)
        counts = self._counts[chosen]
        groups = np.repeat(np.arange(len(chosen)), counts)
        within = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = self._order[np.repeat(self._starts[chosen], counts) + within]
        if self.cap and (counts > self.cap).any():
            kept = _cut(groups, self.cap, uniform)
            places, groups = places[kept], groups[kept]
        return SubjectBatch(places, groups)

    def _records(self, uniform: Uniform) -> SubjectBatch:
        drawn = np.flatnonzero(uniform(len(self._order)) < self.rate)
        person = np.searchsorted(self._starts, drawn, side="right") - 1
        kept = drawn[_cut(person, self.cap, uniform)]
        return SubjectBatch(self._order[kept], np.arange(len(kept)))

    def mechanism(self, noise: float, *, records: int = 0) -> GaussianNoise:
        """What one noisy sum of such a batch is for one person with at most so many records."""
        if self.drawn is Drawn.SUBJECTS:
            return GaussianNoise.poisson(noise, self.rate)
        return GaussianNoise.records(noise, self.rate, of=records, cap=self.cap)


def _cut(person: Ints, cap: int, uniform: Uniform) -> Ints:
    """Places of at most `cap` of each person, at random; persons stand one after the other."""
    order = np.lexsort((uniform(len(person)), person))
    starts = np.flatnonzero(np.diff(person[order], prepend=-1))
    counts = np.diff(starts, append=len(person))
    rank = np.arange(len(person)) - np.repeat(starts, counts)
    return np.sort(order[rank < cap])


# --- as printed -----------------------------------------------------------------------------------


class Printed(StrEnum):
    """The paper's algorithms, as printed. Their epsilon is a claim of the paper, not an account."""

    NONE = "none"
    CENTRAL = "CentralSubDP"
    """Algorithm 1: the server adds noise of sigma_Z C to a client's *mean*."""
    LOCAL = "LocalSubDP"
    """Algorithm 2: the client adds noise of sigma_Z C to its *sum*, then divides."""

    @property
    def label(self) -> str:
        """What stands wherever something of it is shown."""
        return f"{self.value}, as printed"

    def check_scheme(self, *, hides: bool) -> None:
        """Refuse what would have to see more than a scheme shows; `hides`: single updates."""
        if self is Printed.CENTRAL and hides:
            raise ConfigError(
                "CentralSubDP needs every client's gradient at the server, which secure sums hide",
                hint="draw subjects with noise by the clients, or use a scheme with plain sums",
            )


@dataclass(frozen=True, slots=True)
class PrintedNoise:
    """sigma_Z for a target over so many steps, at the sampling rate of one record (section 3.1)."""

    epsilon: float
    delta: float
    rate: float
    steps: int

    def sigma(self, size: int) -> float:
        return _sigma(self.epsilon, self.delta, self.rate, self.steps, size)

    def units(self, size: int) -> int:
        """sigma_Z as so many independent parts of deviation `unit`: never less, 1 % more at most.

        For Z of 1 it is exact.
        """
        return math.ceil(PARTS * (self.sigma(size) / self.sigma(1)) ** 2 - 1e-9)

    @property
    def unit(self) -> float:
        """The deviation of one part, over the clip."""
        return self.sigma(1) / math.sqrt(PARTS)

    def one_in_a_batch(self, *, records: int, batch: int = 1) -> GaussianNoise:
        """What a person with so many records has of a step in which nobody has two.

        Noise is then sigma_1 each time. `batch` is B where the noise is on the mean, which moves by
        C / B.
        """
        return GaussianNoise.records(self.sigma(1) * batch, self.rate, of=records, cap=1)


@lru_cache(maxsize=4096)
def _sigma(epsilon: float, delta: float, rate: float, steps: int, size: int) -> float:
    return noise_as_printed(epsilon=epsilon, delta=delta, size=size, rate=rate, steps=steps)


def fixed_size_batch(examples: int, size: int, uniform: Uniform) -> Ints:
    """B of a client's examples without replacement (line 2 of Algorithm 1, 3 of Algorithm 2)."""
    if 4 * size >= examples:
        return np.argsort(uniform(examples), kind="stable")[:size]
    found = np.zeros(0, np.int64)
    while len(found) < size:  # whoever was drawn before is drawn again
        drawn = np.concatenate([found, (uniform(size) * examples).astype(np.int64)])
        _, first = np.unique(drawn, return_index=True)
        found = drawn[np.sort(first)]
    return found[:size]


def largest_group(subjects: Ints) -> int:
    """Z: the most examples of one person in a batch (`LrgGrpCnt`)."""
    return int(np.unique(subjects, return_counts=True)[1].max(initial=1))


def printed_mean(
    which: Printed,
    total: Values,
    *,
    batch: int,
    most: int,
    clip: float,
    noise: PrintedNoise,
    normal: Uniform,
) -> Values:
    """A batch's noisy mean from the sum of its clipped gradients, as the algorithm prints it.

    `most` is Z, the most examples of one person in the batch; `normal` gives as many standard
    normal values as it is asked for.
    """
    drawn = noise.sigma(most) * clip * normal(len(total))
    if which is Printed.CENTRAL:
        return np.asarray(total / batch + drawn)
    return np.asarray((total + drawn) / batch)
