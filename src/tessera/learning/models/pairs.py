"""Pairs: which item comes next, from one sum of pair counts over everybody, without training.

A sequential linear model (Choi et al., *Session-aware Linear Item-Item Models for Session-based
Recommendation*, WWW 2021, section 3.2). Of a user's items x_1 .. x_L let h_t be the vector with
q^(t - a) at x_a for the last W items up to t, q = exp(-1 / tau), and y_t that with 1 at x_(t+1).
Over all users and t

    HH = sum of h_t h_t'    HY = sum of h_t y_t'    B = (HH + penalty I)^-1 HY

and a user's scores are h_L B. Both sums are of weighted pair counts: a client adds q^(b - a) and
the like to the cells of items that stand within W places of each other, and its part of both is a
short list of (cell, weight). Without times there is no order, and the same machinery gives EASE
(Steck, *Embarrassingly Shallow Autoencoders for Sparse Data*, WWW 2019, equation 8): with
G = sum of x x' and P = (G + penalty I)^-1, B is -P / diag(P) with a zero diagonal.

Cells are rows of a virtual table with 2 m^2 rows: HH, of which the upper half is enough, then HY.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import nn

from tessera.data.examples import Examples
from tessera.data.sequences import SEEN, Sequences
from tessera.errors import ConfigError
from tessera.learning.machine import physical_memory
from tessera.learning.scores import ItemScores, SummedModel
from tessera.learning.tables.submodel import ModelUpdate, TableUpdate, places
from tessera.learning.training.jobs import Job, Trained

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BAND: Final = 4.0
"""So many times tau are the places that still count; what is beyond has weights below .02."""
AT_ONCE: Final = 512
_NUMBERS: Final = 4 * 8  # bytes of a cell: four tables at a time
KEPT: Final = 400
"""Entries of each row of B that are published: the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """How pairs are counted and solved; `tau` 0 is without order (EASE)."""

    items: int
    tau: float = 6.0
    penalty: float = 250.0

    def __post_init__(self) -> None:
        if self.tau < 0.0 or not np.isfinite(self.tau):
            raise ConfigError(f"pairs: tau = {self.tau}", hint="tau is 0 (no order) or more")
        if not 0.0 < self.penalty < float("inf"):
            raise ConfigError(
                f"pairs: penalty = {self.penalty}: items that nobody has make the solve singular",
                hint="a penalty above 0, such as 250",
            )

    @property
    def window(self) -> int:
        """Places that a pair is apart at most, and one more."""
        return max(1, round(BAND * self.tau))

    @property
    def cells(self) -> int:
        """Rows of the virtual table."""
        return self.items**2 * (2 if self.tau else 1)

    @property
    def memory(self) -> int:
        """Bytes that the solve takes."""
        return _NUMBERS * self.items**2

    @property
    def solved_items(self) -> int:
        """Items that a solve on this machine has room for."""
        memory = physical_memory()
        most = self.items if memory is None else math.isqrt(memory // 2 // _NUMBERS)
        return max(1, min(self.items, most))

    # --- what a client adds -----------------------------------------------------------------------

    def counts(self, events: Sequences) -> tuple[Ints, Ints, Doubles]:
        """(user, cell, weight) of every pair, by user and cell, each cell of a user once."""
        parts = self._ordered(events) if self.tau else self._together(events)
        user, cell, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((cell, user))
        user, cell, weight = user[order], cell[order], weight[order]
        first = np.flatnonzero(np.diff(user * self.cells + cell, prepend=-1))
        return user[first], cell[first], np.add.reduceat(weight, first)

    def _ordered(self, events: Sequences) -> Iterator[tuple[Ints, Ints, Doubles]]:
        """By distance d in the sequence: of HH pairs (a, a + d), of HY pairs (a, a + d + 1)."""
        q, m = np.exp(-1.0 / self.tau), self.items
        user = np.repeat(np.arange(events.users), events.counts)
        place, length = events.place, np.repeat(events.counts, events.counts)
        for d in range(self.window):
            a = np.flatnonzero(place + d + 1 < length)  # both stand in some h_t with a successor
            b = a + d
            # h_t has both for t from b to the last that still reaches back to a, or has a next.
            times = np.minimum(place[a] + self.window, length[a] - 1) - place[b]
            weight = q**d * (1.0 - q ** (2 * times)) / (1.0 - q * q)
            low = np.minimum(events.item[a], events.item[b])
            high = np.maximum(events.item[a], events.item[b])
            yield user[a], low * m + high, weight
            yield user[a], m * m + events.item[a] * m + events.item[b + 1], np.full(len(a), q**d)

    def _together(self, events: Sequences) -> Iterator[tuple[Ints, Ints, Doubles]]:
        """Every pair of a user's items, an item with itself included, with weight 1."""
        for user in range(events.users):
            own = np.sort(events.of(user))
            low, high = np.triu_indices(len(own))
            cell = own[low] * self.items + own[high]
            yield np.full(len(cell), user), cell, np.ones(len(cell))

    # --- what the server solves -------------------------------------------------------------------

    def sums(self, parts: Iterable[tuple[Ints, Doubles]]) -> Doubles:
        """The tables (1 or 2, m, m) from cells and what is in them, added up; HH is made whole."""
        self.check_memory()
        flat = np.zeros(self.cells)
        for cell, weight in parts:
            flat += np.bincount(cell, weights=weight, minlength=self.cells)
        tables = flat.reshape(-1, self.items, self.items)
        upper = np.triu(tables[0], 1)
        tables[0] = upper + upper.T + np.diag(np.diag(tables[0]))
        return tables

    def sums_of(self, events: Sequences) -> Doubles:
        """The same over everybody's events in one place, without listing the pairs."""
        if self.tau:
            return self.sums((cell, weight) for _, cell, weight in self._ordered(events))
        self.check_memory()
        total = np.zeros((1, self.items, self.items))
        for low in range(0, events.users, AT_ONCE):
            held = np.zeros((min(AT_ONCE, events.users - low), self.items), np.float32)
            for row in range(len(held)):
                held[row, events.of(low + row)] = 1.0
            total[0] += held.T @ held
        return total

    def solved(self, tables: Doubles) -> Doubles:
        """B, (m, m)."""
        penalised = tables[0] + self.penalty * np.eye(self.items)
        if self.tau:
            return np.asarray(np.linalg.solve(penalised, tables[1]))
        inverse = np.linalg.inv(penalised)
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0.0)
        return np.asarray(weights)

    def check_memory(self) -> None:
        memory = physical_memory()
        if memory is not None and self.memory > memory // 2:
            raise ConfigError(
                f"pairs: {self.items:,} items are a solve over {self.items:,} x {self.items:,} "
                f"numbers, {self.memory:,} bytes; this machine has {memory:,}",
                hint='[task] model = "next", or a dictionary of fewer items',
            )

    # --- what a user is shown ---------------------------------------------------------------------

    def history(self, latest_first: npt.NDArray[Any]) -> Doubles:
        """h_L (N, m) of histories (N, T), the latest first and -1 where there are no more."""
        found = np.zeros((len(latest_first), self.items))
        steps = min(self.window, latest_first.shape[1]) if self.tau else latest_first.shape[1]
        row, back = np.nonzero(latest_first[:, :steps] >= 0)
        weight = np.exp(-back / self.tau) if self.tau else 1.0
        found[row, latest_first[row, back]] = weight
        return found


