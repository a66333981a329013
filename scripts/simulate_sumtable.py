"""Simulate how often a keyed sum table fails to peel, and write the table that sizes it.

Peeling succeeds or fails by the shape of the random hypergraph alone: ids are edges, cells are
vertices, and what stays is its 2-core. So this counts on bare hypergraphs, thousands at a time, and
needs no field arithmetic. For each number of ids it climbs a ladder of table sizes, with 3, 4 and 5
hashes, until a failure rate is below the target with 95 % confidence.

    python scripts/simulate_sumtable.py            print the table (some minutes of one core)
    python scripts/simulate_sumtable.py --write    put it into protocols/union/sizing.py
    python scripts/simulate_sumtable.py --quick    fewer trials of up to 3,000 ids, compared with
                                                   the table in the tree; under a minute

The numbers depend on nothing but this file: every point has a generator seeded by its parameters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from tessera.protocols.union.sizing import (  # noqa: E402
    SIMULATED,
    TARGET,
    SimulatedRate,
    upper_bound,
)

SIZING = ROOT / "src" / "tessera" / "protocols" / "union" / "sizing.py"
BEGIN, END = "# simulated: begin\n", "# simulated: end\n"

TRIALS = {10: 20_000, 30: 20_000, 100: 20_000, 300: 16_000, 1_000: 10_000, 3_000: 6_000,
          10_000: 10_000, 30_000: 8_000}  # fmt: skip
LADDER = (1.23, 1.25, 1.28, 1.3, 1.33, 1.36, 1.4, 1.45, 1.5, 1.55, 1.6, 1.7, 1.8, 2.0, 2.25, 2.5,
          2.75, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0)  # fmt: skip
SCREENING = 400
IDS_AT_ONCE = 60_000  # small enough for the arrays of one batch to stay in cache


def count_failures(ids: int, hashes: int, cells: int, trials: int, seed: int) -> int:
    """In how many of `trials` random tables something is left after peeling."""
    rng = np.random.default_rng([seed, ids, hashes, cells])
    batch = max(1, IDS_AT_ONCE // ids)
    failures = 0
    for begin in range(0, trials, batch):
        failures += _batch_failures(ids, hashes, cells, min(batch, trials - begin), rng)
    return failures


def _batch_failures(
    ids: int, hashes: int, cells: int, tables: int, rng: np.random.Generator
) -> int:
    """Peel many tables as one: they share arrays and never touch each other's cells."""
    section, edges = cells // hashes, tables * ids
    position = rng.integers(0, section, size=(hashes, edges), dtype=np.int64)
    position += np.arange(hashes)[:, None] * section
    position += np.arange(edges) // ids * cells
    degree = np.bincount(position.reshape(-1), minlength=tables * cells)
    # The sum of the edges at a cell names the edge, once only one is left.
    edge_sum = np.zeros(tables * cells, dtype=np.int64)
    every = np.arange(edges)
    for row in position:
        edge_sum += np.bincount(row, weights=every, minlength=tables * cells).astype(np.int64)
    left = np.full(edges, True)
    stamp = np.empty(edges, dtype=np.int64)
    pure = np.flatnonzero(degree == 1)
    while pure.size:
        found = edge_sum[pure]
        stamp[found] = np.arange(found.size)
        found = found[stamp[found] == np.arange(found.size)]  # each once, without sorting
        left[found] = False
        touched = position[:, found]
        np.subtract.at(degree, touched, 1)
        np.subtract.at(edge_sum, touched, np.broadcast_to(found, touched.shape))
        around = touched.reshape(-1)
        pure = around[degree[around] == 1]
    return int(left.reshape(tables, ids).any(axis=1).sum())


def simulate(seed: int) -> Iterator[SimulatedRate]:
    """Climb the ladder for every number of ids, up to the first rung where some hash count does."""
    for ids, trials in TRIALS.items():
        for ratio in LADDER:
            rung = [_rate(ids, hashes, ratio, trials, seed) for hashes in (3, 4, 5)]
            yield from rung
            if any(upper_bound(rate.failures, rate.trials) <= TARGET for rate in rung):
                break


def _rate(ids: int, hashes: int, ratio: float, trials: int, seed: int) -> SimulatedRate:
    """One point; a short count will do where it already shows a rate over 1 %."""
    cells = -(-round(ids * ratio) // hashes) * hashes
    failures = count_failures(ids, hashes, cells, SCREENING, seed + 1)
    if failures > SCREENING // 100:
        return SimulatedRate(ids, hashes, cells, SCREENING, failures)
    failures = count_failures(ids, hashes, cells, trials, seed)
    return SimulatedRate(ids, hashes, cells, trials, failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer trials, compare, write nothing")
    parser.add_argument("--write", action="store_true", help="replace the table in sizing.py")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation (default 1)")
    args = parser.parse_args()
    if args.quick:
        return compare(args.seed)
    begun = time.process_time()
    rows = []
    for rate in simulate(args.seed):
        rows.append(rate)
        print(_line(rate), file=sys.stderr, flush=True)
    text = "".join(f"    {_line(rate)}\n" for rate in dict.fromkeys(rows))  # rungs may round alike
    if args.write:
        source = SIZING.read_text()
        head, rest = source.split(BEGIN)
        SIZING.write_text(head + BEGIN + text + "    " + END + rest.split(END)[1])
    else:
        print(text, end="")
    print(f"{len(rows)} points in {time.process_time() - begun:.0f} s of CPU", file=sys.stderr)
    return 0


def compare(seed: int) -> int:
    """Fresh trials against the table in the tree: status 1 if a rate is out by 5 deviations."""
    worst = 0.0
    for rate in SIMULATED:
        if rate.ids > 3_000:
            continue
        trials = max(SCREENING, rate.trials // 10)
        failures = count_failures(rate.ids, rate.hashes, rate.cells, trials, seed + 2)
        pooled = (failures + rate.failures + 1) / (trials + rate.trials + 2)
        spread = (pooled * (1 - pooled) * (1 / trials + 1 / rate.trials)) ** 0.5
        worst = max(worst, abs(failures / trials - rate.failures / rate.trials) / spread)
    print(f"largest deviation from the table: {worst:.1f} standard deviations")
    return int(worst > 5.0)


def _line(rate: SimulatedRate) -> str:
    return (
        f"SimulatedRate({rate.ids}, {rate.hashes}, {rate.cells}, {rate.trials}, {rate.failures}),"
    )


if __name__ == "__main__":
    sys.exit(main())
