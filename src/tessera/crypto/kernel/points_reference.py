"""Point functions in NumPy and `cryptography`: the twin of dpf.c and rows.c.

A level of all trees is expanded at once: the nodes that exist are listed once per batch of trees,
and every client is then a few gathers, one AES call and some XORs per level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tessera.crypto.kernel.points import (
    BLOCK,
    Bytes,
    Counts,
    Kind,
    Places,
    PointKernel,
    TreeKeys,
    Trees,
)

Blocks = npt.NDArray[np.uint64]
"""(..., 2): blocks as two little-endian words, low word first."""

_WORD: Final = np.dtype("<u8")
_TOP: Final = np.uint64(1 << 63)  # of the second word of a block: the control bit
_PRIME: Final = np.uint64(2**61 - 1)
_LEAVES_AT_ONCE: Final = 1 << 13  # about 128 kB per array: a level stays in the L2 cache
_RIGHT: Final = 1
_CONVERT: Final = 2


class ReferencePoints(PointKernel):
    """The portable half of the kernel that is about point functions."""

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
        hash_ = _Hash(key)
        # Trees on the last axis: numpy is slow where that one is short.
        s = np.stack([_words(roots[0]).T, _words(roots[1]).T], axis=1)  # (word, party, tree)
        out = _words(steps).reshape(-1, 2, 2)
        for level in range(int(trees.depths[-1])):
            first = int(trees.depths.searchsorted(level, side="right"))  # trees that go on
            alive = s[:, :, first:]
            bit = points[first:] >> (trees.depths[first:] - 1 - level) & 1
            right = -bit.view(np.uint64)  # all ones where the point goes right
            children = hash_.children(alive)  # (side, word, party, tree)
            difference = children[:, :, 0] ^ children[:, :, 1]
            step = np.empty(difference.shape, dtype=_WORD)  # (side, word, tree)
            # Fig. 1: the seed is corrected so that the side which the point leaves becomes equal
            step[:] = _choose(difference[1], difference[0], right)
            # ... and the control bits so that they differ on the side which it takes, only there
            step[:, 1] &= ~_TOP
            step[:, 1] |= (difference[:, 1] ^ right ^ _LEFT_TOP) & _TOP
            out[trees.first_step[first:-1] + level] = step.transpose(2, 0, 1)
            taken = _choose(step[0], step[1], right)[:, np.newaxis]
            corrected = np.uint64(0) - (alive[1] >> np.uint64(63))
            s[:, :, first:] = _choose(children[0], children[1], right) ^ (taken & corrected)
        s = np.ascontiguousarray(s.transpose(1, 2, 0))  # (party, tree, word)
        own, theirs = (hash_.convert(s[party], blocks, kind, epoch) for party in (0, 1))
        value = _words(values)
        difference = _sub(kind, _add(kind, value, theirs), own)  # beta - H(s0) + H(s1)
        negative = (s[1, :, 1] >= _TOP)[:, np.newaxis]
        finals[...] = _bytes(
            np.where(negative, _sub(kind, np.zeros_like(difference), difference), difference)
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
        for batch in _batches(trees, begin, end):
            target = leaves[batch.first_leaf : batch.first_leaf + batch.owner.size]
            total = _words(target)
            for one in keys:
                hash_ = _Hash(one.key)
                s = _words(one.roots[batch.begin : batch.end])
                steps = _words(one.steps).reshape(-1, 2)
                for level in batch.levels:
                    parent = s[level.parent]
                    s = hash_(parent, _SIDES[level.side])
                    s ^= steps[level.step] & _mask(parent)
                value = hash_.convert(s, blocks, kind, epoch)
                final = _words(one.finals[batch.begin : batch.end])[batch.owner]
                total = _add(kind, total, _add(kind, value, final & _mask(s)))
            target[...] = _bytes(total)

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
        hash_ = _Hash(keys.key)
        s = _words(keys.roots)[which]
        steps = _words(keys.steps).reshape(-1, 2, 2)
        depths = trees.depths[which]
        for level in range(int(depths.max())):
            going = np.nonzero(depths > level)[0]
            side = points[going] >> (depths[going] - 1 - level) & 1
            parent = s[going]
            step = steps[trees.first_step[which[going]] + level, side]
            s[going] = hash_(parent, _SIDES[side]) ^ (step & _mask(parent))
        value = hash_.convert(s, blocks, kind, epoch)
        final = _words(keys.finals)[which]
        out[...] = _bytes(_add(kind, value, final & _mask(s)))

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
        words = table.view(_WORD)
        owner = np.repeat(np.arange(trees.count), np.diff(starts))
        place = trees.first_leaf[owner] * (128 // spacing) + np.arange(owner.size) - starts[owner]
        for client, one in enumerate(keys):
            leaves = np.zeros((trees.total_leaves, BLOCK), dtype=np.uint8)
            self._evaluate([one], trees, Kind.XOR, 1, leaves, 0, 0, trees.count)
            if spacing == 1:
                bits = np.unpackbits(leaves.reshape(-1), bitorder="little")[place].astype(np.uint64)
            else:
                bits = _words(leaves).reshape(-1)[place]
            chosen = words & (np.uint64(0) - (bits & np.uint64(1)))[:, np.newaxis]
            rows[client] = np.bitwise_xor.reduceat(chosen, starts[:-1], axis=0).view(np.uint8)
            if factors is not None:
                each = carryless(bits, np.ascontiguousarray(factors[:, :BLOCK]).view(_WORD))
                sums = np.bitwise_xor.reduceat(each, starts[:-1], axis=0)
                products[client] = sums.view(np.uint8)

    def _to_rows(self, leaves: Bytes, places: Places, kind: Kind, out: Bytes) -> None:
        slots, out = places.slots, out[:-1]
        if kind is Kind.ADD32:
            narrow = leaves.view("<u4")
            sums = np.take(narrow, slots[:, 0], axis=0)
            for column in slots.T[1:]:
                sums += np.take(narrow, column, axis=0)
            out[...] = sums.view(np.uint8)
            return
        words = _words(leaves)
        total = np.take(words, slots[:, 0], axis=0)
        for column in slots.T[1:]:
            total = _add(kind, total, np.take(words, column, axis=0))
        out[...] = _bytes(total)

    def _peel(self, chosen: Counts, bins: int, placed: Counts) -> None:
        items = np.repeat(np.arange(placed.size), 3)
        flat = chosen.reshape(-1)
        count = np.bincount(flat, minlength=bins)
        mixed = np.zeros(bins, dtype=np.int64)  # XOR of the items that chose a bin: the last one
        np.bitwise_xor.at(mixed, flat, items)
        touched = np.arange(bins)
        while touched.size:
            single = touched[count[touched] == 1]
            taken, first = np.unique(mixed[single], return_index=True)  # the lowest bin comes first
            placed[taken] = single[first]
            left = chosen[taken].reshape(-1)
            np.subtract.at(count, left, 1)
            np.bitwise_xor.at(mixed, left, np.repeat(taken, 3))
            touched = np.unique(left)


def carryless(words: Blocks, factors: Blocks) -> Blocks:
    """word * factor over GF(2)[x], for (n,) words and (n, 2) factors: (n, 4), low words first."""
    out = np.zeros((words.size, 2, 2), dtype=_WORD)
    for bit in range(64):
        mask = np.uint64(0) - (words >> np.uint64(bit) & np.uint64(1))
        part = factors & mask[:, np.newaxis]
        out[:, :, 0] ^= part << np.uint64(bit)
        if bit:
            out[:, :, 1] ^= part >> np.uint64(64 - bit)
    return out.reshape(-1, 4)


class _Hash:
    """H(s, w) of one report."""

    __slots__ = ("_context",)

    def __init__(self, key: bytes) -> None:
        self._context: Final[CipherContext] = Cipher(AES128(key), ECB()).encryptor()

    def __call__(self, s: Blocks, tweak: Blocks) -> Blocks:
        """Blocks of the shape to which both broadcast."""
        x = np.ascontiguousarray(s ^ tweak)
        y = np.empty(x.size + 2, dtype=_WORD)
        self._context.update_into(x.view(np.uint8).reshape(-1).data, y.view(np.uint8).data)
        result: Blocks = y[: x.size].reshape(x.shape)
        result ^= s
        return result

    def children(self, s: Blocks) -> Blocks:
        """Both children of nodes (word, party, tree), not yet corrected: (side, word, ...)."""
        x = np.empty((2, *s.shape[1:], 2), dtype=_WORD)
        x[..., 0] = s[0]
        x[0, ..., 1] = s[1]
        np.bitwise_xor(s[1], _SIDES[1, 1], out=x[1, ..., 1])
        y = np.empty(x.size + 2, dtype=_WORD)
        self._context.update_into(x.view(np.uint8).reshape(-1).data, y.view(np.uint8).data)
        children: Blocks = y[: x.size].reshape(x.shape).transpose(0, 3, 1, 2) ^ s
        return children

    def convert(self, s: Blocks, blocks: int, kind: Kind, epoch: int) -> Blocks:
        """The leaf words of nodes (n, 2), as (n, 2 * blocks) 64-bit words.

        In the field a word is the low 61 bits. All ones is zero once more, so that zero is twice
        as likely as any other: a distance of 2^-61 from uniform.
        """
        tweaks = np.zeros((blocks, 2), dtype=_WORD)
        tweaks[:, 0] = np.arange(blocks, dtype=np.uint64) << np.uint64(32)
        tweaks[:, 1] = _CONVERT << 56 | epoch
        words = self(s[:, np.newaxis, :], tweaks).reshape(s.shape[0], 2 * blocks)
        return words & _PRIME if kind is Kind.MOD61 else words


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of one level that exist: whose children they are and what corrects them."""

    parent: Counts
    side: Counts
    step: Counts  # half steps: 2 * (number of the step) + side


