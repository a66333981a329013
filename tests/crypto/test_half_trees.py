"""Why a node is kept as sigma(s): without it one inverse AES call opens every path.

The server's view of one tree is its root y, the AES key (which is public) and the steps. A step
that the point leaves to the left is the XOR of both servers' H at that node and of the offset. Were
sigma the identity, the offset inside the other server's H would cancel it, and what is left is an
AES output whose input is the other server's node.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tessera.crypto.kernel import points_reference
from tessera.crypto.kernel.points_reference import Hash, controls, sigma
from tessera.crypto.kernel.reference import Reference
from tessera.crypto.kernel.trees import Kind, LeafShape, TreeKeys, Trees

REFERENCE = Reference()
SHAPE = LeafShape(Kind.ADD64, words=5, bits=64)
TREES = Trees.of(np.full(1000, 6))
CONTROL_BITS = np.uint64(1 << 63)
ZERO = np.zeros(2, dtype=np.uint64)


def keys(seed: int, points: Any, epoch: int = 0) -> tuple[TreeKeys, TreeKeys]:
    rng = np.random.default_rng(seed)
    seeds, key = (rng.bytes(24), rng.bytes(24)), rng.bytes(16)
    public = np.empty(TREES.key_bytes(SHAPE), dtype=np.uint8)
    values = rng.integers(0, 256, (TREES.count, 40), dtype=np.uint8)
    order = np.arange(TREES.count)
    REFERENCE.generate(key, TREES, SHAPE, seeds, order, points, values, public, epoch=epoch)
    first, second = (
        TreeKeys(key, REFERENCE.roots(s, p, TREES.count), public) for p, s in enumerate(seeds)
    )
    return first, second


def first_steps(one: TreeKeys) -> Any:
    at = TREES.step_at(np.arange(TREES.count), 0)
    return one.public[: 16 * TREES.total_steps].view("<u8").reshape(-1, 2)[at]


def guessed_offsets(one: TreeKeys) -> Any:
    """What a server computes from its own keys: the offsets, if the point goes left."""
    own = one.roots.view("<u8")
    output = np.ascontiguousarray(first_steps(one) ^ Hash(one.key)(own, ZERO) ^ own)
    inverse = Cipher(AES128(one.key), ECB()).decryptor().update(output.tobytes())
    return own ^ np.frombuffer(inverse, "<u8").reshape(-1, 2)


def recovered(party: int, points: Any, seed: int) -> int:
    both = keys(seed, points)
    offset = both[0].roots.view("<u8") ^ both[1].roots.view("<u8")
    return int((guessed_offsets(both[party]) == offset).all(axis=1).sum())


@pytest.mark.parametrize("party", [0, 1])
def test_without_sigma_one_inverse_aes_call_yields_the_offset(
    party: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lefts, rights = np.zeros(TREES.count, dtype=np.int64), np.ones(TREES.count, dtype=np.int64)
    assert recovered(party, lefts, 1) == recovered(party, rights, 2) == 0
    monkeypatch.setattr(points_reference, "sigma", lambda s: s)
    assert recovered(party, lefts, 1) == 1000  # and so the side, all nodes, and the row
    assert recovered(party, rights, 2) == 0


def test_sigma_and_sigma_with_the_identity_are_one_to_one() -> None:
    """What the bound asks of it: ranks over GF(2) of sigma and of sigma + 1."""
    for extra in (0, 1):
        rows = []
        for bit in range(128):
            unit = np.zeros(2, dtype=np.uint64)
            unit[bit // 64] = np.uint64(1 << bit % 64)
            image = sigma(unit) ^ (unit if extra else 0)
            rows.append(int(image[0]) | int(image[1]) << 64)
        rank = 0
        while rows:
            pivot = max(rows)
            rows = [r for r in (min(r, r ^ pivot) for r in rows if r != pivot) if r]
            rank += 1
        assert rank == 128


def test_the_nodes_on_a_path_differ_by_the_trees_own_offset_and_the_others_not() -> None:
    points = np.arange(TREES.count) % 6
    both = keys(3, points)
    offset = both[0].roots.view("<u8") ^ both[1].roots.view("<u8")
    assert np.unique(offset, axis=0).shape[0] == TREES.count
    assert np.all(offset & CONTROL_BITS == CONTROL_BITS)
    nodes = [points_reference.grown(one, TREES, range(TREES.count)) for one in both]
    found = (nodes[0] ^ nodes[1]).reshape(TREES.count, 6, 2)
    each = np.arange(TREES.count)
    assert np.array_equal(found[each, points], offset)
    found[each, points] = 0
    assert not found.any()


def test_each_half_of_a_correction_has_a_control_bit_of_its_own() -> None:
    """Among leaves off the path all four pairs of bits occur, and both servers have the same."""
    nodes = points_reference.grown(keys(4, np.zeros(1000, np.int64))[0], TREES, range(1000))
    bits = (controls(nodes) & np.uint64(1)).reshape(1000, 6, 2)[:, 1:].reshape(-1, 2)
    seen = np.bincount((bits[:, 0] + 2 * bits[:, 1]).astype(np.int64), minlength=4)
    assert np.abs(seen - 1250).max() < 6 * np.sqrt(5000 * 3 / 16)  # each: one time in 10^9


def test_no_aes_input_occurs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over levels, blocks and epochs of one report's trees, at both servers."""
    inputs: list[Any] = []
    real = Hash.__call__

    def watched(self: Hash, y: Any, tweak: Any) -> Any:
        inputs.append(np.ascontiguousarray(y ^ tweak).reshape(-1, 2).copy())
        return real(self, y, tweak)

    both = keys(5, np.arange(TREES.count) % 6)
    monkeypatch.setattr(Hash, "__call__", watched)
    seen = []
    for one in both:
        nodes = points_reference.grown(one, TREES, range(TREES.count))
        for epoch in (0, 1, 2):
            Hash(one.key).convert(nodes, SHAPE, epoch)
        seen.append(np.concatenate(inputs))
        inputs.clear()
    for blocks in seen:  # 1,000 trees of 6 leaves: 6 parents, 6 leaves of 3 blocks in 3 epochs
        assert np.unique(blocks, axis=0).shape[0] == blocks.shape[0] == 1000 * (6 + 6 * 3 * 3)
    together = np.unique(np.concatenate(seen), axis=0).shape[0]
    on_paths = sum(1 + 1 + 1 + 9 for _ in range(TREES.count))  # three levels, nine blocks
    assert together == seen[0].shape[0] + on_paths  # the rest they have in common
