"""What a plan means between two servers: their parameters in a round, and the model they serve.

Client, leader and helper each call `two_server_params` with what they know themselves; one that
knows something else does not get past the first message (`protocols/two_server/`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tessera.crypto.cuckoo import HASHES
from tessera.ids import RoundId, TableId
from tessera.learning.tables.arrays import Floats, Ids
from tessera.learning.tables.table import StoredTable
from tessera.plan import Plan
from tessera.protocols.two_server.handshake import ServedModel
from tessera.protocols.two_server.params import (
    Absent,
    Read,
    Servers,
    TwoServerParams,
    TwoServerTable,
)
from tessera.rounds.noise import noise_of
from tessera.rounds.two_server.write_cost import cut_cost, stash_of, write_cost


def _reading(plan: Plan) -> Read:
    return Read.CHECKED if plan.two_server.check else Read.POINTS


def two_server_params(
    plan: Plan, round_id: RoundId, servers: Servers, domain: Mapping[str, Ids] | None = None
) -> TwoServerParams:
    """A round's parameters; `domain` has each table's rows where they are narrowed to a union."""
    size = plan.model.precision.dtype.itemsize
    tables = []
    for t in plan.tables:
        ids = None if domain is None else domain[t.name]
        rows = t.rows if ids is None else len(ids)
        if not rows:
            continue  # nobody has a row of it in this round
        cost = write_cost(plan, t, rows)
        few = rows < HASHES
        tables.append(
            TwoServerTable(
                table=plan.table_id(t.name),
                rows=rows,
                max_rows=min(plan.union.max_rows, rows),
                row_bytes=t.width * size,
                words=t.width + 1,
                ids=ids,
                read=Read.WHOLE if few else _reading(plan),
                write=cost.write,
                stash=stash_of(plan, rows),
            )
        )
    known, written = len(plan.tables), 0
    for number, cut in enumerate(plan.cuts):  # written and not read: the dense part comes down
        written += cut.rows * cut.width
        tables.append(
            TwoServerTable(
                table=TableId(known + number),
                rows=cut.rows,
                max_rows=cut.most,
                words=cut.width,
                write=cut_cost(plan, number).write,
                stash=stash_of(plan, cut.rows),
            )
        )
    return TwoServerParams(
        federation=plan.federation,
        round_id=round_id,
        plan_hash=plan.digest,
        cohort=plan.most_clients,
        min_cohort=max(2, plan.least_survivors),
        most_excluded=plan.most_missing,
        group=plan.ring,
        servers=servers,
        tables=tuple(tables),
        dense=plan.model.dense - written + 1,
        dense_bytes=plan.model.dense * size,
        # A union is as large as its clients' rows: there is nothing smaller to narrow it to.
        row_limit=plan.two_server.row_limit
        if domain is None
        else max([plan.two_server.row_limit, *(t.rows for t in tables if t.row_bytes)]),
        corrupt=plan.security.corrupt,
        verify=plan.two_server.verify,
        key_rounds=plan.two_server.key_rounds,
        absent=Absent(plan.two_server.absent.value),
        noise=noise_of(plan).server_deviation,
    )


def served(
    plan: Plan, params: TwoServerParams, dense: Floats, tables: Mapping[str, StoredTable]
) -> ServedModel:
    """The model as both servers hold it in a round, in the bytes that clients get."""
    held = {
        TableId(spec.table): served_rows(plan, spec, tables, spec.named(np.arange(spec.rows)))
        for spec in params.read
    }
    return ServedModel(tables=held, dense=dense.astype(plan.model.precision.dtype).tobytes())


def served_rows(
    plan: Plan, spec: TwoServerTable, tables: Mapping[str, StoredTable], ids: Ids
) -> npt.NDArray[np.uint8]:
    """These rows of a table, in the bytes that clients get."""
    rows = tables[plan.tables[spec.table].name].values(ids).astype(plan.model.precision.dtype)
    return rows.view(np.uint8).reshape(len(ids), spec.row_bytes)
