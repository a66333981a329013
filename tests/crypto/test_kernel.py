"""Every native path gives the reference's bits, the reference NIST's, and nothing is trusted."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import kernel
from tessera.crypto.kernel.backend import WORD_BYTES, Backend, packed_size
from tessera.crypto.kernel.reference import CHUNK, Reference
from tessera.errors import ConfigError, MisuseError

REFERENCE = Reference()
NATIVE = [name for name in kernel.available() if name != "reference"]
SOURCE = Path(kernel.__file__).with_name("kernel.c")

needs_native = pytest.mark.skipif(not NATIVE, reason="no native kernel on this machine")
each_native = pytest.mark.parametrize("path", NATIVE or ["reference"])
each_backend = pytest.mark.parametrize("name", kernel.available())

SIGNS = st.lists(st.sampled_from([1, -1]), min_size=1, max_size=5)


def backend(name: str) -> Backend:
    with kernel.use(name) as chosen:
        return chosen


def words(seed: int, count: int, word_bytes: int) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng(seed).bytes(count * word_bytes)
    return np.frombuffer(raw, dtype=f"<u{min(word_bytes, 8)}").copy()


def streams(seed: int, count: int) -> tuple[bytes, bytes]:
    rng = np.random.default_rng([seed, 1])
    return rng.bytes(16 * count), rng.bytes(8 * count)


@each_backend
def test_the_key_stream_is_nists(name: str) -> None:
    """SP 800-38A, F.5.1 (CTR-AES128.Encrypt): its output blocks."""
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    nonce, first_block = bytes.fromhex("f0f1f2f3f4f5f6f7"), 0xF8F9FAFBFCFDFEFF
    stream = np.empty(64, dtype=np.uint8)
    backend(name).keystream(key, nonce, first_block, stream)
    assert stream.tobytes().hex() == (
        "ec8cdf7398607cb0f2d21675ea9ea1e4362b7c3c6773516318a077d7fc5073ae"
        "6a2cc3787889374fbeb4c81b17ba6c44e89c399ff0f198c6d40a31db156cabfe"
    )


@each_native
@given(size=st.integers(0, 3000), first=st.integers(0, 70) | st.integers(0, 2**64 - 200))
def test_key_streams_agree(path: str, size: int, first: int) -> None:
    key, nonce = streams(size, 1)
    ours, theirs = np.empty(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)
    backend(path).keystream(key, nonce, first, ours)
    REFERENCE.keystream(key, nonce, first, theirs)
    assert np.array_equal(ours, theirs)


@each_native
@given(
    word_bytes=st.sampled_from(WORD_BYTES),
    count=st.integers(0, 700),
    signs=SIGNS,
    start=st.integers(0, 300) | st.integers(0, 2**60),
    seed=st.integers(0, 2**32),
)
def test_sums_agree(
    path: str, word_bytes: int, count: int, signs: list[int], start: int, seed: int
) -> None:
    keys, nonces = streams(seed, len(signs))
    ours = words(seed, count, word_bytes)
    theirs = ours.copy()
    backend(path).accumulate(ours, word_bytes, keys, nonces, signs, start)
    REFERENCE.accumulate(theirs, word_bytes, keys, nonces, signs, start)
    assert np.array_equal(ours, theirs)


@each_native
@pytest.mark.parametrize("word_bytes", WORD_BYTES)
def test_sums_agree_over_many_chunks_and_many_keys(path: str, word_bytes: int) -> None:
    signs = [1, -1, -1] * 50  # more than the kernel expands at once
    keys, nonces = streams(7, len(signs))
    count = (CHUNK + 100_000) // word_bytes
    ours = words(7, count, word_bytes)
    theirs = ours.copy()
    backend(path).accumulate(ours, word_bytes, keys, nonces, signs, 3)
    REFERENCE.accumulate(theirs, word_bytes, keys, nonces, signs, 3)
    assert np.array_equal(ours, theirs)


@each_native
@given(
    word_bytes=st.sampled_from(WORD_BYTES),
    width=st.integers(1, 40) | st.sampled_from([1000, 5000]),
    signs=SIGNS,
    seed=st.integers(0, 2**32),
)
def test_row_sums_agree(
    path: str, word_bytes: int, width: int, signs: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    keys, nonces = streams(seed, len(signs))
    counts = [int(rng.integers(0, 13)) for _ in signs]
    chosen = [rng.permutation(12)[:count] for count in counts]
    index = np.concatenate(chosen).astype(np.int64)
    positions = rng.integers(0, 2**50, size=index.size, dtype=np.uint64)
    ours = words(seed, 12 * width, word_bytes)
    theirs = ours.copy()
    for which, acc in ((backend(path), ours), (REFERENCE, theirs)):
        which.accumulate_rows(acc, width, word_bytes, keys, nonces, signs, counts, index, positions)
    assert np.array_equal(ours, theirs)


@each_native
@pytest.mark.parametrize("count", [52, 300, 5000])
def test_many_short_rows_agree(path: str, count: int) -> None:
    """Rows of five blocks, the last one half used: they straddle the kernel's buffer."""
    keys, nonces = streams(1, 2)
    index = np.concatenate([np.arange(count), np.arange(count)[::-1]])
    positions = np.random.default_rng(1).integers(0, 2**40, size=2 * count, dtype=np.uint64)
    ours = words(1, count * 18, 4)
    theirs = ours.copy()
    for which, acc in ((backend(path), ours), (REFERENCE, theirs)):
        which.accumulate_rows(acc, 18, 4, keys, nonces, (1, -1), (count, count), index, positions)
    assert np.array_equal(ours, theirs)


