"""What two servers opened, as the sum of a round and as its means: the same at both."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera.ids import StageId
from tessera.learning.arrays import Ids
from tessera.protocols.scatter.sums import TwoServerSum
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.rounds import encode
from tessera.rounds.encode import RoundResult
from tessera.rounds.plan import Plan


def opened_sum(
    plan: Plan, stage: StageId, total: TwoServerSum, union: Mapping[str, Ids]
) -> StageSum:
    """Rows are by their place in the union, where there is one."""
    tables = {}
    for table, part in total.tables.items():
        name = plan.tables[table].name
        rows = np.searchsorted(union[name], part.rows) if union else part.rows
        tables[table] = TableSum(
            rows=rows.astype(np.uint64), words=part.words, members={}, below_quorum=0
        )
    return StageSum(stage=stage, survivors=total.survivors, dense=total.dense, tables=tables)


def opened_means(plan: Plan, total: TwoServerSum, union: Mapping[str, Ids]) -> RoundResult:
    """The means that follow from the opened sum."""
    return encode.means(plan, opened_sum(plan, StageId(0), total, union), union=union)
