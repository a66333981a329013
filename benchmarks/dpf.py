"""What point functions cost: CPU seconds and bytes, beside the AES limit, the paper and `sycret`.

    python benchmarks/dpf.py            # a table
    python benchmarks/dpf.py --json     # one object, in the form all benchmarks share
    python benchmarks/dpf.py --quick    # the small settings only

Every setting is checked before it is timed: both servers' shares have to add up to what was
written. Seconds are CPU seconds of one core, medians. *Blocks' time* is seconds divided by the time
of one AES block (`aes_limit`) of the same kernel, taken in the same run. The paper is Cui et al.
2022, Table 5, which ran on 64 cores; its figures, settings and targets are those of
`tessera reproduce fsl-tables`, and cells that repeat another cell's figure get no target. `sycret`
is the peer for key generation and single-point evaluation; without it its rows have `ok: null`,
and `--require-peers` makes that an exit status of 1.
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
from papers import fsl_tables as fsl_cells
from papers.fsl_measure import SCALAR, part_of, scaled
from papers.sfsl_round import COLUMNS, ITEMS
from tessera.crypto import dpf, kernel, verifiable
from tessera.crypto.cuckoo import Layout, SimpleTable, bins_for
from tessera.crypto.dpf import BITS, SELECTORS, Forest, ServerKeys, Values
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.ids import TableId
from tessera.protocols.two_server.read.client import row_digests, row_tags

ROWS, HELD, WIDTH = ITEMS, 418, COLUMNS  # the papers' items, rows of 18 words
SCALARS = 1 << 15
MANY = 100
REFERENCE = fsl_cells.REFERENCE

# Blocks' time, with 100 clients: a leaf with one word, with a row; a row of a checked answer.
SCALAR_TARGETS = ((32, 4.4), (64, 4.4), (128, 5.3))
ROW_TARGET = 7.6
ANSWER_TARGET, ANSWER_BYTES = 3.9, 36
CHECK_TARGET = 3.6  # more, for the check of a leaf in the same pass


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
                shares = [row_shares(layout, [one]) for one in both]
                truth = group.zeros((m, values.words))
                truth[rows] = updates
                if not np.array_equal(group.add(*shares), truth):
                    raise SystemExit("the shares do not add up to what was written")
            keys.append(both[0])
        return cls(layout, rows, placement, spread, keys)

    def row_shares(self) -> None:
        row_shares(self.layout, self.keys)

    def gen(self) -> None:
        dpf.gen(
            self.layout.forest,
            self.placement.points,
            self.spread,
            report_id=bytes(32),
            entropy=SystemEntropy(),
        )


def row_shares(layout: Layout, keys: list[ServerKeys]) -> np.ndarray:
    """One server's shares of all rows: evaluation and aggregation, in one pass as servers do it."""
    space = layout.row_space(keys[0].party)
    dpf.add_to(layout.forest, keys, space)
    return layout.row_words(space)


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
    ok = None if target is None else machine.meets(ratio, target)
    return machine.result(what, settings, ours, unit, baseline, name, ratio, target, ok)


def timed(work: Callable[[], object]) -> float:
    """Median CPU seconds: of many short runs, or of few long ones."""
    first = machine.cpu_seconds(work, repeats=1)
    return machine.cpu_seconds(work, repeats=min(201, max(3, int(0.3 / max(first, 1e-5)))))


