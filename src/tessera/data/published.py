"""Published data sets as files: where they lie, and fast reading of tables of whole numbers.

Nothing is downloaded. A set lies in a folder of its own below the data folder (the argument, or
the variable TESSERA_DATA), under its published names; NAME.gz does where NAME is not there. What is
missing or broken is a ConfigError that says what to fetch, or names the file and the line.

The numbers are parsed from blocks of bytes with array operations, about a million lines a second,
so that no data set needs a cache beside it.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

VARIABLE: Final = "TESSERA_DATA"

_BLOCK: Final = 1 << 24
_LONGEST: Final = 18  # digits that always fit 64 bits
_NEWLINE: Final = ord("\n")
_MINUS: Final = ord("-")
_BOM: Final = b"\xef\xbb\xbf"
_ABSENT: Final = (b"", b"NULL")


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
        raise ConfigError(
            f"{self.title}: no {self.folders[0]}/{name} (or {name}.gz) in {root}", hint=self.hint
        )


def data_folder(folder: Path | str | None, source: Source) -> Path:
    chosen = folder if folder is not None else os.environ.get(VARIABLE, "")
    if not str(chosen):
        raise ConfigError(f"{source.title}: no data folder given", hint=source.hint)
    root = Path(chosen)
    if not root.is_dir():
        raise ConfigError(f"{source.title}: {root} is not a folder", hint=source.hint)
    return root


# -- bytes and lines


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file, each ending in a newline; `line` is the first one's number."""

    path: Path
    line: int
    data: bytes

    def error(self, line: int, message: str) -> ConfigError:
        """`line` counts from 0 within the block."""
        return ConfigError(f"{self.path}, line {self.line + line}: {message}")


def blocks(path: Path, *, size: int = _BLOCK) -> Iterator[Block]:
    """A file in pieces that end with a line; CRLF becomes LF, and blank lines at the end go."""
    line, rest = 1, b""
    for piece in _pieces(path, size):
        cut = piece.rfind(b"\n") + 1
        if not cut:
            rest += piece
            continue
        whole = (rest + piece[:cut]).replace(b"\r\n", b"\n")
        rest = piece[cut:]
        body = whole.rstrip(b"\n")
        if body:
            yield Block(path, line, body + b"\n")
            line += body.count(b"\n") + 1
        # Newlines wait for what follows them: blank lines are only forgiven at the end.
        empty = len(whole) - len(body) - bool(body)
        rest = b"\n" * empty + rest
    if rest.strip(b"\r\n"):
        yield Block(path, line, rest.replace(b"\r\n", b"\n").rstrip(b"\n") + b"\n")


def content(path: Path, *, most: int) -> bytes:
    """All bytes of a file, if they are no more than these."""
    found = bytearray()
    for piece in _pieces(path, _BLOCK, text=False):
        found += piece
        if len(found) > most:
            raise ConfigError(f"{path}: over {most:,} bytes", hint="is it the right file?")
    return bytes(found)


