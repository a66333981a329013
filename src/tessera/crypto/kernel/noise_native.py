"""Integers of noise.c, called through ctypes, which lets other threads run."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.noise import AliasEntries, NoiseKernel, Sums, Words
from tessera.crypto.kernel.points_native import address_of

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
