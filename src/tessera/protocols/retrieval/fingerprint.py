"""Rows that a client can check: fingerprints of all rows, and what a server can say of one of them.

A server may lie in its half of an answer. What it adds there is added to the row, and what a client
then makes of a strange row can be seen in the end, in the sum. So every row has a public
fingerprint f of 128 bits, which binds its bytes, its id and its table; and a client's point
functions are worth random odd words w, of which only the client knows the values and the places.
Beside its half of a row each server sends the XOR over the bin of (its share of the word) * f,
products of polynomials over GF(2). Together they are w * f(row). A server that changes its half of
the row would have to change the other by w * (f(row) - f(changed row)), and it does not know w.

So it is found out with all but a chance of 2^-63, and that does not depend on the client's rows:
dummies are checked like the others. The client leaves, which tells nobody anything of them.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Words
from tessera.crypto.kernel.points_reference import carryless
from tessera.ids import TableId
from tessera.protocols.pair.params import Ids

PRINT_BYTES: Final = 16
Bytes = npt.NDArray[np.uint8]


def fingerprints(table: TableId, ids: Ids, rows: Bytes) -> Bytes:
    """(k, 16) bytes: BLAKE2s of table, id and bytes of each row.

    A digest and not a keyed sum: both servers know it before they answer, and one of them may look
    for a second row with the same.
    """
    person = table.to_bytes(8, "little")
    named = np.empty((len(ids), 8 + rows.shape[1]), dtype=np.uint8)
    named[:, :8] = ids.astype("<u8")[:, np.newaxis].view(np.uint8)
    named[:, 8:] = rows
    flat, width = named.reshape(-1).data, named.shape[1]
    found = [
        hashlib.blake2s(flat[at : at + width], digest_size=PRINT_BYTES, person=person).digest()
        for at in range(0, named.size, width)
    ]
    return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, PRINT_BYTES)


class Fingerprints:
    """The fingerprints of a server's tables, of which only rows that changed are made anew."""

    def __init__(self) -> None:
        self._known: dict[TableId, tuple[Ids, Bytes, Bytes]] = {}

    def of(self, table: TableId, ids: Ids, rows: Bytes) -> Bytes:
        known = self._known.get(table)
        if known is None or not np.array_equal(known[0], ids) or known[1].shape != rows.shape:
            prints = fingerprints(table, ids, rows)
        else:
            changed = np.nonzero((known[1] != rows).any(axis=1))[0]
            prints = known[2].copy()
            prints[changed] = fingerprints(table, ids[changed], rows[changed])
        self._known[table] = (ids, rows.copy(), prints)
        return prints


def checks(words: Words, prints: Bytes) -> Bytes:
    """(k, 32) bytes: what both servers' shares have to add up to, for a client's own words."""
    factors = np.ascontiguousarray(prints).view("<u8")
    return carryless(words.reshape(-1), factors).view(np.uint8)