def against_paper(names: list[str], most: int = 20) -> list[machine.Row]:
    """The settings of Table 5 up to 2^most rows, at the paper's bins and at ours."""
    rows = []
    for (power, percent), (gen, evaluation, aggregation) in fsl_cells.PAPER_SECONDS.items():
        if power > most:
            continue
        m, k = 1 << power, part_of(1 << power, percent)
        theirs = scaled(fsl_cells.PAPER_FACTOR[power], k)
        for whose, bins in (("paper", theirs), ("2^-40", bins_for(k))):
            note(f"  m = 2^{power}, k = {k:,}, {bins:,} bins")
            setting = Setting.make(m, k, bins, SCALAR, 1)
            layout = setting.layout
            for name in names:
                if name == REFERENCE and whose != "paper":
                    continue
                native = name != REFERENCE
                settings = {"m": m, "k": k, "bins": bins, "scale": whose, "kernel": name}
                with kernel.use(name):
                    spent = timed(setting.gen)
                    target = f">= {fsl_cells.GEN_TARGETS[native][power]}"
                    if whose != "paper":
                        target = None
                    rows.append(row("gen", settings, spent, gen, "paper", gen / spent, target))
                    place = timed(lambda s=setting: s.layout.table.place(s.rows))
                    rows.append(row("cuckoo placement", settings, place, None, None, None, None))
                    spent = timed(setting.row_shares)
                    base = ratio = target = None
                    if (power, percent) not in fsl_cells.REPEATED:
                        base = evaluation + aggregation
                        ratio = base / spent
                        if power == 20 and native:
                            target = f">= {fsl_cells.SERVER_TARGET}"
                    rows.append(
                        row("eval + scatter", settings, spent, base, "paper", ratio, target)
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


def blocks_time(
    backend: kernel.Backend, work: Callable[[], object], count: int
) -> tuple[float, float, float]:
    """(blocks' time of one of `count` parts of this work, seconds of it, seconds of a block).

    The limit is taken anew beside every run, since clocks and neighbours change.
    """
    pairs = []
    for _ in range(5):
        spent = machine.cpu_seconds(work, repeats=1)
        floor = machine.cpu_seconds(lambda: backend.aes_limit(count), repeats=1)
        pairs.append((spent / floor, spent / count, floor / count))
    ratio, each, block = (median(pair[i] for pair in pairs) for i in range(3))
    return ratio, each, block


def against_limit(names: list[str], *, items: bool = True) -> list[machine.Row]:
    """A leaf of one and of many clients in blocks' time: what AES alone would take is beside it.

    `items` says whether the papers' large table is looked at, too.
    """
    rows = []
    tenth = part_of(SCALARS, 10)
    cases = [(SCALARS, tenth, Values(Ring(bits)), most) for bits, most in SCALAR_TARGETS]
    if items:
        cases += [(ROWS, HELD, Values(Ring(32), WIDTH + more), ROW_TARGET) for more in (0, 1)]
    for m, k, values, target in cases:
        bins, many = bins_for(k), MANY
        note(f"  m = {m:,}, {values.name}, {many} clients")
        setting = Setting.make(m, k, bins, values, many)
        forest = setting.layout.forest
        leaves, size = forest.empty(), forest.trees.total_leaves
        for name in names:
            for clients in (1, many):
                if name == REFERENCE and clients > 1:
                    continue
                keys = setting.keys[:clients]
                with kernel.use(name) as backend:
                    ratio, each, block = blocks_time(
                        backend,
                        lambda f=forest, k=keys, a=leaves: dpf.evaluate(f, k, a),
                        size * clients,
                    )
                settings = {
                    "m": m,
                    "k": k,
                    "bins": bins,
                    "values": values.name,
                    "clients": clients,
                    "AES blocks": round(forest.aes_blocks / size, 2),
                    "kernel": name,
                }
                due = f"<= {target}" if clients == many and name == names[0] != REFERENCE else None
                label = "AES block of this kernel"
                rows.append(row("eval of a leaf", settings, each, block, label, ratio, due))
        rows += threads(setting, many)
        if values.words > 1:
            size = forest.public_bytes + dpf.SEED_BYTES
            plain = m * values.row_bytes
            settings = {"m": m, "k": k, "bins": bins, "values": values.name}
            rows.append(
                row("bytes", settings, size, plain, "sharing the vector", size / plain, None, "B")
            )
    return rows


def check_rows(names: list[str]) -> list[machine.Row]:
    """Values summed and clients checked in one pass, less values alone: a leaf in blocks' time."""
    values = Values(Ring(32), WIDTH + 1)
    setting = Setting.make(ROWS, HELD, bins_for(HELD), values, MANY)
    forest = setting.layout.forest
    factors = verifiable.coefficients(Secret(bytes(verifiable.COIN_BYTES)), [forest])[0]
    # any corrections, but each client its own: they do not fit the nearer caches
    sent = [SystemEntropy().secret("any").reveal() * forest.trees.count for _ in range(MANY)]
    leaves, count = forest.empty(), MANY * forest.trees.total_leaves
    rows = []
    for name in names:
        if name == REFERENCE:
            continue
        with kernel.use(name) as backend:
            both = [
                blocks_time(backend, work, count)
                for work in (
                    lambda: verifiable.check_sums(forest, setting.keys, sent, factors, leaves),
                    lambda: dpf.evaluate(forest, setting.keys, leaves),
                )
            ]
        settings = {"m": ROWS, "values": values.name, "clients": MANY, "kernel": name}
        more, each = both[0][0] - both[1][0], both[0][1] - both[1][1]
        due = f"<= {CHECK_TARGET}" if name == names[0] else None
        label = "AES block of this kernel"
        rows.append(row("check of a leaf, more", settings, each, both[0][2], label, more, due))
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
    """One client's rows of the items' table, bare and with their check, beside an XOR of all."""
    rows = []
    table = SimpleTable.of(ROWS, bins_for(HELD), 1)
    content = np.random.default_rng(1).integers(0, 256, (ROWS, 4 * WIDTH), dtype=np.uint8)
    wanted = np.random.default_rng(2).permutation(ROWS)[:HELD]
    placement = table.place(wanted)
    report = bytes(32)
    for values in (BITS, SELECTORS):
        layout = Layout.of(table, values)
        padded, tags = layout.padded(content), None
        if values == SELECTORS:
            digests = row_digests(TableId(0), np.arange(ROWS, dtype="<u8"), content)
            tags = row_tags(digests, bytes(32))
        chosen = dpf.retrieval_points(
            layout.forest, placement.points, SystemEntropy().secret("points")
        )
        pair = dpf.gen(
            layout.forest, chosen.points, chosen.values, report_id=report, entropy=SystemEntropy()
        )
        both = [
            ServerKeys.of(pair.public, pair.seeds[party], party=party, report_id=report)
            for party in (0, 1)
        ]
        for name in names:
            with kernel.use(name):
                one, two = (layout.answer([k], padded, 4 * WIDTH, tags)[0][0] for k in both)
                if not np.array_equal((one ^ two)[placement.bins], content[wanted]):
                    raise SystemExit("the rows that came back are not the table's")
                spent = timed(
                    lambda f=layout, k=both[:1], a=padded, t=tags: f.answer(k, a, 4 * WIDTH, t)
                )
                plain = timed(lambda a=padded: np.bitwise_xor.reduce(a.view(np.uint64), axis=0))
            settings = {
                "m": ROWS,
                "k": HELD,
                "row bytes": 4 * WIDTH,
                "checked": tags is not None,
                "kernel": name,
            }
            ratio = spent / plain
            rows.append(
                row("answer to one client", settings, spent, plain, "XOR of all rows", ratio, None)
            )
    return rows


def answer_rows(names: list[str]) -> list[machine.Row]:
    """Checked answers to many clients: a row of a bin in blocks' time."""
    table = SimpleTable.of(ROWS, bins_for(HELD), 1)
    content = np.random.default_rng(1).integers(0, 256, (ROWS, ANSWER_BYTES), dtype=np.uint8)
    layout = Layout.of(table, SELECTORS)
    digests = row_digests(TableId(0), np.arange(ROWS, dtype="<u8"), content)
    padded, tags = layout.padded(content), row_tags(digests, bytes(32))
    wanted = np.random.default_rng(2).permutation(ROWS)[:HELD]
    placement = table.place(wanted)
    keys: list[list[ServerKeys]] = [[], []]
    for _ in range(MANY):
        report = SystemEntropy().secret("report").reveal()
        chosen = dpf.retrieval_points(
            layout.forest, placement.points, SystemEntropy().secret("aim")
        )
        pair = dpf.gen(
            layout.forest, chosen.points, chosen.values, report_id=report, entropy=SystemEntropy()
        )
        for party in (0, 1):
            one = ServerKeys.of(pair.public, pair.seeds[party], party=party, report_id=report)
            keys[party].append(one)
    rows = []
    for name in names:
        if name == REFERENCE:
            continue
        with kernel.use(name) as backend:
            one, two = (layout.answer(k, padded, ANSWER_BYTES, tags)[0] for k in keys)
            if not np.array_equal((one ^ two)[-1, placement.bins], content[wanted]):
                raise SystemExit("the rows that came back are not the table's")
            ratio, each, block = blocks_time(
                backend,
                lambda: layout.answer(keys[0], padded, ANSWER_BYTES, tags),
                MANY * int(layout.forest.sizes.sum()),
            )
        settings = {"m": ROWS, "row bytes": ANSWER_BYTES, "clients": MANY, "kernel": name}
        due = f"<= {ANSWER_TARGET}" if name == names[0] else None
        label = "AES block of this kernel"
        rows.append(row("checked answer, a row", settings, each, block, label, ratio, due))
    return rows


def peer_rows(names: list[str], count: int = 100_000) -> list[machine.Row]:
    """`sycret`: keys for points of a 32-bit domain, and one point of each key.

    Our trees have 2^31 - 1 leaves at most, so ours have 31 levels of 32.
    """
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
            target = ">= 1" if name != REFERENCE else None
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
    names = list(dict.fromkeys([calibration["kernel"], REFERENCE]))
    rows = against_limit(names, items=not options.quick)
    rows += against_paper(names, most=15 if options.quick else 20)
    rows += retrieval_rows(names)
    rows += [*answer_rows(names), *check_rows(names)] if not options.quick else []
    rows += peer_rows(names)
    machine.print_report(calibration, rows, title="Point functions", as_json=options.json)
    return machine.exit_status(rows, require_peers=options.require_peers)


if __name__ == "__main__":
    sys.exit(main())
