"""Seconds of a round on this machine, estimated before it runs.

The work of a round comes from `rounds.forecast`; how fast this machine is at each kind of work is
measured here, in a few milliseconds each. Rough: what grows with the plan is counted, what is fixed
per message is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto import dpf
from tessera.crypto.cuckoo import Layout, SimpleTable
from tessera.crypto.dpf import Forest, Values
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.group import Group, Words
from tessera.crypto.keys import AgreementKey, seal
from tessera.crypto.prg import Label, Stream, accumulate
from tessera.crypto.secret import Secret
from tessera.crypto.shamir import combine_many, split
from tessera.ids import ClientId, RoundId, StageId, TableId
from tessera.plan import Plan
from tessera.protocols.secagg import groups
from tessera.protocols.secagg.messages import RowGroups, TableGroups
from tessera.protocols.two_server.params import Read, TwoServerTable
from tessera.protocols.two_server.read.client import ROW_TAG_BYTES
from tessera.rounds import schemes
from tessera.rounds.forecast import Forecast
from tessera.rounds.forecast.traffic import some

SAMPLE: Final = 8
"""Clients whose groups are formed to find out how long all of them take."""
SAMPLE_ROWS: Final = 1 << 15
"""Rows of the table that one client's keys are measured on; time grows with rows."""


def round_seconds(forecast: Forecast) -> dict[str, float]:
    """Of one core: one client, each server, and all of them in one process."""
    plan, work, entropy = forecast.plan, forecast.work, SystemEntropy()
    own, peers = (AgreementKey.from_secret(entropy.secret(Label.MEASUREMENT, i)) for i in range(2))
    key = entropy.secret(Label.MEASUREMENT, 2)

    def agree() -> Stream:
        return Stream.of(own.agree(peers.public, Label.MEASUREMENT, 0), Label.MEASUREMENT, 0)

    client = server = 0.0
    if work is not None:
        client = work.agreements * fastest(agree)
        client += work.boxes * fastest(
            lambda: seal(key, bytes(68), nonce=bytes(12), associated=b"plan")
        )
        server = work.openings * recovery_seconds(plan, key)
        for masks in work.masks:
            each = mask_seconds(masks.group, key)
            client, server = client + masks.client_bytes * each, server + masks.server_bytes * each
    for kind in schemes.of(plan).rows.work:
        by_client, by_server = ROWS[kind](forecast, key)
        client, server = client + by_client, server + by_server
    if schemes.of(plan).two_servers:
        by_client, by_server = two_server_seconds(forecast)
        client, server = client + by_client, server + by_server
        simulated = plan.cohort * client + server + by_server
        return {"client": client, "server": server, "helper": by_server, "simulated": simulated}
    simulated = forecast.groups * (plan.cohort * client + server)
    return {"client": client, "server": forecast.groups * server, "simulated": simulated}


def mask_seconds(group: Group, key: Secret, *, words: int = 1 << 14) -> float:
    """For a byte of a mask."""
    streams = [Stream.of(key, Label.MEASUREMENT, i) for i in range(4)]
    total = group.zeros(words)
    spent = fastest(lambda: accumulate(group, total, streams, [1] * len(streams)))
    return spent / (len(streams) * words * group.word_bytes)


def recovery_seconds(plan: Plan, key: Secret, *, many: int = 8) -> float:
    """For a secret that is put together from shares."""
    topology = plan.secagg(RoundId(0)).topology
    points = range(1, topology.holders + 1)
    shares = split([key] * many, threshold=topology.threshold, points=points, coefficients=key)
    return fastest(lambda: combine_many(points, shares, threshold=topology.threshold)) / many


def union_seconds(forecast: Forecast, key: Secret) -> tuple[float, float]:
    """For one client's rows to become words; nothing for the server."""
    plan = forecast.plan
    held = some(sum(forecast.rows.held(t) for t in plan.roots), plan.domain)
    encoding = plan.union_encoding(RoundId(0))
    return fastest(lambda: encoding.encode(held, Stream.of(key, Label.MEASUREMENT))), 0.0


