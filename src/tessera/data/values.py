"""What the columns of a table mean: ids, numbers and times, from any type that Arrow has for them.

The same value in a CSV, a Parquet file or a frame gives the same result to the bit: the id 42 is
the text "42" whether it was written as text, as an integer or as a whole float.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data import delimited
from tessera.data.columns import BadLines, Columns, Ints, Mask
from tessera.data.delimited import REPLACED
from tessera.errors import ConfigError

Floats = npt.NDArray[np.float64]

NOT_A_VALUE: Final = ("", "nan", "null", "none", "na", "n/a", "<na>", "nat")
MANY: Final = 16
"""Chunks of a column from which on it is copied into one."""
PIECE: Final = 1 << 18
"""Rows that are made into text at a time."""
_WHOLE: Final = r"^-?[0-9]{1,18}$"
"""Digits that always fit 64 bits."""
_ABSENT: Final = ("", "NULL")
_TRUTH: Final = {"true": 1.0, "false": 0.0}

EARLIEST: Final = datetime(1990, 1, 1, tzinfo=UTC).timestamp()
LATEST: Final = datetime(2100, 1, 1, tzinfo=UTC).timestamp()

_CLOCK: Final = r"[ T]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,9})?)?"
_DAY: Final = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
FORMS: Final = {
    "seconds since 1970": r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$",
    "dates without a zone": rf"^{_DAY}({_CLOCK})?$",
    "dates with a zone": rf"^{_DAY}{_CLOCK}(Z|[+-]\d\d(:?\d\d)?)$",
}
"""The forms that a time may have."""
_SLASHED: Final = (
    r"^(?P<a>\d{1,2})(?P<mark>[/.])(?P<b>\d{1,2})[/.](?P<year>\d{4})"
    rf"(?P<clock>{_CLOCK.replace('(', '(?:')})?$"
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A column of ids: the names in ascending order, and the number of each row's, -1 for none."""

    names: Any = field(repr=False)  # an Arrow array of text
    codes: Ints = field(repr=False)

    def only(self, good: Mask) -> Encoded:
        """The good rows, and the names that occur in them."""
        codes = self.codes[good]
        used = np.zeros(len(self.names), dtype=np.bool_)
        used[codes[codes >= 0]] = True
        if used.all():
            return Encoded(self.names, codes)
        place = np.append(np.cumsum(used) - 1, -1)
        pa = delimited.load()
        return Encoded(self.names.filter(pa.arrow.array(used)), place[codes])

    def texts(self) -> list[str]:
        return list(self.names.to_pylist())


def encoded(columns: Columns, name: str) -> Encoded:
    """A column of ids in any type that is written down exactly."""
    pa = delimited.load()
    words = _words(columns, name)
    texts = pa.compute.utf8_trim_whitespace(words.dictionary)
    missing = pa.compute.is_in(
        pa.compute.utf8_lower(texts), value_set=pa.arrow.array(NOT_A_VALUE, texts.type)
    )
    missing = pa.compute.or_kleene(missing, pa.compute.match_substring(texts, REPLACED))
    there = pa.compute.fill_null(pa.compute.invert(missing), False)
    names = pa.compute.unique(texts.filter(there))
    names = names.take(pa.compute.array_sort_indices(names))
    place = pa.compute.index_in(texts, value_set=names)
    return Encoded(names, _taken(words, _numpy(place, -1).astype(np.int64), np.int64(-1)))


def labels(columns: Columns, name: str, bad: BadLines) -> Floats:
    """A column of labels: numbers, or true and false."""
    return _numbers(columns, name, bad, "label")


def numbers(columns: Columns, name: str, bad: BadLines) -> Floats:
    return _numbers(columns, name, bad, "number")


def is_number(columns: Columns, name: str) -> bool:
    """Whether a column holds numbers, going by its type or, of text, by all that it holds."""
    pa = delimited.load()
    kind = columns.table.column(name).type
    types = pa.arrow.types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return True
    if types.is_boolean(kind):
        return False
    texts = (str(one).strip() for one in _words(columns, name).dictionary.to_pylist())
    values = [_number(text) for text in texts if text.lower() not in NOT_A_VALUE]
    return bool(values) and sum(map(math.isfinite, values)) > 0.9 * len(values)


