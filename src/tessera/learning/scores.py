"""What a model gives for examples, reading only the rows that they touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call

from tessera.data.examples import Examples
from tessera.data.sequences import SEEN
from tessera.errors import MisuseError
from tessera.learning.bound_model import BoundModel
from tessera.learning.softmax import ranked
from tessera.learning.tables.submodel import Floats, Ids
from tessera.learning.tables.table import StoredTable
from tessera.learning.training.jobs import tensor

AT_ONCE: Final = 1 << 24
"""Logits of a softmax that are held at a time: 64 MB."""


ItemScores: TypeAlias = Callable[[Examples], npt.NDArray[Any]]
"""Examples with a history -> a score for every item, (N, m)."""


@dataclass(frozen=True, slots=True)
class SummedModel:
    """What clients' sums have come to; `deviation` is that of the noise on each number of them."""

    dense: Floats = field(repr=False)
    tables: Mapping[str, StoredTable] = field(repr=False)
    deviation: float = 0.0


class RowSource(Protocol):
    """A table that gives rows by id: the server's own `Table`, for one."""

    def values(self, ids: Ids, /) -> Floats: ...


def evaluate(
    module: nn.Module,
    bound: BoundModel,
    parameters: Mapping[str, Floats | RowSource],
    examples: Examples,
    *,
    batch: int = 4096,
    rank: bool = True,
) -> Floats:
    """What the module gives for each example: logits (N,) for a click model.

    Over a softmax, (N, 2): the rank of the target among all rows of its table, and its
    log-probability (`softmax.ranked`); without `rank` the logits of all rows, (N, rows).

    `parameters` go by parameter name, as in a `state_dict` (`BoundModel.parameters`). A table is
    the array of all its rows, or anything with `values(ids)`, which is asked only for the rows that
    a batch touches. Derived fields are added here. Examples do not see each other, so the size of a
    batch does not matter to a module that normalises per example.
    """
    names = [name for name, _ in bound.dense] + [table.parameter for table in bound.tables]
    if missing := [name for name in names if name not in parameters]:
        raise MisuseError(f"evaluate: parameter {missing[0]!r} is missing")
    fixed = {
        name: tensor(value)
        for name, value in parameters.items()
        if isinstance(value, np.ndarray) and name not in {t.parameter for t in bound.tables}
    }
    scores = [np.empty(0, np.float32)] if len(examples) == 0 else []
    softmax, every = bound.candidates, None
    if softmax is not None:
        every = np.arange(softmax.rows, dtype=np.uint64)
        batch = max(1, min(batch, AT_ONCE // softmax.rows))
        if not len(examples):
            scores = [np.empty((0, 2 if rank else softmax.rows), np.float32)]
    before = module.training
    module.eval()
    try:
        for start in range(0, len(examples), batch):
            part = examples.take(slice(start, start + batch))
            ids = bound.all_row_ids_of(part, every)
            rows = {
                table.parameter: torch.from_numpy(
                    _rows(parameters[table.parameter], ids[table.name], table.width)
                )
                for table in bound.tables
            }
            columns = bound.positions(part, ids)
            with torch.inference_mode():
                tensors = {name: tensor(column) for name, column in columns.items()}
                output = functional_call(module, fixed | rows, (tensors,))
                if softmax is not None and rank:
                    output = ranked(output, tensors[softmax.target], tensors.get(SEEN))
                scores.append(output.numpy())
    finally:
        module.train(before)
    return np.concatenate(scores).astype(np.float32)


def _rows(table: Floats | RowSource, ids: Ids, width: int) -> Floats:
    if ids.size == 0:  # a masked id still looks up row 0
        return np.zeros((1, width), np.float32)
    return table[ids] if isinstance(table, np.ndarray) else table.values(ids)


# --- click statistics -----------------------------------------------------------------------------
#
# Clicks: AUC and loss in one place, and sufficient statistics that clients can sum in private.


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
