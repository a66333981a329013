"""A Merkle tree over digests: one root for all, and a short path that proves one of them.

The shape is that of RFC 6962, 2.1: pairs from the left, and a node without a neighbour moves up
unchanged. Leaves, inner nodes and the root are hashed under labels of their own, and the number of
leaves is part of the root. So an inner node is never taken for a leaf, a number and a size give
exactly one length of a path, and a number that is not below the size proves nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import CryptoError, MisuseError

DIGEST_BYTES: Final = 32
MAX_LEAVES: Final = 2**32 - 1
MAX_PATH: Final = 32
"""The most digests in a path, for `MAX_LEAVES`."""

_LEAF: Final = Label.MERKLE_LEAF.encode()
_NODE: Final = Label.MERKLE_NODE.encode()

Path = tuple[bytes, ...]
"""The neighbours on the way from a leaf to the root, lowest first."""


class MerkleTree:
    """All levels of a tree: 64 bytes a leaf, about 1 us each to build."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        if len(digests) > MAX_LEAVES:
            raise MisuseError(f"a tree of {len(digests)} leaves; {MAX_LEAVES} are the most")
        if any(len(each) != DIGEST_BYTES for each in digests):
            raise MisuseError(f"a tree's leaves are digests of {DIGEST_BYTES} bytes")
        self._levels = [[_leaf(each) for each in digests]]
        while len(below := self._levels[-1]) > 1:
            pairs = zip(below[::2], below[1::2], strict=False)
            level = [_node(left, right) for left, right in pairs]
            if len(below) % 2:
                level.append(below[-1])
            self._levels.append(level)

    @property
    def size(self) -> int:
        return len(self._levels[0])

    @property
    def root(self) -> bytes:
        return _root(self.size, self._levels[-1][0] if self.size else b"")

    def path(self, number: int) -> Path:
        """What proves that leaf `number` is in this tree."""
        if not 0 <= number < self.size:
            raise MisuseError(f"leaf {number} of a tree with {self.size}")
        found = []
        for level in self._levels[:-1]:
            if number ^ 1 < len(level):
                found.append(level[number ^ 1])
            number //= 2
        return tuple(found)


def path_length(number: int, size: int) -> int:
    """How many digests the path of leaf `number` has in a tree of `size` leaves."""
    _check_number(number, size)
    length, last = 0, size - 1
    while last:
        length += number ^ 1 <= last  # the last one of an odd level has no neighbour
        number, last = number // 2, last // 2
    return length


def root_from(digest: bytes, number: int, size: int, path: Sequence[bytes]) -> bytes:
    """The root of the tree of `size` leaves in which this path leads up from leaf `number`.

    RFC 9162, 2.1.3.2. A path of another length than number and size give is a `CryptoError`.
    """
    if len(path) != path_length(number, size):
        raise CryptoError(f"a path of {len(path)} digests for leaf {number} of {size}")
    if len(digest) != DIGEST_BYTES or any(len(each) != DIGEST_BYTES for each in path):
        raise CryptoError(f"a path is made of digests of {DIGEST_BYTES} bytes")
    node, last, neighbours = _leaf(digest), size - 1, iter(path)
    while last:
        if number % 2:
            node = _node(next(neighbours), node)
        elif number < last:
            node = _node(node, next(neighbours))
        number, last = number // 2, last // 2
    return _root(size, node)


def is_leaf(root: bytes, digest: bytes, number: int, size: int, path: Sequence[bytes]) -> bool:
    """Whether `digest` is leaf `number` of the tree with this root and size; False for any bytes
    that prove nothing."""
    try:
        return root_from(digest, number, size, path) == root
    except CryptoError:
        return False


def _check_number(number: int, size: int) -> None:
    if not 0 <= number < size <= MAX_LEAVES:
        raise CryptoError(f"leaf {number} of a tree with {size}")


def _leaf(digest: bytes) -> bytes:
    return hashlib.sha256(_LEAF + digest).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()


def _root(size: int, top: bytes) -> bytes:
    return hashlib.sha256(encode_context(Label.MERKLE_ROOT, size, top)).digest()
