"""Which clients open a row together: the public quorum rule, and each client's part of it.

Every client states the smallest group it accepts. A row's group is the largest set of the clients
that revealed it in which everybody's quorum is met; all sides compute the same one, or masks would
not cancel. Work is proportional to the memberships, never to the table or to clients squared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tessera.ids import ClientId

Rows = npt.NDArray[np.uint64]


def form(
    revealed: Mapping[ClientId, Rows], quorums: Mapping[ClientId, int]
) -> dict[ClientId, Rows]:
    """For each client the rows whose group it is in, ascending.

    With the members' quorums in ascending order q_1 <= q_2 <= ..., the largest set that satisfies
    all its members is the first s of them for the largest s with q_s <= s.
    """
    clients = sorted(revealed)
    row = np.concatenate([revealed[c] for c in clients] or [np.zeros(0, dtype=np.uint64)])
    if not len(row):
        return {c: np.zeros(0, dtype=np.uint64) for c in clients}
    who = np.repeat(np.arange(len(clients)), [len(revealed[c]) for c in clients])
    quorum = np.array([quorums[c] for c in clients], dtype=np.int64)[who]

    order = np.lexsort((quorum, row))
    row, who, quorum = row[order], who[order], quorum[order]
    starts = np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1])))
    sizes = np.diff(np.append(starts, len(row)))
    rank = np.arange(len(row)) - np.repeat(starts, sizes) + 1
    largest = np.maximum.reduceat(np.where(quorum <= rank, rank, 0), starts)
    member = rank <= np.repeat(largest, sizes)

    row, who = row[member], who[member]
    order = np.argsort(who, kind="stable")  # rows stay ascending within a client
    bounds = np.searchsorted(who[order], np.arange(len(clients) + 1))
    return {c: row[order][bounds[i] : bounds[i + 1]] for i, c in enumerate(clients)}


def shared_rows(members: Mapping[ClientId, Rows]) -> dict[ClientId, dict[ClientId, Rows]]:
    """For each client and each of its peers: indices into the client's rows that both are in."""
    clients = sorted(members)
    row = np.concatenate([members[c] for c in clients] or [np.zeros(0, dtype=np.uint64)])
    who = np.repeat(np.arange(len(clients)), [len(members[c]) for c in clients])
    order = np.argsort(row, kind="stable")
    by_row, by_who = row[order], who[order]

    found: dict[ClientId, dict[ClientId, Rows]] = {}
    for me, client in enumerate(clients):
        mine = members[client]
        first = np.searchsorted(by_row, mine, side="left")
        count = np.searchsorted(by_row, mine, side="right") - first
        # The members of my k-th row stand at first[k] .. first[k] + count[k]; one flat list of all.
        index = np.repeat(np.arange(len(mine)), count)
        offset = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        peer = by_who[np.repeat(first, count) + offset]
        others = peer != me
        index, peer = index[others], peer[others]
        turn = np.argsort(peer, kind="stable")
        index, peer = index[turn].astype(np.uint64), peer[turn]
        bounds = np.searchsorted(peer, np.arange(len(clients) + 1))
        found[client] = {
            clients[p]: index[bounds[p] : bounds[p + 1]]
            for p in range(len(clients))
            if bounds[p + 1] > bounds[p]
        }
    return found
