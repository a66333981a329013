"""Public hashing of 64-bit ids: a keyed mixer, and the table positions made from it.

Everything here is public: the seed goes out with the round's plan and both sides compute the same
positions. The mixer spreads ids that were not chosen against it; it is not a pseudorandom function
and hides nothing. Whoever picks ids after seeing the seed can make them collide, which costs a
round and no secret (`docs/threat-model.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError, MisuseError

Ids = npt.NDArray[np.uint64]
"""Row ids, or anything else that is hashed, as 64-bit words."""

MAX_CELLS: Final = 2**32 - 1
"""A position is made from 32 bits of hash, so a table has fewer cells than that."""

_WORD: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio, odd
_FIRST: Final = 0xBF58476D1CE4E5B9  # Stafford's "Mix13" multipliers, as in splitmix64
_SECOND: Final = 0x94D049BB133111EB
_BLOCK: Final = 1 << 15  # 256 kB of ids: the temporaries of one block stay in the L2 cache


@dataclass(frozen=True, slots=True)
class HashKey:
    """One hash function of the family: two 64-bit words, made from (seed, index)."""

    outer: int
    inner: int

    @classmethod
    def of(cls, seed: int, index: int) -> HashKey:
        """The index-th function under this seed; any two are unrelated for our purposes."""
        if not 0 <= seed <= _WORD:
            raise ConfigError(f"hash seed {seed} is not a 64-bit word")
        # Mixing the seed first keeps (seed, index + 1) away from (seed + golden, index).
        base = _mix_int(seed ^ _GOLDEN)
        return cls(
            _mix_int((base + (2 * index + 1) * _GOLDEN) & _WORD),
            _mix_int((base + (2 * index + 2) * _GOLDEN) & _WORD),
        )


def mix(ids: Ids, key: HashKey) -> Ids:
    """A keyed bijection of 64-bit words in which every output bit depends on every input bit.

    splitmix64's finaliser (Steele, Lea, Flood 2014, with Stafford's constants), with one key word
    added before and one in the middle: with a single word, two functions of the family would
    be translates of each other. 3 to 5 ns per id.
    """
    if ids.dtype != np.uint64:
        raise MisuseError(f"hashing takes uint64 ids, not {ids.dtype}")
    flat = np.ascontiguousarray(ids).reshape(-1)
    out = np.empty(flat.size, dtype=np.uint64)
    scratch = np.empty(min(flat.size, _BLOCK), dtype=np.uint64)
    outer, inner = np.uint64(key.outer), np.uint64(key.inner)
    first, second = np.uint64(_FIRST), np.uint64(_SECOND)
    for begin in range(0, flat.size, _BLOCK):
        z = out[begin : begin + _BLOCK]
        t = scratch[: z.size]
        np.add(flat[begin : begin + _BLOCK], outer, out=z)
        np.right_shift(z, np.uint64(30), out=t)
        np.bitwise_xor(z, t, out=z)
        np.multiply(z, first, out=z)
        np.add(z, inner, out=z)
        np.right_shift(z, np.uint64(27), out=t)
        np.bitwise_xor(z, t, out=z)
        np.multiply(z, second, out=z)
        np.right_shift(z, np.uint64(31), out=t)
        np.bitwise_xor(z, t, out=z)
    return out.reshape(ids.shape)


def positions(ids: Ids, key: HashKey, cells: int) -> Ids:
    """One cell in [0, cells) per id, by multiply-and-shift on the hash's high half.

    Cells differ in probability by at most 2^-32 each, so no modulo and no rejection is needed.
    """
    if not 0 < cells <= MAX_CELLS:
        raise ConfigError(f"a table of {cells} cells: there must be 1 to {MAX_CELLS}")
    z = mix(ids, key)
    z >>= np.uint64(32)
    z *= np.uint64(cells)
    z >>= np.uint64(32)
    return z


def distinct_positions(ids: Ids, seed: int, cells: int, hashes: int) -> Ids:
    """Array (hashes, len(ids)): cells that are distinct for every id.

    The table is cut into `hashes` sections of cells // hashes cells and each id has one cell in
    every section, the usual layout of invertible Bloom tables (Goodrich, Mitzenmacher 2011).
    """
    section = cells // hashes
    if section * hashes != cells:
        raise ConfigError(f"{cells} cells cannot be cut into {hashes} equal sections")
    out = np.empty((hashes, ids.size), dtype=np.uint64)
    for index in range(hashes):
        out[index] = positions(ids, HashKey.of(seed, index), section)
        out[index] += np.uint64(index * section)
    return out


def _mix_int(word: int) -> int:
    """splitmix64's finaliser on one Python integer: for keys, which are few."""
    word = ((word ^ word >> 30) * _FIRST) & _WORD
    word = ((word ^ word >> 27) * _SECOND) & _WORD
    return word ^ word >> 31
