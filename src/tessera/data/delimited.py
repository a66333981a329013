"""Text with separators: which separator, which encoding, which lines cannot be read.

Arrow parses the text. Python's own parser is asked only where a line has to be named in an error:
Arrow counts records, and a record in quotes may take several lines. Blank lines are skipped.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from tessera.errors import ConfigError

# --- arrow ----------------------------------------------------------------------------------------
#
# pyarrow, which is part of the extra `train`: imported when data is read, and not before.


class Arrow(NamedTuple):
    """The modules of pyarrow that are used here."""

    arrow: Any
    compute: Any
    csv: Any
    parquet: Any


def load() -> Arrow:
    try:
        return Arrow(
            import_module("pyarrow"),
            import_module("pyarrow.compute"),
            import_module("pyarrow.csv"),
            import_module("pyarrow.parquet"),
        )
    except ImportError as absent:
        raise ConfigError(
            "reading data needs pyarrow, which is not installed",
            hint="install pyarrow, or this package with its extra `train`",
        ) from absent


# --- delimited ------------------------------------------------------------------------------------

SEPARATORS: Final = (",", ";", "\t", "|")
FALLBACK: Final = "cp1252"
"""What text is read as that is not UTF-8: Western European, as spreadsheets write it."""

REPLACED: Final = "\ufffd"
_PIECE: Final = 1 << 22
_BLOCK: Final = 1 << 24
_JOINED: Final = "\x1f"
"""Arrow's separators have one character: this stands for longer ones."""
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a file is written; `guessed` says which of it was found out and not given.

    Without quotes a line is a record, which is less work to find, and a separator may be longer
    than one character. `names` are the columns of a file that has no header.
    """

    separator: str
    encoding: str
    guessed: tuple[str, ...] = ()
    quoted: bool = True
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar", " ": "space"}
        how = f"separator {names.get(self.separator, self.separator)}, encoding {self.encoding}"
        return f"{how} (found by looking)" if self.guessed else how

    @property
    def first(self) -> int:
        """The number of the first record below the header."""
        return 1 if self.names else 2


@dataclass(frozen=True, slots=True)
class Delimited:
    """The columns asked for, as text, and the records of other widths."""

    table: Any = field(repr=False)
    dialect: Dialect
    odd: tuple[tuple[int, str], ...] = ()
    """Records that are left out: their number, from 1 and with the header, and what is wrong."""


# -- sniffing


def sniff(path: Path, separator: str | None, encoding: str | None) -> Dialect:
    """The dialect: what is given, and for the rest what fits."""
    guessed, quoted = [], True
    if encoding is None:
        encoding, quoted = _encoding(path)
        guessed.append("encoding")
    else:
        try:
            codecs.lookup(encoding)
        except (LookupError, ValueError) as unknown:
            raise ConfigError(
                f"{path}: no encoding {encoding!r}", hint='such as "utf-8"'
            ) from unknown
    if separator is None:
        separator = _separator(path, encoding)
        guessed.append("separator")
    elif len(separator) != 1 or separator in '"\r\n' or not separator.isascii():
        raise ConfigError(
            f"{path}: the separator {separator!r} is not one character of ASCII",
            hint=f"one of {', '.join(map(repr, SEPARATORS))}",
        )
    return Dialect(separator, encoding, tuple(guessed), quoted)


def header(path: Path, dialect: Dialect) -> list[str]:
    """The names of the columns, from the first line unless the dialect has them."""
    if dialect.names:
        return list(dialect.names)
    first = next(_records(path, dialect), (1, []))[1]
    names = [name.strip() for name in first]
    if not any(names):
        raise ConfigError(f"{path}: empty", hint="the first line names the columns")
    return names


def sample(path: Path, dialect: Dialect, lines: int) -> list[list[str]]:
    """The fields of the first lines below the header."""
    return [fields for _, fields in islice(_records(path, dialect), 1, lines + 1)]


def _encoding(path: Path) -> tuple[str, bool]:
    """The encoding, and whether there is a quote anywhere.

    A byte order mark decides; else UTF-8, unless most of what is not ASCII contradicts it.
    """
    right, wrong, quoted = 0, 0, False
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for number, piece in enumerate(pieces(path)):
        if number == 0:
            for mark, name in _MARKS:
                if piece.startswith(mark):
                    return name, True
        quoted = quoted or b'"' in piece
        if piece.isascii() and not decoder.getstate()[0]:
            continue
        text = decoder.decode(piece)
        if not text.isascii():
            broken = text.count(REPLACED)
            wrong += broken
            right += len(_NOT_ASCII.findall(text)) - broken
    return "utf-8" if wrong <= right else FALLBACK, quoted


def _separator(path: Path, encoding: str) -> str:
    if ".tsv" in path.suffixes:
        return "\t"
    first = next(_text(path, encoding), "")
    outside = re.sub(r'"[^"]*"', "", first)
    return max(SEPARATORS, key=lambda one: (outside.count(one), -SEPARATORS.index(one)))


# -- reading


def read(
    path: Path,
    dialect: Dialect,
    wanted: Sequence[str],
    *,
    distinct: Collection[str] = (),
    enough: Callable[[Any], bool] | None = None,
) -> Delimited:
    """The wanted columns as text; of those that are mostly `distinct` no text is looked for twice.

    The others repeat, and Arrow keeps each of their texts once. `enough` is asked after every batch
    of records whether the rest of the file can be left unread.
    """
    names = header(path, dialect)
    for name in wanted:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: {names.count(name)} columns are called {name!r}")
    pa = load()
    repeated = pa.arrow.dictionary(pa.arrow.int32(), pa.arrow.string())
    inside = {name.strip(): name for name in dialect.names or next(_records(path, dialect))[1]}
    kinds = {
        inside[name]: pa.arrow.string() if name in distinct else repeated
        for name in dict.fromkeys(wanted)
    }
    utf8 = dialect.encoding.replace("_", "-").lower() in ("utf-8", "utf-8-sig")
    for replaced in (False, True) if utf8 else (True,):
        odd: list[tuple[int, str]] = []
        try:
            table = _parsed(path, dialect, kinds, odd, enough, replaced=replaced)
            break
        except UnicodeDecodeError:
            continue
        except pa.arrow.ArrowInvalid as wrong:
            if not replaced and "UTF8" in str(wrong):
                continue
            if "Empty CSV" in str(wrong):
                raise ConfigError(f"{path}: empty", hint="copy it again") from wrong
            raise ConfigError(
                f"{path}: not readable as text with separators ({wrong})",
                hint="is a quote not closed?",
            ) from wrong
        except (pa.arrow.ArrowException, OSError) as broken:
            raise ConfigError(
                f"{path}: cannot be read ({broken})", hint="copy it again"
            ) from broken
    if not len(table) and not odd:
        raise ConfigError(
            f"{path}: {'empty' if dialect.names else 'a header and no line below it'}",
            hint="is the file complete?",
        )
    return Delimited(table.rename_columns(list(dict.fromkeys(wanted))), dialect, tuple(odd))


def _parsed(
    path: Path,
    dialect: Dialect,
    kinds: Mapping[str, Any],
    odd: list[tuple[int, str]],
    enough: Callable[[Any], bool] | None,
    *,
    replaced: bool,
) -> Any:
    """The columns of these types; records of another width are added to `odd`."""
    pa = load()

    def note(row: Any) -> str:
        due = (
            f"{row.expected_columns} are due"
            if dialect.names
            else f"the header has {row.expected_columns}"
        )
        odd.append((row.number, f"{row.actual_columns} fields where {due}"))
        return "skip"

    separator = dialect.separator if len(dialect.separator) == 1 else _JOINED
    with (
        _stream(path, dialect, replaced) as stream,
        pa.csv.open_csv(
            stream,
            # One thread: only then are records numbered, and two would not be less work.
            read_options=pa.csv.ReadOptions(
                use_threads=False, block_size=_BLOCK, column_names=list(dialect.names)
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=separator,
                quote_char='"' if dialect.quoted else False,
                newlines_in_values=dialect.quoted,
                invalid_row_handler=note,
            ),
            convert_options=pa.csv.ConvertOptions(
                include_columns=list(kinds), column_types=kinds, strings_can_be_null=False
            ),
        ) as reader,
    ):
        batches = []
        for batch in reader:
            batches.append(batch)
            if enough is not None and enough(batch):
                break
        return pa.arrow.Table.from_batches(batches, schema=reader.schema)


def _stream(path: Path, dialect: Dialect, replaced: bool) -> Any:
    """UTF-8 for Arrow; what cannot be decoded is marked, so that its line can be named."""
    if replaced:
        text = b"".join(pieces(path)).decode(dialect.encoding, "replace")
        data = text.encode("utf-8", "replace")
    elif path.suffix == ".gz" or len(dialect.separator) > 1:
        data = b"".join(pieces(path))
    else:
        return path.open("rb")
    if len(dialect.separator) > 1:
        data = data.replace(dialect.separator.encode(), _JOINED.encode())
    return io.BytesIO(data)


# -- which line a record is in


def lines_of(path: Path, dialect: Dialect, records: Sequence[int]) -> dict[int, int]:
    """The line in which each of these records ends; a header is record 1."""
    wanted, found = set(records), {}
    if wanted:
        last = max(wanted)
        for number, (line, _) in enumerate(_records(path, dialect), start=1):
            if number in wanted:
                found[number] = line
            if number >= last:
                break
    return {record: found.get(record, record) for record in records}


def _records(path: Path, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    if not dialect.quoted:
        for number, line in enumerate(_text(path, dialect.encoding), start=1):
            if text := line.rstrip("\r\n"):
                yield number, text.split(dialect.separator)
        return
    reader = csv.reader(_text(path, dialect.encoding), delimiter=dialect.separator)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as wrong:
        raise ConfigError(f"{path}, line {reader.line_num}: {wrong}") from wrong


def _text(path: Path, encoding: str) -> Iterator[str]:
    with (
        readable(path),
        opened(path) as file,
        io.TextIOWrapper(file, encoding=encoding, errors="replace", newline="") as text,
    ):
        yield from text


def pieces(path: Path) -> Iterator[bytes]:
    with readable(path), opened(path) as file:
        while piece := file.read(_PIECE):
            yield piece


def opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as broken:
        raise ConfigError(
            f"{path}: not a whole gzip file ({broken})", hint="fetch or copy it again"
        ) from broken
    except OSError as refused:
        raise ConfigError(f"{path}: cannot be read ({refused.strerror or refused})") from refused
