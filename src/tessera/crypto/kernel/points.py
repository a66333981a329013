"""PointKernel: trees of point functions, generated, evaluated and summed, with argument checks.

Half trees (Guo et al. 2023, ia.cr/2022/1431): one AES call makes both children of a node. A node s
is a block of 16 bytes and is kept as y = sigma(s), where sigma(low, high) = (high, low ^ high) on
its two 64-bit halves. The highest bit of each half is a control bit, part of the node, and switches
that half of a correction: t * x is the halves of x whose control bit is set in y. With the AES key
of the report,

    H(y, w)     = AES_key(y ^ w) ^ y
    left child  = sigma(H(y, 0)) ^ t * step        a step is the correction of one level: 16 bytes
    right child = left child ^ y
    leaf value  = H(y, block 0), H(y, block 1), ... + t * final

Words of 128 bits are switched by the upper control bit. Words of up to 24 bits lie in 32, and the
byte that is left over is as random as the rest: in a row of them every fourth block is no call of
AES. Each word of it is the highest bytes of the words above it in the three blocks before, the
first one lowest. A tweak w is 16 bytes: byte 15 says what
for (0 growing, 1 conversion, 2 tags); bytes 4-7 number the calls and bytes 8-11 the epoch, both
little-endian. The others are zero.

How trees and keys are laid out is in trees.py.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.trees import (
    BLOCK,
    MAX_LEAVES,
    Bytes,
    Counts,
    Kind,
    LeafShape,
    Places,
    RowSpace,
    TreeKeys,
    Trees,
    starts_of,
)
from tessera.errors import MisuseError

KEY_BYTES: Final = 16
SEED_BYTES: Final = 24
"""A server's private part names the key stream that its roots are: AES key and nonce."""

MAX_EPOCH: Final = 1 << 32
ROW_ALIGNMENT: Final = 32
"""Rows that `answer` selects from are padded to a multiple of this many bytes."""

TAG_BYTES: Final = 2 * BLOCK
"""Of a leaf's tag in the check of clients, of a correction and of a sum: two field elements."""


