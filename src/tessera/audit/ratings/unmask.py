"""Masks inverted: the residual of a ridge regression determines what it subtracted.

A mask of order one (`learning/models/private.py`) minimises |y - X w|^2 + w' D w over a client's
ratings y less the global mean, X being public attributes of the items and D public penalties. What
it leaves is s = y - X w. At the minimum D w = X' s, so that whoever has s has w = X' s / D, and

    y  =  s + X D^-1 X' s

with no unknown left: such a mask is a linear map that anybody can invert. It is not in the paper,
which tries to guess ratings from masked ones as if the mask were noise. Where each client chooses
its penalty among a few, the right one is that whose ratings lie on the scale. Masks of higher order
start from this fit and, under penalties that serve the federation, end close to it: the same map
then gives nearly all ratings, since what is left over is less than half a step of the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.audit.ratings.gradient import Floats, on_scale
from tessera.learning.rating_models import INTERCEPT


def unmasked(masked: Floats, attributes: Floats, penalty: float) -> Floats:
    """Ratings less the global mean from what a linear mask left of them; a row of attributes each.

    With an infinite penalty there was no mask but a share of the client's mean.
    """
    weights = attributes.T @ masked / penalty
    return np.asarray(masked + attributes @ weights + masked.sum() / INTERCEPT)


def best(
    masked: Floats,
    attributes: Floats,
    penalties: Sequence[float],
    *,
    mean: float,
    low: float,
    high: float,
    step: float,
) -> Floats:
    """The ratings on the scale under the penalty that puts them there best.

    That there was no mask, because the client had too few ratings for one, is tried as well.
    """
    tried = [masked, *(unmasked(masked, attributes, penalty) for penalty in penalties)]
    fit = [abs(np.exp(2j * np.pi * (y + mean - low) / step).mean()) for y in tried]
    return on_scale(tried[int(np.argmax(fit))] + mean, low, high, step)
