"""Every path encodes sets as `IndexSet` does one by one, and finds the rows that clients share."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import kernel
from tessera.crypto.kernel.backend import Backend
from tessera.crypto.kernel.sets import Members
from tessera.errors import MisuseError
from tessera.wire.index_set import LEAST_BITS, IndexSet

NATIVE = [name for name in kernel.available() if name != "reference"]
each_backend = pytest.mark.parametrize("name", kernel.available())

INDICES = st.integers(0, 40) | st.integers(0, 5000) | st.integers(0, 2**64 - 1)
SETS = st.lists(st.frozensets(INDICES, max_size=40), max_size=8)
EDGES = [
    [],
    [0],
    [1],
    [2**64 - 1],
    [0, 2**64 - 1],
    [3, 2**63, 2**64 - 2],
    range(1000),
    range(7, 15),
    range(0, 2**20, 2**10),
    [2**k for k in range(64)],
    range(2**64 - 9, 2**64),
    range(2**58, 2**64, 2**58),
]


def backend(name: str) -> Backend:
    with kernel.use(name) as chosen:
        return chosen


def joined(sets) -> tuple[np.ndarray, np.ndarray]:
    parts = [np.array(sorted(each), dtype=np.uint64) for each in sets]
    bounds = np.cumsum([0, *map(len, parts)])
    return np.concatenate([np.zeros(0, dtype=np.uint64), *parts]), bounds


def one_by_one(indices: np.ndarray, bounds: np.ndarray) -> list[bytes]:
    """By the encoder of single sets."""
    codes = []
    for begin, end in pairwise(bounds):
        out = bytearray()
        IndexSet(1 << 30).write(out, indices[begin:end])
        codes.append(bytes(out))
    return codes


def assert_encoded(name: str, sets) -> None:
    indices, bounds = joined(sets)
    codes, ends = backend(name).encode_sets(indices, bounds, least_bits=LEAST_BITS)
    expected = one_by_one(indices, bounds)
    assert codes.tobytes() == b"".join(expected)
    assert ends.tolist() == np.cumsum([len(code) for code in expected]).tolist()


@each_backend
@given(sets=SETS)
def test_many_sets_are_encoded_as_each_is_alone(name, sets):
    assert_encoded(name, sets)


@each_backend
def test_sets_at_the_edges_are_encoded_as_each_is_alone(name):
    assert_encoded(name, EDGES)
    for each in EDGES:
        assert_encoded(name, [each])
    assert_encoded(name, [])


@each_backend
@pytest.mark.parametrize("low", [1, 2, 3, 7, 8, 31, 33, 55, 56, 57, 58])
def test_any_number_of_low_bits_is_encoded(name, low):
    rng = np.random.default_rng(low)
    gaps = rng.integers(1 << low, 2 << low, 60, dtype=np.uint64)
    assert_encoded(name, [np.cumsum(gaps).tolist(), np.cumsum(gaps[:5]).tolist()])


@each_backend
@pytest.mark.parametrize("least", [0, 1, 3, 13, 64])
def test_short_codes_are_filled_up_with_zeros(name, least):
    indices, bounds = joined(EDGES)
    codes, ends = backend(name).encode_sets(indices, bounds, least_bits=least)
    short, short_ends = backend(name).encode_sets(indices, bounds)
    starts, short_starts = [0, *ends], [0, *short_ends]
    for s, each in enumerate(EDGES):
        code = codes[starts[s] : starts[s + 1]].tobytes()
        unfilled = short[short_starts[s] : short_starts[s + 1]].tobytes()
        filled = (least * len(each) + 7) // 8
        assert code.startswith(unfilled) and not any(code[len(unfilled) :])
        assert len(code) == len(unfilled) or len(unfilled) < len(code) <= filled + 20


MEMBERSHIPS = st.dictionaries(
    st.integers(0, 6), st.frozensets(st.integers(0, 9)), min_size=1, max_size=7
)


@each_backend
@given(held=MEMBERSHIPS, data=st.data())
def test_shared_rows_are_those_of_plain_sets(name, held, data):
    total = 7
    by_row = [sorted(c for c, rows in held.items() if row in rows) for row in range(10)]
    starts = np.cumsum([0, *map(len, by_row)])
    clients = np.array([c for each in by_row for c in each], dtype=np.uint32)
    members = Members(starts, clients, total)
    own = sorted(held[data.draw(st.sampled_from(sorted(held)))])
    rows = np.array(own, dtype=np.int64)
    counts = backend(name).shared_counts(members, rows)
    shared = [[i for i, row in enumerate(own) if row in held.get(c, ())] for c in range(total)]
    assert counts.tolist() == [len(each) for each in shared]
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    indices, bounds = backend(name).shared_rows(members, rows, counts, wanted)
    found = [indices[a:b].tolist() for a, b in pairwise(bounds)]
    assert found == [each for each, is_wanted in zip(shared, wanted, strict=True) if is_wanted]


@each_backend
def test_what_does_not_fit_together_is_refused(name):
    one = backend(name)
    indices = np.array([3, 5], dtype=np.uint64)
    with pytest.raises(MisuseError, match="not sorted"):
        one.encode_sets(indices[::-1].copy(), np.array([0, 2]))
    with pytest.raises(MisuseError, match="not sorted"):
        one.encode_sets(np.array([3, 3], dtype=np.uint64), np.array([0, 2]))
    for bounds in ([1, 2], [0, 1], [0, 2, 1, 2], [0, 3], []):
        with pytest.raises(MisuseError, match="bounds"):
            one.encode_sets(indices, np.array(bounds, dtype=np.int64))
    for bits in (-1, 65):
        with pytest.raises(MisuseError, match="64 at most"):
            one.encode_sets(indices, np.array([0, 2]), least_bits=bits)
    with pytest.raises(MisuseError, match="uint64"):
        one.encode_sets(indices.astype(np.int64), np.array([0, 2]))
    with pytest.raises(MisuseError, match="contiguous"):
        one.encode_sets(np.arange(4, dtype=np.uint64)[::2], np.array([0, 2]))

    good = np.array([0, 2], dtype=np.int64), np.array([0, 1], dtype=np.uint32)
    members = Members(*good, 2)
    for row in (-1, 1):
        with pytest.raises(MisuseError, match="outside"):
            one.shared_counts(members, np.array([row]))
    with pytest.raises(MisuseError, match="2 clients"):
        one.shared_rows(members, np.array([0]), np.array([1]), np.array([True]))
    with pytest.raises(MisuseError, match="over 1"):
        Members(*good, 1)
    with pytest.raises(MisuseError, match="ascend"):
        Members(np.array([0, 2, 1, 2]), good[1], 2)
    with pytest.raises(MisuseError, match="from 0"):
        Members(np.array([0, 1]), good[1], 2)


DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int tessera_encode_sets(const uint64_t *, const int64_t *, size_t, unsigned, uint8_t *, int64_t *);

int main(void) {
    size_t sets, room;
    unsigned least;
    while (scanf("%zu %u %zu", &sets, &least, &room) == 3) {
        int64_t *bounds = malloc(8 * (sets + 1)), *ends = malloc(8 * sets);
        for (size_t s = 0; s <= sets; s++)
            if (scanf("%ld", &bounds[s]) != 1) return 2;
        size_t count = (size_t)bounds[sets];
        uint64_t *indices = malloc(8 * count + !count);
        for (size_t i = 0; i < count; i++)
            if (scanf("%lu", &indices[i]) != 1) return 2;
        uint8_t *out = malloc(room); /* exactly what is promised: one byte more would be seen */
        tessera_encode_sets(indices, bounds, sets, least, out, ends);
        fwrite(out, 1, (size_t)ends[sets - 1], stdout);
        free(bounds), free(ends), free(indices), free(out);
    }
    return 0;
}
"""


