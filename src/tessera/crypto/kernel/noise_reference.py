"""The twin of noise.c in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.noise import (
    COLUMNS,
    REST_BITS,
    AliasEntries,
    NoiseKernel,
    Sums,
    Words,
)


class ReferenceNoise(NoiseKernel):
    """The portable half of a backend that draws integers."""

    def _alias_sums(
        self, words: Words, coefficients: npt.NDArray[np.int32], table: AliasEntries, out: Sums
    ) -> None:
        column = (words >> np.uint64(REST_BITS)).astype(np.int64)
        below = (words & np.uint64((1 << REST_BITS) - 1)) < table.thresholds[column]
        drawn = np.where(below, column, table.others[column]) - COLUMNS // 2
        by = np.broadcast_to(coefficients, (len(out), coefficients.shape[1]))
        out[:] = np.einsum("rwt,rt->rw", drawn.reshape(*out.shape, -1), by.astype(np.int64))
