"""A user's own interactions, from CSV or Parquet: one line per user, item and, if known, outcome.

Ids may be any text. Users are numbered (a user's own row never leaves the device). Items need
rows that all clients agree on without telling each other what they have:

- `ids="dictionary"`: a public file with one id per line; the line's number is the row. An id not
  in it is *cold*: its interactions are dropped, or (`unknown="row"`) all share one last row.
  Without a file the dictionary is made of this one, which suits a simulation and nothing else.
- `ids="hash"`: row = keyed hash of the id modulo `buckets`. No file, no cold ids; ids that fall
  into one bucket share a row. The key is public and hides nothing: all have to use the same.

Whose device holds a line, and whom it is about, are two questions: `client` and `subject` name the
columns that answer them, and both are `user` where they are left out. So shops can be clients and
shoppers the people in them (`data/subjects.py`). Lines without a subject are kept and counted: what
becomes of them is decided where people are protected.

What was cold or fell together is counted among the facts. A click is a label of 1, or a value of at
least `threshold`. Without a label every line is a click, and negatives are drawn (see
`clicks.with_negatives`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Label
from tessera.data import files
from tessera.data.clicks import Ints, Log, check, click_data, with_negatives
from tessera.data.examples import NONE, ClientData
from tessera.data.subjects import held_by
from tessera.errors import ConfigError

KEY: Final = Label.HASHED_IDS.encode()
"""The default key of the hash. Public, as any other would be."""

MAX_BUCKETS: Final = 2**32
MAX_MAPPED: Final = 2**26
"""Rows that can have categories: the map from rows to categories is an array."""
_MAX_KEY: Final = 64  # bytes, of BLAKE2b
_NOT_A_VALUE: Final = frozenset({"", "nan", "null", "none", "na", "n/a"})
_TRUTH: Final = {"true": 1.0, "false": 0.0}
_PARQUET: Final = (".parquet", ".pq")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns asked for, as text, and where each row stands in the file."""

    path: Path
    unit: str  # what a place counts: lines of text, rows of a table
    places: list[int] = field(repr=False)
    values: dict[str, list[str]] = field(repr=False)

    def error(self, row: int, message: str, *, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.path}, {self.unit} {self.places[row]}: {message}", hint=hint)


def read(
    path: Path | str,
    *,
    user: str = "user",
    item: str,
    client: str | None = None,
    subject: str | None = None,
    time: str | None = None,
    label: str | None = None,
    threshold: float | None = None,
    category: str | None = None,
    ids: str = "dictionary",
    dictionary: Path | str | None = None,
    unknown: str = "drop",
    buckets: int = 2**20,
    key: bytes = KEY,
    negatives: int = 1,
    history: int = 20,
    test_share: float = 0.2,
    separator: str | None = None,
    encoding: str = "utf-8",
    seed: int = 0,
) -> ClientData:
    """Interactions as click examples; the first arguments name columns of the file.

    Without `time` the lines of a user count as in order. Times are seconds since 1970, or dates
    as in ISO 8601 (without a zone: UTC).
    """
    source = Path(path)
    name = source.name
    check(name, history=history, test_share=test_share)
    _check(name, ids, unknown, buckets, key, label, threshold, dictionary)
    holder, person = client or user, subject or user
    wanted = list(
        dict.fromkeys(c for c in (holder, person, item, time, label, category) if c is not None)
    )
    columns = _parquet(source, wanted) if source.suffix in _PARQUET else None
    if columns is None:
        by = separator or ("\t" if ".tsv" in source.suffixes else ",")
        columns = _csv(source, wanted, by, encoding)
    for column in dict.fromkeys((holder, item)):
        _refuse_missing(columns, column)
    who, clients = _numbered(columns.values[holder])
    whom, subjects = _people(columns.values[person])
    # A person at a client; whoever is not named counts as one more, and comes last.
    pairs, pair = np.unique(
        who * (subjects + 1) + np.where(whom < 0, subjects, whom), return_inverse=True
    )
    pair = pair.reshape(-1).astype(np.int64)
    if ids == "hash":
        rows, items, facts = _hashed(columns.values[item], buckets, key)
    else:
        rows, items, facts = _looked_up(columns.values[item], dictionary, unknown)
    when = None if time is None else _times(columns, time)
    clicked = np.ones(len(rows), dtype=np.bool_)
    if label is not None:
        clicked = _clicked(columns, label, threshold)
    category_of, categories = None, None
    if category is not None:
        if items > MAX_MAPPED:
            raise ConfigError(
                f"{name}: categories for {items} rows", hint=f"at most {MAX_MAPPED} buckets"
            )
        category_of, categories, doubts = _categories(columns.values[category], rows, items)
        facts["items with several categories, the first counts"] = doubts
    known = rows >= 0
    if not known.any():
        raise ConfigError(f"{source}: no item of it is in the dictionary")
    when = None if when is None else when[known]
    log, held = Log.sorted(pair[known], rows[known], clicked[known], when), None
    if label is None:
        pool = None if ids == "hash" or dictionary is None else np.arange(items)
        sampled = with_negatives(
            log,
            users=len(pairs),
            items=items,
            each=negatives,
            seed=seed,
            catalogue=pool,
            test_share=test_share,
        )
        log, held = sampled.log, sampled.held
        whence = "the items of the same part" if pool is None else "the dictionary"
        facts["click"] = f"every interaction; each beside {negatives} drawn evenly from {whence}"
    else:
        rule = "" if threshold is None else f" of at least {threshold:g}"
        facts["click"] = f"{label}{rule or ' is 1'}"
    data = click_data(
        name,
        log,
        users=len(pairs),
        items=items,
        history=history,
        test_share=test_share,
        held=held,
        category_of=category_of,
        categories=categories,
        rate=label is not None,
        facts={
            "source": name,
            "interactions": len(rows),
            "order": "as in the file" if time is None else f"by {time}",
            **facts,
        },
    )
    if client is None and subject is None:
        return data  # a user is a client and a person
    of = pairs[np.concatenate([data.train["user"], data.test["user"]])]
    people = of % (subjects + 1)
    moved = held_by(
        data,
        of // (subjects + 1),
        np.where(people == subjects, NONE, people),
        clients=len(clients),
        subjects=subjects,
    )
    return replace(data, **moved)


