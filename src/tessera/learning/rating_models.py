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
REFITTED: Final = "refitted"
"""The one over masks that are fitted again in each round."""
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
REFIT_STRENGTH: Final = 7.5
"""Likewise where masks are fitted again each round, over items' biases that explain a part."""
GRID: Final = (1.0, 0.5, 2.5, 7.5, 25.0)
"""Penalties that a client tries, as multiples of the default, which is the first."""


def mask_penalties(penalty: float, attributes: npt.NDArray[np.float32]) -> tuple[float, ...]:
    """Those that a client tries, the default first; `penalty` alone unless it is 0."""
    if penalty:
        return (penalty,)
    return tuple(STRENGTH * _size(attributes) * multiple for multiple in GRID)


def refit_penalty(penalty: float, attributes: npt.NDArray[np.float32]) -> float:
    """The one that everybody takes in every round; the default unless it is given."""
    return penalty or REFIT_STRENGTH * _size(attributes)


def _size(attributes: npt.NDArray[np.float32]) -> float:
    """The mean squared length of an item's attributes, over the items that have any."""
    described = attributes[attributes.any(-1)].astype(np.float64)
    return float((described**2).sum(-1).mean()) if described.size else 1.0
