"""How many cells and hashes a keyed sum table needs, from simulated failure rates.

A table of `cells` cells, `hashes` per id, is a random hypergraph, and peels unless that has a
2-core. For many ids the limit is sharp (1.222 cells per id with 3 hashes, 1.295 with 4, 1.425 with
5: Molloy 2005); for few ids it is not, and what fails is mostly two ids that share all their cells.
No formula covers both, so `SIMULATED` holds counted failures, and `scripts/simulate_sumtable.py`
counts them again. A failure loses the ids of the 2-core, usually two or three, and not the round.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final, NamedTuple

from tessera.errors import ConfigError

TARGET: Final = 1e-3
"""The rate of tables that do not peel completely, met with 95 % confidence at full load."""


class SimulatedRate(NamedTuple):
    """`failures` of `trials` random tables of this shape did not peel."""

    ids: int
    hashes: int
    cells: int
    trials: int
    failures: int


class TableSize(NamedTuple):
    """Cells and hashes of a sum table; `cells` is a multiple of `hashes`."""

    cells: int
    hashes: int


# The table, in the order of the simulation: ids, hashes, cells, trials, failures.
SIMULATED: Final[tuple[SimulatedRate, ...]] = (
    # simulated: begin
    SimulatedRate(10, 3, 12, 400, 383),
    SimulatedRate(10, 4, 12, 400, 400),
    SimulatedRate(10, 5, 15, 400, 350),
    SimulatedRate(10, 3, 15, 400, 206),
    SimulatedRate(10, 4, 16, 400, 152),
    SimulatedRate(10, 3, 18, 400, 110),
    SimulatedRate(10, 5, 20, 400, 48),
    SimulatedRate(10, 4, 20, 400, 42),
    SimulatedRate(10, 3, 21, 400, 53),
    SimulatedRate(10, 3, 24, 400, 42),
    SimulatedRate(10, 4, 24, 400, 12),
    SimulatedRate(10, 5, 25, 400, 11),
    SimulatedRate(10, 3, 27, 400, 32),
    SimulatedRate(10, 4, 28, 400, 5),
    SimulatedRate(10, 3, 30, 400, 20),
    SimulatedRate(10, 5, 30, 400, 5),
    SimulatedRate(10, 4, 32, 20000, 256),
    SimulatedRate(10, 3, 36, 400, 10),
    SimulatedRate(10, 4, 36, 20000, 128),
    SimulatedRate(10, 5, 35, 20000, 46),
    SimulatedRate(10, 3, 42, 400, 7),
    SimulatedRate(10, 4, 40, 20000, 87),
    SimulatedRate(10, 5, 40, 20000, 24),
    SimulatedRate(10, 3, 45, 400, 7),
    SimulatedRate(10, 4, 48, 20000, 55),
    SimulatedRate(10, 5, 45, 20000, 12),
    SimulatedRate(30, 3, 39, 400, 279),
    SimulatedRate(30, 4, 40, 400, 308),
    SimulatedRate(30, 5, 40, 400, 396),
    SimulatedRate(30, 3, 42, 400, 181),
    SimulatedRate(30, 4, 44, 400, 122),
    SimulatedRate(30, 5, 45, 400, 256),
    SimulatedRate(30, 3, 45, 400, 115),
    SimulatedRate(30, 4, 48, 400, 30),
    SimulatedRate(30, 3, 48, 400, 75),
    SimulatedRate(30, 5, 50, 400, 69),
    SimulatedRate(30, 3, 51, 400, 47),
    SimulatedRate(30, 4, 52, 400, 9),
    SimulatedRate(30, 5, 55, 400, 8),
    SimulatedRate(30, 3, 54, 400, 41),
    SimulatedRate(30, 4, 56, 400, 6),
    SimulatedRate(30, 3, 60, 400, 27),
    SimulatedRate(30, 4, 60, 400, 6),
    SimulatedRate(30, 5, 60, 20000, 63),
    SimulatedRate(30, 3, 69, 400, 15),
    SimulatedRate(30, 4, 68, 20000, 96),
    SimulatedRate(30, 5, 70, 20000, 16),
    SimulatedRate(30, 3, 75, 400, 13),
    SimulatedRate(30, 4, 76, 20000, 74),
    SimulatedRate(30, 5, 75, 20000, 10),
    SimulatedRate(100, 3, 123, 400, 320),
    SimulatedRate(100, 4, 124, 400, 389),
    SimulatedRate(100, 5, 125, 400, 400),
    SimulatedRate(100, 3, 126, 400, 230),
    SimulatedRate(100, 4, 128, 400, 351),
    SimulatedRate(100, 3, 129, 400, 192),
    SimulatedRate(100, 5, 130, 400, 400),
    SimulatedRate(100, 3, 132, 400, 122),
    SimulatedRate(100, 4, 132, 400, 278),
    SimulatedRate(100, 3, 135, 400, 101),
    SimulatedRate(100, 4, 136, 400, 158),
    SimulatedRate(100, 5, 135, 400, 398),
    SimulatedRate(100, 3, 138, 400, 59),
    SimulatedRate(100, 5, 140, 400, 372),
    SimulatedRate(100, 3, 141, 400, 52),
    SimulatedRate(100, 4, 140, 400, 73),
    SimulatedRate(100, 3, 147, 400, 22),
    SimulatedRate(100, 4, 148, 400, 10),
    SimulatedRate(100, 5, 145, 400, 279),
    SimulatedRate(100, 3, 150, 400, 21),
    SimulatedRate(100, 4, 152, 20000, 162),
    SimulatedRate(100, 5, 150, 400, 136),
    SimulatedRate(100, 3, 156, 400, 17),
    SimulatedRate(100, 4, 156, 20000, 58),
    SimulatedRate(100, 5, 155, 400, 50),
    SimulatedRate(100, 3, 162, 400, 13),
    SimulatedRate(100, 4, 160, 20000, 46),
    SimulatedRate(100, 5, 160, 400, 14),
    SimulatedRate(100, 3, 171, 400, 9),
    SimulatedRate(100, 4, 172, 20000, 29),
    SimulatedRate(100, 5, 170, 20000, 18),
    SimulatedRate(100, 3, 180, 400, 12),
    SimulatedRate(100, 4, 180, 20000, 29),
    SimulatedRate(100, 5, 180, 20000, 1),
    SimulatedRate(300, 3, 369, 400, 294),
    SimulatedRate(300, 4, 372, 400, 396),
    SimulatedRate(300, 5, 370, 400, 400),
    SimulatedRate(300, 3, 375, 400, 197),
    SimulatedRate(300, 4, 376, 400, 390),
    SimulatedRate(300, 5, 375, 400, 400),
    SimulatedRate(300, 3, 384, 400, 78),
    SimulatedRate(300, 4, 384, 400, 360),
    SimulatedRate(300, 5, 385, 400, 400),
    SimulatedRate(300, 3, 390, 400, 44),
    SimulatedRate(300, 4, 392, 400, 253),
    SimulatedRate(300, 5, 390, 400, 400),
    SimulatedRate(300, 3, 399, 400, 15),
    SimulatedRate(300, 4, 400, 400, 139),
    SimulatedRate(300, 5, 400, 400, 400),
    SimulatedRate(300, 3, 408, 400, 8),
    SimulatedRate(300, 4, 408, 400, 44),
    SimulatedRate(300, 5, 410, 400, 397),
    SimulatedRate(300, 3, 420, 400, 6),
    SimulatedRate(300, 4, 420, 16000, 206),
    SimulatedRate(300, 5, 420, 400, 382),
    SimulatedRate(300, 3, 435, 400, 5),
    SimulatedRate(300, 4, 436, 16000, 10),
    SimulatedRate(300, 5, 435, 400, 210),
    SimulatedRate(300, 3, 450, 16000, 206),
    SimulatedRate(300, 4, 452, 16000, 3),
    SimulatedRate(300, 5, 450, 400, 37),
    SimulatedRate(1000, 3, 1230, 400, 210),
    SimulatedRate(1000, 4, 1232, 400, 400),
    SimulatedRate(1000, 5, 1230, 400, 400),
    SimulatedRate(1000, 3, 1251, 400, 76),
    SimulatedRate(1000, 4, 1252, 400, 400),
    SimulatedRate(1000, 5, 1250, 400, 400),
    SimulatedRate(1000, 3, 1281, 400, 8),
    SimulatedRate(1000, 4, 1280, 400, 367),
    SimulatedRate(1000, 5, 1280, 400, 400),
    SimulatedRate(1000, 3, 1302, 10000, 77),
    SimulatedRate(1000, 4, 1300, 400, 233),
    SimulatedRate(1000, 5, 1300, 400, 400),
    SimulatedRate(1000, 3, 1332, 10000, 65),
    SimulatedRate(1000, 4, 1332, 400, 43),
    SimulatedRate(1000, 5, 1330, 400, 400),
    SimulatedRate(1000, 3, 1362, 10000, 52),
    SimulatedRate(1000, 4, 1360, 10000, 21),
    SimulatedRate(1000, 5, 1360, 400, 400),
    SimulatedRate(1000, 3, 1401, 10000, 50),
    SimulatedRate(1000, 4, 1400, 10000, 1),
    SimulatedRate(1000, 5, 1400, 400, 392),
    SimulatedRate(3000, 3, 3690, 400, 145),
    SimulatedRate(3000, 4, 3692, 400, 400),
    SimulatedRate(3000, 5, 3690, 400, 400),
    SimulatedRate(3000, 3, 3750, 400, 17),
    SimulatedRate(3000, 4, 3752, 400, 400),
    SimulatedRate(3000, 5, 3750, 400, 400),
    SimulatedRate(3000, 3, 3840, 6000, 17),
    SimulatedRate(3000, 4, 3840, 400, 383),
    SimulatedRate(3000, 5, 3840, 400, 400),
    SimulatedRate(3000, 3, 3900, 6000, 9),
    SimulatedRate(3000, 4, 3900, 400, 201),
    SimulatedRate(3000, 5, 3900, 400, 400),
    SimulatedRate(3000, 3, 3990, 6000, 15),
    SimulatedRate(3000, 4, 3992, 6000, 14),
    SimulatedRate(3000, 5, 3990, 400, 400),
    SimulatedRate(3000, 3, 4080, 6000, 16),
    SimulatedRate(3000, 4, 4080, 6000, 0),
    SimulatedRate(3000, 5, 4080, 400, 400),
    SimulatedRate(10000, 3, 12300, 400, 67),
    SimulatedRate(10000, 4, 12300, 400, 400),
    SimulatedRate(10000, 5, 12300, 400, 400),
    SimulatedRate(10000, 3, 12501, 10000, 8),
    SimulatedRate(10000, 4, 12500, 400, 400),
    SimulatedRate(10000, 5, 12500, 400, 400),
    SimulatedRate(10000, 3, 12801, 10000, 4),
    SimulatedRate(10000, 4, 12800, 400, 399),
    SimulatedRate(10000, 5, 12800, 400, 400),
    SimulatedRate(30000, 3, 36900, 400, 18),
    SimulatedRate(30000, 4, 36900, 400, 400),
    SimulatedRate(30000, 5, 36900, 400, 400),
    SimulatedRate(30000, 3, 37500, 8000, 4),
    SimulatedRate(30000, 4, 37500, 400, 400),
    SimulatedRate(30000, 5, 37500, 400, 400),
    SimulatedRate(30000, 3, 38400, 8000, 1),
    SimulatedRate(30000, 4, 38400, 400, 400),
    SimulatedRate(30000, 5, 38400, 400, 400),
    # simulated: end
)


def union_bound(domain: int, cohort: int, max_rows: int, expected: int | None = None) -> int:
    """The most ids a union can have, by public numbers only: what an encoding is sized for.

    `max_rows` is what one client puts in at most, decoys included. `expected` is an estimate made
    from earlier, already opened unions; it can only lower the bound.
    """
    if domain < 1 or cohort < 1 or max_rows < 1:
        raise ConfigError(
            f"union: domain {domain}, cohort {cohort} and max_rows {max_rows} must all be positive"
        )
    if expected is not None and expected < 1:
        raise ConfigError(f"union: an expected union of {expected} ids; it must be positive")
    bound = min(domain, cohort * max_rows)
    return bound if expected is None else min(bound, expected)


def upper_bound(failures: int, trials: int) -> float:
    """Wilson's upper limit of a rate, one-sided 95 %: 2.7 / trials where nothing failed."""
    z = 1.6449
    rate = failures / trials
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return (centre + spread) / (1 + z * z / trials)


def size_for(capacity: int) -> TableSize:
    """The fewest cells whose failure rate at `capacity` ids is at most `TARGET`.

    What was simulated for more ids holds fewer as well, so the smallest table is a floor. What
    was simulated for fewer is scaled: above the sharp limit a ratio of cells to ids only gets
    safer as ids are added.
    """
    if capacity < 1:
        raise ConfigError(f"sum table: capacity {capacity} must be positive")
    options = []
    for ids, hashes, cells in _accepted():
        needed = -(-max(capacity, ids) * cells // ids)
        options.append(TableSize(-(-needed // hashes) * hashes, hashes))
    return min(options)


@cache
def _accepted() -> tuple[tuple[int, int, int], ...]:
    """(ids, hashes, cells) of the smallest simulated tables that meet the target."""
    found: dict[tuple[int, int], int] = {}
    for ids, hashes, cells, trials, failures in SIMULATED:
        if upper_bound(failures, trials) <= TARGET:
            found[ids, hashes] = min(cells, found.get((ids, hashes), cells))
    return tuple((ids, hashes, cells) for (ids, hashes), cells in sorted(found.items()))
