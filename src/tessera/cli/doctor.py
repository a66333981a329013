"""`tessera doctor`: what this machine has, and what to do about what is missing.

`examine` looks and returns one frozen `Report`; `to_json` and `show` print it. Nothing that is
optional is imported to find out whether it is there.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, TextIO

import numpy as np
import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tessera.cli.format import SLOWER, AsJson
from tessera.crypto import dpf, kernel
from tessera.crypto.cuckoo import Layout, SimpleTable, bins_for
from tessera.crypto.dpf import Values
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.kernel import REFERENCE
from tessera.crypto.ring import Ring
from tessera.errors import __version__, install
from tessera.learning.machine import physical_memory, usable_cores
from tessera.learning.models.lag_library import lag_library
from tessera.report.numbers import figure, memory, size

CPU_FEATURES: Final = ("aes", "avx2", "vaes", "avx512f")
"""What the kernel can use, by the names Linux gives them."""

CPU_INFO: Final = Path("/proc/cpuinfo")

DATA_VARIABLE: Final = "TESSERA_DATA"

DATA_SETS: Final = {
    "amazon-electronics": "amazon_train",
    "hetrec2011-lastfm-2k": "user_artists.dat",
    "ml-100k": "u.data",
    "ml-1m": "ratings.dat",
    "mnist": "train-images-idx3-ubyte",
    "taobao-alimama-sample": "alimama_sampled_train.txt",
    "taobao-userbehavior-sample": "UserBehavior.csv",
    "trec": "train_5500.label",
}
"""Folder and main file, plain or with `.gz`, of each set that tests and benchmarks may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The computer, as far as a round's speed depends on it."""

    python: str
    platform: str
    cpu: str
    features: Mapping[str, bool] | None  # None: this system does not say
    cores: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Which implementation makes masks and keys here, why that one, and how fast it is.

    Speeds are of one core, of the kernel in use and of the reference.
    """

    kernel: str
    available: tuple[str, ...]
    reason: str
    gigabytes_per_second: Mapping[str, float]  # of masks
    rows_per_second: Mapping[str, float]  # of a table, evaluated for one client of two servers
    todo: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something tessera runs without, and what it would add."""

    name: str
    purpose: str
    found: str | None
    todo: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSets:
    """Published data sets in the folder that the environment names."""

    folder: str | None
    found: tuple[str, ...]
    missing: tuple[str, ...]
    todo: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was found."""

    version: str
    machine: Machine
    masks: Masks
    parts: tuple[Part, ...]
    data: DataSets


def examine() -> Report:
    """Look at this machine; takes about half a second, most of it timing the kernel."""
    return Report(
        version=__version__,
        machine=examine_machine(),
        masks=examine_masks(),
        parts=tuple(optional_parts()),
        data=examine_data(os.environ.get(DATA_VARIABLE)),
    )


def examine_machine() -> Machine:
    cpu, features = read_cpu(CPU_INFO)
    return Machine(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu or platform.processor() or platform.machine(),
        features=features,
        cores=usable_cores(),
        memory_bytes=physical_memory(),
    )


def read_cpu(source: Path) -> tuple[str | None, dict[str, bool] | None]:
    """Model name and features from a file laid out as Linux's cpuinfo, as far as it has them."""
    try:
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None, None
    fields: dict[str, str] = {}
    for line in lines:  # one block per core, all alike: the first of each field is enough
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip().lower(), value.strip())
    flags = fields.get("flags", fields.get("features"))  # x86 and ARM name them differently
    if flags is None:
        return fields.get("model name"), None
    present = frozenset(flags.split())
    return fields.get("model name"), {name: name in present for name in CPU_FEATURES}


def examine_masks() -> Masks:
    described = kernel.describe()
    names = tuple(dict.fromkeys((described.name, REFERENCE)))
    reason, todo = explain(described, os.environ.get(kernel.VARIABLE))
    return Masks(
        kernel=described.name,
        available=described.available,
        reason=reason,
        gigabytes_per_second={name: round(mask_speed(name), 2) for name in names},
        rows_per_second={name: round(point_speed(name)) for name in names},
        todo=todo,
    )


