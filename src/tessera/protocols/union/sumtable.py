"""SumTable: the keyed sum table, whose size follows the union and not the domain.

It has the layout of an invertible Bloom lookup table (Goodrich, Mitzenmacher 2011), in a field. For
each of its ids a client draws a uniform r and adds (r, r*id, r*c(id)) at the id's 3 to 5 cells. In
the sum an id held by any number of clients carries the sum of their r, which is uniform again: the
server's view depends on the union alone. A cell with one id in it shows that id as a quotient;
taking it out of its other cells uncovers more, until nothing is left.

r may be zero, and then the id is missed; drawing r from the non-zero elements instead would tell
one holder (never zero) from two.

A row of the table has 1 + limbs + checks words. Ids that do not fit the field are cut into limbs,
and a check word is present where quotients alone would let through too many impure cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tessera.crypto.field import Field
from tessera.crypto.group import Words
from tessera.crypto.hashing import HashKey, Ids, distinct_positions, mix
from tessera.crypto.prg import Stream, uniform
from tessera.errors import ConfigError
from tessera.protocols.union import sizing
from tessera.protocols.union.encoding import (
    UnionResult,
    check_domain,
    check_ids,
    check_total,
    packed_bytes,
)

EXPONENTS: Final = (31, 61)
MAX_FALSE_PURITIES: Final = 2.0**-24
MAX_ROUNDS: Final = 1000  # an honest table at its stated size peels in about 20
_CHECK: Final = 1 << 16  # the check word's hash function: no position uses that index


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTable:
    """`cells` cells over F_p, p = 2^exponent - 1, `hashes` of them per id."""

    domain: int
    capacity: int
    cells: int
    hashes: int
    exponent: int
    limbs: int
    checks: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_domain(self.domain)
        if not 3 <= self.hashes <= 5 or self.cells < self.hashes or self.cells % self.hashes:
            raise ConfigError(
                f"sum table: {self.cells} cells with {self.hashes} hashes; hashes are 3 to 5 and "
                "divide the cells"
            )
        if self.exponent not in EXPONENTS or not 1 <= self.limbs <= 3 or self.checks not in (0, 1):
            raise ConfigError(
                f"sum table: exponent {self.exponent}, limbs {self.limbs}, checks {self.checks}; "
                f"exponents are {EXPONENTS}, limbs 1 to 3, checks 0 or 1"
            )
        if self.capacity < 1:
            raise ConfigError(f"sum table: capacity {self.capacity} must be positive")
        HashKey.of(self.seed, 0)  # refuses a seed over 64 bits
        if self.limb_range > self.group.order:
            raise ConfigError(
                f"sum table: ids below {self.domain} do not fit {self.limbs} words of "
                f"{self.group.name}",
                hint="cut ids into more limbs, or take the larger field",
            )
        if self.expected_false_purities > MAX_FALSE_PURITIES:
            raise ConfigError(
                f"sum table: 2^{math.log2(self.expected_false_purities):.0f} impure cells would "
                "pass for pure, 2^-24 may",
                hint="add a check word",
            )

    @classmethod
    def sized(cls, domain: int, capacity: int, *, seed: int = 0) -> Self:
        """The fewest bytes that hold `capacity` ids of this domain at the stated rates."""
        check_domain(domain)
        capacity = min(capacity, domain)
        cells, hashes = sizing.size_for(capacity)
        fitting = []
        for exponent in EXPONENTS:
            for limbs in (1, 2, 3):
                for checks in (0, 1):
                    try:
                        table = cls(
                            domain=domain,
                            capacity=capacity,
                            cells=cells,
                            hashes=hashes,
                            exponent=exponent,
                            limbs=limbs,
                            checks=checks,
                            seed=seed,
                        )
                    except ConfigError:
                        continue
                    fitting.append(table)
        if not fitting:
            raise ConfigError(f"sum table: no layout for {capacity} of {domain} ids")
        return min(fitting, key=lambda table: table.expected_bytes)

    @property
    def group(self) -> Field:
        return Field(self.exponent)

    @property
    def words_per_cell(self) -> int:
        return 1 + self.limbs + self.checks

    @property
    def length(self) -> int:
        return self.words_per_cell * self.cells

    @property
    def expected_bytes(self) -> int:
        return packed_bytes(self.group, self.length)

    @property
    def limb_bits(self) -> int:
        """Bits of one limb of an id."""
        return -(-max(1, (self.domain - 1).bit_length()) // self.limbs)

    @property
    def limb_range(self) -> int:
        """A valid limb is below this."""
        return self.domain if self.limbs == 1 else 1 << self.limb_bits

    @property
    def expected_false_purities(self) -> float:
        """Impure cells that look pure, on average over one decoding, at most.

        The quotient of an impure cell is a random affine combination of its ids: in some limb they
        differ, and there it is uniform in F_p. So it is a valid limb with probability at most
        limb_range / p, agrees with the check word with 1 / p, and hashes to this very cell with
        hashes / cells. A cell is tested once at first and again whenever it changes.
        """
        tests = self.cells + self.hashes * self.capacity
        passing = self.limb_range / self.group.order / float(self.group.order) ** self.checks
        return tests * passing * self.hashes / self.cells

    @property
    def false_negative_rate(self) -> float:
        """An id whose r add up to zero leaves no trace."""
        return 1.0 / self.group.order

    @property
    def failure_rate(self) -> float:
        """Tables that do not peel; those lose the ids of the 2-core, usually two or three."""
        return sizing.TARGET

    @property
    def expected_false_positives(self) -> float:
        return self.expected_false_purities

    def with_seed(self, seed: int) -> Self:
        return replace(self, seed=seed)

    def encode(self, ids: Ids, randomness: Stream) -> Words:
        check_ids(ids, self.domain)
        table = self.group.zeros((self.words_per_cell, self.cells))
        r = uniform(self.group, randomness, ids.size)
        self._add(table, self._positions(ids), self._payload(ids, r))
        return table.reshape(-1)

    def decode(self, total: Words) -> UnionResult:
        """Peel in rounds, each taking out all ids that some cell shows.

        A false purity can put an id in and take it out again for ever, so at most 2 * cells ids
        are peeled, in at most MAX_ROUNDS rounds; an id counts if what was taken out for it is not
        zero on balance.
        """
        check_total(total, self.group, self.length)
        table = total.reshape(self.words_per_cell, self.cells).copy()
        changed = np.flatnonzero(table.any(axis=0))
        ids_of: list[Ids] = []
        r_of: list[Words] = []
        budget = 2 * self.cells
        for _ in range(MAX_ROUNDS):
            ids, r, positions = self._pure(table, changed)
            # One id may be seen in several cells: take it out once, the others change with it.
            ids, first = np.unique(ids, return_index=True)
            ids, first = ids[:budget], first[:budget]
            if not ids.size:
                break
            budget -= ids.size
            r = r[first]
            ids_of.append(ids)
            r_of.append(r)
            taken = self.group.neg(self._payload(ids, r))
            changed = self._add(table, positions[:, first], taken)
            changed = changed[table[:, changed].any(axis=0)]
        residual = int(np.count_nonzero(table.any(axis=0)))
        return UnionResult(
            ids=self._balance(ids_of, r_of), complete=residual == 0, residual=residual
        )

    def _positions(self, ids: Ids) -> npt.NDArray[np.int64]:
        return distinct_positions(ids, self.seed, self.cells, self.hashes).view(np.int64)

    def _limbs(self, ids: Ids) -> list[Words]:
        """The ids as field elements, low limb first."""
        if self.limbs == 1:
            return [ids.astype(self.group.dtype)]
        mask = np.uint64((1 << self.limb_bits) - 1)
        shifts = (np.uint64(index * self.limb_bits) for index in range(self.limbs))
        return [(ids >> shift & mask).astype(self.group.dtype) for shift in shifts]

    def _check_word(self, ids: Ids) -> Words:
        """c(id): a hash, so that the check is independent of the quotient it checks."""
        return self.group.from_ints(mix(ids, HashKey.of(self.seed, _CHECK)))

    def _payload(self, ids: Ids, r: Words) -> Words:
        """(words_per_cell, ids): what each id adds to each of its cells."""
        factors = self._limbs(ids)
        if self.checks:
            factors.append(self._check_word(ids))
        return np.stack([r, *(self.group.mul(r, factor) for factor in factors)])

    def _add(
        self, table: Words, positions: npt.NDArray[np.int64], payload: Words
    ) -> npt.NDArray[np.int64]:
        """Add each id's payload at each of its cells, and return the cells that changed.

        Ids may share cells, so equal cells are gathered first; halves of 32 bits are summed, which
        cannot overflow 64 bits.
        """
        field = self.group
        cells, place = np.unique(positions.reshape(-1), return_inverse=True)
        for row, values in zip(table, payload, strict=True):
            wide = np.tile(values.astype(np.uint64), len(positions))
            gathered = np.zeros(cells.size, dtype=np.uint64)
            np.add.at(gathered, place, wide & np.uint64(2**32 - 1))
            total = field.fold(gathered).astype(field.dtype)
            if field.exponent > 32:
                high = np.zeros(cells.size, dtype=np.uint64)
                np.add.at(high, place, wide >> np.uint64(32))
                scale = np.full(cells.size, 2**32, dtype=field.dtype)
                total = field.add(total, field.mul(field.fold(high).astype(field.dtype), scale))
            row[cells] = field.add(row[cells], total)
        return cells

    def _pure(
        self, table: Words, cells: npt.NDArray[np.int64]
    ) -> tuple[Ids, Words, npt.NDArray[np.int64]]:
        """Those of these cells that hold one id: the id, its r, and all its positions.

        Tests in order of cost: r is not zero, each quotient is a limb of a valid id, the check
        word agrees, and the id belongs into this cell.
        """
        field = self.group
        cells = cells[table[0, cells] != 0]
        r = table[0, cells]
        inverse = batch_inverse(field, r)
        ids = np.zeros(cells.size, dtype=np.uint64)
        valid = np.ones(cells.size, dtype=np.bool_)
        for index in range(self.limbs):
            limb = field.mul(table[1 + index, cells], inverse).astype(np.uint64)
            shift = index * self.limb_bits
            # A limb that reaches over bit 64 is invalid; shifting would hide that.
            top = min(self.limb_range - 1, (self.domain - 1) >> shift)
            valid &= limb <= np.uint64(top)
            ids |= limb << np.uint64(shift)
        valid &= ids <= np.uint64(self.domain - 1)
        cells, r, ids = cells[valid], r[valid], ids[valid]
        if self.checks:
            agrees = field.mul(r, self._check_word(ids)) == table[-1, cells]
            cells, r, ids = cells[agrees], r[agrees], ids[agrees]
        positions = self._positions(ids)
        section = cells // (self.cells // self.hashes)
        belongs = positions[section, np.arange(ids.size)] == cells
        return ids[belongs], r[belongs], positions[:, belongs]

    def _balance(self, ids_of: list[Ids], r_of: list[Words]) -> Ids:
        """The ids that were taken out on balance, sorted."""
        if not ids_of:
            return np.zeros(0, dtype=np.uint64)
        ids, place = np.unique(np.concatenate(ids_of), return_inverse=True)
        if ids.size == place.size:
            return ids
        net = self.group.zeros(ids.size)
        begin = 0
        for r in r_of:  # ids are distinct within a round
            at = place[begin : begin + r.size]
            net[at] = self.group.add(net[at], r)
            begin += r.size
        kept: Ids = ids[net != 0]
        return kept


def batch_inverse(field: Field, values: Words) -> Words:
    """1 / value for non-zero values, at about three multiplications each (Montgomery's trick).

    Multiply in pairs, level by level; invert the few products at the top, where Python's integers
    are faster than Fermat's exponent on a short array; walk back down.
    """
    levels = [values]
    while levels[-1].size > 8:
        level = levels[-1]
        if level.size % 2:
            level = np.append(level, field.dtype.type(1))
            levels[-1] = level
        levels.append(field.mul(level[0::2], level[1::2]))
    inverse = field.from_ints(pow(top, -1, field.order) for top in field.to_ints(levels.pop()))
    for level in reversed(levels):
        inverse = inverse[: level.size // 2]
        wider = np.empty(level.size, dtype=field.dtype)
        wider[0::2] = field.mul(inverse, level[1::2])
        wider[1::2] = field.mul(inverse, level[0::2])
        inverse = wider
    return inverse[: values.size]
