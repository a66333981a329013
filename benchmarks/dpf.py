"""What point functions cost: CPU seconds and bytes, beside the AES limit, the paper and `sycret`.

    python benchmarks/dpf.py            # a table
    python benchmarks/dpf.py --json     # one object, in the form all benchmarks share
    python benchmarks/dpf.py --quick    # the small settings only

Every setting is checked before it is timed: both servers' shares have to add up to what was
written. Seconds are CPU seconds of one core, medians. The paper is Cui et al. 2022, Table 5, which
ran on 64 cores; its cells that repeat another cell's figure get no target. `sycret` is the peer for
key generation and single-point evaluation; without it its rows have `ok: null`, and
`--require-peers` makes that an exit status of 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from tessera.crypto import dpf, kernel
from tessera.crypto.cuckoo import Layout, SimpleTable, bins_for
from tessera.crypto.dpf import ServerKeys
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.forest import BITS, Forest, Values
from tessera.crypto.ring import Ring

# Table 5: seconds of gen, eval and aggregation by (log2 m, share of rows).
PAPER = {
    (10, 0.1): (0.028, 0.012, 0.023),
    (10, 0.2): (0.045, 0.015, 0.018),
    (10, 0.3): (0.056, None, 0.018),  # 7.532 is the cell of 2^20
    (15, 0.1): (0.838, 0.253, 0.018),
    (15, 0.2): (1.129, 0.124, 0.179),
    (15, 0.3): (1.707, 0.197, 0.172),
    (20, 0.1): (22.806, 7.532, None),  # 0.018 is the cell of 2^10
    (20, 0.2): (37.018, 0.98, 1.844),
    (20, 0.3): (55.918, 1.732, 2.257),
}
SCALE = {10: 1.25, 15: 1.25, 20: 1.27}  # Table 3
ROWS, HELD, WIDTH = 143_534, 418, 18  # the papers' goods and categories, rows of 18 words


@dataclass(frozen=True)
class Setting:
    """One table, its layout and the keys of some clients, checked."""

    layout: Layout
    rows: np.ndarray
    placement: Any
    spread: Any
    keys: list[ServerKeys]

    @classmethod
    def make(cls, m: int, k: int, bins: int, values: Values, clients: int) -> Setting:
        group = values.group
        assert group is not None
        rng = np.random.default_rng(1)
        table = SimpleTable.of(m, bins, 1)
        layout = Layout.of(table, values)
        rows = rng.permutation(m)[:k]
        placement = table.place(rows)
        updates = group.from_ints(rng.integers(1, 2**31, (k, values.words)))
        updates[placement.left_out] = 0  # the paper's scale factors leave some out
        spread = layout.spread(placement, updates)
        keys: list[ServerKeys] = []
        for client in range(clients):
            report = SystemEntropy().secret("report").reveal()
            pair = dpf.gen(
                layout.forest, placement.points, spread, report_id=report, entropy=SystemEntropy()
            )
            both = [
                ServerKeys.of(pair.public, pair.seeds[party], party=party, report_id=report)
                for party in (0, 1)
            ]
            if client == 0:
                shares = [
                    layout.rows(dpf.evaluate(layout.forest, [one]), one.party) for one in both
                ]
                truth = group.zeros((m, values.words))
                truth[rows] = updates
                if not np.array_equal(group.add(*shares), truth):
                    raise SystemExit("the shares do not add up to what was written")
            keys.append(both[0])
        return cls(layout, rows, placement, spread, keys)

    def gen(self) -> None:
        dpf.gen(
            self.layout.forest,
            self.placement.points,
            self.spread,
            report_id=bytes(32),
            entropy=SystemEntropy(),
        )


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def row(
    what: str,
    settings: dict[str, Any],
    ours: float,
    baseline: float | None,
    name: str | None,
    ratio: float | None,
    target: str | None,
    unit: str = "s",
) -> machine.Row:
    ok = None if target is None else machine.judge(ratio, target)
    return machine.result(what, settings, ours, unit, baseline, name, ratio, target, ok)


def timed(work: Callable[[], object]) -> float:
    """Median CPU seconds: of many short runs, or of few long ones."""
    first = machine.cpu_seconds(work, repeats=1)
    return machine.cpu_seconds(work, repeats=min(201, max(3, int(0.3 / max(first, 1e-5)))))


def against_paper(quick: bool, names: list[str]) -> list[machine.Row]:
    """The nine settings with 128-bit values, at the paper's bins and at ours."""
    rows = []
    for (bits, share), (gen, evaluation, aggregation) in PAPER.items():
        if quick and bits > 15:
            continue
        m, k = 1 << bits, int(share * (1 << bits))
        for whose, bins in (("paper", int(SCALE[bits] * k)), ("2^-40", bins_for(k))):
            note(f"  m = 2^{bits}, k = {k:,}, {bins:,} bins")
            setting = Setting.make(m, k, bins, Values(Ring(128)), 1)
            layout = setting.layout
            for name in names:
                if name == "reference" and whose != "paper":
                    continue
                settings = {"m": m, "k": k, "bins": bins, "scale": whose, "kernel": name}
                floor = "150" if name != "reference" else "40"
                if bits >= 15:
                    floor = "300" if name != "reference" else "80"
                with kernel.use(name):
                    spent = timed(setting.gen)
                    target = f">= {floor}" if whose == "paper" else None
                    rows.append(row("gen", settings, spent, gen, "paper", gen / spent, target))
                    place = timed(lambda s=setting: s.layout.table.place(s.rows))
                    rows.append(row("cuckoo placement", settings, place, None, None, None, None))
                    leaves = layout.forest.empty()
                    spent = timed(
                        lambda s=setting, a=leaves: dpf.evaluate(s.layout.forest, s.keys, a)
                    )
                    scatter = timed(lambda s=setting, a=leaves: s.layout.rows(a, 0))
                    if evaluation is None or aggregation is None:
                        base, ratio, target = None, None, None
                    else:
                        base = evaluation + aggregation
                        ratio = base / (spent + scatter)
                        target = ">= 60" if bits == 20 and name != "reference" else None
                    rows.append(
                        row(
                            "eval + scatter",
                            settings,
                            spent + scatter,
                            base,
                            "paper",
                            ratio,
                            target,
                        )
                    )
            size = layout.forest.public_bytes + dpf.SEED_BYTES
            settings = {"m": m, "k": k, "bins": bins, "scale": whose}
            rows.append(
                row(
                    "bytes",
                    settings,
                    size,
                    16 * m,
                    "sharing the vector",
                    size / (16 * m),
                    None,
                    "B",
                )
            )
    return rows


