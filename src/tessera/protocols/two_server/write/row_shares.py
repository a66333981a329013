"""One server's shares of the rows that are written by keys, and the sums that check the keys.

Shares and checks come from one pass over all leaves (`crypto/verifiable.py`). A client that fails
its check is found after its leaves were added: they are taken out again, which costs one client's
evaluation and not another pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tessera.crypto import dpf, verifiable
from tessera.crypto.cuckoo import Layout
from tessera.crypto.group import Words
from tessera.crypto.kernel.trees import Bytes, RowSpace
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.crypto.verifiable import SUM_BYTES, Coefficients
from tessera.ids import ClientId, TableId
from tessera.protocols.two_server.keys import Reported, batches
from tessera.protocols.two_server.layouts import layouts_of
from tessera.protocols.two_server.messages import Header
from tessera.protocols.two_server.params import TwoServerParams
from tessera.protocols.two_server.workers import Workers


@dataclass(frozen=True, slots=True, eq=False)
class RowShares:
    """Shares of all rows by table; `checks` has the sums of every client, where there is a coin."""

    tables: dict[TableId, Words] = field(repr=False)
    checks: dict[ClientId, bytes] = field(repr=False)

    def without(self, params: TwoServerParams, others: RowShares) -> RowShares:
        """Less the shares of some of the same clients."""
        tables = {
            table: params.group.sub(rows, others.tables[table])
            for table, rows in self.tables.items()
        }
        return RowShares(tables, self.checks)


def coin_of(seed: Secret, closing: bytes) -> Secret:
    """The coin of one closed collection, named by the digest of its list.

    It is the same whenever a helper is woken. One that was restored from before the closing, and
    hears another, draws another: reports that were made in the knowledge of a coin meet a new one.
    """
    return seed.derive(Label.CHECK_COIN, closing, size=verifiable.COIN_BYTES)


def row_shares(
    params: TwoServerParams,
    header: Header,
    reports: Sequence[Reported],
    *,
    party: int,
    workers: Workers,
    coin: Secret | None = None,
) -> RowShares:
    """One server's shares over exactly these reports; with a coin, their sums to be compared."""
    writing = layouts_of(params, header).writing
    checks = np.zeros((len(reports), SUM_BYTES), dtype=np.uint8)
    factors: list[Coefficients | None] = [None] * len(writing)
    if coin is not None:
        forests = [layout.forest for layout in writing.values()]
        factors = list(verifiable.coefficients(coin, forests))
    tables = {}
    epoch = header.epoch
    for at, (table, layout) in enumerate(writing.items()):
        one = _Pass(layout, table, at, party, workers, factors[at], epoch)
        checks ^= np.concatenate([checks[:0], *map(one.add, batches(reports, layout.forest))])
        tables[table] = one.rows()
    if coin is None:
        return RowShares(tables, {})
    named = zip(reports, checks, strict=True)
    return RowShares(tables, {report.context.client: each.tobytes() for report, each in named})


class _Pass:
    """The rows of one table, to which reports are added: an array for each worker."""

    def __init__(
        self,
        layout: Layout,
        table: TableId,
        at: int,
        party: int,
        workers: Workers,
        factors: Coefficients | None,
        epoch: int,
    ) -> None:
        self._layout, self._table, self._at, self._party = layout, table, at, party
        self._workers, self._factors, self._epoch = workers, factors, epoch
        self._parts = layout.forest.parts(workers.count)
        self._spaces = [layout.row_space(party) for _ in self._parts]

    def add(self, reports: Sequence[Reported]) -> Bytes:
        """Add some reports; their sums of this table, zeros where nothing is checked."""
        forest, factors = self._layout.forest, self._factors
        keys = [r.expanded(forest, self._table, self._at, party=self._party) for r in reports]
        found = [np.zeros((len(reports), SUM_BYTES), dtype=np.uint8) for _ in self._parts]
        each = list(zip(self._parts, self._spaces, found, strict=True))
        if factors is None:
            self._workers.run(
                [
                    partial(dpf.add_to, forest, keys, space, part=part, epoch=self._epoch)
                    for part, space, _ in each
                ]
            )
            return found[0]
        sent = [report.corrections(forest, self._at) for report in reports]

        def check(part: range, space: RowSpace, into: Bytes) -> None:
            into[:] = verifiable.check_sums(forest, keys, sent, factors, space, part=part)

        self._workers.run([partial(check, *one) for one in each])
        total = found[0]
        for more in found[1:]:
            total ^= more
        return total

    def rows(self) -> Words:
        """This server's shares of all rows."""
        group = self._layout.forest.values.group
        assert group is not None
        total, *others = (self._layout.row_words(space) for space in self._spaces)
        for more in others:
            total = group.add(total, more)
        return total
