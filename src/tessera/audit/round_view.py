"""RoundView: what the server knows of one secure sum, for attacks to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.secagg.messages import MaskedInput, RevealedShares, Roster
from tessera.protocols.secagg.phases import StageSum
from tessera.rounds.messages import Download
from tessera.simulation.views import ViewEntry

Mask = npt.NDArray[np.bool_]
Truth = Mapping[ClientId, Ids]
"""Everybody's real rows, as ids of the union's one space."""
Entries = list[tuple[ViewEntry, Any]]
"""Of a view, each with its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """What the server knows of one secure sum, as far as it came.

    `met` are all that were told each other's names. Row ids are those of the union's one space: the
    tables whose rows clients choose, one after the other (`Plan.offsets`). Rows of derived tables
    follow from them and are left out.
    """

    plan: Plan
    round_id: RoundId
    period: int
    met: tuple[ClientId, ...]
    union: Ids = field(repr=False)  # empty if it was not opened
    revealed: Mapping[ClientId, Ids] = field(repr=False)
    members: Mapping[ClientId, Ids] = field(repr=False)  # of the groups that met their quorum
    opened: Ids = field(repr=False)
    counts: npt.NDArray[np.int64] = field(repr=False)  # of the opened rows
    sums: tuple[StageSum, ...] = field(repr=False)
    downloads: Mapping[ClientId, Download] = field(repr=False)  # who was sent which model

    @property
    def in_union(self) -> tuple[ClientId, ...]:
        """The clients whose rows are in the union; nobody where there is none."""
        *before, _ = self.plan.stages
        return self._survivors(0) if before else ()

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """The clients whose update is in the sum; nobody if it was not opened."""
        return self._survivors(len(self.plan.stages) - 1)

    @property
    def finished(self) -> bool:
        return len(self.sums) == len(self.plan.stages)

    @property
    def count(self) -> npt.NDArray[np.int64]:
        """For each row of the union its count, -1 where the row was not opened."""
        found = np.full(len(self.union), -1, dtype=np.int64)
        found[np.searchsorted(self.union, self.opened)] = self.counts
        return found

    def among(self, rows: Mapping[ClientId, Ids], clients: Iterable[ClientId]) -> Mask:
        """(clients, rows of the union): whose `rows` have which row in them."""
        none = np.zeros(0, dtype=np.uint64)
        found = [np.isin(self.union, rows.get(c, none)) for c in clients]
        return np.array(found, dtype=np.bool_).reshape(-1, len(self.union))

    def _survivors(self, stage: int) -> tuple[ClientId, ...]:
        if len(self.sums) <= stage:
            return ()
        return tuple(ClientId(int(c)) for c in self.sums[stage].survivors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasesView(RoundView):
    """Of a sum in phases, with shares for those who drop out."""

    roster: Roster = field(repr=False)
    sharers: tuple[ClientId, ...]  # whose shares went round: those who mask each other
    inputs: tuple[MaskedInput, ...] = field(repr=False)
    shares: tuple[RevealedShares, ...] = field(repr=False)
