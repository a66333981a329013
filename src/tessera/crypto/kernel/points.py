"""PointKernel: trees of point functions, generated, evaluated and summed, with argument checks.

A node is a block of 16 bytes. The highest bit of its last byte is the control bit t, and it is
part of the block. With the AES key of the report, a node s has for every tweak w the block

    H(s, w) = AES_key(s ^ w) ^ s

(Matyas-Meyer-Oseas, with the tweak on the input side). A tweak is 16 bytes: byte 15 says what for
(0 left child, 1 right child, 2 conversion); bytes 4-7 number the blocks of a conversion and bytes
8-11 the epoch, both little-endian. The others are zero.

    left child   H(s, left)  ^ t * step[0]         a step is the correction of one level: 32 bytes,
    right child  H(s, right) ^ t * step[1]         for the left and for the right child
    leaf value   H(s, block 0), H(s, block 1), ... + t * final

A leaf is `blocks` blocks of words; `Kind` says how words add. The trees of a batch are sorted by
depth, and tree i has leaves[i] leaves; leaves beyond that are not computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError

BLOCK: Final = 16
STEP: Final = 2 * BLOCK
KEY_BYTES: Final = 16
MAX_LEAVES: Final = 1 << 31
MAX_BLOCKS: Final = 1 << 16
MAX_EPOCH: Final = 1 << 32
ROW_ALIGNMENT: Final = 32
"""Rows that `answer` selects from are padded to a multiple of this many bytes."""

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


class Kind(IntEnum):
    """How the words of a leaf add up; the number is the C kernel's."""

    XOR = 0
    ADD32 = 4
    ADD64 = 8
    ADD128 = 16
    MOD61 = 61  # 64-bit words modulo 2^61 - 1, of which sums may stay a little above it


@dataclass(frozen=True, eq=False)
class Trees:
    """The public shape of a batch of trees; `of` makes it, so that its arrays fit together."""

    leaves: Counts  # (n,)
    depths: Counts  # (n,), not falling
    first_leaf: Counts  # (n + 1,)
    first_step: Counts  # (n + 1,)

    @classmethod
    def of(cls, leaves: npt.NDArray[Any]) -> Trees:
        """Trees of these many leaves each, given in the order of their depths."""
        counts = np.ascontiguousarray(leaves, dtype=np.int64)
        if counts.ndim != 1 or (counts.size and not 0 < counts.min() <= counts.max() < MAX_LEAVES):
            raise MisuseError(f"a tree has 1 to {MAX_LEAVES - 1} leaves")
        depths = depths_of(counts)
        if np.any(np.diff(depths) < 0):
            raise MisuseError("trees are not in the order of their depths")
        trees = cls(counts, depths, _starts(counts), _starts(depths))
        for array in (trees.leaves, trees.depths, trees.first_leaf, trees.first_step):
            array.flags.writeable = False
        return trees

    @property
    def count(self) -> int:
        return self.leaves.size

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Where the four arrays lie, for the C kernel; they do not move."""
        return (
            self.leaves.ctypes.data,
            self.depths.ctypes.data,
            self.first_leaf.ctypes.data,
            self.first_step.ctypes.data,
        )

    @cached_property
    def total_leaves(self) -> int:
        return int(self.first_leaf[-1])

    @cached_property
    def total_steps(self) -> int:
        return int(self.first_step[-1])


@dataclass(frozen=True, slots=True, eq=False)
class TreeKeys:
    """What one server evaluates for one client."""

    key: bytes = field(repr=False)  # of AES, for this report
    roots: Bytes = field(repr=False)  # (n, 16), control bits included
    steps: Bytes = field(repr=False)  # (total_steps, 32), tree by tree
    finals: Bytes = field(repr=False)  # (n, blocks * 16)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Which slots of leaf space belong to which row: both ways, checked once. `of` makes it."""

    slots: Counts  # (rows, each): the slots of a row
    owners: npt.NDArray[np.uint32]  # (leaves,): the row of a slot, or `rows` if it has none

    @classmethod
    def of(cls, slots: Counts, leaves: int) -> Places:
        """Rows of these slots, of which no two are the same, in a leaf space of so many."""
        if slots.dtype != np.int64 or slots.ndim != 2 or not slots.flags.c_contiguous:
            raise MisuseError("slots are an array of int64 with two axes")
        rows, each = slots.shape
        if each < 1 or rows >= MAX_LEAVES:
            raise MisuseError(f"{rows} rows of {each} slots each")
        if slots.size and not 0 <= slots.min() <= slots.max() < leaves:
            raise MisuseError("a slot lies outside the leaves")
        owners = np.full(leaves, rows, dtype=np.uint32)
        owners[slots.reshape(-1)] = np.repeat(np.arange(rows, dtype=np.uint32), each)
        if np.count_nonzero(owners != rows) != slots.size:
            raise MisuseError("two rows share a slot")
        owners.flags.writeable = False
        return cls(slots, owners)

    @property
    def rows(self) -> int:
        return int(self.slots.shape[0])


