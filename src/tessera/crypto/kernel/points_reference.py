"""Point functions in NumPy and `cryptography`: the twin of dpf.c, answer.c, verify.c, rows.c.

A level of all trees with equally many leaves is grown at once, as (nodes, trees) blocks. Where only
a few trees are of one size, all of one depth grow together, each as if it were complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR, ECB

from tessera.crypto.kernel.points import KEY_BYTES, PointKernel
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

Blocks = npt.NDArray[np.uint64]
"""(..., 2): blocks as two little-endian words, low word first."""

_WORD: Final = np.dtype("<u8")
_TOP: Final = np.uint64(1 << 63)  # of either word of a block: a control bit
_PRIME: Final = np.uint64(2**61 - 1)
_LEAVES_AT_ONCE: Final = 1 << 13  # about 128 kB per array: a level stays in the L2 cache
_SHORT: Final = 1 << 11  # leaves: below that, a call of NumPy costs more than what it works on
_CONVERT: Final = 1
_TAG: Final = 2
_POLYNOMIAL: Final = 1 << 128 | 0x87  # x^128 + x^7 + x^2 + x + 1


class ReferencePoints(PointKernel):
    """The portable half of the kernel that is about point functions."""

    def _roots(self, seed: bytes, party: int, out: Bytes) -> None:
        counter = CTR(seed[KEY_BYTES:] + bytes(8))
        stream = Cipher(AES128(seed[:KEY_BYTES]), counter).encryptor().update(bytes(out.nbytes))
        words = np.frombuffer(stream, dtype=_WORD).reshape(-1, 2)
        _words(out)[...] = (words & ~_TOP) | np.uint64(party << 63)

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
        hash_ = Hash(key)
        roots = [self.roots(seed, party, trees.count) for party, seed in enumerate(seeds)]
        y = np.stack([_words(one) for one in roots])  # (party, tree, word)
        offset = y[0] ^ y[1]
        where = points[order]
        rows = np.maximum(where, 0)
        right = _paths(trees, rows // shape.rows)
        steps = _words(out[: BLOCK * trees.total_steps]).reshape(-1, 2)
        for level in range(int(trees.depths[-1])):
            first = int(trees.depths.searchsorted(level, side="right"))  # trees that go on
            goes = -(right[first:] >> np.uint64(level) & np.uint64(1))[:, np.newaxis]
            alive = y[:, first:]
            h = sigma(hash_(alive, _ZERO))
            # the child which the point leaves becomes equal for both, the other keeps the offset
            step = h[0] ^ h[1] ^ (offset[first:] & ~goes)
            steps[trees.step_at(np.arange(first, trees.count), level)] = step
            y[0, first:] = h[0] ^ (step & controls(alive[0])) ^ (alive[0] & goes)
            y[1, first:] = y[0, first:] ^ offset[first:]
        own, theirs = (hash_.convert(y[party], shape, epoch) for party in (0, 1))
        value = _words(_leaf_values(shape, order, where, values))
        # beta - H(y0) + H(y1), or minus that where party 1 adds it
        last = _sub(shape.kind, _add(shape.kind, value, theirs), own)
        negative = _switch(shape, y[1])
        minus = _sub(shape.kind, np.zeros_like(last), last)
        last = last ^ ((last ^ minus) & negative)
        out[BLOCK * trees.total_steps :] = _packed(shape, last)

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
        if isinstance(leaves, RowSpace):
            space, size = leaves, (trees.total_leaves, shape.blocks * BLOCK)
            own = np.zeros(size, dtype=np.uint8)
            self._evaluate(keys, trees, shape, own, epoch, begin, end)
            slots = own.reshape(space.places.owners.size, -1)
            more = self.to_rows(
                slots, space.places, shape.kind, shape.value_bytes, minus=space.minus
            )
            space.sums[:-1] = _rows_added(shape.kind, space.sums[:-1], more)
            return
        for some in _together(trees, begin, end):
            rows = leaves[trees.first_leaf[some.start] : trees.first_leaf[some.stop]]
            total = _words(rows)
            for one in keys:
                y = grown(one, trees, some)
                value = Hash(one.key).convert(y, shape, epoch)
                finals = _finals(one, trees, shape, np.arange(some.start, some.stop))
                final = np.repeat(finals, trees.leaves[some.start : some.stop], axis=0)
                total = _add(shape.kind, total, _add(shape.kind, value, final & _switch(shape, y)))
            rows[...] = _bytes(total)

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
        y = _walked(keys, trees, which, points)
        value = Hash(keys.key).convert(y, shape, epoch)
        final = _finals(keys, trees, shape, which)
        out[...] = _bytes(_add(shape.kind, value, final & _switch(shape, y)))

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
        words = table.view(_WORD)[members]
        owner = np.repeat(np.arange(trees.count), np.diff(starts))
        place = trees.first_leaf[owner] * shape.rows + np.arange(owner.size) - starts[owner]
        for client, one in enumerate(keys):
            leaves = np.zeros((trees.total_leaves, BLOCK), dtype=np.uint8)
            self._evaluate([one], trees, shape, leaves, 0, 0, trees.count)
            if shape.rows == 2:
                bits = _words(leaves).reshape(-1)[place]
            else:
                bits = np.unpackbits(leaves.reshape(-1), bitorder="little")[place].astype(np.uint64)
            chosen = words & (np.uint64(0) - (bits & np.uint64(1)))[:, np.newaxis]
            rows[:, client] = np.bitwise_xor.reduceat(chosen, starts[:-1], axis=0).view(np.uint8)
            if factors is not None:
                each = carryless(bits, factors[members, :BLOCK].view(_WORD))
                sums = np.bitwise_xor.reduceat(each, starts[:-1], axis=0)
                products[:, client] = sums.view(np.uint8)

    def _tags(
        self, keys: TreeKeys, trees: Trees, which: Counts, points: Counts, out: Bytes
    ) -> None:
        y = _walked(keys, trees, which, points)
        out[...] = _bytes(_tags_of(keys, y).reshape(-1, 4))

    def _divide(self, values: Bytes, divisors: npt.NDArray[np.uint64], out: Bytes) -> None:
        for i, divisor in enumerate(divisors.tolist()):
            inverse = _inverse(divisor)
            for half in (slice(0, BLOCK), slice(BLOCK, None)):
                value = int.from_bytes(values[i, half].tobytes(), "little")
                quotient = _reduced(_product(value, inverse))
                out[i, half] = np.frombuffer(quotient.to_bytes(BLOCK, "little"), np.uint8)

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
        if leaves is not None:
            self._evaluate(keys, trees, shape, leaves, epoch, part.start, part.stop)
        for client, one in enumerate(keys):
            total = [0, 0]  # unreduced
            for some in _together(trees, part.start, part.stop):
                first = trees.first_leaf[some.start : some.stop + 1]
                r = coefficients[first[0] : first[-1]]
                y = grown(one, trees, some)
                tags = _tags_of(one, y)
                position = (_within(trees, some) + 1).astype(_WORD)
                scaled = carryless(r, np.stack([position, position], axis=1))[:, :2]
                live = scaled & controls(y)[:, 1:]
                live = np.bitwise_xor.reduceat(live, first[:-1] - first[0], axis=0)
                for block in (0, 1):
                    low, high = np.split(carryless(r, tags[:, block]), 2, axis=1)
                    total[block] ^= _number(low) ^ _number(high) << 64
                    for tree, sum_ in zip(some, live, strict=True):
                        cs = corrections[client][tree, BLOCK * block :][:BLOCK]
                        total[block] ^= _product(
                            _number(sum_[np.newaxis]), int.from_bytes(cs.tobytes(), "little")
                        )
            found = b"".join(_reduced(sum_).to_bytes(BLOCK, "little") for sum_ in total)
            sums[client] ^= np.frombuffer(found, dtype=np.uint8)

    def _products(self, words: npt.NDArray[np.uint64], factors: Bytes, out: Bytes) -> None:
        out[...] = carryless(words, factors.view(_WORD)).view(np.uint8)

    def _to_rows(self, leaves: Bytes, places: Places, kind: Kind, minus: bool, out: Bytes) -> None:
        slots, out = places.slots, out[:-1]
        leaves = np.ascontiguousarray(leaves[:, : out.shape[1]])
        if kind is Kind.ADD32:
            narrow = leaves.view("<u4")
            sums = np.take(narrow, slots[:, 0], axis=0)
            for column in slots.T[1:]:
                sums += np.take(narrow, column, axis=0)
            out[...] = (np.negative(sums) if minus else sums).view(np.uint8)
            return
        words = _words(leaves)
        total = np.take(words, slots[:, 0], axis=0)
        for column in slots.T[1:]:
            total = _add(kind, total, np.take(words, column, axis=0))
        out[...] = _bytes(_sub(kind, np.zeros_like(total), total) if minus else total)

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


def _number(blocks: Blocks) -> int:
    """The XOR of blocks (n, 2), as an integer."""
    low, high = np.bitwise_xor.reduce(blocks, axis=0).tolist()
    return int(low) | int(high) << 64


def _product(a: int, b: int) -> int:
    """Of two polynomials over GF(2)."""
    out = 0
    while a:
        out ^= b << (a & -a).bit_length() - 1
        a &= a - 1
    return out


def _reduced(a: int) -> int:
    while a >> 128:
        a ^= _POLYNOMIAL << a.bit_length() - 129
    return a


@lru_cache(maxsize=1 << 16)
def _inverse(a: int) -> int:
    """1 / a in GF(2^128), by Euclid's algorithm."""
    r, s, old_r, old_s = _POLYNOMIAL, 0, a, 1
    while r:
        while old_r and old_r.bit_length() >= r.bit_length():
            shift = old_r.bit_length() - r.bit_length()
            old_r, old_s = old_r ^ r << shift, old_s ^ s << shift
        r, s, old_r, old_s = old_r, old_s, r, s
    return _reduced(old_s)


