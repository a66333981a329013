"""Factors: what the opened sums of a fixed group say about the holder of each row, by its value.

The change of an item's row over the change of its bias is the gradient of the logit by that row:
the holder's own row (its user's embedding), and what the model adds, which is nearly the same for
all rows and is subtracted as their median. A model without biases shows the direction alone. So
every row that one member holds carries that member's *factor*, and rows with equal factors have one
holder: `clusters` puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from tessera.audit.round_view import RoundView
from tessera.audit.transcript import Bits, Clients
from tessera.learning.averaging import TableMean
from tessera.learning.compression import signed
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan, TablePlan
from tessera.privacy.index.posterior import Floats

Counts = npt.NDArray[np.int64]
AnyFloats = npt.NDArray[np.floating[Any]]

OUTLIERS: Final = 6.0
"""Factors are cut at so many medians of their size: a bias that hardly moved divides by nothing."""
SURE: Final = 50.0
"""Steps of the quantiser above which a row's factor is as sure as any."""
STARTS: Final = 8
PASSES: Final = 30
"""Of the clustering: beginnings by chance, and passes from each."""


@dataclass(frozen=True, slots=True)
class OpenedFactors:
    """An opened sum of a fixed group: of each row a vector that is its holder's alone.

    `surety` is how many steps of the quantiser a factor rests on, 0 for rows that did not move;
    `targets` in how many examples a row is the target (or, without biases, is involved at all).
    """

    round_id: int
    members: Clients
    rows: Ids = field(repr=False)
    factors: Floats = field(repr=False)  # (rows, width)
    surety: Floats = field(repr=False)
    targets: Counts = field(repr=False)
    directions: bool = False  # of factors, which are then known up to their sign

    @classmethod
    def of_means(
        cls,
        round_id: int,
        members: Clients,
        moves: TableMean,
        biases: TableMean | None,
        *,
        step: float,
    ) -> Self:
        """`step`: of the quantiser."""
        by = moves if biases is None else biases
        factors, size = factors_of(moves.mean, None if biases is None else biases.mean[:, 0])
        surety = np.where(by.counts > 0, size * by.counts / step, 0.0)
        alone = biases is None
        targets = by.counts.astype(np.int64)
        return cls(round_id, members, moves.ids, factors, surety, targets, alone)

    @classmethod
    def of_view(cls, view: RoundView, root: TablePlan) -> Self | None:
        """Of a recorded round, for the rows of one table; None if the sum was not opened."""
        if not view.finished:
            return None
        plan, bias, total = view.plan, bias_of(view.plan, root), view.sums[-1]
        part = total.tables.get(plan.table_id(root.name))
        start = np.uint64(plan.offsets[root.name])
        if part is None:
            return None
        inside = (view.opened >= start) & (view.opened < start + np.uint64(root.rows))

        def mean(words: npt.NDArray[np.unsignedinteger]) -> TableMean:
            counts = signed(words[:, -1], plan.ring)
            summed = plan.quantizer.decode(words[:, :-1], plan.ring)
            return TableMean(view.opened[inside], summed / np.maximum(counts, 1)[:, None], counts)

        biases = None
        if bias is not None:
            # Of the same rows, one for one: the rows of both are places in one union.
            own = total.tables.get(plan.table_id(bias.name))
            if own is not None and np.array_equal(own.rows, part.rows):
                biases = mean(own.words)
        step = plan.quantizer.clip / plan.quantizer.top
        return cls.of_means(int(view.round_id), view.survivors, mean(part.words), biases, step=step)

    def at(self, rows: Ids) -> tuple[Floats, Floats]:
        """Factors and surety of these rows, zeros where this sum has none."""
        factors, surety = np.zeros((len(rows), self.factors.shape[1])), np.zeros(len(rows))
        _, to, source = np.intersect1d(rows, self.rows, return_indices=True)
        factors[to], surety[to] = self.factors[source], self.surety[source]
        return factors, surety

    def only(self, kept: Bits) -> OpenedFactors:
        """Some of the rows."""
        return replace(
            self,
            rows=self.rows[kept],
            factors=self.factors[kept],
            surety=self.surety[kept],
            targets=self.targets[kept],
        )


def bias_of(plan: Plan, root: TablePlan) -> TablePlan | None:
    """The table with one number for each row of `root`, if the model has one."""
    return next(
        (
            t
            for t in plan.tables
            if t.derived_from == root.name and t.width == 1 and t.rows == root.rows
        ),
        None,
    )


def factors_of(moves: AnyFloats, biases: AnyFloats | None) -> tuple[Floats, Floats]:
    """(rows, width) factors and what they were divided by; zeros where that is nothing."""
    moves = np.asarray(moves, dtype=np.float64)
    by = np.linalg.norm(moves, axis=1) if biases is None else np.asarray(biases, dtype=np.float64)
    there = np.abs(by) > 1e-12
    factors = np.zeros(moves.shape)
    factors[there] = moves[there] / by[there, None]
    if there.any():
        if biases is None:  # a direction, up to its sign
            _, _, axes = np.linalg.svd(factors[there], full_matrices=False)
            factors *= np.where(factors @ axes[0] < 0.0, -1.0, 1.0)[:, None]
        else:
            factors[there] -= np.median(factors[there], axis=0)
            most = OUTLIERS * np.median(np.abs(factors[there]))
            factors = np.clip(factors, -most, most)
    return factors, np.abs(by)


# --- clusters -------------------------------------------------------------------------------------


def clusters(opened: Sequence[OpenedFactors], count: int) -> tuple[Ids, Counts]:
    """Rows that moved, and a label for each: as many clusters of equal factors as members.

    Lloyd's algorithm over the factors of all rounds, each row by its surety; of several starts the
    one of least cost.
    """
    moved = [one.rows[one.surety > 0.0] for one in opened]
    rows = np.unique(np.concatenate([*moved, np.zeros(0, dtype=np.uint64)]))
    if len(rows) <= count:
        return rows, np.arange(len(rows))
    parts = [one.at(rows) for one in opened]
    points = np.concatenate([factors for factors, _ in parts], axis=1)
    weights = np.minimum(np.sum([surety for _, surety in parts], axis=0), SURE)
    rng, best, labels = np.random.default_rng(31), np.inf, np.zeros(len(rows), dtype=np.int64)
    for _ in range(STARTS):
        centres = _spread_out(points, weights, count, rng)
        for _ in range(PASSES):
            apart = squared_distances(points, centres)
            nearest = apart.argmin(axis=1)
            share = np.zeros((count, len(rows)))
            share[nearest, np.arange(len(rows))] = weights
            total = share.sum(axis=1, keepdims=True)
            moved_to = np.where(total > 0.0, share @ points / np.maximum(total, 1e-12), centres)
            if np.allclose(moved_to, centres):
                break
            centres = moved_to
        cost = float((apart.min(axis=1) * weights).sum())
        if cost < best:
            best, labels = cost, nearest
    return rows, labels


def _spread_out(points: Floats, weights: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Centres to begin with, each far from those before (Arthur, Vassilvitskii 2007)."""
    centres = points[[rng.choice(len(points), p=weights / weights.sum())]]
    while len(centres) < count:
        far = squared_distances(points, centres).min(axis=1) * weights + 1e-300
        centres = np.vstack([centres, points[rng.choice(len(points), p=far / far.sum())]])
    return centres


def squared_distances(points: Floats, centres: Floats) -> Floats:
    """Squared distances at [point, centre]."""
    found: Floats = np.square(points).sum(axis=1)[:, None] - 2.0 * points @ centres.T
    found += np.square(centres).sum(axis=1)
    return np.maximum(found, 0.0)
