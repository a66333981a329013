"""Groups: the arithmetic of Marathe and Kanani 2022 for several records of one person.

Theorem 3.1 leads from one record to a group of g: (epsilon, delta) becomes (g epsilon,
g exp((g-1) epsilon) delta). Both algorithms of the paper ask for noise backwards along it, so that
a group of Z keeps the target. That is sound for a group of fixed size. Theorem 3.2, which states
the converse for any algorithm, is false as printed, and the noise is calibrated with the sampling
rate of one record, which a person with many does not have: `docs/protocols/subject-privacy.md`.
"""

from __future__ import annotations

import math

from tessera.errors import ConfigError
from tessera.privacy.accounting import noise_for
from tessera.privacy.guarantee import Adjacency
from tessera.privacy.mechanism import GaussianNoise


def group_level(epsilon: float, delta: float, *, size: int) -> tuple[float, float]:
    """What a group of `size` keeps if one record has this level (Theorem 3.1)."""
    check_size(size)
    return size * epsilon, size * math.exp((size - 1) * epsilon) * delta


def member_level(epsilon: float, delta: float, *, size: int) -> tuple[float, float]:
    """The level that one record needs so that a group of `size` keeps this one (section 3.1)."""
    check_size(size)
    each = epsilon / size
    return each, delta / (size * math.exp((size - 1) * each))


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
