"""Columns of any table: CSV, Parquet, a DataFrame, a `datasets.Dataset`; one path, on Arrow.

Frames are recognised by what they can do and not by their library: `__arrow_c_stream__` (pandas,
polars, pyarrow, DuckDB and others), `with_format` (Hugging Face). None of these is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data import delimited
from tessera.data.delimited import Dialect
from tessera.errors import ConfigError

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

PARQUET: Final = (".parquet", ".pq")
TEXTS: Final = (".csv", ".tsv", ".txt")
LISTED: Final = 10
"""Bad lines that are named; the others are counted."""


@dataclass(frozen=True)
class Columns:
    """The columns asked for as an Arrow table, and where a row of it stands in its source."""

    name: str  # of the source, for people
    table: Any = field(repr=False)
    path: Path | None = None
    dialect: Dialect | None = None
    odd: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def where(self) -> str:
        return str(self.path or self.name)

    @property
    def unit(self) -> str:
        return "row" if self.dialect is None else "line"

    @cached_property
    def _odd(self) -> Ints:
        return np.array([record for record, _ in self.odd], dtype=np.int64)

    def records(self, rows: Ints) -> Ints:
        """The records of these rows: counted from 1, a header included."""
        if self.dialect is None:
            return rows + 1
        # Rows are records below the header, less the odd ones before them.
        first = self.dialect.first
        kept = self._odd - np.arange(len(self._odd)) - first
        return np.asarray(rows + first + np.searchsorted(kept, rows, side="right"))

    def places(self, records: Sequence[int]) -> list[int]:
        """What to call these records in a message: lines of text, rows of a table."""
        if self.dialect is None or self.path is None:
            return list(records)
        lines = delimited.lines_of(self.path, self.dialect, records)
        return [lines[record] for record in records]


def read(
    source: Any,
    wanted: Sequence[str],
    *,
    separator: str | None = None,
    encoding: str | None = None,
    distinct: Collection[str] = (),
) -> Columns:
    """The wanted columns of a path or a frame; those that are mostly `distinct` are said to be."""
    if not isinstance(source, str | Path):
        return _of_frame(source, wanted)
    path = Path(source)
    if path.is_dir():
        return _of_folder(path, wanted, separator, encoding)
    if path.suffix in PARQUET:
        return _of_parquet(path, wanted, distinct)
    return of_text(path, delimited.sniff(path, separator, encoding), wanted, distinct=distinct)


def of_text(
    path: Path,
    dialect: Dialect,
    wanted: Sequence[str],
    *,
    distinct: Collection[str] = (),
    enough: Callable[[Any], bool] | None = None,
) -> Columns:
    """The wanted columns of a file that is written in this dialect; see `delimited.read`."""
    _check(str(path), delimited.header(path, dialect), wanted, text=True)
    found = delimited.read(path, dialect, wanted, distinct=distinct, enough=enough)
    return Columns(path.name, found.table, path, dialect, found.odd)


def names_of(source: Any) -> list[str]:
    """All column names."""
    if not isinstance(source, str | Path):
        return list(_as_table(source).column_names)
    path = Path(source)
    if path.is_dir():
        return names_of(_files(path)[0])
    if path.suffix in PARQUET:
        return list(_schema(path).names)
    return delimited.header(path, delimited.sniff(path, None, None))


def _check(where: str, names: Sequence[str], wanted: Sequence[str], *, text: bool = False) -> None:
    for name in wanted:
        if name in names:
            continue
        if text and all(one.replace(".", "", 1).lstrip("-").isdecimal() for one in names):
            raise ConfigError(
                f"{where}, line 1: numbers where the names of the columns are due",
                hint="put a header line above the data",
            )
        near = get_close_matches(name, names, n=1)
        raise ConfigError(
            f"{where}: no column {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}",
        )


# -- Parquet


def _schema(path: Path) -> Any:
    pa = delimited.load()
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        return pa.parquet.read_schema(path)
    except (pa.arrow.ArrowException, OSError, ValueError) as broken:
        raise _not_parquet(path, broken) from broken


def _of_parquet(path: Path, wanted: Sequence[str], distinct: Collection[str]) -> Columns:
    pa = delimited.load()
    schema = _schema(path)
    _check(str(path), list(schema.names), wanted)
    kept = list(dict.fromkeys(wanted))
    words = [
        name
        for name in kept
        if name not in distinct and pa.arrow.types.is_string(schema.field(name).type)
    ]
    try:
        with pa.parquet.ParquetFile(
            path, read_dictionary=words, memory_map=True, pre_buffer=False
        ) as file:
            table = file.read(columns=kept, use_threads=False)
    except (pa.arrow.ArrowException, OSError, ValueError) as broken:
        raise _not_parquet(path, broken) from broken
    if not table.num_rows:
        raise ConfigError(f"{path}: no rows")
    return Columns(path.name, table, path)


def _not_parquet(path: Path, broken: Exception) -> ConfigError:
    return ConfigError(f"{path}: not readable as Parquet ({broken})", hint="write it again")


# -- folders


def _files(folder: Path) -> list[Path]:
    """The tables in a folder, by name."""
    found = sorted(path for path in folder.iterdir() if path.suffix in (*PARQUET, *TEXTS))
    if not found:
        raise ConfigError(
            f"{folder}: no tables in it", hint=f"files that end in {', '.join((*TEXTS, *PARQUET))}"
        )
    return found


def _of_folder(
    folder: Path, wanted: Sequence[str], separator: str | None, encoding: str | None
) -> Columns:
    """All its tables, one behind the other; each has all columns."""
    pa = delimited.load()
    found = [
        read(path, wanted, separator=separator, encoding=encoding).table for path in _files(folder)
    ]
    try:
        table = pa.arrow.concat_tables(
            [one.cast(_plain(one.schema)) for one in found], promote_options="permissive"
        )
    except (pa.arrow.ArrowException, TypeError) as error:
        raise ConfigError(
            f"{folder}: its tables do not fit together ({error})", hint="the same columns in each"
        ) from error
    return Columns(folder.name, table)


def _plain(schema: Any) -> Any:
    """Without dictionaries, which differ from file to file."""
    pa = delimited.load()
    kinds = pa.arrow.types
    return pa.arrow.schema(
        [
            (one.name, one.type.value_type if kinds.is_dictionary(one.type) else one.type)
            for one in schema
        ]
    )


# -- frames


def _as_table(frame: Any) -> Any:
    pa = delimited.load()
    try:
        if hasattr(frame, "with_format") and hasattr(frame, "column_names"):
            frame = frame.with_format("arrow")[:]  # a Hugging Face Dataset, its selection applied
        if hasattr(frame, "collect_schema") and hasattr(frame, "collect"):
            frame = frame.collect()  # a polars LazyFrame
        if isinstance(frame, pa.arrow.Table):
            return frame
        return pa.arrow.table(frame)
    except (pa.arrow.ArrowException, TypeError, ValueError, AttributeError) as wrong:
        raise ConfigError(
            f"{type(frame).__name__} is not a table ({wrong})",
            hint="a DataFrame of pandas or polars, an Arrow table, a Hugging Face Dataset, or the "
            "path of a CSV or Parquet file",
        ) from wrong


def _of_frame(frame: Any, wanted: Sequence[str]) -> Columns:
    name = type(frame).__name__
    table = _as_table(frame)
    _check(name, list(table.column_names), wanted)
    if not table.num_rows:
        raise ConfigError(f"{name}: no rows")
    return Columns(name, table.select(list(dict.fromkeys(wanted))))


# --- bad lines ------------------------------------------------------------------------------------
#
# Bad lines of a table: the first ten by line and reason, and how many; refused, or left out.


STOP: Final = "stop"
SKIP: Final = "skip"
MOST_BAD: Final = 0.01
"""Share of a table that "skip" leaves out at most: more is no slip, but a column misread."""


@dataclass
class BadLines:
    """Collects what is wrong with a table. Of a line with several faults the first counts."""

    columns: Columns
    good: Mask = field(init=False, repr=False)
    hint: str | None = None
    _reasons: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    _hinted: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.good = np.ones(len(self.columns), dtype=np.bool_)

    def add(self, wrong: Mask, reason: Callable[[int], str], *, hint: str | None = None) -> None:
        """Rows that are wrong; the reason is asked for by row, for those that may be listed."""
        new = np.flatnonzero(wrong & self.good)
        if not len(new):
            return
        self.good[new] = False
        if hint is not None and len(new) > self._hinted:  # what mends most of the lines
            self.hint, self._hinted = hint, len(new)
        for row in new[:LISTED].tolist():
            self._reasons[row] = reason(row)

    @property
    def count(self) -> int:
        return len(self.columns.odd) + int((~self.good).sum())

    def listed(self) -> list[tuple[int, str]]:
        """Line and reason of the first bad lines."""
        rows: Ints = np.array(sorted(self._reasons), dtype=np.int64)
        numbers = self.columns.records(rows).tolist()
        found = [*zip(numbers, (self._reasons[int(row)] for row in rows), strict=True)]
        found = sorted([*found, *self.columns.odd[:LISTED]])[:LISTED]
        places = self.columns.places([record for record, _ in found])
        return [(place, reason) for place, (_, reason) in zip(places, found, strict=True)]

    def settle(self, on_bad: str) -> dict[str, Any]:
        """Refuse, or say what is left out; the facts."""
        if not self.count:
            return {}
        unit = self.columns.unit
        if on_bad == SKIP and self.good.any() and not self.too_many:
            return {
                f"bad {unit}s, left out": self.count,
                f"the first bad {unit}s": [f"{unit} {at}: {why}" for at, why in self.listed()],
            }
        hint = self.hint or (
            "a text with the separator in it has to stand in quotes; separator and encoding say "
            "how the file is written"
        )
        if self.too_many:
            hint += f"; more than {MOST_BAD:.0%} of a file is never left out"
        elif self.good.any():
            hint += '; on_bad = "skip" leaves bad lines out, and counts them'
        raise self.refusal(hint)

    @property
    def too_many(self) -> bool:
        """Whether so many are bad that leaving them out would leave out a part of the data.

        A few are all listed, however short the table is.
        """
        total = len(self.columns) + len(self.columns.odd)
        return self.count > max(LISTED, MOST_BAD * total)

    def refusal(self, hint: str) -> ConfigError:
        """The error that names the bad lines, of which there is one at least."""
        total, unit = len(self.columns) + len(self.columns.odd), self.columns.unit
        listed = self.listed()
        if self.count == 1:
            at, why = listed[0]
            return ConfigError(f"{self.columns.where}, {unit} {at}: {why}", hint=hint)
        lines = "".join(f"\n  {unit} {at}: {why}" for at, why in listed)
        more = f", the first {len(listed)}" if self.count > len(listed) else ""
        return ConfigError(
            f"{self.columns.where}: {self.count:,} of {total:,} {unit}s are bad{more}:{lines}",
            hint=hint,
        )
