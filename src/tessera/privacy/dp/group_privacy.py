"""Groups: the arithmetic of Marathe and Kanani 2022 for several records of one person.

Theorem 3.1 leads from one record to a group of g: (epsilon, delta) becomes (g epsilon,
g exp((g-1) epsilon) delta). Both algorithms of the paper ask for noise backwards along it, so that
a group of Z keeps the target. That is sound for a group of fixed size. Theorem 3.2, which states
the converse for any algorithm, is false as printed, and the noise is calibrated with the sampling
rate of one record, which a person with many does not have: `docs/protocols/subject-privacy.md`.
"""

from __future__ import annotations

import math
from typing import Final

from tessera.errors import ConfigError
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.accounting import noise_for
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import GaussianNoise

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
        raise ConfigError(f"a group of {size} records is none", hint="use 1 or more")
