"""The attacks' own reasoning, on small cases and by property."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.audit.answers import History, Ratio, RevealedSets
from tessera.audit.intersect import Attended, pinned
from tessera.audit.row_counts import HolderCounts, sole_holder
from tessera.ids import ClientId
from tessera.privacy.index.exposure import (
    Cohort,
    Holders,
    epsilon_after,
    event_1,
    expected_rows,
    late_dropout,
    left_behind,
)
from tessera.privacy.index.posterior import SURE, log_ratio_table
from tessera.privacy.index.response import LEVELS

NAMES = ("cpp2", "cpp3", "cpp4")


def rows(*ids: int) -> np.ndarray:
    return np.array(sorted(ids), dtype=np.uint64)


def union_of(sets: dict[int, set[int]], clients: tuple[int, ...]) -> Attended:
    together = set().union(*(sets[c] for c in clients))
    return Attended(tuple(ClientId(c) for c in clients), rows(*together))


def test_absence_clears_everybody_but_the_holder() -> None:
    sets = {1: {10, 30}, 2: {20, 30}, 3: {20}}
    found = dict(pinned([union_of(sets, (1, 2)), union_of(sets, (2, 3))]))
    # Row 10 is missing once 2 is there without 1. Rows 20 and 30 never are: anybody may hold them.
    assert {c: set(r.tolist()) for c, r in found.items()} == {1: {10}, 2: set(), 3: set()}


def test_companions_that_always_meet_pin_nothing_on_each_other() -> None:
    sets = {1: {10}, 2: {20}, 3: {30}, 4: {40}}
    rounds = [union_of(sets, (1, 2)), union_of(sets, (3, 4))] * 5
    assert all(not found.size for _, found in pinned(rounds))


@given(
    st.dictionaries(st.integers(0, 7), st.sets(st.integers(0, 30)), min_size=3, max_size=8),
    st.data(),
)
def test_what_is_pinned_on_a_client_it_did_put_in(
    sets: dict[int, set[int]], data: st.DataObject
) -> None:
    cohorts = st.lists(st.sampled_from(sorted(sets)), min_size=2, unique=True)
    rounds = [union_of(sets, tuple(c)) for c in data.draw(st.lists(cohorts, max_size=8))]
    for client, found in pinned(rounds):
        assert set(found.tolist()) <= sets[client]


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(1, 30))
def test_no_answers_say_more_than_the_level_and_the_plainest_say_as_much(
    name: str, answers: int
) -> None:
    ratios = np.abs(log_ratio_table(LEVELS[name], answers)[answers]).tolist()
    assert max(ratios) == pytest.approx(min(SURE, epsilon_after(LEVELS[name], answers)))
    assert max(ratios) == pytest.approx(max(ratios[0], ratios[-1]))


def test_a_history_counts_questions_and_yeses() -> None:
    first = RevealedSets(rows(1, 2, 3), {ClientId(5): rows(2), ClientId(6): rows()})
    second = RevealedSets(rows(2, 4), {ClientId(5): rows(2, 4)})
    history = History.of([first, second])
    assert history.rows.tolist() == [1, 2, 3, 4]
    assert history.answers[history.clients[ClientId(5)]].tolist() == [1, 2, 1, 1]
    assert history.yes[history.clients[ClientId(5)]].tolist() == [0, 2, 0, 1]
    assert history.answers[history.clients[ClientId(6)]].tolist() == [1, 1, 1, 0]


def test_a_ratio_without_evidence_says_nothing_and_breaks_nothing() -> None:
    assert Ratio.of(0, 0, 0, 0).low == 0.0
    assert Ratio.of(0, 100, 0, 100) == Ratio(0.0, 0.0, 0.0)
    never = Ratio.of(50, 100, 0, 100)
    assert never.value == math.inf and 0.0 < never.low < math.inf


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quorum", [1, 2, 4])
def test_sole_holders_are_as_frequent_as_in_a_simulation(
    name: str, dropout: float, quorum: int
) -> None:
    privacy, clients, trials = LEVELS[name], 6, 40_000
    rng = np.random.default_rng(11)
    for held in (1, 3):
        cohort = Cohort(
            clients=clients, holders=Holders.of({held: 1.0}), min_group=quorum, dropout=dropout
        )
        chance = np.where(np.arange(clients) < held, privacy.p5, privacy.p6)
        says = rng.random((trials, clients)) < chance
        stays = says & (rng.random((trials, clients)) >= dropout)
        sole = (stays[:, :held].sum(axis=1) == 1) & (says.sum(axis=1) >= quorum)
        assert sole.mean() == pytest.approx(sole_holder(privacy, cohort), abs=0.012)
        assert event_1(privacy, cohort) <= sole_holder(privacy, cohort)


def test_a_claim_is_averaged_over_rows_and_not_over_rounds() -> None:
    counts = HolderCounts()
    counts.add(4, np.array([0, 1, 1, 1]))
    counts.add(2, np.array([2]))
    mean = counts.claim(lambda cohort: float(cohort.clients), min_group=1)
    assert mean == (3 * 4 + 1 * 2) / 4
    assert HolderCounts().claim(lambda _: 1.0, min_group=1) == 0.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("gone", "named"), [(1, 0), (1, 1), (3, 0), (3, 2)])
def test_with_a_quorum_of_one_late_dropouts_leave_what_the_calculator_says(
    name: str, gone: int, named: int
) -> None:
    cohort = Cohort(clients=8, holders=Holders.of({1: 0.6, 2: 0.3, 5: 0.1}))
    options = {"real": 20.0, "decoys": 0.1, "catalogue": 400}
    expected = late_dropout(LEVELS[name], cohort, gone=gone, **options)
    rows = expected_rows(LEVELS[name], cohort, **options)
    found = left_behind(LEVELS[name], cohort, gone=gone, named=named, rows=rows)
    assert found.exposed == pytest.approx(expected.exposed)
    assert found.empty == pytest.approx(expected.empty)


@pytest.mark.parametrize(("gone", "named"), [(1, 0), (1, 1), (3, 2)])
@pytest.mark.parametrize("held", [1, 2])
def test_with_a_quorum_they_leave_what_a_simulation_says(gone: int, named: int, held: int) -> None:
    privacy, clients, quorum, trials = LEVELS["cpp3"], 6, 3, 60_000
    rng = np.random.default_rng(5)
    # Columns are clients: the first `gone` leave, the first `named` of them after naming rows.
    rank = rng.random((trials, clients)).argsort(axis=1)
    holds = rank < held
    says = rng.random((trials, clients)) < np.where(holds, privacy.p5, privacy.p6)
    says[:, named:gone] = False
    size = says.sum(axis=1)
    empty = ~(says & holds)[:, gone:].any(axis=1) & ((size == 0) | (size >= quorum))
    own = holds[:, :gone]
    cohort = Cohort(clients=clients, holders=Holders.of({held: 1.0}), min_group=quorum)
    rows = expected_rows(privacy, cohort, real=held)
    found = left_behind(privacy, cohort, gone=gone, named=named, rows=rows)
    assert (own & empty[:, None]).sum() / own.sum() == pytest.approx(found.exposed, abs=0.015)
    assert empty.mean() == pytest.approx(found.empty / rows.union, abs=0.015)