class Hash:
    """H(y, w) of one report."""

    __slots__ = ("_context",)

    def __init__(self, key: bytes) -> None:
        self._context: Final[CipherContext] = Cipher(AES128(key), ECB()).encryptor()

    def __call__(self, y: Blocks, tweak: Blocks) -> Blocks:
        """Blocks of the shape to which both broadcast."""
        x = np.ascontiguousarray(y ^ tweak)
        out = np.empty(x.size + 2, dtype=_WORD)
        self._context.update_into(x.view(np.uint8).reshape(-1).data, out.view(np.uint8).data)
        result: Blocks = out[: x.size].reshape(x.shape)
        result ^= y
        return result

    def convert(self, y: Blocks, shape: LeafShape, epoch: int) -> Blocks:
        """The leaf words of nodes (n, 2), as (n, 2 * blocks) 64-bit words.

        In the field a word is the low 61 bits. All ones is zero once more, so that zero is twice
        as likely as any other: a distance of 2^-61 from uniform.
        """
        words = self(y[:, np.newaxis, :], tweaks(_CONVERT, shape.drawn, epoch))
        if shape.is_short:
            words = _with_spare(words, shape.blocks)
        words = words.reshape(y.shape[0], 2 * shape.blocks)
        return words & _PRIME if shape.kind is Kind.MOD61 else words


