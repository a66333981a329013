"""Ring: vectors over Z_2^b, the group of ordinary secure sums, for b from 8 to 128.

Words are stored in the smallest unsigned type that holds b bits, so most sums wrap for free and one
`&` at the end reduces them. Above 64 bits a word is two 64-bit limbs, low limb first.

On the wire a word takes exactly b bits: `pack` writes word i at bits [i*b, (i+1)*b) of one
little-endian bit stream (bit k of the stream is bit k % 8 of byte k // 8). The bit stream is shared
with `Field`, whose words travel the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.kernel.backend import packed_size
from tessera.errors import ConfigError, MisuseError

if TYPE_CHECKING:  # group.py imports this module for `group_from_name`
    from tessera.crypto.group import Group, Words

LIMB: Final = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Ring:
    """Z_2^bits."""

    bits: int

    def __post_init__(self) -> None:
        if not 8 <= self.bits <= 128:
            raise ConfigError(f"ring: {self.bits} bits per word; 8 to 128 are supported")

    @property
    def name(self) -> str:
        return f"z2^{self.bits}"

    @property
    def order(self) -> int:
        return 1 << self.bits

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return storage(self.bits)

    @property
    def word_bytes(self) -> int:
        return 16 if self.limbs else self.dtype.itemsize

    @property
    def limbs(self) -> tuple[int, ...]:
        return (2,) if self.bits > 64 else ()

    @property
    def is_full(self) -> bool:
        """Whether the stored word has no bits to spare, so that arithmetic reduces by itself."""
        return self.bits == 8 * self.word_bytes

    def zeros(self, shape: int | tuple[int, ...]) -> Words:
        return zeros_of(self, shape)

    def from_ints(self, values: Iterable[int] | npt.NDArray[Any]) -> Words:
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
            low = values.astype(self.dtype)  # a cast between integers is a reduction mod 2^width
            if self.limbs:
                sign = np.where(values < 0, LIMB.type(2**64 - 1), LIMB.type(0))
                low = np.stack([low, sign.astype(LIMB)], axis=-1)
            self.reduce(low)
            return low
        flat, shape = integers_of(values)
        reduced = [v & (self.order - 1) for v in flat]
        if not self.limbs:
            return np.array(reduced, dtype=self.dtype).reshape(shape)
        halves = [(v & (2**64 - 1), v >> 64) for v in reduced]
        return np.array(halves, dtype=LIMB).reshape(*shape, 2)

    def to_ints(self, words: Words) -> list[int]:
        require_words(self, words)
        if not self.limbs:
            return [int(v) for v in words.ravel().tolist()]
        halves = words.reshape(-1, 2).tolist()
        return [low | high << 64 for low, high in halves]

    def add(self, a: Words, b: Words) -> Words:
        require_words(self, a)
        require_words(self, b)
        total = np.add(a, b)
        if self.limbs:
            total[..., 1] += total[..., 0] < a[..., 0]  # the carry out of the low limb
        self.reduce(total)
        return total

    def sub(self, a: Words, b: Words) -> Words:
        require_words(self, a)
        require_words(self, b)
        difference = np.subtract(a, b)
        if self.limbs:
            difference[..., 1] -= a[..., 0] < b[..., 0]  # the borrow of the low limb
        self.reduce(difference)
        return difference

    def neg(self, a: Words) -> Words:
        return self.sub(np.zeros_like(a), a)

    def iadd(self, acc: Words, x: Words) -> None:
        if self.limbs:
            acc[...] = self.add(acc, x)
            return
        require_words(self, acc)
        require_words(self, x)
        np.add(acc, x, out=acc)
        self.reduce(acc)

    def reduce(self, words: Words) -> None:
        """Drop, in place, the bits above `bits`: sums may be taken unreduced and end here."""
        if self.is_full:
            return
        top = words[..., 1] if self.limbs else words
        np.bitwise_and(top, self._top_mask, out=top)

    def pack(self, words: Words) -> bytes:
        return bytes(self.packed(words))

    def packed(self, words: Words) -> memoryview:
        if not self.contains(words):
            raise MisuseError(f"{self.name}: pack was given words that are not reduced")
        return pack_bits(words, self.word_bytes, self.bits)

    def unpack(self, data: bytes | memoryview, count: int) -> Words:
        flat = unpack_bits(data, count, self.word_bytes, self.bits)
        return flat.reshape(count, *self.limbs)

    def add_packed(self, acc: Words, data: bytes | memoryview) -> None:
        require_words(self, acc)
        count = acc.size // prod(self.limbs)
        if self.bits == 8 * self.word_bytes:
            self.iadd(acc, self.unpack(data, count).reshape(acc.shape))
            return
        raw = checked_packed(data, count, self.bits)
        kernel.active().add_packed(acc, raw, self.word_bytes, self.bits)
        self.reduce(acc)

    def contains(self, words: Words) -> bool:
        if words.dtype != self.dtype or (self.limbs and words.shape[-1:] != self.limbs):
            return False
        if self.is_full or words.size == 0:
            return True
        top = words[..., 1] if self.limbs else words
        return bool(top.max() <= self._top_mask)

    @property
    def _top_mask(self) -> np.unsignedinteger[Any]:
        """The bits that the highest limb may use."""
        return self.dtype.type((1 << (self.bits - 64 * len(self.limbs))) - 1)


def storage(bits: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest unsigned type for a limb of a word of this many bits."""
    for width in (8, 16, 32):
        if bits <= width:
            return np.dtype(f"<u{width // 8}")
    return LIMB


