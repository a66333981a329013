"""The mask kernel: AES key streams and sums of them, in C where the machine has AES instructions.

`active()` is the backend in use. The environment variable TESSERA_KERNEL chooses it: `auto` (the
default) takes the fastest native path that exists and passes its self-check, `reference` the NumPy
twin, and `aesni`, `vaes256` or `vaes512` insist on one path. All give the same bits.

Native: the kernel in C, called through ctypes, which lets other threads run.

`probe` asks the library which paths this CPU and operating system can run, and compares each with
the reference on a short known answer before it is offered. A path that differs is left out and the
reason kept for `tessera doctor`: masks that are wrong on one side only would not cancel, without
any sign of why.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.backend import BLOCK, WORD_BYTES, Array, Backend, Bytes
from tessera.crypto.kernel.digests import DIGEST_ARGUMENTS, NativeDigests
from tessera.crypto.kernel.noise import NOISE_ARGUMENTS, AliasEntries, NativeNoise
from tessera.crypto.kernel.points import ARGUMENTS, NativePoints, address_of
from tessera.crypto.kernel.reference import Reference
from tessera.crypto.kernel.sets import SET_ARGUMENTS, Members, NativeSets
from tessera.crypto.kernel.trees import Kind, LeafShape, Places, TreeKeys, Trees
from tessera.errors import ConfigError

MODULE: Final = "tessera.crypto.kernel._native"
PATHS: Final = ("vaes512", "vaes256", "aesni")  # best first
_NUMBER: Final = {"aesni": 0, "vaes256": 1, "vaes512": 2}  # `enum path` in kernel.c

_PLUS: Final = b"\x01"  # the sign of a stream that is added

_Types = tuple[type[Any], ...]
_PATH: Final = ctypes.c_int
_BITS: Final = ctypes.c_int
_WORD: Final = ctypes.c_int
_SIZE: Final = ctypes.c_size_t
_BLOCKS: Final = ctypes.c_uint64
_BYTES: Final = ctypes.c_char_p
_POINTER: Final = ctypes.c_void_p
_STREAMS: Final[_Types] = (_BYTES, _BYTES, _POINTER, _SIZE)  # keys, nonces, signs, how many

_ARGUMENTS: Final[dict[str, _Types]] = {
    # out and its size; the streams; first block, bytes of it to skip
    "tessera_accumulate": (_PATH, _POINTER, _SIZE, _WORD, *_STREAMS, _BLOCKS, _SIZE),
    # acc, bytes of a row; the streams; bounds, index, positions
    "tessera_accumulate_rows": (
        *(_PATH, _POINTER, _SIZE, _WORD),
        *_STREAMS,
        *(_POINTER, _POINTER, _POINTER),
    ),
    # words, count; out
    "tessera_pack": (_POINTER, _SIZE, _BITS, _POINTER, _WORD),
    # data, its size, count; words; whether they are added to
    "tessera_unpack": (_POINTER, _SIZE, _SIZE, _BITS, _POINTER, _WORD, ctypes.c_int),
    "tessera_aes_limit": (_PATH, _BLOCKS),
}


class Native(NativePoints, NativeSets, NativeDigests, NativeNoise, Backend):
    """One path of the C kernel."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._library = library
        self._path = _NUMBER[name]

    def aes_limit(self, blocks: int) -> None:
        self._library.tessera_aes_limit(self._path, blocks)

    def _keystream(self, key: bytes, nonce: bytes, first_block: int, out: Bytes) -> None:
        self._library.tessera_accumulate(
            self._path,
            address_of(out),
            out.size,
            0,
            key,
            nonce,
            _PLUS,
            1,
            first_block,
            0,
        )

    def _accumulate(
        self,
        acc: Array,
        word_bytes: int,
        keys: bytes,
        nonces: bytes,
        signs: npt.NDArray[np.int8],
        start_word: int,
    ) -> None:
        first_block, skip = divmod(start_word * word_bytes, BLOCK)
        self._library.tessera_accumulate(
            self._path,
            address_of(acc),
            acc.nbytes,
            word_bytes,
            keys,
            nonces,
            address_of(signs),
            signs.size,
            first_block,
            skip,
        )

    def _accumulate_rows(
        self,
        acc: Array,
        row_bytes: int,
        word_bytes: int,
        keys: bytes,
        nonces: bytes,
        signs: npt.NDArray[np.int8],
        bounds: npt.NDArray[np.int64],
        index: npt.NDArray[np.int64],
        positions: npt.NDArray[np.uint64],
    ) -> None:
        self._library.tessera_accumulate_rows(
            self._path,
            address_of(acc),
            row_bytes,
            word_bytes,
            keys,
            nonces,
            address_of(signs),
            signs.size,
            address_of(bounds),
            address_of(index),
            address_of(positions),
        )

    def _pack(self, words: Array, word_bytes: int, bits: int, out: Bytes) -> None:
        count = words.nbytes // word_bytes
        self._library.tessera_pack(address_of(words), count, bits, address_of(out), word_bytes)

    def _unpack(self, data: Bytes, word_bytes: int, bits: int, words: Array) -> None:
        self._unpacked(data, word_bytes, bits, words, 0)

    def _add_packed(self, data: Bytes, word_bytes: int, bits: int, words: Array) -> None:
        self._unpacked(data, word_bytes, bits, words, 1)

    def _unpacked(self, data: Bytes, word_bytes: int, bits: int, words: Array, add: int) -> None:
        count = words.nbytes // word_bytes
        self._library.tessera_unpack(
            address_of(data), data.size, count, bits, address_of(words), word_bytes, add
        )


