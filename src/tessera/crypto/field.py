"""Field: vectors over F_p for a Mersenne prime p = 2^e - 1.

Shamir shares, the sum table of the private union and the checks on point functions need a field.
For a Mersenne prime 2^e = 1, so a product is reduced by adding its high bits to its low ones, and
`e` bits of a key stream are a uniform element unless they are all ones, which happens once in 2^e
(docs/decisions/0003-mersenne-fields.md). 2^61 - 1 is the one for protocols; the small ones make
rare events common enough to test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.ring import (
    LIMB,
    integers_of,
    pack_bits,
    require_words,
    storage,
    unpack_bits,
    zeros_of,
)
from tessera.errors import ConfigError, MisuseError

if TYPE_CHECKING:  # group.py imports this module for `group_from_name`
    from tessera.crypto.group import Words

EXPONENTS: Final = (7, 13, 17, 19, 31, 61)
_LOW32: Final = LIMB.type(2**32 - 1)
_LOW29: Final = LIMB.type(2**29 - 1)


@dataclass(frozen=True, slots=True)
class Field:
    """F_p, p = 2^exponent - 1. Stored words have a spare bit, so one addition cannot wrap."""

    exponent: int

    def __post_init__(self) -> None:
        if self.exponent not in EXPONENTS:
            raise ConfigError(f"field: 2^{self.exponent} - 1 is not one of exponents {EXPONENTS}")

    @property
    def name(self) -> str:
        return f"f2^{self.exponent}-1"

    @property
    def bits(self) -> int:
        return self.exponent

    @property
    def order(self) -> int:
        return (1 << self.exponent) - 1

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return storage(self.exponent)

    @property
    def word_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def limbs(self) -> tuple[int, ...]:
        return ()

    def zeros(self, shape: int | tuple[int, ...]) -> Words:
        return zeros_of(self, shape)

    def from_ints(self, values: Iterable[int] | npt.NDArray[Any]) -> Words:
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
            wide = values.astype(np.uint64 if values.dtype.kind == "u" else np.int64)
            return np.remainder(wide, wide.dtype.type(self.order)).astype(self.dtype)
        flat, shape = integers_of(values)
        return np.array([v % self.order for v in flat], dtype=self.dtype).reshape(shape)

    def to_ints(self, words: Words) -> list[int]:
        require_words(self, words)
        return [int(v) for v in words.ravel().tolist()]

    def add(self, a: Words, b: Words) -> Words:
        require_words(self, a)
        require_words(self, b)
        return self._less_p(np.add(a, b))

    def sub(self, a: Words, b: Words) -> Words:
        require_words(self, a)
        require_words(self, b)
        difference = np.subtract(a, b)  # wraps to a huge number when a < b, and p brings it back
        reduced: Words = np.minimum(difference, difference + self._p)
        return reduced

    def neg(self, a: Words) -> Words:
        return self.sub(np.zeros_like(a), a)

    def iadd(self, acc: Words, x: Words) -> None:
        acc[...] = self.add(acc, x)

    def mul(self, a: Words, b: Words) -> Words:
        """a * b, reduced, in a new array."""
        require_words(self, a)
        require_words(self, b)
        x, y = a.astype(LIMB), b.astype(LIMB)
        product = x * y if self.exponent <= 31 else _mul61(x, y)
        return self.fold(product).astype(self.dtype)

    def pow(self, a: Words, exponent: int) -> Words:
        """a^exponent; a negative exponent inverts. Time depends on the exponent, not on a."""
        if exponent < 0:
            return self.pow(self.inv(a), -exponent)
        require_words(self, a)
        result = np.ones_like(a)
        for bit in bin(exponent)[2:]:
            result = self.mul(result, result)
            if bit == "1":
                result = self.mul(result, a)
        return result

    def inv(self, a: Words) -> Words:
        """1 / a by Fermat: a^(p-2). ZeroDivisionError if any element is zero."""
        if not np.all(a):
            raise ZeroDivisionError(f"{self.name}: zero has no inverse")
        return self.pow(a, self.order - 2)

    def fold(self, wide: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Any 64-bit values to the same residues below p.

        Sums may stay unreduced while they fit 64 bits (`headroom` says how long) and end here.
        """
        p, e = LIMB.type(self.order), LIMB.type(self.exponent)
        for _ in range(-(-64 // self.exponent)):  # each pass takes away about e bits
            wide = (wide & p) + (wide >> e)
        reduced: npt.NDArray[np.uint64] = np.minimum(wide, wide - p)
        return reduced

    @property
    def headroom(self) -> int:
        """How many values of at most p fit into one unsigned 64-bit sum."""
        return (2**64 - 1) // self.order

    def pack(self, words: Words) -> bytes:
        return bytes(self.packed(words))

    def packed(self, words: Words) -> memoryview:
        if not self.contains(words):
            raise MisuseError(f"{self.name}: pack was given words that are not reduced")
        return pack_bits(words, self.word_bytes, self.bits)

    def unpack(self, data: bytes | memoryview, count: int) -> Words:
        words = unpack_bits(data, count, self.word_bytes, self.bits)
        if not self.contains(words):
            raise ValueError(f"{self.name}: a packed word equals the order")
        return words

    def add_packed(self, acc: Words, data: bytes | memoryview) -> None:
        self.iadd(acc, self.unpack(data, acc.size).reshape(acc.shape))

    def contains(self, words: Words) -> bool:
        return words.dtype == self.dtype and (words.size == 0 or bool(words.max() < self._p))

    @property
    def _p(self) -> np.unsignedinteger[Any]:
        return self.dtype.type(self.order)

    def _less_p(self, total: Words) -> Words:
        """Reduce sums below 2p: where total < p the subtraction wraps, and the minimum keeps it."""
        reduced: Words = np.minimum(total, total - self._p)
        return reduced


def _mul61(x: npt.NDArray[np.uint64], y: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """x * y mod 2^61 - 1 up to a fold, x and y below 2^61, from 32-bit halves.

    With x = x1 2^32 + x0 the product is x1 y1 2^64 + (x1 y0 + x0 y1) 2^32 + x0 y0, and modulo p
    2^64 = 8 and 2^61 = 1. The five terms add up to less than 2^63.
    """
    half, e = LIMB.type(32), LIMB.type(61)
    x1, x0, y1, y0 = x >> half, x & _LOW32, y >> half, y & _LOW32
    middle = x1 * y0 + x0 * y1  # below 2^62
    low = x0 * y0
    terms: npt.NDArray[np.uint64] = (
        ((x1 * y1) << LIMB.type(3))
        + ((middle & _LOW29) << half)
        + (middle >> LIMB.type(29))
        + (low & LIMB.type(2**61 - 1))
        + (low >> e)
    )
    return terms
