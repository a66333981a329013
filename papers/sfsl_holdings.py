"""Synthetic holdings: which items each client has, as unevenly liked as those of the SFSL papers.

Niu et al. (2020, Table 2 and section 6) describe their users by a few numbers: 301 items of
143,534 and 117 categories of 4,815 for each, and in the union of 100 of them 86.7 % of the items
have one holder, 11.0 % two and 2.3 % more. What a round costs depends on the rows and on who shares
them, never on what they stand for, so holdings with these numbers cost what the papers' would.

Popularity is one power law: the chance that the item of rank x (0 the most liked) is drawn is
proportional to x^-skew, and a client draws until it has enough different ones. With skew 0.45 all
three shares come out as printed; the categories' exponent gives the 117. Both have been solved for
once, and `tests/data/test_holdings.py` measures them again.

Nothing here walks over the table: an item's id and category are functions of its rank and its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.hashing import HashKey, mix
from tessera.errors import ConfigError

Rows = npt.NDArray[np.uint64]

SKEW: Final = 0.45
CATEGORY_SKEW: Final = 0.919

_PLACE: Final = 0  # which of the market's hash functions: where an item lies within its block
_CATEGORY: Final = 1
_UNIT: Final = 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """Items of which some are liked more than others; the defaults are the papers'.

    `rows` is how many the table has, `stocked` how many of them anybody ever holds (0: all). With
    the same seed and as many stocked, two markets give their clients the same items under other
    ids, so that a table of any size can be compared with a small one.
    """

    rows: int = 143_534
    stocked: int = 0
    categories: int = 4_815
    per_client: int = 301
    skew: float = SKEW
    category_skew: float = CATEGORY_SKEW
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.stock <= self.rows < 2**40:
            raise ConfigError(f"holdings: {self.stocked} items in stock of {self.rows} rows")
        if not 1 <= self.per_client <= self.stock // 2:
            raise ConfigError(
                f"holdings: {self.per_client} items per client of {self.stock}",
                hint="a client holds at most half of what there is",
            )
        if self.categories < 1:
            raise ConfigError(f"holdings: {self.categories} categories")
        for name in ("skew", "category_skew"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"holdings: {name} = {getattr(self, name)} must lie in [0, 1)")

    @property
    def stock(self) -> int:
        return self.stocked or self.rows

    @property
    def _block(self) -> int:
        """Rows of the table for each item in stock, which lies in one of them."""
        return self.rows // self.stock

    def client(self, number: int) -> Rows:
        """The items of one client, ascending; the same for the same seed and number."""
        rng = np.random.default_rng([self.seed, number])
        ranks = np.zeros(0, dtype=np.uint64)
        while len(ranks) < self.per_client:
            drawn = _power_law(rng.random(self.per_client), self.stock, self.skew)
            joined = np.concatenate([ranks, drawn])
            # The first occurrences in the order of drawing: the later draws are cut off below.
            order = np.argsort(joined, kind="stable")
            first = np.ones(len(joined), dtype=np.bool_)
            first[1:] = joined[order][1:] != joined[order][:-1]
            ranks = joined[np.sort(order[first])]
        return np.sort(self.id_of(ranks[: self.per_client]))

    def id_of(self, ranks: Rows) -> Rows:
        """Where items of these ranks lie in the table: all over it, each rank somewhere else."""
        stock, size = self.stock, np.uint64(self._block)
        block = (ranks * np.uint64(_coprime(stock)) + np.uint64(self.seed)) % np.uint64(stock)
        return block * size + mix(block, HashKey.of(self.seed, _PLACE)) % size

    def category_of(self, ids: Rows) -> Rows:
        """The category of each of these items: the public map of a derived table."""
        word = mix(ids // np.uint64(self._block), HashKey.of(self.seed, _CATEGORY)) >> np.uint64(11)
        return _power_law(word.astype(np.float64) * _UNIT, self.categories, self.category_skew)


def holders(clients: list[Rows]) -> dict[int, float]:
    """The share of the union's rows that exactly so many of these clients hold."""
    every = np.sort(np.concatenate([np.zeros(0, dtype=np.uint64), *clients]))
    starts = np.flatnonzero(np.diff(every, prepend=every[:1] + np.uint64(1)))
    times = np.bincount(np.diff(np.append(starts, len(every))))
    return {count: float(found) / len(starts) for count, found in enumerate(times) if found}


def _power_law(uniform: npt.NDArray[np.float64], size: int, skew: float) -> Rows:
    """Ranks 0 .. size - 1 with density x^-skew, by the inverse of (x / size)^(1 - skew)."""
    ranks = np.floor(size * uniform ** (1.0 / (1.0 - skew))).astype(np.uint64)
    return np.minimum(ranks, np.uint64(size - 1))


def _coprime(size: int) -> int:
    """A multiplier that scatters neighbours: next to size / golden ratio, and a unit mod size."""
    factor = max(1, round(size * 0.6180339887498949))
    while np.gcd(factor, size) != 1:
        factor += 1
    return factor
