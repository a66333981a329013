"""Cuckoo hashing of a client's rows into bins, and the public simple table of all rows.

Every row has three distinct bins, by a public seed. All parties know the simple table, which holds
each row in all its three bins; a client places each of its rows into one of them, alone, so that
one point function per bin is enough (Cui et al. 2022, section 4; Angel et al. 2018). How many bins
that takes is computed from a bound on the probability that some row finds no place
(docs/decisions/0010-point-functions.md), for the largest set that the plan allows, so that the
number says nothing about a client's own set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf, log
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.dpf import Forest, ServerKeys, Values
from tessera.crypto.group import Words
from tessera.crypto.hashing import MAX_CELLS, HashKey, Ids, positions
from tessera.crypto.kernel.points import ROW_ALIGNMENT
from tessera.crypto.kernel.trees import Bytes, Places, RowSpace
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError

HASHES: Final = 3
FAILURE_BITS: Final = 40
STASH_ROWS: Final = 1 << 14
"""A stash key covers the whole table, so it is for tables up to this many rows."""

Counts = npt.NDArray[np.int64]


def log2_failure(ids: int, bins: int, stash: int = 0) -> float:
    """A bound on log2 of the probability that some of `ids` rows finds no place.

    By Hall's theorem more than `stash` rows are left over exactly if some j rows have only
    n = j - 1 - stash bins between them. In a smallest such set every bin is a choice of two of its
    rows or more: a row with a bin of its own could be left out. The bound adds up, over j, the
    choices of rows and bins times the probability that the 3j choices fall into those bins and hit
    each at least twice; for the latter the saddle point bound on the coefficient of z^(3j) in
    (e^z - 1 - z)^n, or all triples in n bins where that is less. It may exceed 0.
    """
    if ids < 0 or bins < HASHES or stash < 0:
        raise MisuseError(f"{ids} rows in {bins} bins with a stash of {stash}")
    if ids < 4 + stash:
        return -inf  # four rows in three bins are the smallest failure
    j = np.arange(4 + stash, ids + 1)
    n = j - 1 - stash
    kept = n <= bins
    j, n, twice = j[kept], n[kept], _log_twice(ids, stash)[kept]
    factorial = _log_factorials(max(3 * ids, bins))
    triples = factorial[n] - factorial[n - 3] - log(6)
    all_triples = log(bins) + log(bins - 1) + log(bins - 2)
    inside = np.minimum(j * (triples + log(6)), twice) - j * all_triples
    terms = factorial[ids] - factorial[j] - factorial[ids - j]
    terms = terms + factorial[bins] - factorial[n] - factorial[bins - n] + inside
    largest = float(terms.max())
    return (largest + log(float(np.exp(terms - largest).sum()))) / log(2)


@lru_cache(maxsize=256)
def bins_for(max_rows: int, *, stash: int = 0, failure_bits: int = FAILURE_BITS) -> int:
    """The fewest bins in which `max_rows` rows find places but with probability 2^-failure_bits."""
    if max_rows < 1 or stash < 0:
        raise ConfigError(f"cuckoo hashing of {max_rows} rows with a stash of {stash}")
    low, high = HASHES, HASHES
    while log2_failure(max_rows, high, stash) > -failure_bits:
        low, high = high + 1, 2 * high
        if high > MAX_CELLS:
            raise ConfigError(f"no number of bins holds {max_rows} rows")
    while low < high:
        middle = (low + high) // 2
        if log2_failure(max_rows, middle, stash) <= -failure_bits:
            high = middle
        else:
            low = middle + 1
    return low


def choices(ids: Ids, seed: int, bins: int) -> Counts:
    """(len(ids), 3): three distinct bins for every id, all such triples alike."""
    if bins < HASHES:
        raise ConfigError(f"cuckoo hashing needs {HASHES} bins, not {bins}")
    first, second, third = (
        positions(ids, HashKey.of(seed, index), bins - index).astype(np.int64)
        for index in range(HASHES)
    )
    second += second >= first  # step over the bins that are taken
    third += third >= np.minimum(first, second)
    third += third >= np.maximum(first, second)
    return np.stack([first, second, third], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a client's rows are. Private to the client, unlike everything else here."""

    bins: Counts = field(repr=False)  # (k,): the bin of each row, -1 if it is left out
    points: Counts = field(repr=False)  # (bins + stash,): the position in each bin, -1 for a dummy
    holder: Counts = field(repr=False)  # (bins + stash,): which of the k rows, -1 for a dummy

    @property
    def left_out(self) -> Counts:
        """Which of the k rows found no place. The client drops them and says nothing."""
        return np.nonzero(self.bins < 0)[0]


