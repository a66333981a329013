"""BloomFilter: the randomised Bloom filter of Niu et al. 2020, with partitions.

Niu et al. 2020, Algorithm 3 (names: S real set, b filter of beta words with h hashes, a partition
indicator, Z_R). A client marks the positions of its ids and replaces every mark by a uniform
element of Z_R, zero included. The sum is uniform at every position that anybody marked and zero
elsewhere, so it shows the union's filter and hides how many marked a position. A marked position
sums to zero with probability 1/R, hence false negatives; leaving zero out of the draw would
distinguish one marking client from two.

The server must not try every id of the domain. The papers add a second vector that marks which
partitions of the domain are touched, and scan only those. Here the vectors are levels, coarse to
fine, of which the last is the ids themselves: the papers' filter alone is one level, with
partitions it is two, and a domain of billions takes five, each cutting the one above into 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Words
from tessera.crypto.hashing import HashKey, Ids, positions
from tessera.crypto.prg import Stream, uniform
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError
from tessera.protocols.union.encoding import (
    UnionResult,
    check_domain,
    check_ids,
    check_total,
    packed_bytes,
)

SCAN_LIMIT: Final = 1 << 26
"""Candidates that the server may have to test at one level: about a second."""

FALSE_POSITIVE_RATE: Final = 1e-4  # Niu et al. 2020, long version, VI
FALSE_NEGATIVE_RATE: Final = 2.0**-16  # per id: half a row lost in a round of 30,000
_STEP_BITS: Final = 4  # each default level cuts a partition of the one above into 16
_STEP_RATE: Final = 1 / 64  # and lets a quarter as many strangers through as there are members
_BLOCK: Final = 1 << 18  # candidates tested at once: 2 MB


@dataclass(frozen=True, slots=True)
class Intervals:
    """Partitions 0 .. count - 1 of the ids 0 .. domain - 1: ranges of equal width.

    Width 1 is the ids themselves.
    """

    domain: int
    width: int

    def __post_init__(self) -> None:
        check_domain(self.domain)
        if not 1 <= self.width <= self.domain:
            raise ConfigError(f"bloom: intervals of {self.width} ids in a domain of {self.domain}")

    @property
    def count(self) -> int:
        return -(-self.domain // self.width)

    def of(self, ids: Ids) -> Ids:
        """The partition of each id."""
        keys: Ids = np.zeros_like(ids)
        if self.width < 2**64:  # else it is one interval, and no 64-bit word holds its width
            keys = ids // np.uint64(self.width)
        return keys

    def first(self, partitions: Ids) -> Ids:
        """The smallest id of each partition."""
        return partitions * np.uint64(self.width % 2**64)

    def last(self, partitions: Ids) -> Ids:
        """The largest id of each partition."""
        first = self.first(partitions)
        left = np.uint64(self.domain - 1) - first
        last: Ids = first + np.minimum(np.uint64(self.width - 1), left)
        return last

    def span(self, partitions: int) -> int:
        """The most ids that this many partitions can hold."""
        return min(self.domain, partitions * self.width)


@dataclass(frozen=True, slots=True)
class Level:
    """A filter of `cells` words over the partitions of one width; 0 hashes is the identity map."""

    partition: Intervals
    cells: int
    hashes: int

    def __post_init__(self) -> None:
        if self.hashes < 0 or self.cells < 1:
            raise ConfigError(f"bloom: a filter of {self.cells} cells with {self.hashes} hashes")
        if not self.hashes and self.cells != self.partition.count:
            raise ConfigError(
                f"bloom: the identity map of {self.partition.count} keys has as many cells, "
                f"not {self.cells}"
            )

    @classmethod
    def sized(cls, partition: Intervals, capacity: int, rate: float) -> Level:
        """The papers' formula, or the identity map where that is not larger."""
        cells, hashes = filter_size(min(capacity, partition.count), rate)
        if partition.count <= cells:
            return cls(partition, partition.count, 0)
        return cls(partition, cells, hashes)

    @property
    def marks(self) -> int:
        """Positions that one key marks."""
        return max(1, self.hashes)

    def false_positive_rate(self, members: int) -> float:
        """(1 - exp(-h phi / beta))^h, the papers' approximation."""
        if not self.hashes:
            return 0.0
        return float((-math.expm1(-self.hashes * members / self.cells)) ** self.hashes)

    def marked(self, keys: Ids, seed: int) -> Ids:
        """The distinct positions of these keys."""
        if not self.hashes:
            return keys
        hashed = [positions(keys, HashKey.of(seed, i), self.cells) for i in range(self.hashes)]
        return np.unique(np.concatenate(hashed))

    def present(self, words: npt.NDArray[np.bool_], keys: Ids, seed: int) -> Ids:
        """Those keys all of whose positions are marked; most leave after one or two lookups."""
        if not self.hashes:
            return keys[words[keys]]
        for index in range(self.hashes):
            keys = keys[words[positions(keys, HashKey.of(seed, index), self.cells)]]
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomFilter:
    """Levels of filters over Z_2^bits, coarse to fine; the last level is the ids themselves."""

    domain: int
    capacity: int
    bits: int
    levels: tuple[Level, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        check_domain(self.domain)
        if self.capacity < 1:
            raise ConfigError(f"bloom: capacity {self.capacity} must be positive")
        if any(level.partition.domain != self.domain for level in self.levels):
            raise ConfigError("bloom: a level is over another domain than the filter")
        if not self.levels or self.levels[-1].partition.count != self.domain:
            raise ConfigError("bloom: the last level must be the ids, as intervals of width 1")
        HashKey.of(self.seed, 0)  # refuses a seed over 64 bits
        worst = max(self.scanned)
        if worst > SCAN_LIMIT:
            raise ConfigError(
                f"bloom: the server would have to test {worst} candidates, more than {SCAN_LIMIT}",
                hint="give partitions that are finer, or several levels of them; the sum table "
                "needs none",
            )
        if not 8 <= self.bits <= 64 or self.false_negative_rate >= 1.0:
            raise ConfigError(f"bloom: {self.bits} bits per word; 8 to 64, and over the hashes")

    @classmethod
    def sized(
        cls,
        domain: int,
        capacity: int,
        *,
        partitions: Sequence[Intervals] = (),
        false_positive_rate: float = FALSE_POSITIVE_RATE,
        false_negative_rate: float = FALSE_NEGATIVE_RATE,
        seed: int = 0,
    ) -> Self:
        """The papers' sizes for `capacity` ids; `partitions` from coarse to fine, or our own."""
        if not 0.0 < false_positive_rate < 1.0 or not 0.0 < false_negative_rate < 1.0:
            raise ConfigError(
                f"bloom: rates {false_positive_rate} and {false_negative_rate} must be in (0, 1)"
            )
        check_domain(domain)
        capacity = min(capacity, domain)
        leaf = Level.sized(Intervals(domain, 1), capacity, false_positive_rate)
        if not leaf.hashes:
            levels: tuple[Level, ...] = (leaf,)  # every id has its own word: nothing to narrow
        elif partitions:
            coarse = (Level(p, p.count, 0) for p in partitions[:1])
            finer = (Level.sized(p, capacity, _STEP_RATE) for p in partitions[1:])
            levels = (*coarse, *finer, leaf)
        else:
            levels = (*_default_levels(domain, capacity), leaf)
        marks = sum(level.marks for level in levels)
        bits = max(8, math.ceil(math.log2(marks) - math.log2(false_negative_rate)))
        return cls(domain=domain, capacity=capacity, bits=bits, levels=levels, seed=seed)

    @property
    def group(self) -> Ring:
        return Ring(self.bits)

    @property
    def length(self) -> int:
        return sum(level.cells for level in self.levels)

    @property
    def expected_bytes(self) -> int:
        return packed_bytes(self.group, self.length)

    @property
    def false_negative_rate(self) -> float:
        """h/R, with h the positions of all levels: an id is missed if one of them adds up to 0."""
        return sum(level.marks for level in self.levels) / self.group.order

    @property
    def failure_rate(self) -> float:
        return 0.0

    @property
    def expected_false_positives(self) -> float:
        leaf = self.levels[-1]
        return self.scanned[-1] * leaf.false_positive_rate(self.capacity)

    @property
    def scanned(self) -> tuple[int, ...]:
        """Candidates that the server tests at each level, at capacity, at most on average."""
        counts: list[int] = []
        for level in self.levels:
            count = level.partition.count
            if counts:
                above = self.levels[len(counts) - 1]
                strangers = counts[-1] * above.false_positive_rate(self.capacity)
                kept = min(above.partition.count, self.capacity + math.ceil(strangers))
                # Ranges may begin and end inside a finer partition: one more each.
                narrowest = max(1, level.partition.domain // count)
                reached = -(-above.partition.span(kept) // narrowest)
                count = min(count, reached + (kept if narrowest > 1 else 0))
            elif not level.hashes:
                count = 0  # marks are read off, no key is tried
            counts.append(count)
        return tuple(counts)

    def with_seed(self, seed: int) -> Self:
        return replace(self, seed=seed)

    def encode(self, ids: Ids, randomness: Stream) -> Words:
        """Niu et al. 2020, Algorithm 3, lines 3 to 6, for all levels."""
        check_ids(ids, self.domain)
        marked: list[npt.NDArray[np.int64]] = []
        begin = 0
        for number, level in enumerate(self.levels):
            keys = np.unique(level.partition.of(ids))
            marked.append(level.marked(keys, self._level_seed(number)).astype(np.int64) + begin)
            begin += level.cells
        where = np.concatenate(marked)
        words = self.group.zeros(self.length)
        words[where] = uniform(self.group, randomness, where.size)  # Z_R, zero included
        return words

    def decode(self, total: Words) -> UnionResult:
        """Niu et al. 2020, Algorithm 3, line 8: descend through the partitions that are present."""
        check_total(total, self.group, self.length)
        keys = np.zeros(0, dtype=np.uint64)
        unscanned = begin = 0
        for number, level in enumerate(self.levels):
            part = total[begin : begin + level.cells]
            words = part.astype(np.bool_)
            begin += level.cells
            if number == 0 and not level.hashes:
                keys = np.flatnonzero(words).astype(np.uint64)
                continue
            if number == 0:
                first, last = _whole(level.partition)
            else:
                first, last = _under(self.levels[number - 1].partition, keys, level.partition)
            # A total that no honest cohort sends can mark everything: the scan still ends.
            limit = min(SCAN_LIMIT, 4 * self.scanned[number] + _BLOCK)
            unscanned += max(0, _size(first, last) - limit)
            found = [
                level.present(words, candidates, self._level_seed(number))
                for candidates in _ranges(first, last, limit)
            ]
            keys = np.concatenate([keys[:0], *found])
        return UnionResult(ids=keys, complete=unscanned == 0, residual=unscanned)

    def _level_seed(self, number: int) -> int:
        """Levels hash by functions of their own."""
        return HashKey.of(self.seed, number).outer


def filter_size(members: int, rate: float) -> tuple[int, int]:
    """(beta, h) for a false positive rate: -phi ln FPR / (ln 2)^2 and -ln FPR / ln 2.

    Niu et al. 2020, long version, equation (1) and below; 32,904 ids at 1e-4 need 630,774 words.
    """
    cells = math.ceil(-members * math.log(rate) / math.log(2) ** 2)
    return max(1, cells), max(1, round(-math.log2(rate)))


def _default_levels(domain: int, capacity: int) -> tuple[Level, ...]:
    """Intervals of 16, 16^2, ... ids, until marking all intervals costs less than a filter."""
    levels: list[Level] = []
    width = 1 << _STEP_BITS
    while True:
        partition = Intervals(domain, min(width, domain))
        level = Level.sized(partition, capacity, _STEP_RATE)
        levels.append(level)
        if not level.hashes:
            return tuple(reversed(levels))
        width <<= _STEP_BITS


def _whole(partition: Intervals) -> tuple[Ids, Ids]:
    return np.zeros(1, dtype=np.uint64), np.array([partition.count - 1], dtype=np.uint64)


def _under(above: Intervals, keys: Ids, below: Intervals) -> tuple[Ids, Ids]:
    """For each sorted key above, the range of keys below that its ids can have, without overlap."""
    first, last = below.of(above.first(keys)), below.of(above.last(keys))
    again = np.zeros(keys.size, dtype=np.bool_)
    again[1:] = first[1:] == last[:-1]  # neighbours meet inside one key below
    empty = again & (first == last)
    first = first + again.astype(np.uint64)
    return first[~empty], last[~empty]


def _size(first: Ids, last: Ids) -> int:
    """How many keys these ranges hold; as Python integers, for there may be 2^64."""
    return int(sum((last - first).tolist())) + first.size


def _ranges(first: Ids, last: Ids, limit: int) -> Iterator[Ids]:
    """The keys of these ranges, at most `limit`, in blocks."""
    for begin in range(0, first.size, _BLOCK):
        low, high = first[begin : begin + _BLOCK], last[begin : begin + _BLOCK]
        # No block takes more of a range than is left of the limit, so lengths stay small.
        length = np.minimum(high - low, np.uint64(limit)).astype(np.int64) + 1
        end = np.cumsum(length)
        for start in range(0, min(int(end[-1]), limit), _BLOCK):
            stop = min(start + _BLOCK, int(end[-1]), limit)
            a, b = np.searchsorted(end, [start, stop - 1], side="right")
            taken = length[a : b + 1].copy()
            offset = start - int(end[a] - length[a])
            taken[0] -= offset
            taken[-1] -= int(end[b]) - stop
            where = np.arange(stop - start, dtype=np.int64)
            where -= np.repeat(np.cumsum(taken) - taken, taken)
            origin = low[a : b + 1].copy()
            origin[0] += np.uint64(offset)
            yield np.repeat(origin, taken) + where.astype(np.uint64)
        limit -= min(int(end[-1]), limit)
