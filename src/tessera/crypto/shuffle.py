"""A keyed permutation of the numbers below n, whatever n is: the swap-or-not shuffle.

Hoang, Morris and Rogaway 2012 (ia.cr/2012/254), Figure 1. Round i has a number K_i below n and a
function F_i to bits. A point x and its partner K_i - x mod n change places if F_i of the larger of
the two is 1. Any point goes forward or back by itself, without a table of the others.

Where the key is a public beacon nothing is secret: what counts is that the order of a few points
is as if drawn from all orders, for whoever arranged the points before the key was known. By the
paper's section 3, q points that were fixed before are at most

    2 n^(3/2) / (r + 2) * ((q + n) / 2n)^(r/2 + 1)

from that (total variation) after r rounds. To find out about one point's neighbours, wherever it
goes, multiply by the n / q groups. 256 rounds keep the product below 2^-40 for all n < 2^32 and
groups of 2 to 256 points, two or more of them (`log2_distance`); ten points take 1 ms.

One extendable hash of key and n gives all K_i (128 bits mod n, so 2^-96 from uniform) and an AES
key; F_i(x) is bit x mod 128 of AES(i, x // 128).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import log2
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import MisuseError

ROUNDS: Final = 256
KEY_BYTES: Final = 32
MAX_SIZE: Final = 2**32 - 1

_BLOCK: Final = 16
_FEW: Final = 64  # up to here whole numbers of Python are faster than arrays
_CHUNK: Final = 1 << 15  # points that go through all rounds at once: they stay in the L2 cache

Points = npt.NDArray[np.int64]


class Shuffle:
    """The permutation of 0 .. size - 1 that this key gives. Not constant time: all is public."""

    def __init__(self, key: bytes, size: int) -> None:
        if len(key) != KEY_BYTES or not 1 <= size <= MAX_SIZE:
            raise MisuseError(f"a shuffle of {size} points under a key of {len(key)} bytes")
        self.size = size
        drawn = hashlib.shake_256(encode_context(Label.SHUFFLE, key, size))
        words = drawn.digest(_BLOCK * (ROUNDS + 1))
        self._offsets = [
            int.from_bytes(words[at : at + _BLOCK], "little") % size
            for at in range(_BLOCK, len(words), _BLOCK)
        ]
        self._cipher = Cipher(algorithms.AES(words[:_BLOCK]), modes.ECB())

    def forward(self, points: Iterable[int] | Points) -> Points:
        """pi of each point."""
        return self._through(points, list(enumerate(self._offsets)))

    def inverse(self, points: Iterable[int] | Points) -> Points:
        """The points that pi sends here: a round is its own inverse, so the rounds backwards."""
        return self._through(points, list(enumerate(self._offsets))[::-1])

    def _through(self, points: Iterable[int] | Points, rounds: list[tuple[int, int]]) -> Points:
        given = points if isinstance(points, np.ndarray) else np.array(list(points), np.int64)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise MisuseError("points to shuffle are a flat array of whole numbers")
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < self.size:
            raise MisuseError(f"a point that is not below {self.size}")
        if given.size <= _FEW:
            return np.array(self._few(given.tolist(), rounds), np.int64)
        found = given.astype(np.int64)
        for begin in range(0, found.size, _CHUNK):
            self._many(found[begin : begin + _CHUNK], rounds)
        return found

    def _few(self, points: list[int], rounds: list[tuple[int, int]]) -> list[int]:
        size, encrypt = self.size, self._cipher.encryptor().update
        for number, offset in rounds:
            partners = [(offset - x) % size for x in points]
            larger = [max(pair) for pair in zip(points, partners, strict=True)]
            tweak = number << 64
            blocks = [(tweak | x >> 7).to_bytes(_BLOCK, "little") for x in larger]
            bits = encrypt(b"".join(blocks))
            points = [
                pair[bits[_BLOCK * i + (x >> 3 & 15)] >> (x & 7) & 1]
                for i, (x, pair) in enumerate(
                    zip(larger, zip(points, partners, strict=True), strict=True)
                )
            ]
        return points

    def _many(self, points: Points, rounds: list[tuple[int, int]]) -> None:
        """In place; the same as `_few` in arrays."""
        encrypt = self._cipher.encryptor().update_into
        blocks = np.empty((points.size, 2), dtype="<u8")
        room = np.empty(_BLOCK * points.size + _BLOCK - 1, dtype=np.uint8)
        first = np.arange(points.size) * _BLOCK
        for number, offset in rounds:
            partners = offset - points
            partners += self.size * (partners < 0)
            larger = np.maximum(points, partners)
            blocks[:, 0], blocks[:, 1] = larger >> 7, number
            encrypt(blocks.data.cast("B"), room.data)
            bits = room[first + (larger >> 3 & 15)] >> (larger & 7).astype(np.uint8)
            np.copyto(points, partners, where=(bits & 1).astype(np.bool_))


def log2_distance(size: int, points: int, *, rounds: int = ROUNDS) -> float:
    """A bound on log2 of how far the group of any one point is from a uniform one.

    The bound above for `points` at a time, times the number of such groups.
    """
    if not 1 <= points <= size:
        raise MisuseError(f"{points} points of {size}")
    mixed = 1 + 1.5 * log2(size) - log2(rounds + 2)
    return mixed + (rounds / 2 + 1) * log2((points + size) / (2 * size)) + log2(size / points)
