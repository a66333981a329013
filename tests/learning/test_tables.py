"""A table against a dictionary of rows, and untouched rows against the rule that makes them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tracemalloc
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from tessera.errors import ConfigError, MisuseError
from tessera.learning.tables import table as initial_module
from tessera.learning.tables.submodel import Floats, Ids
from tessera.learning.tables.table import (
    DenseTable,
    DerivedMap,
    Distribution,
    Given,
    LazyTable,
    Normal,
    StoredTable,
    TableSpec,
    Uniform,
    Zeros,
)

LARGEST = 2**64 - 1
DISTRIBUTIONS = [Zeros(), Uniform(0.25), Normal(0.01)]


def spec(
    size: int = 2_000_000_000,
    width: int = 3,
    initial: Distribution | None = None,
    seed: int = 7,
    name: str = "goods",
) -> TableSpec:
    return TableSpec(name=name, size=size, width=width, initial=initial or Normal(0.01), seed=seed)


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.uint64)


def ones(count: int) -> np.ndarray:
    return np.ones(count, dtype=np.int64)


def filled(count: int, width: int, value: float) -> Floats:
    return np.full((count, width), value, dtype=np.float32)


id_sets = st.sets(
    st.one_of(
        st.integers(0, 12),
        st.sampled_from([2**31, 2**32 - 1, 2**63 - 1, 2**63, LARGEST - 1]),
        st.integers(0, LARGEST - 1),
    ),
    max_size=12,
).map(lambda chosen: ids(*sorted(chosen)))


# --- What an untouched row holds ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initial", "row"),
    [
        (Zeros(), "0000000000000000000000000000000000000000"),
        (Uniform(0.25), "942b38be23e3bf3d192b79be84b72b3eafcf533d"),
        (Normal(0.01), "cbc830bc730fa03b868ab5bc50da1f3cf3d82b3b"),
    ],
    ids=str,
)
def test_an_untouched_row_has_these_bytes_for_ever(initial: Distribution, row: str) -> None:
    # A store does not hold untouched rows: if this changes, so must the name of the rule.
    untouched = spec(width=5, initial=initial).initial_values(ids(1_234_567_890))
    assert untouched.astype("<f4").tobytes().hex() == row


@given(
    row=st.integers(0, LARGEST - 1),
    seed=st.integers(0, LARGEST),
    width=st.integers(1, 9),
    name=st.text(min_size=1, max_size=8),
)
def test_a_row_is_aes_of_its_id_read_through_the_normal_quantile(
    row: int, seed: int, width: int, name: str
) -> None:
    key = hashlib.sha256(b"tessera rows 1\0" + seed.to_bytes(8, "little") + name.encode()).digest()
    encrypt = Cipher(algorithms.AES(key[:16]), modes.ECB()).encryptor().update
    expected = []
    for column in range(width):
        block = encrypt(row.to_bytes(8, "little") + (column // 4).to_bytes(8, "little"))
        word = int.from_bytes(block[4 * (column % 4) :][:4], "little")
        expected.append(2.0 * NormalDist().inv_cdf((word + 0.5) / 2**32))
    table = spec(size=LARGEST, width=width, initial=Normal(2.0), seed=seed, name=name)
    # The standard library takes the machine's own logarithm, which may differ in the last bit.
    assert_allclose(table.initial_values(ids(row))[0], expected, rtol=2**-23)


@pytest.mark.parametrize("initial", DISTRIBUTIONS, ids=str)
@given(rows=id_sets, data=st.data())
def test_a_row_does_not_depend_on_its_batch(
    initial: Distribution, rows: Ids, data: st.DataObject
) -> None:
    table = spec(size=LARGEST, initial=initial)
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=rows.size, max_size=rows.size)))
    part = rows[chosen.astype(bool)]
    assert_array_equal(table.initial_values(part), table.initial_values(rows)[chosen.astype(bool)])


def test_a_batch_longer_than_one_chunk_is_the_sum_of_its_parts() -> None:
    table = spec(width=18)
    rows = np.arange(5_000, dtype=np.uint64) * np.uint64(399_999)
    whole = table.initial_values(rows)
    assert_array_equal(
        whole, np.concatenate([table.initial_values(part) for part in np.split(rows, 50)])
    )


def test_another_process_computes_the_same_rows() -> None:
    program = (
        "import hashlib, numpy as np\n"
        "from tessera.learning.tables.table import Normal\n"
        "from tessera.learning.tables.table import TableSpec\n"
        "table = TableSpec(name='goods', size=2**64 - 1, width=18, initial=Normal(0.1), seed=5)\n"
        "rows = table.initial_values(np.arange(0, 2**64 - 1, 2**53 - 111, dtype=np.uint64))\n"
        "print(rows.shape, hashlib.sha256(rows.tobytes()).hexdigest())\n"
    )
    source = str(Path(initial_module.__file__).parents[2])
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": source, "PYTHONHASHSEED": "99"},
        capture_output=True,
        text=True,
        check=True,
    )
    table = spec(size=LARGEST, width=18, initial=Normal(0.1), seed=5)
    rows = table.initial_values(np.arange(0, LARGEST, 2**53 - 111, dtype=np.uint64))
    assert other.stdout.split(") ")[1].strip() == hashlib.sha256(rows.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("initial", "cdf"),
    [(Normal(0.05), stats.norm(0, 0.05)), (Uniform(0.3), stats.uniform(-0.3, 0.6))],
    ids=["normal", "uniform"],
)
def test_untouched_entries_follow_their_distribution(
    initial: Distribution, cdf: stats.rv_continuous
) -> None:
    # 180,000 entries of a fixed seed. A sound rule fails the Kolmogorov-Smirnov test for one seed
    # in 1,000, and one of the four normal scores below for one in 4,000.
    rows = np.arange(10_000, dtype=np.uint64) * np.uint64(199_999)
    untouched = spec(width=18, initial=initial, seed=11).initial_values(rows).astype(np.float64)
    assert stats.kstest(untouched.ravel(), cdf.cdf).pvalue > 1e-3
    score = untouched / cdf.std()
    pairs = score[1:] * score[:-1], score[:, 1:] * score[:, :-1]  # next row, next column
    other_seed = spec(width=18, initial=initial, seed=12).initial_values(rows) / cdf.std()
    other_name = (
        spec(width=18, initial=initial, seed=11, name="shops").initial_values(rows) / cdf.std()
    )
    for product in (*pairs, score * other_seed, score * other_name):
        assert abs(product.sum()) / np.sqrt(product.size) < 3.8


def test_the_normal_quantile_agrees_with_the_standard_library_out_to_its_ends() -> None:
    u = np.concatenate([[2.0**-33, 0.075, 0.925, 1 - 2.0**-33], (np.arange(4096) + 0.5) / 4096])
    expected = [NormalDist().inv_cdf(p) for p in u]
    assert_allclose(initial_module._normal_quantile(u), expected, rtol=1e-14, atol=1e-16)


# --- Reading and updating -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LazyTable, DenseTable])
@pytest.mark.parametrize("initial", DISTRIBUTIONS, ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_a_table_is_a_dictionary_of_rows(
    make: type[LazyTable] | type[DenseTable], initial: Distribution, data: st.DataObject
) -> None:
    table = make(spec(size=40, width=2, initial=initial))
    oracle: dict[int, Floats] = {}
    everything = np.arange(40, dtype=np.uint64)
    untouched = table.initial(everything)
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = ids(*sorted(data.draw(st.sets(st.integers(0, 39), max_size=20))))
        counts = data.draw(st.lists(st.integers(0, 2), min_size=chosen.size, max_size=chosen.size))
        step = np.float32(data.draw(st.floats(-8, 8, width=32)))
        replaced = data.draw(st.booleans())
        values = np.full((chosen.size, 2), step, dtype=np.float32)
        kept = (table.put if replaced else table.update)(
            chosen, values, np.array(counts, dtype=np.int64)
        )
        for row, count in zip(chosen.tolist(), counts, strict=True):
            if count:
                before = oracle.get(row, untouched[row])
                oracle[row] = np.full(2, step) if replaced else before + step
        assert kept == sum(count > 0 for count in counts)
        assert table.touched == len(oracle)
    expected = np.array([oracle.get(row, untouched[row]) for row in range(40)])
    assert_array_equal(table.values(everything), expected)
    changed, values = table.pending()
    assert changed.tolist() == sorted(oracle)
    assert_array_equal(values, expected[sorted(oracle)])
    assert_array_equal(table.initial(everything), untouched)


def test_reading_rows_stores_none_of_them() -> None:
    table = LazyTable(spec())
    first = table.values(ids(0, 5, 1_999_999_999))
    first += 1.0  # the caller's copy
    assert_array_equal(table.values(ids(5)), table.initial(ids(5)))
    assert table.touched == 0
    assert table.pending()[0].size == 0


def test_a_decoy_row_reads_the_same_after_the_round() -> None:
    table = LazyTable(spec())
    before = table.values(ids(3, 4, 5))
    assert table.update(ids(3, 4, 5), filled(3, 3, 9.0), np.array([1, 0, 2])) == 2
    assert_array_equal(table.values(ids(4))[0], before[1])
    assert_array_equal(table.values(ids(3, 5)), before[[0, 2]] + np.float32(9.0))
    assert table.touched == 2
    assert table.pending()[0].tolist() == [3, 5]


def test_a_row_moved_by_nothing_is_kept_all_the_same() -> None:
    table = LazyTable(spec())
    assert table.update(ids(8), filled(1, 3, 0.0), ones(1)) == 1
    assert table.touched == 1


def test_the_first_and_the_last_of_almost_two_to_the_64_rows_can_be_updated() -> None:
    table = LazyTable(spec(size=LARGEST, initial=Zeros()))
    ends = ids(0, 2**63 - 1, 2**63, LARGEST - 1)
    table.update(ends, np.arange(12, dtype=np.float32).reshape(4, 3), ones(4))
    assert_array_equal(table.values(ends), np.arange(12, dtype=np.float32).reshape(4, 3))
    assert_array_equal(table.values(ids(1, 2**63 + 1)), 0.0)


def test_many_small_updates_find_every_row_again() -> None:
    rng = np.random.default_rng(4)
    table = LazyTable(spec(initial=Zeros(), width=1))
    pool = rng.permutation(np.arange(3_000, dtype=np.uint64) * np.uint64(655_360))
    for part in np.split(pool, 300):
        part = np.sort(part)
        table.update(part, part[:, None].astype(np.float32), ones(part.size))
    everything = np.sort(pool)
    assert_array_equal(table.values(everything)[:, 0], everything.astype(np.float32))
    assert_array_equal(table.values(everything + np.uint64(1)), 0.0)
    assert table.touched == 3_000


def test_two_billion_rows_cost_what_the_touched_ones_do() -> None:
    # 100,000 rows of 18 columns are 8.8 MB with their ids and slots. The bound leaves room for the
    # arena's spare quarter and the list of pending ids; the peak also for one batch's temporaries.
    rng = np.random.default_rng(1)
    pool = rng.permutation(np.arange(100_000, dtype=np.uint64) * np.uint64(19_999))
    batches = [np.sort(part) for part in np.split(pool, 10)]
    deltas, counts = filled(10_000, 18, 0.5), ones(10_000)
    tracemalloc.start()
    try:
        table = LazyTable(spec(width=18))
        for batch in batches:
            table.values(batch)
            table.update(batch, deltas, counts)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.touched == 100_000
    assert kept < 120 * 100_000
    assert peak < 200 * 100_000


def test_settled_rows_are_no_longer_pending_and_keep_their_values() -> None:
    table = LazyTable(spec(initial=Zeros()))
    table.update(ids(1, 2), filled(2, 3, 1.0), ones(2))
    table.settle()
    table.update(ids(2, 9), filled(2, 3, 1.0), ones(2))
    changed, values = table.pending()
    assert changed.tolist() == [2, 9]
    assert_array_equal(values, [[2.0] * 3, [1.0] * 3])


def test_given_rows_are_copied_and_all_of_them_wait_to_be_stored() -> None:
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    table = DenseTable.from_array("goods", array)
    array[:] = -1.0
    assert_array_equal(table.values(ids(0, 2)), [[0.0, 1.0], [4.0, 5.0]])
    assert table.pending()[0].tolist() == [0, 1, 2]
    assert table.touched == 3
    with pytest.raises(MisuseError, match="its first rows are given"):
        table.initial(ids(0))


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LazyTable, DenseTable])
def test_an_id_outside_the_table_is_named_with_table_and_size(
    make: type[LazyTable] | type[DenseTable],
) -> None:
    table: StoredTable = make(spec(size=100))
    bad = ids(7, 100, 4_000)
    for use in (
        lambda: table.values(bad),
        lambda: table.initial(bad),
        lambda: table.update(bad, filled(3, 3, 1.0), ones(3)),
        lambda: table.put(bad, filled(3, 3, 1.0), np.zeros(3, dtype=np.int64)),
    ):
        with pytest.raises(ConfigError, match="'goods': row id 100 is outside its 100 rows") as e:
            use()
        assert e.value.hint is not None and "the last is 99" in e.value.hint
    assert table.touched == 0


@pytest.mark.parametrize(
    "bad",
    [ids(2, 1), ids(1, 1), np.array([1, 2]), ids(1, 2).reshape(1, 2), ids(1, 2).astype(float)],
    ids=["unsorted", "repeated", "signed", "nested", "float"],
)
def test_ids_that_are_not_a_sorted_set_are_our_callers_mistake(bad: Ids) -> None:
    with pytest.raises(MisuseError, match="row ids must be"):
        LazyTable(spec()).values(bad)


@pytest.mark.parametrize(
    ("values", "counts", "message"),
    [
        (filled(2, 4, 1.0), ones(2), "expected float32"),
        (filled(1, 3, 1.0), ones(2), "expected float32"),
        (filled(2, 3, 1.0).astype(np.float64), ones(2), "float64"),
        (filled(2, 3, 1.0), ones(3), "expected whole numbers"),
        (filled(2, 3, 1.0), ones(2) / 2, "expected whole numbers"),
        (filled(2, 3, 1.0), -ones(2), "below 0"),
        (filled(2, 3, np.nan), ones(2), "not finite"),
        (filled(2, 3, np.inf), ones(2), "not finite"),
    ],
)
def test_an_update_that_is_not_one_changes_nothing(
    values: Floats, counts: np.ndarray, message: str
) -> None:
    table = LazyTable(spec())
    with pytest.raises(MisuseError, match=message):
        table.update(ids(1, 2), values, counts)
    assert table.touched == 0
    assert table.pending()[0].size == 0


def test_a_row_that_would_overflow_is_refused_and_the_others_with_it() -> None:
    table = LazyTable(spec(initial=Zeros()))
    table.update(ids(1), filled(1, 3, 3e38), ones(1))
    with pytest.raises(MisuseError, match="not finite"):
        table.update(ids(1, 2), filled(2, 3, 3e38), ones(2))
    assert_array_equal(table.values(ids(1, 2)), [[np.float32(3e38)] * 3, [0.0] * 3])


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0},
        {"size": 2**64},
        {"width": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"name": ""},
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_a_config_error(change: dict[str, int | str]) -> None:
    fields: dict[str, int | str] = {"name": "goods", "size": 10, "width": 2, "seed": 0}
    with pytest.raises(ConfigError):
        TableSpec(**(fields | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e38])
def test_a_scale_that_cannot_be_is_a_config_error(scale: float) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        Normal(scale)
    with pytest.raises(ConfigError, match="must be positive"):
        Uniform(scale)


def test_given_rows_need_an_array_that_can_be_a_table() -> None:
    with pytest.raises(MisuseError, match="expected float32"):
        DenseTable.from_array("goods", np.zeros((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not finite"):
        DenseTable.from_array("goods", filled(2, 2, np.nan))
    for make in (LazyTable, DenseTable):
        with pytest.raises(MisuseError, match="given rows"):
            make(spec(size=4, initial=Given()))


# --- Derived tables -------------------------------------------------------------------------------

GOODS, CATEGORIES = spec(size=5), spec(size=3, name="categories")


def test_derived_rows_follow_from_the_parents() -> None:
    derived = DerivedMap(GOODS, CATEGORIES, np.array([2, 0, 2, 1, 0]))
    assert derived.images(ids(0, 1, 2, 4)).tolist() == [2, 0, 2, 0]
    assert derived.row_ids(ids(0, 1, 2, 4)).tolist() == [0, 2]
    assert derived.row_ids(ids(0, 1)).dtype == np.uint64
    assert derived.row_ids(ids()).size == 0


def test_a_derived_map_may_be_a_function_over_any_domain() -> None:
    derived = DerivedMap(spec(size=LARGEST), spec(size=100, name="c"), lambda i: i % np.uint64(100))
    assert derived.row_ids(ids(3, 103, LARGEST - 1)).tolist() == [3, 14]


def test_a_derived_map_keeps_its_own_copy() -> None:
    array = np.array([2, 0, 2, 1, 0])
    derived = DerivedMap(GOODS, CATEGORIES, array)
    array[:] = 99
    assert derived.row_ids(ids(0, 3)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("hole", "message"),
    [
        (np.array([0, 1, 2, -1, 0]), "row 3 maps to -1"),
        (np.array([0, 1, 3, 0, 0]), "row 2 maps to 3, which is not one of its 3 rows"),
        (np.array([0, 1, 2]), "row 3 of it is left out"),
        (np.zeros(6, dtype=int), "has shape"),
        (np.zeros(5), "float64, not whole numbers"),
    ],
    ids=["negative", "too large", "too short", "too long", "float"],
)
def test_a_derived_map_with_a_hole_is_a_config_error(hole: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        DerivedMap(GOODS, CATEGORIES, hole)
    assert "'categories' of 'goods'" in str(error.value)


def test_a_negative_image_is_a_hole_in_the_largest_table_too() -> None:
    # -2 and 2^64 - 2 have the same bits, and the latter is a row.
    with pytest.raises(ConfigError, match="row 4 maps to -2"):
        DerivedMap(GOODS, spec(size=LARGEST, name="c"), np.array([0, 1, 2, 3, -2]))


def test_a_function_with_a_hole_is_found_at_the_first_id_that_falls_in() -> None:
    derived = DerivedMap(GOODS, CATEGORIES, lambda i: i.astype(np.int64) - 1)
    assert derived.row_ids(ids(1, 2)).tolist() == [0, 1]
    with pytest.raises(ConfigError, match="row 0 maps to -1"):
        derived.row_ids(ids(0, 1))
    with pytest.raises(ConfigError, match="did not return one row per id"):
        DerivedMap(GOODS, CATEGORIES, lambda i: i[:1]).row_ids(ids(0, 1))
    with pytest.raises(ConfigError, match="row id 5 is outside"):
        derived.row_ids(ids(5))
