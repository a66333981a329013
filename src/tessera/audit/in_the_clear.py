"""Rows in the clear: whose they are stands in the messages, and the server reads it.

Under `submodel` a client names its rows. Under `fedavg` it sends a whole model, whose rows are zero
wherever it has no example. With `[update] top` a message has the places of a client's largest
changes in it. None of this is claimed to be hidden: the attacks say how much there is to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.round_view import Truth
from tessera.ids import ClientId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.plain import PlainInput, PlainRows, SparsePlainInput
from tessera.rounds.messages import whole_tables

SELECTED_READ: Final = "places selected: read by the server"
READ: Final = "in the clear: a client's rows, read by the server"
EVERYTHING: Final = (
    "the server reads everything: every client's rows and its update of each. The scheme hides "
    "nothing from it, and claims nothing"
)


@dataclass(slots=True)
class ClearRows:
    """Reads the messages of every round; the truth is for scoring only."""

    plan: Plan
    truth: Truth = field(repr=False)
    read: dict[ClientId, Ids] = field(default_factory=dict, repr=False)
    rounds: Counter[ClientId] = field(default_factory=Counter, repr=False)

    def take(self, messages: Iterable[Any]) -> None:
        """All messages of a round, as the server has them."""
        for message in messages:
            if isinstance(message, PlainRows):
                self._add(message.sender, self._named(message))
            elif isinstance(message, PlainInput | SparsePlainInput):
                self.rounds[message.sender] += 1
                if not message.tables:
                    self._add(message.sender, self._moved(message))

    def findings(self) -> list[Finding]:
        found = ClusteredTrials()
        for client, rows in self.read.items():
            real = self.truth[client]
            found.add(int(client), int(np.isin(real, rows).sum()), len(real))
        return [found.finding(READ, claimed=1.0, meaning=EVERYTHING)]

    def _add(self, client: ClientId, rows: Ids) -> None:
        known = self.read.get(client, np.zeros(0, dtype=np.uint64))
        self.read[client] = np.union1d(known, rows)

    def _named(self, message: PlainRows) -> Ids:
        """Rows that a client asks for, as ids of the one space of all tables."""
        plan = self.plan
        start = {table: np.uint64(plan.offsets[t.name]) for table, t in plan.root_ids.items()}
        parts = [t.rows + start[t.table] for t in message.tables if t.table in start]
        return np.concatenate([np.zeros(0, dtype=np.uint64), *parts])

    def _moved(self, message: PlainInput | SparsePlainInput) -> Ids:
        """Rows of a whole model that a client's update changes."""
        plan, length = self.plan, self.plan.stages[-1].dense
        if isinstance(message, PlainInput):
            words = plan.ring.unpack(message.dense, length)
        else:
            words = plan.ring.zeros(length)
            words[message.places] = plan.ring.unpack(message.dense, len(message.places))
        found = [
            sent[part.any(axis=1)] + np.uint64(plan.offsets[t.name])
            for t, sent, part in whole_tables(plan, words)
            if not t.derived_from
        ]
        return np.concatenate([np.zeros(0, dtype=np.uint64), *found])


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
        return [self._read.finding(SELECTED_READ, claimed=1.0, meaning=meaning)]
