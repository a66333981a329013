"""Decoys: how many, which, and never one of the client's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.crypto.hashing import Ids
from tessera.crypto.prg import Stream
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.protocols.union.decoys import (
    Catalogue,
    Listed,
    WholeTable,
    decoy_count,
    draw,
    with_decoys,
)

ROOT = Secret(b"a test's root of 32 bytes, fixed")


def stream(*context: int | str) -> Stream:
    return Stream.of(ROOT, "test", *context)


def as_ids(values: set[int]) -> Ids:
    return np.array(sorted(values), dtype=np.uint64)


@given(
    st.sets(st.integers(0, 2**64 - 1), max_size=60),
    st.sets(st.integers(0, 2**64 - 1), max_size=300),
    st.floats(0, 3),
    st.integers(0, 100),
)
def test_decoys_are_listed_ids_that_the_client_does_not_hold(
    held: set[int], others: set[int], share: float, number: int
) -> None:
    listed = others | set(sorted(held)[::2])
    found = draw(as_ids(held), Listed(as_ids(listed)), stream(number), share=share)
    decoys = found.tolist()
    assert decoys == sorted(set(decoys))
    assert set(decoys) <= listed - held
    assert len(decoys) == min(decoy_count(len(held), share), len(listed - held))


@given(
    st.sampled_from([1, 5, 100, 143_534, 2_000_000_000, 2**64 - 1, 2**64]),
    st.data(),
)
def test_a_table_of_any_size_gives_decoys(domain: int, data: st.DataObject) -> None:
    held = data.draw(st.sets(st.integers(0, domain - 1), max_size=40))
    decoys = draw(as_ids(held), WholeTable(domain), stream("table"), share=0.5).tolist()
    assert len(set(decoys)) == len(decoys) == min(decoy_count(len(held), 0.5), domain - len(held))
    assert not set(decoys) & held
    assert all(0 <= decoy < domain for decoy in decoys)


@pytest.mark.parametrize(
    ("held", "share", "count"),
    [(0, 0.1, 0), (1, 0.1, 1), (10, 0.1, 1), (30, 0.1, 3), (301, 0.1, 31), (301, 0, 0), (7, 2, 14)],
)
def test_their_number_is_the_share_rounded_up(held: int, share: float, count: int) -> None:
    assert decoy_count(held, share) == count


@pytest.mark.parametrize("size", [60, 400])  # one path sorts the catalogue, the other rejects
def test_every_other_id_is_equally_likely(size: int) -> None:
    held = as_ids({0, 3, 5, 9, size - 1})
    catalogue = WholeTable(size)
    drawn = np.concatenate(
        [draw(held, catalogue, stream("even", n), share=2.0) for n in range(3_000)]
    )
    counts = np.delete(np.bincount(drawn.view(np.int64), minlength=size), held.view(np.int64))
    assert drawn.size == 30_000
    assert stats.chisquare(counts).pvalue > 1e-6  # drawn without replacement: a little narrower


def test_a_size_that_does_not_divide_the_words_favours_nobody() -> None:
    size = 3 * 2**62  # taken modulo, the first third would come twice as often
    held = as_ids(set(range(3_000)))
    drawn = draw(held, WholeTable(size), stream("thirds"), share=1.0)
    low = int(np.count_nonzero(drawn < np.uint64(2**62)))
    assert stats.binomtest(low, drawn.size, 1 / 3).pvalue > 1e-6


def test_the_same_stream_gives_the_same_decoys_and_another_gives_others() -> None:
    held = as_ids(set(range(0, 5_000, 5)))
    catalogue = WholeTable(10**9)
    first = draw(held, catalogue, stream("period", 1)).tolist()
    assert first == draw(held, catalogue, stream("period", 1)).tolist()
    assert not set(first) & set(draw(held, catalogue, stream("period", 2)).tolist())


def test_the_union_input_is_the_set_and_its_decoys() -> None:
    held = as_ids(set(range(0, 300, 3)))
    catalogue = Listed(as_ids(set(range(1_000))))
    put_in = with_decoys(held, catalogue, stream())
    assert set(held.tolist()) < set(put_in.tolist())
    assert put_in.size == 110
    assert put_in.tolist() == sorted(put_in.tolist())


def test_an_exhausted_or_empty_catalogue_gives_what_it_has() -> None:
    held = as_ids({1, 2, 3})
    assert draw(held, Listed(as_ids({1, 2, 3, 4})), stream(), share=1.0).tolist() == [4]
    assert draw(held, Listed(as_ids(set())), stream()).size == 0
    assert draw(held, Listed(held), stream()).size == 0


@pytest.mark.parametrize("constant", [0, 7])  # held, and not held
def test_a_catalogue_that_repeats_ids_is_refused(constant: int) -> None:
    with pytest.raises(MisuseError, match="sorted and distinct"):
        Listed(np.array([1, 1], dtype=np.uint64))

    class Stuck(WholeTable):
        def at(self, places: Ids) -> Ids:
            return np.full_like(places, constant)

    stuck: Catalogue = Stuck(10**6)
    with pytest.raises(MisuseError, match="repeats"):
        draw(as_ids({0, 1, 2}), stuck, stream(), share=1.0)


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf")])
def test_a_share_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        decoy_count(10, share)


def test_what_is_no_sorted_set_is_refused() -> None:
    with pytest.raises(MisuseError):
        draw(np.array([3, 2], dtype=np.uint64), WholeTable(10), stream())
