"""What `tessera plan` says of two servers: how tables are written, what each of them looks at."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import dpf, kernel
from tessera.crypto.cuckoo import Layout, SimpleTable
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.forest import Forest, Values
from tessera.crypto.group import Words
from tessera.crypto.prg import Label
from tessera.protocols.retrieval.row_tags import ROW_TAG_BYTES
from tessera.protocols.two_server.params import Read, TwoServerTable
from tessera.report.numbers import size
from tessera.rounds.forecast import Forecast
from tessera.rounds.plan import Plan, Scheme
from tessera.rounds.two_server.write_cost import WriteCost, key_bytes

if TYPE_CHECKING:
    from tessera.tasks import Task

_SUM: Final = (
    "who took part and, at the end, the sum: which rows anybody wrote, with sums and counts; "
    "were they to work together, every client's rows and updates"
)
LEARNS: Final = f"each of them {_SUM}"
LEARNS_UNION: Final = f"each of them exactly which rows the cohort has, decoys among them; {_SUM}"

SAMPLE_ROWS: Final = 1 << 15
"""Rows of the table that one client's keys are measured on; time grows with rows."""

REFERENCE: Final = "reference"
SLOWER: Final = "about twenty times"
"""How much longer NumPy takes for point functions than compiled code; `tessera doctor` measures."""

MOST_LOOKED_AT: Final = 2000
"""Clients whose rows are counted to find out how many they hold."""
ROUND_UP: Final = 16
WORTH_IT: Final = 0.9
"""A smaller max_rows is proposed if it takes at most this share of the bytes."""


# --- how many rows messages are made for ----------------------------------------------------------


def break_evens(forecast: Forecast) -> dict[str, int]:
    """By table, the largest max_rows for which keys are fewer bytes than plain shares."""
    plan, pair = forecast.plan, forecast.two_server
    words = {plan.tables[t.table].name: t.words for t in pair.params.tables}
    return {cost.table: break_even(plan, cost, words[cost.table]) for cost in pair.writing}


def break_even(plan: Plan, cost: WriteCost, words: int) -> int:
    """The largest max_rows for which keys are fewer bytes than plain shares; 0 if none is."""
    if cost.keys is None:
        return 0
    return bisect_left(
        range(1, cost.rows),
        True,
        key=lambda most: key_bytes(with_max_rows(plan, most), cost.rows, words) >= cost.shares,
    )


def with_max_rows(plan: Plan, most: int) -> Plan:
    return replace(plan, union=replace(plan.union, max_rows=most))


