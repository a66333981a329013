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