def _with_spare(drawn: Blocks, blocks: int) -> Blocks:
    """(n, drawn, 2) to (n, blocks, 2): the highest bytes of three blocks' words are a fourth."""
    out = np.empty((drawn.shape[0], blocks, 2), dtype=_WORD)
    every = np.arange(blocks)
    out[:, every % 4 != 3] = drawn
    words = out.view("<u4")
    for fourth in every[3::4]:
        top = words[:, fourth - 3 : fourth] >> np.uint32(24)
        words[:, fourth] = top[:, 0] | top[:, 1] << np.uint32(8) | top[:, 2] << np.uint32(16)
    return out


def tweaks(purpose: int, blocks: int, epoch: int = 0) -> Blocks:
    """(blocks, 2): those of the blocks 0, 1, ... for this purpose."""
    out = np.zeros((blocks, 2), dtype=_WORD)
    out[:, 0] = np.arange(blocks, dtype=np.uint64) << np.uint64(32)
    out[:, 1] = purpose << 56 | epoch
    return out


def sigma(s: Blocks) -> Blocks:
    """(low, high) -> (high, low ^ high)."""
    out = np.empty_like(s)
    out[..., 0] = s[..., 1]
    np.bitwise_xor(s[..., 0], s[..., 1], out=out[..., 1])
    return out


