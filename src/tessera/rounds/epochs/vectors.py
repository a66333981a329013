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
from tessera.ids import ClientId, StageId, TableId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.secagg.params import StageSpec
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
    def stage(self) -> StageSpec:
        """The sum of updates, as the plan has it."""
        return self.plan.stages[-1]

    @property
    def _tables(self) -> list[tuple[TableId, str, int]]:
        """Of which rows are laid out, each with the words of a row; none of a whole model."""
        return [(t.table, self.plan.tables[t.table].name, t.width) for t in self.stage.tables]

    @property
    def length(self) -> int:
        """Words of a vector."""
        rows = sum(len(self.union[name]) * width for _, name, width in self._tables)
        return self.stage.dense + rows

    def flat(self, update: UpdateWords) -> Words:
        """One vector."""
        parts = [update.tables[name].at(self.union[name]) for _, name, _ in self._tables]
        if not parts:
            return self._whole(update)
        return np.concatenate([update.dense, *(part.reshape(-1) for part in parts)])

    def _whole(self, update: UpdateWords) -> Words:
        rows: Mapping[str, RowWords] = update.tables
        return whole_words(self.plan, update.dense, rows) if rows else update.dense

    def summed(self, total: Words, members: Sequence[ClientId]) -> StageSum:
        """The sum of all members' vectors, by tables; rows are places in the union."""
        plan, survivors = self.plan, client_array(members)
        stage = StageId(len(plan.stages) - 1)
        start, tables = self.stage.dense, {}
        for table, name, width in self._tables:
            count = len(self.union[name])
            stop = start + count * width
            tables[table] = TableSum(
                rows=np.arange(count, dtype=np.uint64),
                words=total[start:stop].reshape(count, width),
                members={},
                below_quorum=0,
            )
            start = stop
        dense = total[: self.stage.dense]
        return StageSum(stage=stage, survivors=survivors, dense=dense, tables=tables)
