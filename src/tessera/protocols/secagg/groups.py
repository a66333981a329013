"""The groups of clients whose values of a row are summed: the public quorum rule.

Every client states the smallest group it accepts. A row's group is the largest set of the clients
that revealed it in which everybody's quorum is met; all sides compute the same one, or masks would
not cancel. Work is proportional to the memberships, never to the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.kernel.sets import Members
from tessera.ids import ClientId
from tessera.wire.index_set import JoinedSets

Rows = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

MOST_MARKS: Final = 16
"""Positions per row up to which marking them is cheaper than sorting; it also bounds the memory."""


def distinct(rows: Rows) -> Rows:
    """Rows in ascending order, each once; `np.unique` hashes 64-bit integers, which is slower."""
    if _may_mark(rows):
        return np.flatnonzero(_marks(rows)).view(np.uint64)  # never negative: the same bits
    ordered = np.sort(rows, kind="stable")  # finds the clients' sorted runs and merges them
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def numbered(rows: Rows) -> tuple[Rows, Places]:
    """The distinct rows in ascending order, and for each row its place among them."""
    if _may_mark(rows):
        marks = _marks(rows)
        places = np.cumsum(marks) - 1
        return np.flatnonzero(marks).view(np.uint64), places[rows]
    found = distinct(rows)
    return found, np.searchsorted(found, rows)


def places_in(among: Rows, rows: Rows) -> Places:
    """Where rows stand among others that contain them; both ascend."""
    if len(rows) == len(among):
        return np.arange(len(rows))
    if int(among[-1]) == len(among) - 1:  # all positions from 0 on
        return rows.astype(np.int64)
    return np.searchsorted(among, rows)


def _may_mark(rows: Rows) -> bool:
    return bool(len(rows)) and int(rows.max()) < MOST_MARKS * len(rows)


def _marks(rows: Rows) -> npt.NDArray[np.bool_]:
    marks = np.zeros(int(rows.max()) + 1, dtype=np.bool_)
    marks[rows] = True
    return marks


def form(
    revealed: Mapping[ClientId, Rows], quorums: Mapping[ClientId, int]
) -> dict[ClientId, Rows]:
    """For each client the rows whose group it is in, ascending.

    With the members' quorums in ascending order q_1 <= q_2 <= ..., the largest set that satisfies
    all its members is the first s of them for the largest s with q_s <= s.
    """
    clients = sorted(revealed)
    row = np.concatenate([np.zeros(0, dtype=np.uint64), *(revealed[c] for c in clients)])
    bounds = np.cumsum([0, *(len(revealed[c]) for c in clients)])
    _, place = numbered(row)
    sizes = np.bincount(place)
    asked = [quorums[c] for c in clients]
    if len(set(asked)) <= 1:  # then a row's group is everybody or nobody
        member = sizes[place] >= max(asked, default=0)
    else:
        quorum = np.repeat(np.array(asked, dtype=np.int64), np.diff(bounds))
        order = np.lexsort((quorum, place))
        starts = np.cumsum(sizes) - sizes
        rank = np.arange(len(row)) - np.repeat(starts, sizes) + 1
        largest = np.maximum.reduceat(np.where(quorum[order] <= rank, rank, 0), starts)
        member = np.empty(len(row), dtype=np.bool_)
        member[order] = rank <= np.repeat(largest, sizes)
    return {
        c: row[begin:end][member[begin:end]]
        for c, begin, end in zip(clients, bounds, bounds[1:], strict=False)
    }


class SharedRows(Mapping[ClientId, JoinedSets]):
    """For each client and each of its peers: indices into the client's rows that both are in.

    They are found when a client is asked for: all together they would take clients^2 times the
    rows. Peers that are in all rows of a client have one set in common.
    """

    def __init__(self, members: Mapping[ClientId, Rows]) -> None:
        self._clients = sorted(members)
        self._ids = np.array(self._clients, dtype=np.uint64)
        self._number = {c: i for i, c in enumerate(self._clients)}
        parts = [members[c] for c in self._clients]
        rows, self._place = numbered(np.concatenate([np.zeros(0, dtype=np.uint64), *parts]))
        self._bounds = np.cumsum([0, *map(len, parts)])
        who = np.repeat(np.arange(len(parts), dtype=np.uint32), np.diff(self._bounds))
        keys = self._place.astype(np.min_scalar_type(len(rows)))  # short keys sort faster
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.bincount(self._place, minlength=len(rows)), out=starts[1:])
        self._members = Members(starts, who[np.argsort(keys, kind="stable")], len(parts))

    def __getitem__(self, client: ClientId) -> JoinedSets:
        me, backend = self._number[client], kernel.active()
        own = self._place[self._bounds[me] : self._bounds[me + 1]]
        counts = backend.shared_counts(self._members, own)
        counts[me] = 0
        whole = (counts == len(own)) & (counts > 0)
        part = (counts > 0) & ~whole
        indices, bounds = backend.shared_rows(self._members, own, counts, part)
        numbers = np.cumsum(part) - 1
        if whole.any():
            numbers[whole] = len(bounds) - 1
            indices = np.concatenate([indices, np.arange(len(own), dtype=np.uint64)])
            bounds = np.append(bounds, len(indices))
        peers = np.flatnonzero(counts)
        return JoinedSets(self._ids[peers], numbers[peers], indices, bounds)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)
