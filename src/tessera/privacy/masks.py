"""What a private mask leaves of ratings, in the paper's own measure (FedMMF, section 3.3)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError, MisuseError

Numbers = npt.NDArray[np.floating]


def indicator(ratings: Numbers, masks: Numbers, low: float, high: float) -> float:
    """Definition 3.1: the mean squared difference of ratings and masks, on a scale from 0 to 1.

    NaN if there are none. Small means that the masks predict the ratings well, which is all it
    says: what is left of the ratings may still order them, or give them away by their range.
    """
    if not high > low:
        raise ConfigError(f"a scale from {low} to {high} has no length")
    if ratings.shape != masks.shape:
        raise MisuseError(f"{ratings.shape} ratings and {masks.shape} masks")
    if not ratings.size:
        return float("nan")
    difference = (ratings.astype(np.float64) - masks.astype(np.float64)) / (high - low)
    return float(np.mean(difference * difference))