@dataclass(frozen=True, slots=True)
class Probe:
    """The paths that run here, best first, and what stands in the way of more."""

    paths: tuple[Native, ...]
    reason: str | None


def probe(reference: Backend) -> Probe:
    """Load the library and check each path of this machine against the reference."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        return Probe((), "the C kernel was not built (no compiler at installation?)")
    try:
        library = ctypes.CDLL(spec.origin)
        library.tessera_paths.restype = ctypes.c_int
        library.tessera_paths.argtypes = []
        bitmask = int(library.tessera_paths())
    except (OSError, AttributeError) as error:
        return Probe((), f"the C kernel does not load: {error}")
    if bitmask == 0:
        return Probe((), f"no AES path for this {platform.machine()} processor")
    try:
        for name, types in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = types
            function.restype = None  # aes_limit's checksum is for the C compiler's eyes
        for name, types in (ARGUMENTS | SET_ARGUMENTS | DIGEST_ARGUMENTS | NOISE_ARGUMENTS).items():
            function = getattr(library, name)
            function.argtypes = types
            function.restype = ctypes.c_int
    except AttributeError as error:
        return Probe((), f"the C kernel is of another version: {error}")

    supported = [Native(library, name) for name in PATHS if bitmask >> _NUMBER[name] & 1]
    agreeing = tuple(path for path in supported if agrees(path, reference))
    wrong = ", ".join(path.name for path in supported if path not in agreeing)
    return Probe(agreeing, f"self-check failed: {wrong}" if wrong else None)


def agrees(path: Backend, reference: Backend) -> bool:
    """Whether both give the same bits: every word size and sign, odd ends, single rows."""
    keys, nonces, signs = bytes(range(48)), bytes(range(100, 124)), (1, -1, 1)
    positions = np.array([0, 7, 2**40, 3], dtype=np.uint64)
    index = np.array([2, 0, 1, 2], dtype=np.int64)
    for word_bytes in WORD_BYTES:
        dtype = np.dtype(f"<u{min(word_bytes, 8)}")
        results: list[bytes] = []
        for backend in (path, reference):
            # 1,040 bytes from an odd word on: both ends fall within a group of any path
            dense = np.arange(1040 // dtype.itemsize).astype(dtype)
            backend.accumulate(dense, word_bytes, keys, nonces, signs, 5)
            rows = np.arange(3 * 144 // dtype.itemsize).astype(dtype)
            width = 144 // word_bytes
            counts = (2, 1, 1)
            backend.accumulate_rows(
                rows, width, word_bytes, keys, nonces, signs, counts, index, positions
            )
            stream = np.empty(77, dtype=np.uint8)
            backend.keystream(keys[:16], nonces[:8], 3, stream)
            bits = 8 * word_bytes - 3
            packed = backend.pack(_low_bits(dense, word_bytes, bits), word_bytes, bits)
            words = backend.unpack(packed, 1040 // word_bytes, word_bytes, bits)
            backend.add_packed(words, packed, word_bytes, bits)
            arrays = (dense, rows, stream, packed, words)
            results.append(b"".join(array.tobytes() for array in arrays))
        if results[0] != results[1]:
            return False
    for part in (_sets, _digests, _noise):
        if part(path) != part(reference):
            return False
    return all(_points(path, kind) == _points(reference, kind) for kind in Kind)


def _sets(backend: Backend) -> bytes:
    """Codes of sets with and without low bits, bitmaps and nothing; rows that some share."""
    sets = [[], [0], [2**64 - 1], [3, 2**63, 2**64 - 2], list(range(9)), list(range(0, 900, 7))]
    indices = np.array([index for each in sets for index in each], dtype=np.uint64)
    bounds = np.cumsum([0, *(len(each) for each in sets)])
    codes, ends = backend.encode_sets(indices, bounds, least_bits=3)
    members = Members(np.array([0, 2, 2, 5]), np.array([0, 2, 0, 1, 2], dtype=np.uint32), 3)
    own = np.array([0, 2])
    counts = backend.shared_counts(members, own)
    shared, parts = backend.shared_rows(members, own, counts, np.array([True, False, True]))
    return b"".join(array.tobytes() for array in (codes, ends, counts, shared, parts))


def _digests(backend: Backend) -> bytes:
    """Of rows that end before a block, with it and after it."""
    numbers = np.arange(5, dtype=np.uint64) << np.uint64(60)
    rows = [np.arange(5 * size).astype(np.uint8).reshape(5, size) for size in (0, 55, 56, 57, 120)]
    return b"".join(backend.row_digests(bytes(range(8)), numbers, some).tobytes() for some in rows)


def _noise(backend: Backend) -> bytes:
    """Sums over columns at both ends and between, by coefficients that differ and that do not."""
    words = np.arange(240, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words[:2] = 0, 2**64 - 1
    thresholds = np.arange(4096, dtype=np.uint64) << np.uint64(40)
    others = np.arange(4096)[::-1].copy()
    table = AliasEntries.of(thresholds, thresholds << np.uint64(12), others, 2047)
    same, each = np.array([[1, -139]], np.int32), np.arange(80, dtype=np.int32).reshape(20, 4)
    words[2] = (np.uint64(5) << np.uint64(52)) + thresholds[5]  # exactly at its limit
    parts = [
        backend.alias_sums(words, by, 3, table, lambda: words >> np.uint64(1))
        for by in (same, each)
    ]
    return b"".join(part.tobytes() for part in parts)


def _points(backend: Backend, kind: Kind) -> bytes:
    """What trees give: small ones side by side, one that is cut, rows of two widths, selectors."""
    trees = Trees.of(np.array([1, 1, 2, 3, 3, 3, 4, 5, 8, 21, 1025]))
    results: list[Bytes] = []
    each, bits = np.arange(trees.count), {Kind.XOR: 128, Kind.MOD61: 61}.get(kind, 8 * kind)
    cipher, seeds = bytes(range(BLOCK)), (bytes(range(24)), bytes(range(50, 74)))
    shapes = [LeafShape(Kind.XOR, rows) for rows in (2, 128)]
    if kind is not Kind.XOR:
        shapes = [LeafShape(kind, words=1, bits=bits), LeafShape(kind, words=9, bits=bits - 3)]
    for shape in shapes:
        values = None
        if shape.value_bytes:  # below 2^61 - 1, so that they are elements of the field too
            raw = np.arange(trees.count * shape.value_bytes).astype(np.uint8) % 31
            values = raw.reshape(trees.count, -1)
        public = np.empty(trees.key_bytes(shape), dtype=np.uint8)
        points = trees.leaves * shape.rows // 2
        backend.generate(cipher, trees, shape, seeds, each, points, values, public)
        keys = [
            TreeKeys(cipher, backend.roots(seed, party, trees.count), public)
            for party, seed in enumerate(seeds)
        ]
        leaves = np.zeros((trees.total_leaves, shape.blocks * BLOCK), dtype=np.uint8)
        backend.evaluate(keys, trees, shape, leaves)
        single = backend.evaluate_points(keys[1], trees, shape, each, trees.leaves // 2)
        results += [public, leaves, single]
        if kind is not Kind.XOR:
            places = Places.of(np.arange(60).reshape(20, 3) * 7, trees.total_leaves)
            results.append(backend.to_rows(leaves, places, kind))
            results.append(backend.to_rows(leaves, places, kind, BLOCK, minus=True))
            continue
        sizes = trees.leaves * shape.rows
        table = np.arange(101 * 32).astype(np.uint8).reshape(-1, 32)
        members = np.arange(int(sizes.sum()), dtype=np.uint32) * 7 % 101
        factors = table if shape.rows == 2 else None
        for clients in (1, 4):  # few, for which rows are masked, and more
            results += backend.answer(keys * clients, trees, shape, sizes, members, table, factors)
        results.append(
            backend.products(
                np.arange(101, dtype=np.uint64) << np.uint64(57), table[:, :BLOCK].copy()
            )
        )
    return b"".join(array.tobytes() for array in results)


def _low_bits(words: Array, word_bytes: int, bits: int) -> Array:
    """A copy with the bits from `bits` on cleared, at the top of each word."""
    kept = words.copy()
    top = kept[1::2] if word_bytes == 16 else kept
    top &= kept.dtype.type((1 << (bits - 64 * (word_bytes == 16))) - 1)
    return kept


__all__ = [
    "REFERENCE",
    "VARIABLE",
    "Backend",
    "Description",
    "active",
    "available",
    "describe",
    "use",
]

VARIABLE: Final = "TESSERA_KERNEL"

_REFERENCE: Final = Reference()
REFERENCE: Final = _REFERENCE.name
_chosen: list[Backend] = []  # `use` pushes, for tests and benchmarks; the last one counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What runs here and why, for `tessera doctor`."""

    name: str
    available: tuple[str, ...]  # best first; the last is always "reference"
    reason: str | None  # why no native path, or why not the best this CPU has


