"""Two-party distributed point functions: two keys whose values add up to a point function.

Half trees (Guo et al. 2023, ia.cr/2022/1431, Figure 8) with early termination, one tree for every
bin of a `Forest`. Each server gets the same public part, and a private part of 24 bytes from which
it expands the roots of all its trees (the "master seed" of Cui et al. 2022, section 4). One
server's view says nothing about points and values beyond the forest's shape
(docs/protocols/point-functions.md has the bound).

We depart from the papers in four places. AES is keyed per report, from the report's random id. Both
roots of a tree are random, so that every tree has an offset of its own. A leaf is converted to its
value by a further call of the generator, since two of its bits are control bits, each for a half of
the block. And values are rows of words, so the last correction is as long as a row.

Not constant time where the client's own points are handled; evaluation touches the same memory
whatever the keys hold.

Forest: the public shape of one client's point functions, a tree for every bin that has rows.

A leaf of a tree holds as many rows as fit one AES block (early termination: Boyle, Gilboa, Ishai,
ia.cr/2018/707, 3.2.1), or one row of several blocks. Depth follows the bin's size, which is public,
and a tree has only the leaves that its bin needs. Trees are kept in the order of their numbers of
leaves, so that the kernel can fill its registers with nodes of several trees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.entropy import Entropy
from tessera.crypto.field import Field
from tessera.crypto.group import Group, Words
from tessera.crypto.kernel.points import KEY_BYTES, SEED_BYTES
from tessera.crypto.kernel.trees import (
    BLOCK,
    MAX_BLOCKS,
    Bytes,
    Kind,
    LeafShape,
    RowSpace,
    TreeKeys,
    Trees,
)
from tessera.crypto.prg import Label, Stream
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, Malformed, MisuseError, TrailingBytes, Truncated

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


__all__ = [
    "REPORT_ID_BYTES",
    "SEED_BYTES",
    "KeyPair",
    "PublicKeys",
    "RetrievalPoints",
    "ServerKeys",
    "evaluate",
    "evaluate_points",
    "gen",
    "retrieval_points",
]

REPORT_ID_BYTES: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class PublicKeys:
    """The part of a client's keys that both servers hold, in the bytes they are sent in.

    Digest of the forest, steps of 16 bytes, last corrections packed to the bit. Servers evaluate
    these bytes; nothing is expanded.
    """

    forest: Forest
    data: bytes | memoryview = field(repr=False)

    def to_bytes(self) -> bytes:
        return bytes(self.data)

    @classmethod
    def from_bytes(cls, forest: Forest, data: bytes | memoryview) -> PublicKeys:
        """Invert `to_bytes`; a WireError for anything that is not keys of this very forest."""
        due = forest.public_bytes
        if len(data) < HEADER_BYTES or bytes(data[:HEADER_BYTES]) != forest.digest:
            raise Malformed("point functions of another domain, depth, count or value type")
        if len(data) != due:
            short = len(data) < due
            raise (Truncated if short else TrailingBytes)(
                f"point functions take {due} bytes, not {len(data)}"
            )
        keys = cls(forest, data)
        keys._check_words()
        return keys

    @property
    def body(self) -> Bytes:
        """Steps and last corrections."""
        return np.frombuffer(self.data, dtype=np.uint8)[HEADER_BYTES:]

    @property
    def steps(self) -> Bytes:
        """(total_steps, 16)."""
        return self.body[: BLOCK * self.forest.trees.total_steps].reshape(-1, BLOCK)

    @property
    def finals(self) -> Bytes:
        """(trees, blocks * 16): the last corrections, words unpacked."""
        values, trees = self.forest.values, self.forest.trees
        raw = self.body[BLOCK * trees.total_steps :]
        if values.group is None:
            return raw.reshape(trees.count, BLOCK)
        finals = np.zeros((trees.count, values.blocks * BLOCK), dtype=np.uint8)
        words = finals.view(values.group.dtype).reshape(
            -1, values.per_leaf, values.stride, *values.group.limbs
        )[:, :, : values.words]
        flat = values.group.unpack(raw.tobytes(), trees.count * values.per_leaf * values.words)
        words[...] = flat.reshape(words.shape)
        return finals

    def _check_words(self) -> None:
        """Malformed for words outside the group, or for bits that are left over in the last byte.

        Every pattern of bits is a word of some ring, so that there only the last byte is looked at.
        """
        group, used = self.forest.values.group, self._final_bits
        if used % 8 and self.data[-1] >> used % 8:
            raise Malformed("point functions: padding bits are set")
        if group is None or isinstance(group, Ring):
            return
        try:
            finals = self.data[len(self.data) - self.forest.finals_bytes :]
            group.unpack(finals, used // group.bits)
        except ValueError as error:
            raise Malformed(f"point functions: {error}") from error

    @property
    def _final_bits(self) -> int:
        shape = self.forest.values.shape
        return self.forest.trees.count * shape.final_words * shape.bits


@dataclass(frozen=True, slots=True, eq=False)
class KeyPair:
    """A client's keys for both servers."""

    public: PublicKeys
    seeds: tuple[Secret, Secret]  # the whole private part of server 0, of server 1


