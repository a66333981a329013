"""Every native path of dpf.c gives the reference's bits, and nothing is trusted."""

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
from tessera.crypto.kernel import native
from tessera.crypto.kernel.backend import Backend
from tessera.crypto.kernel.points import Kind, Places, TreeKeys, Trees, depths_of
from tessera.crypto.kernel.reference import Reference
from tessera.errors import MisuseError

REFERENCE = Reference()
NATIVE = [name for name in kernel.available() if name != "reference"]
FOLDER = Path(native.__file__).parent
SOURCES = [str(FOLDER / f"{name}.c") for name in ("kernel", "dpf", "rows")]

needs_native = pytest.mark.skipif(not NATIVE, reason="no native kernel on this machine")
each_native = pytest.mark.parametrize("path", NATIVE or ["reference"])
each_backend = pytest.mark.parametrize("name", kernel.available())

WORDS = [kind for kind in Kind if kind is not Kind.XOR]
LEAVES = st.lists(st.integers(1, 40), min_size=1, max_size=40) | st.sampled_from(
    [[1], [2], [512], [513, 700], [1024], [1025], [2049, 5000], [3] * 400, [1] * 1500, [17] * 90]
)


def backend(name: str) -> Backend:
    with kernel.use(name) as chosen:
        return chosen


def trees_of(leaves: list[int]) -> Trees:
    counts = np.array(leaves, dtype=np.int64)
    return Trees.of(counts[np.argsort(depths_of(counts), kind="stable")])


def noise(seed: int, *shape: int, kind: Kind = Kind.XOR) -> np.ndarray[Any, Any]:
    """Random bytes; elements of the field where they have to be."""
    raw = np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape))), np.uint8)
    raw = raw.reshape(shape).copy()
    if kind is Kind.MOD61:
        raw.view("<u8")[...] %= np.uint64(2**61 - 1)
    return raw


def roots_of(seed: int, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    both = noise(seed, count, 16), noise(seed + 1, count, 16)
    both[0][:, -1] &= 0x7F
    both[1][:, -1] |= 0x80
    return both


def tree_keys(seed: int, trees: Trees, blocks: int, kind: Kind) -> TreeKeys:
    """Keys that nobody generated: evaluation has to agree on them as well."""
    return TreeKeys(
        noise(seed, 1, 16).tobytes(),
        noise(seed + 1, trees.count, 16),
        noise(seed + 2, trees.total_steps, 32),
        noise(seed + 3, trees.count, 16 * blocks, kind=kind),
    )


@each_native
@given(
    leaves=LEAVES,
    kind=st.sampled_from(Kind),
    blocks=st.integers(1, 6),
    epoch=st.sampled_from([0, 1, 2**32 - 1]),
    seed=st.integers(0, 2**32),
)
def test_keys_agree(
    path: str, leaves: list[int], kind: Kind, blocks: int, epoch: int, seed: int
) -> None:
    trees = trees_of(leaves)
    points = (noise(seed, trees.count * 4).view("<u4") % trees.leaves).astype(np.int64)
    values = noise(seed + 5, trees.count, 16 * blocks, kind=kind)
    key, roots = bytes(range(16)), roots_of(seed, trees.count)
    ours = backend(path).generate(key, trees, roots, points, values, kind, epoch=epoch)
    theirs = REFERENCE.generate(key, trees, roots, points, values, kind, epoch=epoch)
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one, other)


@each_native
@settings(max_examples=60)
@given(
    leaves=LEAVES,
    kind=st.sampled_from(WORDS),
    blocks=st.integers(1, 20),
    clients=st.integers(1, 3),
    epoch=st.sampled_from([0, 7]),
    seed=st.integers(0, 2**32),
)
def test_leaves_agree(
    path: str, leaves: list[int], kind: Kind, blocks: int, clients: int, epoch: int, seed: int
) -> None:
    trees = trees_of(leaves)
    keys = [tree_keys(seed + 9 * c, trees, blocks, kind) for c in range(clients)]
    ours = noise(seed, trees.total_leaves, 16 * blocks, kind=kind)
    theirs = ours.copy()
    backend(path).evaluate(keys, trees, kind, ours, epoch=epoch)
    REFERENCE.evaluate(keys, trees, kind, theirs, epoch=epoch)
    assert np.array_equal(ours, theirs)


