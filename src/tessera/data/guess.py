"""Which column of a table is which: by its name first, then by what it holds.

A guess is written into a plan with its comments, to be read and changed; nothing is trained on it
unseen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.data import columns, values
from tessera.data.columns import BadLines
from tessera.errors import ConfigError

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "user": (
        *("user", "customer", "client", "member", "account", "uid", "visitor", "person"),
        *("reviewer", "buyer", "reader", "listener", "who", "session"),
    ),
    "item": (
        *("item", "product", "sku", "article", "asin", "isbn", "movie", "film", "book", "song"),
        *("track", "artist", "good", "what", "iid", "title"),
    ),
    "time": (
        *("timestamp", "datetime", "time", "date", "when", "created", "ordered", "purchased"),
        *("seen", "day", "ts", "at"),
    ),
    "label": ("label", "clicked", "click", "liked", "like", "rating", "stars", "score"),
    "category": ("category", "cat", "genre", "department", "shelf", "brand"),
}
"""Words that name a column, the surest first."""
LIKED: Final = 0.8
"""A rating counts as a click from this share of the highest on: 4 of 5."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Columns by their part; `threshold` is 0 where labels are 0 and 1.

    `doubt` says which column would be the time by its name, if it could be read.
    """

    user: str
    item: str
    time: str = ""
    time_format: str = ""
    label: str = ""
    threshold: float = 0.0
    category: str = ""
    doubt: str = ""

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "doubt"}


def guess(source: Path | str, given: Mapping[str, str] | None = None) -> Guess:
    """The columns of a file; those `given` are taken as they are."""
    names = columns.names_of(source)
    chosen = {part: name for part, name in (given or {}).items() if name}
    form = chosen.pop("time_format", "")
    doubt = ""
    for part, name in chosen.items():
        if name not in names:
            raise ConfigError(
                f"{source}: no column {name!r} for the {part}",
                hint=f"there are: {', '.join(names)}",
            )
    for part, words in NAMES.items():
        if part not in chosen:
            free = [name for name in names if name not in chosen.values()]
            if (found := _named(free, words)) is None:
                continue
            wrong = _unfit(source, part, found, form)
            if wrong is None:
                chosen[part] = found
            elif part == "time":
                doubt = f" that can be read: of {found}, {wrong} (--time-format)"
    for part in ("user", "item"):
        if part not in chosen:
            raise ConfigError(
                f"{source}: which column is the {part}? There are {', '.join(names)}",
                hint=f"say so: --{part} COLUMN",
            )
    threshold = _threshold(source, chosen["label"]) if "label" in chosen else 0.0
    return Guess(**chosen, time_format=form, threshold=threshold, doubt=doubt)


def guess_items(source: Path | str) -> dict[str, str]:
    """Of a file about items: which of its columns are titles, and which few classes."""
    names = columns.names_of(source)
    title = _named(names, ("title", "name", "label", "description")) or ""
    classes = [name for name in names if name != title and _named([name], CLASSES)]
    return {"item_features": str(source), "title": title, "attributes": ",".join(classes)}


CLASSES: Final = (*NAMES["category"], "kind", "type", "year", "group", "section")


def _named(names: Sequence[str], words: Sequence[str]) -> str | None:
    """The first column with the surest word in its name: customer_id has "customer"."""
    parts = {
        name: re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
        for name in names
    }
    for word in words:
        for name, found in parts.items():
            if word in found or f"{word}s" in found or f"{word}id" in found:
                return name
    return None


def _unfit(source: Path | str, part: str, name: str, form: str) -> str | None:
    """Why a column is not what it is taken for; None where most of it is."""
    if part not in ("time", "label"):
        return None
    table = columns.read(source, [name])
    bad = BadLines(table)
    if part == "time":
        values.times(table, name, bad, form)
    else:
        values.labels(table, name, bad)
    if bad.good.mean() > 0.5:
        return None
    at, why = bad.listed()[0]
    return f"{table.unit} {at}: {why}"


def _threshold(source: Path | str, name: str) -> float:
    table = columns.read(source, [name])
    bad = BadLines(table)
    found = values.labels(table, name, bad)[bad.good]
    if set(np.unique(found).tolist()) <= {0.0, 1.0}:
        return 0.0
    return float(math.ceil(LIKED * float(found.max())))
