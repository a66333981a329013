"""The randomised Bloom filter: what it finds, at which rates, and what it does not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tessera.crypto.group import Group, Words
from tessera.crypto.hashing import Ids
from tessera.crypto.prg import Stream
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.protocols.union import bloom
from tessera.protocols.union.bloom import (
    BloomFilter,
    Intervals,
    Level,
    filter_size,
)

ROOT = Secret(b"a test's root of 32 bytes, fixed")
RARE = 2.0**-40  # a false negative rate that no test run meets
BILLIONS = 2_000_000_000


def stream(*context: int | str) -> Stream:
    return Stream.of(ROOT, "test", *context)


def as_ids(values: Sequence[int] | set[int]) -> Ids:
    return np.array(sorted(values), dtype=np.uint64)


def summed(encoding: BloomFilter, sets: Sequence[Ids]) -> Words:
    total = encoding.group.zeros(encoding.length)
    for client, ids in enumerate(sets):
        encoding.group.iadd(total, encoding.encode(ids, stream("client", client)))
    return total


def spread(count: int, domain: int, seed: int = 0) -> Ids:
    drawn = np.random.default_rng(seed).integers(0, domain, size=2 * count, dtype=np.uint64)
    return np.sort(np.random.default_rng(seed).permutation(np.unique(drawn))[:count])


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[int, list[set[int]]]:
    domain = draw(st.sampled_from([1, 2, 60, 5_000, BILLIONS, 2**61, 2**64]))
    some = st.sets(st.integers(0, domain - 1), max_size=12)
    pool = sorted(draw(some) | {0, domain - 1})  # shared ids, and the ends of the domain
    sets = draw(st.lists(st.sets(st.sampled_from(pool)), min_size=1, max_size=6))
    return domain, [held | draw(some) for held in sets]


@settings(max_examples=40)
@given(cohorts(), st.integers(0, 2**64 - 1))
def test_every_id_of_the_union_is_found(cohort: tuple[int, list[set[int]]], seed: int) -> None:
    domain, sets = cohort
    union = set().union(*sets)
    encoding = BloomFilter.sized(
        domain, max(1, len(union)), false_negative_rate=RARE, false_positive_rate=1e-9, seed=seed
    )
    result = encoding.decode(summed(encoding, [as_ids(held) for held in sets]))
    assert result.complete and result.residual == 0
    assert result.ids.tolist() == sorted(union)  # a false positive is one in a million examples


@settings(max_examples=40)
@given(st.data())
def test_partitions_of_any_widths_may_be_combined(data: st.DataObject) -> None:
    domain = data.draw(st.integers(2_000, 3_000))
    widths = data.draw(st.lists(st.integers(2, 300), min_size=1, max_size=3))
    maps = [Intervals(domain, width) for width in widths]
    maps.sort(key=lambda each: each.count)
    held = data.draw(st.sets(st.integers(0, domain - 1), max_size=6))
    encoding = BloomFilter.sized(
        domain, 6, partitions=maps, false_negative_rate=RARE, false_positive_rate=1e-7
    )
    assert len(encoding.levels) == len(maps) + 1
    assert encoding.decode(summed(encoding, [as_ids(held)])).ids.tolist() == sorted(held)


@given(st.integers(1, 2**64), st.data())
def test_a_partition_is_the_range_between_its_first_and_last_id(
    domain: int, data: st.DataObject
) -> None:
    each = Intervals(domain, data.draw(st.integers(1, domain)))
    last = each.count - 1
    keys = as_ids({0, last // 2, last})
    first, end = each.first(keys), each.last(keys)
    assert each.of(first).tolist() == each.of(end).tolist() == keys.tolist()
    assert (int(first[0]), int(end[-1])) == (0, domain - 1)
    before = first[1:] - np.uint64(1)
    assert all(each.of(before) < keys[1:])


def test_the_server_scans_only_partitions_that_are_present(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition = Intervals(BILLIONS, 200)
    encoding = BloomFilter.sized(
        BILLIONS, 50, partitions=[partition], false_negative_rate=RARE, seed=4
    )
    ids = spread(50, BILLIONS)
    total = summed(encoding, [ids])
    scanned: list[Ids] = []
    present = Level.present

    def watch(level: Level, words: np.ndarray, keys: Ids, seed: int) -> Ids:
        scanned.append(keys)
        return present(level, words, keys, seed)

    monkeypatch.setattr(Level, "present", watch)
    encoding.decode(total)
    tried = np.concatenate(scanned)
    assert set(partition.of(tried).tolist()) == set(partition.of(ids).tolist())
    assert tried.size == 200 * np.unique(partition.of(ids)).size


def test_sizes_follow_the_papers_formula() -> None:
    assert filter_size(32_904, 1e-4) == (630_774, 13)  # long version, VI


def test_a_domain_smaller_than_the_filter_takes_the_identity_map() -> None:
    encoding = BloomFilter.sized(143_534, 32_904)
    assert encoding.length == 143_534
    assert [level.hashes for level in encoding.levels] == [0]
    assert encoding.expected_false_positives == 0.0


@pytest.mark.parametrize("domain", [143_534, BILLIONS, 2**64])
def test_stated_rates_follow_from_the_layout(domain: int) -> None:
    encoding = BloomFilter.sized(domain, 30_000, false_negative_rate=1e-5)
    assert encoding.false_negative_rate <= 1e-5
    assert encoding.expected_bytes == len(
        encoding.group.pack(encoding.group.zeros(encoding.length))
    )


def test_missed_ids_are_as_many_as_stated() -> None:
    ids = np.arange(20_000, dtype=np.uint64)
    coarse = Level(Intervals(20_000, 1), 20_000, 0)
    encoding = BloomFilter(domain=20_000, capacity=20_000, bits=8, levels=(coarse,))
    missed = ids.size - encoding.decode(encoding.encode(ids, stream("misses"))).ids.size
    rate = encoding.false_negative_rate
    assert rate == 1 / 256
    assert stats.binomtest(missed, ids.size, rate).pvalue > 1e-6


def test_strangers_are_as_many_as_stated() -> None:
    domain, members = 400_000, 3_000
    level = Level(Intervals(domain, 1), *filter_size(members, 1e-2))
    encoding = BloomFilter(domain=domain, capacity=members, bits=40, levels=(level,), seed=9)
    ids = spread(members, domain)
    found = encoding.decode(encoding.encode(ids, stream("strangers"))).ids
    strangers = np.setdiff1d(found, ids).size
    # The filter's own load varies too, so the formula is met to a few per cent.
    assert np.setdiff1d(ids, found).size == 0
    assert 0.85 < strangers / encoding.expected_false_positives < 1.15


# What the sum says about how many clients hold an id.

MANY = 60_000


def zero_left_out(group: Group, source: Stream, count: int) -> Words:
    """The mistake of replacing marks by non-zero elements."""
    words = UNIFORM(group, source, count)
    again = stream("redrawn", source.nonce.hex())
    while not words.all():
        words = np.where(words == 0, UNIFORM(group, again, count), words)
        again = again.redraw(1)
    return words


def all_ones(group: Group, source: Stream, count: int) -> Words:
    """The mistake of not replacing marks at all: a counting filter."""
    return np.ones(count, dtype=group.dtype)


UNIFORM = bloom.uniform


def one_and_fifty() -> tuple[Words, Words]:
    """The opened words of ids that one client holds, and of ids that fifty hold."""
    level = Level(Intervals(2 * MANY, 1), 2 * MANY, 0)
    encoding = BloomFilter(domain=2 * MANY, capacity=2 * MANY, bits=8, levels=(level,))
    shared = np.arange(MANY, 2 * MANY, dtype=np.uint64)
    everything = np.arange(2 * MANY, dtype=np.uint64)
    total = summed(encoding, [everything, *[shared] * 49])
    return total[:MANY], total[MANY:]


def alike(one: Words, fifty: Words) -> bool:
    """Both uniform over Z_256 and equal in distribution; wrong once in a million each."""
    counts = [np.bincount(words, minlength=256) for words in (one, fifty)]
    p_values = [stats.chisquare(count).pvalue for count in counts]
    used = [count for count in np.array(counts).T if count.any()]
    p_values.append(stats.chi2_contingency(np.array(used).T).pvalue if len(used) > 1 else 0.0)
    return min(p_values) > 1e-6


def test_one_holder_and_fifty_look_the_same() -> None:
    assert alike(*one_and_fifty())


@pytest.mark.parametrize("mistake", [zero_left_out, all_ones])
def test_a_biased_replacement_would_be_noticed(
    mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bloom, "uniform", mistake)
    assert not alike(*one_and_fifty())


def test_a_drawn_zero_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bloom, "uniform", lambda group, source, count: group.zeros(count))
    encoding = BloomFilter.sized(BILLIONS, 20)
    assert not encoding.encode(spread(20, BILLIONS), stream("zeros")).any()


def test_the_words_sent_are_as_many_for_every_set() -> None:
    encoding = BloomFilter.sized(BILLIONS, 300)
    none, many = as_ids([]), spread(300, BILLIONS)
    assert encoding.encode(none, stream(1)).shape == encoding.encode(many, stream(2)).shape
    assert not encoding.encode(none, stream(1)).any()


# Bad input.


@pytest.mark.parametrize("domain", [60, BILLIONS, 2**64])
def test_a_total_that_marks_everything_ends_incomplete_or_within_the_domain(domain: int) -> None:
    encoding = BloomFilter.sized(domain, 100)
    ones = np.ones(encoding.length, dtype=encoding.group.dtype)
    result = encoding.decode(ones)
    assert result.complete == (domain == 60)
    assert result.complete or result.residual > 0
    assert result.ids.size <= domain
    assert result.ids.size <= 4 * encoding.scanned[-1] + (1 << 18)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_any_words_decode_without_an_exception(seed: int, density: float) -> None:
    encoding = BloomFilter.sized(BILLIONS, 10)
    rng = np.random.default_rng(seed)
    words = rng.integers(0, encoding.group.order, encoding.length, dtype=np.uint64)
    words[rng.random(words.size) > density] = 0
    ids = encoding.decode(words.astype(encoding.group.dtype)).ids
    assert np.all(ids[1:] > ids[:-1]) and (not ids.size or ids[-1] < BILLIONS)


@pytest.mark.parametrize(
    "ids", [as_ids([100]), np.array([3, 2], np.uint64), np.array([2, 2], np.uint64), np.arange(3)]
)
def test_what_is_no_sorted_set_of_the_domain_is_refused(ids: Ids) -> None:
    with pytest.raises(MisuseError):
        BloomFilter.sized(100, 5).encode(ids, stream())


def test_a_total_of_another_shape_is_refused() -> None:
    encoding = BloomFilter.sized(100, 5)
    with pytest.raises(MisuseError, match="total"):
        encoding.decode(encoding.group.zeros(encoding.length + 1))
    with pytest.raises(MisuseError, match="total"):
        encoding.decode(np.zeros(encoding.length, dtype=np.float64))  # type: ignore[arg-type]


def test_layouts_that_cannot_work_are_refused() -> None:
    good = BloomFilter.sized(BILLIONS, 1_000)
    with pytest.raises(ConfigError, match="candidates"):
        BloomFilter.sized(BILLIONS, 1_000, partitions=[Intervals(BILLIONS, 10**6)])
    with pytest.raises(ConfigError, match="candidates"):
        replace(good, levels=good.levels[-1:])
    with pytest.raises(ConfigError, match="last level"):
        replace(good, levels=good.levels[:-1])
    with pytest.raises(ConfigError, match="another domain"):
        replace(good, levels=(Level(Intervals(9, 1), 9, 0), *good.levels))
    with pytest.raises(ConfigError, match="bits"):
        replace(good, bits=7)
    with pytest.raises(ConfigError, match="rates"):
        BloomFilter.sized(BILLIONS, 1_000, false_positive_rate=0.0)
    with pytest.raises(ConfigError, match="domain"):
        BloomFilter.sized(2**64 + 1, 1_000)
    with pytest.raises(ConfigError, match="identity"):
        Level(Intervals(10, 1), 9, 0)


def test_another_seed_marks_other_positions() -> None:
    encoding = BloomFilter.sized(BILLIONS, 300)
    ids = spread(300, BILLIONS)
    here = encoding.encode(ids, stream()) != 0
    there = encoding.with_seed(1).encode(ids, stream()) != 0
    leaf = slice(encoding.length - encoding.levels[-1].cells, None)
    assert np.count_nonzero(here[leaf] & there[leaf]) < 0.6 * np.count_nonzero(here[leaf])
