"""Backend: the kernel's interface, and the checks before every pointer.

The public methods check lengths, types and contiguity and then call the implementation, so that
neither the C code nor its NumPy twin has to, and both refuse the same arguments.

The key stream of (key, nonce) is AES-128 in counter mode (NIST SP 800-38A, 6.5): block c is
AES_key(nonce || c), the nonce 8 bytes and c 8 bytes big-endian. Word i of width w is the bytes
[i*w, (i+1)*w) of the stream, little-endian.

A packed word takes `bits` bits: word i is at bits [i*bits, (i+1)*bits) of one little-endian bit
stream, in which bit k is bit k % 8 of byte k // 8.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.digests import DigestKernel
from tessera.crypto.kernel.noise import NoiseKernel
from tessera.crypto.kernel.points import PointKernel
from tessera.crypto.kernel.sets import SetKernel
from tessera.errors import MisuseError

BLOCK: Final = 16
KEY_BYTES: Final = 16
NONCE_BYTES: Final = 8
WORD_BYTES: Final = (1, 2, 4, 8, 16)
MAX_BLOCKS: Final = 1 << 64

Array = npt.NDArray[np.unsignedinteger[Any]]
Bytes = npt.NDArray[np.uint8]


class Backend(PointKernel, SetKernel, DigestKernel, NoiseKernel):
    """Key streams, sums of them modulo 2^(8 * word_bytes), and words packed to the bit.

    What it does for point functions is in points.py, for sets of indices in sets.py, and for noise
    in noise.py.
    """

    name: str

    def keystream(self, key: bytes, nonce: bytes, first_block: int, out: Bytes) -> None:
        """Fill `out` with the stream's bytes from block `first_block` on."""
        _check_streams(key, nonce, 1)
        _check_array(out, np.dtype(np.uint8), written=True)
        if not 0 <= first_block <= MAX_BLOCKS - -(-out.size // BLOCK):
            raise MisuseError("keystream: the counter has 64 bits")
        if out.size:
            self._keystream(key, nonce, first_block, out)

    def accumulate(
        self,
        acc: Array,
        word_bytes: int,
        keys: bytes,
        nonces: bytes,
        signs: Sequence[int],
        start_word: int,
    ) -> None:
        """acc += sum over streams k of signs[k] * (words start_word, start_word + 1, ... of k).

        `keys` and `nonces` are those of all streams, one after the other. Words of 16 bytes are
        two 64-bit limbs, low limb first.
        """
        _check_words(acc, word_bytes)
        _check_streams(keys, nonces, len(signs))
        end = start_word * word_bytes + acc.nbytes
        if start_word < 0 or -(-end // BLOCK) > MAX_BLOCKS:
            raise MisuseError("accumulate: the counter has 64 bits")
        if acc.size and signs:
            self._accumulate(acc, word_bytes, keys, nonces, _as_signs(signs), start_word)

    def accumulate_rows(
        self,
        acc: Array,
        width: int,
        word_bytes: int,
        keys: bytes,
        nonces: bytes,
        signs: Sequence[int],
        counts: Sequence[int],
        index: npt.NDArray[np.int64],
        positions: npt.NDArray[np.uint64],
    ) -> None:
        """acc[index[i]] += sign * (the stream's row positions[i]), for all rows of all streams.

        Stream k owns the next counts[k] entries of `index` and `positions`, with no repeats in its
        part of `index`. `acc` holds rows of `width` words; row j of a stream begins at its block
        j * ceil(width * word_bytes / 16).
        """
        _check_words(acc, word_bytes)
        _check_streams(keys, nonces, len(signs))
        row_bytes = width * word_bytes
        if width < 1 or acc.nbytes % row_bytes:
            raise MisuseError(f"accumulate_rows: {acc.nbytes} bytes are not rows of {row_bytes}")
        for array, dtype in ((index, np.int64), (positions, np.uint64)):
            if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
                raise MisuseError("accumulate_rows: index and positions are flat 64-bit arrays")
        if len(counts) != len(signs) or any(count < 0 for count in counts):
            raise MisuseError("accumulate_rows: one count of rows for each stream")
        if not sum(counts) == index.size == positions.size:
            raise MisuseError("accumulate_rows: counts, index and positions do not fit together")
        if index.size == 0:
            return
        rows, row_blocks = acc.nbytes // row_bytes, -(-row_bytes // BLOCK)
        if index.min() < 0 or index.max() >= rows:
            raise MisuseError(f"accumulate_rows: an index is outside the {rows} rows")
        if (int(positions.max()) + 1) * row_blocks > MAX_BLOCKS:
            raise MisuseError("accumulate_rows: a row position is over the 64-bit counter")
        bounds = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=bounds[1:])
        _check_distinct(index, bounds)
        self._accumulate_rows(
            acc, row_bytes, word_bytes, keys, nonces, _as_signs(signs), bounds, index, positions
        )

    def pack(self, words: Array, word_bytes: int, bits: int) -> Bytes:
        """Words below 2^bits as exactly ceil(count * bits / 8) bytes, zero bits at the end.

        The caller knows that they are below: a higher bit would run into the next word.
        """
        _check_words(words, word_bytes, written=False)
        _check_bits(bits, word_bytes)
        out = np.empty(packed_size(words.nbytes // word_bytes, bits), dtype=np.uint8)
        if out.size:
            self._pack(words.reshape(-1), word_bytes, bits, out)
        return out

    def unpack(self, data: Bytes, count: int, word_bytes: int, bits: int) -> Array:
        """Invert `pack`: `count` words, flat (16-byte words as two limbs each)."""
        _check_bits(bits, word_bytes)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
            raise MisuseError("unpack: packed words are a flat array of bytes")
        if not data.flags.c_contiguous or count < 0 or data.size != packed_size(count, bits):
            raise MisuseError(f"unpack: {data.size} bytes are not {count} words of {bits} bits")
        limb_bytes = min(word_bytes, 8)
        words = np.empty(count * word_bytes // limb_bytes, dtype=np.dtype(f"<u{limb_bytes}"))
        if count:
            self._unpack(data, word_bytes, bits, words)
        return words

    def add_packed(self, words: Array, data: Bytes, word_bytes: int, bits: int) -> None:
        """words += what `unpack` would make of the data; sums may go beyond `bits` bits."""
        _check_words(words, word_bytes)
        _check_bits(bits, word_bytes)
        count = words.nbytes // word_bytes
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
            raise MisuseError("add_packed: packed words are a flat array of bytes")
        if not data.flags.c_contiguous or data.size != packed_size(count, bits):
            raise MisuseError(f"add_packed: {data.size} bytes are not {count} words of {bits} bits")
        if count:
            self._add_packed(data, word_bytes, bits, words)

    @abstractmethod
    def aes_limit(self, blocks: int) -> None:
        """Encrypt this many counter blocks and drop them: the machine's AES speed, for benchmarks.

        No memory is read or written beyond a buffer in the first-level cache. The caller times it.
        """

    @abstractmethod
    def _keystream(self, key: bytes, nonce: bytes, first_block: int, out: Bytes) -> None: ...

    @abstractmethod
    def _accumulate(
        self,
        acc: Array,
        word_bytes: int,
        keys: bytes,
        nonces: bytes,
        signs: npt.NDArray[np.int8],
        start_word: int,
    ) -> None: ...

    @abstractmethod
    def _accumulate_rows(
        self,
        acc: Array,
        row_bytes: int,
        word_bytes: int,
        keys: bytes,
        nonces: bytes,
        signs: npt.NDArray[np.int8],
        bounds: npt.NDArray[np.int64],
        index: npt.NDArray[np.int64],
        positions: npt.NDArray[np.uint64],
    ) -> None: ...

    @abstractmethod
    def _pack(self, words: Array, word_bytes: int, bits: int, out: Bytes) -> None: ...

    @abstractmethod
    def _unpack(self, data: Bytes, word_bytes: int, bits: int, words: Array) -> None: ...

    @abstractmethod
    def _add_packed(self, data: Bytes, word_bytes: int, bits: int, words: Array) -> None: ...


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` words of `bits` bits."""
    return -(-count * bits // 8)


def _check_streams(keys: bytes, nonces: bytes, count: int) -> None:
    if not isinstance(keys, bytes) or not isinstance(nonces, bytes):
        raise MisuseError("keys and nonces are bytes")
    if len(keys) != count * KEY_BYTES or len(nonces) != count * NONCE_BYTES:
        raise MisuseError(
            f"{count} streams have {count * KEY_BYTES} bytes of keys and {count * NONCE_BYTES} of "
            f"nonces, not {len(keys)} and {len(nonces)}"
        )


def _check_array(array: npt.NDArray[Any], dtype: np.dtype[Any], *, written: bool) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise MisuseError(f"the kernel works on an array of {dtype}")
    if not array.flags.c_contiguous or (written and not array.flags.writeable):
        raise MisuseError("the kernel works on a contiguous array, and writes to a writeable one")


def _check_words(words: Array, word_bytes: int, *, written: bool = True) -> None:
    if word_bytes not in WORD_BYTES:
        raise MisuseError(f"words have {WORD_BYTES} bytes, not {word_bytes}")
    _check_array(words, np.dtype(f"<u{min(word_bytes, 8)}"), written=written)
    if words.nbytes % word_bytes:
        raise MisuseError("a 16-byte word is two limbs; the array ends within one")


def _check_bits(bits: int, word_bytes: int) -> None:
    fewest = 65 if word_bytes == 16 else 1  # both limbs are in use, or there would be one
    if word_bytes not in WORD_BYTES or not fewest <= bits <= 8 * word_bytes:
        raise MisuseError(f"words of {word_bytes} bytes are not packed to {bits} bits")


def _check_distinct(index: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64]) -> None:
    """No row twice in one stream's part: there the twins would differ, `a[i] += x` adds once."""
    rising = index[1:] > index[:-1]
    inner = bounds[1:-1]
    rising[inner[(inner > 0) & (inner < index.size)] - 1] = True  # where one part meets the next
    if rising.all():
        return  # sorted parts, which is what callers have, need no more
    for begin, end in pairwise(bounds.tolist()):
        part = index[begin:end]
        if np.unique(part).size != part.size:
            raise MisuseError("accumulate_rows: an index is repeated within one stream")


def _as_signs(signs: Sequence[int]) -> npt.NDArray[np.int8]:
    if any(sign not in (1, -1) for sign in signs):
        raise MisuseError("a sign is +1 or -1")
    return np.array(signs, dtype=np.int8)
