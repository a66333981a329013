"""Published data sets as files: where they lie, and how their tables, lines and bytes are read.

Nothing is downloaded. A set lies in a folder of its own below the data folder (the argument, or
the variable TESSERA_DATA), under its published names; NAME.gz does where NAME is not there. What is
missing is a DataMissing that says what to fetch; what is broken is a ConfigError that names the
file and the line.

Tables are read as everybody's own files are (`columns.py`); `written` says how one is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data import columns, delimited, values
from tessera.data.columns import BadLines, Columns
from tessera.data.delimited import Dialect
from tessera.errors import ConfigError, DataMissing

Ints = npt.NDArray[np.int64]

VARIABLE: Final = "TESSERA_DATA"
AGAIN: Final = "fetch or copy it again"

_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a published set comes from. Error messages name the first of `folders`."""

    title: str
    publisher: str
    page: str
    folders: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def hint(self) -> str:
        names = ", ".join(self.files)
        return (
            f'get "{self.title}" from {self.publisher} ({self.page}), unpack {names} into '
            f"{self.folders[0]}/ below your data folder, and name that folder with --data or "
            f"{VARIABLE}"
        )

    def find(self, name: str, folder: Path | str | None = None) -> Path:
        """The file, plain or gzip-compressed, in the set's folder or in the one given itself."""
        root = data_folder(folder, self)
        for place in (*(root / own for own in self.folders), root):
            for path in (place / name, place / f"{name}.gz"):
                if path.is_file():
                    return path
        raise DataMissing(
            f"{self.title}: no {self.folders[0]}/{name} (or {name}.gz) in {root}", hint=self.hint
        )


def data_folder(folder: Path | str | None, source: Source) -> Path:
    chosen = folder if folder is not None else os.environ.get(VARIABLE, "")
    if not str(chosen):
        raise DataMissing(f"{source.title}: no data folder given", hint=source.hint)
    root = Path(chosen)
    if not root.is_dir():
        raise DataMissing(f"{source.title}: {root} is not a folder", hint=source.hint)
    return root


# -- bytes and lines


def content(path: Path, *, most: int) -> bytes:
    """All bytes of a file, if they are no more than these."""
    found = bytearray()
    for piece in delimited.pieces(path):
        found += piece
        if len(found) > most:
            raise ConfigError(f"{path}: over {most:,} bytes", hint="is it the right file?")
    return bytes(found)


def lines(path: Path, *, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """Number and text of each line; blank lines at the end are left out."""
    blank: list[int] = []
    with delimited.readable(path), delimited.opened(path) as file:
        for number, line in enumerate(file, start=1):
            data = (line.removeprefix(_BOM) if number == 1 else line).rstrip(b"\r\n")
            if not data:
                blank.append(number)
                continue
            yield from ((before, "") for before in blank)
            blank = []
            try:
                text = data.decode(encoding)
            except UnicodeDecodeError as wrong:
                raise ConfigError(
                    f"{path}, line {number}: not {encoding} text ({wrong.reason})"
                ) from wrong
            yield number, text


# -- tables


def written(separator: str, *names: str) -> Dialect:
    """How a table is written: between its columns, and their names if it has no header."""
    return Dialect(separator, "utf-8-sig", quoted=False, names=names)


def table(
    path: Path,
    dialect: Dialect,
    wanted: Sequence[str],
    *,
    distinct: Collection[str] = (),
    enough: Callable[[Any], bool] | None = None,
) -> tuple[Columns, BadLines]:
    """The wanted columns as text, and the lines that are not of the table's width."""
    found = columns.of_text(path, dialect, wanted, distinct=distinct, enough=enough)
    return found, BadLines(found)


def refuse(bad: BadLines) -> None:
    """A ConfigError that names the bad lines, if there are any."""
    if bad.count:
        raise bad.refusal(bad.hint or AGAIN)


def integers(
    path: Path,
    dialect: Dialect,
    wanted: Sequence[str],
    *,
    distinct: Collection[str] = (),
    optional: Collection[str] = (),
    words: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Ints, ...]:
    """The wanted columns as whole numbers: -1 where one that is `optional` is empty.

    Of a column in `words` they are the places of its words in that list.
    """
    found, bad = table(path, dialect, wanted, distinct=distinct)
    kept = [
        values.places(found, name, words[name], bad)
        if words and name in words
        else values.whole(found, name, bad, optional=name in optional)
        for name in wanted
    ]
    refuse(bad)
    return tuple(kept)
