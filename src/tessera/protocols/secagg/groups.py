"""The groups of clients whose values of a row are summed: the public quorum rule.

Every client states the smallest group it accepts. A row's group is the largest set of the clients
that revealed it in which everybody's quorum is met; all sides compute the same one, or masks would
not cancel. Work is proportional to the memberships, never to the table or to clients squared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.ids import ClientId

Rows = npt.NDArray[np.uint64]

MOST_MARKS: Final = 16
"""Marks per membership up to which marking is cheaper than sorting; it also bounds the memory."""


def distinct(rows: Rows) -> Rows:
    """Rows in ascending order, each once; `np.unique` hashes 64-bit integers, which is slower."""
    ordered = np.sort(rows, kind="stable")  # finds the clients' sorted runs and merges them
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


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
    row, who = row[order], who[order]
    bounds = np.searchsorted(who, np.arange(len(clients) + 1))
    return {c: row[bounds[i] : bounds[i + 1]] for i, c in enumerate(clients)}


def shared_rows(members: Mapping[ClientId, Rows]) -> dict[ClientId, dict[ClientId, Rows]]:
    """For each client and each of its peers: indices into the client's rows that both are in."""
    clients = sorted(members)
    row = np.concatenate([members[c] for c in clients] or [np.zeros(0, dtype=np.uint64)])
    who = np.repeat(
        np.arange(len(clients), dtype=np.min_scalar_type(len(clients))),  # short keys sort faster
        [len(members[c]) for c in clients],
    )
    order = np.argsort(row, kind="stable")
    by_row, by_who = row[order], who[order]
    rows = distinct(by_row)
    if len(clients) * len(rows) <= MOST_MARKS * len(row):
        return _shared_by_marks(members, rows)
    return _shared_by_sorting(members, by_row, by_who)


def _shared_by_marks(
    members: Mapping[ClientId, Rows], rows: Rows
) -> dict[ClientId, dict[ClientId, Rows]]:
    """Large groups: a mark for each client and row, of which a client reads those of its rows."""
    clients = sorted(members)
    places = {c: np.searchsorted(rows, members[c]) for c in clients}
    marks = np.zeros((len(clients), len(rows)), dtype=np.bool_)
    for me, client in enumerate(clients):
        marks[me, places[client]] = True

    found: dict[ClientId, dict[ClientId, Rows]] = {}
    for client in clients:
        both = np.take(marks, places[client], axis=1)
        common = np.count_nonzero(both, axis=1)
        # Peers that are in all my rows share one array: with everybody in every group, the lists
        # would otherwise take clients^2 times the rows.
        everything = np.arange(len(places[client]), dtype=np.uint64)
        found[client] = {
            peer: everything
            if common[i] == len(everything)
            else np.flatnonzero(both[i]).view(np.uint64)  # never negative: the same bits
            for i, peer in enumerate(clients)
            if common[i] and peer != client
        }
    return found


def _shared_by_sorting(
    members: Mapping[ClientId, Rows], by_row: Rows, by_who: npt.NDArray[np.unsignedinteger[Any]]
) -> dict[ClientId, dict[ClientId, Rows]]:
    """Small groups: list the members of a client's rows, and sort the list by member."""
    clients = sorted(members)
    found: dict[ClientId, dict[ClientId, Rows]] = {}
    for me, client in enumerate(clients):
        own = members[client]
        first = np.searchsorted(by_row, own, side="left")
        count = np.searchsorted(by_row, own, side="right") - first
        # The members of my k-th row stand at first[k] .. first[k] + count[k]; one flat list of all.
        index = np.repeat(np.arange(len(own)), count)
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