def controls(y: Blocks) -> Blocks:
    """All ones in the halves whose control bit is set."""
    return np.uint64(0) - (y >> np.uint64(63))


def grown(keys: TreeKeys, trees: Trees, some: range) -> Blocks:
    """The leaves' nodes of trees of one depth, (leaves, 2), tree by tree."""
    hash_ = Hash(keys.key)
    which = np.arange(some.start, some.stop)
    steps = _steps(keys, trees)
    leaves, depth = int(trees.leaves[some.start]), int(trees.depths[some.start])
    alike = leaves == trees.leaves[some.stop - 1]
    y = _words(keys.roots[some.start : some.stop])[np.newaxis]  # (nodes, trees, 2)
    for level in range(depth):
        left = sigma(hash_(y, _ZERO)) ^ (steps[trees.step_at(which, level)] & controls(y))
        y = np.concatenate([left, left ^ y])
        if alike:
            y = y[: -(-leaves >> depth - 1 - level)]
    if alike:
        return np.ascontiguousarray(y.transpose(1, 0, 2)).reshape(-1, 2)
    return y.reshape(-1, 2)[_places(trees, some)]


def _walked(keys: TreeKeys, trees: Trees, which: Counts, points: Counts) -> Blocks:
    """The nodes of single leaves, (n, 2)."""
    hash_ = Hash(keys.key)
    y = _words(keys.roots)[which]
    steps = _steps(keys, trees)
    depths = trees.depths[which]
    right = _paths_in(trees.leaves[which], depths, points)
    for level in range(int(depths.max())):
        going = np.nonzero(depths > level)[0]
        parent = y[going]
        step = steps[trees.step_at(which[going], level)]
        goes = -(right[going] >> np.uint64(level) & np.uint64(1))[:, np.newaxis]
        left = sigma(hash_(parent, _ZERO)) ^ (step & controls(parent))
        y[going] = left ^ (parent & goes)
    return y


def _tags_of(keys: TreeKeys, y: Blocks) -> Blocks:
    """G of nodes (n, 2): (n, 2, 2)."""
    return Hash(keys.key)(y[:, np.newaxis, :], tweaks(_TAG, 2))