def _check(
    name: str,
    ids: str,
    unknown: str,
    buckets: int,
    key: bytes,
    label: str | None,
    threshold: float | None,
    dictionary: Path | str | None,
) -> None:
    if ids not in ("dictionary", "hash"):
        raise ConfigError(f"{name}: ids = {ids!r}", hint='"dictionary" or "hash"')
    if unknown not in ("drop", "row"):
        raise ConfigError(f"{name}: unknown = {unknown!r}", hint='"drop" or "row"')
    if not 1 <= buckets <= MAX_BUCKETS:
        raise ConfigError(f"{name}: {buckets} buckets", hint=f"1 to {MAX_BUCKETS}")
    if not 1 <= len(key) <= _MAX_KEY:
        raise ConfigError(f"{name}: a key of {len(key)} bytes", hint=f"1 to {_MAX_KEY} bytes")
    if ids == "hash" and dictionary is not None:
        raise ConfigError(f"{name}: a dictionary and a hash", hint="choose one of them")
    if threshold is not None and (label is None or not math.isfinite(threshold)):
        raise ConfigError(
            f"{name}: threshold = {threshold} without a label column, or not a number",
            hint="label names the column that is compared with the threshold",
        )


# -- columns of text


def _csv(path: Path, wanted: Sequence[str], separator: str, encoding: str) -> Columns:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if len(separator) != 1:
        raise ConfigError(f"{path}: the separator {separator!r} is not one character")
    reader = csv.reader(_text(path, encoding), delimiter=separator, strict=True)
    try:
        header = [one.strip() for one in next(reader, [])]
        if not header:
            raise ConfigError(f"{path}: empty", hint="the first line names the columns")
        places: list[int] = []
        kept = [_column(path, header, name) for name in wanted]
        values: list[list[str]] = [[] for _ in wanted]
        for fields in reader:
            if len(fields) != len(header):
                raise ConfigError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields where the header has "
                    f"{len(header)}",
                    hint="a text with the separator in it has to stand in quotes",
                )
            places.append(reader.line_num)
            for column, place in zip(values, kept, strict=True):
                column.append(fields[place].strip())
    except csv.Error as wrong:
        raise ConfigError(f"{path}, line {reader.line_num}: {wrong}") from wrong
    if not places:
        raise ConfigError(f"{path}: a header and no line below it")
    return Columns(path, "line", places, dict(zip(wanted, values, strict=True)))


def _text(path: Path, encoding: str) -> Iterator[str]:
    try:
        for _, line in files.lines(path, encoding=encoding):
            yield line + "\n"
    except LookupError as unknown:
        raise ConfigError(f"{path}: no encoding {encoding!r}", hint='such as "utf-8"') from unknown


def _column(path: Path, header: Sequence[str], name: str) -> int:
    if name in header:
        return list(header).index(name)
    if all(one.replace(".", "", 1).lstrip("-").isdecimal() for one in header):
        raise ConfigError(
            f"{path}, line 1: numbers where the names of the columns are due",
            hint="put a header line above the data",
        )
    near = get_close_matches(name, header, n=1)
    raise ConfigError(
        f"{path}: no column {name!r}",
        hint=f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(header)}",
    )


def _parquet(path: Path, wanted: Sequence[str]) -> Columns:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as absent:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow", hint="pip install 'tessera[parquet]'"
        ) from absent
    try:
        names = list(parquet.read_schema(path).names)
        for name in wanted:
            _column(path, names, name)
        table = parquet.read_table(path, columns=list(dict.fromkeys(wanted)))
        values = {
            name: ["" if one is None else str(one) for one in table.column(name).to_pylist()]
            for name in wanted
        }
    except (ValueError, OSError, NotImplementedError) as broken:
        raise ConfigError(f"{path}: not readable as Parquet ({broken})") from broken
    if not table.num_rows:
        raise ConfigError(f"{path}: no rows")
    return Columns(path, "row", list(range(1, table.num_rows + 1)), values)


# -- values