def active() -> Backend:
    """The backend in use."""
    return _chosen[-1] if _chosen else _from_environment(os.environ.get(VARIABLE, "auto"))


def available() -> tuple[str, ...]:
    """The names that `use` accepts on this machine, fastest first."""
    return (*(path.name for path in _probe().paths), _REFERENCE.name)


def describe() -> Description:
    """The backend in use, what else there is, and the reason when something is missing."""
    return Description(name=active().name, available=available(), reason=_probe().reason)


@contextmanager
def use(name: str) -> Iterator[Backend]:
    """Run a block with this backend, in the whole process: for tests and benchmarks."""
    _chosen.append(_named(name))
    try:
        yield _chosen[-1]
    finally:
        _chosen.pop()


@cache
def _probe() -> Probe:
    return probe(_REFERENCE)


@cache
def _from_environment(name: str) -> Backend:
    return _named(name)


def _named(name: str) -> Backend:
    if name == _REFERENCE.name:
        return _REFERENCE
    found = {path.name: path for path in _probe().paths}
    if name == "auto":
        return next(iter(found.values()), _REFERENCE)
    if name in found:
        return found[name]
    names = ("auto", _REFERENCE.name, *PATHS)
    if name in names:
        raise ConfigError(
            f"kernel {name!r} does not run here: {_probe().reason}",
            hint=f"unset {VARIABLE}, or take one of {', '.join(available())}",
        )
    raise ConfigError(f"kernel {name!r} is not one of {', '.join(names)}")
