"""Every native path of the trees gives the reference's bits, and nothing is trusted."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.crypto import kernel
from tessera.crypto.kernel.backend import Backend
from tessera.crypto.kernel.reference import Reference
from tessera.crypto.kernel.trees import (
    SIDE_BY_SIDE,
    Kind,
    LeafShape,
    Places,
    RowSpace,
    TreeKeys,
    Trees,
)
from tessera.errors import MisuseError

REFERENCE = Reference()
NATIVE = [name for name in kernel.available() if name != "reference"]
FOLDER = Path(kernel.__file__).parent
SOURCES = [str(FOLDER / f"{name}.c") for name in ("kernel", "dpf", "answer", "verify", "rows")]

needs_native = pytest.mark.skipif(not NATIVE, reason="no native kernel on this machine")
each_native = pytest.mark.parametrize("path", NATIVE or ["reference"])
each_backend = pytest.mark.parametrize("name", kernel.available())

WORDS = [kind for kind in Kind if kind is not Kind.XOR]
LEAVES = (
    st.lists(st.integers(1, 40), min_size=1, max_size=40)
    | st.lists(st.integers(1, 9000), min_size=1, max_size=3)
    | st.sampled_from(
        [
            [1],
            [2],
            [512],
            [513, 700],
            [1024],
            [1025],
            [2049, 5000],
            [3] * 400,
            [1] * 1500,
            [17] * 90,
        ]
    )
)
SELECTORS, BITS = LeafShape(Kind.XOR, 2), LeafShape(Kind.XOR, 128)


@st.composite
def word_shapes(draw: st.DrawFn, most: int = 80) -> LeafShape:
    """Rows of words of every kind: several to a leaf, or of several blocks; full words and not."""
    kind = draw(st.sampled_from(WORDS))
    size = 8 if kind is Kind.MOD61 else int(kind)
    words = draw(st.sampled_from([1, 1, 2, 3, 19, 34]) | st.integers(1, max(1, most // size)))
    rows = draw(st.sampled_from([r for r in (1, 2, 4) if r == 1 or r * words * size <= 16]))
    full, least = 8 * size, 65 if kind is Kind.ADD128 else 1
    bits = 61 if kind is Kind.MOD61 else draw(st.just(full) | st.integers(least, full))
    return LeafShape(kind, rows, words, bits)


shapes = st.sampled_from([SELECTORS, BITS]) | word_shapes()


def backend(name: str) -> Backend:
    with kernel.use(name) as chosen:
        return chosen


def trees_of(leaves: list[int]) -> Trees:
    return Trees.of(np.sort(np.array(leaves, dtype=np.int64)))


def noise(seed: int, *shape: int, kind: Kind = Kind.XOR) -> np.ndarray[Any, Any]:
    """Random bytes; elements of the field where they have to be."""
    raw = np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape))), np.uint8)
    raw = raw.reshape(shape).copy()
    if kind is Kind.MOD61:
        raw.view("<u8")[...] %= np.uint64(2**61 - 1)
    return raw


def tree_keys(seed: int, trees: Trees, shape: LeafShape) -> TreeKeys:
    """Keys that nobody generated: evaluation has to agree on them as well."""
    public = noise(seed + 2, trees.key_bytes(shape))
    if shape.kind is Kind.MOD61:  # words below 2^61 - 1, packed
        words = noise(seed + 3, trees.count * shape.final_words, 8, kind=Kind.MOD61).view("<u8")
        packed = REFERENCE.pack(words.reshape(-1), 8, 61)
        public[16 * trees.total_steps :] = packed
    return TreeKeys(noise(seed, 1, 16).tobytes(), noise(seed + 1, trees.count, 16), public)


def made(name: str, trees: Trees, shape: LeafShape, seed: int, epoch: int = 0) -> Any:
    """(points and values of every bin, both parties' keys), from one call."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(trees.count)
    points = np.empty(trees.count, dtype=np.int64)
    points[order] = rng.integers(-1, trees.leaves * shape.rows)
    values = None
    if shape.value_bytes:
        values = noise(seed + 5, trees.count, shape.value_bytes, kind=shape.kind)
    public = np.empty(trees.key_bytes(shape), dtype=np.uint8)
    key, seeds = noise(seed, 16).tobytes(), (noise(seed, 24).tobytes(), bytes(24))
    chosen = backend(name)
    chosen.generate(key, trees, shape, seeds, order, points, values, public, epoch=epoch)
    keys = [TreeKeys(key, chosen.roots(s, p, trees.count), public) for p, s in enumerate(seeds)]
    return order, points, values, keys


def difference(shape: LeafShape, first: Any, second: Any) -> Any:
    """Leaf by leaf what two parties have together, as bytes; words are not reduced to the ring."""
    if shape.kind is Kind.XOR:
        return first ^ second
    if shape.kind is Kind.ADD128:  # the low halves, and the high ones less the borrow
        a, b = first.view("<u8"), second.view("<u8")
        out = a - b
        out[:, 1::2] -= a[:, ::2] < b[:, ::2]
        return out.view(np.uint8)
    if shape.kind is Kind.MOD61:
        prime = np.uint64(2**61 - 1)
        return ((first.view("<u8") % prime + prime - second.view("<u8") % prime) % prime).view("u1")
    width = f"<u{int(shape.kind)}"
    return (first.view(width) - second.view(width)).view(np.uint8)


@each_native
@settings(max_examples=60)
@given(
    leaves=LEAVES,
    shape=shapes,
    epoch=st.sampled_from([0, 1, 2**32 - 1]),
    seed=st.integers(0, 2**32),
)
def test_keys_agree(path: str, leaves: list[int], shape: LeafShape, epoch: int, seed: int) -> None:
    trees = trees_of(leaves)
    ours, theirs = (made(name, trees, shape, seed, epoch)[3] for name in (path, "reference"))
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one.public, other.public)
        assert np.array_equal(one.roots, other.roots)


