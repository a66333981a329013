"""What Yang et al. 2021 (FedMMF, section 3.3) prove of private masks, and what that means.

The privacy indicator J of a mask (Definition 3.1) is its mean squared error, ratings scaled to
[0, 1]. Theorem 1 calls a client (epsilon, delta)-private if, with probability 1 - delta over its
ratings, J of its mask is within epsilon of the best in the class of models. By Hoeffding and a
union bound over the class F (equations 16 to 19), all of F have their error on n ratings within e
of J if n >= ln(2 |F| / delta) / (2 e^2); the minimiser then is within 2 e of the best (20 to 22).
With e = epsilon / 2:

    n >= 2 ln(2 |F| / delta) / epsilon^2

Equation 23 has a 2 too many in the denominator, so it asks for half of the ratings that its own
proof needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isfinite, log, sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError, MisuseError

Numbers = npt.NDArray[Any]

MEANING: Final = (
    "Bounds how close the mask's error comes to the best in its class: a statement on learning. It "
    "says nothing on what the masked ratings, or updates made from them, tell about the ratings."
)


@dataclass(frozen=True, slots=True)
class Assumption:
    """What the theorem takes for granted, and how that stands with masks of tessera."""

    name: str
    wanted: str
    here: str


ASSUMPTIONS: Final = (
    Assumption(
        "finite class",
        "finitely many models to choose from",
        "counted as 2^(parameters x bits), the different settings a computer can hold",
    ),
    Assumption(
        "i.i.d. ratings",
        "independent draws from one distribution",
        "not so: users choose what they rate, and tastes change",
    ),
    Assumption(
        "loss in [0, 1]",
        "squared errors of ratings scaled to [0, 1], never above 1",
        "holds: masks are clipped to the scale",
    ),
    Assumption(
        "exact minimiser",
        "the mask has the least error of its class on the ratings",
        "not so: it has a penalty and, above order one, few steps, since that predicts better",
    ),
)


def indicator(ratings: Numbers, masks: Numbers, low: float, high: float) -> float:
    """Definition 3.1: the mean squared difference of ratings and masks, on a scale from 0 to 1.

    NaN if there are none. Over ratings that the mask was not fitted to it estimates J; over those
    it was fitted to it is equation 15, which the paper's Figure 4 shows.
    """
    if not high > low:
        raise ConfigError(f"a scale from {low} to {high} has no length")
    if ratings.shape != masks.shape:
        raise MisuseError(f"ratings of shape {ratings.shape}, masks of shape {masks.shape}")
    if not ratings.size:
        return float("nan")
    difference = (ratings.astype(np.float64) - masks.astype(np.float64)) / (high - low)
    return float(np.mean(difference * difference))


def hypotheses_of(parameters: int, bits: int) -> int:
    """How many models have this many parameters of this many bits each."""
    if not (parameters >= 1 and bits >= 1 and parameters * bits <= 10**7):
        raise ConfigError(
            f"{parameters} parameters of {bits} bits",
            hint="1 or more of each, ten million together",
        )
    return 1 << (parameters * bits)


def samples_needed(epsilon: float, delta: float, hypotheses: int) -> int:
    """The fewest ratings for which Theorem 1 holds, in the form that its proof gives."""
    if not (epsilon > 0.0 and isfinite(epsilon)):
        raise ConfigError(f"epsilon = {epsilon}", hint="above 0; at 1 or more nothing is promised")
    return ceil(2.0 * _log_of(delta, hypotheses) / epsilon**2)


def samples_as_printed(epsilon: float, delta: float, hypotheses: int) -> int:
    """Equation 23 as it stands in the paper: half of what is needed."""
    return ceil(samples_needed(epsilon, delta, hypotheses) / 2)


def epsilon_of(n: int, delta: float, hypotheses: int) -> float:
    """The least epsilon for which Theorem 1 holds with n ratings; 1 or more promises nothing."""
    if n < 0:
        raise ConfigError(f"{n} ratings", hint="0 or more")
    return sqrt(2.0 * _log_of(delta, hypotheses) / n) if n else inf


def _log_of(delta: float, hypotheses: int) -> float:
    """ln(2 |F| / delta); the logarithms apart, since |F| may be too large for a float."""
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"delta = {delta} must lie between 0 and 1", hint="0.05 is usual")
    if hypotheses < 1:
        raise ConfigError(f"a class of {hypotheses} models", hint="1 or more")
    return log(2) + log(hypotheses) - log(delta)
