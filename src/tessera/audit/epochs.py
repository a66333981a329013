"""Epochs of fixed groups once more, from the server's recorded view.

What the server has of a group: who came when and what each was given, one vector of every member,
and with the last of them their sum. Nothing opens before, so that there is a view of every epoch
that all members have delivered, and none of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera import wire
from tessera.audit.round_view import RoundView
from tessera.crypto.group import Words
from tessera.ids import ClientId, RoundId, StageId
from tessera.learning.compression import signed
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.epochs.messages import Assignment, Delivery, EpochHeader, EpochKind
from tessera.protocols.secagg.phases import StageSum
from tessera.rounds.encode import UpdateLayout
from tessera.rounds.epochs.group import EpochWork
from tessera.rounds.messages import Download, UnionOpened
from tessera.simulation.views import ViewEntry
from tessera.wire.index_set import client_array

Members = tuple[ClientId, ...]


@dataclass(slots=True)
class _GroupSeen:
    """The epoch of a group that members are given, and what has come."""

    header: EpochHeader
    union: UnionOpened | None = field(default=None, repr=False)
    downloads: dict[ClientId, Download] = field(default_factory=dict, repr=False)
    vectors: dict[ClientId, bytes] = field(default_factory=dict, repr=False)

    def begin(self, header: EpochHeader) -> None:
        if header.period != self.header.period:
            self.union = None
        self.header, self.downloads, self.vectors = header, {}, {}

    @property
    def total(self) -> Words:
        total = self.header.ring.zeros(self.header.length)
        for vector in self.vectors.values():
            self.header.ring.add_packed(total, vector)
        return total


class EpochReplay:
    """Takes what the server saw, in order, of all groups of a run."""

    def __init__(self, plan: Plan) -> None:
        """`plan` is the federation's."""
        self.plan = plan.group_plan
        self._groups: dict[Members, _GroupSeen] = {}
        self._members: dict[ClientId, Members] = {}

    def take(self, seen: Iterable[tuple[ViewEntry, Any]]) -> Iterator[RoundView]:
        """Every update whose sum opens within these entries."""
        for entry, message in seen:
            if isinstance(message, EpochWork) and entry.direction == "sent":
                self._given(ClientId(int(entry.other)), message)
            elif isinstance(message, Delivery) and entry.direction == "received":
                yield from self._delivered(message)

    def _given(self, client: ClientId, work: EpochWork) -> None:
        assigned: Assignment = wire.decode(work.assignment, expect=(Assignment,))
        members = tuple(sorted(each.sender for each in assigned.certificate.entries))
        group = self._groups.setdefault(members, _GroupSeen(assigned.header))
        self._members |= dict.fromkeys(members, members)
        if assigned.header != group.header:
            group.begin(assigned.header)
        if work.union:
            group.union = wire.decode(work.union, expect=(UnionOpened,))
        if work.base:
            group.downloads[client] = wire.decode(work.base, expect=(Download,))

    def _delivered(self, message: Delivery) -> Iterator[RoundView]:
        """A vector counts once; what the server had refused is not in the sum."""
        sender, said = message.sender, message.statement
        members = self._members.get(sender)
        if members is None:
            return
        group = self._groups[members]
        as_signed = wire.part_digest(message.vector) == said.vector
        if said.epoch != group.header.epoch or sender in group.vectors or not as_signed:
            return
        group.vectors[sender] = message.vector
        if len(group.vectors) == len(members) and group.header.kind is EpochKind.UPDATE:
            yield self._opened(members, group)

    def _opened(self, members: Members, group: _GroupSeen) -> RoundView:
        plan, base = self.plan, next(iter(group.downloads.values()))
        update = UpdateLayout(plan, _places(plan, base)).summed(group.total, members)
        union = _in_one_space(plan, group.union)
        everywhere = dict.fromkeys(members, union)
        counts = [
            signed(update.tables[table].words[:, -1], plan.ring)
            for table in plan.root_ids
            if table in update.tables
        ]
        offered = StageSum(
            stage=StageId(0), survivors=client_array(members), dense=plan.ring.zeros(0), tables={}
        )
        return RoundView(
            plan=plan,
            round_id=RoundId(int(base.round_id)),
            period=group.header.period,
            met=members,
            union=union,
            revealed=everywhere,
            members=everywhere,
            opened=union,
            counts=np.concatenate([np.zeros(0, dtype=np.int64), *counts]),
            sums=(update,) if group.union is None else (offered, update),
            downloads=group.downloads,
        )


def _places(plan: Plan, base: Download) -> dict[str, Ids]:
    """As many rows of each table as were sent: derived ones follow from the union by a map."""
    size = plan.model.precision.dtype.itemsize
    return {
        t.name: np.arange(
            len(base.tables[plan.table_id(t.name)]) // (t.width * size), dtype=np.uint64
        )
        for t in plan.tables
    }


def _in_one_space(plan: Plan, union: UnionOpened | None) -> Ids:
    tables = {} if union is None else union.tables
    parts = [
        tables[table] + np.uint64(plan.offsets[t.name])
        for table, t in plan.root_ids.items()
        if table in tables
    ]
    return np.concatenate([np.zeros(0, dtype=np.uint64), *parts])
