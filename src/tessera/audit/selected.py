"""Selected places: where a client's largest changes are (`[update] top`), and who can tell.

In the schemes in the clear a message has the places in it: they are read. Between two servers they
are what both shares together say; here both are put together to know the truth, which each server's
own attack (`two_server.py`) is then scored with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.two_server_view import PARTIES, TwoServerView
from tessera.crypto import dpf
from tessera.crypto.group import Words
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, TableId
from tessera.plan import Plan
from tessera.protocols.plain import PlainInput, SparsePlainInput
from tessera.protocols.two_server.messages import Purpose
from tessera.protocols.two_server.params import TwoServerTable

Places = npt.NDArray[np.int64]
Selected = Mapping[tuple[ClientId, TableId], Places]

READ: Final = "places selected: read by the server"
MOST: Final = 20_000
"""Places of a cut that are looked at, the first ones: they are all alike."""


@dataclass(slots=True)
class OpenSelections:
    """What a server reads of a selection that is sent in the clear; takes rounds in order."""

    plan: Plan
    _read: ClusteredTrials = field(default_factory=ClusteredTrials)

    def take(self, messages: Iterable[Any]) -> None:
        """All messages of a round, as the server has them."""
        dense, words = self.plan.model.dense, self.plan.stages[-1].dense
        for m in messages:
            if isinstance(m, SparsePlainInput):
                count = int(np.count_nonzero(m.places < dense))
            elif isinstance(m, PlainInput):  # zeros and all
                count = int(np.count_nonzero(self.plan.ring.unpack(m.dense, words)[:dense]))
            else:
                continue
            self._read.add(int(m.sender), count, count)

    def findings(self) -> list[Finding]:
        meaning = (
            "where a client's largest changes are stands in its message. Nothing is promised in "
            "the clear; between two servers neither can tell"
        )
        return [self._read.finding(READ, claimed=1.0, meaning=meaning)]


def cuts_of(view: TwoServerView) -> list[TwoServerTable]:
    """The tables of a round that are cuts of the dense part."""
    return [spec for spec in view.params.tables if spec.table >= len(view.plan.tables)]


def looked_at(spec: TwoServerTable) -> Places:
    return np.arange(min(spec.rows, MOST))


def selected_places(leader: TwoServerView, helper: TwoServerView) -> dict[Any, Places]:
    """What every client wrote of each cut, from both servers' shares: for scoring only."""
    found = {}
    for spec in cuts_of(leader):
        rows = looked_at(spec)
        for client in leader.received[Purpose.WRITE]:
            if client not in helper.received[Purpose.WRITE]:
                continue
            ours, theirs = (shares_at(view, spec, client, rows) for view in (leader, helper))
            if ours is not None and theirs is not None:
                total = leader.params.group.add(ours, theirs)
                found[client, TableId(spec.table)] = rows[total.any(axis=1)]
    return found


def shares_at(
    view: TwoServerView, spec: TwoServerTable, client: ClientId, rows: Places
) -> Words | None:
    """One server's share of what a client wrote in these rows, (rows, words)."""
    if spec.writes_dense:
        plain = view.plain(client, spec)
        return None if plain is None else plain[rows]
    table, group = TableId(spec.table), view.params.group
    keys, layout = view.received[Purpose.WRITE][client], view.layouts.writing[table]
    at = next((i for i, b in enumerate(keys.public) if b.startswith(layout.forest.digest)), None)
    if at is None:
        return None
    part = keys.public[at][: layout.forest.public_bytes]  # and not what it is checked by
    public = dpf.PublicKeys.from_bytes(layout.forest, part)
    own = dpf.ServerKeys.of(
        public,
        Secret(keys.seeds[at]),
        party=PARTIES[view.whose],
        report_id=view.report_context(client, Purpose.WRITE).table_id(table),
    )
    bins, places = layout.table.chosen[rows], layout.table.positions[rows]
    values = dpf.evaluate_points(own, bins.reshape(-1), places.reshape(-1))
    each = values.reshape(len(rows), bins.shape[1], spec.words)
    total = group.zeros((len(rows), spec.words))
    for way in range(bins.shape[1]):
        total = group.add(total, each[:, way])
    return total
