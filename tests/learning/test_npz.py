"""Arrays are read back, and a file that asks for more memory than it has bytes is refused."""

from __future__ import annotations

import io
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.learning.tables.submodel import read_npz


@given(shape=st.lists(st.integers(0, 4), max_size=3), kind=st.sampled_from(["<i8", "<f4", "|u1"]))
def test_what_was_saved_is_read_back(tmp_path_factory, shape, kind):
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    np.savez(path, first=array, second=array[..., :1] if shape else array)
    found = read_npz(path)
    assert list(found) == ["first", "second"]
    assert found["first"].dtype == array.dtype and np.array_equal(found["first"], array)


def archive(path, header: bytes, *, compression: int = zipfile.ZIP_STORED, body: bytes = b""):
    with zipfile.ZipFile(path, "w", compression) as out:
        out.writestr("map_0.npy", header + body)
    return path


def header_of(shape: tuple[int, ...], dtype: str = "<i8") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return out.getvalue()


@pytest.mark.parametrize("shape", [(10**12,), (2**62, 2**62), (2**31, 2**31)])
def test_a_header_that_claims_more_than_there_is_costs_no_memory(tmp_path, shape):
    path = archive(tmp_path / "a.npz", header_of(shape), body=bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="claims more"):
            read_npz(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_compressed_is_refused(tmp_path):
    zeros = np.zeros(1 << 20, dtype=np.int64)
    np.savez_compressed(tmp_path / "a.npz", zeros)
    assert (tmp_path / "a.npz").stat().st_size < 1 << 16
    with pytest.raises(ValueError, match="compressed"):
        read_npz(tmp_path / "a.npz")


def test_objects_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"claims more|Object arrays"):
        read_npz(tmp_path / "a.npz")