def zeros_of(group: Group, shape: int | tuple[int, ...]) -> Words:
    """An array of zeros of this shape, limbs appended."""
    lead = (shape,) if isinstance(shape, int) else shape
    return np.zeros((*lead, *group.limbs), dtype=group.dtype)


def integers_of(
    values: Iterable[int] | npt.NDArray[Any],
) -> tuple[list[int], tuple[int, ...]]:
    """Python integers and the shape they came in; anything else is refused."""
    if isinstance(values, np.ndarray):
        return [operator.index(v) for v in values.ravel().tolist()], values.shape
    flat = [operator.index(v) for v in values]
    return flat, (len(flat),)


def require_words(group: Group, words: Words) -> None:
    """Refuse an array of another group's type: numpy would promote it and wrap elsewhere."""
    if words.dtype != group.dtype or (group.limbs and words.shape[-1:] != group.limbs):
        raise MisuseError(
            f"{group.name}: words are {group.dtype} with limbs {group.limbs}, "
            f"not {words.dtype} of shape {words.shape}"
        )


def pack_bits(words: Words, word_bytes: int, bits: int) -> memoryview:
    """Words below 2^bits as a bit stream of exactly ceil(count * bits / 8) bytes."""
    flat = np.ascontiguousarray(words).reshape(-1)
    if bits == 8 * word_bytes:
        return flat.view(np.uint8).data
    return kernel.active().pack(flat, word_bytes, bits).data


def unpack_bits(data: bytes | memoryview, count: int, word_bytes: int, bits: int) -> Words:
    """Invert `pack_bits`, flat; ValueError on any length but the exact one and on padding set."""
    raw = checked_packed(data, count, bits)
    if bits == 8 * word_bytes:
        return raw.view(storage(bits)).copy()
    return kernel.active().unpack(raw, count, word_bytes, bits)


def checked_packed(data: bytes | memoryview, count: int, bits: int) -> npt.NDArray[np.uint8]:
    """What `pack_bits` made of so many words; ValueError if it cannot have."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if count < 0 or raw.size != packed_size(count, bits):
        raise ValueError(
            f"{count} words of {bits} bits are {packed_size(count, bits)} bytes, not {raw.size}"
        )
    used = count * bits % 8
    if used and raw[-1] >> used:
        raise ValueError(f"{count} words of {bits} bits end in padding that is not zero")
    return raw
