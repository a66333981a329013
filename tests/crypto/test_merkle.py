"""Merkle trees against RFC 6962's recursive definition, and paths that prove nothing."""

from __future__ import annotations

import hashlib
from operator import attrgetter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto.merkle import MAX_LEAVES, MAX_PATH, MerkleTree, is_leaf, path_length, root_from
from tessera.errors import CryptoError, MisuseError
from vectors import load


def digests(count: int) -> list[bytes]:
    return [hashlib.sha256(b"membership.json leaf %d" % i).digest() for i in range(count)]


@pytest.mark.parametrize("vector", load("membership.json", "tree"), ids=attrgetter("name"))
def test_roots(vector: SimpleNamespace) -> None:
    assert MerkleTree(digests(vector.size)).root == vector.root


@pytest.mark.parametrize("vector", load("membership.json", "path"), ids=attrgetter("name"))
def test_paths(vector: SimpleNamespace) -> None:
    path = tuple(map(bytes.fromhex, vector.path))
    proven = is_leaf(vector.root, vector.leaf, vector.number, vector.size, path)
    assert proven is vector.expect
    if proven:
        assert MerkleTree(digests(vector.size)).path(vector.number) == path


@given(st.integers(1, 200), st.data())
def test_every_leaf_is_proven_in_its_own_place_only(size: int, data: st.DataObject) -> None:
    leaves = digests(size)
    tree = MerkleTree(leaves)
    number = data.draw(st.integers(0, size - 1))
    path = tree.path(number)
    assert len(path) == path_length(number, size) <= MAX_PATH
    assert root_from(leaves[number], number, size, path) == tree.root
    for other in range(size):
        assert is_leaf(tree.root, leaves[number], other, size, path) is (other == number)
        assert is_leaf(tree.root, leaves[other], number, size, path) is (other == number)


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_number_of_leaves_is_bound(size: int, other: int) -> None:
    leaves = digests(max(size, other))
    same = MerkleTree(leaves[:size]).root == MerkleTree(leaves[:other]).root
    assert same is (size == other)
    path = MerkleTree(leaves[:size]).path(0)
    root = MerkleTree(leaves[:size]).root
    assert is_leaf(root, leaves[0], 0, other, path) is (size == other)


def test_an_inner_node_is_not_a_leaf() -> None:
    leaves = digests(4)
    tree = MerkleTree(leaves)
    inner = tree.path(0)[-1]  # the node over leaves 2 and 3
    forged = MerkleTree([hashlib.sha256(b"").digest(), inner])
    assert forged.root != tree.root
    assert not is_leaf(tree.root, inner, 1, 2, tree.path(2)[-1:])


def test_the_longest_path_fits() -> None:
    assert path_length(0, MAX_LEAVES) == MAX_PATH


def test_what_cannot_be_a_tree_is_refused() -> None:
    with pytest.raises(MisuseError, match="32 bytes"):
        MerkleTree([b"short"])
    with pytest.raises(MisuseError, match="leaf 3 of a tree with 3"):
        MerkleTree(digests(3)).path(3)
    with pytest.raises(CryptoError, match="leaf 0 of a tree with 0"):
        path_length(0, 0)
    with pytest.raises(CryptoError, match="32 bytes"):
        root_from(bytes(31), 0, 1, ())