def largest(weights: Doubles, kept: int = KEPT) -> Doubles:
    """B with the largest entries of every row, by size; the others are 0."""
    if weights.shape[1] <= kept:
        return weights
    size = np.abs(weights)
    least = np.partition(size, -kept, axis=1)[:, -kept, None]
    return np.where(size >= least, weights, 0.0)


# --- in a federation ------------------------------------------------------------------------------
#
# A cell is a row of two columns: the weight, and 1 for the client that holds it. One round with
# everybody, or several with each client in one of them, gives the sums; nothing is trained.


TABLE: Final = "pairs"
_BELOW: Final = 1e-9  # so little does popularity count beside a weight
CELL: Final = "cell"
WEIGHT: Final = "weight"


class PairTable(nn.Module):
    """The virtual table; its rows are all zeros before the first sum."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(1, 2)


class PairCounter:
    """A client's part of the sums: its weights, and that it holds these cells."""

    name = "pair counts"

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        return [self._counted(job) for job in jobs]

    def _counted(self, job: Job) -> Trained:
        trained = job.submodel.trained[TABLE]
        at, there = places(trained, job.examples[CELL])
        values = np.zeros((len(trained), 2), np.float32)
        values[at[there], 0] = job.examples[WEIGHT][there]
        values[at[there], 1] = 1.0
        counts = values[:, 1].astype(np.int64)
        update = ModelUpdate(
            np.zeros_like(job.submodel.dense),
            len(job.examples),
            {TABLE: TableUpdate(values, counts)},
        )
        return Trained(update, job.local, 0.0, len(job.examples))


