"""An ideal round: no messages and no masks, but the same clients, rows, training and means.

The sum is computed in the clear, as by the trusted party of a proof in the ideal world. Simulations
of many rounds take it for the rounds between those with real cryptography. Clients are the same
`ClientRound`s and answer from the same secrets; masks, encodings and checks are left out. So an
ideal round changes the model as the real one would, to the bit, wherever the union's encoding gives
back exactly what went in.
Its bytes and protocol seconds are not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import RoundAborted, ServerFault
from tessera.ids import ClientId, StageId, TableId
from tessera.learning.arrays import Ids
from tessera.learning.submodel import ModelUpdate, Submodel
from tessera.protocols.secagg import groups
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.rounds.client import ClientRound
from tessera.rounds.encode import RoundResult
from tessera.rounds.plan import Plan, Scheme
from tessera.rounds.server import ServerRound

RoundTrainer = Callable[[Mapping[ClientId, Submodel]], Mapping[ClientId, ModelUpdate | None]]
"""Trains what clients have fetched, all together; None where nothing came of it."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """Where a client drops out: before it answers in this phase, at its `visit` from 0."""

    phase: str
    visit: int = 0


SECURE_PHASES: Final = ("advertise", "share", "reveal", "collect", "consistency", "unmask")
PLAIN_PHASES: Final = ("reveal", "collect")
TWO_SERVER_PHASES: Final = ("query", "collect")


def run_ideal(
    server: ServerRound,
    clients: Mapping[ClientId, ClientRound],
    train: RoundTrainer,
    dropouts: Mapping[ClientId, Dropout] | None = None,
) -> RoundResult:
    """Run the round in the clear; `clients` are fresh, and some drop out on the way."""
    plan, gone = server.plan, dropouts or {}
    last = len(plan.stages) - 1
    phases = SECURE_PHASES if plan.scheme.secure else PLAIN_PHASES
    if plan.scheme is Scheme.TWO_SERVER:
        phases = TWO_SERVER_PHASES

    def place(phase: str, visit: int) -> tuple[int, int]:
        """When this is, in the order of a round. Rows are revealed once, in the last stage."""
        if plan.scheme is Scheme.TWO_SERVER:
            return 0, phases.index(phase)  # a union before it loses nobody's rows
        return (last if phase == "reveal" else visit, phases.index(phase))

    left = {c: place(e.phase, e.visit) for c, e in gone.items() if e.phase in phases}

    def present(phase: str, visit: int) -> dict[ClientId, ClientRound]:
        """Those who answer in this phase; one that dropped out earlier does not."""
        here = place(phase, visit)
        survivors = {c: client for c, client in clients.items() if c not in left or left[c] > here}
        if len(survivors) < plan.least_survivors:
            raise RoundAborted(
                round_id=server.round_id,
                phase=phase,
                answered=len(survivors),
                needed=plan.least_survivors,
            )
        return survivors

    for client in clients.values():
        client.prepare()
    if plan.narrows:
        union = plan.split_ids(_all({c: client.offered() for c, client in clients.items()}))
        server.take_union(union)
        for client in clients.values():
            client.take_union(union)
    if plan.scheme is Scheme.SECURE_SUBMODEL:
        ids = groups.distinct(np.concatenate([c.offered() for c in present("collect", 0).values()]))
        roots = plan.split_ids(ids)
        server.take_union(roots)
        for client in present("unmask", 0).values():
            client.take_union(roots)
    if plan.scheme is Scheme.TWO_SERVER:
        fetching = present("query", 0)
    elif plan.scheme.by_rows:
        fetching = present("reveal", 0)
    else:
        fetching = present("share", 0) if plan.scheme.secure else dict(clients)
    included, below = _groups(plan, fetching) if plan.scheme.by_rows else ({}, {})
    submodels: dict[ClientId, Submodel] = {}
    for c, client in fetching.items():
        try:
            submodels[c] = client.submodel(*server.fetch(client.requested))
        except ServerFault:  # an unfit model: it has left, and does not send an update
            left[c] = min(left.get(c, place("collect", last)), place("collect", last))
    # A client that drops out later is trained, too.
    updates = {c: clients[c].sendable(update) for c, update in train(submodels).items()}
    survivors = present("collect", last)
    if plan.scheme.secure:
        present("unmask", last)  # with fewer shares nothing could be unmasked
    if plan.counts_rows:
        return server.means(_added_rows(plan, survivors, updates))
    inputs = {
        c: client.quantised(updates[c], included.get(c, {})) for c, client in survivors.items()
    }
    return server.means(_added(plan, inputs, included, below))


def _groups(
    plan: Plan, clients: Mapping[ClientId, ClientRound]
) -> tuple[dict[ClientId, dict[TableId, Ids]], dict[TableId, int]]:
    """For each client the rows whose group meets everybody's quorum; and how many rows miss it."""
    reveals = {c: client.choose() for c, client in clients.items()}
    included: dict[ClientId, dict[TableId, Ids]] = {c: {} for c in clients}
    below = {}
    for t in plan.tables:
        table = plan.table_id(t.name)
        revealed = {c: reveal.tables[table] for c, reveal in reveals.items()}
        if plan.scheme.secure:
            quorum = plan.quorum
            quorums = {c: reveal.quorum or quorum for c, reveal in reveals.items()}
            members = groups.form(revealed, quorums)
        else:
            members = revealed
        for c, rows in members.items():
            included[c][table] = rows
        below[table] = len(_all(revealed)) - len(_all(members))
    return included, below


