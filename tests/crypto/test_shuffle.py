"""The swap-or-not permutation against its definition, and how near it is to a uniform one."""

from __future__ import annotations

import hashlib
from itertools import permutations
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.crypto.shuffle import KEY_BYTES, MAX_SIZE, Shuffle, log2_distance
from tessera.errors import MisuseError
from vectors import load

KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


@pytest.mark.parametrize("vector", load("membership.json", "shuffle"), ids=attrgetter("name"))
def test_images(vector: SimpleNamespace) -> None:
    shuffle = Shuffle(vector.key, vector.size)
    assert shuffle.forward(vector.points).tolist() == vector.images
    assert shuffle.inverse(vector.images).tolist() == vector.points
    many = np.resize(np.array(vector.points), 100)  # arrays instead of whole numbers
    assert shuffle.forward(many).tolist() == np.resize(vector.images, 100).tolist()


@given(KEYS, st.integers(1, 300))
def test_it_is_a_permutation_and_its_inverse(secret: bytes, size: int) -> None:
    shuffle = Shuffle(secret, size)
    points = np.arange(size)
    images = shuffle.forward(points)
    assert sorted(images.tolist()) == points.tolist()
    assert shuffle.inverse(images).tolist() == points.tolist()
    assert shuffle.forward(shuffle.inverse(points)).tolist() == points.tolist()
    assert [int(shuffle.forward([x])[0]) for x in points[:5]] == images[:5].tolist()


def test_chunks_do_not_show() -> None:
    shuffle = Shuffle(key(0), 100_000)
    points = np.arange(70_000)
    images = shuffle.forward(points)
    assert shuffle.forward(points[60_000:]).tolist() == images[60_000:].tolist()
    assert points.tolist() == list(range(70_000))  # the caller's own array is left alone


def test_all_orders_of_four_points_are_equally_likely() -> None:
    orders = dict.fromkeys(permutations(range(4)), 0)
    for number in range(2400):
        orders[tuple(Shuffle(key(number), 4).forward(range(4)).tolist())] += 1
    assert stats.chisquare(list(orders.values())).pvalue > 1e-4


def test_neighbours_of_a_point_are_uniform() -> None:
    """Who is beside leaf 0 in groups of five, over the keys, by leaf number."""
    beside = np.zeros(40)
    for number in range(1500):
        shuffle = Shuffle(key(number), 40)
        group = int(shuffle.inverse([0])[0]) // 5
        beside[shuffle.forward(range(5 * group, 5 * group + 5))] += 1
    assert beside[0] == 1500
    assert stats.chisquare(beside[1:]).pvalue > 1e-4


def test_size_and_key_both_matter() -> None:
    images = Shuffle(key(0), 1000).forward(range(20)).tolist()
    assert Shuffle(key(1), 1000).forward(range(20)).tolist() != images
    assert Shuffle(key(0), 1001).forward(range(20)).tolist() != images


@pytest.mark.parametrize("group", [2, 5, 10, 50, 256])
def test_rounds_suffice_for_groups_of_any_snapshot(group: int) -> None:
    sizes = sorted({2 * group, 3 * group, 10 * group, 10**6, MAX_SIZE})
    assert max(log2_distance(size, group) for size in sizes) < -40
    assert log2_distance(10**6, group, rounds=90) > -40


def test_what_cannot_be_shuffled_is_refused() -> None:
    for size in (0, MAX_SIZE + 1):
        with pytest.raises(MisuseError, match=f"a shuffle of {size} points"):
            Shuffle(key(0), size)
    with pytest.raises(MisuseError, match="31 bytes"):
        Shuffle(bytes(31), 5)
    shuffle = Shuffle(key(0), 5)
    for points in ([5], [-1]):
        with pytest.raises(MisuseError, match="not below 5"):
            shuffle.forward(points)
    with pytest.raises(MisuseError, match="flat array"):
        shuffle.inverse(np.zeros((1, 1), np.int64))
    assert shuffle.forward([]).tolist() == []