@dataclass(frozen=True, eq=False)
class SimpleTable:
    """All rows in all their bins, then `stash` bins that hold every row. Public; `of` makes it."""

    ids: Ids = field(repr=False)  # (m,), sorted: the row ids of the domain
    bins: int
    seed: int
    stash: int
    chosen: Counts = field(repr=False)  # (m, 3): the bins of each row

    @classmethod
    def of(cls, domain: int | Ids, bins: int, seed: int, *, stash: int = 0) -> SimpleTable:
        """The table of rows 0 .. domain - 1, or of these sorted ids (a union)."""
        ids = np.arange(domain, dtype=np.uint64) if isinstance(domain, int) else domain
        if ids.dtype != np.uint64 or ids.ndim != 1 or np.any(ids[1:] <= ids[:-1]):
            raise MisuseError("a domain is a number of rows, or sorted distinct uint64 ids")
        if ids.size < HASHES:
            raise ConfigError(
                f"a table of {ids.size} rows is too small for {HASHES} bins a row",
                hint="share so small a table as a whole: write = dense",
            )
        if stash < 0 or (stash and ids.size > STASH_ROWS):
            raise ConfigError(
                f"a stash of {stash} for {ids.size} rows: each key would cover the whole table",
                hint=f"no stash above {STASH_ROWS} rows; more bins do the same",
            )
        return cls(ids, bins, seed, stash, choices(ids, seed, bins))

    @property
    def rows(self) -> int:
        return int(self.ids.size)

    @cached_property
    def sizes(self) -> Counts:
        """(bins + stash,): rows in each bin."""
        counted = np.bincount(self.chosen.reshape(-1), minlength=self.bins)
        return np.concatenate([counted, np.full(self.stash, self.rows)]).astype(np.int64)

    @cached_property
    def members(self) -> Counts:
        """(3 m,): the rows of bin 0, of bin 1, ..., each bin's in rising order."""
        return self._by_bin // HASHES

    @cached_property
    def positions(self) -> Counts:
        """(m, 3): where in its bins each row is."""
        starts = np.cumsum(self.sizes[: self.bins]) - self.sizes[: self.bins]
        flat = self.chosen.reshape(-1)
        order = self._by_bin
        place = np.empty(flat.size, dtype=np.int64)
        place[order] = np.arange(flat.size) - starts[flat[order]]
        return place.reshape(self.chosen.shape)

    def place(self, rows: npt.NDArray[Any]) -> Placement:
        """Each of these distinct rows into a bin of its own, as many as possible.

        What fits neither a bin nor the stash is left out: no error, since a failure that others
        could notice would tell them about the rows.
        """
        rows = np.asarray(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise MisuseError("rows to place are a flat array of indices")
        rows = rows.astype(np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.rows):
            raise MisuseError("a row to place is not in the table")
        there = np.zeros(self.rows, dtype=bool)
        there[rows] = True
        if np.count_nonzero(there) != rows.size:
            raise MisuseError("a row to place occurs twice")
        chosen = self.chosen[rows]
        placed = _match(chosen, self.bins)
        left = np.nonzero(placed < 0)[0][: self.stash]
        placed[left] = self.bins + np.arange(left.size)
        holder = np.full(self.bins + self.stash, -1, dtype=np.int64)
        points = np.full(self.bins + self.stash, -1, dtype=np.int64)
        found = np.nonzero(placed >= 0)[0]
        holder[placed[found]] = found
        in_bin = found[placed[found] < self.bins]
        column = np.argmax(chosen[in_bin] == placed[in_bin, np.newaxis], axis=1)
        points[placed[in_bin]] = self.positions[rows[in_bin], column]
        points[placed[left]] = rows[left]
        return Placement(placed, points, holder)

    @cached_property
    def _by_bin(self) -> Counts:
        """The flat entries of `chosen`, bin by bin, in rising order within a bin."""
        flat = self.chosen.reshape(-1)
        low = np.argsort((flat & 0xFFFF).astype(np.uint16), kind="stable")  # numpy's radix sort
        if self.bins <= 1 << 16:
            return low.astype(np.int64, copy=False)
        high = (flat >> 16).astype(np.uint16)[low]
        return low[np.argsort(high, kind="stable")].astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class Layout:
    """A simple table and the trees over its bins: what all parties agree on. `of` makes it."""

    table: SimpleTable
    forest: Forest

    @classmethod
    def of(cls, table: SimpleTable, values: Values) -> Layout:
        return cls(table, Forest.of(table.sizes, values))

    def spread(self, placement: Placement, values: Words) -> Words:
        """Values (k, words, *limbs) of a client's rows to those of its bins, for `dpf.gen`."""
        group = self.forest.values.group
        if group is None:
            raise MisuseError("bits have no values to spread")
        k = placement.bins.size
        if values.shape != (k, self.forest.values.words, *group.limbs):
            raise MisuseError(f"{k} rows of {self.forest.values.name} are due")
        out = group.zeros((self.forest.bins, self.forest.values.words))
        there = np.nonzero(placement.bins >= 0)[0]
        out[placement.bins[there]] = values[there]
        return out

    def rows(self, leaves: Bytes, party: int) -> Words:
        """One server's share of every row, (m, words, *limbs), from the sum in leaf space.

        A row is the sum over its three bins and the stash. Minus for party 1.
        """
        group, width = self.forest.values.group, self.forest.values.words
        if group is None or party not in (0, 1):
            raise MisuseError("rows: words of party 0 or 1 are due")
        stride = self.forest.values.stride * group.word_bytes
        sums = kernel.active().to_rows(
            leaves.reshape(-1, stride),
            self._places,
            self.forest.values.kind,
            width * group.word_bytes,
            minus=bool(party),
        )
        return self._words(sums)

    def row_space(self, party: int) -> RowSpace:
        """Zeros for every row, to which `dpf.add_to` adds clients; minus for party 1."""
        if self.forest.values.group is None or party not in (0, 1):
            raise MisuseError("row_space: words of party 0 or 1 are due")
        size = self.table.rows + 1, self.forest.values.shape.value_bytes
        return RowSpace(self._places, np.zeros(size, dtype=np.uint8), bool(party))

    def row_words(self, space: RowSpace) -> Words:
        """One server's share of every row, (m, words, *limbs): what was added to this space."""
        if space.places is not self._places:
            raise MisuseError("row_words: rows of another table")
        return self._words(space.sums[:-1])

    def _words(self, rows: Bytes) -> Words:
        """Rows of bytes as words, reduced."""
        values = self.forest.values
        group = values.group
        assert group is not None
        total: Words = rows.view(group.dtype).reshape(self.table.rows, values.words, *group.limbs)
        if isinstance(group, Ring):
            group.reduce(total)
        return total

    def padded(self, rows: Bytes) -> Bytes:
        """The table's rows, (m, row_bytes), as `answer` reads them."""
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[0] != self.table.rows:
            raise MisuseError(f"{self.table.rows} rows of bytes are due")
        width = -(-rows.shape[1] // ROW_ALIGNMENT) * ROW_ALIGNMENT
        padded = np.zeros((self.table.rows, max(width, ROW_ALIGNMENT)), dtype=np.uint8)
        padded[:, : rows.shape[1]] = rows
        return padded

    def answer(
        self,
        keys: Sequence[ServerKeys],
        padded: Bytes,
        row_bytes: int,
        tags: Bytes | None = None,
    ) -> tuple[Bytes, Bytes]:
        """One server's answers: (clients, bins + stash, row_bytes), the XOR of rows in every bin.

        And, if `tags` are given (16 bytes for each row), the XOR of their products with the
        selectors, (clients, bins + stash, 32).
        """
        forest = self.forest
        if forest.values.group is not None or not 0 <= row_bytes <= padded.shape[1]:
            raise MisuseError("answer: bits, and a table padded for them, are due")
        if padded.shape[0] != self.table.rows:
            raise MisuseError(f"answer: {self.table.rows} rows are due")
        if any(one.forest is not forest for one in keys):
            raise MisuseError("answer: keys of another forest")
        rows, products = kernel.active().answer(
            [one.trees for one in keys],
            forest.trees,
            forest.values.shape,
            forest.sizes[forest.order],
            self._members,
            padded,
            tags,
        )
        return self._by_bin(rows[:, :, :row_bytes]), self._by_bin(products)

    def rows_at(self, points: Counts) -> Counts:
        """The row at this position of every bin and of the stash; -1 where the position is."""
        table = self.table
        starts = np.cumsum(table.sizes[: table.bins]) - table.sizes[: table.bins]
        inside = points[: table.bins]
        at = np.where(inside < 0, 0, starts + inside)
        rows = np.where(inside < 0, -1, table.members[at])
        return np.concatenate([rows, points[table.bins :]])

    def _by_bin(self, by_tree: Bytes) -> Bytes:
        """(clients, trees, bytes) to (clients, bins, bytes); zeros for bins without rows."""
        clients, _, width = by_tree.shape
        out = np.zeros((clients, self.forest.bins, width), dtype=np.uint8)
        out[:, self.forest.order] = by_tree
        return out

    @cached_property
    def _places(self) -> Places:
        """Where in leaf space the shares of each row are: its three bins and the stash."""
        table, forest = self.table, self.forest
        inside = forest.slots(table.chosen, table.positions)
        every = np.arange(table.rows)
        stash = [
            forest.slots(np.full(table.rows, table.bins + number), every)
            for number in range(table.stash)
        ]
        slots = np.ascontiguousarray(np.column_stack([inside, *stash]))
        return Places.of(slots, forest.trees.total_leaves * forest.values.per_leaf)

    @cached_property
    def _members(self) -> npt.NDArray[np.uint32]:
        """The row at every position of every tree, in the order of the trees."""
        table, forest = self.table, self.forest
        everything = np.tile(np.arange(table.rows), table.stash)
        members = np.concatenate([table.members, everything])
        starts = np.cumsum(forest.sizes) - forest.sizes
        sizes = forest.sizes[forest.order]
        ends = np.cumsum(sizes)
        within = np.arange(int(ends[-1])) - np.repeat(ends - sizes, sizes)
        return members[np.repeat(starts[forest.order], sizes) + within].astype(np.uint32)


def _match(chosen: Counts, bins: int) -> Counts:
    """A largest matching of rows to bins, each row with three choices: the bin of each, or -1.

    First *peeling*: a bin that only one row has among its choices takes that row, which may leave
    other bins with one row, and so on. With the bins that `bins_for` asks for this nearly always
    places all. The rest is matched by augmenting paths.
    """
    placed = kernel.active().peel(chosen, bins)
    rest = np.nonzero(placed < 0)[0]
    if rest.size:
        placed[rest] = _augment(chosen[rest].tolist())
    return placed


def _augment(chosen: list[list[int]]) -> list[int]:
    """A largest matching by shortest augmenting paths, rows in order (Berge 1957).

    The bins of these rows are free: what was peeled uses none of them.
    """
    owner: dict[int, int] = {}  # bin -> its row
    held: dict[int, int] = {}  # row -> its bin
    for start in range(len(chosen)):
        came: dict[int, int] = {}  # bin -> the row from which it was reached
        queue, free = deque([start]), -1
        while queue and free < 0:
            row = queue.popleft()
            for choice in chosen[row]:
                if choice not in came:
                    came[choice] = row
                    if choice not in owner:
                        free = choice
                        break
                    queue.append(owner[choice])
        while free >= 0:  # every row on the path moves on to the bin that it reached
            row = came[free]
            owner[free] = row
            held[row], free = free, held.get(row, -1)
    return [held.get(row, -1) for row in range(len(chosen))]


@lru_cache(maxsize=8)
def _log_twice(ids: int, stash: int) -> npt.NDArray[np.float64]:
    """For every j: the logarithm of a bound on sequences of 3j bins among n, each at least twice.

    (3j)! (e^z - 1 - z)^n / z^(3j) is one for every z > 0, and least where
    z (e^z - 1) / (e^z - 1 - z) = 3j / n.
    """
    j = np.arange(4 + stash, ids + 1).astype(np.float64)
    n = j - 1 - stash
    ratio = 3 * j / n
    low, high = np.full(j.size, 1e-6), ratio.copy()
    for _ in range(40):
        z = (low + high) / 2
        grown = np.expm1(z)
        rising = z * grown / (grown - z) < ratio
        low, high = np.where(rising, z, low), np.where(rising, high, z)
    z = (low + high) / 2
    sequences = _log_factorials(3 * ids)[3 * j.astype(np.int64)]
    logarithms: npt.NDArray[np.float64] = (
        sequences + n * np.log(np.expm1(z) - z) - 3 * j * np.log(z)
    )
    return logarithms


@lru_cache(maxsize=2)
def _log_factorials(most: int) -> npt.NDArray[np.float64]:
    """log(0!), log(1!), ..., log(most!)."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
