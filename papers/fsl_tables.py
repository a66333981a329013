"""Section 7 of Cui et al. 2022, cell by cell: what `tessera reproduce fsl-tables` gives.

Scale factors (Table 3), sizes of bins (Table 4), seconds (Table 5), bytes and the share of rows up
to which keys are worth it (Table 6), and the round of section 7.5. The paper's megabyte has 2^20
bytes, and ours are counted likewise.

The paper ran 64 cores with threads and measured time by the clock; ours are CPU seconds of one
core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from papers import fsl_measure as fsl
from papers.cells import MEGABYTE, Cell, Request, compared, plain, ratio, say, target
from papers.fsl_measure import KeyTimes, break_even, key_bytes, part_of, plain_bytes, scaled
from papers.runs import Cache
from papers.sfsl import measured_round
from papers.sfsl_round import COLUMNS, ITEMS, RoundSetting
from papers.show import PER_ROW, Layout, Style
from tessera.crypto import kernel
from tessera.crypto.cuckoo import FAILURE_BITS, bins_for, log2_failure
from tessera.crypto.dpf import Values
from tessera.crypto.ring import Ring

REFERENCE: Final = "reference"

# Cui et al. 2022, Table 3: scale factor by the logarithm of the input size.
PAPER_FACTOR: Final = {10: 1.25, 15: 1.25, 20: 1.27, 25: 1.28}

# Table 4: k/m in per cent -> the largest bin for m = 2^10, 2^15, 2^20, 2^25.
PAPER_BINS: Final = {
    1: (324, 315, 336, 366),
    10: (45, 54, 66, 78),
    30: (27, 36, 39, 48),
    50: (21, 24, 30, 36),
    70: (18, 21, 27, 30),
}

# Table 5: (log m, k/m in per cent) -> seconds of gen, eval, aggregation.
PAPER_SECONDS: Final = {
    (10, 10): (0.028, 0.012, 0.023),
    (10, 20): (0.045, 0.015, 0.018),
    (10, 30): (0.056, 7.532, 0.018),
    (15, 10): (0.838, 0.253, 0.018),
    (15, 20): (1.129, 0.124, 0.179),
    (15, 30): (1.707, 0.197, 0.172),
    (20, 10): (22.806, 7.532, 0.018),
    (20, 20): (37.018, 0.98, 1.844),
    (20, 30): (55.918, 1.732, 2.257),
}
REPEATED: Final = {(10, 30), (20, 10)}
"""Both have 7.532 s of evaluation and 0.018 s of aggregation: one of them is the other's."""

# Table 6: (log m, k/m in per cent) -> MB; and the same as plain shares of the whole vector.
PAPER_MEGABYTES: Final = {
    (10, 1): 0.002,
    (10, 5): 0.009,
    (10, 10): 0.019,
    (15, 1): 0.063,
    (15, 5): 0.317,
    (15, 10): 0.633,
    (20, 1): 2.028,
    (20, 5): 10.14,
    (20, 10): 20.28,
}
PAPER_PLAIN: Final = {10: 0.015, 15: 0.5, 20: 16.0}
# Sections 4 and 6: keys are worth it up to this k/m, for words and for rows of 18 of them.
PAPER_BREAK_EVEN: Final = {1: 0.078, COLUMNS: 0.531}

# Section 7.5: MB that a client uploads, seconds of a client and of a server, and Niu et al.'s MB.
PAPER_ROWS_UP: Final = 1.4
PAPER_DENSE_UP: Final = 0.98
PAPER_CLIENT_SECONDS: Final = 3.0
PAPER_SERVER_SECONDS: Final = 60.0
PAPER_SFSL: Final = 1.76

