"""What trees of point functions are made of: leaves, batches of trees, keys and places of rows.

*Fold order*: of c nodes in a level of a tree, node i < ceil(c / 2) is the left child of node i, and
the others are the right children of the nodes 0, 1, ... So a tree has exactly the nodes that its
leaves need, and a level grows in place.

The trees of a batch are in the order of their numbers of leaves. Those with equally many stand side
by side in *sets* of about `SIDE_BY_SIDE` leaves: the steps of a set come level by level, and within
a level tree by tree. All steps are followed by the last corrections, tree by tree, words packed to
the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError

BLOCK: Final = 16
MAX_LEAVES: Final = 1 << 31
MAX_BLOCKS: Final = 1 << 16

SHORT_BITS: Final = 24
"""Words of 32 bits of which no more are used leave a byte over: see points.py."""

SIDE_BY_SIDE: Final = 512
"""Leaves of a set of trees, about; a tree with more is a set of its own."""

_BATCH: Final = 32  # blocks that the widest registers work on at once: sets are multiples of it

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


class Kind(IntEnum):
    """How the words of a leaf add up; the number is the C kernel's."""

    XOR = 0
    ADD32 = 4
    ADD64 = 8
    ADD128 = 16
    MOD61 = 61  # 64-bit words modulo 2^61 - 1, of which sums may stay a little above it


