"""A client's own rows: those of local tables, which never leave it, as they are before training.

Their first values are drawn from the client's lasting secret, and look like the module's. Drawn
from a public seed, or from the client's number, they would identify who holds what: the opened
update of a row over that of its bias is the holder's own row plus what the server can compute
(docs/threat-model.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, SecretOf
from tessera.learning.bound_model import BoundModel
from tessera.learning.tables.submodel import Floats, Ids
from tessera.learning.tables.table import LazyTable, Normal, PerClient, TableSpec, shaped, units

KEY_BYTES: Final = 16


def first_rows(bound: BoundModel, name: str, ids: Ids, secret: Secret) -> Floats:
    """The first values of a client's rows of a local table."""
    return _like(bound, name)(_drawn(name, ids, bound[name].width, secret))


def _drawn(name: str, ids: Ids, width: int, secret: Secret) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1), which follow from the client's secret alone."""
    key = secret.derive(Label.OWN_ROWS, name, size=KEY_BYTES).reveal()
    return units(key, ids, width)


def _like(bound: BoundModel, name: str) -> Callable[[npt.NDArray[np.float64]], Floats]:
    """Values by the table's rule; where the table begins as the module has it, each column is
    normal with the mean and deviation that it has there, so that a constant one stays so."""
    rule = bound[name].initial
    if rule is not None:
        return lambda u: shaped(rule, u).astype(np.float32)
    begins = bound.initial(name).astype(np.float64)
    mean, deviation = begins.mean(0), begins.std(0)
    return lambda u: (mean + shaped(Normal(1.0), u) * deviation).astype(np.float32)


class OwnRows(LazyTable):
    """A local table of all clients of a simulation: each row is first drawn by its client."""

    def __init__(self, bound: BoundModel, name: str, data: ClientData, secret_of: SecretOf) -> None:
        shape = bound[name]
        super().__init__(
            TableSpec(name=name, size=shape.rows, width=shape.width, initial=PerClient())
        )
        self._secret_of, self._like = secret_of, _like(bound, name)
        self._rows, self._clients = owners(bound, name, data)
        self._first = LazyTable(TableSpec(name=name, size=shape.rows, width=shape.width))

    def initial(self, ids: Ids) -> Floats:
        """Drawn when first read, and kept: a row may be read in every test of the model."""
        fresh = ids[~self._first.holds(ids)]
        if fresh.size:
            self._first.restore(fresh, self._like(self._units(fresh)))
        return self._first.values(ids)

    def _units(self, ids: Ids) -> npt.NDArray[np.float64]:
        u = np.full((ids.size, self.width), 0.5)  # for rows that nobody has
        at = np.searchsorted(self._rows, ids)
        there = np.flatnonzero(at < self._rows.size)
        there = there[self._rows[at[there]] == ids[there]]
        whose = self._clients[at[there]]
        order = np.argsort(whose, kind="stable")
        begins = np.flatnonzero(np.diff(whose[order], prepend=-1))
        for own in np.split(there[order], begins[1:]):
            if own.size:
                secret = self._secret_of(int(self._clients[at[own[0]]]))
                u[own] = _drawn(self.name, ids[own], self.width, secret)
        return u


def owners(bound: BoundModel, name: str, data: ClientData) -> tuple[Ids, npt.NDArray[np.int64]]:
    """The rows of a local table that some client's examples touch, and whose each is: of several
    clients', the first's."""
    rows, clients = [], []
    for examples, offsets in ((data.train, data.offsets), (data.test, data.test_offsets)):
        client = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        for field in bound[name].fields:
            column = examples[field]
            rows.append(column.reshape(-1))
            clients.append(np.repeat(client, column.size // max(len(column), 1)))
    every, whose = np.concatenate(rows), np.concatenate(clients)
    order = np.lexsort((whose, every))
    every, whose = every[order], whose[order]
    first = every >= 0
    first[1:] &= every[1:] != every[:-1]
    return every[first].astype(np.uint64), whose[first]