@dataclass(frozen=True, slots=True)
class Held:
    """Rows of a table that a task's clients hold: in the mean, and whoever holds most."""

    mean: int
    most: int

    @classmethod
    def of(cls, task: Task, plan: Plan) -> Held:
        """Of all clients that may be asked, or of some where there are many."""
        from tessera.engines.training import Clients

        clients = Clients(task, task.tables.bind(task.build(plan.seed)), plan)
        some = clients.eligible[:: max(1, len(clients) // MOST_LOOKED_AT)]
        counts = [len(ids) for c in some for ids in clients[c].local.real.values()]
        return cls(max(1, round(sum(counts) / max(1, len(counts)))), max(counts, default=1))

    @property
    def fitting(self) -> int:
        """A max_rows that leaves nobody's rows at home."""
        return -(-self.most // ROUND_UP) * ROUND_UP


def describe_fewer(forecast: Forecast, held: Held | None) -> dict[str, Any] | None:
    """What a max_rows would take that fits the rows clients hold; None if it saves little."""
    plan = forecast.plan
    most = forecast.rows_per_client if held is None else held.fitting
    if most >= plan.union.max_rows:
        return None
    fewer = replace(forecast, plan=with_max_rows(plan, most))
    up, down = sum(fewer.bytes_up().values()), sum(fewer.bytes_down().values())
    now = sum(forecast.bytes_up().values()) + sum(forecast.bytes_down().values())
    if up + down > WORTH_IT * now:
        return None
    return {"max_rows": most, "total_up": up, "total_down": down}


# --- seconds --------------------------------------------------------------------------------------


def weigh_pair(
    forecast: Forecast, seconds: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    """(seconds of one client, of each server for the whole cohort), measured on one client's keys.

    Rough: of a large table a smaller one is measured and scaled; seals, signatures and shares in
    plain words are not counted.
    """
    client = server = 0.0
    for table in forecast.two_server.params.tables:
        if table.uses_points:
            mine, theirs = _table_seconds(forecast.plan, table, seconds)
            client, server = client + mine, server + theirs
    return client, server * forecast.plan.cohort


def _table_seconds(
    plan: Plan, table: TwoServerTable, seconds: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    rows = min(table.rows, SAMPLE_ROWS)
    scale = table.rows / rows
    simple = SimpleTable.of(rows, table.bins, 0, stash=table.stash)
    client = server = 0.0
    if table.writes_points:
        layout = Layout.of(simple, Values(plan.ring, table.words))
        nowhere = np.full(layout.forest.bins, -1, dtype=np.int64)
        nothing = plan.ring.zeros((layout.forest.bins, table.words))
        made, keys = _keys(layout.forest, nowhere, nothing)
        client += seconds(made)
        server += scale * seconds(lambda: dpf.evaluate(layout.forest, [keys]))
    if table.reads_points:
        checked = table.read is Read.CHECKED
        reading = Layout.of(simple, table.selecting)
        secret = SystemEntropy().secret(Label.MEASUREMENT)
        nowhere = np.full(reading.forest.bins, -1, dtype=np.int64)
        aim = dpf.aim(reading.forest, nowhere, secret)
        made, keys = _keys(reading.forest, aim.points, aim.values)
        client += seconds(lambda: dpf.aim(reading.forest, nowhere, secret)) + seconds(made)
        held = reading.arrange(np.zeros((rows, table.row_bytes), dtype=np.uint8))
        tags = reading.arrange(np.zeros((rows, ROW_TAG_BYTES), dtype=np.uint8)) if checked else None
        server += scale * seconds(lambda: reading.answer([keys], held, table.row_bytes, tags))
    return client, server


def _keys(
    forest: Forest, points: npt.NDArray[np.int64], values: Words | None
) -> tuple[Callable[[], dpf.KeyPair], dpf.ServerKeys]:
    """(what makes such keys, one server's)."""
    report_id, entropy = bytes(dpf.REPORT_ID_BYTES), SystemEntropy()

    def made() -> dpf.KeyPair:
        return dpf.gen(forest, points, values, report_id=report_id, entropy=entropy)

    pair = made()
    return made, dpf.ServerKeys.of(pair.public, pair.seeds[0], party=0, report_id=report_id)


def slow_kernel(plan: Plan) -> str | None:
    """One line for stderr where two servers have no compiled kernel, and what to do."""
    found = kernel.describe()
    if plan.scheme is not Scheme.TWO_SERVER or found.name != REFERENCE:
        return None
    return (
        f"note: point functions run on NumPy here, {SLOWER} slower than compiled code; "
        "`tessera doctor` says why"
    )


# --- the telling ----------------------------------------------------------------------------------


def pair_facts(report: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Headed lists of (what, value)."""
    found, writing = report["two_server"], []
    for cost in found["tables"]:
        writing.append((cost["name"], cost["reason"]))
        if cost["keys"] is not None:
            up_to = report["break_even"][cost["name"]]
            told = f"up to max_rows = {up_to:,}" if up_to else "for no max_rows"
            writing.append(("", f"keys are fewer {told}, of {cost['rows']:,} rows"))
    looked = f"{found['rows_looked_at']:,} rows, {found['aes_blocks']:,} AES blocks"
    domain = "whole tables" if found["domain"] == "whole" else "the cohort's union"
    return {
        "how a client writes a table": writing,
        "two servers": [
            ("they look at", f"{domain} (row_limit = {found['row_limit']:,})"),
            ("each evaluates for one client", looked),
            ("a sum is opened over at least", f"{found['min_cohort']} clients"),
        ],
    }


def pair_notes(report: Mapping[str, Any]) -> list[str]:
    found, fewer = report["two_server"], report["fewer_rows"]
    said = [
        "a row that one client alone writes is opened as that client's exact update, without a "
        "name to it",
    ]
    if fewer is not None:
        held = f"{report['assumed']['rows_per_client']:,} are assumed"
        if report["held"] is not None:
            held = "clients hold {mean:,} in the mean and {most:,} at most".format(**report["held"])
        said.append(
            f"everybody's messages are as long as max_rows = {found['max_rows']:,} asks for, and "
            f"{held}: max_rows = {fewer['max_rows']:,} would take {size(fewer['total_up'])} up and "
            f"{size(fewer['total_down'])} down"
        )
    if not found["check"]:
        said.append(
            "check = false: a server that changes the rows of one client is not noticed, and can "
            "read that client's rows in the next sum"
        )
    if found["domain"] == "union":
        said.append("the union is opened exactly, under the secure sum's threshold of clients")
    return said
