"""Private set union at two billion rows: bytes per client, and seconds to decode.

A cohort's union of 30,000 ids out of 2 * 10^9, encoded by 100 clients and summed in the clear: the
masks of the secure sum are benchmarks/secagg.py's business. The keyed sum table against the papers'
Bloom filter with partitions of 200 ids and against the same filter in levels; all decode the same
union, at full load.

    python -m benchmarks.union [--ids 30000] [--domain 2000000000] [--json]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from tessera.crypto.group import Words
from tessera.crypto.hashing import HashKey, Ids, mix
from tessera.crypto.prg import Stream
from tessera.crypto.secret import Secret
from tessera.protocols.union.bloom import BloomFilter, Intervals
from tessera.protocols.union.encoding import UnionEncoding
from tessera.protocols.union.sumtable import SumTable

CLIENTS: Final = 100
PARTITION: Final = 200
MAX_BYTES: Final = 1_000_000
MAX_SECONDS: Final = 0.25
SEED: Final = Secret(b"benchmark: nobody's secret, only")


def cohort(domain: int, ids: int) -> tuple[Ids, list[Ids]]:
    """A union of exactly `ids` ids, and clients which hold about two in a hundred of it each."""
    rng = np.random.default_rng(1)
    drawn = np.unique(rng.integers(0, domain, size=2 * ids, dtype=np.uint64))
    union = np.sort(rng.permutation(drawn)[:ids])
    sets = [union[client::CLIENTS] for client in range(CLIENTS)]
    extra = [np.sort(rng.choice(union, ids // CLIENTS, replace=False)) for _ in range(CLIENTS)]
    return union, [np.union1d(a, b) for a, b in zip(sets, extra, strict=True)]


def open_sum(encoding: UnionEncoding, sets: list[Ids]) -> tuple[Words, float]:
    """The sum of all encodings, and the CPU seconds of one client's."""
    total = encoding.group.zeros(encoding.length)
    for client, ids in enumerate(sets):
        encoding.group.iadd(total, encoding.encode(ids, Stream.of(SEED, "benchmark", client)))
    stream = Stream.of(SEED, "benchmark", 0)
    return total, machine.cpu_seconds(lambda: encoding.encode(sets[0], stream))


def measure(domain: int, ids: int) -> list[machine.Row]:
    union, sets = cohort(domain, ids)
    partitions = [Intervals(domain, PARTITION)]
    encodings: dict[str, UnionEncoding] = {
        "sum table": SumTable.sized(domain, ids),
        "Bloom in levels": BloomFilter.sized(domain, ids),
        f"Bloom, partitions of {PARTITION}": BloomFilter.sized(domain, ids, partitions=partitions),
    }
    figures = {name: _figures(encoding, union, sets) for name, encoding in encodings.items()}
    papers = list(figures)[-1]
    rows = []
    for name, (size, decode, encode, missed, strangers) in figures.items():
        setting = {"domain": domain, "ids": ids, "encoding": name}
        baseline = None if name == papers else papers
        target = name == "sum table"
        for what, ours, unit, index, limit, text in (
            ("bytes per client", float(size), "B", 0, MAX_BYTES, "< 1 MB"),
            ("decode", decode, "s CPU", 1, MAX_SECONDS, "< 0.25 s"),
            ("encode, one client", encode, "s CPU", 2, None, None),
            ("ids missed", float(missed), "ids", 3, None, None),
            ("ids of nobody", float(strangers), "ids", 4, None, None),
        ):
            against = float(figures[papers][index]) if baseline else None
            rows.append(
                machine.result(
                    what,
                    setting,
                    ours,
                    unit,
                    against,
                    baseline,
                    ours / against if against else None,
                    text if target else None,
                    ours < limit if target and limit is not None else None,
                )
            )
    rows.append(_mixer())
    return rows


def _figures(
    encoding: UnionEncoding, union: Ids, sets: list[Ids]
) -> tuple[int, float, float, int, int]:
    total, encode = open_sum(encoding, sets)
    found = encoding.decode(total).ids
    decode = machine.cpu_seconds(lambda: encoding.decode(total))
    size = len(encoding.group.pack(total))
    missed, strangers = np.setdiff1d(union, found).size, np.setdiff1d(found, union).size
    return size, decode, encode, missed, strangers


def _mixer() -> machine.Row:
    """What a full scan of the domain would start with, per id."""
    ids = np.arange(1 << 22, dtype=np.uint64)
    key = HashKey.of(0, 0)
    nanoseconds = machine.cpu_seconds(lambda: mix(ids, key)) / ids.size * 1e9
    return machine.result("hash", {}, nanoseconds, "ns per id", None, None, None, None, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--domain", type=int, default=2_000_000_000)
    parser.add_argument("--ids", type=int, default=30_000)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    rows = measure(args.domain, args.ids)
    machine.print_report(machine.calibrate(), rows, title="private set union", as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