@dataclass(frozen=True, slots=True)
class _Batch:
    """Trees begin .. end, all of one depth, and their nodes level by level."""

    begin: int
    end: int
    first_leaf: int
    levels: list[_Level]
    owner: Counts  # tree of each leaf, counted from `begin`


def _batches(trees: Trees, begin: int, end: int) -> Iterator[_Batch]:
    at = begin
    while at < end:
        depth = int(trees.depths[at])
        same = int(np.searchsorted(trees.depths, depth, side="right"))
        full = int(np.searchsorted(trees.first_leaf, trees.first_leaf[at] + _LEAVES_AT_ONCE))
        until = max(at + 1, min(end, same, full))
        leaves = trees.leaves[at:until]
        owner = np.arange(until - at)
        levels = []
        parents = np.ones(until - at, dtype=np.int64)
        for level in range(depth):
            nodes = -(-leaves // (1 << (depth - 1 - level)))
            owner = np.repeat(np.arange(until - at), nodes)
            place = np.arange(owner.size) - np.repeat(np.cumsum(nodes) - nodes, nodes)
            first = np.cumsum(parents) - parents
            side = place & 1
            step = 2 * (trees.first_step[at:until][owner] + level) + side
            levels.append(_Level(first[owner] + (place >> 1), side, step))
            parents = nodes
        yield _Batch(at, until, int(trees.first_leaf[at]), levels, owner)
        at = until


_SIDES: Final = np.array([[0, 0], [0, _RIGHT << 56]], dtype=_WORD)
_LEFT_TOP: Final = np.array([[_TOP], [0]], dtype=_WORD)  # (side, 1)


def _choose(a: Blocks, b: Blocks, second: Blocks) -> Blocks:
    """b where `second` is all ones, and a where it is zero."""
    return ((a ^ b) & second) ^ a


def _words(array: Bytes) -> Blocks:
    return array.view(_WORD)


def _bytes(words: Blocks) -> Bytes:
    return np.ascontiguousarray(words).view(np.uint8)


def _mask(s: Blocks) -> Blocks:
    """All ones where the control bit is set, with an axis to broadcast over the block."""
    return np.uint64(0) - (s[..., 1:] >> np.uint64(63))


def _add(kind: Kind, a: Blocks, b: Blocks) -> Blocks:
    """a + b for words of this kind that lie in 64-bit words; both are (n, 2 * blocks)."""
    if kind is Kind.XOR:
        return a ^ b
    if kind is Kind.ADD32:
        return _halves(a, b, np.add)
    if kind is Kind.MOD61:
        return _fold(a + b)
    total = a + b
    if kind is Kind.ADD128:
        total[:, 1::2] += total[:, 0::2] < a[:, 0::2]
    return total


def _sub(kind: Kind, a: Blocks, b: Blocks) -> Blocks:
    if kind is Kind.XOR:
        return a ^ b
    if kind is Kind.ADD32:
        return _halves(a, b, np.subtract)
    if kind is Kind.MOD61:
        return _fold(a + (_PRIME - b))
    difference = a - b
    if kind is Kind.ADD128:
        difference[:, 1::2] -= a[:, 0::2] < b[:, 0::2]
    return difference


def _halves(a: Blocks, b: Blocks, operation: Any) -> Blocks:
    left, right = (np.ascontiguousarray(x).view("<u4") for x in (a, b))
    result: Blocks = operation(left, right).view(_WORD)
    return result


def _fold(wide: Blocks) -> Blocks:
    """64-bit values to the same residues below 2^61 - 1."""
    folded = (wide & _PRIME) + (wide >> np.uint64(61))
    reduced: Blocks = np.minimum(folded, folded - _PRIME)
    return reduced


assert BLOCK == 2 * _WORD.itemsize
