"""What everybody knows of the rating models: names, penalties, first values. Needs no PyTorch."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

BASE: Final = "base"
"""The field of what is predicted without the factors."""

ITEMS: Final = "items"
USERS: Final = "users"

FACTORS: Final = "factors"
"""The model that federates factors, among those of a rating task."""
NO_MASK: Final = "none"

USER_START: Final = 0.0
"""All users begin alike: a row that followed from a public seed would name whose gradients stand
alone in a sum."""

BIAS_SHARE: Final = 0.2
"""The penalty on biases, in parts of that on factors."""
INTERCEPT: Final = 5.0
"""The penalty on a mask's intercept: as if five more of its ratings were the global mean."""
STRENGTH: Final = 15.0
"""A mask's default penalty, in units of the mean squared length of an item's attributes."""
GRID: Final = (1.0, 0.5, 2.5, 7.5, 25.0)
"""Penalties that a client tries, as multiples of the default, which is the first."""


def mask_penalties(penalty: float, attributes: npt.NDArray[np.float32]) -> tuple[float, ...]:
    """Those that a client tries, the default first; `penalty` alone unless it is 0."""
    if penalty:
        return (penalty,)
    described = attributes[attributes.any(-1)].astype(np.float64)
    size = float((described**2).sum(-1).mean()) if described.size else 1.0
    return tuple(STRENGTH * size * multiple for multiple in GRID)