STEPS: Final = ("gen", "eval", "aggregation")
GEN_TARGETS: Final = {True: {10: 250, 15: 1000, 20: 1000}, False: {10: 40, 15: 80, 20: 80}}
"""Times faster than the paper, by C or not, and by log m."""
SERVER_TARGET: Final = 70
CLIENT_TARGET: Final = 0.014
BLOCKS_TARGETS: Final = {True: 0.85, False: 0.7}
"""Billions of blocks' time of a server, with the check of clients and without."""
HASHED_TARGET: Final = 1.4
"""Bytes that a server hashes for each byte received or sent."""

T3: Final = "Table 3: bins for every row (scale factor)"
T3_FAILURE: Final = "Table 3: log2 of the probability that a row finds no bin"
T3_SIMULATED: Final = "Table 3: per cent of sets that do not fit"
T4: Final = "Table 4: rows in the largest bin"
T5: Final = "Table 5: milliseconds, {}"
T5_SERVER: Final = T5.format("eval + aggregation")
T5_ALSO: Final = "milliseconds beside Table 5, at our number of bins"
T6: Final = "Table 6: MB that a client uploads"
T6_EVEN: Final = "Table 6: k/m in per cent up to which keys take fewer bytes"
DIN: Final = "Section 7.5: a round of DIN, 100 clients"
UNCHECKED: Final = ", without verify"
DIN_BYTES: Final = "kB of a client in that round, by message"
PRINTED: Final = {"SignedHeader": "Opening", "QueryAnswers": "Answers", "WriteReport": "Report"}
"""Message names as these tables have always had them."""
DIN_PHASES: Final = "milliseconds in that round, by phase"

ABOUT: Final = {
    T3: "Ours is proven for 2^-40 (log2_failure) and follows k, the rows that a client has.",
    T3_FAILURE: "The paper asks for -40. Four rows with the same three bins cannot all be placed: "
    "the probability of that alone, then our bound on all failures (-: no bound).",
    T3_SIMULATED: "Bins by the bound at weaker targets, by the paper's factor, and by 1.1.",
    T4: "At the paper's factor, one seed. All of the paper's are multiples of three.",
    T5.format("gen"): "For one client. The paper: 64 cores, by the clock. Ours: CPU, one core; "
    "cuckoo hashing (below) is not in it.",
    T5.format("eval"): "* 7.532 and 0.018 s stand in two columns of the paper, 2^10 at 30 % and "
    "2^20 at 10 %: one repeats the other's.",
    T5_SERVER: "Of one server, in one pass. * as above.",
    T5_ALSO: "plan: the simple table and its trees, public, once a round for everybody.",
    T6: "In brackets the share of the paper's. Its figures have 1.25 bins for a row throughout, "
    "and trees of nine levels. / plain: the share of what plain shares of the table take.",
    DIN_PHASES: "public part: tables in bins and, at a server, the model in bytes, once a round; "
    "and tags of all rows, of which later rounds compute those that changed.",
    T6_EVEN: "For the paper's see sections 4 and 6: its formula, with words of 128 bits.",
}
LAYOUT: Final = Layout(
    styles=(
        Style(lines=False),
        Style(of=DIN, lines=True),
        *(Style(of=title, lines=False, about=about) for title, about in ABOUT.items()),
    ),
)


def cells(request: Request) -> list[Cell]:
    """The requested tables."""
    return [cell for part in request.parts for cell in MADE[part](request)]


def size(power: int) -> str:
    return f"2^{power}"


def setting(power: int, percent: int) -> str:
    return f"2^{power}, {percent} %"


# --- Table 3 --------------------------------------------------------------------------------------


