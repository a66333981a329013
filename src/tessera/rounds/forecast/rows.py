"""ExpectedRows: how many rows clients hold, name, fetch and train in a round.

All are expectations (`privacy/index/exposure.py`): every client holds equally many rows of each
table, and nobody drops out. How many clients share a row is an assumption of the caller's; without
one, every row is as likely as any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError
from tessera.plan import Plan, TablePlan
from tessera.privacy.index import exposure
from tessera.privacy.index.exposure import Cohort, Holders, LateDropout, RowCounts, counted
from tessera.rounds import schemes

LEAST_SHARE: Final = 1e-9
"""Shares of rows below this are left out of a distribution of holders."""

Sizes = npt.NDArray[np.float64]


def even_holders(rows: int, clients: int, held: float) -> Holders:
    """Holders per row of the union when each client holds `held` of `rows`, any as likely."""
    chances = counted(clients, 1.0 - held / rows, held / rows)[1:]
    total = float(chances.sum())
    return Holders.of(
        {k: float(c) / total for k, c in enumerate(chances, start=1) if c > LEAST_SHARE * total}
    )


@dataclass(frozen=True, slots=True)
class TableForecast:
    """Expected rows of one table, per client and round. `missed`: shares of the union's rows."""

    name: str
    derived: bool
    real: float
    union: float
    revealed: float
    trained: float
    included: float  # of the revealed, those whose group met the quorum
    shared: float  # of those, the part that a peer is a member of, too
    missed: float
    lost: float  # met the quorum, and do not after dropouts


@dataclass(frozen=True)
class ExpectedRows:
    """The rows of a round by a plan, under assumptions about its clients."""

    plan: Plan
    per_client: int
    given_holders: Holders | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise ConfigError(
                f"rows per client = {self.per_client} leaves nothing to fetch",
                hint="use 1 or more",
            )

    def held(self, table: TablePlan) -> int:
        """Rows of a table that one client holds and may name."""
        most = min(self.per_client, table.rows)
        return schemes.of(self.plan).rows.held(self.plan, most)

    @property
    def left_out(self) -> int:
        """Rows of one client that `max_rows` or `keep` leave out, over all tables."""
        return sum(min(self.per_client, t.rows) - self.held(t) for t in self.plan.roots)

    def cohort(self, table: TablePlan) -> Cohort:
        plan = self.plan
        quorum = plan.quorum
        return Cohort(
            clients=plan.cohort,
            holders=self.given_holders or even_holders(table.rows, plan.cohort, self.held(table)),
            min_group=quorum,
            colluders=plan.security.corrupt,
            dropout=self.dropout,
        )

    def counts(self, table: TablePlan) -> RowCounts:
        """The sets of one root table; decoys are spread over the tables as their rows are."""
        return exposure.expected_rows(
            self.plan.privacy.index,
            self.cohort(table),
            real=self.held(table),
            decoys=self.plan.privacy.decoy_share,
            catalogue=table.rows,
        )

    def late_dropout(self, table: TablePlan, *, decoys: bool = True) -> LateDropout:
        return exposure.late_dropout(
            self.plan.privacy.index,
            self.cohort(table),
            real=self.held(table),
            decoys=self.plan.privacy.decoy_share if decoys else 0.0,
            catalogue=table.rows,
        )

    @cached_property
    def tables(self) -> tuple[TableForecast, ...]:
        if not schemes.of(self.plan).randomises:
            return tuple(self._without_union(t) for t in self.plan.tables)
        return tuple(
            self._derived(t) if t.derived_from else self._root(t) for t in self.plan.tables
        )

    def _without_union(self, table: TablePlan) -> TableForecast:
        """A table without a union: its rows are named, or the whole of it travels."""
        parent = self.plan.table(table.derived_from) if table.derived_from else table
        own = float(self.held(parent))
        real = spread(own, table.rows) if table.derived_from else own
        share = real / table.rows
        union = table.rows * (1.0 - (1.0 - share) ** self.plan.cohort)
        if self.plan.narrows:  # decoys are in it, too
            named = self.counts(parent)
            in_union = min(named.union + named.decoys, float(parent.rows))
            union = spread(in_union, table.rows) if table.derived_from else in_union
        sent = float(len(self.plan.listed.get(table.name, range(table.rows))))
        moved = real if schemes.of(self.plan).by_rows else sent
        return TableForecast(
            table.name, bool(table.derived_from), real, union, moved, real, moved, 1.0, 0.0, 0.0
        )

    def _root(self, table: TablePlan) -> TableForecast:
        rows, cohort, privacy = self.counts(table), self.cohort(table), self.plan.privacy.index
        n, in_union = cohort.clients, rows.union + rows.decoys
        kinds = [(share * rows.union / in_union, k) for k, share in cohort.holders.by_row]
        kinds.append((rows.decoys / in_union, 0))

        def sizes(present: float) -> Sizes:
            p5, p6 = privacy.p5 * present, privacy.p6 * present
            mixed: Sizes = np.zeros(n + 1)
            for weight, k in kinds:
                mixed += weight * np.convolve(
                    counted(k, 1.0 - p5, p5), counted(n - k, 1.0 - p6, p6)
                )
            return mixed

        included, shared, missed, lost = self._groups(
            sizes(1.0), sizes(1.0 - self.dropout), in_union
        )
        return TableForecast(
            name=table.name,
            derived=False,
            real=rows.real,
            union=in_union,
            revealed=rows.revealed,
            trained=rows.succinct,
            included=included,
            shared=shared,
            missed=missed,
            lost=lost,
        )

    def _derived(self, table: TablePlan) -> TableForecast:
        """Rows follow the parent's by a map of which only the sizes are known: taken as even."""
        parent, n = self._root(self.plan.table(table.derived_from)), self.plan.cohort
        union, revealed = spread(parent.union, table.rows), spread(parent.revealed, table.rows)
        p = min(1.0, revealed / union)
        later = p * (1.0 - self.dropout)
        groups, after = counted(n, 1.0 - p, p), counted(n, 1.0 - later, later)
        included, shared, missed, lost = self._groups(groups, after, union)
        return TableForecast(
            name=table.name,
            derived=True,
            real=spread(parent.real, table.rows),
            union=union,
            revealed=revealed,
            trained=spread(parent.trained, table.rows),
            included=included,
            shared=shared,
            missed=missed,
            lost=lost,
        )

    def _groups(
        self, sizes: Sizes, after: Sizes, union: float
    ) -> tuple[float, float, float, float]:
        """(included, shared, missed, lost) from how large the rows' groups are."""
        n, quorum = self.plan.cohort, self.plan.quorum
        k = np.arange(n + 1)
        met = np.where(k >= quorum, sizes, 0.0)
        members = float((k * met).sum())
        pairs = float((k * (k - 1) * met).sum())
        missed, later = float(sizes[:quorum].sum()), float(after[:quorum].sum())
        return (
            union * members / n,
            pairs / members / (n - 1) if members else 0.0,
            missed,
            max(0.0, later - missed),
        )


def spread(parents: float, rows: int) -> float:
    """Distinct rows that `parents` rows of the parent map to, if the map is even."""
    return rows * -math.expm1(parents * math.log1p(-1.0 / rows)) if rows > 1 else 1.0