@dataclass(frozen=True, slots=True)
class PairModel:
    """What is published of the sums: B, from cells that enough clients hold.

    `min_holders` limits what a reader of the model sees, and nobody else: whoever opened the sums
    has them all. An item's own cell counts who has the item, and stays.

    Of a catalogue too large for a solve the items with the most holders are solved, as many as
    there is memory for; the others, and users without any of those, keep popularity.
    """

    pairs: Pairs
    min_holders: int = 1

    @property
    def cost(self) -> str:
        """What the solve takes, in words."""
        items, solved = self.pairs.items, replace(self.pairs, items=self.pairs.solved_items)
        said = f"the server solves over {solved.items:,} x {solved.items:,} numbers"
        said += f", {solved.memory / 1e6:,.1f} MB"
        if solved.items == items:
            return said
        return (
            f"{said}: all {items:,} items would take {self.pairs.memory / 1e6:,.1f} MB, more than "
            "half of what this machine has, so that those with the most holders are solved and "
            "the others keep popularity"
        )

    def solved(self, summed: SummedModel) -> ItemScores:
        """ItemScores from the sums as they are now."""
        table, m = summed.tables[TABLE], self.pairs.items
        ids = table.touched_ids
        cell, held = ids.astype(np.int64), table.values(ids).astype(np.float64)
        itself = (cell < m * m) & (cell // m == cell % m)
        kept = itself | (held[:, 1] >= self.min_holders - 0.5)
        cell, weight = cell[kept], held[kept, 0]
        field = "history" if self.pairs.tau else SEEN
        if self.pairs.solved_items == m:
            weights = largest(self.pairs.solved(self.pairs.sums([(cell, weight)])))
            return lambda some: self.pairs.history(some[field]) @ weights
        holders = np.zeros(m)
        holders[ids[itself].astype(np.int64) % m] = held[itself, 1]
        return self._of_most_held(cell, weight, holders, field)

    def _of_most_held(
        self, cell: Ints, weight: Doubles, holders: Doubles, field: str
    ) -> ItemScores:
        """Scores by the items with the most holders, and below them by popularity."""
        m, few = self.pairs.items, replace(self.pairs, items=self.pairs.solved_items)
        chosen = np.sort(np.argsort(-holders, kind="stable")[: few.items])
        place = np.full(m + 1, -1, np.int64)  # the last: of no item
        place[chosen] = np.arange(few.items)
        table, inside = np.divmod(cell, m * m)
        first, second = place[inside // m], place[inside % m]
        both = (first >= 0) & (second >= 0)
        at = (table * few.items**2 + first * few.items + second)[both]
        weights = largest(few.solved(few.sums([(at, weight[both])])))
        popular = _BELOW * holders / max(1.0, float(holders.max(initial=0.0)))

        def scores(some: Examples) -> Doubles:
            found = np.tile(popular, (len(some), 1))
            found[:, chosen] += few.history(place[some[field]]) @ weights
            return found

        return scores