@pytest.mark.skipif(not NATIVE, reason="no native kernel on this machine")
def test_the_c_code_of_sets_is_clean_under_the_sanitizers(tmp_path: Path, monkeypatch) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    (tmp_path / "driver.c").write_text(DRIVER)
    program = str(tmp_path / "driver")
    flags = ["-std=gnu11", "-O1", "-g0", "-Wall", "-Wextra", "-Werror"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(tmp_path / "driver.c"), str(Path(kernel.__file__).with_name("sets.c"))]
    built = subprocess.run(
        [compiler, *flags, *sanitize, *sources, "-o", program], capture_output=True, text=True
    )
    if built.returncode and "asan" in built.stderr:
        pytest.skip("no address sanitizer on this machine")
    assert built.returncode == 0, built.stderr

    rng = np.random.default_rng(5)
    cases = [[each] for each in EDGES] + [EDGES]
    for low in range(1, 64):
        gaps = rng.integers(0, 1 << low, rng.integers(1, 9), dtype=np.uint64) + np.uint64(1)
        cases.append([sorted({int(x) for x in np.cumsum(gaps)}), [1], [2**63]])
    text, expected, rooms = [], b"", []
    path = backend(NATIVE[0])
    monkeypatch.setattr(
        path, "_encode_sets", lambda indices, bounds, least, out, ends: rooms.append(out.size)
    )
    for sets in cases:
        indices, bounds = joined(sets)
        path.encode_sets(indices, bounds, least_bits=LEAST_BITS)
        text.append(" ".join(map(str, [len(sets), LEAST_BITS, rooms[-1], *bounds, *indices])))
        expected += b"".join(one_by_one(indices, bounds))
    done = subprocess.run([program], input="\n".join(text).encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == expected
