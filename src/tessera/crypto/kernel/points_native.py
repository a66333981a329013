"""Point functions of dpf.c, answer.c, verify.c and rows.c, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.points import TAG_BYTES, PointKernel
from tessera.crypto.kernel.trees import (
    BLOCK,
    Bytes,
    Counts,
    Kind,
    LeafShape,
    Places,
    RowSpace,
    TreeKeys,
    Trees,
)

_INT: Final = ctypes.c_int
_SIZE: Final = ctypes.c_size_t
_EPOCH: Final = ctypes.c_uint32
_BYTES: Final = ctypes.c_char_p
_POINTER: Final = ctypes.c_void_p

_KEYS: Final = (_BYTES, _POINTER, _POINTER, _SIZE)  # AES keys, roots, keys, bytes of these
_SHAPE: Final = (_POINTER, _POINTER)  # trees, leaves

_SUMS: Final = (
    _POINTER,
    _POINTER,
    _SIZE,
    _INT,
)  # leaves or rows; if rows: of each slot, bytes, minus

ARGUMENTS: Final[dict[str, tuple[type[Any], ...]]] = {
    # path, seed, party; how many, out
    "tessera_dpf_roots": (_INT, _BYTES, _INT, _SIZE, _POINTER),
    # path, key, seeds; shapes; epoch, bins, points, values, bytes of one; out
    "tessera_dpf_generate": (
        *(_INT, _BYTES, _BYTES, *_SHAPE, _EPOCH, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER),
    ),
    # path, clients, their keys; shapes; epoch, first tree and last; where sums go
    "tessera_dpf_evaluate": (_INT, _SIZE, *_KEYS, *_SHAPE, _EPOCH, _SIZE, _SIZE, *_SUMS),
    # path, keys; shapes; epoch, how many, which, points; out
    "tessera_dpf_points": (*(_INT, *_KEYS, *_SHAPE, _EPOCH, _SIZE, _POINTER, _POINTER, _POINTER),),
    # path, clients, their keys; shapes; starts of rows, which they are; table, bytes of a row;
    # factors, bytes of one; rows, products
    "tessera_dpf_answer": (
        *(_INT, _SIZE, *_KEYS, *_SHAPE, _POINTER, _POINTER, _POINTER, _SIZE),
        *(_POINTER, _SIZE, _POINTER, _POINTER),
    ),
    # path, key, roots, keys; trees; how many, which, points; out
    "tessera_dpf_tags": (
        *(_INT, _BYTES, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER),
    ),
    # how many, divisors; blocks of a value, values; out
    "tessera_divide": (_SIZE, _POINTER, _SIZE, _POINTER, _POINTER),
    # path, clients, their keys; shapes; epoch, first tree and last; corrections, coefficients;
    # where sums of values go, sums of tags
    "tessera_dpf_verify": (
        *(_INT, _SIZE, *_KEYS, *_SHAPE, _EPOCH, _SIZE, _SIZE),
        *(_POINTER, _POINTER, *_SUMS, _POINTER),
    ),
    # how many, words, factors; out
    "tessera_products": (_SIZE, _POINTER, _POINTER, _POINTER),
    # leaves, bytes of one; slots, the row of each; kind, bytes of a row, whether minus; out
    "tessera_dpf_to_rows": (_POINTER, _SIZE, _SIZE, _POINTER, _INT, _SIZE, _INT, _POINTER),
    # items, chosen, bins; placed
    "tessera_peel": (_SIZE, _POINTER, _SIZE, _POINTER),
}
"""Of these, all return 0, or 1 if there was no memory for what they work with."""


class NativePoints(PointKernel):
    """The half of a native path that is about point functions."""

    _library: ctypes.CDLL
    _path: int

    def _roots(self, seed: bytes, party: int, out: Bytes) -> None:
        self._call("roots", self._path, seed, party, out.shape[0], out)

    def _generate(
        self,
        key: bytes,
        trees: Trees,
        shape: LeafShape,
        seeds: tuple[bytes, bytes],
        order: Counts,
        points: Counts,
        values: Bytes | None,
        out: Bytes,
        epoch: int,
    ) -> None:
        self._call(
            "generate",
            *(self._path, key, seeds[0] + seeds[1], trees.record, _record(shape), epoch),
            *(order, points, values, shape.value_bytes, out),
        )

    def _evaluate(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        shape: LeafShape,
        leaves: Bytes | RowSpace,
        epoch: int,
        begin: int,
        end: int,
    ) -> None:
        self._call(
            "evaluate",
            *(self._path, len(keys), *_key_addresses(keys), trees.record, _record(shape)),
            *(epoch, begin, end, *_sums(leaves)),
        )

    def _evaluate_points(
        self,
        keys: TreeKeys,
        trees: Trees,
        shape: LeafShape,
        which: Counts,
        points: Counts,
        epoch: int,
        out: Bytes,
    ) -> None:
        self._call(
            "points",
            *(self._path, keys.key, keys.roots, keys.public, keys.public.size),
            *(trees.record, _record(shape), epoch, which.size, which, points, out),
        )

    def _answer(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        shape: LeafShape,
        starts: Counts,
        members: npt.NDArray[np.uint32],
        table: Bytes,
        factors: Bytes | None,
        rows: Bytes,
        products: Bytes,
    ) -> None:
        of_factors = (None, 0) if factors is None else (factors, factors.shape[1])
        self._call(
            "answer",
            *(self._path, len(keys), *_key_addresses(keys), trees.record, _record(shape)),
            *(starts, members, table, table.shape[1], *of_factors),
            *(rows, None if factors is None else products),
        )

    def _tags(
        self, keys: TreeKeys, trees: Trees, which: Counts, points: Counts, out: Bytes
    ) -> None:
        self._call(
            "tags",
            *(self._path, keys.key, keys.roots, keys.public, trees.record),
            *(which.size, which, points, out),
        )

    def _divide(self, values: Bytes, divisors: npt.NDArray[np.uint64], out: Bytes) -> None:
        self._call("divide", divisors.size, divisors, TAG_BYTES // BLOCK, values, out)

    def _verify(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        shape: LeafShape,
        corrections: Sequence[Bytes],
        coefficients: npt.NDArray[np.uint64],
        leaves: Bytes | RowSpace | None,
        epoch: int,
        part: range,
        sums: Bytes,
    ) -> None:
        places = np.array([address_of(one) for one in corrections], np.uint64)
        self._call(
            "verify",
            *(self._path, len(keys), *_key_addresses(keys), trees.record, _record(shape)),
            *(epoch, part.start, part.stop, places, coefficients, *_sums(leaves), sums),
        )

    def _products(self, words: npt.NDArray[np.uint64], factors: Bytes, out: Bytes) -> None:
        self._call("products", words.size, words, factors, out)

    def _to_rows(self, leaves: Bytes, places: Places, kind: Kind, minus: bool, out: Bytes) -> None:
        slots, width = leaves.shape
        self._call(
            "to_rows",
            *(leaves, width, slots, places.owners, int(kind), out.shape[1], int(minus), out),
        )

    def _peel(self, chosen: Counts, bins: int, placed: Counts) -> None:
        self._call("peel", placed.size, chosen, bins, placed)

    def _call(self, name: str, *arguments: Any) -> None:
        function = f"tessera_dpf_{name}"
        if function not in ARGUMENTS:
            function = f"tessera_{name}"
        passed = (address_of(one) if isinstance(one, np.ndarray) else one for one in arguments)
        if getattr(self._library, function)(*passed):
            raise MemoryError(f"no memory for {function}")


def address_of(array: npt.NDArray[Any]) -> int:
    """Where the array's memory begins; a fifth of the time of `array.ctypes.data`."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # it may not be written, or has no bytes
        return int(array.ctypes.data)


def _key_addresses(keys: Sequence[TreeKeys]) -> tuple[Any, ...]:
    """AES keys one after the other, and arrays of where the parts are; the caller keeps those."""
    roots = np.array([address_of(one.roots) for one in keys], np.uint64)
    public = np.array([address_of(one.public) for one in keys], np.uint64)
    return b"".join(one.key for one in keys), roots, public, keys[0].public.size


def _sums(leaves: Bytes | RowSpace | None) -> tuple[Any, ...]:
    if not isinstance(leaves, RowSpace):
        return leaves, None, 0, 0
    return leaves.sums, leaves.places.owners, leaves.sums.shape[1], int(leaves.minus)


@cache
def _record(shape: LeafShape) -> npt.NDArray[np.int64]:
    """The C kernel's `leaf_shape`."""
    return np.array([shape.kind, shape.rows, shape.words, shape.bits], dtype=np.int64)