def against_limit(quick: bool, names: list[str]) -> list[machine.Row]:
    """All leaves of one and of many clients, against nothing but the AES they are made of."""
    rows = []
    goods = (ROWS, HELD, bins_for(HELD))
    scalars = (1 << 15, 3276, bins_for(3276))
    cases = [
        (scalars, Values(Ring(32)), 100, ">= 0.5"),
        (scalars, Values(Ring(64)), 100, ">= 0.5"),
        (scalars, Values(Ring(128)), 100, ">= 0.5"),
        (goods, Values(Ring(32), WIDTH), 100, ">= 0.75"),
        (goods, Values(Ring(32), WIDTH + 1), 100, ">= 0.75"),
    ]
    for (m, k, bins), values, many, target in cases[: 3 if quick else None]:
        note(f"  m = {m:,}, {values.name}, {many} clients")
        setting = Setting.make(m, k, bins, values, many)
        forest = setting.layout.forest
        for name in names:
            for clients in (1, many):
                if name == "reference" and clients > 1:
                    continue
                keys = setting.keys[:clients]
                leaves = forest.empty()
                blocks = forest.aes_blocks * clients
                pairs = []
                with kernel.use(name) as backend:
                    # the limit is taken anew beside every run: clocks and neighbours change
                    for _ in range(5):
                        spent = machine.cpu_seconds(
                            lambda f=forest, k=keys, a=leaves: dpf.evaluate(f, k, a), repeats=1
                        )
                        floor = machine.cpu_seconds(
                            lambda b=backend, n=blocks: b.aes_limit(n), repeats=1
                        )
                        pairs.append((floor / spent, spent, floor))
                fraction = median(pair[0] for pair in pairs)
                settings = {
                    "m": m,
                    "k": k,
                    "bins": bins,
                    "values": values.name,
                    "clients": clients,
                    "kernel": name,
                }
                due = target if clients == many and name == names[0] != "reference" else None
                rows.append(
                    row(
                        "eval against AES",
                        settings,
                        median(pair[1] for pair in pairs),
                        median(pair[2] for pair in pairs),
                        "AES limit of this kernel",
                        fraction,
                        due,
                    )
                )
        rows += threads(setting, many)
        if values.words > 1:
            size = forest.public_bytes + dpf.SEED_BYTES
            plain = m * values.row_bytes
            settings = {"m": m, "k": k, "bins": bins, "values": values.name}
            rows.append(
                row("bytes", settings, size, plain, "sharing the vector", size / plain, None, "B")
            )
    return rows


def threads(setting: Setting, clients: int) -> list[machine.Row]:
    """Two threads on two parts of the trees, by the wall clock: an idle second core is needed."""
    forest = setting.layout.forest
    leaves = forest.empty()
    walls = []
    for count in (1, 2):
        taken = []
        for _ in range(3):
            workers = [
                threading.Thread(
                    target=dpf.evaluate,
                    args=(forest, setting.keys, leaves),
                    kwargs={"part": part},
                )
                for part in forest.parts(count)
            ]
            begin = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            taken.append(time.perf_counter() - begin)
        walls.append(min(taken))
    settings = {"values": forest.values.name, "clients": clients, "kernel": kernel.active().name}
    ratio = walls[0] / walls[1]
    return [row("two threads, wall", settings, walls[1], walls[0], "one thread", ratio, None)]


