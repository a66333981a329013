"""Section 6 of Niu et al. 2020, cell by cell: what `tessera reproduce sfsl` gives.

Bytes per client (6.2), seconds (6.3), memory and storage (6.4), and learning curves
(`papers/sfsl_curves.py`). Every measured round is kept in the cache as soon as it is done, under
its settings and the code's version, so that a run that was stopped goes on where it was.

The papers' megabyte has 2^20 bytes: their plain full model, 3,617,023 parameters at 4 bytes down
and 2 up, is 20.70 of those, as printed. Ours are counted likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, Final

from papers import sfsl_round as sfsl
from papers.cells import MEGABYTE, Cell, Request, compared, plain, target
from papers.runs import Cache
from papers.sfsl_round import Footprint, Measured, RoundSetting
from papers.show import Layout
from tessera.report.numbers import percent
from tessera.rounds import schemes
from tessera.rounds.schemes import CATEGORIES

CURVES: Final = "curves"
LEVELS: Final = ("cpp1", "cpp2", "cpp3", "cpp4", "cpp5")

# Niu et al. 2020, 6.2: MB per client and round at n = 100.
PAPER_MEGABYTES: Final = {
    "cpp1": 1.76,
    "cpp2": 2.33,
    "cpp3": 2.78,
    "cpp4": 3.40,
    "cpp5": 5.57,
}
PAPER_MEGABYTES_OTHERWISE: Final = (
    (RoundSetting(scheme="secure-fedavg"), 27.94),
    (RoundSetting(scheme="submodel"), 0.41),
    (RoundSetting(scheme="fedavg"), 20.70),
)
PAPER_UNION: Final = 0.91
TARGETS: Final = {"cpp1": 0.5, "cpp2": 0.5, "cpp3": 0.5, "cpp4": 0.6, "cpp5": 0.6}
TARGET_DEFAULTS: Final = 0.65

# 6.3, CPP2 at n = 100: seconds of a client and of the server; the union's server at 20 % dropout.
PAPER_CLIENT_SECONDS: Final = 71.80
PAPER_SERVER_SECONDS: Final = 11.31
PAPER_UNION_SERVER_SECONDS: Final = 37.66

# 6.4, n = 100, no dropout: memory of a client and of the server, and what a client keeps on disk.
PAPER_CLIENT_MEMORY: Final = {"cpp2": 209.0, "cpp5": 281.0}
PAPER_SERVER_MEMORY: Final = {"cpp2": 1.58 * 1024, "cpp5": 3.15 * 1024}
PAPER_STORED_KILOBYTES: Final = 280.0


def cells(request: Request) -> list[Cell]:
    """The requested parts; curves, which train for hours, come last."""
    parts = [part for part in request.parts if part != CURVES]
    found = sfsl_cells(parts, Cache(request.cache), quick=request.quick)
    if CURVES in request.parts:
        from papers import sfsl_curves  # trains, and so needs torch

        found += sfsl_curves.cells(request)
    return found


def sfsl_cells(parts: Iterable[str], cache: Cache, *, quick: bool) -> list[Cell]:
    """The cells of these parts, in the order of the request."""
    return [cell for name in parts for cell in MEASURED[name](cache, quick)]


# --- what has been measured -----------------------------------------------------------------------


def measured_round(cache: Cache, setting: RoundSetting, repeat: int = 0) -> Measured:
    """One round under this setting, from the cache if it was measured before."""

    def work() -> dict[str, Any]:
        return asdict(sfsl.measure(setting))

    title = describe(setting)
    return Measured(**cache.get("round", asdict(setting), work, title=title, repeat=repeat))


def footprints(cache: Cache, setting: RoundSetting) -> dict[str, Footprint]:
    """Memory and storage of each party."""

    def work() -> dict[str, Any]:
        return {party: asdict(taken) for party, taken in sfsl.footprints(setting).items()}

    found = cache.get("memory", asdict(setting), work, title=describe(setting))
    return {party: Footprint(**taken) for party, taken in found.items()}


def describe(setting: RoundSetting) -> str:
    level = f", {setting.level}" if schemes.named(setting.scheme).randomises else ""
    how = "papers' setting" if setting.papers else "our defaults"
    return (
        f"{setting.scheme}{level}, {setting.clients} clients, {percent(setting.dropout)} "
        f"dropping out, {how}, {setting.precision} down"
    )


# --- bytes ----------------------------------------------------------------------------------------


def bytes_cells(cache: Cache, quick: bool) -> Iterator[Cell]:
    """6.2: bytes per client and round at n = 100, up and down together, and where they go."""
    total = "MB per client, n = 100, with half or single precision down (6.2)"
    stages = "kB per client by cost category, papers' setting, half precision"
    precisions = ("float16",) if quick else ("float16", "float32")
    settings = [("papers'", True, precision) for precision in precisions]
    settings.append(("defaults", False, "float16"))
    for column, papers, precision in settings:
        heading = f"{column}, {'half' if precision == 'float16' else 'single'}"
        by_name = {
            level: measured_round(
                cache, RoundSetting(level=level, papers=papers, precision=precision)
            )
            for level in LEVELS
        }
        for level, found in by_name.items():
            most = TARGETS[level] if papers else TARGET_DEFAULTS
            held = most if precision == "float16" else None
            yield megabytes(total, level.upper(), heading, PAPER_MEGABYTES[level], found, held)
        union = by_name["cpp2"].union_bytes() / MEGABYTE
        how = f"{by_name['cpp2'].encoding}; keys of both sums included"
        yield compared(total, "union alone", heading, PAPER_UNION, union, "MB", how)
        if papers:  # decoys and quorums are nothing to the others
            for setting, paper in PAPER_MEGABYTES_OTHERWISE:
                found = measured_round(cache, replace(setting, precision=precision))
                title = schemes.named(setting.scheme).title
                yield megabytes(total, title, heading, paper, found, None)
                by_name[title] = found
        if papers and precision == "float16":
            for name, found in by_name.items():
                for category in CATEGORIES:
                    size = (found.up[category] + found.down[category]) / 1024
                    row = name.upper() if name in LEVELS else name
                    yield plain(stages, row, category, size, "kB")


def megabytes(
    table: str, row: str, column: str, paper: float, found: Measured, most: float | None
) -> Cell:
    ours, note = found.bytes / MEGABYTE, ""
    if most is not None:
        note = target(f"<= {most:g}", met=ours / paper <= most)
    return compared(table, row, column, paper, ours, "MB", note)


# --- time -----------------------------------------------------------------------------------------


def time_cells(cache: Cache, quick: bool) -> Iterator[Cell]:
    """6.3: CPU seconds of one core, training and testing apart, CPP2 in the papers' setting."""
    table = "CPU seconds, CPP2 (6.3)"
    sizes = (20, 60, 100) if quick else (20, 40, 60, 80, 100)
    shares = (0.1, 0.2) if quick else (0.05, 0.1, 0.15, 0.2)
    points = [(n, 0.0) for n in sizes] + [(100, share) for share in shares]
    found = {point: middle(cache, *point) for point in points}

    whole = found[100, 0.0]
    client, server = sum(whole.client_seconds.values()), sum(whole.server_seconds.values())
    for row, paper, ours, how in (
        ("client, n = 100", PAPER_CLIENT_SECONDS, client, "ours without training"),
        ("server, n = 100", PAPER_SERVER_SECONDS, server, "theirs on 8 cores and 2 GPUs"),
    ):
        yield compared(table, row, "0 %", paper, ours, "s", how)
    union, row = found[100, 0.2].server_seconds["union"], "union, server, n = 100"
    yield compared(table, row, "20 %", PAPER_UNION_SERVER_SECONDS, union, "s")
    for (n, share), measured in found.items():
        row = f"n = {n}, {percent(share)} dropped out"
        for party, seconds in (
            ("a client", measured.client_seconds),
            ("the server", measured.server_seconds),
        ):
            by_category = f"milliseconds of {party} by cost category, CPP2"
            for category in CATEGORIES:
                if category in seconds and category != "rows down":
                    yield plain(by_category, row, category, 1000 * seconds[category], "ms")
            yield plain(by_category, row, "all", 1000 * sum(seconds.values()), "ms")


