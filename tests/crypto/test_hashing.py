"""The public mixer and the positions made from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto.hashing import (
    MAX_CELLS,
    HashKey,
    Ids,
    distinct_positions,
    mix,
    positions,
)
from tessera.errors import ConfigError, MisuseError

STRUCTURED = {
    "sequential": np.arange(40_000, dtype=np.uint64),
    "multiples of 4096": np.arange(40_000, dtype=np.uint64) << np.uint64(12),
    "high bits only": np.arange(40_000, dtype=np.uint64) << np.uint64(48),
    "from the top down": ~np.arange(40_000, dtype=np.uint64),
    "squares": np.arange(40_000, dtype=np.uint64) ** 2,
}


def chi_square_deviation(counts: np.ndarray) -> float:
    """Standard deviations that a chi-square of equal cells is above its mean."""
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def scalar_mix(word: int, key: HashKey) -> int:
    """The definition, one id at a time in Python integers."""
    mask = 2**64 - 1
    z = (word + key.outer) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9 + key.inner) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 2**64 - 1))
def test_the_vectorised_mixer_follows_its_definition(words: list[int], seed: int) -> None:
    key = HashKey.of(seed, 3)
    expected = [scalar_mix(word, key) for word in words]
    assert mix(np.array(words, dtype=np.uint64), key).tolist() == expected


def test_blocks_do_not_show() -> None:
    ids = np.arange(100_000, dtype=np.uint64)
    key = HashKey.of(7, 0)
    whole = mix(ids, key)
    assert whole[70_000:].tolist() == mix(ids[70_000:], key).tolist()
    assert mix(ids[::-1], key).tolist() == whole[::-1].tolist()


def test_distinct_ids_have_distinct_hashes() -> None:
    for ids in STRUCTURED.values():
        assert np.unique(mix(ids, HashKey.of(1, 1))).size == ids.size


def test_every_input_bit_moves_half_of_the_output_bits() -> None:
    ids = np.arange(4_000, dtype=np.uint64)
    key = HashKey.of(11, 2)
    before = mix(ids, key)
    for bit in range(64):
        after = mix(ids ^ np.uint64(1 << bit), key)
        flipped = np.unpackbits((before ^ after).view(np.uint8)).mean() * 64
        assert 31 < flipped < 33, f"bit {bit} flips {flipped:.1f} of 64"  # deviation 0.06


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_ids_fill_a_table_evenly(name: str) -> None:
    cells = 997
    counts = np.bincount(
        positions(STRUCTURED[name], HashKey.of(5, 0), cells).view(np.int64), minlength=cells
    )
    assert counts.size == cells
    assert abs(chi_square_deviation(counts)) < 5  # about one in a million at random


def test_functions_of_the_family_are_independent() -> None:
    ids = STRUCTURED["sequential"]
    for other in ((5, 1), (6, 0), (2**63, 0)):
        pair = positions(ids, HashKey.of(5, 0), 31) * np.uint64(31)
        pair += positions(ids, HashKey.of(*other), 31)
        assert abs(chi_square_deviation(np.bincount(pair.view(np.int64), minlength=961))) < 5


@pytest.mark.parametrize("hashes", [3, 4, 5])
def test_an_id_has_distinct_cells(hashes: int) -> None:
    ids: Ids = np.arange(1_000, dtype=np.uint64)
    cells = distinct_positions(ids, 3, 6 * hashes, hashes)
    assert all(len(set(column)) == hashes for column in cells.T.tolist())
    assert cells.max() < 6 * hashes


def test_the_largest_table_keeps_positions_inside() -> None:
    ids = mix(np.arange(10_000, dtype=np.uint64), HashKey.of(0, 0))
    found = positions(ids, HashKey.of(0, 1), MAX_CELLS)
    assert found.max() < MAX_CELLS
    assert found.max() > 0.99 * MAX_CELLS


def test_nonsense_is_refused() -> None:
    ids = np.arange(3, dtype=np.uint64)
    with pytest.raises(MisuseError, match="uint64"):
        mix(ids.astype(np.int64), HashKey.of(0, 0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="64-bit"):
        HashKey.of(2**64, 0)
    with pytest.raises(ConfigError, match="cells"):
        positions(ids, HashKey.of(0, 0), 0)
    with pytest.raises(ConfigError, match="equal sections"):
        distinct_positions(ids, 0, 10, 3)