def scale_cells(request: Request) -> Iterator[Cell]:
    """Factors, then what they fail at: the smallest failure, the bound, how often it happens."""
    for power, factor in PAPER_FACTOR.items():
        say(f"table3: m = {size(power)}")
        for share in (100, 10):
            column = "ours, k = m" if share == 100 else f"k = {share} %"
            k = part_of(1 << power, share)
            if power > 20:
                note = "not computed: the bound takes gigabytes at 2^25"
                yield plain(T3, size(power), column, None, PER_ROW, note, paper=factor)
                continue
            note = f"{k} rows, 2^-{FAILURE_BITS}"
            yield compared(T3, size(power), column, factor, bins_for(k) / k, PER_ROW, note)
    for power in (10, 15, 20):
        for share in (1, 10, 30, 100):
            k = part_of(1 << power, share)
            bins = scaled(PAPER_FACTOR[power], k)
            row, asks = f"{size(power)}, k = {k:,}", -float(FAILURE_BITS)
            bound, least = log2_failure(k, bins), fsl.log2_smallest_failure(k, bins)
            at = f"{bins} bins, the paper's"
            for column, ours, note in (
                ("four in three", least, at + ("" if least < asks else "; over 2^-40")),
                ("bound", bound if bound < 0 else None, at),
                ("bound, our bins", log2_failure(k, bins_for(k)), f"{bins_for(k)} bins, ours"),
            ):
                yield plain(T3_FAILURE, row, column, ours, "log2", note, paper=asks)
    trials = 1_000 if request.quick else 5_000
    for k in (10, 51, 102):
        say(f"table3: {trials} sets of {k} rows")
        tried = [(bins_for(k, failure_bits=bits), f"2^-{bits}") for bits in (4, 8)]
        for bins, by in (*tried, (scaled(1.25, k), "paper's"), (scaled(1.1, k), "1.1")):
            row = f"{k} rows, {bins} bins ({by})"
            bound = 100 * 2 ** min(0.0, log2_failure(k, bins))
            rate = 100 * fsl.failure_rate(k, bins, trials)
            yield plain(T3_SIMULATED, row, "bound", bound, "%")
            yield plain(T3_SIMULATED, row, f"of {trials:,}", rate, "%")


# --- Table 4 --------------------------------------------------------------------------------------


def bin_cells(request: Request) -> Iterator[Cell]:
    """Largest bins of the simple table; 2^25 rows are hashed in chunks, but take a minute."""
    for at, (power, factor) in enumerate(PAPER_FACTOR.items()):
        if request.quick and power > 20:
            continue
        say(f"table4: m = {size(power)}")
        for percent, paper in PAPER_BINS.items():
            rows = 1 << power
            sizes = fsl.bin_sizes(rows, scaled(factor, part_of(rows, percent)))
            note = f"{sizes.size:,} bins, {sizes.mean():.1f} rows on average"
            row = setting(power, percent)
            yield compared(T4, row, "ours", paper[at], float(sizes.max()), "rows", note)


# --- Table 5 --------------------------------------------------------------------------------------


def kernels() -> tuple[str, ...]:
    """The kernel in use and the NumPy one, if that is another."""
    return tuple(dict.fromkeys((kernel.describe().name, REFERENCE)))


def time_cells(request: Request) -> Iterator[Cell]:
    """Seconds by kernel, at the paper's number of bins and at ours."""
    found: dict[tuple[int, int], dict[str, KeyTimes]] = {}
    names = kernels()
    for power, percent in PAPER_SECONDS:
        rows, k = 1 << power, part_of(1 << power, percent)
        theirs, ours = scaled(PAPER_FACTOR[power], k), bins_for(k)
        by_column = found[power, percent] = {}
        for name in names:
            if name == REFERENCE and request.quick and power > 15 and len(names) > 1:
                continue
            say(f"table5: m = {size(power)}, k/m = {percent} %, {name}")
            with kernel.use(name):
                by_column[title(name)] = fsl.key_times(rows, k, theirs)
                if name == names[0]:
                    by_column["our bins"] = fsl.key_times(rows, k, ours)
    for step, name in enumerate(STEPS):
        for (power, percent), by_column in found.items():
            for column, times in by_column.items():
                seconds = (times.gen, times.eval, times.aggregate)[step]
                yield timed_cell(T5.format(name), power, percent, column, step, seconds)
    for (power, percent), by_column in found.items():
        for column, times in by_column.items():
            yield timed_cell(T5_SERVER, power, percent, column, None, times.server)
    for (power, percent), by_column in found.items():
        times = by_column["our bins"]
        for column, seconds in (
            ("plan", times.plan),
            ("cuckoo", times.place),
            ("gen", times.gen),
            ("eval", times.eval),
            ("aggregation", times.aggregate),
        ):
            yield plain(T5_ALSO, setting(power, percent), column, 1000 * seconds, "ms")