def _pieces(path: Path, size: int, *, text: bool = True) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            first = file.read(size)
            yield first.removeprefix(_BOM) if text else first
            while piece := file.read(size):
                yield piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as broken:
        raise ConfigError(
            f"{path}: not a whole gzip file ({broken})", hint="fetch or copy it again"
        ) from broken
    except OSError as refused:
        raise ConfigError(f"{path}: cannot be read ({refused.strerror or refused})") from refused


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def lines(path: Path, *, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """Number and text of each line."""
    for block in blocks(path):
        try:
            text = block.data.decode(encoding)
        except UnicodeDecodeError as wrong:
            line = block.data.count(b"\n", 0, wrong.start)
            raise block.error(line, f"not {encoding} text ({wrong.reason})") from wrong
        yield from enumerate(text.split("\n")[:-1], start=block.line)


# -- tables of whole numbers


@dataclass(frozen=True, slots=True)
class BlockFields:
    """Where the fields of a block's lines begin and end, as (lines, columns)."""

    block: Block
    text: Bytes
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, block: Block, separator: bytes, columns: int) -> BlockFields:
        if len(separator) > 1:
            # A lone ':' stays and is then refused as part of a number.
            block = Block(block.path, block.line, block.data.replace(separator, b"\t"))
            separator = b"\t"
        text = np.frombuffer(block.data, dtype=np.uint8)
        ends = np.flatnonzero((text == ord(separator)) | (text == _NEWLINE))
        closes = np.flatnonzero(text[ends] == _NEWLINE)
        widths = np.diff(closes, prepend=-1)
        wrong = np.flatnonzero(widths != columns)
        if len(wrong):
            line = int(wrong[0])
            raise block.error(line, f"{widths[line]} columns where {columns} are due")
        starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
        return cls(block, text, starts.reshape(-1, columns), ends.reshape(-1, columns))

    def numbers(self, column: int, *, optional: bool = False) -> Ints:
        """A column of whole numbers; where it is optional, an empty field or NULL is -1."""
        starts, ends = self.starts[:, column], self.ends[:, column]
        if not optional:
            return self._parse(starts, ends, np.arange(len(starts)), column)
        value = np.full(len(starts), -1, dtype=np.int64)
        absent = np.logical_or.reduce([self._matches(starts, ends, word) for word in _ABSENT])
        there = np.flatnonzero(~absent)
        value[there] = self._parse(starts[there], ends[there], there, column)
        return value

    def words(self, column: int, words: Sequence[str]) -> Ints:
        """A column of words from a list, as their places in it."""
        starts, ends = self.starts[:, column], self.ends[:, column]
        value = np.full(len(starts), -1, dtype=np.int64)
        for place, word in enumerate(words):
            value[self._matches(starts, ends, word.encode())] = place
        if len(wrong := np.flatnonzero(value < 0)):
            line = int(wrong[0])
            found = self._quoted(int(starts[line]), int(ends[line]))
            raise self.block.error(line, f"column {column + 1}: {found} is none of {list(words)}")
        return value

    def lists(self, column: int, separator: bytes = b",") -> tuple[Ints, Ints]:
        """A column of joined numbers: all of them in a row, and how many each line has."""
        starts, ends = self.starts[:, column], self.ends[:, column]
        breaks = np.flatnonzero(self.text == ord(separator))
        line = np.searchsorted(ends, breaks)
        inside = breaks >= starts[np.minimum(line, len(starts) - 1)]
        breaks, line = breaks[inside], line[inside]
        # Both lists ascend, and the k-th piece begins and ends with the k-th entry of each.
        begins = np.sort(np.concatenate([breaks + 1, starts]))
        stops = np.sort(np.concatenate([breaks, ends]))
        counts = 1 + np.bincount(line, minlength=len(starts))
        where = np.repeat(np.arange(len(starts)), counts)
        return self._parse(begins, stops, where, column), counts.astype(np.int64)

    def _parse(self, starts: Ints, ends: Ints, line: Ints, column: int) -> Ints:
        value = np.zeros(len(starts), dtype=np.int64)
        if not len(starts):
            return value
        negative = self.text[starts] == _MINUS
        digits = ends - starts - negative
        bad = (digits < 1) | (digits > _LONGEST)
        for place in range(min(int(digits.max(initial=0)), _LONGEST)):
            inside = place < digits
            # Bytes below '0' wrap to large values, so one comparison finds every non-digit.
            digit = np.where(inside, self.text[np.maximum(ends - 1 - place, 0)] - np.uint8(48), 0)
            bad |= digit > 9
            value += digit.astype(np.int64) * 10**place
        if bad.any():
            first = int(np.argmax(bad))
            found = self._quoted(int(starts[first]), int(ends[first]))
            raise self.block.error(
                int(line[first]), f"column {column + 1}: {found} is not a whole number"
            )
        return np.where(negative, -value, value)

    def _matches(self, starts: Ints, ends: Ints, word: bytes) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = ends - starts == len(word)
        for place, byte in enumerate(word):
            same &= self.text[np.minimum(starts + place, len(self.text) - 1)] == byte
        return same

    def _quoted(self, start: int, end: int) -> str:
        found = self.block.data[start : min(end, start + 20)].decode("ascii", errors="replace")
        return repr(found) if end - start <= 20 else f"{found!r}..."


def integers(
    path: Path,
    *,
    separator: str,
    columns: int,
    keep: Sequence[int],
    words: Mapping[int, Sequence[str]] | None = None,
    optional: Sequence[int] = (),
    header: str | None = None,
) -> tuple[Ints, ...]:
    """The kept columns of a file, each as one array.

    `words` gives the words that may stand in a column, `optional` the columns that may be empty.
    With `header`, that has to be the first line.
    """
    parts: list[list[Ints]] = [[] for _ in keep]
    for cells in table(path, separator=separator, columns=columns, header=header):
        for part, column in zip(parts, keep, strict=True):
            if words and column in words:
                part.append(cells.words(column, words[column]))
            else:
                part.append(cells.numbers(column, optional=column in optional))
    return tuple(np.concatenate(part) for part in parts)


def table(
    path: Path, *, separator: str, columns: int, header: str | None = None
) -> Iterator[BlockFields]:
    """A file's fields, block by block; an empty file is an error."""
    seen = False
    for block in blocks(path):
        if header is not None and block.line == 1:
            block = _below(block, header)
            if not block.data:
                continue
        seen = True
        yield BlockFields.of(block, separator.encode(), columns)
    if not seen:
        raise ConfigError(f"{path}: empty", hint="fetch or copy it again")


def _below(block: Block, header: str) -> Block:
    first, _, rest = block.data.partition(b"\n")
    if first.strip() != header.encode():
        raise block.error(0, f"the header is not {header!r}")
    return Block(block.path, 2, rest)
