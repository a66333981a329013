"""Gradients of plain matrix factorisation, solved for what a client rated, and how.

Yang et al., *Practical and Secure Federated Recommendation with Personalized Masks*, section 2.2.2,
with the rule of `learning/models/factorization.py` in place of the paper's. A client that was sent
the row (q, b) of an item and has the row (p, c) of its own afterwards sends, for each item,

    delta of q =  -g (lambda q - e p)        delta of b =  -g (lambda' b - e)

where e = r - base - (q.p + b + c) is what is left of its rating r. The item's bias meets a
coordinate that is fixed at 1, so the second equation gives e, then the first gives p, and

    x  =  e + q.p + b  =  r - base - c

is the rating but for a number c that all ratings of the client share. A second upload gives c, too,
since the client's own step in between is known (equation 7, whose sign is wrong as printed: a step
goes *down* the gradient, c <- c - g' (lambda' c - mean of e)):

    change of c  =  x before - x after  =  g' (mean of e - lambda' c)

The mean of e is known, so c is what is missing. Rounding is amplified by 1 / (g' lambda') here, and
divided by the root of the number of rows that say it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.learning.rating_models import BIAS_SHARE
from tessera.learning.tables.submodel import Ids
from tessera.learning.training.settings import LocalTraining

Floats = npt.NDArray[np.float64]

BLIND: Final = 1e-9
"""Below this an equation says nothing: there is no penalty, or no error to divide by."""


@dataclass(frozen=True, slots=True)
class Upload:
    """One client's contribution to a round as a plain server has it: ids ascend.

    `rows` are what it was sent, (n, k + 1) with the bias last; `deltas` what it sent back, divided
    by `counts`, the number of its ratings behind each.
    """

    round_id: int
    items: Ids = field(repr=False)
    rows: Floats = field(repr=False)
    deltas: Floats = field(repr=False)
    counts: Floats = field(repr=False)


@dataclass(frozen=True, slots=True)
class SolvedUpload:
    """An upload, solved: each rating's error, the client's factors, and x = r - base - c."""

    errors: Floats = field(repr=False)
    factors: Floats = field(repr=False)
    ratings: Floats = field(repr=False)


def penalties(training: LocalTraining) -> tuple[float, float]:
    """(lambda, lambda'): of factors, and of biases."""
    return training.weight_decay, training.weight_decay * BIAS_SHARE


def gradients(
    rows: Floats, deltas: Floats, training: LocalTraining, round_id: int
) -> tuple[Floats, Floats]:
    """(e, e p) of each row, by undoing the penalty and the rate of a delta."""
    rate = training.rate_in(round_id) * training.table_rate
    of_factors, of_bias = penalties(training)
    errors = deltas[:, -1] / rate + of_bias * rows[:, -1]
    return errors, deltas[:, :-1] / rate + of_factors * rows[:, :-1]


def factors_of(errors: Floats, products: Floats) -> Floats:
    """The one p that stands behind all of a client's e p; NaN if every error is nothing."""
    weight = float(errors @ errors)
    if weight < BLIND**2:
        return np.full(products.shape[1], np.nan)
    return np.asarray((errors @ products) / weight)


def solve(upload: Upload, training: LocalTraining) -> SolvedUpload:
    """Solve one upload."""
    errors, products = gradients(upload.rows, upload.deltas, training, upload.round_id)
    factors = factors_of(errors, products)
    ratings = errors + upload.rows[:, :-1] @ factors + upload.rows[:, -1]
    return SolvedUpload(errors, factors, ratings)


def bias_before(
    change: float,
    before: SolvedUpload,
    after: SolvedUpload,
    upload: Upload,
    training: LocalTraining,
) -> float:
    """The client's bias before the step that led to `upload`; NaN where nothing depends on it.

    `before` and `after` are this client's uploads on either side of the step, solved, and `change`
    is how far the bias went in it. With several local epochs the way there is still
    affine in the bias, so two trial runs of it give the line.
    """
    x = after.ratings + change  # r - base - c with the old c, from the fresher of two equal sums
    at_zero, at_one = (_walked(bias, before.factors, x, upload, training) for bias in (0.0, 1.0))
    slope = at_one - at_zero
    return (change - at_zero) / slope if abs(slope) > BLIND else float("nan")


def _walked(
    bias: float, factors: Floats, x: Floats, upload: Upload, training: LocalTraining
) -> float:
    """How far a bias goes in the client's own steps of a round, if it begins here."""
    rate = training.rate_in(upload.round_id)
    of_factors, of_bias = penalties(training)
    q, weight = upload.rows[:, :-1], upload.counts / upload.counts.sum()
    gone = 0.0
    for _ in range(training.epochs):
        errors = x - q @ factors - upload.rows[:, -1] - gone
        weighted = weight * errors
        step = of_bias * (bias + gone) - float(weighted.sum())
        factors = factors - rate * (of_factors * factors - weighted @ q)
        gone -= rate * step
    return gone


class Profile:
    """What a client's uploads, taken in their order, say about its ratings."""

    def __init__(self, training: LocalTraining) -> None:
        self._training = training
        self._last: tuple[Ids, SolvedUpload] | None = None
        self._gap = False  # since the last upload
        self._offset = 0.0  # of the bias at the last upload, from that at the first
        self._first: list[float] = []  # what the bias was at the first upload, by pairs
        self._items: Ids = np.zeros(0, np.uint64)
        self._total: Floats = np.zeros(0)  # of x and the offset, over the uploads of an item
        self._seen: Floats = np.zeros(0)

    def take(self, upload: Upload, *, unseen: bool = False) -> None:
        """One more. `unseen` says that the client may have trained since the one before, in a
        round of which the server has no upload: then the two say nothing of the bias."""
        part = solve(upload, self._training)
        self._gap |= unseen
        if not np.isfinite(part.factors).all():  # nothing is to be learnt from it
            self._gap = True
            return
        if self._last is not None:
            self._compare(*self._last, upload, part)
        self._gap = False
        self._last = upload.items, part
        self._add(upload.items, part.ratings + self._offset)

    def _compare(self, items: Ids, old: SolvedUpload, upload: Upload, new: SolvedUpload) -> None:
        _, a, b = np.intersect1d(items, upload.items, assume_unique=True, return_indices=True)
        if not len(a):  # other items altogether: nothing joins them to what came before
            self._offset, self._first = 0.0, []
            self._items, self._total, self._seen = self._items[:0], self._total[:0], self._seen[:0]
            return
        change = float(np.mean(old.ratings[a] - new.ratings[b]))
        if not self._gap:
            bias = bias_before(change, old, new, upload, self._training)
            if np.isfinite(bias):
                self._first.append(bias - self._offset)
        self._offset += change

    def _add(self, items: Ids, values: Floats) -> None:
        every = np.union1d(self._items, items)
        total, seen = np.zeros(len(every)), np.zeros(len(every))
        at = np.searchsorted(every, self._items)
        total[at], seen[at] = self._total, self._seen
        at = np.searchsorted(every, items)
        total[at] += values
        seen[at] += 1
        self._items, self._total, self._seen = every, total, seen

    @property
    def levelled(self) -> bool:
        """Whether the client's own bias is known; without it all ratings lack one same number."""
        return bool(self._first)

    def ratings(self) -> tuple[Ids, Floats]:
        """Items, and r - base of each, or r - base less the bias where that is not known."""
        # One pair that says it badly does not count; together they say it best.
        first = float(np.median(self._first)) if self._first else 0.0
        return self._items, self._total / np.maximum(self._seen, 1) + first


def on_scale(values: Floats, low: float, high: float, step: float) -> Floats:
    """Values that lie on the scale but for one common shift and a little noise, put on it.

    All of them are off by the same, so the shift within a step is read from all together; it is the
    smallest that leaves most of them on the scale. NaN stays.
    """
    good = np.isfinite(values)
    if not good.any():
        return values.copy()
    turn = np.exp(2j * np.pi * (values[good] - low) / step).mean()
    near = float(np.angle(turn)) / (2 * np.pi) * step
    shifts = near + step * np.array([0.0, -1.0, 1.0, -2.0, 2.0])

    def outside(shift: float) -> int:
        moved = values[good] - shift
        return int(((moved < low - step / 2) | (moved > high + step / 2)).sum())

    shift = min(shifts, key=outside)  # the first of equals: the smallest
    placed = low + step * np.rint((values - shift - low) / step)
    return np.asarray(np.clip(placed, low, high))
