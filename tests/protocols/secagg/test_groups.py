"""The quorum rule against plain exhaustion, and the rows two clients share against plain sets."""

from __future__ import annotations

from itertools import combinations
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.protocols.secagg import groups

SETS = st.dictionaries(st.integers(0, 9), st.frozensets(st.integers(0, 6)), min_size=1, max_size=7)


def arrays(sets: dict[int, frozenset[int]]) -> dict:
    return {c: np.array(sorted(rows), dtype=np.uint64) for c, rows in sets.items()}


def largest_satisfied(candidates: set[int], quorums: dict[int, int]) -> set[int]:
    for size in range(len(candidates), 0, -1):
        for members in combinations(sorted(candidates), size):
            if all(quorums[c] <= size for c in members):
                return set(members)
    return set()


@given(SETS, st.data())
def test_a_rows_group_is_the_largest_set_in_which_everybodys_quorum_is_met(sets, data):
    quorums = {c: data.draw(st.integers(1, 6)) for c in sets}
    found = groups.form(arrays(sets), quorums)
    for row in range(7):
        candidates = {c for c, rows in sets.items() if row in rows}
        members = {c for c, rows in found.items() if row in rows}
        assert members == largest_satisfied(candidates, quorums)
    for rows in found.values():
        assert (rows[1:] > rows[:-1]).all()


@pytest.mark.parametrize("marks", [0, 1, 16], ids=["by sorting", "by either", "by marks"])
@given(sets=SETS)
def test_shared_rows_are_the_intersections(marks, sets):
    members = arrays(sets)
    with mock.patch.object(groups, "MOST_MARKS", marks):
        shared = groups.shared_rows(members)
    for c, d in combinations(sorted(sets), 2):
        for one, other in ((c, d), (d, c)):
            index = shared[one].get(other, np.zeros(0, dtype=np.uint64))
            assert set(members[one][index].tolist()) == sets[one] & sets[other]
    assert all(c not in by_peer for c, by_peer in shared.items())
    assert all(len(index) for by_peer in shared.values() for index in by_peer.values())


def test_nobody_reveals_anything():
    nothing = {1: np.zeros(0, dtype=np.uint64), 2: np.zeros(0, dtype=np.uint64)}
    assert {c: len(r) for c, r in groups.form(nothing, {1: 2, 2: 2}).items()} == {1: 0, 2: 0}
    assert groups.shared_rows(nothing) == {1: {}, 2: {}}


def test_work_does_not_grow_with_the_positions():
    far = np.array([0, 2**39, 2**40 - 1], dtype=np.uint64)
    found = groups.form({1: far, 2: far[1:]}, {1: 2, 2: 2})
    assert found[1].tolist() == [2**39, 2**40 - 1]


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_distinct_rows_ascend_and_are_all_there(rows):
    found = groups.distinct(np.array(rows, dtype=np.uint64))
    assert found.tolist() == sorted(set(rows))