def title(name: str) -> str:
    return "NumPy" if name == REFERENCE else f"C, {name}"


def timed_cell(
    table: str, power: int, percent: int, column: str, step: int | None, seconds: float
) -> Cell:
    printed = PAPER_SECONDS[power, percent]
    paper = printed[1] + printed[2] if step is None else printed[step]
    notes = ["one core"]
    if column == "our bins":
        notes.append(title(kernels()[0]))
    elif step == 0:
        notes.append(at_least(paper / seconds, GEN_TARGETS[column != "NumPy"][power]))
    elif step is None and column != "NumPy" and power == 20 and percent > 10:
        notes.append(at_least(paper / seconds, SERVER_TARGET))
    doubtful = step != 0 and (power, percent) in REPEATED
    if doubtful:
        notes.append("the paper's repeats another column's")
    row = setting(power, percent)
    cell = compared(table, row, column, 1000 * paper, 1000 * seconds, "ms", "; ".join(notes))
    return replace(cell, doubtful=doubtful)


def at_most(found: float, most: float | None) -> str:
    """Whether a target is met, before what else is to be said; nothing where there is none."""
    return "" if most is None else f"{target(f'<= {most:g}', met=found <= most)}; "


def at_least(times: float, least: int) -> str:
    return target(f">= {least}x", met=times >= least)


# --- Table 6 --------------------------------------------------------------------------------------


def byte_cells(request: Request) -> Iterator[Cell]:
    """Keys against the paper's and against plain shares, and where they cost the same."""
    for (power, percent), paper in PAPER_MEGABYTES.items():
        rows, k = 1 << power, part_of(1 << power, percent)
        row, whole = setting(power, percent), plain_bytes(rows, fsl.SCALAR)
        tried = {"paper's": scaled(PAPER_FACTOR[power], k), "our": bins_for(k)}
        for whose, bins in tried.items():
            ours = key_bytes(rows, bins, fsl.SCALAR) / MEGABYTE
            yield compared(T6, row, f"{whose} bins", paper, ours, "MB", f"{bins:,} bins")
        for whose, bins in tried.items():
            share = key_bytes(rows, bins, fsl.SCALAR) / whole
            yield plain(T6, row, f"{whose} / plain", share, "of plain shares")
    for power, paper in PAPER_PLAIN.items():
        shares = plain_bytes(1 << power, fsl.SCALAR) / MEGABYTE
        yield compared(T6, f"{size(power)}, plain shares", "our bins", paper, shares, "MB")
    rows_of = ((1, 128), (COLUMNS, 128), (COLUMNS, 32))
    sizes = [(size(power), 1 << power, PAPER_FACTOR[power]) for power in (10, 15, 20)]
    for words, bits in rows_of:
        for name, rows, factor in [*sizes, (f"{ITEMS:,}", ITEMS, 1.25)]:
            say(f"table6: {words} x {bits} bits, m = {name}")
            values = Values(Ring(bits), words)
            printed = 100 * PAPER_BREAK_EVEN[words] if bits == 128 else None
            by: tuple[tuple[str, Callable[[int], int]], ...] = (
                ("paper's bins", partial(scaled, factor)),
                ("our bins", bins_for),
            )
            for column, number in by:
                even = 100 * break_even(rows, values, number)
                yield compared(
                    T6_EVEN, f"{words} x {bits} bits, {name}", column, printed, even, "%"
                )


# --- section 7.5 ----------------------------------------------------------------------------------