@dataclass(frozen=True, slots=True)
class LeafShape:
    """What a leaf holds: rows of words; under XOR a block that is 128 or 2 selectors."""

    kind: Kind
    rows: int = 1  # a power of two
    words: int = 1  # of a row
    bits: int = 128  # of a word on the wire; under XOR of the block

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind):
            raise MisuseError(f"{self.kind!r} is no kind of words")
        if self.kind is Kind.XOR:
            good = self.rows in (2, 128) and self.words == 1 and self.bits == 8 * BLOCK
        else:
            widest = 61 if self.kind is Kind.MOD61 else 8 * self.word_bytes
            row = self.words * self.word_bytes
            good = 1 <= self.words and 1 <= self.bits <= widest and self.blocks <= MAX_BLOCKS
            good = good and (self.bits > 64 or self.kind is not Kind.ADD128)
            good = good and self.rows in (1, 2, 4) and (self.rows == 1 or self.rows * row <= BLOCK)
        if not good:
            raise MisuseError(f"no leaf is {self.rows} rows of {self.words} words: {self}")

    @property
    def word_bytes(self) -> int:
        return {Kind.XOR: BLOCK, Kind.MOD61: 8}.get(self.kind, int(self.kind))

    @property
    def blocks(self) -> int:
        return max(1, -(-self.words * self.word_bytes // BLOCK))

    @property
    def is_short(self) -> bool:
        """Whether every fourth block is made of the highest bytes of the three before it."""
        return self.kind is Kind.ADD32 and self.bits <= SHORT_BITS and self.blocks > 3

    @property
    def drawn(self) -> int:
        """AES blocks of a leaf."""
        return self.blocks - self.blocks // 4 if self.is_short else self.blocks

    @property
    def value_bytes(self) -> int:
        """Of the value of a point function: a row, or a selector; none where that is one bit."""
        if self.kind is Kind.XOR:
            return 0 if self.rows == 8 * BLOCK else BLOCK // self.rows
        return self.words * self.word_bytes

    @property
    def final_words(self) -> int:
        """Words of a last correction on the wire."""
        return 1 if self.kind is Kind.XOR else self.rows * self.words


@dataclass(frozen=True, eq=False)
class Trees:
    """The public shape of a batch of trees; `of` makes it, so that its arrays fit together."""

    leaves: Counts  # (n,), not falling
    depths: Counts  # (n,)
    first_leaf: Counts  # (n + 1,)
    first_step: Counts  # (n + 1,): of a set's first tree, the first step of the set
    set_first: Counts  # (n,): the first tree of a tree's set
    set_size: Counts  # (n,)

    @classmethod
    def of(cls, leaves: npt.NDArray[Any]) -> Trees:
        """Trees of these many leaves each, in rising order."""
        counts = np.ascontiguousarray(leaves, dtype=np.int64)
        if counts.ndim != 1 or (counts.size and not 0 < counts.min() <= counts.max() < MAX_LEAVES):
            raise MisuseError(f"a tree has 1 to {MAX_LEAVES - 1} leaves")
        if np.any(np.diff(counts) < 0):
            raise MisuseError("trees are not in the order of their numbers of leaves")
        depths = depths_of(counts)
        trees = cls(counts, depths, starts_of(counts), starts_of(depths), *_sets_of(counts))
        for array in trees.arrays:
            array.flags.writeable = False
        return trees

    @property
    def arrays(self) -> tuple[Counts, ...]:
        return (
            self.leaves,
            self.depths,
            self.first_leaf,
            self.first_step,
            self.set_first,
            self.set_size,
        )

    @property
    def count(self) -> int:
        return self.leaves.size

    @cached_property
    def record(self) -> npt.NDArray[np.uint64]:
        """The C kernel's `forest`: where the arrays lie, which do not move, and how many trees."""
        return np.array([array.ctypes.data for array in self.arrays] + [self.count], np.uint64)

    @cached_property
    def total_leaves(self) -> int:
        return int(self.first_leaf[-1])

    @cached_property
    def total_steps(self) -> int:
        return int(self.first_step[-1])

    def step_at(self, trees: Counts, level: int | Counts) -> Counts:
        """The number of the step that corrects this level, in each of these trees."""
        first = self.set_first[trees]
        at: Counts = self.first_step[first] + level * self.set_size[trees] + trees - first
        return at

    def finals_bytes(self, shape: LeafShape) -> int:
        return -(-self.count * shape.final_words * shape.bits // 8)

    def key_bytes(self, shape: LeafShape) -> int:
        """Steps and last corrections of one client."""
        return BLOCK * self.total_steps + self.finals_bytes(shape)


@dataclass(frozen=True, slots=True, eq=False)
class TreeKeys:
    """What one server evaluates for one client."""

    key: bytes = field(repr=False)  # of AES, for this report
    roots: Bytes = field(repr=False)  # (n, 16), control bits included
    public: Bytes = field(repr=False)  # (key_bytes,): steps and last corrections, as they came


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


@dataclass(frozen=True, slots=True, eq=False)
class RowSpace:
    """Rows that leaf values are added to, or taken off: every leaf's words to the row of its slot.

    It takes less memory and time than leaf space, since a tile of leaves goes to the rows while it
    is in the nearest cache. Two threads cannot share one.
    """

    places: Places
    sums: Bytes = field(repr=False)  # (rows + 1, bytes of a row): the last is of no row
    minus: bool = False


def depths_of(leaves: Counts) -> Counts:
    """Levels below the root of a tree with this many leaves: ceil(log2(leaves)), exactly."""
    depths = np.zeros(leaves.shape, dtype=np.int64)
    for level in range(31):
        depths += leaves > 1 << level
    return depths


def _sets_of(leaves: Counts) -> tuple[Counts, Counts]:
    """For each tree the first one of its set, and how many trees that has."""
    each = np.arange(leaves.size)
    alike = np.flatnonzero(np.diff(leaves, prepend=0))  # where the number of leaves changes
    counts = np.diff(alike, append=leaves.size)
    most = np.maximum(SIDE_BY_SIDE // leaves[alike], 1)
    most -= np.where(most > _BATCH, most % _BATCH, 0)
    begin, most = np.repeat(alike, counts), np.repeat(most, counts)
    first = begin + (each - begin) // most * most
    size = np.minimum(most, np.repeat(alike + counts, counts) - first)
    return np.ascontiguousarray(first), np.ascontiguousarray(size)


def starts_of(counts: Counts) -> Counts:
    """Where each part begins, of parts with these many each, and where the last one ends."""
    starts = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts
