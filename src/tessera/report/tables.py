"""Figures for other programs: CSV, DataFrames, SVG, and short HTML for a notebook."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from tessera.errors import ConfigError
from tessera.report import document
from tessera.report.markup import Markup, tag


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without nesting: bytes by category become their sum, lists are left out."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            numbers = [one for one in value.values() if isinstance(one, int | float)]
            if numbers and len(numbers) == len(value):
                found[name] = sum(numbers)
        elif not isinstance(value, list | tuple):
            found[name] = value
    return found


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Flat records as columns; what one of them lacks is None."""
    rows = [flat(record) for record in records]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """With a header; None is an empty field."""
    columns, out = columns_of(records), io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(zip(*columns.values(), strict=True))
    return out.getvalue()


def as_frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame."""
    try:
        pandas = import_module("pandas")
    except ImportError as absent:
        raise ConfigError(
            "a DataFrame needs pandas, which is not installed",
            hint="install pandas, or take `rounds`, which are plain dictionaries",
        ) from absent
    return pandas.DataFrame(columns_of(records))


def card(title: str, facts: Mapping[str, Any], *more: Markup) -> str:
    """A few facts under a title, as HTML."""
    rows = [
        tag("tr", tag("th", str(name), style="text-align:left"), tag("td", str(value)))
        for name, value in facts.items()
    ]
    return str(tag("div", tag("b", title), tag("table", *rows), *more))


def standalone(chart: Markup) -> str:
    """A chart of a page as an SVG of its own, in the page's colours on white."""
    sheet = (
        f"svg {{ {document.LIGHT} background: #fff; }} {document.CHARTS} {document.curve_rules()}"
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" '
    opened, _, rest = str(chart).replace("<svg ", head, 1).partition(">")
    return f"{opened}><style>{sheet}</style>{rest}\n"
