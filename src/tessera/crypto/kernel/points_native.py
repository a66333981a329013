"""Point functions of dpf.c, called through ctypes, which lets other threads run."""

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
    # path; clients, bits; trees, first leaves, starts of rows; table, bytes of a row; out
    "tessera_dpf_xor_rows": (
        *(_INT, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER),
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

    def _grow(
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
        ciphers = b"".join(one.key for one in keys)
        roots = _addresses([one.roots for one in keys])
        steps = _addresses([one.steps for one in keys])
        finals = _addresses([one.finals for one in keys])
        leaves_at, depths, first_leaf, first_step = trees.addresses
        self._call(
            "evaluate",
            *(self._path, len(keys), ciphers, roots, steps, finals),
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

    def _xor_rows(
        self, bits: Sequence[Bytes], trees: Trees, starts: Counts, table: Bytes, out: Bytes
    ) -> None:
        pointers = _addresses(bits)
        _, _, first_leaf, _ = trees.addresses
        self._call(
            "xor_rows",
            *(self._path, len(bits), pointers, trees.count, first_leaf),
            *(starts, table, table.shape[1], out),
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


def _addresses(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """The arrays' addresses; the caller keeps the arrays."""
    return np.array([address_of(array) for array in arrays], dtype=np.uint64)
