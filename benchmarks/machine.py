"""The machine under a benchmark: what it has, how fast its parts are, and how figures are printed.

A time says little without the machine it was taken on. Every benchmark therefore calibrates where
it runs, in CPU seconds of one thread, and reports ratios: to these limits, or to a baseline in the
same process. `print_report` writes what all benchmarks write, a table or one JSON object with
`machine` and `results`. Run by itself this file prints the machine alone.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, TextIO

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tessera.crypto import kernel

CHUNK: Final = 256 * 1024  # small enough for the second-level cache, large enough to hide the call
REPEATS: Final = 3
FEATURES: Final = frozenset({"aes", "ssse3", "avx2", "vaes", "avx512f", "avx512bw", "avx512vl"})

Row = dict[str, Any]  # one entry of `results`, as it goes into JSON


def calibrate() -> dict[str, Any]:
    """Cores, CPU and the speeds that bound a secure sum here; takes about a second."""
    model, flags = _cpu()
    in_use = kernel.describe()
    return {
        "cores": _cores(),
        "cpu": model,
        "features": sorted(FEATURES & flags),
        "python": platform.python_version(),
        "kernel": in_use.name,
        "kernels": list(in_use.available),
        "aes_ctr_bytes_per_second": _aes_ctr_rate(),
        "aes_limit_blocks_per_second": _aes_limit_rate(),
        "memory_add_bytes_per_second": _memory_add_rate(),
    }


def cpu_seconds(work: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """Median CPU seconds of the whole process over several runs of `work`."""
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return median(taken)


def result(
    what: str,
    settings: Mapping[str, Any],
    ours: float | None,
    unit: str,
    baseline: float | None,
    baseline_name: str | None,
    ratio: float | None,
    target: str | None,
    ok: bool | None,
) -> Row:
    """One row of `results`. `ok` is None where there is no target, or no peer to compare with."""
    return {
        "what": what,
        "settings": dict(settings),
        "ours": _for_json(ours),
        "unit": unit,
        "baseline": _for_json(baseline),
        "baseline_name": baseline_name,
        "ratio": _for_json(ratio),
        "target": target,
        "ok": ok,
    }


def meets(ratio: float | None, target: str) -> bool | None:
    """Whether a ratio meets a target such as ">= 20" or "<= 0.5"; None without a ratio."""
    parsed = re.fullmatch(r"(>=|<=|<|>) ([0-9.]+)", target)
    if parsed is None:
        raise ValueError(f"target {target!r} is not a comparison and a number, as in '>= 20'")
    if ratio is None:
        return None
    bound = float(parsed[2])
    return {
        ">=": ratio >= bound,
        "<=": ratio <= bound,
        ">": ratio > bound,
        "<": ratio < bound,
    }[parsed[1]]


def exit_status(rows: Sequence[Row], *, require_peers: bool) -> int:
    """1 if a row has a target and nothing to hold against it, and peers are required; else 0.

    A missed target is printed, not an exit status: times depend on the machine.
    """
    unknown = any(row["target"] is not None and row["ok"] is None for row in rows)
    return 1 if require_peers and unknown else 0


def print_report(
    machine: Mapping[str, Any], rows: Sequence[Row], *, title: str, as_json: bool
) -> None:
    """The figures on stdout: one JSON object, or the machine in two lines and a table."""
    if as_json:
        json.dump({"machine": dict(machine), "results": list(rows)}, sys.stdout, allow_nan=False)
        sys.stdout.write("\n")
        return
    print_table(machine, rows, title=title)


def print_table(
    machine: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    title: str,
    file: TextIO | None = None,
) -> None:
    """The same as a table. Settings wrap; figures never do."""
    file = file or sys.stdout
    width = None if file.isatty() else 140  # a pipe has no width, and 80 would cut the figures
    console = Console(file=file, width=width, highlight=False)
    console.print(describe(machine), soft_wrap=True)
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("what", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for heading in ("ours", "baseline", "ratio", "target", "ok"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        name = f" ({row['baseline_name']})" if row["baseline_name"] else ""
        table.add_row(
            row["what"],
            ", ".join(f"{key} {_setting(value)}" for key, value in row["settings"].items()),
            _quantity(row["ours"], row["unit"]),
            _quantity(row["baseline"], row["unit"]) + name,
            _figure(row["ratio"]),
            row["target"] or "",
            {True: "yes", False: "NO", None: "-"}[row["ok"]],
        )
    console.print(table)


def describe(machine: Mapping[str, Any]) -> str:
    """What `calibrate` found, in two lines."""
    limit = machine["aes_limit_blocks_per_second"]
    native = "" if limit is None else f", AES limit {limit / 1e9:.2f} billion blocks/s"
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({' '.join(machine['features'])}), "
        f"kernel {machine['kernel']}\n"
        f"one core: AES-CTR {machine['aes_ctr_bytes_per_second'] / 1e9:.1f} GB/s{native}, "
        f"in-place add {machine['memory_add_bytes_per_second'] / 1e9:.1f} GB/s"
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # what this process may use, not what is built in
    return os.cpu_count() or 1


def _cpu() -> tuple[str, frozenset[str]]:
    """Model name and feature flags; elsewhere than on Linux only what `platform` knows."""
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in listing.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))  # the latter on ARM
    return fields.get("model name", platform.machine()), frozenset(flags.split())


def _aes_ctr_rate() -> float:
    """`cryptography`'s AES-128-CTR, bytes per second, a chunk at a time into the same buffer."""
    chunks = 512
    zeros, out = bytes(CHUNK), bytearray(CHUNK + 15)
    encryptor = Cipher(algorithms.AES128(bytes(16)), modes.CTR(bytes(16))).encryptor()

    def work() -> None:
        for _ in range(chunks):
            encryptor.update_into(zeros, out)

    return chunks * CHUNK / cpu_seconds(work)


def _aes_limit_rate() -> float | None:
    """Blocks per second of the fastest native path, whichever is in use; None without one."""
    fastest = kernel.available()[0]
    if fastest == "reference":
        return None
    blocks = 1 << 26
    with kernel.use(fastest) as backend:
        return blocks / cpu_seconds(lambda: backend.aes_limit(blocks))


def _memory_add_rate() -> float:
    """Bytes per second of `acc += x` on arrays larger than any cache; bytes of x are counted."""
    acc, x = np.zeros(1 << 23, np.uint64), np.ones(1 << 23, np.uint64)
    return x.nbytes / cpu_seconds(lambda: np.add(acc, x, out=acc))


def _for_json(value: float | None) -> float | str | None:
    """JSON has no infinity; a NaN would be a mistake of the benchmark."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        raise ValueError("a benchmark's figure is not a number")
    return "inf" if value > 0 else "-inf"


def _setting(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return f"{value:,}"


def _quantity(value: float | str | None, unit: str) -> str:
    return "-" if value is None else f"{_figure(value)} {unit}"


def _figure(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == 0 or abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    print_report(calibrate(), [], title="", as_json="--json" in sys.argv[1:])
