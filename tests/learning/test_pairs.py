"""Pair counts: a client's part, the sums, the solve, and what is published of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from tessera.data.examples import Examples
from tessera.data.sequences import SEEN, Sequences
from tessera.errors import ConfigError
from tessera.learning.models.pairs import TABLE, PairModel, Pairs, largest
from tessera.learning.scores import SummedModel
from tessera.learning.tables.table import LazyTable, TableSpec, Zeros

ITEMS = 7
people = st.lists(st.permutations(range(ITEMS)).map(lambda p: p[:5]), min_size=1, max_size=4)


def of(sequences) -> Sequences:
    user = np.repeat(np.arange(len(sequences)), [len(own) for own in sequences])
    return Sequences.sorted(
        user, np.concatenate(sequences).astype(np.int64), None, users=len(sequences), items=ITEMS
    )


def defined(pairs: Pairs, sequences) -> np.ndarray:
    """Both sums by their definition."""
    q, tables = np.exp(-1 / pairs.tau), np.zeros((2, ITEMS, ITEMS))
    for own in sequences:
        for t in range(len(own) - 1):
            h = np.zeros(ITEMS)
            for back, item in enumerate(own[t::-1][: pairs.window]):
                h[item] = q**back
            tables[0] += np.outer(h, h)
            tables[1, :, own[t + 1]] += h
    return tables


@given(people, st.sampled_from([0.5, 1.0, 6.0]))
@settings(max_examples=40)
def test_the_sums_are_those_of_the_definition_and_of_everybodys_parts(sequences, tau):
    pairs = Pairs(items=ITEMS, tau=tau)
    events = of(sequences)
    expected = defined(pairs, sequences)
    assert_allclose(pairs.sums_of(events), expected, atol=1e-9)
    parts = []
    for own in sequences:
        user, cell, weight = pairs.counts(of([own]))
        assert (np.diff(cell) > 0).all() and not user.any()
        parts.append((cell, weight))
    assert_allclose(pairs.sums(parts), expected, atol=1e-9)


def test_without_order_it_is_ease():
    sequences = [[0, 1, 2], [1, 2, 3], [4, 0], [2, 5, 6, 1]]
    pairs = Pairs(items=ITEMS, tau=0.0, penalty=2.0)
    held = np.zeros((4, ITEMS))
    for row, own in enumerate(sequences):
        held[row, own] = 1.0
    _, cell, weight = pairs.counts(of(sequences))
    gram = pairs.sums([(cell, weight)])
    assert_allclose(gram[0], held.T @ held)
    assert_allclose(pairs.sums_of(of(sequences)), gram)
    weights = pairs.solved(gram)
    assert_allclose(np.diag(weights), 0.0)
    # Each column is the ridge regression of an item on the others.
    for item in range(ITEMS):
        others = np.delete(np.arange(ITEMS), item)
        left = held[:, others].T @ held[:, others] + 2.0 * np.eye(ITEMS - 1)
        assert_allclose(
            weights[others, item], np.linalg.solve(left, held[:, others].T @ held[:, item])
        )


def test_histories_count_by_how_long_ago():
    pairs = Pairs(items=ITEMS, tau=2.0)
    found = pairs.history(np.array([[3, 1, -1], [-1, -1, -1]]))
    assert_allclose(found[0, [3, 1]], [1.0, np.exp(-0.5)])
    assert found[0].sum() == pytest.approx(1.0 + np.exp(-0.5)) and not found[1].any()


def test_a_pair_with_too_few_holders_is_not_published():
    pairs = Pairs(items=ITEMS, tau=1.0, penalty=1.0)
    latest = np.array([[0, -1]])
    some = Examples({"history": latest, SEEN: latest})
    summed = summed_up(pairs, [[0, 1], [0, 1], [0, 2]])
    everything = PairModel(pairs, 1).solved(summed)(some)[0]
    published = PairModel(pairs, 2).solved(summed)(some)[0]
    assert everything[1] > everything[2] > 0
    assert published[1] > 0 and published[2] == 0


def summed_up(pairs: Pairs, sequences) -> SummedModel:
    table = LazyTable(TableSpec(name=TABLE, size=pairs.cells, width=2, initial=Zeros()))
    for own in sequences:
        _, cell, weight = pairs.counts(of([own]))
        ids = cell.astype(np.uint64)
        values = np.stack([weight, np.ones(len(cell))], 1).astype(np.float32)
        table.put(ids, table.values(ids) + values, np.ones(len(ids), np.int64))
    return SummedModel(np.zeros(0, np.float32), {TABLE: table})


@pytest.mark.parametrize("tau", [0.0, 2.0])
def test_of_a_catalogue_without_room_the_most_held_items_are_solved(monkeypatch, tau):
    rng = np.random.default_rng(5)
    often = [0, 2, 3, 5]  # the others have few holders
    chances = np.where(np.isin(np.arange(ITEMS), often), 1.0, 0.1)
    chances /= chances.sum()
    sequences = [rng.choice(ITEMS, 5, replace=False, p=chances).tolist() for _ in range(200)]
    pairs = Pairs(items=ITEMS, tau=tau, penalty=1.0)
    latest = np.array([[2, 1, 5], [1, -1, -1]])
    some, summed = Examples({"history": latest, SEEN: latest}), summed_up(pairs, sequences)
    whole = PairModel(pairs).solved(summed)(some)
    monkeypatch.setattr("tessera.learning.models.pairs.physical_memory", lambda: 2 * 4 * 8 * 4**2)
    assert pairs.solved_items == 4
    assert "solves over 4 x 4 numbers" in PairModel(pairs).cost
    assert f"all {ITEMS} items would take" in PairModel(pairs).cost
    found = PairModel(pairs).solved(summed)(some)
    # The same as if only these items existed, under their numbers.
    few, place = Pairs(items=4, tau=tau, penalty=1.0), np.full(ITEMS + 1, -1)
    place[often] = np.arange(4)
    tables = pairs_tables(pairs, sequences)[:, often][:, :, often]
    assert_allclose(
        found[:, often], few.history(place[latest]) @ few.solved(tables), rtol=1e-4, atol=1e-7
    )
    # Below them popularity, which is all that is left of a history without any of them.
    rest = np.setdiff1d(np.arange(ITEMS), often)
    holders = np.array([sum(k in own[: len(own) - bool(tau)] for own in sequences) for k in rest])
    assert np.array_equal(found[0, rest], found[1, rest]) and (found[:, rest] < 1e-8).all()
    assert_allclose(found[0, rest] / found[0, rest].max(), holders / holders.max())
    assert set(np.argsort(-found[1])[:4].tolist()) == set(often)
    assert not np.allclose(whole, found)


def pairs_tables(pairs: Pairs, sequences):
    _, cell, weight = pairs.counts(of(sequences))
    flat = np.bincount(cell, weights=weight, minlength=pairs.cells)
    tables = flat.reshape(-1, ITEMS, ITEMS)
    upper = np.triu(tables[0], 1)
    tables[0] = upper + upper.T + np.diag(np.diag(tables[0]))
    return tables


def test_the_largest_entries_of_each_row_stay():
    weights = np.array([[3.0, -5.0, 1.0], [0.0, 2.0, -1.0]])
    assert largest(weights, 2).tolist() == [[3.0, -5.0, 0.0], [0.0, 2.0, -1.0]]


@pytest.mark.parametrize(
    ("settings_", "match"),
    [
        ({"penalty": 0.0}, "makes? the solve singular"),
        ({"tau": -1.0}, "tau = -1"),
        ({"tau": float("nan")}, "tau = nan"),
    ],
)
def test_what_cannot_be_solved_is_refused(settings_, match):
    with pytest.raises(ConfigError, match=match):
        Pairs(items=3, **settings_)


def test_a_catalogue_that_does_not_fit_is_refused_before_anything_is_made():
    with pytest.raises(ConfigError, match="bytes; this machine has"):
        Pairs(items=10_000_000).check_memory()
