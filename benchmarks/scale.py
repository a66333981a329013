"""The same round over a table of 143,534 rows and over one of 2,000,000,000.

A round of secure submodel learning costs what its clients' rows cost, not what the table could hold
(Niu et al. 2020, 6.5). Here 100 clients with 301 items each run it twice, CPP2, 20 % of them
dropping out, decoys and quorum as by default: once with the papers' items, once with the same items
spread over two billion rows. The union's encoding is the sum table in both, so that the table's
size is the only difference; what `auto` chooses stands beside it, and is what the absolute limits
are held against. Times are CPU seconds without training; memory is the peak of a process that is
one party.

    python -m benchmarks.scale [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from papers import sfsl_round as sfsl
from papers.sfsl_round import Footprint, Measured, RoundSetting

SMALL: Final = sfsl.ITEMS
LARGE: Final = 2_000_000_000
MOST_GROWTH: Final = "<= 1.1"
CLIENT_SECONDS: Final = "<= 0.5"
SERVER_SECONDS: Final = "<= 1.5"

ROUND: Final = RoundSetting(level="cpp2", dropout=0.2, papers=False, encoding="sum-table")


def measure(repeats: int) -> list[machine.Row]:
    forced = {items: replace(ROUND, items=items) for items in (SMALL, LARGE)}
    chosen = {items: replace(forced[items], encoding="auto") for items in forced}
    runs: dict[int, list[Measured]] = {SMALL: [], LARGE: []}
    automatic: dict[int, list[Measured]] = {SMALL: [], LARGE: []}
    for turn in range(repeats):  # in turns, so that a busy minute falls on both
        for items in forced:
            say(f"run {turn + 1} of {repeats}, {items:,} rows")
            runs[items].append(sfsl.measure(forced[items]))
        automatic[SMALL].append(sfsl.measure(chosen[SMALL]))
    automatic[LARGE].append(sfsl.measure(chosen[LARGE]))
    memory = {}
    for items, setting in forced.items():
        say(f"memory, {items:,} rows")
        memory[items] = sfsl.footprints(setting)
    rows = limits(automatic[SMALL])
    rows += growth(runs, memory)
    rows += [by_itself(items, automatic[items][0]) for items in automatic]
    return rows


def limits(runs: Sequence[Measured]) -> list[machine.Row]:
    """The papers' size by itself: seconds of a client and of the server."""
    setting = {"rows": SMALL, "dropped": ROUND.dropout, "union": f"auto: {runs[0].encoding}"}
    rows = []
    for what, seconds, target in (
        ("client, whole round", [client_seconds(m) for m in runs], CLIENT_SECONDS),
        ("server, whole round", [server_seconds(m) for m in runs], SERVER_SECONDS),
    ):
        ours = median(seconds)
        rows.append(
            machine.result(
                what,
                setting,
                ours,
                "s CPU",
                None,
                None,
                None,
                f"{target} s",
                machine.meets(ours, target),
            )
        )
    return rows


def growth(
    runs: dict[int, list[Measured]], memory: dict[int, dict[str, Footprint]]
) -> list[machine.Row]:
    """Each figure of the large table over the small one's."""

    def of(items: int) -> dict[str, tuple[float, str]]:
        taken, found = memory[items], runs[items]
        return {
            "client's time": (median(client_seconds(m) for m in found), "s CPU"),
            "server's time": (median(server_seconds(m) for m in found), "s CPU"),
            "client's memory": (taken["client"].peak / 2**20, "MiB"),
            "server's memory": (taken["server"].peak / 2**20, "MiB"),
            "bytes per client": (found[0].bytes, "B"),
            "union alone, bytes": (found[0].union_bytes(), "B"),
        }

    small, large = of(SMALL), of(LARGE)
    rows = []
    for what, (ours, unit) in large.items():
        baseline = small[what][0]
        target = None if what.startswith("union") else MOST_GROWTH
        rows.append(
            machine.result(
                what,
                {"rows": LARGE, "union": runs[LARGE][0].encoding},
                ours,
                unit,
                baseline,
                f"{SMALL:,} rows",
                ours / baseline,
                target,
                None if target is None else machine.meets(ours / baseline, target),
            )
        )
    return rows


def by_itself(items: int, found: Measured) -> machine.Row:
    """Bytes with the encoding that the plan chooses."""
    setting = {"rows": items, "union": f"auto: {found.encoding}"}
    return machine.result(
        "bytes per client", setting, found.bytes, "B", None, None, None, None, None
    )


def client_seconds(measured: Measured) -> float:
    return sum(measured.client_seconds.values())


def server_seconds(measured: Measured) -> float:
    return sum(measured.server_seconds.values())


def say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs per table size")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    rows = measure(max(1, args.repeats))
    machine.print_report(
        machine.calibrate(), rows, title="a round, whatever the table's size", as_json=args.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