def integers(words: np.ndarray, word_bytes: int) -> list[int]:
    raw = words.tobytes()
    return [
        int.from_bytes(raw[at : at + word_bytes], "little") for at in range(0, len(raw), word_bytes)
    ]


@each_native
@given(
    word_bytes=st.sampled_from(WORD_BYTES),
    share=st.floats(0, 1),
    count=st.integers(0, 400),
    seed=st.integers(0, 2**32),
)
def test_packing_agrees(path: str, word_bytes: int, share: float, count: int, seed: int) -> None:
    fewest = 65 if word_bytes == 16 else 1
    bits = fewest + round(share * (8 * word_bytes - fewest))
    data = words(seed, packed_size(count, bits), 1)
    if count * bits % 8:
        data[-1] &= (1 << count * bits % 8) - 1
    ours = backend(path).unpack(data, count, word_bytes, bits)
    assert np.array_equal(ours, REFERENCE.unpack(data, count, word_bytes, bits))
    sums = [np.full_like(ours, np.iinfo(ours.dtype).max) for _ in range(2)]
    for one, total in zip((backend(path), REFERENCE), sums, strict=True):
        one.add_packed(total, data, word_bytes, bits)
        one.add_packed(total, data, word_bytes, bits)
    assert np.array_equal(*sums)
    assert integers(sums[0], word_bytes) == [
        (2 * word - 1) % 2 ** (8 * word_bytes) for word in integers(ours, word_bytes)
    ]
    assert np.array_equal(backend(path).pack(ours, word_bytes, bits), data)
    assert np.array_equal(REFERENCE.pack(ours, word_bytes, bits), data)