def whole(columns: Columns, name: str, bad: BadLines, *, optional: bool = False) -> Ints:
    """A column of text as whole numbers; where it is optional, an empty field or NULL is -1."""
    texts, codes = _texts(columns, name)
    found, wrong = _integers(texts, absent=_ABSENT if optional else ())
    bad.add(
        wrong if codes is None else wrong[codes],
        lambda row: f"{name!r} is not a whole number: {quoted(columns, name, row)}",
    )
    return found if codes is None else found[codes]


def places(columns: Columns, name: str, words: Sequence[str], bad: BadLines) -> Ints:
    """A column of words from a list, as their places in it."""
    pa = delimited.load()
    texts, codes = _texts(columns, name)
    found = _numpy(pa.compute.index_in(texts, value_set=pa.arrow.array(words)), -1).astype(np.int64)
    found = found if codes is None else found[codes]
    bad.add(
        found < 0,
        lambda row: f"{name!r} is {quoted(columns, name, row)}, not one of {', '.join(words)}",
    )
    return found


def lists(columns: Columns, name: str, bad: BadLines, separator: str = ",") -> tuple[Ints, Ints]:
    """A column of joined whole numbers: all of them in a row, and how many each line has."""
    pa = delimited.load()
    text = columns.table.column(name).cast(pa.arrow.large_string()).combine_chunks()
    split = pa.compute.split_pattern(text, separator)
    found, wrong = _integers(split.flatten())
    line = _numpy(pa.compute.list_parent_indices(split), 0)
    faulty = np.zeros(len(columns), dtype=np.bool_)
    faulty[line[wrong]] = True
    bad.add(faulty, lambda row: f"{name!r} are not whole numbers: {quoted(columns, name, row)}")
    return found, _numpy(pa.compute.list_value_length(split), 0).astype(np.int64)


def _texts(columns: Columns, name: str) -> tuple[Any, Ints | None]:
    """The different texts of a column and which of them each row has; or the text of each row."""
    pa = delimited.load()
    column = columns.table.column(name)
    if pa.arrow.types.is_string(column.type):
        return column.combine_chunks(), None
    words = _words(columns, name)
    return words.dictionary, _numpy(words.indices, 0)


def _integers(texts: Any, absent: Sequence[str] = ()) -> tuple[Ints, Mask]:
    """Texts as whole numbers, -1 for what is absent; and which of them are not."""
    pa = delimited.load()
    good = pa.compute.match_substring_regex(texts, _WHOLE)
    kept = pa.compute.if_else(good, texts, pa.arrow.scalar("-1", texts.type))
    wrong = ~_numpy(good, False)
    if absent:
        wrong &= ~_numpy(
            pa.compute.is_in(texts, value_set=pa.arrow.array(absent, texts.type)), False
        )
    return _numpy(kept.cast(pa.arrow.int64()), -1), wrong


def _numbers(columns: Columns, name: str, bad: BadLines, what: str) -> Floats:
    pa = delimited.load()
    column = columns.table.column(name)
    types = pa.arrow.types
    if types.is_boolean(column.type):
        column = column.cast(pa.arrow.int8())
    if types.is_integer(column.type) or types.is_floating(column.type):
        found = _numpy(column.cast(pa.arrow.float64(), safe=False), math.nan)
    else:
        words = _words(columns, name)
        each = [
            _TRUTH.get(text.strip().lower(), math.nan) if what == "label" else math.nan
            for text in words.dictionary.to_pylist()
        ]
        for at, text in enumerate(words.dictionary.to_pylist()):
            if math.isnan(each[at]):
                each[at] = _number(text)
        found = _taken(words, np.array(each, dtype=np.float64), np.float64(math.nan))
    bad.add(
        ~np.isfinite(found),
        lambda row: f"{name!r} is not a {what}: {quoted(columns, name, row)}",
    )
    return np.asarray(found, dtype=np.float64)


