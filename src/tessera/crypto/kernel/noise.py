"""NoiseKernel: sums of integers drawn by Walker's alias method from uniform words.

One 64-bit word gives one integer: its high bits choose a column of the table, and the others decide
between the column's own value and the one that shares it (Walker 1977; Vose 1991 for the table).
Where they are exactly at the limit, a second word decides. A sum takes as many words as it has
coefficients. What is drawn, and why sums: `crypto/noise.py`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.points import address_of
from tessera.errors import MisuseError

Words = npt.NDArray[np.uint64]
Sums = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AliasEntries:
    """Column c has the value c - reach below its threshold, and from there on another.

    An entry is threshold * columns + the other value's column; `lower` has 64 more bits of each
    threshold.
    """

    entries: Words = field(repr=False)
    lower: Words = field(repr=False)
    reach: int

    def __post_init__(self) -> None:
        for array in (self.entries, self.lower):
            if array.dtype != np.uint64 or array.ndim != 1 or not array.flags.c_contiguous:
                raise MisuseError("an alias table has entries of 64 bits")
        columns = self.entries.size
        if columns < 2 or columns & (columns - 1) or self.lower.size != columns:
            raise MisuseError("an alias table has a power of two of columns")
        if not 0 <= 2 * self.reach < columns:
            raise MisuseError(f"values up to {self.reach} in {columns} columns")

    @classmethod
    def of(
        cls, thresholds: Words, lower: Words, others: npt.NDArray[np.int64], reach: int
    ) -> AliasEntries:
        bits = np.uint64(thresholds.size.bit_length() - 1)
        return cls((thresholds << bits) | others.astype(np.uint64), lower, reach)

    @property
    def column_bits(self) -> int:
        return self.entries.size.bit_length() - 1

    @property
    def thresholds(self) -> Words:
        return self.entries >> np.uint64(self.column_bits)

    @property
    def others(self) -> npt.NDArray[np.int64]:
        """Columns, too."""
        return (self.entries & np.uint64(self.entries.size - 1)).astype(np.int64)

    def values(
        self, words: Words, second: Words | None = None
    ) -> tuple[npt.NDArray[np.int64], int]:
        """The values of these words, and how many words were exactly at their limit.

        `second` decides those; without it they have the column's other value.
        """
        rest = np.uint64(64 - self.column_bits)
        column = (words >> rest).astype(np.int64)
        fraction = words & np.uint64((1 << int(rest)) - 1)
        limit = self.thresholds[column]
        own, tied = fraction < limit, fraction == limit
        if second is not None:
            own |= tied & (second < self.lower[column])
        drawn = np.where(own, column, self.others[column]) - self.reach
        # A column that shares with itself is decided.
        return drawn, int(np.count_nonzero(tied & (self.others[column] != column)))


Second = Callable[[], Words]


class NoiseKernel(ABC):
    """The half of a backend that draws integers."""

    def alias_sums(
        self,
        words: Words,
        coefficients: npt.NDArray[np.int32],
        width: int,
        table: AliasEntries,
        second: Second,
    ) -> Sums:
        """Row r has `width` sums of coefficients[r, t] times an integer, each by a word of its own.

        With a single row of coefficients, all rows have these. The words are taken in order.
        `second` gives another word for each, and is called where one of them does not decide.
        """
        if words.dtype != np.uint64 or words.ndim != 1 or not words.flags.c_contiguous:
            raise MisuseError("alias sums: words are a flat array of uint64")
        if coefficients.dtype != np.int32 or coefficients.ndim != 2 or not coefficients.size:
            raise MisuseError("alias sums: coefficients are rows of int32")
        if not coefficients.flags.c_contiguous or width < 1:
            raise MisuseError("alias sums: rows of one width, and contiguous coefficients")
        most = int(np.abs(coefficients.astype(np.int64)).sum(axis=1).max()) * table.reach
        if most >= 1 << 31:
            raise MisuseError("alias sums: a sum would not fit 32 bits")
        many, terms = coefficients.shape
        rows, left = divmod(words.size, width * terms)
        if left or (many > 1 and many != rows):
            raise MisuseError(f"alias sums: {words.size} words for {many} rows of {width} sums")
        out = np.empty((rows, width), dtype=np.int32)
        if rows and self._alias_sums(words, coefficients, table, out):
            added(*table.values(words, second())[:1], coefficients, out)
        return out

    @abstractmethod
    def _alias_sums(
        self, words: Words, coefficients: npt.NDArray[np.int32], table: AliasEntries, out: Sums
    ) -> bool:
        """Fill `out`; True if a word was exactly at its limit, and `out` is to be filled again."""


def added(drawn: npt.NDArray[np.int64], coefficients: npt.NDArray[np.int32], out: Sums) -> None:
    """Sums of these integers by their coefficients."""
    by = np.broadcast_to(coefficients, (len(out), coefficients.shape[1]))
    out[:] = np.einsum("rwt,rt->rw", drawn.reshape(*out.shape, -1), by.astype(np.int64))


# --- noise native ---------------------------------------------------------------------------------
#
# Integers of noise.c, called through ctypes, which lets other threads run.


_SIZE: Final = ctypes.c_size_t
_POINTER: Final = ctypes.c_void_p

NOISE_ARGUMENTS: Final[dict[str, tuple[type[Any], ...]]] = {
    # words; rows, width, terms; coefficients, from row to row; table, column bits, reach; out
    "tessera_alias_sums": (
        *(_POINTER, _SIZE, _SIZE, _SIZE),
        *(_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER),
    ),
}


class NativeNoise(NoiseKernel):
    """The half of a native path that draws integers."""

    _library: ctypes.CDLL

    def _alias_sums(
        self, words: Words, coefficients: npt.NDArray[np.int32], table: AliasEntries, out: Sums
    ) -> bool:
        many, terms = coefficients.shape
        undecided: int = self._library.tessera_alias_sums(
            address_of(words),
            *(*out.shape, terms),
            *(address_of(coefficients), terms if many > 1 else 0),
            *(address_of(table.entries), table.column_bits, table.reach, address_of(out)),
        )
        return bool(undecided)


# --- noise reference ------------------------------------------------------------------------------
#
# The twin of noise.c in NumPy.


class ReferenceNoise(NoiseKernel):
    """The portable half of a backend that draws integers."""

    def _alias_sums(
        self, words: Words, coefficients: npt.NDArray[np.int32], table: AliasEntries, out: Sums
    ) -> bool:
        drawn, undecided = table.values(words)
        added(drawn, coefficients, out)
        return undecided > 0