def din_cells(request: Request) -> Iterator[Cell]:
    """A client's upload and the seconds of each party, then its bytes beside one server's."""
    found = fsl.two_server(RoundSetting())
    for row, paper, ours, note in (
        ("rows", PAPER_ROWS_UP, found.rows_up, "items and categories of 18 words and a count"),
        ("dense part", PAPER_DENSE_UP, found.dense_up, "theirs 128 bits a word, ours 22"),
    ):
        yield compared(DIN, f"update up, {row}", "bytes", paper, ours / MEGABYTE, "MB", note)
    yield from din_times(found, verify=True)
    if not request.quick:
        unchecked = fsl.two_server(RoundSetting(), verify=False)
        yield from din_times(unchecked, verify=False)
        less = (found.bytes - unchecked.bytes) / 1024
        note = f"{less:.1f} kB less than with the check"
        yield plain(
            DIN, f"two servers{UNCHECKED}", "all bytes", unchecked.bytes / MEGABYTE, "MB", note
        )
    levels = ("cpp1",) if request.quick else ("cpp1", "cpp5")
    whole = found.bytes / MEGABYTE
    yield compared(DIN, "two servers", "all bytes", PAPER_SFSL, whole, "MB", "paper: Niu et al.")
    cache = Cache(request.cache)
    for level in levels:
        one = measured_round(cache, RoundSetting(level=level)).bytes / MEGABYTE
        note = f"two servers take {ratio(whole, one)} of it"
        row = f"secure-submodel, {level.upper()}"
        printed = PAPER_SFSL if level == "cpp1" else None
        yield compared(DIN, row, "all bytes", printed, one, "MB", note)
    for way, sent in (("up", found.up), ("down", found.down)):
        for kind, count in sent.items():
            yield plain(DIN_BYTES, way, PRINTED.get(kind, kind), count / 1024, "kB")
    yield plain(DIN_BYTES, "between the servers", "all", found.between / 1024, "kB")
    for party, phases, public in (
        ("client", {"all": found.client}, found.client_plan),
        ("leader", found.leader, found.server_plan),
        ("helper", found.helper, found.server_plan),
    ):
        for phase, seconds in {"public part": public, **phases}.items():
            yield plain(DIN_PHASES, phase, party, 1000 * seconds, "ms")


def din_times(found: fsl.TwoServerMeasured, *, verify: bool) -> Iterator[Cell]:
    """Seconds of each party; a server's in blocks' time, and what it hashes."""
    name, suffix = title(kernels()[0]), "" if verify else UNCHECKED
    leader, helper = sum(found.leader.values()), sum(found.helper.values())
    for row, paper, round_, plan, most in (
        ("client", PAPER_CLIENT_SECONDS, found.client, found.client_plan, CLIENT_TARGET),
        ("leader", PAPER_SERVER_SECONDS, leader, found.server_plan, None),
        ("helper", PAPER_SERVER_SECONDS, helper, found.server_plan, None),
    ):
        note = f"{name}, one core; {at_most(round_, most)}public part: {plan:.2g} s more"
        yield compared(DIN, row + suffix, "CPU seconds", paper, round_, "s", note)
    for row, round_, hashed in (
        ("leader", leader, found.hashed[0]),
        ("helper", helper, found.hashed[1]),
    ):
        billions = round_ / found.block / 1e9
        most = BLOCKS_TARGETS[verify]
        note = f"{at_most(billions, most)}a block takes {1e9 * found.block:.2f} ns"
        yield plain(DIN, row + suffix, "blocks' time", billions, "billion", note)
        note = f"{at_most(hashed, HASHED_TARGET)}SHA-256, received or sent"
        yield plain(DIN, row + suffix, "bytes hashed", hashed, "per byte", note)


MADE: Final[dict[str, Callable[[Request], Iterator[Cell]]]] = {
    "table3": scale_cells,
    "table4": bin_cells,
    "table5": time_cells,
    "table6": byte_cells,
    "din": din_cells,
}
PARTS: Final = tuple(MADE)
DEFAULT: Final = PARTS
TAKES: Final = ()
"""Nothing is trained here, so there are no seeds, rounds or data sets to choose."""