def _refuse_missing(columns: Columns, name: str) -> None:
    for row, text in enumerate(columns.values[name]):
        if text.lower() in _NOT_A_VALUE:
            raise columns.error(row, f"no {name!r}", hint="every line needs a user and an item")


def _numbers(columns: Columns, name: str, what: str) -> npt.NDArray[np.float64]:
    found = np.empty(len(columns.places), dtype=np.float64)
    for row, text in enumerate(columns.values[name]):
        try:
            value = float(text)
        except ValueError:
            value = _TRUTH.get(text.lower(), math.nan) if what == "label" else _moment(text)
        if not math.isfinite(value):
            raise columns.error(row, f"{name!r} is not a {what}: {text[:40]!r}")
        found[row] = value
    return found


def _times(columns: Columns, name: str) -> npt.NDArray[np.float64]:
    found = _numbers(columns, name, "time")
    if (found < 0).any():
        row = int(np.argmax(found < 0))
        raise columns.error(row, f"{name!r} is before 1970: {columns.values[name][row]}")
    return found


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _clicked(columns: Columns, name: str, threshold: float | None) -> npt.NDArray[np.bool_]:
    found = _numbers(columns, name, "label")
    if threshold is not None:
        return np.asarray(found >= threshold)
    wrong = (found != 0) & (found != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise columns.error(
            row,
            f"{name!r} is {columns.values[name][row]}, neither 0 nor 1",
            hint="threshold = 4 makes every value of 4 or more a click",
        )
    return np.asarray(found == 1)


def _people(named: list[str]) -> tuple[Ints, int]:
    """The person of each line, NONE where it names nobody, and how many there are."""
    people = sorted({one for one in named if one.lower() not in _NOT_A_VALUE})
    known = {one: row for row, one in enumerate(people)}
    found = np.fromiter((known.get(one, NONE) for one in named), np.int64, count=len(named))
    return found, len(known)


# -- ids to rows


def _numbered(ids: list[str]) -> tuple[Ints, dict[str, int]]:
    rows = {one: row for row, one in enumerate(sorted(set(ids)))}
    return np.fromiter((rows[one] for one in ids), dtype=np.int64, count=len(ids)), rows


def _looked_up(
    ids: list[str], dictionary: Path | str | None, unknown: str
) -> tuple[Ints, int, dict[str, Any]]:
    if dictionary is None:
        rows, known = _numbered(ids)
        return rows, len(known), {"rows": f"a dictionary made of this file, {len(known)} ids"}
    known = read_dictionary(dictionary)
    cold = len(known) if unknown == "row" else -1
    rows = np.fromiter((known.get(one, cold) for one in ids), dtype=np.int64, count=len(ids))
    strangers = [one for one in ids if one not in known]
    fate = "share the last row" if unknown == "row" else "left out"
    facts = {
        "rows": f"the dictionary {Path(dictionary).name}, {len(known)} ids",
        "ids not in the dictionary": len(set(strangers)),
        f"interactions with them, {fate}": len(strangers),
    }
    return rows, len(known) + (unknown == "row"), facts


def read_dictionary(path: Path | str) -> dict[str, int]:
    """A public list of ids, one per line: each id's row."""
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"{source}: no such dictionary", hint="a text file with one id per line")
    rows: dict[str, int] = {}
    for line, text in files.lines(source):
        one = text.strip()
        if not one or one in rows:
            what = f"{one[:40]!r} a second time" if one else "empty"
            raise ConfigError(f"{source}, line {line}: {what}", hint="one id per line, each once")
        rows[one] = len(rows)
    if not rows:
        raise ConfigError(f"{source}: empty", hint="a text file with one id per line")
    return rows


def bucket(one: str, *, buckets: int, key: bytes = KEY) -> int:
    """The row of an id under the keyed hash: 64 bits of BLAKE2b, modulo the number of rows."""
    digest = blake2b(one.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "big") % buckets


def _hashed(ids: list[str], buckets: int, key: bytes) -> tuple[Ints, int, dict[str, Any]]:
    rows = {one: bucket(one, buckets=buckets, key=key) for one in set(ids)}
    facts = {
        "rows": f"a keyed hash into {buckets} rows, {len(rows)} ids",
        "ids that share a row with another, beyond the first": len(rows) - len(set(rows.values())),
    }
    return np.fromiter((rows[one] for one in ids), np.int64, count=len(ids)), buckets, facts


def _categories(names: list[str], rows: Ints, items: int) -> tuple[Ints, int, int]:
    """The category of each row of the items (the first it is listed with), how many, and doubts.

    Rows without one share a last category of their own.
    """
    given = [row for row, one in enumerate(names) if one.lower() not in _NOT_A_VALUE]
    kinds, known = _numbered([names[row] for row in given])
    places = np.array(given, dtype=np.int64)
    inside = rows[places] >= 0
    item, kind = rows[places][inside], kinds[inside]
    category_of = np.full(items, len(known), dtype=np.int64)
    category_of[item[::-1]] = kind[::-1]
    doubts = len(np.unique(item[category_of[item] != kind]))
    return category_of, len(known) + bool((category_of == len(known)).any()), doubts