class PointKernel(ABC):
    """Point functions over a batch of trees."""

    def generate(
        self,
        key: bytes,
        trees: Trees,
        roots: tuple[Bytes, Bytes],
        points: Counts,
        values: Bytes,
        kind: Kind,
        *,
        epoch: int = 0,
    ) -> tuple[Bytes, Bytes]:
        """Steps and finals of the keys that are values[i] at leaf points[i] and zero elsewhere.

        Boyle, Gilboa, Ishai (ia.cr/2018/707), Figure 1, Gen, for all trees at once. `roots` are
        those of party 0 and party 1; their control bits have to differ.
        """
        blocks = _check_batch(key, trees, values, kind, epoch)
        for root in roots:
            _check_bytes("roots", root, (trees.count, BLOCK))
        if ((roots[0][:, -1] ^ roots[1][:, -1]) < 0x80).any():
            raise MisuseError("generate: the control bits of two roots are equal")
        _check_points(points, trees)
        steps = np.empty((trees.total_steps, STEP), dtype=np.uint8)
        finals = np.empty((trees.count, blocks * BLOCK), dtype=np.uint8)
        if trees.count:
            self._generate(key, trees, roots, points, values, kind, blocks, epoch, steps, finals)
        return steps, finals

    def evaluate(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        kind: Kind,
        leaves: Bytes,
        *,
        epoch: int = 0,
        part: range | None = None,
    ) -> None:
        """leaves += the leaf values of all keys, in place; of the trees in `part` only, if given.

        `leaves` is (total_leaves, blocks * 16) bytes. Two calls on disjoint parts of one array may
        run in two threads.
        """
        _check_bytes("leaves", leaves, (trees.total_leaves, None), written=True)
        for one in keys:
            blocks = _check_batch(one.key, trees, one.finals, kind, epoch)
            _check_bytes("roots", one.roots, (trees.count, BLOCK))
            _check_bytes("steps", one.steps, (trees.total_steps, STEP))
            if leaves.shape[1] != blocks * BLOCK:
                raise MisuseError(f"leaves of {blocks} blocks do not fit {leaves.shape[1]} bytes")
        chosen = range(trees.count) if part is None else part
        if chosen.step != 1 or not 0 <= chosen.start <= chosen.stop <= trees.count:
            raise MisuseError(f"{chosen} is not a range of the {trees.count} trees")
        if keys and chosen:
            blocks = leaves.shape[1] // BLOCK
            self._evaluate(keys, trees, kind, blocks, leaves, epoch, chosen.start, chosen.stop)

    def evaluate_points(
        self,
        keys: TreeKeys,
        trees: Trees,
        kind: Kind,
        which: Counts,
        points: Counts,
        *,
        epoch: int = 0,
    ) -> Bytes:
        """The leaf value of tree which[i] at leaf points[i], for every i."""
        blocks = _check_batch(keys.key, trees, keys.finals, kind, epoch)
        _check_bytes("roots", keys.roots, (trees.count, BLOCK))
        _check_bytes("steps", keys.steps, (trees.total_steps, STEP))
        for array in (which, points):
            if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
                raise MisuseError("trees and points are flat arrays of int64")
        if which.size != points.size:
            raise MisuseError("evaluate_points: one point for each tree")
        out = np.zeros((which.size, blocks * BLOCK), dtype=np.uint8)
        if which.size:
            if which.min() < 0 or which.max() >= trees.count:
                raise MisuseError("evaluate_points: no such tree")
            if points.min() < 0 or np.any(points >= trees.leaves[which]):
                raise MisuseError("evaluate_points: a point outside its tree")
            self._evaluate_points(keys, trees, kind, blocks, which, points, epoch, out)
        return out

    def answer(
        self,
        keys: Sequence[TreeKeys],
        trees: Trees,
        sizes: Counts,
        table: Bytes,
        factors: Bytes | None = None,
        *,
        spacing: int = 1,
    ) -> tuple[Bytes, Bytes]:
        """For every client and tree the XOR of the rows whose bit is set, and sums of products.

        Tree i has sizes[i] rows, and the bit of row p is bit p * spacing of its leaves taken
        together, lowest bit of a byte first. `table` has the rows of all trees one after the other,
        each padded to a multiple of `ROW_ALIGNMENT` bytes.

        `factors` begin, row by row, with two 64-bit numbers. The products are (.., 32) bytes: the
        XOR over the rows of (the 64 bits of a row) * factor for the one and for the other, as
        polynomials over GF(2), where bit i of a number is the coefficient of x^i.
        """
        for one in keys:
            if _check_batch(one.key, trees, one.finals, Kind.XOR, 0) != 1:
                raise MisuseError("answer: bits are one block to a leaf")
            _check_bytes("roots", one.roots, (trees.count, BLOCK))
            _check_bytes("steps", one.steps, (trees.total_steps, STEP))
        if spacing not in (1, 64) or (factors is not None and spacing != 64):
            raise MisuseError(f"answer: bits come one by one or 64 apart, not {spacing}")
        if sizes.dtype != np.int64 or sizes.shape != (trees.count,):
            raise MisuseError("answer: one size for each tree")
        if np.any(sizes < 1) or np.any(sizes > trees.leaves * (128 // spacing)):
            raise MisuseError("answer: a tree has more rows than its leaves have bits")
        _check_bytes("table", table, (int(sizes.sum()), None))
        if table.shape[1] % ROW_ALIGNMENT:
            raise MisuseError(f"rows are padded to a multiple of {ROW_ALIGNMENT} bytes")
        if factors is not None:
            _check_bytes("factors", factors, (table.shape[0], None))
            if factors.shape[1] < BLOCK:
                raise MisuseError("answer: a factor is 16 bytes")
        rows = np.zeros((len(keys), trees.count, table.shape[1]), dtype=np.uint8)
        wide = 0 if factors is None else 2 * BLOCK
        products = np.zeros((len(keys), trees.count, wide), dtype=np.uint8)
        if keys and trees.count:
            starts = _starts(sizes)
            self._answer(keys, trees, starts, table, factors, spacing, rows, products)
        return rows, products

    def to_rows(self, leaves: Bytes, places: Places, kind: Kind) -> Bytes:
        """(rows, bytes): each row the sum of its slots of `leaves`."""
        _check_bytes("leaves", leaves, (places.owners.size, None))
        width = max(4, min(int(kind), 16) if kind is not Kind.MOD61 else 8)
        if kind is Kind.XOR or leaves.shape[1] % width:
            raise MisuseError(f"to_rows: rows of {leaves.shape[1]} bytes do not hold {kind.name}")
        out = np.zeros((places.rows + 1, leaves.shape[1]), dtype=np.uint8)  # the last: of no row
        if out.size:
            self._to_rows(leaves, places, kind, out)
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
    def _to_rows(self, leaves: Bytes, places: Places, kind: Kind, out: Bytes) -> None: ...

    @abstractmethod
    def _peel(self, chosen: Counts, bins: int, placed: Counts) -> None: ...

    @abstractmethod
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
    ) -> None: ...

    @abstractmethod
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
    ) -> None: ...

    @abstractmethod
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
    ) -> None: ...

    @abstractmethod
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
    ) -> None: ...


