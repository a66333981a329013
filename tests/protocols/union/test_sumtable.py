"""The keyed sum table: exact unions, stated rates, and a view that depends on the union alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tessera.crypto.field import Field
from tessera.crypto.group import Group, Words
from tessera.crypto.hashing import Ids, distinct_positions
from tessera.crypto.prg import Stream
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.protocols.union import sizing, sumtable
from tessera.protocols.union.sumtable import MAX_FALSE_PURITIES, SumTable, batch_inverse

ROOT = Secret(b"a test's root of 32 bytes, fixed")
BILLIONS = 2_000_000_000
DOMAINS = [1, 2, 60, 143_534, BILLIONS, 2**31 - 1, 2**31, 2**33, 2**45, 2**61, 2**64]


def stream(*context: int | str) -> Stream:
    return Stream.of(ROOT, "test", *context)


def as_ids(values: Sequence[int] | set[int]) -> Ids:
    return np.array(sorted(values), dtype=np.uint64)


def summed(encoding: SumTable, sets: Sequence[Ids]) -> Words:
    total = encoding.group.zeros(encoding.length)
    for client, ids in enumerate(sets):
        encoding.group.iadd(total, encoding.encode(ids, stream("client", client)))
    return total


def spread(count: int, domain: int, seed: int = 0) -> Ids:
    drawn = np.random.default_rng(seed).integers(0, domain, size=2 * count, dtype=np.uint64)
    return np.sort(np.random.default_rng(seed).permutation(np.unique(drawn))[:count])


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[int, list[set[int]]]:
    domain = draw(st.sampled_from(DOMAINS))
    some = st.sets(st.integers(0, domain - 1), max_size=12)
    pool = sorted(draw(some) | {0, domain - 1})  # shared ids, and the ends of the domain
    sets = draw(st.lists(st.sets(st.sampled_from(pool)), min_size=1, max_size=6))
    return domain, [held | draw(some) for held in sets]


@given(cohorts(), st.integers(0, 2**64 - 1))
def test_the_union_is_exact_whenever_decoding_says_so(
    cohort: tuple[int, list[set[int]]], seed: int
) -> None:
    domain, sets = cohort
    union = set().union(*sets)
    encoding = SumTable.sized(domain, max(1, len(union)), seed=seed)
    result = encoding.decode(summed(encoding, [as_ids(held) for held in sets]))
    found = set(result.ids.tolist())
    assert result.complete == (result.residual == 0)
    assert found == union if result.complete else found < union
    assert result.ids.tolist() == sorted(found)


@pytest.mark.parametrize("domain", DOMAINS[3:])
def test_a_large_union_of_overlapping_sets_is_exact(domain: int) -> None:
    union = spread(5_000, domain)
    encoding = SumTable.sized(domain, union.size, seed=8)
    sets = [union[shift::3] for shift in (0, 1, 2, 0)] + [union[:50]] * 3
    result = encoding.decode(summed(encoding, sets))
    assert result.complete
    np.testing.assert_array_equal(result.ids, union)


@pytest.mark.parametrize("start", [0, 2**40, 2**64 - 300])
def test_neighbouring_ids_decode_like_any_others(start: int) -> None:
    ids = np.arange(300, dtype=np.uint64) + np.uint64(start)
    encoding = SumTable.sized(2**64, ids.size, seed=3)
    result = encoding.decode(encoding.encode(ids, stream("neighbours")))
    assert result.complete
    np.testing.assert_array_equal(result.ids, ids)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("capacity", [1, 300, 30_000])
def test_the_layout_keeps_false_purities_below_the_bound(domain: int, capacity: int) -> None:
    encoding = SumTable.sized(domain, capacity)
    assert encoding.expected_false_purities <= MAX_FALSE_PURITIES
    assert encoding.limb_range <= encoding.group.order
    assert encoding.expected_bytes == len(
        encoding.group.pack(encoding.group.zeros(encoding.length))
    )
    assert encoding.length == encoding.cells * encoding.words_per_cell


def test_two_billion_ids_need_a_check_word_only_in_the_small_field() -> None:
    small = SumTable.sized(BILLIONS, 30_000)
    assert (small.exponent, small.limbs, small.checks) == (31, 1, 1)
    two_words = replace(small, exponent=61, checks=0)
    assert two_words.expected_false_purities < 2.0**-26
    assert small.expected_bytes < 0.8 * two_words.expected_bytes
    with pytest.raises(ConfigError, match="pass for pure"):
        replace(small, checks=0)


# Failures at the stated rates. Wrong once in about 10^5 fixed seeds each.


def failures(encoding: SumTable, ids: Ids, tables: int) -> int:
    seeded = (encoding.with_seed(seed) for seed in range(tables))
    return sum(
        not table.decode(table.encode(ids, stream("tables", table.seed))).complete
        for table in seeded
    )


@pytest.mark.parametrize("capacity", [10, 30, 100, 300])
def test_a_full_table_almost_always_peels(capacity: int) -> None:
    ids = np.arange(capacity, dtype=np.uint64)
    tables = 200
    failed = failures(SumTable.sized(BILLIONS, capacity), ids, tables)
    assert failed <= stats.binom.isf(1e-5, tables, sizing.TARGET)


def test_hashed_ids_fail_as_often_as_the_simulated_hypergraphs() -> None:
    rates = [r for r in sizing.SIMULATED if r.ids == 30 and 0.2 < r.failures / r.trials < 0.8]
    for rate in rates[:3]:
        encoding = replace(
            SumTable.sized(BILLIONS, 30), cells=rate.cells, hashes=rate.hashes, capacity=30
        )
        failed = failures(encoding, np.arange(30, dtype=np.uint64), 200)
        table = [[failed, 200 - failed], [rate.failures, rate.trials - rate.failures]]
        assert stats.fisher_exact(table).pvalue > 1e-5
    assert rates


def test_an_overfull_table_gives_what_it_can_and_says_so() -> None:
    encoding = SumTable.sized(BILLIONS, 300, seed=2)
    ids = spread(420, BILLIONS)
    result = encoding.decode(encoding.encode(ids, stream("overfull")))
    assert not result.complete and result.residual > 0
    assert set(result.ids.tolist()) < set(ids.tolist())


# What the sum says about how many clients hold an id.

MANY = 10_000
UNIFORM = sumtable.uniform


def half_range(group: Group, source: Stream, count: int) -> Words:
    """The mistake of drawing r from half of the field: sums of many spread out further."""
    return UNIFORM(group, source, count) >> 1


def ones(group: Group, source: Stream, count: int) -> Words:
    """The mistake of not drawing r at all: the cell counts the holders."""
    return np.ones(count, dtype=group.dtype)


def one_and_fifty() -> tuple[Words, Words]:
    """First words of cells that one id has to itself: of ids with one holder, and with fifty."""
    ids = np.arange(2 * MANY, dtype=np.uint64)
    shared = ids[MANY:]
    encoding = SumTable.sized(BILLIONS, 2 * MANY, seed=1)
    total = summed(encoding, [ids, *[shared] * 49])
    cells = distinct_positions(ids, encoding.seed, encoding.cells, encoding.hashes).view(np.int64)
    alone = np.bincount(cells.reshape(-1), minlength=encoding.cells) == 1
    r = total[: encoding.cells]
    one, fifty = cells[0, :MANY], cells[0, MANY:]
    return r[one[alone[one]]], r[fifty[alone[fifty]]]


def alike(one: Words, fifty: Words) -> bool:
    """Both uniform over the field and equal in distribution; wrong once in a million each."""
    scaled = [words / float(2**31 - 1) for words in (one, fifty)]
    p_values = [stats.kstest(each, "uniform").pvalue for each in scaled]
    p_values.append(stats.ks_2samp(*scaled).pvalue)
    return min(p_values) > 1e-6


def test_one_holder_and_fifty_look_the_same() -> None:
    one, fifty = one_and_fifty()
    assert min(one.size, fifty.size) > 500
    assert alike(one, fifty)


@pytest.mark.parametrize("mistake", [half_range, ones])
def test_a_biased_draw_would_be_noticed(
    mistake: Callable[[Group, Stream, int], Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sumtable, "uniform", mistake)
    assert not alike(*one_and_fifty())


def test_a_drawn_zero_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sumtable, "uniform", lambda group, source, count: group.zeros(count))
    encoding = SumTable.sized(BILLIONS, 20)
    assert not encoding.encode(spread(20, BILLIONS), stream("zeros")).any()


@pytest.mark.parametrize("domain", [BILLIONS, 2**33, 2**64])
def test_an_id_adds_the_same_words_at_all_its_cells(domain: int) -> None:
    encoding = SumTable.sized(domain, 10)
    ids = as_ids([domain - 3])
    words = encoding.encode(ids, stream("one id")).reshape(-1, encoding.cells)
    cells = distinct_positions(ids, 0, encoding.cells, encoding.hashes)[:, 0].view(np.int64)
    column = words[:, cells]
    assert (column == column[:, :1]).all() and column[0, 0] != 0
    assert np.count_nonzero(words.any(axis=0)) == encoding.hashes


def test_randomness_of_another_round_changes_every_word() -> None:
    encoding = SumTable.sized(BILLIONS, 10)
    ids = as_ids([5])
    first, second = (encoding.encode(ids, stream("round", number)) for number in (1, 2))
    marked = first != 0
    assert (first[marked] != second[marked]).all()


# Bad input.


def in_one_cell_only(encoding: SumTable) -> Words:
    """An id that is in one of its cells: taking it out there puts it into the others."""
    ids = as_ids([encoding.domain // 2])
    words = encoding.encode(ids, stream("one cell")).reshape(-1, encoding.cells)
    cells = distinct_positions(ids, 0, encoding.cells, encoding.hashes)[:, 0].view(np.int64)
    words[:, cells[1:]] = 0
    return words.reshape(-1)


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_false_peel_that_goes_to_and_fro_ends_with_nothing_found(domain: int) -> None:
    encoding = SumTable.sized(domain, 30)
    result = encoding.decode(in_one_cell_only(encoding))
    assert not result.complete and result.residual > 0
    assert result.ids.size == 0  # as often in as out


def test_no_more_than_twice_the_cells_are_peeled(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = SumTable.sized(BILLIONS, 30)
    total = in_one_cell_only(encoding)
    peeled: list[int] = []
    add = SumTable._add

    def count(table: SumTable, words: Words, positions: np.ndarray, payload: Words) -> np.ndarray:
        peeled.append(payload.shape[1])
        assert sum(peeled) <= 2 * encoding.cells
        return add(table, words, positions, payload)

    monkeypatch.setattr(SumTable, "_add", count)
    monkeypatch.setattr(sumtable, "MAX_ROUNDS", 10**6)
    encoding.decode(total)
    assert sum(peeled) == 2 * encoding.cells


@pytest.mark.parametrize("domain", [BILLIONS, 2**33, 2**64])
def test_an_id_in_cells_that_are_not_its_own_is_not_pure(domain: int) -> None:
    encoding = SumTable.sized(domain, 30)
    ids = as_ids([domain // 2])
    words = encoding.encode(ids, stream("elsewhere")).reshape(-1, encoding.cells)
    own = words.any(axis=0)
    column = words[:, own][:, 0]
    everywhere = np.arange(encoding.cells)
    assert encoding._pure(words, everywhere)[0].size == encoding.hashes
    words[:, ~own], words[:, own] = column[:, None], 0
    assert encoding._pure(words, everywhere)[0].size == 0


@settings(max_examples=50)
@given(st.sampled_from(DOMAINS), st.integers(0, 2**32), st.floats(0, 1))
def test_any_words_decode_without_an_exception(domain: int, seed: int, density: float) -> None:
    encoding = SumTable.sized(domain, 20)
    rng = np.random.default_rng(seed)
    words = rng.integers(0, encoding.group.order, encoding.length, dtype=np.uint64)
    words[rng.random(words.size) > density] = 0
    result = encoding.decode(words.astype(encoding.group.dtype))
    assert result.complete == (result.residual == 0)
    assert not result.ids.size or int(result.ids[-1]) < domain


@pytest.mark.parametrize(("domain", "wider"), [(BILLIONS, 2**31 - 1), (3 * 2**40 + 10, 2**42)])
def test_an_id_outside_the_domain_is_not_found(domain: int, wider: int) -> None:
    encoding = SumTable.sized(domain, 30)
    foreign = replace(encoding, domain=wider)  # the same words, for ids that end later
    result = encoding.decode(foreign.encode(as_ids([domain - 1, domain + 5]), stream("foreign")))
    assert result.ids.tolist() == [domain - 1] and not result.complete


def test_a_table_of_equal_words_does_not_decode_as_complete() -> None:
    encoding = SumTable.sized(BILLIONS, 3_000)
    result = encoding.decode(np.full(encoding.length, 1, dtype=encoding.group.dtype))
    assert not result.complete  # every quotient is id 1, which belongs into a few cells only


def test_a_spoiled_word_is_noticed() -> None:
    encoding = SumTable.sized(BILLIONS, 300)
    ids = spread(300, BILLIONS)
    total = encoding.encode(ids, stream("spoiled"))
    total[7] = (int(total[7]) + 1) % encoding.group.order
    assert not encoding.decode(total).complete


@pytest.mark.parametrize(
    "ids", [as_ids([100]), np.array([3, 2], np.uint64), np.array([2, 2], np.uint64), np.arange(3)]
)
def test_what_is_no_sorted_set_of_the_domain_is_refused(ids: Ids) -> None:
    with pytest.raises(MisuseError):
        SumTable.sized(100, 5).encode(ids, stream())


def test_a_total_that_is_no_sum_of_this_table_is_refused() -> None:
    encoding = SumTable.sized(100, 5)
    with pytest.raises(MisuseError, match="total"):
        encoding.decode(encoding.group.zeros(encoding.length - 1))
    unreduced = np.full(encoding.length, encoding.group.order, dtype=encoding.group.dtype)
    with pytest.raises(MisuseError, match="total"):
        encoding.decode(unreduced)


@pytest.mark.parametrize(
    "change",
    [
        {"hashes": 2, "cells": 40},
        {"hashes": 6, "cells": 42},
        {"cells": 1_001},
        {"exponent": 19},
        {"limbs": 0},
        {"limbs": 4},
        {"checks": 2},
        {"capacity": 0},
        {"seed": -1},
        {"domain": 0},
        {"domain": 2**64 + 1},
        {"domain": 2**31},  # its largest id equals p and would read as 0
    ],
)
def test_layouts_that_cannot_work_are_refused(change: dict[str, int]) -> None:
    good = SumTable.sized(BILLIONS, 500)
    with pytest.raises(ConfigError):
        replace(good, **change)


# The batch inversion under it.


@pytest.mark.parametrize("exponent", [31, 61])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 15, 16, 17, 18, 33, 1_000, 1_025])
def test_a_batch_of_inverses_multiplies_back_to_one(exponent: int, count: int) -> None:
    field = Field(exponent)
    rng = np.random.default_rng(count)
    values = rng.integers(1, field.order, count, dtype=np.uint64).astype(field.dtype)
    product = field.mul(values, batch_inverse(field, values))
    assert product.shape == (count,) and (product == 1).all()