def explain(described: kernel.Description, wanted: str | None) -> tuple[str, str | None]:
    """Why this kernel and not a faster one, and what to do about it if something can be done."""
    fastest = described.available[0]
    if described.name != fastest:
        return f"{kernel.VARIABLE} is {wanted}", f"unset {kernel.VARIABLE} to use {fastest}"
    if described.reason is None:
        return "the fastest this machine can run", None
    if fastest == REFERENCE:
        return described.reason, rebuild_advice()
    return f"the fastest that runs here: {described.reason}", None


def rebuild_advice() -> str:
    again = "install tessera-fl again"
    if first_program("cc", "gcc", "clang", "cl"):
        return f"{again}: there is a compiler now"
    get = "xcode-select --install" if sys.platform == "darwin" else system_install("gcc")
    return f"{get}, then {again}"


def mask_speed(name: str, *, seconds: float = 0.1) -> float:
    """Gigabytes of mask one core makes and adds in a second, over a vector that stays in cache."""
    total = np.zeros(1 << 16, dtype=np.uint32)
    keys, nonces, signs = bytes(range(128)), bytes(64), [1, -1] * 4  # eight streams
    with kernel.use(name) as backend:
        backend.accumulate(total, total.itemsize, keys, nonces, signs, 0)  # the first call warms
        made, start = 0, time.process_time()
        while (taken := time.process_time() - start) < seconds:
            backend.accumulate(total, total.itemsize, keys, nonces, signs, 0)
            made += total.nbytes * len(signs)
    return made / taken / 1e9


def point_speed(name: str, *, rows: int = 1 << 15, seconds: float = 0.1) -> float:
    """Rows of a table that one core evaluates in a second, for a client with a hundred of them."""
    layout = Layout.of(SimpleTable.of(rows, bins_for(100), 0), Values(Ring(32), 19))
    forest, report_id = layout.forest, bytes(dpf.REPORT_ID_BYTES)
    nowhere = np.full(forest.bins, -1, dtype=np.int64)
    nothing = np.zeros((forest.bins, 19), dtype=np.uint32)
    pair = dpf.gen(forest, nowhere, nothing, report_id=report_id, entropy=SystemEntropy())
    keys = dpf.ServerKeys.of(pair.public, pair.seeds[0], party=0, report_id=report_id)
    leaves = forest.empty()
    with kernel.use(name):
        dpf.evaluate(forest, [keys], leaves)  # the first call warms
        done, start = 0, time.process_time()
        while (taken := time.process_time() - start) < seconds:
            dpf.evaluate(forest, [keys], leaves)
            done += rows
    return done / taken


def optional_parts() -> Iterator[Part]:
    """What single commands build on; a secure sum needs none of it."""
    for name, purpose, get in (
        ("torch", "to train models", "pip install torch==2.13.0"),
        ("pyarrow", "to read data of your own", "pip install pyarrow"),
        ("dp-accounting", "to account for differential privacy", "pip install dp-accounting"),
        ("starlette", "to run servers and clients over HTTP", install("http")),
    ):
        found = installed_version(name)
        yield Part(name=name, purpose=purpose, found=found, todo=None if found else get)
    loops = lag_library()
    yield Part(
        name=LOOPS,
        purpose='to train model = "next" faster',
        found="built" if not loops.reason else None,
        todo=f"{loops.reason}: {rebuild_advice()}" if loops.reason else None,
    )


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def first_program(*names: str) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


def system_install(package: str) -> str:
    manager = "brew" if sys.platform == "darwin" else "apt-get"
    return f"{manager} install {package}"


def examine_data(folder: str | None) -> DataSets:
    """Which of the known sets are in `folder`; a set counts if its main file is there."""
    if not folder:
        return DataSets(
            folder=None,
            found=(),
            missing=tuple(DATA_SETS),
            todo=f"export {DATA_VARIABLE}=FOLDER to run the tests on published data",
        )
    found = tuple(name for name, main in DATA_SETS.items() if has_file(Path(folder, name), main))
    missing = tuple(name for name in DATA_SETS if name not in found)
    todo = None
    if not found:
        todo = f"point {DATA_VARIABLE} at the folder that holds the sets' folders"
    elif missing:
        todo = f"add what the tests should use: {', '.join(missing)}"
    return DataSets(folder=folder, found=found, missing=missing, todo=todo)


def has_file(folder: Path, name: str) -> bool:
    return (folder / name).is_file() or (folder / f"{name}.gz").is_file()


def doctor(as_json: AsJson = False) -> None:
    """What this machine has, and how to add what is missing."""
    report = examine()
    if as_json:
        typer.echo(to_json(report))
    else:
        show(report)


