"""How large an encoding is made, and which one is chosen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.errors import ConfigError
from tessera.protocols.union import sizing
from tessera.protocols.union.bloom import BloomFilter, Intervals
from tessera.protocols.union.choice import EncodingChoice, choose
from tessera.protocols.union.sizing import size_for, union_bound, upper_bound
from tessera.protocols.union.sumtable import SumTable

SCRIPT = Path(__file__).parents[3] / "scripts" / "simulate_sumtable.py"
BILLIONS = 2_000_000_000


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The simulation, as a module."""
    spec = importlib.util.spec_from_file_location("simulate_sumtable", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@given(st.integers(1, 10**7))
def test_a_table_has_three_to_five_hashes_which_divide_its_cells(capacity: int) -> None:
    cells, hashes = size_for(capacity)
    assert 3 <= hashes <= 5
    assert cells % hashes == 0
    assert cells > 1.222 * capacity  # below that no table of 3 hashes peels, and others need more


@given(st.integers(1, 10**6), st.integers(0, 1_000))
def test_more_ids_never_get_fewer_cells_beyond_rounding(capacity: int, more: int) -> None:
    assert size_for(capacity).cells <= size_for(capacity + more).cells + 5


def test_small_unions_have_a_floor() -> None:
    assert size_for(1) == size_for(2) == size_for(10)
    assert size_for(30).cells > 2 * 30
    assert size_for(300).cells > 1.4 * 300
    assert size_for(30_000).cells <= 1.3 * 30_000


def test_every_size_in_use_is_within_the_target() -> None:
    used = [r for r in sizing.SIMULATED if upper_bound(r.failures, r.trials) <= sizing.TARGET]
    assert {rate.ids for rate in used} == {rate.ids for rate in sizing.SIMULATED}


def test_the_upper_bound_is_close_to_the_exact_one() -> None:
    for failures, trials in ((0, 4_000), (3, 8_000), (12, 20_000)):
        exact = stats.beta.ppf(0.95, failures + 1, trials - failures)
        assert 0.85 * exact < upper_bound(failures, trials) < 1.15 * exact


@pytest.mark.parametrize("index", range(0, 60, 6))
def test_the_table_comes_from_the_script(index: int, script: ModuleType) -> None:
    small = [rate for rate in sizing.SIMULATED if rate.ids <= 1_000]
    rate = small[index % len(small)]
    trials = min(400, rate.trials)
    failures = script.count_failures(rate.ids, rate.hashes, rate.cells, trials, seed=99)
    table = [[failures, trials - failures], [rate.failures, rate.trials - rate.failures]]
    assert stats.fisher_exact(table).pvalue > 1e-5


def test_the_simulation_repeats_itself(script: ModuleType) -> None:
    point = (30, 3, 39, 200)
    assert script.count_failures(*point, seed=5) == script.count_failures(*point, seed=5)
    assert 0.5 < script.count_failures(*point, seed=5) / 200 < 0.8


def test_the_bound_is_the_domain_the_cohort_or_an_earlier_estimate() -> None:
    assert union_bound(BILLIONS, 100, 300) == 30_000
    assert union_bound(143, 100, 300) == 143
    assert union_bound(BILLIONS, 100, 300, expected=12_000) == 12_000
    assert union_bound(BILLIONS, 100, 300, expected=90_000) == 30_000


@pytest.mark.parametrize("numbers", [(1, 0, 1), (1, 1, 0), (9, 9, 9, 0), (9, -1, 9), (9, 9, -9)])
def test_numbers_that_are_not_positive_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        union_bound(*numbers)
    with pytest.raises(ConfigError, match="positive"):
        choose(*numbers[:3], expected_union=(numbers[3:] or (None,))[0])


def test_an_empty_domain_is_refused() -> None:
    with pytest.raises(ConfigError, match="domain"):
        union_bound(0, 1, 1)
    with pytest.raises(ConfigError, match="domain"):
        choose(0, 1, 1)


def test_a_table_for_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity"):
        size_for(0)


# The choice.


def test_the_papers_table_takes_the_identity_map_and_billions_the_sum_table() -> None:
    papers = choose(143_534, 100, 301, expected_union=32_904)
    assert isinstance(papers, BloomFilter)
    assert papers.length == 143_534
    large = choose(BILLIONS, 100, 301, expected_union=30_000)
    assert isinstance(large, SumTable)
    assert large.expected_bytes < 1_000_000


@given(
    st.sampled_from([10, 1_000, 10**5, 10**7, BILLIONS, 2**64]),
    st.integers(1, 200),
    st.integers(1, 400),
)
def test_the_cheaper_encoding_wins(domain: int, cohort: int, max_rows: int) -> None:
    chosen = choose(domain, cohort, max_rows)
    forced = [choose(domain, cohort, max_rows, encoding=each) for each in EncodingChoice]
    assert chosen.expected_bytes == min(each.expected_bytes for each in forced)
    assert {each.capacity for each in forced} == {chosen.capacity}


def test_a_plan_can_say_which() -> None:
    bloom = choose(BILLIONS, 10, 30, encoding=EncodingChoice.BLOOM)
    table = choose(143, 10, 30, encoding=EncodingChoice.SUM_TABLE)
    assert isinstance(bloom, BloomFilter)
    assert isinstance(table, SumTable)


def test_decoys_have_their_place_in_the_size() -> None:
    assert choose(BILLIONS, 100, 300).capacity == 33_000
    assert choose(BILLIONS, 100, 300, decoy_share=0).capacity == 30_000


def test_partitions_too_coarse_to_scan_leave_the_sum_table() -> None:
    coarse = [Intervals(BILLIONS, 10**7)]
    assert isinstance(choose(BILLIONS, 100, 300, partitions=coarse), SumTable)
    with pytest.raises(ConfigError, match="candidates"):
        choose(BILLIONS, 100, 300, partitions=coarse, encoding=EncodingChoice.BLOOM)


def test_the_seed_reaches_the_encoding() -> None:
    assert choose(BILLIONS, 10, 30, seed=77).seed == 77
    assert choose(BILLIONS, 10, 30).with_seed(78).seed == 78
