"""The quorum rule against plain exhaustion, and the rows two clients share against plain sets."""

from __future__ import annotations

from itertools import combinations
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import kernel
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


@given(SETS, st.data(), st.integers(1, 6))
def test_one_quorum_for_all_gives_the_groups_of_the_general_rule(sets, data, quorum):
    """Where all ask for the same there is a shorter way; who revealed nothing changes nothing."""
    same = dict.fromkeys(sets, quorum)
    found = groups.form(arrays(sets), same)
    nobody = {**arrays(sets), 99: np.zeros(0, dtype=np.uint64)}
    general = groups.form(nobody, {**same, 99: quorum + 1})
    assert {c: rows.tolist() for c, rows in found.items()} == {
        c: rows.tolist() for c, rows in general.items() if c != 99
    }


@pytest.mark.parametrize("name", kernel.available())
@pytest.mark.parametrize("marks", [0, 1, 16], ids=["by sorting", "by either", "by marks"])
@given(sets=SETS)
def test_shared_rows_are_the_intersections(name, marks, sets):
    members = arrays(sets)
    with mock.patch.object(groups, "MOST_MARKS", marks), kernel.use(name):
        shared = {c: dict(sets) for c, sets in groups.SharedRows(members).items()}
    for c, d in combinations(sorted(sets), 2):
        for one, other in ((c, d), (d, c)):
            index = shared[one].get(other, np.zeros(0, dtype=np.uint64))
            assert set(members[one][index].tolist()) == sets[one] & sets[other]
    assert all(c not in by_peer for c, by_peer in shared.items())
    assert all(len(index) for by_peer in shared.values() for index in by_peer.values())


def test_nobody_reveals_anything():
    nothing = {1: np.zeros(0, dtype=np.uint64), 2: np.zeros(0, dtype=np.uint64)}
    assert {c: len(r) for c, r in groups.form(nothing, {1: 2, 2: 2}).items()} == {1: 0, 2: 0}
    assert {c: dict(sets) for c, sets in groups.SharedRows(nothing).items()} == {1: {}, 2: {}}


def test_peers_that_are_in_all_rows_of_a_client_have_one_set():
    everybody = {c: np.arange(5, dtype=np.uint64) for c in range(4)}
    some = {**everybody, 9: np.array([1, 3], dtype=np.uint64)}
    shared = groups.SharedRows(some)[0]
    assert dict(zip(shared, shared.numbers.tolist(), strict=True)) == {1: 1, 2: 1, 3: 1, 9: 0}
    assert len(shared.indices) == 2 + 5
    assert shared[2].tolist() == [0, 1, 2, 3, 4] and shared[9].tolist() == [1, 3]


def test_work_does_not_grow_with_the_positions():
    far = np.array([0, 2**39, 2**40 - 1], dtype=np.uint64)
    found = groups.form({1: far, 2: far[1:]}, {1: 2, 2: 2})
    assert found[1].tolist() == [2**39, 2**40 - 1]


@given(st.lists(st.integers(0, 2**64 - 1)) | st.lists(st.integers(0, 50)))
def test_distinct_rows_ascend_and_are_all_there(rows):
    array = np.array(rows, dtype=np.uint64)
    assert groups.distinct(array).tolist() == sorted(set(rows))
    found, places = groups.numbered(array)
    assert found.dtype == np.uint64 and found.tolist() == sorted(set(rows))
    assert found[places].tolist() == rows


@given(st.frozensets(st.integers(0, 12) | st.integers(0, 2**64 - 1)), st.data())
def test_rows_are_found_among_others(others, data):
    among = sorted(others)
    rows = sorted(data.draw(st.frozensets(st.sampled_from(among)))) if among else []
    places = groups.places_in(np.array(among, dtype=np.uint64), np.array(rows, dtype=np.uint64))
    assert places.dtype == np.int64
    assert [among[place] for place in places] == rows