@needs_native
def test_two_threads_do_not_disturb_each_other() -> None:
    """ctypes lets go of the interpreter's lock, so both are in the kernel at once."""
    keys, nonces = streams(3, 20)
    sums = [np.zeros(200_000, dtype=np.uint32) for _ in range(3)]
    chosen = kernel.active()

    def work(acc: np.ndarray[Any, Any]) -> None:
        chosen.accumulate(acc, 4, keys, nonces, [1] * 20, 1)

    threads = [threading.Thread(target=work, args=(acc,)) for acc in sums[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work(sums[2])
    assert np.array_equal(sums[0], sums[2])
    assert np.array_equal(sums[1], sums[2])


@each_backend
def test_the_last_block_of_a_stream_can_be_used_and_none_after_it(name: str) -> None:
    chosen, (key, nonce) = backend(name), streams(1, 1)
    out = np.empty(32, dtype=np.uint8)
    chosen.keystream(key, nonce, 2**64 - 2, out)
    acc = np.zeros(8, dtype=np.uint32)
    chosen.accumulate(acc, 4, key, nonce, [1], 4 * (2**64 - 2))
    assert acc.tobytes() == out.tobytes()
    with pytest.raises(MisuseError, match="64 bits"):
        chosen.keystream(key, nonce, 2**64 - 1, out)
    with pytest.raises(MisuseError, match="64 bits"):
        chosen.accumulate(acc, 4, key, nonce, [1], 4 * (2**64 - 2) + 1)


# Each wrong call differs from a good one in one place.

KEY, NONCE = bytes(16), bytes(8)


def good_accumulate() -> dict[str, Any]:
    return {
        "acc": np.zeros(10, dtype=np.uint32),
        "word_bytes": 4,
        "keys": KEY,
        "nonces": NONCE,
        "signs": [1],
        "start_word": 0,
    }


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


WRONG_ACCUMULATE: dict[str, dict[str, Any]] = {
    "a list for an array": {"acc": [0] * 10},
    "another type": {"acc": np.zeros(10, dtype=np.uint64)},
    "signed": {"acc": np.zeros(10, dtype=np.int32)},
    "big-endian": {"acc": np.zeros(10, dtype=">u4")},
    "strided": {"acc": np.zeros(20, dtype=np.uint32)[::2]},
    "read-only": {"acc": read_only(np.zeros(10, dtype=np.uint32))},
    "words of 3 bytes": {"word_bytes": 3},
    "words of no bytes": {"word_bytes": 0},
    "half a wide word": {"word_bytes": 16, "acc": np.zeros(3, dtype=np.uint64)},
    "a short key": {"keys": KEY[:-1]},
    "a key too many": {"keys": KEY + KEY},
    "a key that is a string": {"keys": "k" * 16},
    "a short nonce": {"nonces": NONCE[:-1]},
    "no sign": {"signs": []},
    "a sign too many": {"signs": [1, 1]},
    "a sign of 2": {"signs": [2]},
    "a sign of 0": {"signs": [0]},
    "a negative start": {"start_word": -1},
}


@each_backend
@pytest.mark.parametrize("wrong", WRONG_ACCUMULATE.values(), ids=WRONG_ACCUMULATE.keys())
def test_a_wrong_argument_of_accumulate_is_refused(name: str, wrong: dict[str, Any]) -> None:
    backend(name).accumulate(**good_accumulate())
    with pytest.raises(MisuseError):
        backend(name).accumulate(**good_accumulate() | wrong)


def good_rows() -> dict[str, Any]:
    return {
        "acc": np.zeros(12, dtype=np.uint32),
        "width": 3,
        "word_bytes": 4,
        "keys": KEY + KEY,
        "nonces": NONCE + NONCE,
        "signs": [1, -1],
        "counts": [2, 1],
        "index": np.array([3, 0, 3], dtype=np.int64),
        "positions": np.array([5, 6, 7], dtype=np.uint64),
    }


WRONG_ROWS: dict[str, dict[str, Any]] = {
    "no width": {"width": 0},
    "a negative width": {"width": -3},
    "rows that do not fit": {"width": 5},
    "an index below": {"index": np.array([3, -1, 3], dtype=np.int64)},
    "an index above": {"index": np.array([4, 0, 3], dtype=np.int64)},
    "an index twice in a stream": {"index": np.array([3, 3, 3], dtype=np.int64)},
    "an index of another type": {"index": np.array([3, 0, 3], dtype=np.int32)},
    "a strided index": {"index": np.array([3, 9, 0, 9, 3, 9], dtype=np.int64)[::2]},
    "a long index": {"index": np.array([3, 0, 3, 1], dtype=np.int64)},
    "signed positions": {"positions": np.array([5, 6, 7], dtype=np.int64)},
    "positions of two axes": {"positions": np.array([[5, 6, 7]], dtype=np.uint64)},
    "a position too few": {"positions": np.array([5, 6], dtype=np.uint64)},
    "counts of something else": {"counts": [2, 2]},
    "a count too many": {"counts": [2, 1, 0]},
    "a negative count": {"counts": [4, -1]},
    "a sign of 3": {"signs": [1, 3]},
    "a missing key": {"keys": KEY},
    "a position over the counter": {
        "acc": np.zeros(40, dtype=np.uint32),
        "width": 10,  # three blocks
        "positions": np.array([5, 6, 2**63], dtype=np.uint64),
    },
}


@each_backend
@pytest.mark.parametrize("wrong", WRONG_ROWS.values(), ids=WRONG_ROWS.keys())
def test_a_wrong_argument_of_accumulate_rows_is_refused(name: str, wrong: dict[str, Any]) -> None:
    backend(name).accumulate_rows(**good_rows())
    with pytest.raises(MisuseError):
        backend(name).accumulate_rows(**good_rows() | wrong)


@each_backend
@pytest.mark.parametrize(
    "call",
    [
        lambda k: k.keystream(KEY, NONCE, -1, np.empty(4, dtype=np.uint8)),
        lambda k: k.keystream(KEY[1:], NONCE, 0, np.empty(4, dtype=np.uint8)),
        lambda k: k.keystream(KEY, NONCE, 0, np.empty(4, dtype=np.uint16)),
        lambda k: k.keystream(KEY, NONCE, 0, np.empty(8, dtype=np.uint8)[::2]),
        lambda k: k.pack(np.zeros(4, dtype=np.uint32), 4, 33),
        lambda k: k.pack(np.zeros(4, dtype=np.uint32), 4, 0),
        lambda k: k.pack(np.zeros(4, dtype=np.uint64), 16, 64),
        lambda k: k.pack(np.zeros(4, dtype=np.uint16), 4, 20),
        lambda k: k.pack(np.zeros(8, dtype=np.uint32)[::2], 4, 20),
        lambda k: k.unpack(np.zeros(9, dtype=np.uint8), 4, 4, 20),
        lambda k: k.unpack(np.zeros(11, dtype=np.uint8), 4, 4, 20),
        lambda k: k.unpack(np.zeros(20, dtype=np.uint8)[::2], 4, 4, 20),
        lambda k: k.unpack(np.zeros(10, dtype=np.int8), 4, 4, 20),
        lambda k: k.unpack(np.zeros(0, dtype=np.uint8), -1, 4, 20),
        lambda k: k.unpack(np.zeros(10, dtype=np.uint8), 4, 5, 20),
        lambda k: k.add_packed(np.zeros(4, np.uint32), np.zeros(9, dtype=np.uint8), 4, 20),
        lambda k: k.add_packed(np.zeros(3, np.uint32), np.zeros(10, dtype=np.uint8), 4, 20),
        lambda k: k.add_packed(np.zeros(4, np.uint64), np.zeros(10, dtype=np.uint8), 4, 20),
        lambda k: k.add_packed(np.zeros(4, np.uint32), np.zeros(10, dtype=np.int8), 4, 20),
    ],
)
def test_other_wrong_arguments_are_refused(name: str, call: Callable[[Backend], object]) -> None:
    with pytest.raises(MisuseError):
        call(backend(name))


# Which backend is in use.


def test_use_lasts_for_its_block_and_nests() -> None:
    before = kernel.active()
    with kernel.use("reference") as outer:
        assert kernel.active() is outer
        assert kernel.describe().name == "reference"
        with kernel.use("auto"):
            assert kernel.active().name == kernel.available()[0]
        assert kernel.active() is outer
    assert kernel.active() is before


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in kernel.available():
        monkeypatch.setenv(kernel.VARIABLE, name)
        assert kernel.active().name == name
    monkeypatch.setenv(kernel.VARIABLE, "auto")
    assert kernel.active().name == kernel.available()[0]
    monkeypatch.setenv(kernel.VARIABLE, "fastest")
    with pytest.raises(ConfigError, match="fastest"):
        kernel.active()


def test_a_path_that_does_not_run_here_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_probe", lambda: kernel.Probe((), "no AES path"))
    assert kernel.available() == ("reference",)
    with pytest.raises(ConfigError, match="no AES path"), kernel.use("aesni"):
        raise AssertionError("not reached")
    with kernel.use("auto") as chosen:
        assert chosen.name == "reference"
        assert kernel.describe() == kernel.Description(
            name="reference", available=("reference",), reason="no AES path"
        )


def test_a_kernel_that_was_not_built_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = kernel.probe(REFERENCE)
    assert found.paths == ()
    assert found.reason is not None and "not built" in found.reason


def test_a_library_that_does_not_load_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    spec = importlib.util.spec_from_file_location("_native", broken)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    found = kernel.probe(REFERENCE)
    assert found.paths == ()
    assert found.reason is not None and "does not load" in found.reason


def test_every_path_of_this_machine_passes_its_self_check() -> None:
    """A defect that the check finds takes the path away, and the tests above with it."""
    assert "self-check" not in (kernel.probe(REFERENCE).reason or "")


class OneBitOff(kernel.Native):
    """A path with a defect that only wide words show."""

    def _accumulate(self, acc: Any, word_bytes: int, *rest: Any) -> None:
        super()._accumulate(acc, word_bytes, *rest)
        if word_bytes == 16:
            acc[1] ^= acc.dtype.type(1)


@needs_native
def test_a_path_that_fails_its_self_check_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best, *lower = NATIVE

    def build(library: ctypes.CDLL, name: str) -> kernel.Native:
        return (OneBitOff if name == best else real)(library, name)

    real = kernel.Native
    monkeypatch.setattr(kernel, "Native", build)
    found = kernel.probe(REFERENCE)
    assert [path.name for path in found.paths] == lower
    assert found.reason == f"self-check failed: {best}"


# The C code under the sanitizers: a program of its own, because Python is not built with them.

HARNESS = r"""
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int tessera_paths(void);
void tessera_accumulate(int, uint8_t *, size_t, int, const uint8_t *, const uint8_t *,
                        const int8_t *, size_t, uint64_t, size_t);
void tessera_accumulate_rows(int, uint8_t *, size_t, int, const uint8_t *, const uint8_t *,
                             const int8_t *, size_t, const int64_t *, const int64_t *,
                             const uint64_t *);
void tessera_pack(const uint8_t *, size_t, int, uint8_t *, int);
void tessera_unpack(const uint8_t *, size_t, size_t, int, uint8_t *, int, int);
uint64_t tessera_aes_limit(int, uint64_t);

/* Blocks of exactly the size asked for: the sanitizer sees the first byte beyond. */
static void *filled(size_t size, int step) {
    uint8_t *memory = malloc(size ? size : 1);
    for (size_t i = 0; i < size; i++) memory[i] = (uint8_t)(i * (size_t)step + 1);
    return memory;
}

int main(void) {
    char what;
    int path, word_bytes;
    size_t a, b, c;
    while (scanf(" %c %d %d %zu %zu %zu", &what, &path, &word_bytes, &a, &b, &c) == 6) {
        if (path >= 0 && !(tessera_paths() >> path & 1)) return 3;
        uint8_t *out = NULL;
        size_t size = 0;
        if (what == 'a') { /* a bytes, b streams, from byte c on */
            uint8_t *keys = filled(16 * b, 7), *nonces = filled(8 * b, 5);
            int8_t *signs = malloc(b);
            for (size_t k = 0; k < b; k++) signs[k] = k % 2 ? -1 : 1;
            out = filled(size = a, 3);
            tessera_accumulate(path, out, size, word_bytes, keys, nonces, signs, b, c / 16, c % 16);
            free(keys), free(nonces), free(signs);
        } else if (what == 'r') { /* a rows of b bytes, c streams that each touch all of them */
            uint8_t *keys = filled(16 * c, 7), *nonces = filled(8 * c, 5);
            int8_t *signs = malloc(c);
            int64_t *bounds = malloc(8 * (c + 1)), *index = malloc(8 * a * c);
            uint64_t *positions = malloc(8 * a * c);
            for (size_t k = 0; k < c; k++) signs[k] = k % 2 ? -1 : 1;
            for (size_t k = 0; k <= c; k++) bounds[k] = (int64_t)(k * a);
            for (size_t i = 0; i < a * c; i++) index[i] = (int64_t)(i % a), positions[i] = i * i;
            out = filled(size = a * b, 3);
            tessera_accumulate_rows(path, out, b, word_bytes, keys, nonces, signs, c, bounds, index,
                                    positions);
            free(keys), free(nonces), free(signs), free(bounds), free(index), free(positions);
        } else if (what == 'u') { /* a words of b bits, and back again */
            uint8_t *data = filled((a * b + 7) / 8, 11), *back = malloc((a * b + 7) / 8);
            if (a * b % 8) data[a * b / 8] &= (uint8_t)((1 << a * b % 8) - 1);
            out = malloc(size = a * (size_t)word_bytes);
            tessera_unpack(data, (a * b + 7) / 8, a, (int)b, out, word_bytes, 0);
            tessera_pack(out, a, (int)b, back, word_bytes);
            if (memcmp(data, back, (a * b + 7) / 8)) return 4;
            tessera_unpack(data, (a * b + 7) / 8, a, (int)b, out, word_bytes, 1);
            free(data), free(back);
        } else {
            tessera_aes_limit(path, a);
        }
        if (size) fwrite(out, 1, size, stdout);
        free(out);
    }
    return 0;
}
"""


def pattern(size: int, step: int) -> bytes:
    """The harness's `filled`."""
    return bytes((i * step + 1) % 256 for i in range(size))


def alternating(count: int) -> list[int]:
    return [-1 if k % 2 else 1 for k in range(count)]


def expected_sum(word_bytes: int, size: int, count: int, offset: int) -> bytes:
    acc = np.frombuffer(pattern(size, 3), dtype=f"<u{min(word_bytes, 8)}").copy()
    keys, nonces = pattern(16 * count, 7), pattern(8 * count, 5)
    REFERENCE.accumulate(acc, word_bytes, keys, nonces, alternating(count), offset // word_bytes)
    return acc.tobytes()


def expected_rows(word_bytes: int, rows: int, row_bytes: int, count: int) -> bytes:
    acc = np.frombuffer(pattern(rows * row_bytes, 3), dtype=f"<u{min(word_bytes, 8)}").copy()
    keys, nonces = pattern(16 * count, 7), pattern(8 * count, 5)
    entries = np.arange(rows * count)
    REFERENCE.accumulate_rows(
        acc,
        row_bytes // word_bytes,
        word_bytes,
        keys,
        nonces,
        alternating(count),
        [rows] * count,
        entries % rows,
        (entries * entries).astype(np.uint64),
    )
    return acc.tobytes()


def expected_words(word_bytes: int, count: int, bits: int) -> bytes:
    data = np.frombuffer(pattern(packed_size(count, bits), 11), dtype=np.uint8).copy()
    if count * bits % 8:
        data[-1] &= (1 << count * bits % 8) - 1
    words = REFERENCE.unpack(data, count, word_bytes, bits)
    REFERENCE.add_packed(words, data, word_bytes, bits)
    return words.tobytes()


@pytest.mark.slow
def test_the_c_code_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    (tmp_path / "harness.c").write_text(HARNESS)
    program = tmp_path / "harness"
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-DTESSERA_WITHOUT_PYTHON"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(tmp_path / "harness.c"), str(SOURCE)]
    subprocess.run([compiler, *flags, *sanitize, *sources, "-o", str(program)], check=True)

    cases: list[str] = []
    expected: list[bytes] = []
    for path in (kernel._NUMBER[name] for name in NATIVE):
        for word_bytes in WORD_BYTES:
            for size in (16, 32, 144, 1040, 16_384, 40_000):
                for offset in (0, 16, 80, 112, 1008):
                    cases.append(f"a {path} {word_bytes} {size} 3 {offset}")
                    expected.append(expected_sum(word_bytes, size, 3, offset))
            size = 3 * word_bytes  # within one block, from its last word on
            cases.append(f"a {path} {word_bytes} {size} 130 {32 - word_bytes}")
            expected.append(expected_sum(word_bytes, size, 130, 32 - word_bytes))
            for rows, row_bytes in ((1, 16), (7, 48), (100, 80), (3, 3 * word_bytes), (2, 9008)):
                cases.append(f"r {path} {word_bytes} {rows} {row_bytes} 3")
                expected.append(expected_rows(word_bytes, rows, row_bytes, 3))
        cases.append(f"l {path} 0 1000 0 0")
        expected.append(b"")
    if NATIVE:  # elsewhere the library has no packing either
        for word_bytes in WORD_BYTES:
            for bits in range(65 if word_bytes == 16 else 1, 8 * word_bytes + 1):
                for count in (1, 2, 9, 100):
                    cases.append(f"u -1 {word_bytes} {count} {bits} 0")
                    expected.append(expected_words(word_bytes, count, bits))

    done = subprocess.run([program], input="\n".join(cases).encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    at = 0
    for case, answer in zip(cases, expected, strict=True):
        assert done.stdout[at : at + len(answer)] == answer, case
        at += len(answer)
    assert at == len(done.stdout)


@pytest.mark.slow
def test_the_c_code_compiles_where_there_are_no_aes_instructions(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C compiler on this machine")
    library = tmp_path / "other.so"
    flags = ["-Wall", "-Wextra", "-Werror", "-DTESSERA_PORTABLE", "-DTESSERA_WITHOUT_PYTHON"]
    command = [compiler, *flags, "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    assert ctypes.CDLL(str(library)).tessera_paths() == 0