class PointKernel(ABC):
    """Point functions over a batch of trees."""

    def roots(self, seed: bytes, party: int, count: int) -> Bytes:
        """(count, 16): the root nodes of one party, blocks 0, 1, ... of the seed's key stream.

        Both control bits of a root are the party, so that those of two parties differ.
        """
        if not isinstance(seed, bytes) or len(seed) != SEED_BYTES:
            raise MisuseError(f"a server's seed is {SEED_BYTES} bytes")
        if party not in (0, 1):
            raise MisuseError(f"party {party}: there are two, 0 and 1")
        out = np.empty((count, BLOCK), dtype=np.uint8)
        if count:
            self._roots(seed, party, out)
        return out

    def generate(
        self,
        key: bytes,
        trees: Trees,
        shape: LeafShape,
        seeds: tuple[bytes, bytes],
        order: Counts,
        points: Counts,
        values: Bytes | None,
        out: Bytes,
        *,
        epoch: int = 0,
    ) -> None:
        """Fill `out` (key_bytes) with the keys that are values[b] at points[b], zero elsewhere.

        Guo et al. (ia.cr/2022/1431), Figure 8, Gen, for all trees at once. Tree i is that of bin
        order[i], whose point, counted in rows, is points[order[i]]; -1 is the value zero. `values`
        is (bins, value_bytes), or None where there are none. The offset between the parties' nodes
        on a path is the XOR of the two roots.
        """
        _check_batch(key, shape, epoch)
        if any(not isinstance(seed, bytes) or len(seed) != SEED_BYTES for seed in seeds):
            raise MisuseError(f"a server's seed is {SEED_BYTES} bytes")
        for array in (order, points):
            if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
                raise MisuseError("bins and points are flat arrays of int64")
        if order.size != trees.count:
            raise MisuseError("generate: one bin for each tree")
        if (values is None) != (shape.value_bytes == 0):
            raise MisuseError("generate: values where, and only where, there is more than one")
        if values is not None:
            _check_bytes("values", values, (points.size, shape.value_bytes))
        _check_flat("keys", out, trees.key_bytes(shape))
        if not out.flags.writeable:
            raise MisuseError("generate: keys cannot be written")
        if trees.count:
            if order.min() < 0 or order.max() >= points.size:
                raise MisuseError("generate: no such bin")
            there = points[order]
            if there.min() < -1 or (there >= trees.leaves * shape.rows).any():
                raise MisuseError("generate: a point lies outside its tree")
            self._generate(key, trees, shape, seeds, order, points, values, out, epoch)

    def evaluate(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        shape: LeafShape,
        leaves: Bytes | RowSpace,
        *,
        epoch: int = 0,
        part: range | None = None,
    ) -> None:
        """leaves += the leaf values of all keys, in place; of the trees in `part` only, if given.

        `leaves` is (total_leaves, blocks * 16) bytes. Two calls on disjoint parts of one array may
        run in two threads. Or it is the rows that leaves belong to.
        """
        _check_leaves(leaves, trees, shape)
        for one in keys:
            _check_keys(one, trees, shape, epoch)
        chosen = range(trees.count) if part is None else part
        if chosen.step != 1 or not 0 <= chosen.start <= chosen.stop <= trees.count:
            raise MisuseError(f"{chosen} is not a range of the {trees.count} trees")
        if keys and chosen:
            self._evaluate(keys, trees, shape, leaves, epoch, chosen.start, chosen.stop)

    def evaluate_points(
        self,
        keys: TreeKeys,
        trees: Trees,
        shape: LeafShape,
        which: Counts,
        points: Counts,
        *,
        epoch: int = 0,
    ) -> Bytes:
        """The leaf value of tree which[i] at leaf points[i], for every i."""
        _check_keys(keys, trees, shape, epoch)
        for array in (which, points):
            if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
                raise MisuseError("trees and points are flat arrays of int64")
        if which.size != points.size:
            raise MisuseError("evaluate_points: one point for each tree")
        out = np.zeros((which.size, shape.blocks * BLOCK), dtype=np.uint8)
        if which.size:
            if which.min() < 0 or which.max() >= trees.count:
                raise MisuseError("evaluate_points: no such tree")
            if points.min() < 0 or np.any(points >= trees.leaves[which]):
                raise MisuseError("evaluate_points: a point outside its tree")
            self._evaluate_points(keys, trees, shape, which, points, epoch, out)
        return out

    def answer(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        shape: LeafShape,
        sizes: Counts,
        members: npt.NDArray[np.uint32],
        table: Bytes,
        factors: Bytes | None = None,
    ) -> tuple[Bytes, Bytes]:
        """For every client and tree the XOR of the rows that are selected, and sums of products.

        Tree i has sizes[i] rows, and the selector of row p is the lowest bit of its part of a leaf:
        one of 128 bits, or one of two words of 64. `members` says which rows of the table those of
        all trees are, one tree after the other; in `table` each is padded to a multiple of
        `ROW_ALIGNMENT` bytes.

        `factors` begin, row by row of the table, with two 64-bit numbers. The products are (.., 32)
        bytes: the XOR over the rows of (the 64 bits of a row) * factor for the one and for the
        other, as polynomials over GF(2), where bit i of a number is the coefficient of x^i.
        """
        if shape.kind is not Kind.XOR:
            raise MisuseError("answer: selectors are bits under XOR")
        for one in keys:
            _check_keys(one, trees, shape, 0)
        if factors is not None and shape.rows != 2:
            raise MisuseError("answer: products are those of words of 64 bits")
        if sizes.dtype != np.int64 or sizes.shape != (trees.count,):
            raise MisuseError("answer: one size for each tree")
        if np.any(sizes < 1) or np.any(sizes > trees.leaves * shape.rows):
            raise MisuseError("answer: a tree has more rows than its leaves")
        if np.any(sizes <= (trees.leaves - 1) * shape.rows):
            raise MisuseError("answer: a tree has leaves without rows")
        if members.dtype != np.uint32 or members.shape != (int(sizes.sum()),):
            raise MisuseError("answer: one row of the table for each of the trees' rows")
        if not members.flags.c_contiguous:
            raise MisuseError("answer: the kernel works on contiguous arrays")
        _check_bytes("table", table, (table.shape[0], None))
        if members.size and int(members.max()) >= table.shape[0]:
            raise MisuseError("answer: a row that the table does not have")
        if table.shape[1] % ROW_ALIGNMENT:
            raise MisuseError(f"rows are padded to a multiple of {ROW_ALIGNMENT} bytes")
        if factors is not None:
            _check_bytes("factors", factors, (table.shape[0], None))
            if factors.shape[1] < BLOCK:
                raise MisuseError("answer: a factor is 16 bytes")
        # clients side by side, for a kernel that goes from client to client
        rows = np.zeros((trees.count, len(keys), table.shape[1]), dtype=np.uint8)
        wide = 0 if factors is None else 2 * BLOCK
        products = np.zeros((trees.count, len(keys), wide), dtype=np.uint8)
        if keys and trees.count:
            starts = starts_of(sizes)
            self._answer(keys, trees, shape, starts, members, table, factors, rows, products)
        return rows.transpose(1, 0, 2), products.transpose(1, 0, 2)

    def tags(
        self, keys: TreeKeys, trees: Trees, shape: LeafShape, which: Counts, points: Counts
    ) -> Bytes:
        """(n, 32): G(y) = H(y, tag 0), H(y, tag 1) at leaf points[i] of tree which[i]."""
        _check_keys(keys, trees, shape, 0)
        for array in (which, points):
            if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
                raise MisuseError("trees and points are flat arrays of int64")
        if which.size != points.size:
            raise MisuseError("tags: one point for each tree")
        out = np.zeros((which.size, TAG_BYTES), dtype=np.uint8)
        if which.size:
            if which.min() < 0 or which.max() >= trees.count:
                raise MisuseError("tags: no such tree")
            if points.min() < 0 or np.any(points >= trees.leaves[which]):
                raise MisuseError("tags: a point outside its tree")
            self._tags(keys, trees, which, points, out)
        return out

    def divide(self, values: Bytes, divisors: npt.NDArray[np.uint64]) -> Bytes:
        """(n, 32): both halves of values[i] / divisors[i] in GF(2^128).

        Modulo x^128 + x^7 + x^2 + x + 1; bit i of a number, little-endian, is the coefficient of
        x^i. Divisors are numbers below 2^64.
        """
        if divisors.dtype != np.uint64 or divisors.ndim != 1 or not divisors.flags.c_contiguous:
            raise MisuseError("divisors are a flat array of uint64")
        if np.any(divisors == 0):
            raise MisuseError("divide: by zero")
        _check_bytes("values", values, (divisors.size, TAG_BYTES))
        out = np.empty_like(values)
        if divisors.size:
            self._divide(values, divisors, out)
        return out

    def verify(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        shape: LeafShape,
        corrections: Sequence[Bytes],
        coefficients: npt.NDArray[np.uint64],
        *,
        leaves: Bytes | RowSpace | None = None,
        epoch: int = 0,
        part: range | None = None,
    ) -> Bytes:
        """(clients, 32): sums over all leaves of coefficient * (G(y) ^ t c cs), in GF(2^128).

        t is the upper control bit of the leaf's node y, c its position plus one, cs the tree's
        correction (corrections[client] is (trees, 32)), block by block. With `leaves` the values
        are added to them as by `evaluate`, in the same pass.
        """
        if leaves is not None:
            _check_leaves(leaves, trees, shape)
        for one in keys:
            _check_keys(one, trees, shape, epoch)
        if len(corrections) != len(keys):
            raise MisuseError("verify: corrections for each client")
        for each in corrections:
            _check_bytes("corrections", each, (trees.count, TAG_BYTES))
        if coefficients.dtype != np.uint64 or coefficients.shape != (trees.total_leaves,):
            raise MisuseError("verify: one coefficient of 64 bits for each leaf")
        if not coefficients.flags.c_contiguous:
            raise MisuseError("verify: the kernel works on contiguous arrays")
        chosen = range(trees.count) if part is None else part
        if chosen.step != 1 or not 0 <= chosen.start <= chosen.stop <= trees.count:
            raise MisuseError(f"{chosen} is not a range of the {trees.count} trees")
        sums = np.zeros((len(keys), TAG_BYTES), dtype=np.uint8)
        if keys and chosen:
            self._verify(keys, trees, shape, corrections, coefficients, leaves, epoch, chosen, sums)
        return sums

    def products(self, words: npt.NDArray[np.uint64], factors: Bytes) -> Bytes:
        """(n, 32): words[i] times each 64-bit half of factors[i], as `answer` multiplies."""
        if words.dtype != np.uint64 or words.ndim != 1 or not words.flags.c_contiguous:
            raise MisuseError("words are a flat array of uint64")
        _check_bytes("factors", factors, (words.size, BLOCK))
        out = np.empty((words.size, 2 * BLOCK), dtype=np.uint8)
        if words.size:
            self._products(words, factors, out)
        return out

    def to_rows(
        self,
        leaves: Bytes,
        places: Places,
        kind: Kind,
        row_bytes: int | None = None,
        *,
        minus: bool = False,
    ) -> Bytes:
        """(rows, row_bytes): each row the sum of its slots of `leaves`, or (`minus`) less it.

        Of a slot the first `row_bytes` count, or all.
        """
        _check_bytes("leaves", leaves, (places.owners.size, None))
        size = leaves.shape[1] if row_bytes is None else row_bytes
        width = max(4, min(int(kind), 16) if kind is not Kind.MOD61 else 8)
        if kind is Kind.XOR or leaves.shape[1] % width or size % width:
            raise MisuseError(f"to_rows: rows of {size} bytes do not hold {kind.name}")
        if not 0 <= size <= leaves.shape[1]:
            raise MisuseError(f"to_rows: {size} bytes of slots of {leaves.shape[1]}")
        out = np.zeros((places.rows + 1, size), dtype=np.uint8)  # the last: of no row
        if out.size:
            self._to_rows(leaves, places, kind, minus, out)
        return out[:-1]

    def peel(self, chosen: Counts, bins: int) -> Counts:
        """For each item with three distinct bins (a row of `chosen`): the bin that takes it, or -1.

        In rounds. A bin that only one of the items still there has chosen takes it; an item that
        several bins would take goes to the lowest. Those items are gone in the next round. What is
        left when a round takes nothing is the 2-core.
        """
        if chosen.dtype != np.int64 or chosen.ndim != 2 or chosen.shape[1] != 3:
            raise MisuseError("peel: three bins for each item, as int64")
        if not chosen.flags.c_contiguous or not 0 < bins < MAX_LEAVES:
            raise MisuseError("peel: bins are chosen in a contiguous array")
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < bins:
            raise MisuseError("peel: an item chose a bin that is not there")
        placed = np.full(chosen.shape[0], -1, dtype=np.int64)
        if placed.size:
            self._peel(chosen, bins, placed)
        return placed

    @abstractmethod
    def _products(self, words: npt.NDArray[np.uint64], factors: Bytes, out: Bytes) -> None: ...

    @abstractmethod
    def _to_rows(
        self, leaves: Bytes, places: Places, kind: Kind, minus: bool, out: Bytes
    ) -> None: ...

    @abstractmethod
    def _peel(self, chosen: Counts, bins: int, placed: Counts) -> None: ...

    @abstractmethod
    def _roots(self, seed: bytes, party: int, out: Bytes) -> None: ...

    @abstractmethod
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
    ) -> None: ...

    @abstractmethod
    def _evaluate(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        shape: LeafShape,
        leaves: Bytes | RowSpace,
        epoch: int,
        begin: int,
        end: int,
    ) -> None: ...

    @abstractmethod
    def _evaluate_points(
        self,
        keys: TreeKeys,
        trees: Trees,
        shape: LeafShape,
        which: Counts,
        points: Counts,
        epoch: int,
        out: Bytes,
    ) -> None: ...

    @abstractmethod
    def _tags(
        self, keys: TreeKeys, trees: Trees, which: Counts, points: Counts, out: Bytes
    ) -> None: ...

    @abstractmethod
    def _divide(self, values: Bytes, divisors: npt.NDArray[np.uint64], out: Bytes) -> None: ...

    @abstractmethod
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
    ) -> None: ...

    @abstractmethod
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
    ) -> None: ...