def _number(text: str) -> float:
    try:
        return float(text) if "_" not in text else math.nan
    except ValueError:
        return math.nan


def quoted(columns: Columns, name: str, row: int) -> str:
    """A value as it stands in the source, for a message."""
    value = columns.table.column(name)[row]
    try:
        text = "" if (found := value.as_py()) is None else str(found)
    except (OverflowError, ValueError):  # a time that Python has no name for
        text = str(getattr(value, "value", value.type))
    return repr(text[:40])


def missing(columns: Columns, name: str, row: int) -> str:
    """Why a row has no id."""
    found = quoted(columns, name, row)
    if REPLACED in found and columns.dialect is not None:
        return f"{name!r} is not {columns.dialect.encoding} text: {found}"
    return f"no {name!r}"


def _words(columns: Columns, name: str) -> Any:
    """A column as one dictionary of texts."""
    pa = delimited.load()
    column, types = columns.table.column(name), pa.arrow.types
    if column.num_chunks > MANY:  # dictionaries are unified two by two
        column = pa.arrow.chunked_array([column.combine_chunks()])
    if types.is_dictionary(column.type):
        if not types.is_string(column.type.value_type):
            column = column.cast(
                pa.arrow.dictionary(pa.arrow.int32(), pa.arrow.large_string()), safe=False
            )
    elif types.is_floating(column.type):
        try:
            column = column.cast(pa.arrow.int64())
        except pa.arrow.ArrowInvalid:
            pass  # fractions: not ids, but perhaps labels
    if not types.is_dictionary(column.type):
        try:
            if types.is_string(column.type) or types.is_large_string(column.type):
                column = column.dictionary_encode()
            else:  # piece by piece, so that all of it is never there as text twice
                size = max(PIECE, -(-len(column) // MANY))
                pieces = (column.slice(at, size) for at in range(0, len(column), size))
                column = pa.arrow.chunked_array(
                    [
                        chunk
                        for piece in pieces
                        for chunk in piece.cast(pa.arrow.large_string()).dictionary_encode().chunks
                    ],
                    pa.arrow.dictionary(pa.arrow.int32(), pa.arrow.large_string()),
                )
        except (pa.arrow.ArrowInvalid, pa.arrow.ArrowNotImplementedError) as wrong:
            raise ConfigError(
                f"{columns.where}: column {name!r} is of type {column.type}, not text or numbers"
            ) from wrong
    joined = column.unify_dictionaries().combine_chunks()
    if isinstance(joined, pa.arrow.ChunkedArray):
        joined = pa.arrow.concat_arrays(joined.chunks)
    return joined


def _taken(words: Any, values: npt.NDArray[Any], absent: Any) -> npt.NDArray[Any]:
    """The value of each row's word."""
    codes = _numpy(words.indices, -1)
    return np.asarray(np.append(values, absent)[codes])


def _numpy(column: Any, absent: Any) -> npt.NDArray[Any]:
    """Arrow to NumPy, with `absent` in the place of nulls."""
    pa = delimited.load()
    if column.null_count:
        column = pa.compute.fill_null(column, pa.arrow.scalar(absent, column.type))
    kept: npt.NDArray[Any] = (
        column.to_numpy(zero_copy_only=False)
        if isinstance(column, pa.arrow.Array)
        else column.to_numpy()
    )
    return kept


# -- times


def times(columns: Columns, name: str, bad: BadLines, form: str = "") -> npt.NDArray[Any]:
    """Times that can be ordered: seconds, or microseconds of dates, from 1990 to 2100.

    Numbers are seconds since 1970, or thousandths, millionths or billionths of them. A zone that is
    missing is UTC. Lines may have different forms (`FORMS`, or day, month and year with dots or
    slashes), unless `form` says how all are written.
    """
    pa = delimited.load()
    column, types = columns.table.column(name), pa.arrow.types
    if types.is_date(column.type):
        column = column.cast(pa.arrow.date64(), safe=False).cast(pa.arrow.timestamp("ms"))
    if types.is_timestamp(column.type):
        found = _numpy(_micro(column), -1)
        missing = _numpy(column.is_null(), False)
        bad.add(missing, lambda row: f"{name!r} is not a time: {quoted(columns, name, row)}")
        return _in_range(columns, name, found, found / 1e6, bad)
    if types.is_integer(column.type) or types.is_floating(column.type):
        found = _numpy(column.cast(pa.arrow.float64(), safe=False), math.nan)
        bad.add(
            ~np.isfinite(found),
            lambda row: f"{name!r} is not a time: {quoted(columns, name, row)}",
        )
        found = _in_seconds(found)
        return _in_range(columns, name, found, found, bad)
    try:
        text = column
        if not types.is_string(column.type):
            text = column.cast(pa.arrow.large_string())
    except (pa.arrow.ArrowInvalid, pa.arrow.ArrowNotImplementedError) as wrong:
        raise ConfigError(
            f"{columns.where}: column {name!r} is of type {column.type}, not a time"
        ) from wrong
    return (
        _as_written(columns, name, text, form, bad) if form else _of_text(columns, name, text, bad)
    )


def seconds(found: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Of `times`: since 1970, whichever of the two they are."""
    return np.where(found < 1e11, found, found / 1e6)


def _micro(column: Any) -> Any:
    """Microseconds since 1970; years that do not fit are brought to the edge of what does."""
    pa = delimited.load()
    whole = column.cast(pa.arrow.int64(), safe=False)
    unit = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": -1_000}[column.type.unit]
    if unit < 0:
        return pa.compute.divide(whole, -unit)
    edge = (2**63 - 1) // unit
    return pa.compute.multiply(
        pa.compute.min_element_wise(pa.compute.max_element_wise(whole, -edge), edge), unit
    )


def _of_text(columns: Columns, name: str, text: Any, bad: BadLines) -> npt.NDArray[Any]:
    pa = delimited.load()
    for spaces in (True, False):
        for form in FORMS:
            try:
                found = _cast(text, form)
            except pa.arrow.ArrowInvalid:
                continue
            return _checked(columns, name, found, form, bad)
        if spaces:
            text = pa.compute.utf8_trim_whitespace(text)
    return _in_several_forms(columns, name, text, bad)


def _in_several_forms(
    columns: Columns, name: str, text: Any, bad: BadLines
) -> npt.NDArray[np.float64]:
    """Seconds since 1970, each line by the form that it has."""
    pa = delimited.load()
    found = np.full(len(text), math.nan)
    text = _year_first(columns, name, text, bad)
    for form, pattern in FORMS.items():
        rows = np.flatnonzero(_numpy(pa.compute.match_substring_regex(text, pattern), False))
        if not len(rows):
            continue
        some = text.take(pa.arrow.array(rows))
        try:
            values = _cast(some, form)
        except pa.arrow.ArrowInvalid:  # days that no month has
            values = np.array([_moment(one.as_py(), form) for one in some])
        found[rows] = values if form == next(iter(FORMS)) else values / 1e6
    bad.add(
        ~np.isfinite(found),
        lambda row: f"{name!r} is not a time: {quoted(columns, name, row)}",
        hint="dates such as 2024-08-23 or 23/08/2024, or seconds or milliseconds since 1970; "
        "time_format says how others are written",
    )
    return np.asarray(_in_range(columns, name, found, found, bad))


def _year_first(columns: Columns, name: str, text: Any, bad: BadLines) -> Any:
    """Dates such as 23/08/2024 or 23.8.2024 as 2024-08-23.

    Which of the two is the day is decided by the column: by a number above 12, or by dots, which
    stand after days. Where nothing decides, these lines are bad.
    """
    pa = delimited.load()
    parts = pa.compute.extract_regex(text, _SLASHED)
    rows = np.flatnonzero(_numpy(parts.is_valid(), False))
    if not len(rows):
        return text
    some = parts.take(pa.arrow.array(rows))
    if isinstance(some, pa.arrow.ChunkedArray):
        some = some.combine_chunks()
    one, two = (np.array(some.field(k).to_pylist(), np.int64) for k in ("a", "b"))
    by_day, by_month = bool((one > 12).any()), bool((two > 12).any())
    dotted = all(mark == "." for mark in some.field("mark").to_pylist())
    if by_day == by_month and not (dotted and not by_month):
        unclear = np.zeros(len(text), np.bool_)
        unclear[rows] = True
        bad.add(
            unclear,
            lambda row: f"{name!r} is {quoted(columns, name, row)}: is the day or the month first?",
            hint='time_format = "%d/%m/%Y" if it is the day, "%m/%d/%Y" if it is the month',
        )
        return text
    day, month = (two, one) if by_month else (one, two)
    written = text.to_pylist()
    years, clocks = some.field("year").to_pylist(), some.field("clock").to_pylist()
    for at, row in enumerate(rows.tolist()):
        written[row] = f"{years[at]}-{month[at]:02d}-{day[at]:02d}{clocks[at] or ''}"
    return pa.arrow.array(written, pa.arrow.large_string())


def _as_written(
    columns: Columns, name: str, text: Any, form: str, bad: BadLines
) -> npt.NDArray[np.float64]:
    """Seconds since 1970 of times that are written in this form of `strptime`."""
    known = {one: _by_form(one, form) for one in set(text.to_pylist()) if one is not None}
    found = np.array([known.get(one, math.nan) for one in text.to_pylist()])
    bad.add(
        ~np.isfinite(found),
        lambda row: f"{name!r} is not written as {form!r}: {quoted(columns, name, row)}",
        hint="time_format is as for Python's strptime, such as %d/%m/%Y %H:%M",
    )
    return np.asarray(_in_range(columns, name, found, found, bad))


def _by_form(text: str, form: str) -> float:
    try:
        moment = datetime.strptime(text.strip(), form)
    except ValueError:
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _checked(
    columns: Columns, name: str, found: Floats, form: str, bad: BadLines
) -> npt.NDArray[Any]:
    bad.add(
        ~np.isfinite(found), lambda row: f"{name!r} is not a time: {quoted(columns, name, row)}"
    )
    seconds = found if form == next(iter(FORMS)) else found / 1e6
    return _in_range(columns, name, found, seconds, bad)


def _cast(text: Any, form: str) -> Floats:
    pa = delimited.load()
    if form == "seconds since 1970":
        return _in_seconds(np.asarray(_numpy(text.cast(pa.arrow.float64()), math.nan)))
    zone = "UTC" if form == "dates with a zone" else None
    micro = text.cast(pa.arrow.timestamp("us", zone)).cast(pa.arrow.int64())
    return np.asarray(_numpy(micro, -1).astype(np.float64))


def _moment(text: str, form: str) -> float:
    if form == "seconds since 1970":
        return float(_in_seconds(np.array([float(text)]))[0])
    try:
        moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError:
        return math.nan
    return 1e6 * (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _in_range(
    columns: Columns, name: str, found: npt.NDArray[Any], seconds: Floats, bad: BadLines
) -> npt.NDArray[Any]:
    with np.errstate(invalid="ignore"):
        outside = ~((seconds >= EARLIEST) & (seconds < LATEST))
    bad.add(
        outside,
        lambda row: f"{name!r} is not from 1990 to 2100: {quoted(columns, name, row)}",
        hint="times are dates, or seconds, milliseconds, microseconds or nanoseconds since 1970; "
        "time_format says how others are written, and without a time there is no order",
    )
    return found


def _in_seconds(found: Floats) -> Floats:
    """Numbers since 1970 as seconds, each by its own unit: the years here fit one of them only."""
    with np.errstate(invalid="ignore"):
        for factor in (1e3, 1e6, 1e9):
            fits = (found / factor >= EARLIEST) & (found / factor < LATEST)
            found = np.where(fits, found / factor, found)
    return np.asarray(found, dtype=np.float64)
