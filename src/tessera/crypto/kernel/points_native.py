"""Point functions of dpf.c, called through ctypes, which lets other threads run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.points import Bytes, Counts, Kind, PointKernel, TreeKeys, Trees

_INT: Final = ctypes.c_int
_SIZE: Final = ctypes.c_size_t
_EPOCH: Final = ctypes.c_uint32
_BYTES: Final = ctypes.c_char_p
_POINTER: Final = ctypes.c_void_p

ARGUMENTS: Final[dict[str, tuple[type[Any], ...]]] = {
    # path, key; trees, their leaves, depths and first steps; roots of both; points, values; kind,
    # blocks, epoch; steps, finals
    "tessera_dpf_grow": (
        *(_INT, _BYTES, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
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
    # leaves, bytes of a row; rows, slots of each, slots; kind; out
    "tessera_dpf_gather": (_POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _INT, _POINTER),
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
        shape = (trees.leaves, trees.depths, trees.first_step)
        self._call(
            "grow",
            *(self._path, key, trees.count, *map(_at, shape), _at(roots[0]), _at(roots[1])),
            *(_at(points), _at(values), int(kind), blocks, epoch, _at(steps), _at(finals)),
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
        shape = (trees.leaves, trees.first_leaf, trees.depths, trees.first_step)
        self._call(
            "evaluate",
            *(self._path, len(keys), ciphers, _at(roots), _at(steps), _at(finals)),
            *(begin, end, *map(_at, shape), int(kind), blocks, epoch, _at(leaves)),
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
        self._call(
            "points",
            *(self._path, keys.key, _at(keys.roots), _at(keys.steps), _at(keys.finals)),
            *(_at(trees.depths), _at(trees.first_step), which.size, _at(which), _at(points)),
            *(int(kind), blocks, epoch, _at(out)),
        )

    def _xor_rows(
        self, bits: Sequence[Bytes], trees: Trees, starts: Counts, table: Bytes, out: Bytes
    ) -> None:
        pointers = _addresses(bits)
        self._call(
            "xor_rows",
            *(self._path, len(bits), _at(pointers), trees.count, _at(trees.first_leaf)),
            *(_at(starts), _at(table), table.shape[1], _at(out)),
        )

    def _gather(self, leaves: Bytes, slots: Counts, kind: Kind, out: Bytes) -> None:
        rows, each = slots.shape
        self._call(
            "gather", _at(leaves), leaves.shape[1], rows, each, _at(slots), int(kind), _at(out)
        )

    def _peel(self, chosen: Counts, bins: int, placed: Counts) -> None:
        self._call("peel", placed.size, _at(chosen), bins, _at(placed))

    def _call(self, name: str, *arguments: Any) -> None:
        function = "tessera_peel" if name == "peel" else f"tessera_dpf_{name}"
        if getattr(self._library, function)(*arguments):
            raise MemoryError(f"no memory for {function}")


def _at(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # a third of the time of .ctypes.data
    return address


def _addresses(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """The arrays' addresses; the caller keeps the arrays."""
    return np.array([_at(array) for array in arrays], dtype=np.uint64)
