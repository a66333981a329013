"""Where masks come from: streams of pairs and of clients, and the masks that hold a row back."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tessera.crypto.group import Group
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label, Stream
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import MisuseError
from tessera.ids import ClientId, StageId, TableId


def seed_commitment(seed: Secret, context: bytes, owner: ClientId, stage: StageId) -> bytes:
    """Advertised beforehand, so that a seed recovered from wrong shares is recognised."""
    return seed.derive(Label.COMMITMENT, context, owner, stage).reveal()


def pair_secret(
    own: AgreementKey,
    peer_key: bytes,
    context: bytes,
    pair: tuple[ClientId, ClientId],
    stage: StageId,
    bound: bytes,
) -> Secret:
    """The mask secret of two clients in one stage; the same whichever of them computes it.

    `bound` is the digest of what the server sent to both (`transcript.pair_binding`): two clients
    that were sent different things have different secrets.
    """
    return own.agree(peer_key, Label.PAIR_SECRET, context, stage, min(pair), max(pair), bound)


def mask_sign(me: ClientId, peer: ClientId) -> int:
    """Of two clients the one with the smaller id adds their mask, the other subtracts it."""
    return 1 if me < peer else -1


def dense_stream(key: Secret, label: Label) -> Stream:
    """The stream of a pair secret (PAIR_MASK) or a seed (SELF_MASK) over the dense words."""
    return Stream.of(key, label, "dense")


def row_stream(key: Secret, label: Label, table: TableId) -> Stream:
    """The same over the rows of a table, addressed by row position."""
    return Stream.of(key, label, "rows", table)


# --- hold-back masks ------------------------------------------------------------------------------
#
# A row is opened only if its group still meets the quorum after dropouts.
#
# Dropouts after masking shrink a row's group, and with the dropped members' keys the server opens
# what is left, however few. With `strict_quorum` every client adds one more mask to each of its
# rows, under a key for that row alone which is not shared. After the survivor list each survivor
# reveals the keys of those rows only whose surviving group still meets its quorum. A row with a
# member that does not answer is lost, not opened. It costs 16 bytes a row on the way up.
#
# A row's key is AES of its position under a key derived from the round's root: revealing some says
# nothing about the others. Its mask is the Matyas-Meyer-Oseas expansion AES_T(k + c) + k + c (+ is
# xor) under a public key T of this client and stage, so that all rows of a client take one AES call
# instead of one key schedule each.

KEY_BYTES: Final = 16
Rows = npt.NDArray[np.uint64]
Keys = npt.NDArray[np.uint8]
"""One key of 16 bytes a row, shape (rows, 16)."""


def hold_back_keys(secret: Secret, positions: Rows) -> Keys:
    """The keys of these rows; `secret` is this client's for one stage and table, 16 bytes."""
    blocks = np.zeros((len(positions), 2), dtype="<u8")
    blocks[:, 0] = positions
    return _encrypted(secret.reveal(), blocks.view(np.uint8).reshape(-1, KEY_BYTES))


def hold_back_tweak(context: bytes, owner: ClientId, stage: StageId, table: TableId) -> bytes:
    """The public AES key T under which one client's row keys expand in one stage and table."""
    named = encode_context(Label.HOLD_BACK_TWEAK, context, owner, stage, table)
    return hashlib.sha256(named).digest()[:KEY_BYTES]


def hold_back_masks(group: Group, keys: Keys, public: bytes, width: int) -> npt.NDArray[Any]:
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


def unpacked_keys(data: bytes, rows: int) -> Keys | None:
    """Keys as they travel, or None if they are not this many."""
    if len(data) != rows * KEY_BYTES:
        return None
    return np.frombuffer(data, dtype=np.uint8).reshape(rows, KEY_BYTES)


def _encrypted(key: bytes, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    # ECB: every block is distinct by construction, and is a position or a key, not data.
    stream = Cipher(AES(key), ECB()).encryptor().update(np.ascontiguousarray(blocks).tobytes())
    return np.frombuffer(stream, dtype=np.uint8).reshape(-1, KEY_BYTES)
