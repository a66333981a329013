"""Sums of pairs: histories that are followed in them, link by link, from one item that is known.

The server has the exact sums of a round, or of each fixed group; a reader of the model has at most
the pairs that enough clients hold. With noise on every cell everybody has noisy sums, and no
holders. The attack is `learning/pair_chains.py`; what it gets right is scored by the rows that
clients really have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.audit.finding import Finding, average
from tessera.audit.record import Record
from tessera.audit.round_view import RoundView, Truth
from tessera.audit.two_server_view import TwoServerView
from tessera.ids import ClientId
from tessera.learning.models.pairs import TABLE, Pairs
from tessera.learning.pair_chains import Ints, PairSums, linked
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.two_server.write.sums import sum_from_message
from tessera.rounds.noise import noise_of

TRIES: Final = 40
"""Clients of whom one item is known."""
TAU: Final = 6.0
"""Where a plan does not say, as tasks have it."""
FOLLOWED: Final = "pairs: a history read from one known item"
ALLOWED: Final = 0.1
"""Of a history, what goes with it in anybody's: pairs that many hold, or noise."""


def pair_task(plan: Plan) -> Pairs | None:
    """How pairs were counted, where a plan sums up pairs."""
    found = next((t for t in plan.tables if t.name == TABLE), None)
    if found is None:
        return None
    once, twice = math.isqrt(found.rows), math.isqrt(found.rows // 2)
    tau = float(plan.task.options.get("tau", TAU))
    if once**2 == found.rows:  # exact and without order, or with noise
        return Pairs(items=once, tau=0.0 if found.width == 2 else tau)
    return Pairs(items=twice, tau=tau) if 2 * twice**2 == found.rows else None


@dataclass(slots=True)
class PairChains:
    """Takes every opened sum by itself: the fewer clients are in it, the more pairs have one."""

    plan: Plan
    truth: Truth = field(repr=False)
    min_holders: int = 5
    _read: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record) -> PairChains:
        least = int(record.plan.task.options.get("min_holders", 5))
        return cls(record.plan, record.truth, least)

    def take(self, view: RoundView | TwoServerView) -> None:
        """One opened sum."""
        pairs = pair_task(self.plan)
        opened = _opened(view)
        if pairs is None or opened is None:
            return
        row, values, clients = opened
        if noise_of(self.plan).vector is not None:
            table = PairSums(pairs, row, values[:, 0])
            self._follow("anybody, by noisy sums", table, clients)
            return
        holders = np.rint(values[:, 1]).astype(np.int64)
        table = PairSums.of_rows(pairs, row, values[:, 0], holders)
        self._follow("whoever has the sums", table, clients)
        self._follow("a reader of the model", table.published(self.min_holders), clients)

    def _follow(self, by: str, sums: PairSums, clients: tuple[ClientId, ...]) -> None:
        found = self._read.setdefault(by, [])
        m = sums.pairs.items
        own = {client: self._items(self.truth[client], m) for client in clients}
        for client in sorted(clients)[:: max(1, len(clients) // TRIES)]:
            if len(own[client]) < 2:
                continue
            start = int(own[client][len(own[client]) // 2])
            fits = [items for items in own.values() if start in items]
            if sums.holders is None:  # what is found is nobody's in particular
                fits = [own[client]]
            found.append(linked(sums.followed(start), fits))

    @staticmethod
    def _items(rows: Ids, m: int) -> Ints:
        cell = rows.astype(np.int64) % (m * m)
        return np.unique(np.concatenate([cell // m, cell % m]))

    def findings(self) -> list[Finding]:
        return [
            average(
                f"{FOLLOWED}, {by}",
                shares,
                claimed=1.0 if by == "whoever has the sums" else ALLOWED,
                meaning=MEANING[by],
                kind=FOLLOWED,
            )
            for by, shares in self._read.items()
        ]


MEANING: Final[Mapping[str, str]] = {
    "whoever has the sums": "the share of one person's history that was put together from pairs "
    "with one holder, beginning with one known item; of the one that fits best of those who hold "
    "it, which any second item tells. Exact sums claim nothing against it",
    "a reader of the model": "the share of the history of whoever's item is known, by who has only "
    "the pairs that min_holders clients hold, going from each item to its most frequent successor",
    "anybody, by noisy sums": "likewise with noise on every cell, also for both servers",
}


Opened = tuple[Ints, "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", tuple[ClientId, ...]]


def _opened(view: RoundView | TwoServerView) -> Opened | None:
    """Rows of the table of pairs, their summed values, and whose they are."""
    plan = view.plan
    table = plan.table_id(TABLE)
    if isinstance(view, TwoServerView):
        if view.opened is None:
            return None
        part = sum_from_message(view.params, view.opened, view.included).tables[table]
        row, words, clients = part.rows, part.words, view.included
    else:
        if not view.finished:
            return None
        row, clients = view.opened - np.uint64(plan.offsets[TABLE]), view.survivors
        words = view.sums[-1].tables[table].words
    values = noise_of(plan).decoded(plan.quantizer, words[:, :-1])
    order = np.argsort(row)
    return row[order].astype(np.int64), values[order], clients
