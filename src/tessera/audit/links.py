"""Links: rows whose deltas in one opened sum are collinear.

The deltas of one client's rows often point in one direction (a factor model's are all multiples of
the user's factors; an average over a history gives every row of it the same gradient), and those of
different clients do not. A row with one holder in its sum shows that holder's delta, so collinear
rows have one holder, and it is in the group of each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

STEPS: Final = 2.0
"""Quantisation may move a value so many steps off its client's direction."""
WIDEST: Final = 0.02
"""Rows whose direction is known less exactly than this angle link to nothing."""
TRUST: Final = 0.95
"""How likely linked rows are taken to have one holder."""
TINY: Final = 1e-12
"""Posteriors below this are proofs of the contrary."""


def linked(values: npt.NDArray[np.int64], *, after: int = 0) -> Labels:
    """A label for each row of an opened sum (rows, width), above `after`; 0 without another row."""
    labels = np.zeros(len(values), dtype=np.int64)
    size = np.linalg.norm(values.astype(np.float64), axis=1)
    if values.ndim != 2 or values.shape[1] < 2:
        return labels  # one number has no direction
    blur = STEPS * np.sqrt(values.shape[1]) / np.maximum(size, 1e-9)
    open_rows = np.flatnonzero(blur < WIDEST)
    unit = values[open_rows] / size[open_rows, None]
    blur = blur[open_rows]
    free = np.ones(len(open_rows), dtype=np.bool_)
    for at in range(len(open_rows)):
        if not free[at]:
            continue
        sine = np.sqrt(np.clip(1.0 - np.square(unit @ unit[at]), 0.0, None))
        near = free & (sine <= blur + blur[at])
        free &= ~near
        if near.sum() > 1:
            after += 1
            labels[open_rows[near]] = after
    return labels


def common_holders(
    holds: Floats, clusters: Iterable[tuple[Indices, Indices]], *, trust: float = TRUST
) -> Floats:
    """P(client holds row) once more, where linked rows have one holder.

    `clusters` are (rows, clients in the sums of all of them). Each row's odds are evidence about
    the common holder, and multiply. A cluster that no client explains is not one. Of several
    clusters with a row the largest counts.
    """
    found, free = holds.copy(), np.ones(len(holds), dtype=np.bool_)
    clipped = np.clip(holds, TINY, 1.0 - TINY)
    odds = np.log(clipped) - np.log1p(-clipped)
    for rows, clients in sorted(clusters, key=lambda each: -len(each[0])):
        if not free[rows].any() or not clients.size:
            continue
        if not (holds[np.ix_(rows, clients)] > TINY).all(axis=0).any():
            continue
        joint = odds[np.ix_(rows, clients)].sum(axis=0)
        weight = np.exp(joint - joint.max())
        fresh = rows[free[rows]]
        found[fresh] *= 1.0 - trust
        found[np.ix_(fresh, clients)] += trust * weight / weight.sum()
        free[rows] = False
    return found
