"""Forest: the public shape of one client's point functions, a tree for every bin that has rows.

A leaf of a tree holds as many rows as fit one AES block (early termination: Boyle, Gilboa, Ishai,
ia.cr/2018/707, 3.2.1), or one row of several blocks. Depth follows the bin's size, which is public,
and a tree has only the leaves that its bin needs. Trees are kept in the order of their numbers of
leaves, so that the kernel can fill its registers with nodes of several trees.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.field import Field
from tessera.crypto.group import Group, Words
from tessera.crypto.kernel.trees import BLOCK, MAX_BLOCKS, Kind, LeafShape, Trees
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError

HEADER_BYTES: Final = 16
"""Encoded keys begin with the digest of the forest that they are for."""

_MAX_ROWS: Final = 1 << 31  # in one bin


@dataclass(frozen=True)
class Values:
    """The type of a point function's value: a row of group words, or bits under XOR."""

    group: Group | None  # None: bits, for retrieval
    words: int = 1
    bits: int = 1  # without a group: 1, or 64 of which the lowest selects and all are checked with

    def __post_init__(self) -> None:
        if self.group is None:
            if self.words != 1 or self.bits not in (1, 64):
                raise ConfigError(f"point functions: {self.words} words of {self.bits} bits")
            return
        supported = (isinstance(self.group, Ring) and self.group.word_bytes >= 4) or (
            isinstance(self.group, Field) and self.group.exponent == 61
        )
        if not supported:
            raise ConfigError(
                f"point functions have no values in {self.group.name}",
                hint="take z2^B with 17 <= B <= 128, or f2^61-1",
            )
        if not 1 <= self.words <= MAX_BLOCKS:
            raise ConfigError(f"point functions: a row of {self.words} words")

    @property
    def name(self) -> str:
        if self.group is None:
            return "bit" if self.bits == 1 else f"{self.bits} bits"
        return f"{self.words} of {self.group.name}"

    @property
    def kind(self) -> Kind:
        if self.group is None:
            return Kind.XOR
        return Kind.MOD61 if isinstance(self.group, Field) else Kind(self.group.word_bytes)

    @cached_property
    def shape(self) -> LeafShape:
        """What a leaf is to the kernel."""
        if self.group is None:
            return LeafShape(Kind.XOR, self.per_leaf)
        return LeafShape(self.kind, self.per_leaf, self.words, self.group.bits)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a leaf; none for bits."""
        return 0 if self.group is None else self.words * self.group.word_bytes

    @property
    def per_leaf(self) -> int:
        """Rows in a leaf: a power of two, so that a position's high bits are its leaf."""
        if self.group is None:
            return 8 * BLOCK // self.bits
        return 1 << max(1, BLOCK // self.row_bytes).bit_length() - 1

    @property
    def blocks(self) -> int:
        """Blocks of 16 bytes of a leaf."""
        return max(1, -(-self.row_bytes // BLOCK))

    @property
    def stride(self) -> int:
        """Words from one row of a leaf to the next, padding included."""
        assert self.group is not None
        return self.blocks * BLOCK // self.per_leaf // self.group.word_bytes


BITS: Final = Values(None)
"""One bit per row: which row of a bin is fetched."""

SELECTORS: Final = Values(None, bits=64)
"""An odd word per row: which row is fetched, and a key to check it with that no server knows."""


@dataclass(frozen=True, slots=False, eq=False)
class Forest:
    """The trees of all bins. `of` makes it; it is public and the same for every client."""

    values: Values
    sizes: npt.NDArray[np.int64] = field(repr=False)  # (bins,): rows of each bin
    order: npt.NDArray[np.int64] = field(repr=False)  # (trees,): the bin of each tree
    tree: npt.NDArray[np.int64] = field(repr=False)  # (bins,): the tree of each bin, -1 for none
    trees: Trees = field(repr=False)

    @classmethod
    def of(cls, sizes: npt.NDArray[Any], values: Values) -> Forest:
        """One tree for every bin with rows."""
        counts = np.array(sizes, dtype=np.int64)
        if counts.ndim != 1 or np.any(counts < 0) or np.any(counts >= _MAX_ROWS):
            raise MisuseError("a forest is made from the sizes of bins, each below 2^31")
        leaves = -(-counts // values.per_leaf)
        some = np.nonzero(leaves)[0]
        order = some[np.argsort(leaves[some], kind="stable")]
        tree = np.full(counts.size, -1, dtype=np.int64)
        tree[order] = np.arange(order.size)
        for array in (counts, order, tree):
            array.flags.writeable = False
        return cls(values, counts, order, tree, Trees.of(leaves[order]))

    @property
    def bins(self) -> int:
        return int(self.sizes.size)

    @cached_property
    def digest(self) -> bytes:
        """Binds the value type, how its words are drawn, and every bin's size."""
        drawn = "half trees, spare bytes" if self.values.shape.is_short else "half trees"
        text = f"{Label.FOREST}, {drawn}, {self.values.name}, {self.bins} bins:".encode()
        return hashlib.sha256(text + self.sizes.astype("<u4").tobytes()).digest()[:HEADER_BYTES]

    @cached_property
    def public_bytes(self) -> int:
        """Exact size of the encoded public part."""
        return HEADER_BYTES + self.trees.key_bytes(self.values.shape)

    @property
    def finals_bytes(self) -> int:
        return self.trees.finals_bytes(self.values.shape)

    @cached_property
    def aes_blocks(self) -> int:
        """AES blocks that one evaluation of all leaves needs: every node with children, and leaves.

        A lower bound, which the benchmarks hold the kernel against.
        """
        parents, width = 0, self.trees.leaves.copy()
        while np.any(width > 1):
            width = np.where(width > 1, -(-width // 2), 0)
            parents += int(width.sum())
        return parents + self.trees.total_leaves * self.values.shape.drawn

    def empty(self) -> npt.NDArray[np.uint8]:
        """Zeros in leaf space."""
        return np.zeros((self.trees.total_leaves, self.values.blocks * BLOCK), dtype=np.uint8)

    def slots(
        self, bins: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Where in leaf space, counted in rows, position p of bin b lies."""
        first: npt.NDArray[np.int64] = self.trees.first_leaf[self.tree[bins]]
        return first * self.values.per_leaf + positions

    def words(self, leaves: npt.NDArray[np.uint8]) -> Words:
        """Leaf space as (slots, stride, *limbs) words of the group: a view."""
        group = self.values.group
        if group is None:
            raise MisuseError("bits have no words")
        slots = self.trees.total_leaves * self.values.per_leaf
        return leaves.view(group.dtype).reshape(slots, self.values.stride, *group.limbs)

    def parts(self, count: int) -> list[range]:
        """The trees in `count` consecutive parts of about equal work, for threads."""
        total, trees = self.trees.total_leaves, self.trees.count
        bounds = [
            int(np.searchsorted(self.trees.first_leaf, total * i // count)) for i in range(count)
        ]
        bounds = [min(bound, trees) for bound in bounds] + [trees]
        return [range(bounds[i], bounds[i + 1]) for i in range(count)]
