"""Three distinct bins per row, places for as many rows as possible, and a bound that holds."""

from __future__ import annotations

from itertools import combinations
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from tessera.crypto import cuckoo, kernel
from tessera.crypto.cuckoo import Layout, SimpleTable, bins_for, choices, log2_failure
from tessera.crypto.dpf import BITS
from tessera.errors import ConfigError, MisuseError

each_backend = pytest.mark.parametrize("name", kernel.available())


def largest_matching(chosen: np.ndarray, bins: int) -> int:
    """By scipy's Hopcroft-Karp."""
    items = chosen.shape[0]
    rows = np.repeat(np.arange(items), 3)
    graph = csr_array((np.ones(3 * items), (rows, chosen.ravel())), shape=(items, bins))
    return int((maximum_bipartite_matching(graph, perm_type="column") >= 0).sum())


@given(
    ids=st.lists(st.integers(0, 2**64 - 1), max_size=40, unique=True),
    seed=st.integers(0, 2**64 - 1),
    bins=st.integers(3, 50),
)
def test_the_bins_of_an_id_are_three_and_distinct(ids: list[int], seed: int, bins: int) -> None:
    chosen = choices(np.array(ids, dtype=np.uint64), seed, bins)
    assert chosen.shape == (len(ids), 3)
    assert all(len(set(row)) == 3 and 0 <= min(row) and max(row) < bins for row in chosen.tolist())


def test_all_triples_are_alike() -> None:
    """Chi-square over the 60 ordered triples of five bins; refused one time in a million."""
    chosen = choices(np.arange(60_000, dtype=np.uint64), 7, 5)
    counts = np.bincount(chosen @ np.array([25, 5, 1]), minlength=125)
    counts = counts[counts > 0]
    assert counts.size == 60
    assert ((counts - 1000) ** 2 / 1000).sum() < 130  # 59 degrees of freedom


@each_backend
@given(
    rows=st.integers(3, 200),
    bins=st.integers(3, 60),
    share=st.floats(0, 1),
    stash=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_as_many_rows_as_possible_have_a_bin_of_their_own(
    name: str, rows: int, bins: int, share: float, stash: int, seed: int
) -> None:
    table = SimpleTable.of(rows, bins, seed, stash=stash)
    wanted = np.random.default_rng(seed).permutation(rows)[: round(share * rows)]
    with kernel.use(name):
        placement = table.place(wanted)
    used = placement.bins[placement.bins >= 0]
    assert np.unique(used).size == used.size
    assert used.size == min(wanted.size, largest_matching(table.chosen[wanted], bins) + stash)
    assert placement.left_out.size == wanted.size - used.size
    for which, where in enumerate(placement.bins.tolist()):
        if where >= 0:
            assert placement.holder[where] == which
            members = table.members[table.sizes[:where].sum() :][: table.sizes[where]]
            inside = members if where < bins else np.arange(rows)
            assert inside[placement.points[where]] == wanted[which]
    assert np.array_equal(placement.points < 0, placement.holder < 0)
    assert (placement.points >= 0).sum() == used.size


@given(items=st.integers(0, 120), bins=st.integers(3, 80), seed=st.integers(0, 2**32))
def test_every_path_peels_alike(items: int, bins: int, seed: int) -> None:
    chosen = choices(np.arange(items, dtype=np.uint64), seed, bins)
    results = []
    for name in kernel.available():
        with kernel.use(name) as backend:
            results.append(backend.peel(chosen, bins).tolist())
    assert all(result == results[0] for result in results)


@given(rows=st.integers(3, 300), bins=st.integers(3, 90), seed=st.integers(0, 2**64 - 1))
def test_the_simple_table_has_every_row_in_its_three_bins(rows: int, bins: int, seed: int) -> None:
    table = SimpleTable.of(rows, bins, seed)
    starts = np.cumsum(table.sizes) - table.sizes
    assert table.sizes.sum() == 3 * rows == table.members.size
    for column in range(3):
        places = starts[table.chosen[:, column]] + table.positions[:, column]
        assert np.array_equal(table.members[places], np.arange(rows))
    for begin, size in zip(starts.tolist(), table.sizes.tolist(), strict=True):
        assert np.all(np.diff(table.members[begin : begin + size]) > 0)


def test_a_table_of_many_bins_is_sorted_too() -> None:
    table = SimpleTable.of(100_000, 70_000, 1)
    assert np.all(np.diff(table.chosen.ravel()[table._by_bin]) >= 0)
    starts = np.cumsum(table.sizes) - table.sizes
    places = starts[table.chosen] + table.positions
    assert np.array_equal(table.members[places], np.repeat(np.arange(100_000)[:, None], 3, axis=1))


def test_a_narrowed_domain_hashes_ids_and_not_positions() -> None:
    ids = np.array([3, 10, 2**40, 2**63], dtype=np.uint64)
    table = SimpleTable.of(ids, 7, 5)
    assert np.array_equal(table.chosen, choices(ids, 5, 7))


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ConfigError, {"bins": 2}),
        (ConfigError, {"domain": 2}),
        (ConfigError, {"domain": 1}),
        (ConfigError, {"stash": -1}),
        (ConfigError, {"domain": cuckoo.STASH_ROWS + 1, "stash": 1}),
        (MisuseError, {"domain": np.array([1, 1, 2], dtype=np.uint64)}),
        (MisuseError, {"domain": np.array([1, 3, 2], dtype=np.uint64)}),
        (MisuseError, {"domain": np.array([1, 2, 3], dtype=np.int64)}),
    ],
)
def test_a_table_that_cannot_work_is_refused(error: type[Exception], arguments: dict) -> None:
    good = {"domain": 10, "bins": 5, "seed": 1, "stash": 0}
    SimpleTable.of(good["domain"], good["bins"], good["seed"], stash=good["stash"])
    bad = good | arguments
    with pytest.raises(error):
        SimpleTable.of(bad["domain"], bad["bins"], bad["seed"], stash=bad["stash"])


@pytest.mark.parametrize("rows", [[1, 1], [-1], [10], [[1]], [0.5]])
def test_rows_that_are_not_rows_are_refused(rows: list) -> None:
    with pytest.raises(MisuseError):
        SimpleTable.of(10, 5, 1).place(np.array(rows))


# How many bins.


def exact_failure(ids: int, bins: int, stash: int) -> float:
    """P(more than `stash` left over), by going through all sequences of triples."""
    triples = list(combinations(range(bins), 3))
    failed = 0
    for code in range(len(triples) ** ids):
        chosen = [triples[code // len(triples) ** i % len(triples)] for i in range(ids)]
        deficit = max(
            len(some) - len({b for row in some for b in row})
            for size in range(ids + 1)
            for some in combinations(chosen, size)
        )
        failed += deficit > stash
    return failed / len(triples) ** ids


@pytest.mark.parametrize(("ids", "bins"), [(3, 4), (4, 4), (4, 5), (5, 4)])
def test_the_bound_is_above_the_exact_probability(ids: int, bins: int) -> None:
    exact = exact_failure(ids, bins, 0)
    bound = log2_failure(ids, bins)
    assert bound >= (log2(exact) if exact else -np.inf) - 1e-9
    if ids == 4:  # four rows with one triple are the only failure, and the bound is exact
        assert 2**bound == pytest.approx(comb(bins, 3) ** -3) == exact


@pytest.mark.slow
@pytest.mark.parametrize(("ids", "stash"), [(8, 0), (16, 0), (40, 0), (150, 0), (24, 1), (24, 2)])
def test_the_bound_holds_in_simulation_at_weak_targets(ids: int, stash: int) -> None:
    """At the bins for 2^-6: failures stay within the bound, and within five sigma of it.

    Where four rows in three bins dominate (small sets), the bound is close too.
    """
    bins = bins_for(ids, stash=stash, failure_bits=6)
    runs = 4000
    failed = 0
    rng = np.random.default_rng(ids)
    for _ in range(runs):
        chosen = choices(
            rng.integers(0, 2**63, ids).astype(np.uint64), int(rng.integers(2**62)), bins
        )
        failed += largest_matching(chosen, bins) < ids - stash
    bound = 2 ** log2_failure(ids, bins, stash)
    assert bound <= 2**-6
    assert failed <= runs * bound + 5 * (runs * bound) ** 0.5
    if ids <= 8:
        assert failed >= runs * bound / 3 - 5 * (runs * bound) ** 0.5


def test_the_number_of_bins_is_the_smallest_that_meets_the_bound() -> None:
    for rows in (1, 3, 4, 5, 32, 100, 418, 3277):
        bins = bins_for(rows)
        assert log2_failure(rows, bins) <= -40
        assert bins == 3 or log2_failure(rows, bins - 1) > -40
    assert [bins_for(rows) for rows in (1, 2, 3)] == [3, 3, 3]  # three rows always fit three bins


@pytest.mark.slow
def test_the_papers_scale_factor_misses_the_bound_for_small_sets() -> None:
    """1.25 bins a row for 32 rows: simulated, more than one client in 2^13 fails."""
    runs, failed = 20_000, 0
    ids = np.arange(32, dtype=np.uint64)
    for seed in range(runs):
        chosen = choices(ids, seed, 40)
        if len(set(map(tuple, chosen.tolist()))) < 29 or _peels_not(chosen, 40):
            failed += largest_matching(chosen, 40) < 32
    assert failed > runs / 2**13


def _peels_not(chosen: np.ndarray, bins: int) -> bool:
    return bool((kernel.active().peel(chosen, bins) < 0).any())


def test_more_rows_bins_or_stash_move_the_bound_the_right_way() -> None:
    assert log2_failure(50, 100) < log2_failure(51, 100)
    assert log2_failure(50, 101) < log2_failure(50, 100)
    assert log2_failure(50, 100, 1) < log2_failure(50, 100)
    assert bins_for(30, stash=2) < bins_for(30, stash=1) < bins_for(30)


def test_large_sets_need_thirty_per_cent_more_bins_than_rows() -> None:
    assert 1.25 < bins_for(20_000) / 20_000 < 1.30


@pytest.mark.parametrize("call", [lambda: bins_for(0), lambda: bins_for(5, stash=-1)])
def test_no_rows_are_a_config_error(call) -> None:
    with pytest.raises(ConfigError):
        call()


def test_a_layout_says_what_it_cannot_do() -> None:
    layout = Layout.of(SimpleTable.of(10, 5, 1), BITS)
    with pytest.raises(MisuseError, match="no values"):
        layout.spread(layout.table.place(np.arange(2)), np.zeros((2, 1), dtype=np.uint32))
    with pytest.raises(MisuseError):
        layout.rows(layout.forest.empty(), 0)
    with pytest.raises(MisuseError, match="10 rows"):
        layout.padded(np.zeros((9, 4), dtype=np.uint8))
    with pytest.raises(MisuseError, match="10 rows"):
        layout.answer([], np.zeros((9, 32), dtype=np.uint8), 4)
