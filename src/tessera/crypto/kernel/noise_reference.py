"""The twin of noise.c in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.noise import AliasEntries, NoiseKernel, Sums, Words, added


class ReferenceNoise(NoiseKernel):
    """The portable half of a backend that draws integers."""

    def _alias_sums(
        self, words: Words, coefficients: npt.NDArray[np.int32], table: AliasEntries, out: Sums
    ) -> bool:
        drawn, undecided = table.values(words)
        added(drawn, coefficients, out)
        return undecided > 0
