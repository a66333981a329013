"""Two-party distributed point functions: two keys whose values add up to a point function.

The tree construction of Boyle, Gilboa and Ishai (ia.cr/2018/707, Figure 1) with early termination,
one tree for every bin of a `Forest`. Each server gets the same public part, and a private part of
24 bytes from which it expands the roots of all its trees (the "master seed" of Cui et al. 2022,
section 4). One server's view says nothing about points and values beyond the forest's shape
(docs/protocols/point-functions.md has the bound).

We depart from the papers in three places. AES is keyed per report, from the report's random id. A
leaf is converted to its value by a further call of the generator, since one of its bits is the
control bit. And values are rows of words, so the last correction is as long as a row.

Not constant time where the client's own points are handled; evaluation touches the same memory
whatever the keys hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.entropy import Entropy
from tessera.crypto.forest import HEADER_BYTES, Forest, Values
from tessera.crypto.group import Words
from tessera.crypto.kernel.backend import NONCE_BYTES
from tessera.crypto.kernel.points import BLOCK, KEY_BYTES, STEP, Bytes, TreeKeys
from tessera.crypto.prg import Label, Stream
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import Malformed, MisuseError, TrailingBytes, Truncated

REPORT_ID_BYTES: Final = 32
SEED_BYTES: Final = KEY_BYTES + NONCE_BYTES
"""One server's private part: the name of the key stream that its roots are."""


@dataclass(frozen=True, slots=True, eq=False)
class PublicKeys:
    """The part of a client's keys that both servers hold."""

    forest: Forest
    steps: Bytes = field(repr=False)  # (total_steps, 32)
    finals: Bytes = field(repr=False)  # (trees, blocks * 16)

    def to_bytes(self) -> bytes:
        """Digest of the forest, corrections of 129 bits, last corrections packed to the bit.

        The two corrections of a step differ in their control bits only: one block is sent, and the
        right side's bit apart.
        """
        right = np.packbits(self.steps[:, -1] >> 7, bitorder="little")
        return b"".join(
            (
                self.forest.digest,
                self.steps[:, :BLOCK].tobytes(),
                right.tobytes(),
                self._packed_finals(),
            )
        )

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
        count = forest.trees.total_steps
        raw = np.frombuffer(data, dtype=np.uint8)
        bits_at = HEADER_BYTES + BLOCK * count
        finals_at = bits_at + -(-count // 8)
        right = np.unpackbits(raw[bits_at:finals_at], bitorder="little")
        if right[count:].any():
            raise Malformed("point functions: padding bits are set")
        steps = np.empty((count, STEP), dtype=np.uint8)
        steps[:, :BLOCK] = steps[:, BLOCK:] = raw[HEADER_BYTES:bits_at].reshape(count, BLOCK)
        steps[:, -1] = steps[:, -1] & 0x7F | right[:count] << 7
        return cls(forest, steps, _unpacked_finals(forest, raw[finals_at:]))

    def _packed_finals(self) -> bytes:
        group = self.forest.values.group
        if group is None:
            return self.finals.tobytes()
        return group.pack(np.ascontiguousarray(_leaf_words(self.forest.values, self.finals)))


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
        roots = _roots(seed, forest, party)
        return cls(forest, party, TreeKeys(cipher, roots, public.steps, public.finals))


def gen(
    forest: Forest,
    points: npt.NDArray[np.int64],
    values: Words | None,
    *,
    report_id: bytes,
    entropy: Entropy,
) -> KeyPair:
    """Split, for every bin b, "position p of b == points[b] ? values[b] : 0" into two keys.

    A point of -1 is a dummy of value zero. Retrieval has no such dummies: `retrieval_points` gives
    every bin with rows a point. `values` is (bins, words, *limbs), reduced; None for bits, whose
    value is one; the words of `retrieval_points` for selectors. A report id is 32 random bytes and
    is used for one report.
    """
    both = entropy.secret(
        Label.POINT_SEEDS, report_id, forest.values.name, size=2 * SEED_BYTES
    ).reveal()
    seeds = Secret(both[:SEED_BYTES]), Secret(both[SEED_BYTES:])
    where = _checked_points(forest, points)
    values = _checked_values(forest, where, values)
    where = np.maximum(where, 0)[forest.order]
    leaf, inside = _split(where, forest.values.per_leaf)
    steps, finals = kernel.active().generate(
        _cipher_key(report_id, forest.values),
        forest.trees,
        (_roots(seeds[0], forest, 0), _roots(seeds[1], forest, 1)),
        leaf,
        _leaf_values(forest, inside, values),
        forest.values.kind,
    )
    return KeyPair(PublicKeys(forest, steps, _trimmed(forest.values, finals)), seeds)


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
) -> Bytes:
    """The sum of these clients' leaf values, added to `leaves` where given, in leaf space.

    All keys are of one server. Its sign, which is minus for party 1, is applied when leaf space is
    turned into rows. `part` (of `Forest.parts`) limits the work to some trees: two threads may
    share one array.
    """
    total = forest.empty() if leaves is None else leaves
    if any(one.forest is not forest for one in keys):
        raise MisuseError("evaluate: keys of another forest")
    if len({one.party for one in keys}) > 1:
        raise MisuseError("evaluate: keys of both servers")
    kernel.active().evaluate(
        [one.trees for one in keys], forest.trees, forest.values.kind, total, part=part
    )
    return total


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
        forest.values.kind,
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