def to_json(report: Report) -> str:
    return json.dumps(asdict(report), indent=2)


POINTS: Final = "point functions"
LOOPS: Final = "training loops in C"
NAME_WIDTH: Final = max(map(len, (POINTS, DATA_VARIABLE, LOOPS)))

MARKS: Final = {
    True: Text("ok", style="green"),
    False: Text("--", style="yellow"),
    None: Text(""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of what is shown: present, absent (with a next step), or a plain fact."""

    name: str
    value: str
    present: bool | None = None
    note: str = ""
    todo: str | None = None


def lines(report: Report) -> dict[str, list[Line]]:
    """The report as people read it, by heading."""
    machine, masks, data = report.machine, report.masks, report.data
    return {
        "machine": [
            Line(name="tessera", value=report.version),
            Line(name="python", value=machine.python),
            Line(name="system", value=machine.platform),
            Line(name="cpu", value=machine.cpu, note=describe_features(machine.features)),
            Line(name="cores", value=str(machine.cores)),
            Line(name="memory", value=memory(machine.memory_bytes)),
        ],
        "masks and point functions": [
            Line(
                name="kernel",
                value=masks.kernel,
                present=masks.todo is None,
                note=masks.reason,
                todo=masks.todo,
            ),
            Line(name="available", value=", ".join(masks.available)),
            Line(name="masks", value=describe_speed(masks), note="one core, in cache"),
            Line(
                name=POINTS,
                value=describe_points(masks),
                note="one core; rows evaluated for one client of two servers",
            ),
        ],
        "optional parts (a secure sum needs none of them)": [
            Line(
                name=part.name,
                value=part.found or "missing",
                present=part.found is not None,
                note=part.purpose,
                todo=part.todo,
            )
            for part in report.parts
        ],
        "data sets": [
            Line(
                name=DATA_VARIABLE,
                value=data.folder or "not set",
                present=bool(data.found),
                note=f"found: {', '.join(data.found) or 'none'}",
                todo=data.todo,
            ),
        ],
    }


def describe_features(features: Mapping[str, bool] | None) -> str:
    if features is None:
        return "this system does not list the features of its CPU"
    return ", ".join(name if there else f"no {name}" for name, there in features.items())


def describe_speed(masks: Masks) -> str:
    ours = masks.gigabytes_per_second[masks.kernel]
    return f"{size(1e9 * ours)}/s{against_reference(masks, masks.gigabytes_per_second)}"


def describe_points(masks: Masks) -> str:
    """Where compiled code matters more than for masks, and so does its lack."""
    ours = masks.rows_per_second[masks.kernel]
    if masks.kernel == REFERENCE:
        return f"{figure(ours / 1e6)} million rows/s; compiled code is {SLOWER} faster"
    return f"{figure(ours / 1e6)} million rows/s{against_reference(masks, masks.rows_per_second)}"


def against_reference(masks: Masks, speeds: Mapping[str, float]) -> str:
    if masks.kernel == REFERENCE:
        return ""
    return f", {figure(speeds[masks.kernel] / speeds[REFERENCE])} times the reference"


def show(report: Report, *, stream: TextIO | None = None) -> None:
    """A table on a terminal; elsewhere one plain line for each thing, for grep and for mail."""
    console = Console(file=stream, highlight=False)
    if console.is_terminal:
        for heading, rows in lines(report).items():
            console.print(Text(heading, style="bold"))
            console.print(Padding(table(rows), (0, 0, 1, 0)))
        return
    for heading, rows in lines(report).items():
        print(f"{heading}:", file=console.file)
        for row in rows:
            note = f"  ({row.note})" if row.note else ""
            todo = f"  what to do: {row.todo}" if row.todo else ""
            print(
                f"  {row.name + ':':<{NAME_WIDTH + 1}} {row.value}{note}{todo}", file=console.file
            )


def table(rows: Sequence[Line]) -> Table:
    """One heading's rows: mark, name, and everything else in a column that folds."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=2)
    grid.add_column(width=NAME_WIDTH)
    grid.add_column(overflow="fold")
    for row in rows:
        value = Text(row.value)
        if row.note:
            value.append(f"  {row.note}", style="dim")
        if row.todo:
            value.append(f"\nwhat to do: {row.todo}", style="yellow")
        grid.add_row(MARKS[row.present], row.name, value)
    return grid
