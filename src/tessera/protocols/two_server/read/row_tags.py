"""Row authentication tags, with which a client checks the rows that it fetched.

A server may lie in its half of an answer: what it adds there is added to the row, and the effect of
a changed row on a client's training can be seen in the sum. So every row has a public tag f of 128
bits, which binds its bytes, its id, its table and the round; and the client's point functions have
random odd words w as values, which only the client knows. Beside its half of a row each server
sends the XOR over the bin of (its share of w) * f, a product of polynomials over GF(2). The two
products add up to w * f(row). A server that changes its half of the row would have to change its
product by w * (f(row) - f(changed row)), and it does not know w.

A lie goes undetected with probability at most 2^-63, whatever the client's rows are. Dummies are
checked like the others, so a client that leaves reveals nothing about its rows.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tessera.crypto import kernel
from tessera.crypto.group import Words
from tessera.crypto.kernel.trees import BLOCK
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.ids import TableId
from tessera.protocols.two_server.params import Ids

ROW_TAG_BYTES: Final = BLOCK
Bytes = npt.NDArray[np.uint8]


def row_digests(table: TableId, ids: Ids, rows: Bytes) -> Bytes:
    """(k, 32) bytes: BLAKE2s of table, id and bytes of each row."""
    numbers = np.ascontiguousarray(ids, dtype=np.uint64)
    return kernel.active().row_digests(
        table.to_bytes(8, "little"), numbers, np.ascontiguousarray(rows)
    )


def row_tags(digests: Bytes, seed: bytes) -> Bytes:
    """(k, 16) bytes: a digest's two blocks under AES, chained, with a key from the round's seed.

    128 bits of the digest itself would resist a second preimage, but not a collision: a server
    could have searched for two rows with the same tag for years, and planted one of them. The seed
    is made by both servers once the model is fixed.
    """
    key = hashlib.sha256(encode_context(Label.ROW_TAGS, seed)).digest()[:BLOCK]
    context = Cipher(AES128(key), ECB()).encryptor()
    first, second = np.ascontiguousarray(digests[:, :BLOCK]), digests[:, BLOCK:]
    chained = np.frombuffer(context.update(first.tobytes()), np.uint8).reshape(-1, BLOCK) ^ second
    return np.frombuffer(context.update(chained.tobytes()), np.uint8).reshape(-1, BLOCK)


class RowTagCache:
    """The tags of a server's tables; only rows that changed since the last round are hashed."""

    def __init__(self) -> None:
        self._known: dict[TableId, tuple[Ids, Bytes, Bytes]] = {}

    def of(self, table: TableId, ids: Ids, rows: Bytes, seed: bytes) -> Bytes:
        """(k, 16) bytes, for the round that has this seed."""
        known = self._known.get(table)
        if known is None or not np.array_equal(known[0], ids) or known[1].shape != rows.shape:
            digests = row_digests(table, ids, rows)
        else:
            changed = np.nonzero((_wide(known[1]) != _wide(rows)).any(axis=1))[0]
            digests = known[2].copy()
            digests[changed] = row_digests(table, ids[changed], rows[changed])
        self._known[table] = (ids.copy(), rows.copy(), digests)
        return row_tags(digests, seed)


def _wide(rows: Bytes) -> npt.NDArray[Any]:
    """Rows of bytes as rows of the widest words that they are made of: fewer to compare."""
    width = next(size for size in (8, 4, 2, 1) if rows.shape[1] % size == 0)
    return np.ascontiguousarray(rows).view(f"<u{width}")


def tag_products(words: Words, tags: Bytes) -> Bytes:
    """(k, 32) bytes: what the products of both servers have to add up to, for these words."""
    flat = np.ascontiguousarray(words, dtype=np.uint64).reshape(-1)
    return kernel.active().products(flat, np.ascontiguousarray(tags))
