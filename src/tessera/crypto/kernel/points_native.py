"""Point functions of dpf.c and rows.c, called through ctypes, which lets other threads run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.points import Bytes, Counts, Kind, Places, PointKernel, TreeKeys, Trees

_INT: Final = ctypes.c_int
_SIZE: Final = ctypes.c_size_t
_EPOCH: Final = ctypes.c_uint32
_BYTES: Final = ctypes.c_char_p
_POINTER: Final = ctypes.c_void_p

ARGUMENTS: Final[dict[str, tuple[type[Any], ...]]] = {
    # path, key; trees, their depths and first steps; roots of both; points, values; kind, blocks,
    # epoch; steps, finals
    "tessera_dpf_grow": (
        *(_INT, _BYTES, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_POINTER, _POINTER, _INT, _SIZE, _EPOCH, _POINTER, _POINTER),
    ),
    # path; clients, their keys, roots, steps and finals; first tree and last, leaves, first
    # leaves, depths, first steps; kind, blocks, epoch; the sum
    "tessera_dpf_evaluate": (
        *(_INT, _SIZE, _BYTES, _POINTER, _POINTER, _POINTER),
        *(_SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_INT, _SIZE, _EPOCH, _POINTER),
    ),
    # path, key, roots, steps, finals; depths, first steps; how many, which, points; kind, blocks,
    # epoch; out
    "tessera_dpf_points": (
        *(_INT, _BYTES, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_SIZE, _POINTER, _POINTER, _INT, _SIZE, _EPOCH, _POINTER),
    ),
    # path; clients, their keys, roots, steps and finals; trees, leaves, first leaves, depths, first
    # steps; spacing; starts of rows, table, bytes of a row; factors, bytes of one; rows, products
    "tessera_dpf_answer": (
        *(_INT, _SIZE, _BYTES, _POINTER, _POINTER, _POINTER),
        *(_SIZE, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_INT, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER),
    ),
    # leaves, bytes of a row; slots, the row of each; kind; out
    "tessera_dpf_to_rows": (_POINTER, _SIZE, _SIZE, _POINTER, _INT, _POINTER),
    # items, chosen, bins; placed
    "tessera_peel": (_SIZE, _POINTER, _SIZE, _POINTER),
}
"""Of these, all return 0, or 1 if there was no memory for what they work with."""


class NativePoints(PointKernel):
    """The half of a native path that is about point functions."""

    _library: ctypes.CDLL
    _path: int

    def _generate(
        self,
        key: bytes,
        trees: Trees,
        roots: tuple[Bytes, Bytes],
        points: Counts,
        values: Bytes,
        kind: Kind,
        blocks: int,
        epoch: int,
        steps: Bytes,
        finals: Bytes,
    ) -> None:
        _, depths, _, first_step = trees.addresses
        self._call(
            "grow",
            *(self._path, key, trees.count, depths, first_step, roots[0], roots[1]),
            *(points, values, int(kind), blocks, epoch, steps, finals),
        )

    def _evaluate(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        kind: Kind,
        blocks: int,
        leaves: Bytes,
        epoch: int,
        begin: int,
        end: int,
    ) -> None:
        leaves_at, depths, first_leaf, first_step = trees.addresses
        self._call(
            "evaluate",
            *(self._path, len(keys), *_key_addresses(keys)),
            *(begin, end, leaves_at, first_leaf, depths, first_step),
            *(int(kind), blocks, epoch, leaves),
        )

    def _evaluate_points(
        self,
        keys: TreeKeys,
        trees: Trees,
        kind: Kind,
        blocks: int,
        which: Counts,
        points: Counts,
        epoch: int,
        out: Bytes,
    ) -> None:
        _, depths, _, first_step = trees.addresses
        self._call(
            "points",
            *(self._path, keys.key, keys.roots, keys.steps, keys.finals),
            *(depths, first_step, which.size, which, points),
            *(int(kind), blocks, epoch, out),
        )

    def _answer(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        starts: Counts,
        table: Bytes,
        factors: Bytes | None,
        spacing: int,
        rows: Bytes,
        products: Bytes,
    ) -> None:
        leaves, depths, first_leaf, first_step = trees.addresses
        of_factors = (None, 0) if factors is None else (factors, factors.shape[1])
        self._call(
            "answer",
            *(self._path, len(keys), *_key_addresses(keys)),
            *(trees.count, leaves, first_leaf, depths, first_step),
            *(spacing, starts, table, table.shape[1], *of_factors),
            *(rows, None if factors is None else products),
        )

    def _to_rows(self, leaves: Bytes, places: Places, kind: Kind, out: Bytes) -> None:
        slots, width = leaves.shape
        self._call("to_rows", *(leaves, width, slots, places.owners, int(kind), out))

    def _peel(self, chosen: Counts, bins: int, placed: Counts) -> None:
        self._call("peel", placed.size, chosen, bins, placed)

    def _call(self, name: str, *arguments: Any) -> None:
        function = "tessera_peel" if name == "peel" else f"tessera_dpf_{name}"
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
    parts = ([one.roots for one in keys], [one.steps for one in keys], [one.finals for one in keys])
    addresses = (np.array([address_of(array) for array in part], np.uint64) for part in parts)
    return b"".join(one.key for one in keys), *addresses