def retrieval_rows(names: list[str]) -> list[machine.Row]:
    """Bits of one client for the goods' table, and the rows that they select."""
    rows = []
    table = SimpleTable.of(ROWS, bins_for(HELD), 1)
    layout = Layout.of(table, BITS)
    content = np.random.default_rng(1).integers(0, 256, (ROWS, 4 * WIDTH), dtype=np.uint8)
    arranged = layout.arrange(content)
    wanted = np.random.default_rng(2).permutation(ROWS)[:HELD]
    placement = table.place(wanted)
    report = bytes(32)
    pair = dpf.gen(layout.forest, placement.points, None, report_id=report, entropy=SystemEntropy())
    both = [
        ServerKeys.of(pair.public, pair.seeds[party], party=party, report_id=report)
        for party in (0, 1)
    ]
    for name in names:
        with kernel.use(name):
            answers = [layout.answer([dpf.select(one)], arranged, 4 * WIDTH)[0] for one in both]
            if not np.array_equal((answers[0] ^ answers[1])[placement.bins], content[wanted]):
                raise SystemExit("the rows that came back are not the table's")
            settings = {"m": ROWS, "k": HELD, "row bytes": 4 * WIDTH, "kernel": name}
            spent = timed(lambda: dpf.select(both[0]))
            rows.append(row("bits of one client", settings, spent, None, None, None, None))
            bits = [dpf.select(both[0])]
            spent = timed(lambda b=bits: layout.answer(b, arranged, 4 * WIDTH))
            plain = timed(lambda: np.bitwise_xor.reduce(arranged.view(np.uint64), axis=0))
            rows.append(
                row(
                    "answer to one client",
                    settings,
                    spent,
                    plain,
                    "XOR of all rows",
                    spent / plain,
                    None,
                )
            )
    return rows


def peer_rows(names: list[str]) -> list[machine.Row]:
    """`sycret`: keys for points of a 32-bit domain, and one point of each key.

    Our trees have 2^31 - 1 leaves at most, so ours have 31 levels of 32.
    """
    count = 100_000
    what = ("gen against sycret", "single points against sycret")
    try:
        import sycret  # type: ignore[import-not-found]
    except ImportError:
        note("  sycret is not installed")
        settings = {"keys": count}
        return [
            machine.result(one, settings, None, "s", None, "sycret", None, ">= 1", None)
            for one in what
        ]
    version = importlib.metadata.version("sycret")
    factory = sycret.EqFactory(n_threads=1)
    theirs: list[Any] = []
    their_gen = timed(lambda: theirs.append(factory.keygen(count)))
    shared = theirs[-1][0]
    points = factory.alpha(*theirs[-1])
    their_eval = timed(lambda: factory.eval(0, points, shared))
    rows = []
    values = Values(Ring(32))
    forest = Forest.of(np.full(count, 2**31 - 1), values)
    where = np.random.default_rng(1).integers(0, 2**31 - 1, count)
    betas = np.ones((count, 1), dtype=np.uint32)
    for name in names:
        with kernel.use(name):
            make = lambda: dpf.gen(  # noqa: E731
                forest, where, betas, report_id=bytes(32), entropy=SystemEntropy()
            )
            spent = timed(make)
            settings = {"keys": count, "levels": int(forest.trees.depths[0]), "kernel": name}
            target = ">= 1" if name != "reference" else None
            label = f"sycret {version}, 32 bits"
            rows.append(row(what[0], settings, spent, their_gen, label, their_gen / spent, target))
            pair = make()
            one = ServerKeys.of(pair.public, pair.seeds[0], party=0, report_id=bytes(32))
            each = np.arange(count)
            spent = timed(lambda o=one, e=each: dpf.evaluate_points(o, e, where))
            rows.append(
                row(what[1], settings, spent, their_eval, label, their_eval / spent, target)
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="the small settings only")
    parser.add_argument("--require-peers", action="store_true", help="exit 1 without sycret")
    options = parser.parse_args()
    calibration = machine.calibrate()
    names = list(dict.fromkeys([calibration["kernel"], "reference"]))
    rows = against_limit(options.quick, names)
    rows += against_paper(options.quick, names)
    rows += retrieval_rows(names)
    rows += peer_rows(names)
    machine.print_report(calibration, rows, title="Point functions", as_json=options.json)
    return machine.exit_status(rows, require_peers=options.require_peers)


if __name__ == "__main__":
    sys.exit(main())
