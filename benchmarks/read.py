"""A table of interactions read and its ids numbered: CPU seconds and added memory, by its form.

The same lines as CSV, Parquet, pandas, polars and Hugging Face `datasets` (those that are
installed), through `tessera.data`, beside a reader that takes CSV line by line with Python's own
parser and numbers ids with dictionaries, as tessera once did. Each is measured in a process of its
own, after its imports; frames are made before the clock starts. All have to give the same rows,
users, times and labels to the bit. Seconds and bytes are the least of three processes each, in
turns.

    python -m benchmarks.read [--lines 2000000] [--json]
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from tessera.data import published

FORMS: Final = ("csv", "parquet", "pandas", "polars", "datasets")
BASELINE: Final = "line by line"
ABSENT: Final = frozenset({"", "nan", "null", "none", "na", "n/a"})
MOST_TIME: Final = "<= 0.125"
MOST_MEMORY: Final = "<= 0.3333"
TURNS: Final = 3


def write(folder: Path, lines: int) -> None:
    """As many lines as asked for of users, items, seconds and labels, as CSV and as Parquet."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "user": pa.array([f"u{k}" for k in rng.integers(0, lines // 40 + 1, lines)]),
            "item": pa.array([f"SKU-{k}" for k in (50_000 * rng.random(lines) ** 2).astype(int)]),
            "time": pa.array(1_600_000_000 + rng.integers(0, 10**8, lines)),
            "label": pa.array(rng.integers(0, 2, lines)),
        }
    )
    plain = arrow_csv.WriteOptions(quoting_style="none")
    arrow_csv.write_csv(table, folder / "lines.csv", plain)
    parquet.write_table(table, folder / "lines.parquet")


def prepared(form: str, folder: Path) -> Any:
    """What a reader is given: a path, or a frame that is in memory already."""
    if form in (BASELINE, "csv"):
        return folder / "lines.csv"
    path = folder / "lines.parquet"
    if form == "pandas":
        import pandas

        return pandas.read_parquet(path)
    if form == "polars":
        import polars

        return polars.read_parquet(path)
    if form == "datasets":
        import datasets

        datasets.disable_progress_bars()
        return datasets.Dataset.from_parquet(str(path), cache_dir=str(folder / "cache"))
    return path


def by_columns(source: Any) -> list[np.ndarray[Any, Any]]:
    """Ours."""
    from tessera.data import columns, values
    from tessera.data.columns import BadLines

    table = columns.read(source, ["user", "item", "time", "label"], distinct=["time"])
    bad = BadLines(table)
    found = [
        values.encoded(table, "user").codes,
        values.encoded(table, "item").codes,
        values.times(table, "time", bad),
        values.labels(table, "label", bad),
    ]
    bad.settle("stop")
    return found


def by_lines(source: Path) -> list[np.ndarray[Any, Any]]:
    """The baseline: the reader of before, with the checks that it made of every line."""
    columns: list[list[str]] = [[] for _ in range(4)]
    places: list[int] = []
    reader = csv.reader((line + "\n" for _, line in published.lines(source)), strict=True)
    width = len(next(reader))
    for fields in reader:
        if len(fields) != width:
            raise SystemExit(f"line {reader.line_num}")
        places.append(reader.line_num)
        for column, field in zip(columns, fields, strict=True):
            column.append(field.strip())
    for column in columns[:2]:
        if any(text.lower() in ABSENT for text in column):
            raise SystemExit("no id")

    def numbered(ids: list[str]) -> np.ndarray[Any, Any]:
        rows = {one: row for row, one in enumerate(sorted(set(ids)))}
        return np.fromiter((rows[one] for one in ids), dtype=np.int64, count=len(ids))

    def numbers(texts: list[str]) -> np.ndarray[Any, Any]:
        found = np.empty(len(places), dtype=np.float64)
        for row, text in enumerate(texts):
            value = float(text)
            if not math.isfinite(value):
                raise SystemExit(f"line {places[row]}")
            found[row] = value
        return found

    users, items = numbered(columns[0]), numbered(columns[1])
    return [users, items, numbers(columns[2]), numbers(columns[3])]


def memory(name: str) -> int:
    """Bytes of this process by a name of /proc/self/status: VmRSS now, VmHWM at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {name}")


def measured(form: str, folder: Path) -> dict[str, Any]:
    """In a process of its own: CPU seconds, bytes above what was there before, and a digest."""
    source = prepared(form, folder)
    read: Callable[[Any], list[np.ndarray[Any, Any]]] = by_columns
    if form == BASELINE:
        read = by_lines
    else:
        from tessera.data import delimited

        delimited.load()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at what there is now
    before, begin = memory("VmRSS"), time.process_time()
    found = read(source)
    seconds = time.process_time() - begin
    peak = memory("VmHWM")
    digest = hashlib.sha256()
    for column in found:
        digest.update(np.ascontiguousarray(column).data)
    return {"seconds": seconds, "bytes": peak - before, "digest": digest.hexdigest()}


def in_a_process(form: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.read", "--form", form, "--folder", str(folder)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def least(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The least that any of them took; all have to give the same data."""
    if len({turn["digest"] for turn in turns}) > 1:
        raise SystemExit("other data when read again")
    return {**turns[0], **{key: min(turn[key] for turn in turns) for key in ("seconds", "bytes")}}


def rows(lines: int) -> list[machine.Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, lines)
        forms = [f for f in FORMS if f in ("csv", "parquet") or find_spec(f) is not None]
        turns = [
            {form: in_a_process(form, folder) for form in (BASELINE, *forms)} for _ in range(TURNS)
        ]
    found = {form: least([turn[form] for turn in turns]) for form in (BASELINE, *forms)}
    base = found.pop(BASELINE)
    if wrong := [form for form, one in found.items() if one["digest"] != base["digest"]]:
        raise SystemExit(f"other data than the baseline's: {', '.join(wrong)}")
    made = []
    for form, one in found.items():
        settings = {"form": form, "lines": lines}
        for what, key, unit, target in (
            ("CPU time", "seconds", "s", MOST_TIME),
            ("added memory", "bytes", "B", MOST_MEMORY),
        ):
            ratio = one[key] / base[key]
            made.append(
                machine.result(
                    what,
                    settings,
                    one[key],
                    unit,
                    base[key],
                    BASELINE,
                    ratio,
                    target,
                    machine.meets(ratio, target),
                )
            )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=2_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.form:
        print(json.dumps(measured(options.form, options.folder)))
        return 0
    made = rows(options.lines)
    machine.print_report(
        machine.calibrate(), made, title="reading interactions", as_json=options.json
    )
    return machine.exit_status(made, require_peers=False)


if __name__ == "__main__":
    sys.exit(main())