def depths_of(leaves: Counts) -> Counts:
    """Levels below the root of a tree with this many leaves: ceil(log2(leaves)), exactly."""
    depths = np.zeros(leaves.shape, dtype=np.int64)
    for level in range(31):
        depths += leaves > 1 << level
    return depths


def _starts(counts: Counts) -> Counts:
    starts = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _check_batch(key: bytes, trees: Trees, finals: Bytes, kind: Kind, epoch: int) -> int:
    """The number of blocks in a leaf."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise MisuseError(f"the key of a report is {KEY_BYTES} bytes")
    if not isinstance(kind, Kind) or not 0 <= epoch < MAX_EPOCH:
        raise MisuseError(f"{kind!r} in epoch {epoch}: unknown kind, or epoch out of range")
    _check_bytes("values", finals, (trees.count, None))
    blocks, rest = divmod(int(finals.shape[1]), BLOCK)
    if rest or not 1 <= blocks <= MAX_BLOCKS:
        raise MisuseError(f"a leaf has whole blocks of {BLOCK} bytes, not {finals.shape[1]} bytes")
    return blocks


def _check_points(points: Counts, trees: Trees) -> None:
    if points.dtype != np.int64 or points.shape != (trees.count,) or not points.flags.c_contiguous:
        raise MisuseError("one point for each tree, as int64")
    if points.size and (points.min() < 0 or (points >= trees.leaves).any()):
        raise MisuseError("a point lies outside its tree")


def _check_bytes(
    what: str, array: Bytes, shape: tuple[int, int | None], *, written: bool = False
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 2:
        raise MisuseError(f"{what}: an array of bytes with two axes is due")
    if array.shape[0] != shape[0] or shape[1] not in (None, array.shape[1]):
        raise MisuseError(f"{what}: the shape is {array.shape}, not {shape}")
    if not array.flags.c_contiguous or (written and not array.flags.writeable):
        raise MisuseError(f"{what}: the kernel works on contiguous arrays")
