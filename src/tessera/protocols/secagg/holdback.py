"""Hold-back masks: a row is opened only if its group still meets the quorum after dropouts.

Dropouts after masking shrink a row's group, and with the dropped members' keys the server opens
what is left, however few. With `strict_quorum` every client adds one more mask to each of its rows,
under a key for that row alone which is not shared. After the survivor list each survivor
reveals the keys of those rows only whose surviving group still meets its quorum. A row with a
member that does not answer is lost, not opened. It costs 16 bytes a row on the way up.

A row's key is AES of its position under a key derived from the round's root: revealing some says
nothing about the others. Its mask is the Matyas-Meyer-Oseas expansion AES_T(k + c) + k + c (+ is
xor) under a public key T of this client and stage, so that all rows of a client take one AES call
instead of one key schedule each.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tessera.crypto.group import Group
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import MisuseError
from tessera.ids import ClientId, StageId, TableId

KEY_BYTES: Final = 16
Rows = npt.NDArray[np.uint64]
Keys = npt.NDArray[np.uint8]
"""One key of 16 bytes a row, shape (rows, 16)."""


def row_keys(secret: Secret, positions: Rows) -> Keys:
    """The keys of these rows; `secret` is this client's for one stage and table, 16 bytes."""
    blocks = np.zeros((len(positions), 2), dtype="<u8")
    blocks[:, 0] = positions
    return _encrypted(secret.reveal(), blocks.view(np.uint8).reshape(-1, KEY_BYTES))


def tweak(context: bytes, owner: ClientId, stage: StageId, table: TableId) -> bytes:
    """The public AES key T under which one client's row keys expand in one stage and table."""
    named = encode_context(Label.HOLD_BACK_TWEAK, context, owner, stage, table)
    return hashlib.sha256(named).digest()[:KEY_BYTES]


def masks(group: Group, keys: Keys, public: bytes, width: int) -> npt.NDArray[Any]:
    """The rows' masks, shape (rows, width, *limbs)."""
    if not isinstance(group, Ring):
        raise MisuseError("hold-back masks are made in a ring only")
    blocks = -(-width * group.word_bytes // KEY_BYTES)
    counters = np.zeros((blocks, 2), dtype="<u8")
    counters[:, 0] = np.arange(blocks, dtype=np.uint64)
    inputs = keys[:, None, :] ^ counters.view(np.uint8).reshape(1, blocks, KEY_BYTES)
    outputs = _encrypted(public, inputs.reshape(-1, KEY_BYTES)).reshape(inputs.shape) ^ inputs
    words = np.ascontiguousarray(outputs).reshape(len(keys), blocks * KEY_BYTES)
    shape = (len(keys), width, *group.limbs)
    cut = np.ascontiguousarray(words[:, : width * group.word_bytes])
    found = cut.view(group.dtype.newbyteorder("<")).astype(group.dtype).reshape(shape)
    group.reduce(found)
    return found


def unpack(data: bytes, rows: int) -> Keys | None:
    """Keys as they travel, or None if they are not this many."""
    if len(data) != rows * KEY_BYTES:
        return None
    return np.frombuffer(data, dtype=np.uint8).reshape(rows, KEY_BYTES)


def _encrypted(key: bytes, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    # ECB: every block is distinct by construction, and is a position or a key, not data.
    stream = Cipher(AES(key), ECB()).encryptor().update(np.ascontiguousarray(blocks).tobytes())
    return np.frombuffer(stream, dtype=np.uint8).reshape(-1, KEY_BYTES)