def _together(trees: Trees, begin: int, end: int) -> Iterator[range]:
    """Trees that `grown` takes at once, with about `_LEAVES_AT_ONCE` leaves.

    They have equally many leaves; or, where that would be a short array, they are of one depth.
    """
    at = begin
    while at < end:
        leaves, depth = int(trees.leaves[at]), int(trees.depths[at])
        last = min(end, int(trees.leaves.searchsorted(leaves, side="right")))
        until = min(last, at + max(1, _LEAVES_AT_ONCE // leaves))
        if (last - at) * leaves < _SHORT:
            same = int(trees.depths.searchsorted(depth, side="right"))
            until = min(end, same, at + max(1, _LEAVES_AT_ONCE >> depth))
        yield range(at, until)
        at = until


@lru_cache(maxsize=32)
def _places(trees: Trees, some: range) -> Counts:
    """Where the leaves of trees of one depth are among the (nodes, trees) of complete ones.

    There a child to the right of node x at level l is node x + 2^l: its path is its place.
    """
    counts = trees.leaves[some.start : some.stop]
    owner = np.repeat(np.arange(len(some)), counts)
    depths = np.repeat(trees.depths[some.start : some.stop], counts)
    paths = _paths_in(counts[owner], depths, _within(trees, some))
    places: Counts = paths.astype(np.int64) * len(some) + owner
    return places


def _within(trees: Trees, some: range) -> Counts:
    """The place of every leaf in its tree."""
    first = trees.first_leaf[some.start : some.stop + 1]
    within: Counts = np.arange(first[0], first[-1]) - np.repeat(first[:-1], np.diff(first))
    return within


def _paths(trees: Trees, leaf: Counts) -> Blocks:
    return _paths_in(trees.leaves, trees.depths, leaf)


def _paths_in(leaves: Counts, depths: Counts, leaf: Counts) -> Blocks:
    """The sides to take from the root to a leaf: bit l says which child of the node at level l."""
    at, path = leaf.copy(), np.zeros(leaf.size, dtype=np.uint64)
    for level in reversed(range(int(depths.max(initial=0)))):
        below = np.maximum(depths - level, 0)
        half = -(-leaves >> below)  # nodes at this level
        side = (depths > level) & (at >= half)
        at -= np.where(side, half, 0)
        path |= side.astype(np.uint64) << np.uint64(level)
    return path


def _steps(keys: TreeKeys, trees: Trees) -> Blocks:
    return _words(keys.public[: BLOCK * trees.total_steps]).reshape(-1, 2)


def _finals(keys: TreeKeys, trees: Trees, shape: LeafShape, which: Counts) -> Blocks:
    """(n, 2 * blocks): the last corrections of these trees."""
    raw = keys.public[BLOCK * trees.total_steps :]
    out = np.zeros((which.size, shape.blocks * BLOCK), dtype=np.uint8)
    into = _leaf_words(shape, out)
    words, size = shape.final_words, shape.word_bytes
    if shape.bits == 8 * size:
        into[...] = raw.reshape(-1, *into.shape[1:])[which]
        return _words(out)
    first = which[:, np.newaxis] * words + np.arange(words)
    at = first.reshape(-1, 1) * shape.bits + np.arange(shape.bits)
    bits = np.zeros((at.shape[0], 8 * size), dtype=np.uint8)
    bits[:, : shape.bits] = raw[at >> 3] >> (at & 7).astype(np.uint8) & np.uint8(1)
    into[...] = np.packbits(bits, axis=1, bitorder="little").reshape(into.shape)
    return _words(out)


def _packed(shape: LeafShape, last: Blocks) -> Bytes:
    """Last corrections as they are sent: the ring's bits of each word, and no padding."""
    words = np.ascontiguousarray(_leaf_words(shape, _bytes(last))).reshape(-1, shape.word_bytes)
    if shape.bits == 8 * shape.word_bytes:
        return words.reshape(-1)
    bits = np.unpackbits(words, axis=1, bitorder="little")[:, : shape.bits]
    return np.packbits(bits.reshape(-1), bitorder="little")


def _leaf_words(shape: LeafShape, leaves: Bytes) -> Bytes:
    """The words of leaves without their padding: a view of shape (n, rows, words, word_bytes)."""
    if shape.kind is Kind.XOR:
        return leaves.reshape(-1, 1, 1, BLOCK)
    return leaves.reshape(leaves.shape[0], shape.rows, -1, shape.word_bytes)[:, :, : shape.words]


def _leaf_values(shape: LeafShape, order: Counts, where: Counts, values: Bytes | None) -> Bytes:
    """The value of each tree's leaf at its point: the row at its place, zero around it."""
    out = np.zeros((order.size, shape.blocks * BLOCK), dtype=np.uint8)
    there = np.flatnonzero(where >= 0)
    inside = where[there] % shape.rows
    if values is None:
        out[there, inside // 8] = np.uint8(1) << (inside % 8).astype(np.uint8)
        return out
    rows = out.reshape(order.size, shape.rows, -1)
    rows[there, inside, : shape.value_bytes] = values[order[there]]
    return out


def _switch(shape: LeafShape, y: Blocks) -> Blocks:
    """Which words of a leaf a last correction is added to: all ones or zero, (n, 2 * blocks)."""
    on = controls(y)
    if shape.kind is Kind.ADD128:
        on = np.repeat(on[:, 1:], 2, axis=1)
    return np.tile(on, shape.blocks)


_ZERO: Final = np.zeros(2, dtype=_WORD)


def _words(array: Bytes) -> Blocks:
    return array.view(_WORD)


def _bytes(words: Blocks) -> Bytes:
    return np.ascontiguousarray(words).view(np.uint8)


def _rows_added(kind: Kind, a: Bytes, b: Bytes) -> Bytes:
    """a + b for rows of words of this kind."""
    if kind is Kind.ADD32:
        total: Bytes = np.add(a.view("<u4"), b.view("<u4")).view(np.uint8)
        return total
    return _bytes(_add(kind, _words(a), _words(b)))


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