def middle(cache: Cache, clients: int, dropout: float) -> Measured:
    """Of three runs that with the middle server time: one of them may have been disturbed."""
    setting = RoundSetting(clients=clients, dropout=dropout)
    runs = [measured_round(cache, setting, repeat) for repeat in range(3)]
    runs.sort(key=lambda run: sum(run.server_seconds.values()))
    return runs[len(runs) // 2]


# --- memory ---------------------------------------------------------------------------------------


def memory_cells(cache: Cache, quick: bool) -> Iterator[Cell]:
    """6.4: peak resident memory of a process that is one party, and what a client stores."""
    table = "MB of memory, n = 100 (6.4)"
    for level in ("cpp2", "cpp5"):
        taken = footprints(cache, RoundSetting(level=level))
        for party, paper in (
            ("client", PAPER_CLIENT_MEMORY[level]),
            ("server", PAPER_SERVER_MEMORY[level]),
        ):
            peak, grown = taken[party].peak / MEGABYTE, taken[party].grown / MEGABYTE
            note = f"{grown:.0f} MB of it for the round"
            if party == "client":
                note += "; no model is trained in it"
            row = f"{party}, {level.upper()}"
            yield compared(table, row, "peak", paper, peak, "MB", note)
        stored = taken["client"]
        if level == "cpp2":
            size = stored.period / 1024
            kept = "the period's database: secret, real set, probabilities"
            column = "on disk, between rounds"
            yield compared(table, "client, CPP2", column, PAPER_STORED_KILOBYTES, size, "kB", kept)
        size = stored.snapshot / 1024
        column = "snapshot within a round"
        yield plain(table, f"client, {level.upper()}", column, size, "kB")


MEASURED: Final[dict[str, Callable[[Cache, bool], Iterator[Cell]]]] = {
    "bytes": bytes_cells,
    "time": time_cells,
    "memory": memory_cells,
}
DEFAULT: Final = tuple(MEASURED)
PARTS: Final = (*DEFAULT, CURVES)
TAKES: Final = ("seeds", "rounds", "sets", "variants", "data")
LAYOUT: Final = Layout()