def _roots(seed: Secret, forest: Forest, party: int) -> Bytes:
    """Root nodes of one server's trees; the control bit is the party."""
    if party not in (0, 1):
        raise MisuseError(f"party {party}: there are two, 0 and 1")
    if len(seed) != SEED_BYTES:
        raise MisuseError(f"a server's seed is {SEED_BYTES} bytes, not {len(seed)}")
    name = seed.reveal()  # fresh and used for nothing else, so no derivation is due
    roots = np.empty((forest.trees.count, BLOCK), dtype=np.uint8)
    kernel.active().keystream(name[:KEY_BYTES], name[KEY_BYTES:], 0, roots.reshape(-1))
    last = roots[:, -1]
    last &= 0x7F
    last |= party << 7
    return roots


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
    return where.astype(np.int64, copy=False)


def _checked_values(
    forest: Forest, points: npt.NDArray[np.int64], values: Words | None
) -> Words | None:
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
        return values
    if values is None or values.shape != (forest.bins, forest.values.words, *group.limbs):
        raise MisuseError(f"gen: one row of {forest.values.name} for each of {forest.bins} bins")
    if not group.contains(values):
        raise MisuseError(f"gen: values are not reduced in {group.name}")
    zeroed = values.copy()
    zeroed[points < 0] = 0
    return zeroed


def _leaf_values(forest: Forest, inside: npt.NDArray[np.int64], values: Words | None) -> Bytes:
    """The value of each tree's leaf at its point: the row at its place, zero around it."""
    trees, shape = forest.trees.count, forest.values
    if shape.per_leaf == 1 and values is not None and _fills_leaf(shape):
        whole = shape.blocks * BLOCK // values.itemsize
        return values[forest.order].reshape(trees, whole).view(np.uint8)
    each = np.arange(trees)
    out = np.zeros((trees, shape.blocks * BLOCK), dtype=np.uint8)
    if shape.group is None:
        if values is None:
            out[each, inside // 8] = np.uint8(1) << (inside % 8).astype(np.uint8)
        else:
            out.view("<u8")[each, inside] = values[forest.order, 0]
        return out
    assert values is not None
    rows = out.view(shape.group.dtype)
    rows = rows.reshape(trees, shape.per_leaf, shape.stride, *shape.group.limbs)
    rows[each, inside, : shape.words] = values[forest.order]
    return out


def _leaf_words(values: Values, finals: Bytes) -> Words:
    """The words of leaves without their padding: a view of shape (n, per_leaf, words, *limbs)."""
    group = values.group
    assert group is not None
    rows = finals.view(group.dtype)
    rows = rows.reshape(-1, values.per_leaf, values.stride, *group.limbs)
    return rows[:, :, : values.words]


def _fills_leaf(values: Values) -> bool:
    """Whether every bit of a leaf is a bit of some value."""
    full = isinstance(values.group, Ring) and values.group.is_full
    return full and values.stride == values.words


def _trimmed(values: Values, finals: Bytes) -> Bytes:
    """What is sent of the last corrections: the ring's bits of each word, and no padding."""
    if values.group is None or _fills_leaf(values):
        return finals
    kept = np.zeros_like(finals)
    _leaf_words(values, kept)[...] = _leaf_words(values, finals)
    if isinstance(values.group, Ring):  # the kernel works modulo a power of 2^32
        values.group.reduce(_leaf_words(values, kept))
    return kept


def _unpacked_finals(forest: Forest, raw: Bytes) -> Bytes:
    values, trees = forest.values, forest.trees.count
    if values.group is None:
        return raw.reshape(trees, BLOCK).copy()
    finals = np.zeros((trees, values.blocks * BLOCK), dtype=np.uint8)
    try:
        flat = values.group.unpack(raw.data, trees * values.per_leaf * values.words)
    except ValueError as error:
        raise Malformed(f"point functions: {error}") from error
    into = _leaf_words(values, finals)
    into[...] = flat.reshape(into.shape)
    return finals