def _check_batch(key: bytes, shape: LeafShape, epoch: int) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise MisuseError(f"the key of a report is {KEY_BYTES} bytes")
    if not isinstance(shape, LeafShape) or not 0 <= epoch < MAX_EPOCH:
        raise MisuseError(f"{shape!r} in epoch {epoch}: no leaf, or epoch out of range")


def _check_keys(keys: TreeKeys, trees: Trees, shape: LeafShape, epoch: int) -> None:
    _check_batch(keys.key, shape, epoch)
    _check_bytes("roots", keys.roots, (trees.count, BLOCK))
    _check_flat("keys", keys.public, trees.key_bytes(shape))


def _check_leaves(leaves: Bytes | RowSpace, trees: Trees, shape: LeafShape) -> None:
    if not isinstance(leaves, RowSpace):
        _check_bytes("leaves", leaves, (trees.total_leaves, shape.blocks * BLOCK), written=True)
        return
    if shape.kind is Kind.XOR or leaves.places.owners.size != trees.total_leaves * shape.rows:
        raise MisuseError("rows: words, and a row for each slot of leaf space, are due")
    _check_bytes("rows", leaves.sums, (leaves.places.rows + 1, shape.value_bytes), written=True)


def _check_flat(what: str, array: Bytes, size: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != (size,):
        raise MisuseError(f"{what}: {size} bytes are due")
    if not array.flags.c_contiguous:
        raise MisuseError(f"{what}: the kernel works on contiguous arrays")


def _check_bytes(
    what: str, array: Bytes, shape: tuple[int, int | None], *, written: bool = False
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 2:
        raise MisuseError(f"{what}: an array of bytes with two axes is due")
    if array.shape[0] != shape[0] or shape[1] not in (None, array.shape[1]):
        raise MisuseError(f"{what}: the shape is {array.shape}, not {shape}")
    if not array.flags.c_contiguous or (written and not array.flags.writeable):
        raise MisuseError(f"{what}: the kernel works on contiguous arrays")


# --- points native --------------------------------------------------------------------------------
#
# Point functions of dpf.c, answer.c, verify.c and rows.c, called through ctypes.


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