@each_backend
@settings(max_examples=40)
@given(leaves=LEAVES, shape=shapes, epoch=st.sampled_from([0, 9]), seed=st.integers(0, 2**32))
def test_shares_are_the_value_at_the_point_and_zero_elsewhere(
    name: str, leaves: list[int], shape: LeafShape, epoch: int, seed: int
) -> None:
    trees = trees_of(leaves)
    order, points, values, keys = made(name, trees, shape, seed, epoch)
    sums = []
    for one in keys:
        sums.append(np.zeros((trees.total_leaves, 16 * shape.blocks), dtype=np.uint8))
        backend(name).evaluate([one], trees, shape, sums[-1], epoch=epoch)
    found = difference(shape, *sums)
    due = np.zeros_like(found)
    for tree, bin_ in enumerate(order):
        leaf, inside = divmod(int(points[bin_]), shape.rows)
        if leaf < 0:
            continue
        row = due[trees.first_leaf[tree] + leaf]
        if values is None:
            row[inside // 8] = 1 << inside % 8
        else:
            row.reshape(shape.rows, -1)[inside, : shape.value_bytes] = values[bin_]
    words = slice(None)
    if shape.kind is not Kind.XOR:  # padding is nobody's, and above the ring's bits is nothing
        mask = ((1 << shape.bits) - 1).to_bytes(shape.word_bytes, "little")
        keep = np.frombuffer(mask * shape.words, dtype=np.uint8)
        found, due = (a.reshape(-1, 16 * shape.blocks // shape.rows) for a in (found, due))
        words = slice(0, keep.size)
        found, due = found[:, words] & keep, due[:, words] & keep
    assert np.array_equal(found, due)


@each_native
@settings(max_examples=80)
@given(
    leaves=LEAVES,
    shape=word_shapes(most=330),
    clients=st.integers(1, 3) | st.sampled_from([8, 33]),
    epoch=st.sampled_from([0, 7]),
    seed=st.integers(0, 2**32),
)
def test_leaves_agree(
    path: str, leaves: list[int], shape: LeafShape, clients: int, epoch: int, seed: int
) -> None:
    trees = trees_of(leaves)
    if trees.total_leaves * clients > 20_000:
        clients = 2
    keys = [tree_keys(seed + 9 * c, trees, shape) for c in range(clients)]
    ours = noise(seed, trees.total_leaves, 16 * shape.blocks, kind=shape.kind)
    theirs = ours.copy()
    backend(path).evaluate(keys, trees, shape, ours, epoch=epoch)
    REFERENCE.evaluate(keys, trees, shape, theirs, epoch=epoch)
    assert np.array_equal(ours, theirs)


@each_native
@pytest.mark.parametrize("bits", [22, 24, 25])
def test_rows_of_every_width_agree(path: str, bits: int) -> None:
    """In words of up to 24 bits every fourth block is made of the three before it."""
    trees = trees_of([1, 3, 3, 40, 300])
    for words in (4, 5, 12, 13, 16, 17, 20, 23, 25, 29, 32, 33, 45):
        shape = LeafShape(Kind.ADD32, words=words, bits=bits)
        blocks = -(-words // 4)
        assert shape.drawn == (blocks if bits > 24 else blocks - blocks // 4)
        both = [made(name, trees, shape, words)[3] for name in (path, "reference")]
        assert np.array_equal(both[0][0].public, both[1][0].public)
        totals = np.zeros((2, trees.total_leaves, 16 * blocks), dtype=np.uint8)
        backend(path).evaluate(both[0], trees, shape, totals[0], epoch=2)
        REFERENCE.evaluate(both[0], trees, shape, totals[1], epoch=2)
        assert np.array_equal(totals[0], totals[1])
        which = np.arange(trees.count)
        points = [
            one.evaluate_points(both[0][1], trees, shape, which, trees.leaves - 1, epoch=2)
            for one in (backend(path), REFERENCE)
        ]
        assert np.array_equal(points[0], points[1])


@each_native
@settings(max_examples=60)
@given(
    leaves=LEAVES,
    shape=word_shapes(most=60),
    clients=st.integers(1, 3) | st.sampled_from([9, 17]),
    unused=st.integers(0, 5),
    minus=st.booleans(),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 2**32),
)
def test_rows_agree(
    path: str,
    leaves: list[int],
    shape: LeafShape,
    clients: int,
    unused: int,
    minus: bool,
    bounds: tuple[float, float],
    seed: int,
) -> None:
    """Leaves added straight to their rows, checked or not, are those of leaf space."""
    trees = trees_of(leaves)
    if trees.total_leaves * clients > 20_000:
        clients = 2
    keys = [tree_keys(seed + 9 * c, trees, shape) for c in range(clients)]
    part = range(*sorted(round(bound * trees.count) for bound in bounds))
    slots = trees.total_leaves * shape.rows
    used = max(1, slots - unused) // 3 * 3
    order = np.random.default_rng(seed).permutation(slots)[:used].reshape(-1, 3)
    places = Places.of(np.ascontiguousarray(order), slots)
    before = noise(seed, places.rows + 1, shape.value_bytes, kind=shape.kind)
    ours, theirs, checked_ = (RowSpace(places, before.copy(), minus) for _ in range(3))
    backend(path).evaluate(keys, trees, shape, ours, epoch=3, part=part)
    REFERENCE.evaluate(keys, trees, shape, theirs, epoch=3, part=part)
    assert np.array_equal(ours.sums[:-1], theirs.sums[:-1])
    in_leaves = np.zeros((trees.total_leaves, 16 * shape.blocks), dtype=np.uint8)
    backend(path).evaluate(keys, trees, shape, in_leaves, epoch=3, part=part)
    shaped = in_leaves.reshape(slots, -1)
    added = RowSpace(places, np.zeros_like(before), minus)
    backend(path).evaluate(keys, trees, shape, added, epoch=3, part=part)
    due = backend(path).to_rows(shaped, places, shape.kind, shape.value_bytes, minus=minus)
    assert np.array_equal(added.sums[:-1], due)
    zeros = np.zeros((trees.count, 32), dtype=np.uint8)
    factors = np.arange(trees.total_leaves, dtype=np.uint64)
    sums = [
        backend(path).verify(
            keys, trees, shape, [zeros] * clients, factors, leaves=to, epoch=3, part=part
        )
        for to in (checked_, None)
    ]
    assert np.array_equal(checked_.sums[:-1], ours.sums[:-1])
    assert np.array_equal(*sums)


@each_native
@given(
    leaves=LEAVES,
    shape=shapes,
    seed=st.integers(0, 2**32),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_parts_agree(
    path: str, leaves: list[int], shape: LeafShape, seed: int, bounds: tuple[float, float]
) -> None:
    """Any range of the trees, wherever it cuts a set."""
    trees = trees_of(leaves)
    keys = tree_keys(seed, trees, shape)
    part = range(*sorted(round(bound * trees.count) for bound in bounds))
    ours = np.zeros((trees.total_leaves, 16 * shape.blocks), dtype=np.uint8)
    theirs = ours.copy()
    backend(path).evaluate([keys], trees, shape, ours, part=part)
    REFERENCE.evaluate([keys], trees, shape, theirs, part=part)
    assert np.array_equal(ours, theirs)
    outside = np.ones(trees.total_leaves, dtype=bool)
    outside[trees.first_leaf[part.start] : trees.first_leaf[part.stop]] = False
    assert not ours[outside].any()


@each_native
@given(leaves=LEAVES, shape=shapes, count=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_single_points_agree_with_each_other_and_with_all_leaves(
    path: str, leaves: list[int], shape: LeafShape, count: int, seed: int
) -> None:
    trees = trees_of(leaves)
    keys = tree_keys(seed, trees, shape)
    rng = np.random.default_rng(seed)
    which = rng.integers(0, trees.count, count)
    points = rng.integers(0, trees.leaves[which])
    ours = backend(path).evaluate_points(keys, trees, shape, which, points)
    theirs = REFERENCE.evaluate_points(keys, trees, shape, which, points)
    assert np.array_equal(ours, theirs)
    everything = np.zeros((trees.total_leaves, 16 * shape.blocks), dtype=np.uint8)
    backend(path).evaluate([keys], trees, shape, everything)
    assert np.array_equal(ours, everything[trees.first_leaf[which] + points])


@each_native
@given(
    sizes=st.lists(st.integers(1, 300) | st.integers(2040, 2060), min_size=1, max_size=12),
    clients=st.integers(0, 3) | st.sampled_from([8, 9]),
    lines=st.integers(1, 9),
    shape=st.sampled_from([BITS, SELECTORS]),
    width=st.integers(16, 40),
    seed=st.integers(0, 2**32),
)
def test_answers_agree(
    path: str,
    sizes: list[int],
    clients: int,
    lines: int,
    shape: LeafShape,
    width: int,
    seed: int,
) -> None:
    counts = np.sort(np.array(sizes, dtype=np.int64))
    trees = Trees.of(-(-counts // shape.rows))
    keys = [tree_keys(seed + 4 * c, trees, shape) for c in range(clients)]
    rng = np.random.default_rng(seed)
    table = noise(seed, int(rng.integers(1, 400)), 32 * lines)
    members = rng.integers(0, len(table), int(counts.sum()), dtype=np.uint32)
    factors = None if shape is BITS else noise(seed + 9, len(table), width)
    ours = backend(path).answer(keys, trees, shape, counts, members, table, factors)
    theirs = REFERENCE.answer(keys, trees, shape, counts, members, table, factors)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if clients:  # the definition, for the last tree
        bits = np.zeros((trees.total_leaves, 16), dtype=np.uint8)
        REFERENCE.evaluate(keys[-1:], trees, shape, bits)
        flags = np.unpackbits(bits[trees.first_leaf[-2] :], bitorder="little")[:: 128 // shape.rows]
        chosen = table[members[-counts[-1] :][flags[: counts[-1]] == 1]]
        assert np.array_equal(ours[0][-1, -1], np.bitwise_xor.reduce(chosen, axis=0, initial=0))


def test_trees_with_equally_many_leaves_stand_side_by_side() -> None:
    """Sets have one number of leaves, about as many leaves as are to be, and cover all trees."""
    leaves = [1] * 600 + [3] * 400 + [7] * 65 + [100] * 11 + [511] * 2 + [513, 513, 5000]
    trees = trees_of(leaves)
    assert np.all(trees.leaves == trees.leaves[trees.set_first])
    starts = np.unique(trees.set_first)
    assert np.array_equal(np.append(starts[1:], trees.count) - starts, trees.set_size[starts])
    held = trees.set_size * trees.leaves
    assert np.all((held <= SIDE_BY_SIDE) | (trees.set_size == 1))
    assert [int(trees.set_size[trees.leaves == n].max()) for n in (1, 3, 7, 100, 511, 513)] == [
        512,
        160,
        64,
        5,
        1,
        1,
    ]
    every = [
        int(step)
        for tree in range(trees.count)
        for step in trees.step_at(
            np.full(trees.depths[tree], tree), np.arange(int(trees.depths[tree]))
        )
    ]
    assert sorted(every) == list(range(trees.total_steps))


@each_native
@given(
    kind=st.sampled_from(WORDS),
    words=st.integers(1, 6),
    rows=st.integers(0, 80),
    each=st.integers(1, 5),
    unused=st.integers(0, 40),
    dropped=st.integers(0, 2),
    minus=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_sums_of_rows_agree(
    path: str,
    kind: Kind,
    words: int,
    rows: int,
    each: int,
    unused: int,
    dropped: int,
    minus: bool,
    seed: int,
) -> None:
    """Also where the last words of a slot are dropped, and with the sign of the second server."""
    word_bytes = 8 if kind is Kind.MOD61 else int(kind)
    width, kept = words * word_bytes, max(0, words - dropped) * word_bytes
    size = rows * each + unused
    leaves = noise(seed, size, width, kind=kind)
    slots = np.random.default_rng(seed).permutation(size)[: rows * each].reshape(rows, each)
    places = Places.of(slots, size)
    ours = backend(path).to_rows(leaves, places, kind)
    assert np.array_equal(ours, REFERENCE.to_rows(leaves, places, kind))
    if kind is Kind.ADD32:  # the definition
        assert np.array_equal(ours.view("<u4"), leaves.view("<u4")[slots].sum(1, dtype="<u4"))
    ours = backend(path).to_rows(leaves, places, kind, kept, minus=minus)
    assert np.array_equal(ours, REFERENCE.to_rows(leaves, places, kind, kept, minus=minus))
    if kind is Kind.ADD32:
        sums = leaves.view("<u4")[slots].sum(1, dtype="<u4")[:, : kept // 4]
        assert np.array_equal(ours.view("<u4"), -sums if minus else sums)


@each_native
@given(count=st.integers(0, 40), seed=st.integers(0, 2**32))
def test_products_agree(path: str, count: int, seed: int) -> None:
    words = noise(seed, count, 8).reshape(-1).view("<u8")
    factors = noise(seed + 1, count, 16)
    ours = backend(path).products(words, factors)
    assert np.array_equal(ours, REFERENCE.products(words, factors))
    for word, factor, found in zip(words.tolist(), factors, ours, strict=True):
        for half in (0, 1):  # the definition
            times = int.from_bytes(factor[8 * half : 8 * half + 8].tobytes(), "little")
            product = 0
            for bit in range(64):
                product ^= (times << bit) * (word >> bit & 1)
            assert found[16 * half : 16 * half + 16].tobytes() == product.to_bytes(16, "little")


@needs_native
def test_two_threads_share_one_sum() -> None:
    trees = trees_of([9] * 3000)
    shape = LeafShape(Kind.ADD32, words=8, bits=32)
    keys = [tree_keys(c, trees, shape) for c in range(3)]
    chosen = kernel.active()
    together, alone = (np.zeros((trees.total_leaves, 32), dtype=np.uint8) for _ in range(2))
    halves = range(1400), range(1400, 3000)

    def work(part: range) -> None:
        chosen.evaluate(keys, trees, shape, together, part=part)

    threads = [threading.Thread(target=work, args=(part,)) for part in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chosen.evaluate(keys, trees, shape, alone)
    assert np.array_equal(together, alone)


# Each wrong call differs from a good one in one place.

TREES = trees_of([1, 3, 9])
ROW = LeafShape(Kind.ADD32, words=7, bits=30)
KEYS = tree_keys(1, TREES, ROW)
FETCH = tree_keys(1, TREES, BITS)
CHECK = tree_keys(1, TREES, SELECTORS)


SLOTS = Places.of(np.arange(13).reshape(-1, 1), 13)


def good_evaluate() -> dict[str, Any]:
    return {
        "keys": [KEYS],
        "trees": TREES,
        "shape": ROW,
        "leaves": np.zeros((13, 32), dtype=np.uint8),
    }


def other(**changes: Any) -> list[TreeKeys]:
    fields = {name: getattr(KEYS, name) for name in ("key", "roots", "public")}
    return [TreeKeys(**fields | changes)]


WRONG_EVALUATE: dict[str, dict[str, Any]] = {
    "a short cipher key": {"keys": other(key=bytes(15))},
    "a root too few": {"keys": other(roots=KEYS.roots[:-1])},
    "a root too many": {"keys": other(roots=noise(1, 4, 16))},
    "short roots": {"keys": other(roots=noise(1, 3, 15))},
    "a byte too few": {"keys": other(public=KEYS.public[:-1])},
    "a byte too many": {"keys": other(public=noise(1, KEYS.public.size + 1))},
    "strided keys": {"keys": other(public=noise(1, 2 * KEYS.public.size)[::2])},
    "keys with two axes": {"keys": other(public=KEYS.public[np.newaxis])},
    "signed keys": {"keys": other(public=KEYS.public.view(np.int8))},
    "keys of other leaves": {"shape": LeafShape(Kind.ADD32, words=7, bits=31)},
    "a leaf too few": {"leaves": np.zeros((12, 32), dtype=np.uint8)},
    "a leaf too many": {"leaves": np.zeros((14, 32), dtype=np.uint8)},
    "narrow leaves": {"leaves": np.zeros((13, 16), dtype=np.uint8)},
    "strided leaves": {"leaves": np.zeros((13, 64), dtype=np.uint8)[:, ::2]},
    "no shape": {"shape": Kind.ADD32},
    "a negative epoch": {"epoch": -1},
    "a large epoch": {"epoch": 2**32},
    "rows of another size": {"leaves": RowSpace(SLOTS, np.zeros((14, 32), dtype=np.uint8))},
    "too few rows": {"leaves": RowSpace(SLOTS, np.zeros((13, 28), dtype=np.uint8))},
    "rows of other leaves": {
        "leaves": RowSpace(
            Places.of(np.arange(12).reshape(-1, 1), 12), np.zeros((13, 28), dtype=np.uint8)
        )
    },
    "a part beyond": {"part": range(2, 4)},
    "a part before": {"part": range(-1, 2)},
    "a part with gaps": {"part": range(0, 3, 2)},
}


@each_backend
@pytest.mark.parametrize("wrong", WRONG_EVALUATE.values(), ids=WRONG_EVALUATE.keys())
def test_a_wrong_argument_of_evaluate_is_refused(name: str, wrong: dict[str, Any]) -> None:
    backend(name).evaluate(**good_evaluate())
    with pytest.raises((MisuseError, AttributeError)):
        backend(name).evaluate(**good_evaluate() | wrong)


def good_generate() -> dict[str, Any]:
    return {
        "key": bytes(16),
        "trees": TREES,
        "shape": ROW,
        "seeds": (bytes(24), bytes(24)),
        "order": np.array([2, 0, 1]),
        "points": np.array([2, 8, 0]),
        "values": noise(1, 3, 28),
        "out": np.empty(TREES.key_bytes(ROW), dtype=np.uint8),
    }


def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


WRONG_GENERATE: dict[str, dict[str, Any]] = {
    "a point beyond": {"points": np.array([3, 8, 0])},
    "a point before": {"points": np.array([2, -2, 0])},
    "a point too few": {"points": np.array([2, 8])},
    "points of another type": {"points": np.array([2, 8, 0], dtype=np.int32)},
    "a bin beyond": {"order": np.array([3, 0, 1])},
    "a bin before": {"order": np.array([-1, 0, 1])},
    "a bin too few": {"order": np.array([0, 1])},
    "a short seed": {"seeds": (bytes(24), bytes(23))},
    "no values": {"values": None},
    "narrow values": {"values": noise(1, 3, 27)},
    "a value too few": {"values": noise(1, 2, 28)},
    "values for bits": {"shape": BITS, "out": np.empty(TREES.key_bytes(BITS), np.uint8)},
    "a long key": {"key": bytes(17)},
    "room for less": {"out": np.empty(TREES.key_bytes(ROW) - 1, dtype=np.uint8)},
    "room that is not ours": {"out": frozen(np.empty(TREES.key_bytes(ROW), dtype=np.uint8))},
}


@each_backend
@pytest.mark.parametrize("wrong", WRONG_GENERATE.values(), ids=WRONG_GENERATE.keys())
def test_a_wrong_argument_of_generate_is_refused(name: str, wrong: dict[str, Any]) -> None:
    backend(name).generate(**good_generate())
    with pytest.raises(MisuseError):
        backend(name).generate(**good_generate() | wrong)


@pytest.mark.parametrize(
    "shape",
    [
        (4, 1, 1, 32),
        (Kind.XOR, 1, 1, 128),
        (Kind.XOR, 2, 2, 128),
        (Kind.XOR, 2, 1, 64),
        (Kind.ADD32, 1, 0, 32),
        (Kind.ADD32, 1, 1, 33),
        (Kind.ADD32, 1, 1, 0),
        (Kind.ADD32, 3, 1, 32),
        (Kind.ADD32, 4, 2, 32),
        (Kind.ADD128, 1, 1, 64),
        (Kind.MOD61, 1, 1, 62),
        (Kind.ADD128, 1, 2**16 + 1, 128),
    ],
)
def test_leaves_that_cannot_be_are_refused(shape: Any) -> None:
    with pytest.raises(MisuseError):
        LeafShape(*shape)


FLAT = np.zeros(1, dtype=np.int64)


@each_backend
@pytest.mark.parametrize(
    "call",
    [
        lambda k: k.roots(bytes(23), 0, 3),
        lambda k: k.roots(bytes(24), 2, 3),
        lambda k: k.evaluate_points(KEYS, TREES, ROW, FLAT + 3, FLAT),
        lambda k: k.evaluate_points(KEYS, TREES, ROW, FLAT - 1, FLAT),
        lambda k: k.evaluate_points(KEYS, TREES, ROW, FLAT, FLAT + 1),
        lambda k: k.evaluate_points(KEYS, TREES, ROW, FLAT, FLAT - 1),
        lambda k: k.evaluate_points(KEYS, TREES, ROW, FLAT, FLAT[:0]),
        lambda k: Places.of(np.array([[4]]), 4),
        lambda k: Places.of(np.array([[-1]]), 4),
        lambda k: Places.of(np.array([0]), 4),
        lambda k: Places.of(np.zeros((2, 0), np.int64), 4),
        lambda k: Places.of(np.array([[0, 1], [2, 1]]), 4),
        lambda k: Places.of(np.array([[0, 0]]), 4),
        lambda k: k.to_rows(noise(1, 5, 8), Places.of(np.array([[0]]), 4), Kind.ADD64),
        lambda k: k.to_rows(noise(1, 4, 8), Places.of(np.array([[0]]), 4), Kind.ADD128),
        lambda k: k.to_rows(noise(1, 4, 16), Places.of(np.array([[0]]), 4), Kind.XOR),
        lambda k: k.to_rows(noise(1, 4, 6), Places.of(np.array([[0]]), 4), Kind.ADD32),
        lambda k: k.peel(np.array([[0, 1, 3]]), 3),
        lambda k: k.peel(np.array([[0, 1, -1]]), 3),
        lambda k: k.peel(np.array([[0, 1]]), 3),
        lambda k: k.peel(np.array([[0, 1, 2]]), 0),
        lambda k: k.to_rows(noise(1, 4, 8), Places.of(np.array([[0]]), 4), Kind.ADD64, 12),
        lambda k: k.to_rows(noise(1, 4, 8), Places.of(np.array([[0]]), 4), Kind.ADD64, 16),
        lambda k: k.products(np.zeros(3, np.uint64), noise(1, 2, 16)),
        lambda k: k.products(np.zeros(3, np.int64), noise(1, 3, 16)),
        lambda k: k.products(np.zeros(6, np.uint64)[::2], noise(1, 3, 16)),
        lambda k: k.products(np.zeros(3, np.uint64), noise(1, 3, 17)),
        lambda k: k.answer([KEYS], TREES, ROW, TREES.leaves, rows_to(13), noise(1, 13, 32)),
        lambda k: k.answer([FETCH], TREES, BITS, SIZES, rows_to(ALL), noise(1, ALL, 40)),
        lambda k: k.answer([FETCH], TREES, BITS, SIZES, rows_to(ALL), noise(1, ALL - 1, 32)),
        lambda k: k.answer([FETCH], TREES, BITS, SIZES, rows_to(ALL - 1), noise(1, ALL, 32)),
        lambda k: k.answer(
            [FETCH], TREES, BITS, SIZES, rows_to(ALL).astype(np.int64), noise(1, ALL, 32)
        ),
        lambda k: k.answer(
            [FETCH], TREES, BITS, SIZES, rows_to(2 * ALL)[::2], noise(1, 2 * ALL, 32)
        ),
        lambda k: k.answer(
            [FETCH], TREES, BITS, TREES.leaves * 129, rows_to(1677), noise(1, 1677, 32)
        ),
        lambda k: k.answer(
            [FETCH], TREES, BITS, SIZES - 128, rows_to(ALL - 384), noise(1, ALL - 384, 32)
        ),
        lambda k: k.answer([FETCH], TREES, BITS, SIZES[1:], rows_to(ALL), noise(1, ALL, 32)),
        lambda k: k.answer(
            [FETCH], TREES, BITS, SIZES, rows_to(ALL), noise(1, ALL, 32), noise(1, ALL, 16)
        ),
        lambda k: k.answer(
            [CHECK], TREES, SELECTORS, FLAT.repeat(3) + 2**62, rows_to(0), noise(1, 0, 32)
        ),
        lambda k: k.answer(
            [CHECK], TREES, SELECTORS, TREES.leaves * 3, rows_to(39), noise(1, 39, 32)
        ),
        lambda k: k.answer(
            *([CHECK], TREES, SELECTORS, TREES.leaves * 2, rows_to(26)),
            *(noise(1, 26, 32), noise(1, 26, 15)),
        ),
        lambda k: k.answer(
            *([CHECK], TREES, SELECTORS, TREES.leaves * 2, rows_to(26)),
            *(noise(1, 26, 32), noise(1, 25, 16)),
        ),
        lambda k: Trees.of(np.array([0])),
        lambda k: Trees.of(np.array([5, 1])),
        lambda k: Trees.of(np.array([2**31])),
    ],
)
def test_other_wrong_arguments_are_refused(name: str, call: Any) -> None:
    with pytest.raises(MisuseError):
        call(backend(name))


def rows_to(count: int) -> np.ndarray:
    """Rows of a table, each once."""
    return np.arange(count, dtype=np.uint32)


SIZES = TREES.leaves * 128
ALL = int(SIZES.sum())


class WrongLeaf(kernel.Native):
    """A path with a defect in one kind of leaf."""

    def _evaluate(self, keys: Any, trees: Any, shape: LeafShape, *rest: Any) -> None:
        super()._evaluate(keys, trees, shape, *rest)
        if shape.kind is Kind.MOD61:
            rest[0][-1, 0] ^= 1


@needs_native
def test_a_path_whose_trees_are_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    best, *lower = NATIVE
    real = kernel.Native
    monkeypatch.setattr(
        kernel, "Native", lambda lib, name: (WrongLeaf if name == best else real)(lib, name)
    )
    found = kernel.probe(REFERENCE)
    assert [path.name for path in found.paths] == lower
    assert found.reason == f"self-check failed: {best}"


# The C code under the sanitizers: a program of its own, because Python is not built with them.
# Every block of memory has exactly the size that backends promise, so that one byte more is seen.

DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const int64_t *leaves, *depths, *first_leaf, *first_step, *set_first, *set_size;
    int64_t count;
} forest;
typedef struct {
    int64_t kind, rows, words, bits;
} leaf_shape;

int tessera_paths(void);
int tessera_dpf_roots(int, const uint8_t *, int, size_t, uint8_t *);
int tessera_dpf_generate(int, const uint8_t *, const uint8_t *, const forest *, const leaf_shape *,
                         uint32_t, const int64_t *, const int64_t *, const uint8_t *, size_t,
                         uint8_t *);
int tessera_dpf_evaluate(int, size_t, const uint8_t *, const uint8_t *const *,
                         const uint8_t *const *, size_t, const forest *, const leaf_shape *,
                         uint32_t, size_t, size_t, uint8_t *, const uint32_t *, size_t, int);
int tessera_dpf_points(int, const uint8_t *, const uint8_t *, const uint8_t *, size_t,
                       const forest *, const leaf_shape *, uint32_t, size_t, const int64_t *,
                       const int64_t *, uint8_t *);
int tessera_dpf_answer(int, size_t, const uint8_t *, const uint8_t *const *,
                       const uint8_t *const *, size_t, const forest *, const leaf_shape *,
                       const int64_t *, const uint32_t *, const uint8_t *, size_t,
                       const uint8_t *, size_t, uint8_t *, uint8_t *);
int tessera_dpf_tags(int, const uint8_t *, const uint8_t *, const uint8_t *, const forest *, size_t,
                     const int64_t *, const int64_t *, uint8_t *);
int tessera_divide(size_t, const uint64_t *, size_t, const uint8_t *, uint8_t *);
int tessera_dpf_verify(int, size_t, const uint8_t *, const uint8_t *const *,
                       const uint8_t *const *, size_t, const forest *, const leaf_shape *, uint32_t,
                       size_t, size_t, const uint8_t *const *, const uint64_t *, uint8_t *,
                       const uint32_t *, size_t, int, uint8_t *);
int tessera_products(size_t, const uint64_t *, const uint8_t *, uint8_t *);
int tessera_dpf_to_rows(const uint8_t *, size_t, size_t, const uint32_t *, int, size_t, int,
                        uint8_t *);
int tessera_peel(size_t, const int64_t *, size_t, int64_t *);

/* -Wl,--wrap: memory that is not there */
static int fails_at;
void *__real_aligned_alloc(size_t, size_t);
void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return fails_at && !--fails_at ? NULL : __real_aligned_alloc(alignment, size);
}

static void *given(size_t size) { /* from stdin, in a block of exactly that size */
    void *memory = malloc(size ? size : 1);
    if (fread(memory, 1, size, stdin) != size) exit(2);
    return memory;
}

int main(void) {
    int64_t head[10];
    while (fread(head, 8, 10, stdin) == 10) {
        int path = (int)head[0];
        leaf_shape *shape = malloc(sizeof *shape);
        *shape = (leaf_shape){head[1], head[2], head[3], head[4]};
        size_t n = (size_t)head[5], clients = (size_t)head[6], key_bytes = (size_t)head[7];
        size_t value_bytes = (size_t)head[8], leaf = 16 * (size_t)head[9];
        if (!(tessera_paths() >> path & 1)) return 3;
        int64_t *leaves = given(8 * n), *depths = given(8 * n), *first_leaf = given(8 * (n + 1)),
                *first_step = given(8 * (n + 1)), *set_first = given(8 * n),
                *set_size = given(8 * n), *points = given(8 * n), *which = given(8 * n),
                *starts = given(8 * (n + 1)), *slots = malloc(24 * n), *placed = malloc(8 * n);
        forest *f = malloc(sizeof *f);
        *f = (forest){leaves, depths, first_leaf, first_step, set_first, set_size, (int64_t)n};
        uint8_t *key = given(16), *seeds = given(48), *values = given(n * value_bytes);
        size_t all = (size_t)first_leaf[n], rows = (size_t)starts[n];
        uint8_t *keys = malloc(key_bytes ? key_bytes : 1), *roots[2];
        if (tessera_dpf_generate(path, key, seeds, f, shape, 0, which, points,
                                 value_bytes ? values : NULL, value_bytes, keys)) return 4;
        for (int party = 0; party < 2; party++) {
            roots[party] = malloc(16 * n);
            if (tessera_dpf_roots(path, seeds + 24 * party, party, n, roots[party])) return 4;
        }
        uint8_t *ciphers = malloc(16 * clients), *sum = calloc(1, leaf * all);
        uint8_t *single = calloc(1, leaf * n);
        const uint8_t **r = malloc(8 * clients), **k = malloc(8 * clients);
        for (size_t c = 0; c < clients; c++)
            memcpy(ciphers + 16 * c, key, 16), r[c] = roots[c % 2], k[c] = keys;
        for (size_t half = 0; half < 2; half++) /* in two parts, as two threads would */
            if (tessera_dpf_evaluate(path, clients, ciphers, r, k, key_bytes, f, shape, 0,
                                     half * (n / 2), half ? n : n / 2, sum, NULL, 0, 0)) return 5;
        fails_at = 1;
        if (tessera_dpf_evaluate(path, clients, ciphers, r, k, key_bytes, f, shape, 0, 0, n,
                                 sum, NULL, 0, 0) != 1) return 10;
        fails_at = 0;
        int64_t *at = malloc(8 * n);
        for (size_t i = 0; i < n; i++) at[i] = leaves[i] - 1;
        if (tessera_dpf_points(path, key, roots[1], keys, key_bytes, f, shape, 0, n, which, at,
                               single)) return 6;
        uint8_t *tags = malloc(32 * n), *cs = malloc(32 * n), *said = calloc(clients, 32);
        uint8_t *again = calloc(1, leaf * all);
        uint64_t *c = malloc(8 * n), *factors = malloc(8 * all);
        const uint8_t **corrections = malloc(8 * clients);
        for (size_t i = 0; i < n; i++) c[i] = (uint64_t)leaves[i];
        for (size_t i = 0; i < all; i++) factors[i] = i * 0x9e3779b97f4a7c15u + 1;
        for (size_t i = 0; i < clients; i++) corrections[i] = cs;
        if (tessera_dpf_tags(path, key, roots[1], keys, f, n, which, at, tags)) return 11;
        if (tessera_divide(n, c, 2, tags, cs)) return 11;
        for (int failing = 2; failing >= 0; failing--) {
            fails_at = failing;
            if (tessera_dpf_verify(path, clients, ciphers, r, k, key_bytes, f, shape, 0, 0, n,
                                   corrections, factors, failing ? NULL : again, NULL, 0, 0,
                                   said) != (failing > 0)) return 12;
        }
        if (memcmp(again, sum, leaf * all)) return 13; /* the same values in the same pass */
        if (tessera_dpf_verify(path, clients, ciphers, r, k, key_bytes, f, shape, 0, 0, n / 2,
                               corrections, factors, NULL, NULL, 0, 0, said)) return 12;
        fwrite(cs, 1, 32 * n, stdout);
        fwrite(said, clients, 32, stdout);
        uint8_t *words = malloc(16 * n), *times = malloc(32 * n);
        memcpy(words, cs, 16 * n);
        if (tessera_products(n, c, words, times)) return 14;
        fwrite(times, 1, 32 * n, stdout);
        free(words), free(times);
        free(tags), free(cs), free(said), free(again), free(c), free(factors), free(corrections);
        fwrite(keys, 1, key_bytes, stdout);
        fwrite(sum, 1, leaf * all, stdout);
        fwrite(single, 1, leaf * n, stdout);
        if (shape->kind) {
            uint8_t *out = calloc(1, leaf * (n + 1));
            uint32_t *owners = malloc(4 * all);
            for (size_t i = 0; i < all; i++) owners[i] = (uint32_t)(i < all / n * n ? i % n : n);
            const int kind = (int)shape->kind;
            if (tessera_dpf_to_rows(sum, leaf, all, owners, kind, leaf, 0, out)) return 7;
            fwrite(out, 1, leaf * n, stdout);
            free(out);
            const size_t kept = leaf - (kind == 4 ? 4 : leaf > 16 ? 16 : 0);
            out = calloc(1, kept * (n + 1));
            if (tessera_dpf_to_rows(sum, leaf, all, owners, kind, kept, 1, out)) return 7;
            fwrite(out, 1, kept * n, stdout);
            free(out), free(owners);
            /* straight to rows, in a pass that also checks; then taken off again */
            const size_t slots_all = all * (size_t)shape->rows;
            owners = malloc(4 * slots_all);
            for (size_t i = 0; i < slots_all; i++)
                owners[i] = (uint32_t)(i < slots_all / n * n ? i % n : n);
            out = calloc(1, value_bytes * (n + 1));
            uint64_t *ones = calloc(all, 8);
            uint8_t *zeros = calloc(n, 32), *said_again = calloc(clients, 32);
            const uint8_t **none = malloc(8 * clients);
            for (size_t i = 0; i < clients; i++) none[i] = zeros;
            if (tessera_dpf_verify(path, clients, ciphers, r, k, key_bytes, f, shape, 0, 0, n, none,
                                   ones, out, owners, value_bytes, 0, said_again)) return 15;
            fwrite(out, 1, value_bytes * n, stdout);
            if (tessera_dpf_evaluate(path, clients, ciphers, r, k, key_bytes, f, shape, 0, 0, n,
                                     out, owners, value_bytes, 1)) return 15;
            fwrite(out, 1, value_bytes * n, stdout);
            free(out), free(owners), free(ones), free(zeros), free(said_again), free(none);
        } else {
            for (size_t width = 32; width <= 160; width += 64) {
                const size_t half = rows / 2 + 1;
                uint8_t *table = malloc(width * half);
                uint32_t *members = malloc(4 * rows);
                for (size_t i = 0; i < width * half; i++) table[i] = (uint8_t)(i * 13 + i / 256);
                for (size_t i = 0; i < rows; i++) members[i] = (uint32_t)(i % half);
                uint8_t *out = calloc(clients, width * n), *products = calloc(clients, 32 * n);
                for (int failing = 2; failing >= 0; failing--) {
                    fails_at = failing;
                    if (tessera_dpf_answer(path, clients, ciphers, r, k, key_bytes, f, shape,
                                           starts, members, table, width, table, width, out,
                                           shape->rows == 2 ? products : NULL) != (failing > 0))
                        return 8;
                }
                fwrite(out, clients, width * n, stdout);
                if (shape->rows == 2) fwrite(products, clients, 32 * n, stdout);
                free(table), free(members), free(out), free(products);
            }
        }
        for (size_t i = 0; i < n; i++)
            placed[i] = -1, slots[3 * i] = (int64_t)i, slots[3 * i + 1] = (int64_t)i + 1,
            slots[3 * i + 2] = (int64_t)(2 * i) + 2;
        if (tessera_peel(n, slots, 2 * n + 1, placed)) return 9;
        fwrite(placed, 8, n, stdout);
        free(leaves), free(depths), free(first_leaf), free(first_step), free(set_first);
        free(set_size), free(points), free(which), free(starts), free(slots), free(placed), free(f);
        free(key), free(seeds), free(values), free(keys), free(roots[0]), free(roots[1]);
        free(ciphers), free(sum), free(single), free(r), free(k), free(at), free(shape);
    }
    return 0;
}
"""


class Case:
    """One input of the driver, and what it has to write: the reference's bits."""

    def __init__(self, path: int, shape: LeafShape, leaves: list[int], clients: int) -> None:
        trees = trees_of(leaves)
        n, rows = trees.count, shape.rows
        sizes = np.maximum(trees.leaves * rows - rows // 2, 1)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        which, points = np.arange(n), (np.arange(n) * 7 % trees.leaves) * rows
        points[0] = -1
        values = noise(5, n, shape.value_bytes, kind=shape.kind) if shape.value_bytes else None
        key, seeds = bytes(range(16)), (bytes(range(24)), bytes(range(9, 33)))
        head = [path, shape.kind, rows, shape.words, shape.bits, n, clients]
        head += [trees.key_bytes(shape), shape.value_bytes, shape.blocks]
        arrays = [np.array(head), *trees.arrays, points, which, starts]
        parts = [np.asarray(array, dtype="<i8").tobytes() for array in arrays]
        self.given = b"".join([*parts, key, *seeds, b"" if values is None else values.tobytes()])
        self.name = f"path {path}, {shape}, {leaves[:3]}, {clients} clients"

        public = np.empty(trees.key_bytes(shape), dtype=np.uint8)
        REFERENCE.generate(key, trees, shape, seeds, which, points, values, public)
        both = [TreeKeys(key, REFERENCE.roots(s, p, n), public) for p, s in enumerate(seeds)]
        keys = [both[c % 2] for c in range(clients)]
        total = np.zeros((trees.total_leaves, 16 * shape.blocks), dtype=np.uint8)
        REFERENCE.evaluate(keys, trees, shape, total)
        known = tuple(leaves), clients  # nodes do not depend on what the leaves hold
        if known not in CHECKED:
            CHECKED[known] = checked(trees, shape, both[1], keys)
        quotients, sums = CHECKED[known]
        halves = quotients.reshape(-1)[: 16 * n].reshape(n, 16)
        products = REFERENCE.products(trees.leaves.astype(np.uint64), halves)
        due = [quotients, sums, products, public, total]
        due.append(REFERENCE.evaluate_points(both[1], trees, shape, which, trees.leaves - 1))
        if shape.kind is Kind.XOR:
            for width in (32, 96, 160):
                half = int(starts[-1]) // 2 + 1
                at = np.arange(width * half)
                table = (at * 13 + at // 256).astype(np.uint8).reshape(-1, width)
                members = rows_to(int(starts[-1])) % np.uint32(half)
                factors = table if rows == 2 else None
                found = REFERENCE.answer(keys, trees, shape, sizes, members, table, factors)
                # asked for once: failing calls write nothing; by tree, then by client
                due += [one.transpose(1, 0, 2).copy() for one in found]
        else:
            slots = np.arange(trees.total_leaves // n * n).reshape(-1, n).T.copy()
            places, leaf = Places.of(slots, trees.total_leaves), total.shape[1]
            due.append(REFERENCE.to_rows(total, places, shape.kind))
            kept = leaf - (4 if shape.kind is Kind.ADD32 else 16 if leaf > 16 else 0)
            due.append(REFERENCE.to_rows(total, places, shape.kind, kept, minus=True))
            each_slot = trees.total_leaves * rows
            places = Places.of(np.arange(each_slot // n * n).reshape(-1, n).T.copy(), each_slot)
            written = REFERENCE.to_rows(
                total.reshape(each_slot, -1), places, shape.kind, shape.value_bytes
            )
            due += [written, np.zeros_like(written)]
        each = np.arange(n)
        due.append(REFERENCE.peel(np.stack([each, each + 1, 2 * each + 2], axis=1), 2 * n + 1))
        self.due = b"".join(array.tobytes() for array in due)


CHECKED: dict[Any, Any] = {}


def checked(trees: Trees, shape: LeafShape, one: TreeKeys, keys: list[TreeKeys]) -> Any:
    """What the driver makes of tags: quotients, and sums over all trees and half of them again."""
    which, last = np.arange(trees.count), trees.leaves - 1
    tags = REFERENCE.tags(one, trees, shape, which, last)
    quotients = REFERENCE.divide(tags, trees.leaves.astype(np.uint64))
    each = np.arange(trees.total_leaves, dtype=np.uint64)
    factors = each * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    corrections = [quotients] * len(keys)
    sums = [
        REFERENCE.verify(keys, trees, shape, corrections, factors, part=part)
        for part in (range(trees.count), range(trees.count // 2))
    ]
    return quotients, sums[0] ^ sums[1]


RAGGED = [
    ([1], 1),
    ([1, 1, 2], 3),
    ([3] * 40, 2),
    ([24, 24, 17, 5, 5], 9),
    ([6] * 170 + [2], 2),
    ([131, 700, 8, 129], 1),
    ([300, 9, 9], 17),  # as many clients as fetch rows in turns
    ([512, 513, 1025], 10),
    ([3000], 3),
]


def run_driver(folder: Path, paths: list[int], *more: str) -> None:
    """Build the driver under the sanitizers with these flags, and compare all it writes."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    (folder / "driver.c").write_text(DRIVER)
    program = folder / "driver"
    # no -g: with it the unrolled code takes ten times as long to compile
    flags = ["-std=gnu11", "-O1", "-g0", "-Wall", "-Wextra", "-Werror", "-DTESSERA_WITHOUT_PYTHON"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sanitize += ["-Wl,--wrap=aligned_alloc"]
    sources = [str(folder / "driver.c"), *SOURCES]
    built = subprocess.run(
        [compiler, *flags, *more, *sanitize, *sources, "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if built.returncode and "asan" in built.stderr:
        pytest.skip("no address sanitizer on this machine")
    assert built.returncode == 0, built.stderr

    rows = [LeafShape(kind, words=words, bits=61 if kind is Kind.MOD61 else 8 * kind)
            for kind in WORDS for words in (1, 2, 9, 19)]  # fmt: skip
    rows += [LeafShape(Kind.ADD32, 4, 1, 32), LeafShape(Kind.ADD64, 2, 1, 40)]
    rows += [LeafShape(Kind.ADD32, 1, words, 22) for words in (13, 19, 24, 28, 34)]
    rows += [LeafShape(Kind.ADD128, 1, 3, 100)]
    cases = [
        Case(path, shape, leaves, clients)
        for path in paths
        for shape in (SELECTORS, BITS, *rows)
        for leaves, clients in RAGGED
    ]
    given_ = b"".join(case.given for case in cases)
    done = subprocess.run([program], input=given_, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    at = 0
    for case in cases:
        assert done.stdout[at : at + len(case.due)] == case.due, case.name
        at += len(case.due)
    assert at == len(done.stdout)


@pytest.mark.slow
@needs_native
def test_the_c_code_of_trees_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    """Ragged trees, parts of them, all kinds of words, and memory that cannot be had."""
    run_driver(tmp_path, [kernel._NUMBER[name] for name in NATIVE])


@pytest.mark.slow
@pytest.mark.skipif("vaes256" not in NATIVE, reason="no registers of 256 bits for AES")
def test_the_512_bit_source_is_clean_under_the_sanitizers_in_registers_of_two(
    tmp_path: Path,
) -> None:
    """Also where there are no registers of 512 bits; under the sanitizers, too."""
    run_driver(tmp_path, [kernel._NUMBER["vaes512"]], "-DTESSERA_TWO")


@pytest.mark.slow
def test_the_c_code_of_trees_compiles_where_there_are_no_aes_instructions(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    flags = ["-Wall", "-Wextra", "-Werror", "-DTESSERA_PORTABLE", "-DTESSERA_WITHOUT_PYTHON"]
    library = str(tmp_path / "other.so")
    subprocess.run([compiler, *flags, "-shared", "-fPIC", *SOURCES, "-o", library], check=True)