def group_seconds(forecast: Forecast, key: Secret) -> tuple[float, float]:
    """(for a client to read its groups of rows, for the server to form and tell all)."""
    n, sample = forecast.plan.cohort, min(forecast.plan.cohort, SAMPLE)
    rng = np.random.default_rng(0)
    forming = reading = 0.0
    for i, f in enumerate(forecast.rows.tables):
        share_of = min(1.0, f.revealed / max(1.0, f.union))
        revealed = {
            ClientId(c): np.flatnonzero(rng.random(round(f.union)) < share_of).astype(np.uint64)
            for c in range(sample)
        }
        quorums = dict.fromkeys(revealed, 2)

        def announce(i: int = i, revealed: Any = revealed, quorums: Any = quorums) -> bytes:
            members = groups.form(revealed, quorums)
            shared = groups.SharedRows(members)
            for client, rows in members.items():
                table = TableGroups(table=TableId(i), included=rows, shared=shared[client])
                encoded = wire.encode(
                    RowGroups(round_id=RoundId(0), stage=StageId(1), tables=(table,))
                )
            return encoded

        forming += fastest(announce) * n * (n - 1) / (sample * (sample - 1))
        message = announce()
        reading += fastest(lambda m=message: wire.decode(m)) * (n - 1) / (sample - 1)  # type: ignore[misc]
    return reading, forming


ROWS: Final = {"union": union_seconds, "groups": group_seconds}
"""Seconds of one client and of the server, for steps that a kind of Rows has."""


def fastest(call: Callable[[], object], *, spend: float = 0.02) -> float:
    """The fastest of several calls: others on this machine only ever make one slower."""
    call()
    best, ends = float("inf"), time.perf_counter() + spend
    while time.perf_counter() < ends:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def two_server_seconds(forecast: Forecast) -> tuple[float, float]:
    """(seconds of one client, of each server for the whole cohort), measured on one client's keys.

    Rough: of a large table a smaller one is measured and scaled; seals, signatures and shares in
    plain words are not counted.
    """
    client = server = 0.0
    for table in forecast.two_server.params.tables:
        if table.uses_points:
            by_client, by_server = _table_seconds(forecast.plan, table)
            client, server = client + by_client, server + by_server
    return client, server * forecast.plan.cohort


def _table_seconds(plan: Plan, table: TwoServerTable) -> tuple[float, float]:
    rows = min(table.rows, SAMPLE_ROWS)
    scale = table.rows / rows
    simple = SimpleTable.of(rows, table.bins, 0, stash=table.stash)
    client = server = 0.0
    if table.writes_points:
        layout = Layout.of(simple, Values(plan.ring, table.words))
        nowhere = np.full(layout.forest.bins, -1, dtype=np.int64)
        nothing = plan.ring.zeros((layout.forest.bins, table.words))
        made, keys = _keys(layout.forest, nowhere, nothing)
        client += fastest(made)
        server += scale * fastest(lambda: dpf.evaluate(layout.forest, [keys]))
    if table.reads_points:
        checked = table.read is Read.CHECKED
        reading = Layout.of(simple, table.selecting)
        secret = SystemEntropy().secret(Label.MEASUREMENT)
        nowhere = np.full(reading.forest.bins, -1, dtype=np.int64)
        chosen = dpf.retrieval_points(reading.forest, nowhere, secret)
        made, keys = _keys(reading.forest, chosen.points, chosen.values)
        client += fastest(lambda: dpf.retrieval_points(reading.forest, nowhere, secret)) + fastest(
            made
        )
        held = reading.padded(np.zeros((rows, table.row_bytes), dtype=np.uint8))
        tags = np.zeros((rows, ROW_TAG_BYTES), dtype=np.uint8) if checked else None
        server += scale * fastest(lambda: reading.answer([keys], held, table.row_bytes, tags))
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
