"""NoiseKernel: sums of integers drawn by Walker's alias method from uniform words.

One 64-bit word gives one integer: its high bits choose a column of the table, and the others decide
between the column's own value and the one that shares it (Walker 1977; Vose 1991 for the table). A
sum takes as many words as it has coefficients. What is drawn, and why sums: `crypto/gauss.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError

COLUMN_BITS: Final = 12
COLUMNS: Final = 1 << COLUMN_BITS
REST_BITS: Final = 64 - COLUMN_BITS

Words = npt.NDArray[np.uint64]
Sums = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AliasEntries:
    """Column c has the value c - COLUMNS / 2 below its threshold, and from there on another.

    An entry is threshold * COLUMNS + the other value's column.
    """

    entries: Words

    def __post_init__(self) -> None:
        array = self.entries
        if array.dtype != np.uint64 or array.shape != (COLUMNS,) or not array.flags.c_contiguous:
            raise MisuseError(f"an alias table has {COLUMNS} entries of 64 bits")

    @classmethod
    def of(cls, thresholds: Words, others: npt.NDArray[np.int64]) -> AliasEntries:
        return cls((thresholds << np.uint64(COLUMN_BITS)) | others.astype(np.uint64))

    @property
    def thresholds(self) -> Words:
        return self.entries >> np.uint64(COLUMN_BITS)

    @property
    def others(self) -> npt.NDArray[np.int64]:
        """Columns, too."""
        return (self.entries & np.uint64(COLUMNS - 1)).astype(np.int64)

    @property
    def largest(self) -> int:
        """No integer that is drawn is larger in size."""
        return COLUMNS // 2


class NoiseKernel(ABC):
    """The half of a backend that draws integers."""

    def alias_sums(
        self, words: Words, coefficients: npt.NDArray[np.int32], width: int, table: AliasEntries
    ) -> Sums:
        """Row r has `width` sums of coefficients[r, t] times an integer, each by a word of its own.

        With a single row of coefficients, all rows have these. The words are taken in order.
        """
        if words.dtype != np.uint64 or words.ndim != 1 or not words.flags.c_contiguous:
            raise MisuseError("alias sums: words are a flat array of uint64")
        if coefficients.dtype != np.int32 or coefficients.ndim != 2 or not coefficients.size:
            raise MisuseError("alias sums: coefficients are rows of int32")
        if not coefficients.flags.c_contiguous or width < 1:
            raise MisuseError("alias sums: rows of one width, and contiguous coefficients")
        most = int(np.abs(coefficients.astype(np.int64)).sum(axis=1).max()) * table.largest
        if most >= 1 << 31:
            raise MisuseError("alias sums: a sum would not fit 32 bits")
        many, terms = coefficients.shape
        rows, left = divmod(words.size, width * terms)
        if left or (many > 1 and many != rows):
            raise MisuseError(f"alias sums: {words.size} words for {many} rows of {width} sums")
        out = np.empty((rows, width), dtype=np.int32)
        if rows:
            self._alias_sums(words, coefficients, table, out)
        return out

    @abstractmethod
    def _alias_sums(
        self, words: Words, coefficients: npt.NDArray[np.int32], table: AliasEntries, out: Sums
    ) -> None: ...
