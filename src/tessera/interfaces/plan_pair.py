"""What `tessera plan` says of two servers: how tables are written, what each of them looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from tessera.crypto import dpf
from tessera.crypto.cuckoo import HASHES, Layout, SimpleTable, bins_for
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.forest import BITS, Forest, Values
from tessera.crypto.kernel.points import ROW_ALIGNMENT
from tessera.crypto.secret import Secret
from tessera.protocols.pair.params import PairTable
from tessera.rounds.forecast import Forecast
from tessera.rounds.pair import WriteCost
from tessera.rounds.plan import Plan

LEARNS: Final = (
    "together, the sum of all updates: which rows anybody wrote, and sums and counts of each; one "
    "alone, who took part"
)
LEARNS_UNION: Final = f"exactly which rows the cohort has, decoys among them; {LEARNS}"

SAMPLE_ROWS: Final = 1 << 15
"""Rows of the table that one client's keys are measured on; time grows with rows."""


def describe_pair(forecast: Forecast) -> dict[str, Any]:
    """The facts, as plain JSON values."""
    plan, pair = forecast.plan, forecast.pair
    reading, writing = pair.layouts.reading, pair.layouts.writing
    forests = [layout.forest for layout in (*reading.values(), *writing.values())]
    widths = {plan.tables[t.table].name: t.words for t in pair.params.tables}
    return {
        "narrows": plan.narrows,
        "row_limit": plan.two_server.row_limit,
        "min_cohort": pair.params.min_cohort,
        "may_vanish": plan.cohort - pair.params.min_cohort,
        "rows_looked_at": sum(int(forest.sizes.sum()) for forest in forests),
        "aes_blocks": sum(forest.aes_blocks for forest in forests),
        "writing": [
            asdict(cost)
            | {
                "write": cost.write.value,
                "reason": cost.reason,
                "break_even": break_even(plan, cost, widths[cost.table]),
            }
            for cost in pair.writing
        ],
    }


def break_even(plan: Plan, cost: WriteCost, words: int) -> int:
    """The largest max_rows for which keys are fewer bytes than plain shares; 0 if none is.

    Bins are taken as equally full, so that it is about right and quickly found.
    """

    def keys(most: int) -> int:
        bins = bins_for(most, stash=plan.two_server.stash)
        each = -(-HASHES * cost.rows // bins)
        sizes = np.full(bins + plan.two_server.stash, min(each, cost.rows))
        sizes[bins:] = cost.rows
        return Forest.of(sizes, Values(plan.ring, words)).public_bytes

    low, high = 0, max(1, cost.rows)  # keys are fewer at `low`, and not at `high`
    if cost.keys is None or keys(1) >= cost.shares:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keys(middle) < cost.shares else (low, middle)
    return low


def weigh_pair(
    forecast: Forecast, seconds: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    """(seconds of one client, of each server for the whole cohort), measured on one client's keys.

    Rough: of a large table a smaller one is measured and scaled; seals, signatures and shares in
    plain words are not counted.
    """
    client = server = 0.0
    for table in forecast.pair.params.tables:
        if table.uses_points:
            mine, theirs = _table_seconds(forecast.plan, table, seconds)
            client, server = client + mine, server + theirs
    return client, server * forecast.plan.cohort


def _table_seconds(
    plan: Plan, table: PairTable, seconds: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    rows = min(table.rows, SAMPLE_ROWS)
    scale = table.rows / rows
    simple = SimpleTable.of(rows, table.bins, 0, stash=table.stash)
    nothing, entropy = simple.place(np.zeros(0, dtype=np.int64)), SystemEntropy()
    client = server = 0.0
    for reads in (True, False):
        if not (table.reads_points if reads else table.writes_points):
            continue
        layout = Layout.of(simple, BITS if reads else Values(plan.ring, table.words))
        forest = layout.forest
        values = None if reads else plan.ring.zeros((forest.bins, table.words))

        def made(forest: Forest = forest, values: Any = values) -> dpf.KeyPair:
            return dpf.gen(forest, nothing.points, values, report_id=bytes(32), entropy=entropy)

        pair = made()
        keys = dpf.ServerKeys.of(
            pair.public, Secret(pair.seeds[0].reveal()), party=0, report_id=bytes(32)
        )
        client += seconds(made)
        server += scale * seconds(lambda f=forest, k=keys: dpf.evaluate(f, [k]))  # type: ignore[misc]
        if reads:
            width = -(-table.row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
            arranged = layout.arrange(np.zeros((rows, width), dtype=np.uint8))
            bits = [dpf.select(keys)]
            server += scale * seconds(
                lambda one=layout, b=bits, a=arranged: one.answer(b, a, table.row_bytes)  # type: ignore[misc]
            )
    return client, server


def pair_facts(found: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Headed lists of (what, value)."""
    writing = []
    for cost in found["writing"]:
        writing.append((cost["table"], cost["reason"]))
        if cost["keys"] is not None:
            up_to = cost["break_even"]
            told = f"up to about max_rows = {up_to:,}" if up_to else "for no max_rows"
            writing.append(("", f"keys are fewer {told}, of {cost['rows']:,} rows"))
    looked = f"{found['rows_looked_at']:,} rows, {found['aes_blocks']:,} AES blocks"
    domain = "the cohort's union" if found["narrows"] else "whole tables"
    return {
        "how a client writes a table": writing,
        "two servers": [
            ("they look at", f"{domain} (row_limit = {found['row_limit']:,})"),
            ("each evaluates for one client", looked),
            ("a sum is opened over at least", f"{found['min_cohort']} clients"),
        ],
    }


def pair_notes(found: Mapping[str, Any]) -> list[str]:
    said = [
        "a row that one client alone writes is opened as that client's exact update, without a "
        "name to it",
    ]
    if found["narrows"]:
        said.append("the union is opened exactly, under the secure sum's threshold of clients")
    return said