@dataclass(frozen=True, slots=True, eq=False)
class ServerKeys:
    """One client's keys at one server, expanded for evaluation."""

    forest: Forest
    party: int
    trees: TreeKeys = field(repr=False)

    @classmethod
    def of(cls, public: PublicKeys, seed: Secret, *, party: int, report_id: bytes) -> ServerKeys:
        forest = public.forest
        cipher = _cipher_key(report_id, forest.values)
        # the seed is fresh and used for nothing else, so no derivation is due
        roots = kernel.active().roots(seed.reveal(), party, forest.trees.count)
        return cls(forest, party, TreeKeys(cipher, roots, public.body))


def gen(
    forest: Forest,
    points: npt.NDArray[np.int64],
    values: Words | None,
    *,
    report_id: bytes,
    entropy: Entropy,
    epoch: int = 0,
) -> KeyPair:
    """Split, for every bin b, "position p of b == points[b] ? values[b] : 0" into two keys.

    A point of -1 is a dummy of value zero. Retrieval has no such dummies: `retrieval_points` gives
    every bin with rows a point. `values` is (bins, words, *limbs), reduced; None for bits, whose
    value is one; the words of `retrieval_points` for selectors. A report id is 32 random bytes and
    is used for one report. The same keys in another epoch differ in their last corrections alone,
    if entropy, id and points are the same; one epoch is for one set of values.
    """
    both = entropy.secret(
        Label.POINT_SEEDS, report_id, forest.values.name, size=2 * SEED_BYTES
    ).reveal()
    seeds = both[:SEED_BYTES], both[SEED_BYTES:]
    where = _checked_points(forest, points)
    rows = _checked_values(forest, where, values)
    data = np.empty(forest.public_bytes, dtype=np.uint8)
    data[:HEADER_BYTES] = np.frombuffer(forest.digest, dtype=np.uint8)
    kernel.active().generate(
        _cipher_key(report_id, forest.values),
        forest.trees,
        forest.values.shape,
        seeds,
        forest.order,
        where,
        rows,
        data[HEADER_BYTES:],
        epoch=epoch,
    )
    return KeyPair(PublicKeys(forest, data.tobytes()), (Secret(seeds[0]), Secret(seeds[1])))


@dataclass(frozen=True, slots=True, eq=False)
class RetrievalPoints:
    """The points of a retrieval's functions and their values. Private to the client."""

    points: npt.NDArray[np.int64] = field(repr=False)  # (bins,), -1 for a bin without rows
    values: Words | None = field(repr=False)  # (bins, 1) odd words; None for bits


def retrieval_points(
    forest: Forest, points: npt.NDArray[np.int64], secret: Secret
) -> RetrievalPoints:
    """A random position for every dummy, and random odd words if the values are selectors.

    All of it is derived from the secret, so that a client can recompute it when answers come.
    """
    if forest.values.group is not None:
        raise MisuseError("retrieval_points: these values are for writing")
    where = _checked_points(forest, points)
    where = np.where(where < 0, _random_positions(secret, forest), where)
    where[forest.sizes == 0] = -1
    if forest.values.bits == 1:
        return RetrievalPoints(where, None)
    stream = Stream.of(secret, Label.SELECTORS)
    words = np.empty(8 * forest.bins, dtype=np.uint8)
    kernel.active().keystream(stream.key, stream.nonce, 0, words)
    return RetrievalPoints(where, words.view("<u8").reshape(-1, 1) | np.uint64(1))


def evaluate(
    forest: Forest,
    keys: Sequence[ServerKeys],
    leaves: Bytes | None = None,
    *,
    part: range | None = None,
    epoch: int = 0,
) -> Bytes:
    """The sum of these clients' leaf values, added to `leaves` where given, in leaf space.

    All keys are of one server. Its sign, which is minus for party 1, is applied when leaf space is
    turned into rows. `part` (of `Forest.parts`) limits the work to some trees: two threads may
    share one array.
    """
    total = forest.empty() if leaves is None else leaves
    add_to(forest, keys, total, part=part, epoch=epoch)
    return total


def add_to(
    forest: Forest,
    keys: Sequence[ServerKeys],
    total: Bytes | RowSpace,
    *,
    part: range | None = None,
    epoch: int = 0,
) -> None:
    """Add these clients' leaf values to leaf space, or to the rows of `Layout.row_space`.

    The latter has the server's sign. Two threads cannot share it.
    """
    if any(one.forest is not forest for one in keys):
        raise MisuseError("evaluate: keys of another forest")
    if len({one.party for one in keys}) > 1:
        raise MisuseError("evaluate: keys of both servers")
    kernel.active().evaluate(
        [one.trees for one in keys],
        forest.trees,
        forest.values.shape,
        total,
        part=part,
        epoch=epoch,
    )


