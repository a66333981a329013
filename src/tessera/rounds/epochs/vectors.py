"""The vectors of an epoch: a member's update laid out over the group's union, and back again.

All members of a group train from the same rows, the whole union, so that an update is one vector of
the same length from everybody: the dense part and its weight, then every table row by row, each
with its count. A whole model, where there is no union, is laid out as in any other sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tessera.crypto.group import Group, Words
from tessera.ids import ClientId, StageId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.rounds.encode import UpdateWords
from tessera.rounds.words import RowWords, whole_words
from tessera.wire.index_set import client_array


@dataclass(frozen=True, slots=True)
class UpdateLayout:
    """Where the words of an update lie. `union` has the rows by table, derived tables included."""

    plan: Plan
    union: Mapping[str, Ids] = field(repr=False)

    @property
    def ring(self) -> Group:
        return self.plan.ring

    @property
    def length(self) -> int:
        """Words of a vector."""
        plan = self.plan
        if not plan.by_rows:
            return plan.stages[-1].dense
        rows = sum(len(self.union[t.name]) * (t.width + 1) for t in plan.tables)
        return plan.model.dense + 1 + rows

    def flat(self, update: UpdateWords) -> Words:
        """One vector."""
        plan = self.plan
        if not plan.by_rows:
            return self._whole(update)
        rows = (update.tables[t.name].at(self.union[t.name]).reshape(-1) for t in plan.tables)
        return np.concatenate([update.dense, *rows])

    def _whole(self, update: UpdateWords) -> Words:
        rows: Mapping[str, RowWords] = update.tables
        return whole_words(self.plan, update.dense, rows) if rows else update.dense

    def summed(self, total: Words, members: Sequence[ClientId]) -> StageSum:
        """The sum of all members' vectors, by tables; rows are places in the union."""
        plan, survivors = self.plan, client_array(members)
        stage = StageId(len(plan.stages) - 1)
        if not plan.by_rows:
            return StageSum(stage=stage, survivors=survivors, dense=total, tables={})
        start, tables = plan.model.dense + 1, {}
        for t in plan.tables:
            count = len(self.union[t.name])
            stop = start + count * (t.width + 1)
            tables[plan.table_id(t.name)] = TableSum(
                rows=np.arange(count, dtype=np.uint64),
                words=total[start:stop].reshape(count, t.width + 1),
                members={},
                below_quorum=0,
            )
            start = stop
        dense = total[: plan.model.dense + 1]
        return StageSum(stage=stage, survivors=survivors, dense=dense, tables=tables)
