"""Recovery: masked ratings stretched to the range that the client's true ratings are known to have.

Yang et al., *Practical and Secure Federated Recommendation with Personalized Masks*, section 4.2.1.
A rating is recovered at error level g if the stretched value is off by less than g steps of the
scale. The text leaves the unit of g open, and compares with another letter than g; its Table 2 is
for a scale in steps of half a star, so that its g = 1 reads as "off by less than half a star". A
level is then another thing on another scale; `within` gives distances in the ratings' own unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.ratings.table import HitRates, Numbers, Offsets, extremes, owners
from tessera.errors import MisuseError

LEVELS: Final = (1.0, 2.0, 3.0, 4.0, 5.0)
"""The error levels of Table 2, in steps of the scale."""


def stretched(
    masked: Numbers, offsets: Offsets, low: Numbers, high: Numbers
) -> npt.NDArray[np.float64]:
    """Each client's values, moved and scaled so that they reach from `low` to `high`.

    A client whose values are all equal gets the middle of its range: nothing says which end.
    """
    owner = owners(offsets, masked)
    least, most = extremes(masked, offsets)
    width = np.where(most > least, most - least, 1.0)
    place = np.where(most > least, 0.0, 0.5)[owner] + (masked - least[owner]) / width[owner]
    return np.asarray(low[owner] + place * (high - low)[owner], np.float64)


def recovery(
    masked: Numbers,
    true: Numbers,
    offsets: Offsets,
    *,
    step: float = 0.0,
    levels: Sequence[float] = LEVELS,
    within: Sequence[float] = (),
    low: Numbers | None = None,
    high: Numbers | None = None,
) -> HitRates:
    """How many of each client's ratings come back, at each level or distance.

    Settings are `levels` times `step`, or the distances `within`, as they stand. The attacker knows
    each client's lowest and highest rating (`low`, `high`; those of `true` if left out).
    """
    owner = owners(offsets, masked, true)
    if low is None or high is None:
        low, high = extremes(true, offsets)
    if not within and step <= 0.0:
        raise MisuseError("recovery: error levels are steps of a scale, and there is none")
    distances = tuple(within) or tuple(level * step for level in levels)
    error = np.abs(stretched(masked, offsets, low, high) - true)
    clients = len(offsets) - 1
    hits = [np.bincount(owner[error < d], minlength=clients) for d in distances]
    trials = np.broadcast_to(np.diff(offsets), (len(distances), clients))
    settings = tuple(within) or tuple(levels)
    return HitRates(settings, np.array(hits, np.int64), trials.astype(np.int64))