def _all(rows: Mapping[ClientId, Ids]) -> Ids:
    return groups.distinct(np.concatenate([*rows.values(), np.zeros(0, dtype=np.uint64)]))


def _added_rows(
    plan: Plan, clients: Mapping[ClientId, ClientRound], updates: Mapping[ClientId, ModelUpdate]
) -> StageSum:
    """The sum of whole models with counts, of which each client has few rows."""
    spec, ring, start = plan.stages[-1], plan.ring, plan.model.dense
    total = spec.group.zeros(spec.dense)
    tables = {}
    for t in plan.tables:
        stop = start + t.rows * (t.width + 1)
        tables[t.name] = total[start:stop].reshape(t.rows, t.width + 1)
        start = stop
    for c, client in clients.items():
        encoded = client.quantised_rows(updates[c])
        ends = np.concatenate([np.arange(plan.model.dense), [spec.dense - 1]])
        total[ends] = ring.add(total[ends], encoded.dense)
        for name, part in encoded.tables.items():
            tables[name][part.ids] = ring.add(tables[name][part.ids], part.words)
    survivors = np.array(sorted(clients), dtype=np.uint64)
    return StageSum(
        stage=StageId(len(plan.stages) - 1), survivors=survivors, dense=total, tables={}
    )


def _added(
    plan: Plan,
    inputs: Mapping[ClientId, Input],
    included: Mapping[ClientId, Mapping[TableId, Ids]],
    below: Mapping[TableId, int],
) -> StageSum:
    """The last stage's sum, as the secure sum would give it."""
    spec = plan.stages[-1]
    dense = spec.group.zeros(spec.dense)
    for each in inputs.values():
        assert each.dense is not None
        spec.group.iadd(dense, each.dense)
    tables = {}
    for t in spec.tables:
        # A group is what it was when it formed: dropouts since then only shrink it.
        rows = _all({c: by_table[t.table] for c, by_table in included.items()})
        words = spec.group.zeros((len(rows), t.width))
        alive: npt.NDArray[Any] = np.zeros(len(rows), dtype=np.int64)
        for c, each in inputs.items():
            at = np.searchsorted(rows, included[c][t.table])
            words[at] = spec.group.add(words[at], each.tables[t.table])
            alive[at] += 1
        if not plan.scheme.secure:  # nobody is in a group: a row is there if somebody sent it
            # Two servers cannot tell a row of zeros from one that nobody wrote.
            there = words.any(axis=1) if plan.scheme is Scheme.TWO_SERVER else alive > 0
            rows, words = rows[there], words[there]
        tables[t.table] = TableSum(
            rows=rows,
            words=words,
            members={},
            below_quorum=below[t.table],
            shrunk=int(np.count_nonzero(alive < plan.quorum)) if plan.scheme.secure else 0,
        )
    survivors = np.array(sorted(inputs), dtype=np.uint64)
    return StageSum(
        stage=StageId(len(plan.stages) - 1), survivors=survivors, dense=dense, tables=tables
    )
