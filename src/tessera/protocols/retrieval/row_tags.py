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
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tessera.crypto.group import Words
from tessera.crypto.kernel.points import BLOCK
from tessera.crypto.kernel.points_reference import carryless
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.ids import TableId
from tessera.protocols.two_server.params import Ids

DIGEST_BYTES: Final = 32
ROW_TAG_BYTES: Final = BLOCK
Bytes = npt.NDArray[np.uint8]


def row_digests(table: TableId, ids: Ids, rows: Bytes) -> Bytes:
    """(k, 32) bytes: BLAKE2s of table, id and bytes of each row."""
    person = table.to_bytes(8, "little")
    named = np.empty((len(ids), 8 + rows.shape[1]), dtype=np.uint8)
    named[:, :8] = ids.astype("<u8")[:, np.newaxis].view(np.uint8)
    named[:, 8:] = rows
    flat, width = named.reshape(-1).data, named.shape[1]
    found = [
        hashlib.blake2s(flat[at : at + width], person=person).digest()
        for at in range(0, named.size, width)
    ]
    return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, DIGEST_BYTES)


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
            changed = np.nonzero((known[1] != rows).any(axis=1))[0]
            digests = known[2].copy()
            digests[changed] = row_digests(table, ids[changed], rows[changed])
        self._known[table] = (ids.copy(), rows.copy(), digests)
        return row_tags(digests, seed)


def tag_products(words: Words, tags: Bytes) -> Bytes:
    """(k, 32) bytes: what the products of both servers have to add up to, for these words."""
    factors = np.ascontiguousarray(tags).view("<u8")
    return carryless(words.reshape(-1), factors).view(np.uint8)
