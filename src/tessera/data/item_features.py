"""What is known and public about items: titles, and attributes by whose transitions pairs with
noise are counted, too.

Both are columns of a second file, `item_features`, with each item once in a column that is called
as in the first, or of the first, where an item's first line counts. Of a second file without named
columns every other one is an attribute. Words are classes; a cell may have several, with | between
them, and each counts a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data import columns, values
from tessera.data.clicks import Ints
from tessera.data.columns import BadLines, Columns
from tessera.data.examples import NONE
from tessera.data.row_names import RowNames
from tessera.data.values import encoded
from tessera.errors import ConfigError

MOST_CLASSES: Final = 64
"""Of an attribute: transitions between them are so many squared."""
ALSO: Final = "|"
UNSOLD: Final = "item_features: items that nobody has"
"""Among facts: how many there are."""


@dataclass(frozen=True, slots=True)
class ItemFeatures:
    """By row: titles, of each attribute (items, classes), and what is worth saying about them."""

    titles: list[str] = field(default_factory=list)
    attributes: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def of_file(
    path: Path | str,
    names: RowNames,
    *,
    items: int,
    item: str,
    title: str | None = None,
    attributes: Sequence[str] = (),
    on_bad: str = columns.STOP,
) -> ItemFeatures:
    """Of a second file; items twice are bad lines. Items that nobody has are left out and counted:
    a catalogue has such. Where less than half of the items are found, the ids do not fit.
    """
    if not title and not attributes:
        attributes = [name for name in columns.names_of(path) if name != item]
    table = columns.read(path, [item, *([title] if title else []), *attributes])
    if not title and not attributes:
        raise ConfigError(
            f"{path}: no attributes of items in it",
            hint=f"a header, then a line for each item: {item},category",
        )
    bad, ids = BadLines(table), encoded(table, item)
    known = dict(zip(names.names, names.rows_of, strict=True))
    place = np.array([*(known.get(one, NONE) for one in ids.texts()), NONE], np.int64)
    first = np.zeros(len(table), np.bool_)
    first[np.unique(ids.codes, return_index=True)[1]] = True
    bad.add(ids.codes < 0, partial(values.missing, table, item), hint="every line has an item")
    bad.add(
        ~first,
        lambda at: f"item {values.quoted(table, item, at)} a second time",
        hint="each item once in item_features",
    )
    facts: dict[str, Any] = {
        f"item_features: {name}": one for name, one in bad.settle(on_bad).items()
    }
    unsold = np.flatnonzero(bad.good & (place[ids.codes] < 0))
    if unsold.size:
        there, every = len(np.unique(place[place >= 0])), len(names.filled)
        if 2 * there < every:
            raise ConfigError(
                f"{path}: only {there:,} of {every:,} items are in it, and item "
                f"{values.quoted(table, item, int(unsold[0]))} is one that nobody has",
                hint="are ids written otherwise there?",
            )
        facts[UNSOLD] = int(unsold.size)
    found = of_lines(
        table,
        np.where(bad.good, place[ids.codes], NONE),
        names,
        items=items,
        title=title,
        attributes=attributes,
    )
    return ItemFeatures(found.titles, found.attributes, {**facts, **found.facts})


def of_lines(
    table: Columns,
    row: Ints,
    names: RowNames,
    *,
    items: int,
    title: str | None = None,
    attributes: Sequence[str] = (),
) -> ItemFeatures:
    """Of lines about the item of a row each (-1: none); of several the first counts."""
    there = np.flatnonzero(row >= 0)
    there = there[np.sort(np.unique(row[there], return_index=True)[1])]
    found = ItemFeatures()
    if title:
        coded = encoded(table, title)
        found.titles.extend(names.all_by_row(items))
        said = [*coded.texts(), ""]
        for at in there.tolist():
            found.titles[row[at]] = said[coded.codes[at]] or found.titles[row[at]]
    for name in attributes:
        coded = encoded(table, name)
        classes = _classes(coded.texts(), f"{table.where}: the attribute {name!r}")
        found.attributes[name] = np.zeros((items, classes.shape[1]))
        found.attributes[name][row[there]] = classes[coded.codes[there]]
        bare = ~found.attributes[name][names.filled].any(axis=1)
        found.facts[f"items without {name}"] = int(np.count_nonzero(bare))
    return found


def _classes(cells: Sequence[str], what: str) -> npt.NDArray[np.float64]:
    """Of each cell the share of each class, and a last line of zeros for a cell that is empty."""
    words = [[w for word in cell.split(ALSO) if (w := word.strip())] for cell in cells]
    number = {word: k for k, word in enumerate(sorted({w for cell in words for w in cell}))}
    if len(number) > MOST_CLASSES:
        raise ConfigError(
            f"{what} has {len(number):,} classes; {MOST_CLASSES} are the most, as each pair of "
            "them is counted",
            hint="a category, a decade, a range of prices; attributes = COLUMN,COLUMN names others",
        )
    found = np.zeros((len(cells) + 1, len(number)))
    for at, cell in enumerate(words):
        for word in cell:
            found[at, number[word]] += 1.0 / len(cell)
    return found
