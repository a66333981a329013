"""Reference: the kernel in NumPy and `cryptography`, the twin of every function in kernel.c.

It runs everywhere and is what the native paths are compared with. It stays within 1.6 times the
pure AES-CTR time by writing key stream into one buffer that fits the L2 cache and adding it in
place; contexts are kept across chunks, so each stream is set up once.

Packing goes by columns: `period` words fill whole 64-bit lanes, so that every period has the same
layout, and numpy shifts one column of all periods at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR, ECB

from tessera.crypto.kernel.backend import BLOCK, KEY_BYTES, NONCE_BYTES, Array, Backend, Bytes
from tessera.crypto.kernel.digests import ReferenceDigests
from tessera.crypto.kernel.noise import ReferenceNoise
from tessera.crypto.kernel.points_reference import ReferencePoints
from tessera.crypto.kernel.sets import ReferenceSets

CHUNK: Final = 3 << 16  # bytes of key stream at once; 128 to 256 kB measured alike
_ZEROS: Final = bytes(CHUNK)
_LIMB: Final = np.dtype("<u8")
_WORDS_PER_PASS: Final = 1 << 16  # packed at once; more leave the L2 cache, fewer are all overhead


class Reference(ReferencePoints, ReferenceSets, ReferenceDigests, ReferenceNoise, Backend):
    """The portable backend."""

    name = "reference"

    def aes_limit(self, blocks: int) -> None:
        buffer = np.empty(CHUNK + BLOCK, dtype=np.uint8)
        context = _counter_mode(bytes(KEY_BYTES), bytes(NONCE_BYTES), 0)
        for done in range(0, blocks * BLOCK, CHUNK):
            _fill(context, buffer, min(CHUNK, blocks * BLOCK - done))

    def _keystream(self, key: bytes, nonce: bytes, first_block: int, out: Bytes) -> None:
        context = _counter_mode(key, nonce, first_block)
        flat = out.reshape(-1)
        buffer = np.empty(CHUNK + BLOCK, dtype=np.uint8)
        for begin in range(0, flat.size, CHUNK):
            size = min(CHUNK, flat.size - begin)
            flat[begin : begin + size] = _fill(context, buffer, size)

    def _accumulate(
        self,
        acc: Array,
        word_bytes: int,
        keys: bytes,
        nonces: bytes,
        signs: npt.NDArray[np.int8],
        start_word: int,
    ) -> None:
        first_block, skip = divmod(start_word * word_bytes, BLOCK)
        buffer = np.empty(CHUNK + BLOCK, dtype=np.uint8)
        contexts = [
            _counter_mode(_slot(keys, KEY_BYTES, k), _slot(nonces, NONCE_BYTES, k), first_block)
            for k in range(signs.size)
        ]
        for context in contexts:
            _fill(context, buffer, skip)  # the part of the first block before the first word
        flat = acc.reshape(-1)
        step = CHUNK // flat.itemsize
        for begin in range(0, flat.size, step):
            part = flat[begin : begin + step]
            for context, sign in zip(contexts, signs.tolist(), strict=True):
                words = _fill(context, buffer, part.nbytes).view(flat.dtype)
                _add_words(part, words, word_bytes, sign)

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
    ) -> None:
        rows = acc.reshape(-1, row_bytes // acc.itemsize)
        row_blocks = -(-row_bytes // BLOCK)
        at_once = max(1, CHUNK // (row_blocks * BLOCK))
        for k, sign in enumerate(signs.tolist()):
            # one context per stream and one call for many rows: a context per row costs 5 us each
            key, nonce = _slot(keys, KEY_BYTES, k), _slot(nonces, NONCE_BYTES, k)
            context = Cipher(AES128(key), ECB()).encryptor()
            for begin in range(int(bounds[k]), int(bounds[k + 1]), at_once):
                chosen = slice(begin, min(begin + at_once, int(bounds[k + 1])))
                stream = _encrypt_rows(context, nonce, positions[chosen], row_blocks)
                words = np.ascontiguousarray(stream[:, :row_bytes]).view(acc.dtype)
                touched = rows[index[chosen]]
                _add_words(touched.reshape(-1), words.reshape(-1), word_bytes, sign)
                rows[index[chosen]] = touched

    def _pack(self, words: Array, word_bytes: int, bits: int, out: Bytes) -> None:
        layout = _Layout.of(bits)
        size = layout.limbs  # per period
        for first in range(0, words.size, layout.periods_per_pass * size):
            part = words[first : first + layout.periods_per_pass * size]
            periods = -(-part.size // size)
            limbs = np.zeros(periods * size, dtype=_LIMB)
            limbs[: part.size] = part
            width = bits
            while width < layout.glued:
                limbs = limbs[0::2] | limbs[1::2] << _LIMB.type(width)
                width *= 2
            columns = np.ascontiguousarray(limbs.reshape(periods, -1).T)
            lanes = np.zeros((layout.lanes, periods), dtype=_LIMB)
            for column, (lane, shift, used) in zip(columns, layout.places, strict=True):
                lanes[lane] |= column << _LIMB.type(shift)
                if shift + used > 64:
                    lanes[lane + 1] |= column >> _LIMB.type(64 - shift)
            packed = np.ascontiguousarray(lanes.T).view(np.uint8).reshape(-1)
            begin = first // size * layout.lanes * 8
            end = min(out.size, begin + packed.size)
            out[begin:end] = packed[: end - begin]

    def _add_packed(self, data: Bytes, word_bytes: int, bits: int, words: Array) -> None:
        more = self.unpack(data, words.nbytes // word_bytes, word_bytes, bits)
        flat = words.reshape(-1)
        flat += more
        if word_bytes == 2 * _LIMB.itemsize:
            flat[1::2] += flat[::2] < more[::2]  # the carry out of the low limb

    def _unpack(self, data: Bytes, word_bytes: int, bits: int, words: Array) -> None:
        layout = _Layout.of(bits)
        size = layout.lanes * 8  # per period
        for first in range(0, data.size, layout.periods_per_pass * size):
            part = data[first : first + layout.periods_per_pass * size]
            periods = -(-part.size // size)
            stream = np.zeros(periods * size, dtype=np.uint8)
            stream[: part.size] = part
            lanes = np.ascontiguousarray(stream.view(_LIMB).reshape(periods, -1).T)
            columns = np.empty((len(layout.places), periods), dtype=_LIMB)
            for column, (lane, shift, used) in zip(columns, layout.places, strict=True):
                np.right_shift(lanes[lane], _LIMB.type(shift), out=column)
                if shift + used > 64:
                    column |= lanes[lane + 1] << _LIMB.type(64 - shift)
                column &= _LIMB.type((1 << used) - 1)
            limbs = columns.T.reshape(-1)
            width = layout.glued
            while width > bits:
                width //= 2
                halves = np.empty(2 * limbs.size, dtype=_LIMB)
                np.bitwise_and(limbs, _LIMB.type((1 << width) - 1), out=halves[0::2])
                np.right_shift(limbs, _LIMB.type(width), out=halves[1::2])
                limbs = halves
            begin = first // size * layout.limbs
            end = min(words.size, begin + limbs.size)
            words[begin:end] = limbs[: end - begin]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the words of one period go, for one width."""

    limbs: int  # stored limbs per period: its words, or twice as many above 64 bits
    lanes: int  # 64-bit lanes that these fill
    glued: int  # width after neighbours have been glued together as long as two fit into 64 bits
    places: tuple[tuple[int, int, int], ...]  # (lane, shift, width) of each glued limb

    @classmethod
    def of(cls, bits: int) -> _Layout:
        glued = bits
        while 2 * glued <= 64:
            glued *= 2
        period = 64 // gcd(glued, 64)  # in glued words
        starts = [
            (word * glued + offset, min(64, glued - offset))
            for word in range(period)
            for offset in range(0, glued, 64)
        ]
        places = tuple((start // 64, start % 64, used) for start, used in starts)
        return cls(len(places) * (glued // bits), period * glued // 64, glued, places)

    @property
    def periods_per_pass(self) -> int:
        return max(1, _WORDS_PER_PASS // self.limbs)


def _counter_mode(key: bytes, nonce: bytes, first_block: int) -> CipherContext:
    counter = nonce + first_block.to_bytes(8, "big")
    return Cipher(AES128(key), CTR(counter)).encryptor()


def _fill(context: CipherContext, buffer: Bytes, size: int) -> Bytes:
    """The next `size` <= CHUNK bytes of the stream, in (a view of) the buffer."""
    context.update_into(memoryview(_ZEROS)[:size], buffer.data)
    return buffer[:size]


def _encrypt_rows(
    context: CipherContext, nonce: bytes, positions: npt.NDArray[np.uint64], row_blocks: int
) -> Bytes:
    """The key stream of these rows, one per line, whole blocks."""
    counters = np.empty((positions.size, row_blocks, 2), dtype=">u8")
    counters[..., 0] = int.from_bytes(nonce, "big")
    first = positions * np.uint64(row_blocks)
    counters[..., 1] = first[:, np.newaxis] + np.arange(row_blocks, dtype=np.uint64)
    stream = np.empty(counters.nbytes + BLOCK, dtype=np.uint8)
    context.update_into(counters.view(np.uint8).data.cast("B"), stream.data)
    return stream[: counters.nbytes].reshape(positions.size, row_blocks * BLOCK)


def _add_words(acc: npt.NDArray[Any], words: npt.NDArray[Any], word_bytes: int, sign: int) -> None:
    """acc += sign * words in place, both flat; 16-byte words carry from limb to limb."""
    operation = np.add if sign > 0 else np.subtract
    if word_bytes < 16:
        operation(acc, words, out=acc)
        return
    low, high = acc[0::2], acc[1::2]
    before = low.copy()
    operation(low, words[0::2], out=low)
    operation(high, words[1::2], out=high)
    carried = low < before if sign > 0 else low > before
    operation(high, carried, out=high, casting="unsafe")


def _slot(joined: bytes, size: int, k: int) -> bytes:
    return joined[k * size : (k + 1) * size]
