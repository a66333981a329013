"""An ideal round between two servers: the same clients, rows, training and means, in the clear.

Nothing is sealed, hashed or shared. Only the phases in which a client can be missing are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tessera.errors import RoundAborted
from tessera.ids import ClientId, StageId
from tessera.learning.arrays import Ids, distinct
from tessera.protocols.index_set import client_array
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.rounds import select
from tessera.rounds.encode import RoundResult, UpdateWords
from tessera.rounds.ideal import Dropout, RoundTrainer
from tessera.rounds.plan import Plan
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.leader import LeaderRound

PHASES: Final = ("query", "collect")
NONE: Final = np.zeros(0, dtype=np.uint64)


def run_ideal_two_server(
    leader: LeaderRound,
    clients: Mapping[ClientId, TwoServerClientRound],
    train: RoundTrainer,
    dropouts: Mapping[ClientId, Dropout] | None = None,
) -> RoundResult:
    """Run the round in the clear; `clients` are fresh, and some drop out on the way."""
    plan, gone = leader.plan, dropouts or {}
    left = {c: PHASES.index(e.phase) for c, e in gone.items() if e.phase in PHASES}

    def present(phase: str) -> dict[ClientId, TwoServerClientRound]:
        """Those who answer in this phase; one that dropped out earlier does not."""
        here = PHASES.index(phase)
        found = {c: client for c, client in clients.items() if left.get(c, here + 1) > here}
        if len(found) < plan.least_survivors:
            raise RoundAborted(
                round_id=leader.round_id,
                phase=phase,
                answered=len(found),
                needed=plan.least_survivors,
            )
        return found

    for client in clients.values():
        client.prepare()
    if plan.narrows:
        offered = [client.offered() for client in clients.values()]
        union = plan.split_ids(distinct(np.concatenate([*offered, NONE])))
        leader.take_union(union)
        for client in clients.values():
            client.take_union(union)
    submodels = {
        c: client.submodel(*leader.fetch(client.choose().requested))
        for c, client in present("query").items()
    }
    updates = {c: clients[c].sendable(update) for c, update in train(submodels).items()}
    words = {c: client.quantised_rows(updates[c]) for c, client in present("collect").items()}
    return leader.means(_added(plan, words, leader.union))


def _added(plan: Plan, words: Mapping[ClientId, UpdateWords], union: Mapping[str, Ids]) -> StageSum:
    """The sum, as both servers would open it."""
    spec = plan.stages[-1]
    dense = spec.group.zeros(spec.dense)
    for each in words.values():
        spec.group.iadd(dense, each.dense)
    tables = {}
    for t in plan.tables:
        parts = [each.tables[t.name] for each in words.values()]
        ids = distinct(np.concatenate([*(part.ids for part in parts), NONE]))
        total = spec.group.zeros((len(ids), t.width + 1))
        for part in parts:
            at = np.searchsorted(ids, part.ids)
            total[at] = spec.group.add(total[at], part.words)
        there = total.any(axis=1)  # two servers cannot tell zeros from what nobody wrote
        tables[plan.table_id(t.name)] = TableSum(
            rows=select.positions(union, t.name, ids[there]),
            words=total[there],
            members={},
            below_quorum=0,
        )
    stage = StageId(len(plan.stages) - 1)
    return StageSum(stage=stage, survivors=client_array(words), dense=dense, tables=tables)
