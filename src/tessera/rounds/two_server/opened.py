"""What two servers opened, as the sum of a round and as its means: the same at both."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Words
from tessera.ids import StageId, TableId
from tessera.learning.tables.arrays import Ids
from tessera.plan import Plan
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.protocols.two_server.write.client import RowUpdate
from tessera.protocols.two_server.write.sums import TwoServerSum
from tessera.rounds import encode
from tessera.rounds.words import RoundResult


def opened_sum(
    plan: Plan, stage: StageId, total: TwoServerSum, union: Mapping[str, Ids]
) -> StageSum:
    """Rows are by their place in the union, where there is one. Cuts are the dense part's again."""
    tables = {}
    dense, rest = plan.ring.zeros(plan.model.dense + 1), whole_part(plan)
    dense[rest] = total.dense
    for table, part in total.tables.items():
        if table >= len(plan.tables):
            plan.cuts[table - len(plan.tables)].of(dense)[part.rows] = part.words
            continue
        name = plan.tables[table].name
        rows = np.searchsorted(union[name], part.rows) if union else part.rows
        tables[table] = TableSum(
            rows=rows.astype(np.uint64), words=part.words, members={}, below_quorum=0
        )
    return StageSum(stage=stage, survivors=total.survivors, dense=dense, tables=tables)


def whole_part(plan: Plan) -> npt.NDArray[np.bool_]:
    """Which words of a dense part, its weight among them, are in no cut."""
    there = np.ones(plan.model.dense + 1, dtype=np.bool_)
    for cut in plan.cuts:
        there[cut.start : cut.stop] = False
    return there


def written_cuts(plan: Plan, dense: Words) -> dict[TableId, RowUpdate]:
    """The rows of each cut that a client sends: those of a dense part that are not zeros."""
    found = {}
    for number, cut in enumerate(plan.cuts):
        rows = cut.of(dense)
        ids = np.flatnonzero(rows.any(axis=1))
        found[TableId(len(plan.tables) + number)] = RowUpdate(ids.astype(np.uint64), rows[ids])
    return found


def opened_means(plan: Plan, total: TwoServerSum, union: Mapping[str, Ids]) -> RoundResult:
    """The means that follow from the opened sum."""
    return encode.means(plan, opened_sum(plan, StageId(0), total, union), union=union)
