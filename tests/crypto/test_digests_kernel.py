"""Digests of rows: every path against hashlib, and the C code under the sanitizers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import kernel
from tessera.crypto.kernel import digests
from tessera.crypto.kernel.backend import Backend
from tessera.errors import MisuseError

PERSON = b"whose it"


def backend(name: str) -> Backend:
    with kernel.use(name) as found:
        return found


def by_hashlib(person: bytes, numbers: np.ndarray, rows: np.ndarray) -> list[bytes]:
    return [
        hashlib.blake2s(int(n).to_bytes(8, "little") + row.tobytes(), person=person).digest()
        for n, row in zip(numbers, rows, strict=True)
    ]


@pytest.mark.parametrize("name", kernel.available())
@given(count=st.integers(0, 9), width=st.integers(0, 300), seed=st.integers(0, 2**32))
def test_a_digest_is_blake2s_of_number_and_row(
    name: str, count: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 2**64, count, dtype=np.uint64)
    rows = rng.integers(0, 256, (count, width), dtype=np.uint8)
    person = rng.bytes(8)
    found = backend(name).row_digests(person, numbers, rows)
    assert [row.tobytes() for row in found] == by_hashlib(person, numbers, rows)


@pytest.mark.parametrize("width", [55, 56, 57, 119, 120, 121, 184])
def test_rows_that_end_where_a_block_does(width: int) -> None:
    rows = np.arange(3 * width).astype(np.uint8).reshape(3, width)
    numbers = np.array([0, 1, 2**64 - 1], dtype=np.uint64)
    for name in kernel.available():
        found = backend(name).row_digests(PERSON, numbers, rows)
        assert [row.tobytes() for row in found] == by_hashlib(PERSON, numbers, rows)


@pytest.mark.parametrize(
    "wrong",
    [
        {"person": b"short"},
        {"numbers": np.zeros(4, dtype=np.uint64)},
        {"numbers": np.zeros(3, dtype=np.int64)},
        {"numbers": np.zeros(6, dtype=np.uint64)[::2]},
        {"rows": np.zeros((3, 4), dtype=np.int8)},
        {"rows": np.zeros(3, dtype=np.uint8)},
        {"rows": np.zeros((3, 8), dtype=np.uint8)[:, ::2]},
    ],
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any]) -> None:
    good = {
        "person": PERSON,
        "numbers": np.zeros(3, dtype=np.uint64),
        "rows": np.zeros((3, 4), dtype=np.uint8),
    }
    for name in kernel.available():
        with pytest.raises(MisuseError):
            backend(name).row_digests(**(good | wrong))


DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int tessera_row_digests(const uint8_t *, size_t, const uint64_t *, const uint8_t *, size_t,
                        uint8_t *);

int main(void) { /* rows of 0 to 199 bytes in blocks of exactly that size */
    for (size_t width = 0; width < 200; width++) {
        uint64_t *numbers = malloc(8 * 3);
        uint8_t *rows = malloc(3 * width + (width == 0)), *out = malloc(32 * 3);
        for (size_t i = 0; i < 3; i++) numbers[i] = i + width;
        for (size_t i = 0; i < 3 * width; i++) rows[i] = (uint8_t)(7 * i);
        const uint8_t *person = (const uint8_t *)"whose it";
        if (tessera_row_digests(person, 3, numbers, rows, width, out)) return 1;
        fwrite(out, 32, 3, stdout);
        free(numbers), free(rows), free(out);
    }
    return 0;
}
"""


def test_the_c_code_of_digests_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    (tmp_path / "driver.c").write_text(DRIVER)
    program = tmp_path / "driver"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-DTESSERA_WITHOUT_PYTHON"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(tmp_path / "driver.c"), str(Path(digests.__file__).with_name("digests.c"))]
    built = subprocess.run(
        [compiler, *flags, *sanitize, *sources, "-o", str(program)], capture_output=True, text=True
    )
    if built.returncode and "asan" in built.stderr:
        pytest.skip("no address sanitizer on this machine")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    due = b""
    for width in range(200):
        rows = (7 * np.arange(3 * width)).astype(np.uint8).reshape(3, width)
        due += b"".join(by_hashlib(PERSON, np.arange(3) + width, rows))
    assert done.stdout == due