def evaluate_points(
    keys: ServerKeys, bins: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> Words:
    """One server's share at single positions, its sign applied: (count, words, *limbs).

    Bits come as 0 and 1 of shape (count, 1), selectors as 64-bit words.
    """
    forest = keys.forest
    bins, positions = np.asarray(bins, np.int64), np.asarray(positions, np.int64)
    if bins.shape != positions.shape or bins.ndim != 1:
        raise MisuseError("evaluate_points: one position for each bin")
    if np.any(bins < 0) or np.any(bins >= forest.bins):
        raise MisuseError("evaluate_points: no such bin")
    if np.any(positions < 0) or np.any(positions >= forest.sizes[bins]):
        raise MisuseError("evaluate_points: a position outside its bin")
    leaf, inside = _split(positions, forest.values.per_leaf)
    raw = kernel.active().evaluate_points(
        keys.trees,
        forest.trees,
        forest.values.shape,
        forest.tree[bins],
        leaf,
    )
    each = np.arange(bins.size)
    group = forest.values.group
    if group is None and forest.values.bits == 1:
        bits: Words = raw[each, inside // 8] >> (inside % 8).astype(np.uint8) & np.uint8(1)
        return bits[:, np.newaxis]
    if group is None:
        return raw.view("<u8")[each, inside][:, np.newaxis]
    rows = raw.view(group.dtype).reshape(
        bins.size, forest.values.per_leaf, forest.values.stride, *group.limbs
    )
    picked = rows[each, inside, : forest.values.words].copy()
    if isinstance(group, Ring):
        group.reduce(picked)
    return group.neg(picked) if keys.party else picked


def _cipher_key(report_id: bytes, values: Values) -> bytes:
    """The report's AES key. The id is public, so this hides nothing: it sets reports apart."""
    if len(report_id) != REPORT_ID_BYTES:
        raise MisuseError(f"a report id is {REPORT_ID_BYTES} bytes, not {len(report_id)}")
    return Secret(report_id).derive(Label.POINT_CIPHER, values.name, size=KEY_BYTES).reveal()


def _random_positions(secret: Secret, forest: Forest) -> npt.NDArray[np.int64]:
    """A position in every bin, uniform up to 2^-32 times the bin's size."""
    stream = Stream.of(secret, Label.POINT_DUMMIES)
    words = np.empty(4 * forest.bins, dtype=np.uint8)
    kernel.active().keystream(stream.key, stream.nonce, 0, words)
    drawn = words.view("<u4").astype(np.uint64) * forest.sizes.astype(np.uint64)
    return (drawn >> np.uint64(32)).astype(np.int64)


def _split(
    positions: npt.NDArray[np.int64], per_leaf: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions to leaf and place in it; a leaf holds a power of two, and numpy divides slowly."""
    return positions >> per_leaf.bit_length() - 1, positions & per_leaf - 1


def _checked_points(forest: Forest, points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    where = np.asarray(points)
    if where.shape != (forest.bins,) or where.dtype.kind != "i":
        raise MisuseError(f"gen: one point for each of {forest.bins} bins")
    if where.size and (where.min() < -1 or (where >= forest.sizes).any()):
        raise MisuseError("gen: a point outside its bin")
    return np.ascontiguousarray(where, dtype=np.int64)


def _checked_values(
    forest: Forest, points: npt.NDArray[np.int64], values: Words | None
) -> Bytes | None:
    """One row of bytes for each bin; that of a dummy is not read."""
    group = forest.values.group
    if group is None:
        if bool((points < 0).any()) and bool((forest.sizes[points < 0] > 0).any()):
            raise MisuseError("gen: a bin with rows has no point; use `retrieval_points`")
        if forest.values.bits == 1:
            if values is not None:
                raise MisuseError("gen: bits have no values")
            return None
        if values is None or values.shape != (forest.bins, 1) or values.dtype != np.dtype("<u8"):
            raise MisuseError(f"gen: one word of 64 bits for each of {forest.bins} bins")
        if not bool((values & np.uint64(1)).all()):
            raise MisuseError("gen: a selector is an odd word")
    elif values is None or values.shape != (forest.bins, forest.values.words, *group.limbs):
        raise MisuseError(f"gen: one row of {forest.values.name} for each of {forest.bins} bins")
    elif not group.contains(values):
        raise MisuseError(f"gen: values are not reduced in {group.name}")
    assert values is not None
    rows = np.ascontiguousarray(values).view(np.uint8)
    return rows.reshape(forest.bins, forest.values.shape.value_bytes)
