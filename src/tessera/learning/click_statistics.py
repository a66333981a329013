"""Clicks: AUC and loss in one place, and sufficient statistics that clients can sum in private."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError

Numbers: TypeAlias = npt.NDArray[Any]

LOSS_UNIT: Final = 2.0**-10
LOSS_CAP: Final = 32.0
"""One example counts for no more, so that a sum's size can be bounded before it is made."""


def auc(scores: Numbers, labels: Numbers) -> float:
    """The probability that a click scores above a non-click, ties half; NaN without both kinds."""
    clicked = np.asarray(labels) > 0.5
    clicks = int(np.count_nonzero(clicked))
    others = clicked.size - clicks
    if clicks == 0 or others == 0 or np.isnan(scores).any():
        return float("nan")
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    rank = last - (sizes - 1) / 2  # the mean rank of equal scores, counted from 1
    total = float(rank[group.reshape(-1)][clicked].sum())
    return (total - clicks * (clicks + 1) / 2) / (clicks * others)


def log_loss(logits: Numbers, labels: Numbers) -> float:
    """The mean binary cross-entropy of logits."""
    return float(np.mean(_losses(logits, labels))) if len(logits) else float("nan")


@dataclass(frozen=True, slots=True)
class ClickStatistics:
    """Sufficient statistics of a test: whole numbers that add up over clients.

    `loss` is in units of 2^-10. `misses` and `hits` count the scores of examples without and with a
    click, in equal bins of the predicted probability; AUC follows from their sums to within the
    pairs that share a bin.
    """

    n: int
    clicks: int
    correct: int
    loss: int
    misses: npt.NDArray[np.int64] = field(repr=False)
    hits: npt.NDArray[np.int64] = field(repr=False)

    @classmethod
    def count(cls, logits: Numbers, labels: Numbers, *, bins: int = 100) -> Self:
        """The statistics of one client's held-out examples."""
        if np.isnan(logits).any():
            raise MisuseError("metrics: a score is not a number")
        clicked = np.asarray(labels) > 0.5
        # The same function of the score alone everywhere, and monotone: the bounds rest on it.
        chance = 1.0 / (1.0 + np.exp(-np.clip(logits, -40.0, 40.0, dtype=np.float64)))
        at = np.minimum((chance * bins).astype(np.int64), bins - 1)
        losses = np.minimum(_losses(logits, labels), LOSS_CAP)
        return cls(
            n=clicked.size,
            clicks=int(np.count_nonzero(clicked)),
            correct=int(np.count_nonzero((logits > 0) == clicked)),
            loss=int(np.rint(losses.sum() / LOSS_UNIT)),
            misses=np.bincount(at[~clicked], minlength=bins).astype(np.int64),
            hits=np.bincount(at[clicked], minlength=bins).astype(np.int64),
        )

    def vector(self) -> npt.NDArray[np.int64]:
        """What is summed: four numbers, then the two histograms."""
        head = np.array([self.n, self.clicks, self.correct, self.loss], np.int64)
        return np.concatenate((head, self.misses, self.hits))

    @classmethod
    def of(cls, vector: npt.NDArray[np.int64]) -> Self:
        """The statistics with this vector, which may be a sum over clients."""
        bins, odd = divmod(vector.size - 4, 2)
        if bins < 1 or odd or (vector < 0).any():
            raise MisuseError("metrics: not a sum of click statistics")
        n, clicks, correct, loss = (int(value) for value in vector[:4])
        return cls(n, clicks, correct, loss, vector[4 : 4 + bins], vector[4 + bins :])

    def __add__(self, other: ClickStatistics) -> ClickStatistics:
        return ClickStatistics.of(self.vector() + other.vector())

    @property
    def accuracy(self) -> float:
        return self.correct / self.n if self.n else float("nan")

    @property
    def mean_loss(self) -> float:
        return self.loss * LOSS_UNIT / self.n if self.n else float("nan")

    @property
    def auc(self) -> float:
        """The middle of the bounds: as if scores of one bin were equal."""
        low, high = self.auc_bounds()
        return (low + high) / 2

    def auc_bounds(self) -> tuple[float, float]:
        """The AUC lies between these, whatever the order inside bins; NaN without both kinds."""
        pairs = int(self.misses.sum()) * int(self.hits.sum())
        if pairs == 0:
            return float("nan"), float("nan")
        below = np.cumsum(self.misses) - self.misses
        won = int((self.hits * below).sum())
        return won / pairs, (won + int((self.hits * self.misses).sum())) / pairs


def _losses(logits: Numbers, labels: Numbers) -> npt.NDArray[np.float64]:
    x = np.asarray(logits, np.float64)
    with np.errstate(invalid="ignore"):  # of a model that is not finite: NaN, without a warning
        return np.logaddexp(0.0, x) - x * (np.asarray(labels) > 0.5)
