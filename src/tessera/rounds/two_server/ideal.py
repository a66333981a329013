"""An ideal round between two servers: the same clients, rows, training and means, in the clear.

Nothing is sealed, hashed or shared. A client that drops out is missing in the phase where it would
be, and from then on. Who has keys that last is not known here: `Federation` refuses faults then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tessera.errors import RoundAborted
from tessera.ids import ClientId, StageId
from tessera.learning.arrays import Ids, distinct
from tessera.learning.submodel import Submodel
from tessera.protocols.index_set import client_array
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.rounds import encode, schemes, select
from tessera.rounds.encode import RoundResult, UpdateWords
from tessera.rounds.ideal import Dropout, RoundTrainer
from tessera.rounds.plan import Plan
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.leader import LeaderRound

UNITING: Final = ("advertise", "share", "collect", "consistency", "unmask")
"""Phases of the union's sum: who misses those after its `collect` is in it all the same."""
NONE: Final = np.zeros(0, dtype=np.uint64)


def run_ideal_two_server(
    leader: LeaderRound,
    clients: Mapping[ClientId, TwoServerClientRound],
    train: RoundTrainer,
    dropouts: Mapping[ClientId, Dropout] | None = None,
) -> RoundResult:
    """Run the round in the clear; `clients` are fresh, and some drop out on the way."""
    plan = leader.plan
    order = [(p.name, p.visit) for p in schemes.of(plan).phases(plan)]
    places = {c: (e.phase, e.visit) for c, e in (dropouts or {}).items()}
    left = {c: order.index(place) for c, place in places.items() if place in order}

    def present(phase: str, visit: int, needed: int) -> dict[ClientId, TwoServerClientRound]:
        """Those who answer in this phase; one that dropped out earlier does not."""
        here = order.index((phase, visit))
        found = {c: client for c, client in clients.items() if left.get(c, len(order)) > here}
        if len(found) < needed:
            raise RoundAborted(
                round_id=leader.round_id, phase=phase, answered=len(found), needed=needed
            )
        return found

    for client in clients.values():
        client.prepare()
    union: dict[str, Ids] = {}
    if plan.narrows:
        least = plan.union_sum(leader.round_id).min_survivors
        uniting = {phase: present(phase, 0, least) for phase in UNITING}
        offered = [client.offered() for client in uniting["collect"].values()]
        roots = plan.split_ids(distinct(np.concatenate([*offered, NONE])))
        union = select.with_derived(plan, roots, leader.derived)
    asking = present("query", 0, 0)  # too few reports abort a round, too few queries do not
    chosen = {c: client.choose(union) for c, client in asking.items()}
    pending = {
        c: Submodel(*leader.fetch(each.requested), each.trained) for c, each in chosen.items()
    }
    updates = train(pending) if pending else {}
    # A client that drops out later has made its report, too.
    words = {
        c: clients[c].encoded(update, chosen[c].trained, clients[c].draw_root())
        for c, update in updates.items()
    }
    reporting = present("collect", int(plan.narrows), plan.least_survivors)
    total = _added(plan, {c: words[c] for c in reporting}, union)
    return encode.means(plan, total, union=union)


def _added(
    plan: Plan, reports: Mapping[ClientId, UpdateWords | None], union: Mapping[str, Ids]
) -> StageSum:
    """The sum, as both servers would open it. A report of None is one of zeros."""
    ring, words = plan.ring, [each for each in reports.values() if each is not None]
    dense = ring.zeros(plan.model.dense + 1)
    for each in words:
        ring.iadd(dense, each.dense)
    tables = {}
    for t in plan.tables:
        parts = [each.tables[t.name] for each in words]
        ids = distinct(np.concatenate([*(part.ids for part in parts), NONE]))
        total = ring.zeros((len(ids), t.width + 1))
        for part in parts:
            at = np.searchsorted(ids, part.ids)
            total[at] = ring.add(total[at], part.words)
        there = total.any(axis=1)  # two servers cannot tell zeros from what nobody wrote
        tables[plan.table_id(t.name)] = TableSum(
            rows=select.positions(union, t.name, ids[there]),
            words=total[there],
            members={},
            below_quorum=0,
        )
    stage = StageId(int(plan.narrows))
    return StageSum(stage=stage, survivors=client_array(reports), dense=dense, tables=tables)