@each_native
@given(leaves=LEAVES, seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_bits_and_parts_agree(path: str, leaves: list[int], seed: int, share: float) -> None:
    trees = trees_of(leaves)
    keys = tree_keys(seed, trees, 1, Kind.XOR)
    part = range(round(share * trees.count) // 2, round(share * trees.count))
    ours = np.zeros((trees.total_leaves, 16), dtype=np.uint8)
    theirs = ours.copy()
    backend(path).evaluate([keys], trees, Kind.XOR, ours, part=part)
    REFERENCE.evaluate([keys], trees, Kind.XOR, theirs, part=part)
    assert np.array_equal(ours, theirs)
    outside = np.ones(trees.total_leaves, dtype=bool)
    outside[trees.first_leaf[part.start] : trees.first_leaf[part.stop]] = False
    assert not ours[outside].any()


@each_native
@given(
    leaves=LEAVES,
    kind=st.sampled_from(Kind),
    blocks=st.integers(1, 3),
    count=st.integers(0, 200),
    seed=st.integers(0, 2**32),
)
def test_single_points_agree_with_each_other_and_with_all_leaves(
    path: str, leaves: list[int], kind: Kind, blocks: int, count: int, seed: int
) -> None:
    trees = trees_of(leaves)
    blocks = 1 if kind is Kind.XOR else blocks
    keys = tree_keys(seed, trees, blocks, kind)
    rng = np.random.default_rng(seed)
    which = rng.integers(0, trees.count, count)
    points = rng.integers(0, trees.leaves[which])
    ours = backend(path).evaluate_points(keys, trees, kind, which, points)
    theirs = REFERENCE.evaluate_points(keys, trees, kind, which, points)
    assert np.array_equal(ours, theirs)
    everything = np.zeros((trees.total_leaves, 16 * blocks), dtype=np.uint8)
    backend(path).evaluate([keys], trees, kind, everything)
    assert np.array_equal(ours, everything[trees.first_leaf[which] + points])


@each_native
@given(
    sizes=st.lists(st.integers(1, 300) | st.integers(2040, 2060), min_size=1, max_size=12),
    clients=st.integers(0, 3),
    lines=st.integers(1, 9),
    spacing=st.sampled_from([1, 64]),
    width=st.integers(16, 40),
    seed=st.integers(0, 2**32),
)
def test_answers_agree(
    path: str, sizes: list[int], clients: int, lines: int, spacing: int, width: int, seed: int
) -> None:
    counts = np.sort(np.array(sizes, dtype=np.int64))
    trees = Trees.of(-(-counts * spacing // 128))
    keys = [
        TreeKeys(
            noise(seed + c, 1, 16).tobytes(),
            noise(seed + c + 1, trees.count, 16),
            noise(seed + c + 2, trees.total_steps, 32),
            noise(seed + c + 3, trees.count, 16),
        )
        for c in range(clients)
    ]
    table = noise(seed, int(counts.sum()), 32 * lines)
    factors = None if spacing == 1 else noise(seed + 9, int(counts.sum()), width)
    ours = backend(path).answer(keys, trees, counts, table, factors, spacing=spacing)
    theirs = REFERENCE.answer(keys, trees, counts, table, factors, spacing=spacing)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if clients:  # the definition, for the last tree
        bits = np.zeros((trees.total_leaves, 16), dtype=np.uint8)
        REFERENCE.evaluate(keys[-1:], trees, Kind.XOR, bits)
        flags = np.unpackbits(bits[trees.first_leaf[-2] :], bitorder="little")[::spacing]
        chosen = table[-counts[-1] :][flags[: counts[-1]] == 1]
        assert np.array_equal(ours[0][-1, -1], np.bitwise_xor.reduce(chosen, axis=0, initial=0))


@each_native
@given(
    kind=st.sampled_from(WORDS),
    words=st.integers(1, 6),
    rows=st.integers(0, 80),
    each=st.integers(1, 5),
    unused=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
def test_sums_of_rows_agree(
    path: str, kind: Kind, words: int, rows: int, each: int, unused: int, seed: int
) -> None:
    width = words * (8 if kind is Kind.MOD61 else int(kind))
    size = rows * each + unused
    leaves = noise(seed, size, width, kind=kind)
    slots = np.random.default_rng(seed).permutation(size)[: rows * each].reshape(rows, each)
    places = Places.of(slots, size)
    ours = backend(path).to_rows(leaves, places, kind)
    assert np.array_equal(ours, REFERENCE.to_rows(leaves, places, kind))
    if kind is Kind.ADD32:  # the definition
        assert np.array_equal(ours.view("<u4"), leaves.view("<u4")[slots].sum(1, dtype="<u4"))


@needs_native
def test_two_threads_share_one_sum() -> None:
    trees = trees_of([9] * 3000)
    keys = [tree_keys(c, trees, 2, Kind.ADD32) for c in range(3)]
    chosen = kernel.active()
    together, alone = (np.zeros((trees.total_leaves, 32), dtype=np.uint8) for _ in range(2))
    halves = range(1400), range(1400, 3000)

    def work(part: range) -> None:
        chosen.evaluate(keys, trees, Kind.ADD32, together, part=part)

    threads = [threading.Thread(target=work, args=(part,)) for part in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chosen.evaluate(keys, trees, Kind.ADD32, alone)
    assert np.array_equal(together, alone)


# Each wrong call differs from a good one in one place.

TREES = trees_of([1, 3, 9])
KEYS = tree_keys(1, TREES, 2, Kind.ADD32)
BITS = tree_keys(1, TREES, 1, Kind.XOR)


def good_evaluate() -> dict[str, Any]:
    return {
        "keys": [KEYS],
        "trees": TREES,
        "kind": Kind.ADD32,
        "leaves": np.zeros((13, 32), dtype=np.uint8),
    }


def other(**changes: Any) -> list[TreeKeys]:
    fields = {name: getattr(KEYS, name) for name in ("key", "roots", "steps", "finals")}
    return [TreeKeys(**fields | changes)]


WRONG_EVALUATE: dict[str, dict[str, Any]] = {
    "a short cipher key": {"keys": other(key=bytes(15))},
    "a root too few": {"keys": other(roots=KEYS.roots[:-1])},
    "a root too many": {"keys": other(roots=noise(1, 4, 16))},
    "short roots": {"keys": other(roots=noise(1, 3, 15))},
    "a step too few": {"keys": other(steps=KEYS.steps[:-1])},
    "short steps": {"keys": other(steps=noise(1, TREES.total_steps, 16))},
    "strided steps": {"keys": other(steps=noise(1, TREES.total_steps, 64)[:, ::2])},
    "finals of another width": {"keys": other(finals=noise(1, 3, 16))},
    "finals of half a block": {"keys": other(finals=noise(1, 3, 40))},
    "a final too few": {"keys": other(finals=KEYS.finals[:-1])},
    "signed finals": {"keys": other(finals=KEYS.finals.view(np.int8))},
    "a leaf too few": {"leaves": np.zeros((12, 32), dtype=np.uint8)},
    "a leaf too many": {"leaves": np.zeros((14, 32), dtype=np.uint8)},
    "narrow leaves": {"leaves": np.zeros((13, 16), dtype=np.uint8)},
    "strided leaves": {"leaves": np.zeros((13, 64), dtype=np.uint8)[:, ::2]},
    "no kind": {"kind": 4},
    "a negative epoch": {"epoch": -1},
    "a large epoch": {"epoch": 2**32},
    "a part beyond": {"part": range(2, 4)},
    "a part before": {"part": range(-1, 2)},
    "a part with gaps": {"part": range(0, 3, 2)},
}


@each_backend
@pytest.mark.parametrize("wrong", WRONG_EVALUATE.values(), ids=WRONG_EVALUATE.keys())
def test_a_wrong_argument_of_evaluate_is_refused(name: str, wrong: dict[str, Any]) -> None:
    backend(name).evaluate(**good_evaluate())
    with pytest.raises(MisuseError):
        backend(name).evaluate(**good_evaluate() | wrong)


def good_generate() -> dict[str, Any]:
    return {
        "key": bytes(16),
        "trees": TREES,
        "roots": roots_of(1, 3),
        "points": np.array([0, 2, 8]),
        "values": noise(1, 3, 32),
        "kind": Kind.ADD32,
    }


WRONG_GROW: dict[str, dict[str, Any]] = {
    "a point beyond": {"points": np.array([0, 3, 8])},
    "a point before": {"points": np.array([-1, 2, 8])},
    "a point too few": {"points": np.array([0, 2])},
    "points of another type": {"points": np.array([0, 2, 8], dtype=np.int32)},
    "equal control bits": {"roots": (roots_of(1, 3)[0], roots_of(1, 3)[0])},
    "a root too few": {"roots": (roots_of(1, 3)[0], roots_of(1, 2)[1])},
    "values of no block": {"values": noise(1, 3, 0)},
    "values of half a block": {"values": noise(1, 3, 24)},
    "a long key": {"key": bytes(17)},
}


@each_backend
@pytest.mark.parametrize("wrong", WRONG_GROW.values(), ids=WRONG_GROW.keys())
def test_a_wrong_argument_of_grow_is_refused(name: str, wrong: dict[str, Any]) -> None:
    backend(name).generate(**good_generate())
    with pytest.raises(MisuseError):
        backend(name).generate(**good_generate() | wrong)


FLAT = np.zeros(1, dtype=np.int64)


@each_backend
@pytest.mark.parametrize(
    "call",
    [
        lambda k: k.evaluate_points(KEYS, TREES, Kind.ADD32, FLAT + 3, FLAT),
        lambda k: k.evaluate_points(KEYS, TREES, Kind.ADD32, FLAT - 1, FLAT),
        lambda k: k.evaluate_points(KEYS, TREES, Kind.ADD32, FLAT, FLAT + 1),
        lambda k: k.evaluate_points(KEYS, TREES, Kind.ADD32, FLAT, FLAT - 1),
        lambda k: k.evaluate_points(KEYS, TREES, Kind.ADD32, FLAT, FLAT[:0]),
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
        lambda k: k.answer([KEYS], TREES, TREES.leaves, noise(1, 13, 32)),
        lambda k: k.answer([BITS], TREES, TREES.leaves, noise(1, 13, 40)),
        lambda k: k.answer([BITS], TREES, TREES.leaves, noise(1, 12, 32)),
        lambda k: k.answer([BITS], TREES, TREES.leaves * 129, noise(1, 1677, 32)),
        lambda k: k.answer([BITS], TREES, TREES.leaves[1:], noise(1, 13, 32)),
        lambda k: k.answer([BITS], TREES, FLAT.repeat(3) + 2**62, noise(1, 0, 32), spacing=64),
        lambda k: k.answer([BITS], TREES, TREES.leaves, noise(1, 13, 32), spacing=2),
        lambda k: k.answer([BITS], TREES, TREES.leaves * 3, noise(1, 39, 32), spacing=64),
        lambda k: k.answer([BITS], TREES, TREES.leaves, noise(1, 13, 32), noise(1, 13, 16)),
        lambda k: k.answer(
            [BITS], TREES, TREES.leaves, noise(1, 13, 32), noise(1, 13, 15), spacing=64
        ),
        lambda k: k.answer(
            [BITS], TREES, TREES.leaves, noise(1, 13, 32), noise(1, 12, 16), spacing=64
        ),
        lambda k: Trees.of(np.array([0])),
        lambda k: Trees.of(np.array([5, 1])),
        lambda k: Trees.of(np.array([2**31])),
    ],
)
def test_other_wrong_arguments_are_refused(name: str, call: Any) -> None:
    with pytest.raises(MisuseError):
        call(backend(name))


class WrongLeaf(native.Native):
    """A path with a defect in one kind of leaf."""

    def _evaluate(self, keys: Any, trees: Any, kind: Kind, *rest: Any) -> None:
        super()._evaluate(keys, trees, kind, *rest)
        if kind is Kind.MOD61:
            rest[1][-1, 0] ^= 1


@needs_native
def test_a_path_whose_trees_are_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    best, *lower = NATIVE
    real = native.Native
    monkeypatch.setattr(
        native, "Native", lambda lib, name: (WrongLeaf if name == best else real)(lib, name)
    )
    found = native.probe(REFERENCE)
    assert [path.name for path in found.paths] == lower
    assert found.reason == f"self-check failed: {best}"


# The C code under the sanitizers: a program of its own, because Python is not built with them.
# Every block of memory has exactly the size that backends promise, so that one byte more is seen.

DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int tessera_paths(void);
int tessera_dpf_grow(int, const uint8_t *, size_t, const int64_t *, const int64_t *,
                     const uint8_t *, const uint8_t *, const int64_t *,
                     const uint8_t *, int, size_t, uint32_t, uint8_t *, uint8_t *);
int tessera_dpf_evaluate(int, size_t, const uint8_t *, const uint8_t *const *,
                         const uint8_t *const *, const uint8_t *const *, size_t, size_t,
                         const int64_t *, const int64_t *, const int64_t *, const int64_t *, int,
                         size_t, uint32_t, uint8_t *);
int tessera_dpf_points(int, const uint8_t *, const uint8_t *, const uint8_t *, const uint8_t *,
                       const int64_t *, const int64_t *, size_t, const int64_t *, const int64_t *,
                       int, size_t, uint32_t, uint8_t *);
int tessera_dpf_answer(int, size_t, const uint8_t *, const uint8_t *const *,
                       const uint8_t *const *, const uint8_t *const *, size_t, const int64_t *,
                       const int64_t *, const int64_t *, const int64_t *, int, const int64_t *,
                       const uint8_t *, size_t, const uint8_t *, size_t, uint8_t *, uint8_t *);
int tessera_dpf_to_rows(const uint8_t *, size_t, size_t, const uint32_t *, int, uint8_t *);
int tessera_peel(size_t, const int64_t *, size_t, int64_t *);

/* -Wl,--wrap: memory that is not there */
static int fails_at;
void *__real_aligned_alloc(size_t, size_t);
void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return fails_at && !--fails_at ? NULL : __real_aligned_alloc(alignment, size);
}

static uint8_t *filled(size_t size, int step) {
    uint8_t *memory = malloc(size ? size : 1);
    for (size_t i = 0; i < size; i++)
        memory[i] = (uint8_t)((i * (size_t)step + i / 256 + 1) & 0x1f);
    return memory;
}

int main(void) {
    int path, kind;
    size_t leaves, n, blocks, clients;
    while (scanf("%d %d %zu %zu %zu %zu", &path, &kind, &leaves, &n, &blocks, &clients) == 6) {
        if (!(tessera_paths() >> path & 1)) return 3;
        int64_t *count = malloc(8 * n), *depths = malloc(8 * n), *points = malloc(8 * n),
                *which = malloc(8 * n), *first_leaf = malloc(8 * (n + 1)),
                *first_step = malloc(8 * (n + 1)), *slots = malloc(24 * n), *placed = malloc(8 * n);
        first_leaf[0] = first_step[0] = 0;
        for (size_t i = 0; i < n; i++) { /* the last tree is the largest */
            size_t own = leaves * (i + 1) / n ? leaves * (i + 1) / n : 1;
            int64_t depth = 0;
            while ((size_t)1 << depth < own) depth++;
            count[i] = (int64_t)own, depths[i] = depth, which[i] = (int64_t)i, placed[i] = -1;
            points[i] = (int64_t)(i * 7 % own);
            first_leaf[i + 1] = first_leaf[i] + count[i];
            first_step[i + 1] = first_step[i] + depth;
        }
        size_t all = (size_t)first_leaf[n], all_steps = 32 * (size_t)first_step[n];
        uint8_t *key = filled(16, 3), *values = filled(16 * blocks * n, 5);
        uint8_t *roots[2] = {filled(16 * n, 7), filled(16 * n, 11)};
        for (size_t i = 0; i < n; i++) roots[1][16 * i + 15] |= 0x80;
        uint8_t *steps = malloc(all_steps + !all_steps), *finals = malloc(16 * blocks * n);
        size_t size = 16 * blocks * all;
        uint8_t *sum = calloc(1, size), *single = calloc(1, 16 * blocks * n);
        if (tessera_dpf_grow(path, key, n, depths, first_step, roots[0], roots[1], points,
                             values, kind, blocks, 0, steps, finals)) return 4;
        uint8_t *keys = malloc(16 * clients);
        const uint8_t **r = malloc(8 * clients), **s = malloc(8 * clients),
                      **f = malloc(8 * clients);
        for (size_t c = 0; c < clients; c++)
            memcpy(keys + 16 * c, key, 16), r[c] = roots[c % 2], s[c] = steps, f[c] = finals;
        for (size_t half = 0; half < 2; half++) /* in two parts, as two threads would */
            if (tessera_dpf_evaluate(path, clients, keys, r, s, f, half * (n / 2),
                                     half ? n : n / 2, count, first_leaf, depths, first_step, kind,
                                     blocks, 0, sum)) return 5;
        for (int at = 1; at <= 2; at++) {
            fails_at = at;
            if (tessera_dpf_evaluate(path, clients, keys, r, s, f, 0, n, count, first_leaf, depths,
                                     first_step, kind, blocks, 0, sum) != 1) return 10;
        }
        if (tessera_dpf_points(path, key, roots[1], steps, finals, depths, first_step, n, which,
                               points, kind, blocks, 0, single)) return 6;
        fwrite(steps, 1, all_steps, stdout);
        fwrite(finals, 1, 16 * blocks * n, stdout);
        fwrite(sum, 1, size, stdout);
        fwrite(single, 1, 16 * blocks * n, stdout);
        if (kind) {
            uint8_t *rows = calloc(1, 16 * blocks * (n + 1));
            uint32_t *owners = malloc(4 * all);
            for (size_t i = 0; i < all; i++) owners[i] = (uint32_t)(i < all / n * n ? i % n : n);
            if (tessera_dpf_to_rows(sum, 16 * blocks, all, owners, kind, rows)) return 7;
            fwrite(rows, 1, 16 * blocks * n, stdout);
            free(rows), free(owners);
        } else {
            for (size_t width = 32; width <= 160; width += 64) {
                uint8_t *table = filled(width * all, 13);
                uint8_t *out = calloc(clients, width * n), *products = calloc(clients, 32 * n);
                for (int spacing = 1; spacing <= 64; spacing += 63) {
                    if (tessera_dpf_answer(path, clients, keys, r, s, f, n, count, first_leaf,
                                           depths, first_step, spacing, first_leaf, table, width,
                                           table, width, out, products)) return 8;
                    fwrite(out, clients, width * n, stdout);
                }
                fwrite(products, clients, 32 * n, stdout);
                free(table), free(out), free(products);
            }
        }
        for (size_t i = 0; i < n; i++)
            slots[3 * i] = (int64_t)i, slots[3 * i + 1] = (int64_t)i + 1,
                      slots[3 * i + 2] = (int64_t)(2 * i) + 2;
        if (tessera_peel(n, slots, 2 * n + 1, placed)) return 9;
        fwrite(placed, 8, n, stdout);
        free(count), free(depths), free(points), free(which), free(first_leaf), free(first_step);
        free(slots), free(placed), free(key), free(values), free(roots[0]), free(roots[1]);
        free(steps), free(finals), free(sum), free(single), free(keys), free(r), free(s), free(f);
    }
    return 0;
}
"""


def pattern(size: int, step: int) -> np.ndarray[Any, Any]:
    """The driver's `filled`."""
    at = np.arange(size)
    return ((at * step + at // 256 + 1) & 0x1F).astype(np.uint8)


def expected(kind: Kind, leaves: int, n: int, blocks: int, clients: int) -> bytes:
    trees = Trees.of(np.maximum(leaves * np.arange(1, n + 1) // n, 1))
    roots = pattern(16 * n, 7).reshape(n, 16), pattern(16 * n, 11).reshape(n, 16)
    roots[1][:, -1] |= 0x80
    key, values = pattern(16, 3).tobytes(), pattern(16 * blocks * n, 5).reshape(n, -1)
    points = np.arange(n) * 7 % trees.leaves
    steps, finals = REFERENCE.generate(key, trees, roots, points, values, kind)
    keys = [TreeKeys(key, roots[c % 2], steps, finals) for c in range(clients)]
    total = np.zeros((trees.total_leaves, 16 * blocks), dtype=np.uint8)
    REFERENCE.evaluate(keys, trees, kind, total)
    second = TreeKeys(key, roots[1], steps, finals)
    single = REFERENCE.evaluate_points(second, trees, kind, np.arange(n), points)
    if kind is Kind.XOR:
        parts = []
        for width in (32, 96, 160):
            table = pattern(width * trees.total_leaves, 13).reshape(-1, width)
            parts.append(REFERENCE.answer(keys, trees, trees.leaves, table)[0])
            parts += REFERENCE.answer(keys, trees, trees.leaves, table, table, spacing=64)
        last = np.concatenate([part.reshape(-1) for part in parts])
    else:
        slots = np.arange(trees.total_leaves // n * n).reshape(-1, n).T.copy()
        last = REFERENCE.to_rows(total, Places.of(slots, trees.total_leaves), kind)
    each = np.arange(n)
    placed = REFERENCE.peel(np.stack([each, each + 1, 2 * each + 2], axis=1), 2 * n + 1)
    return b"".join(a.tobytes() for a in (steps, finals, total, single, last, placed))


@pytest.mark.slow
def test_the_c_code_of_trees_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    """Ragged trees, parts of them, all kinds of words, and memory that cannot be had."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    (tmp_path / "driver.c").write_text(DRIVER)
    program = tmp_path / "driver"
    # no -g: with it the unrolled code takes ten times as long to compile
    flags = ["-std=gnu11", "-O1", "-g0", "-Wall", "-Wextra", "-Werror", "-DTESSERA_WITHOUT_PYTHON"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sanitize += ["-Wl,--wrap=aligned_alloc"]
    sources = [str(tmp_path / "driver.c"), *SOURCES]
    built = subprocess.run(
        [compiler, *flags, *sanitize, *sources, "-o", str(program)], capture_output=True, text=True
    )
    if built.returncode and "asan" in built.stderr:
        pytest.skip("no address sanitizer on this machine")
    assert built.returncode == 0, built.stderr

    cases = []
    shapes = [(1, 1), (2, 3), (3, 40), (5, 17), (24, 60), (700, 9), (1024, 1), (1025, 1), (3000, 3)]
    for path in (native._NUMBER[name] for name in NATIVE):
        for kind in Kind:
            for blocks in (1,) if kind is Kind.XOR else (1, 2, 3, 5, 16, 19):
                for leaves, n in shapes:
                    cases.append((path, kind, leaves, n, blocks, 1 + n % 3))
    text = "\n".join(" ".join(str(int(part)) for part in case) for case in cases)
    done = subprocess.run([program], input=text.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    at = 0
    for case in cases:
        answer = expected(*case[1:])
        assert done.stdout[at : at + len(answer)] == answer, case
        at += len(answer)
    assert at == len(done.stdout)


@pytest.mark.slow
def test_the_c_code_of_trees_compiles_where_there_are_no_aes_instructions(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    flags = ["-Wall", "-Wextra", "-Werror", "-DTESSERA_PORTABLE", "-DTESSERA_WITHOUT_PYTHON"]
    library = str(tmp_path / "other.so")
    subprocess.run([compiler, *flags, "-shared", "-fPIC", *SOURCES, "-o", library], check=True)
