"""Lengths of messages that are built to the expected sizes and encoded.

So a forecast cannot drift from the wire format.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.ids import RoundId
from tessera.protocols import wire

ROUND: Final = RoundId(1)


def some(count: float, of: int) -> npt.NDArray[np.uint64]:
    """`count` places out of `of`, as a random set would lie: its encoding has a typical length."""
    wanted = min(round(count), of)
    rng = np.random.default_rng(0)
    if wanted * 2 < of:
        found = np.unique(rng.integers(of, size=wanted, dtype=np.uint64))
        while len(found) < wanted:
            more = rng.integers(of, size=wanted - len(found), dtype=np.uint64)
            found = np.union1d(found, more)
        return found
    return np.sort(rng.permutation(of)[:wanted]).astype(np.uint64)


def length(message: Any) -> float:
    return float(len(wire.encode(message)))


def carried(*sizes: int) -> float:
    """Bytes that fields of these lengths add to a message in which they were empty."""
    return float(sum(size + max(0, (size.bit_length() + 6) // 7 - 1) for size in sizes))
