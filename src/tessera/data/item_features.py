"""Public attributes of items, from a second file: a line for each item, a column for each of them.

The first column, or the one that is called as the items of the data are, has the item; every other
one is an attribute, whose words are its classes. A cell may have several, with | between them: each
counts a part.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.data.row_names import RowNames
from tessera.errors import ConfigError

MOST_CLASSES: Final = 64
"""Of an attribute: transitions between them are so many squared."""
ALSO: Final = "|"


def item_features(
    path: Path | str, names: RowNames, *, items: int, column: str
) -> dict[str, npt.NDArray[np.float64]]:
    """Of each attribute (items, classes); rows of items without a line are zeros."""
    lines = _read(Path(path))
    head, body = lines[0], lines[1:]
    at = head.index(column) if column in head else 0
    others = [k for k in range(len(head)) if k != at]
    if not others or not body:
        raise ConfigError(
            f"{path}: no attributes of items in it",
            hint=f"a header, then a line for each item: {column or 'item'},category",
        )
    rows = _rows(path, [line[at] for line in body], names)
    found = {}
    for k in others:
        cells = [[w for word in line[k].split(ALSO) if (w := word.strip())] for line in body]
        words = sorted({word for cell in cells for word in cell})
        if len(words) > MOST_CLASSES:
            raise ConfigError(
                f"{path}: {len(words):,} classes of {head[k]!r}; {MOST_CLASSES} are the most, as "
                "each pair of them is counted",
                hint="wider classes, such as the decade in place of the year",
            )
        classes = np.zeros((items, len(words)))
        number = {word: place for place, word in enumerate(words)}
        for row, cell in zip(rows, cells, strict=True):
            for word in cell:
                classes[row, number[word]] += 1.0 / len(cell)
        found[head[k]] = classes
    return found


def _read(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if any(line)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{path}: attributes of items cannot be read: {error}",
            hint="item_features is a CSV in UTF-8",
        ) from error
    wrong = [at for at, line in enumerate(lines, 1) if len(line) != len(lines[0])]
    if not lines or wrong:
        where = f"line {wrong[0]} has another number of columns" if wrong else "it is empty"
        raise ConfigError(f"{path}: {where}", hint="as many cells in each line as in the header")
    return lines


def _rows(path: Path | str, given: list[str], names: RowNames) -> list[int]:
    """The row of each line's item."""
    row_of = {str(name): names.row(name) for name in names.names}
    unknown = [item for item in given if item not in row_of]
    if unknown:
        raise ConfigError(
            f"{path}: attributes of {len(unknown):,} items that the data does not have, such as "
            f"{unknown[0]!r}",
            hint="leave their lines out, or name them in a public list: [task] dictionary = FILE",
        )
    seen: set[str] = set()
    for item in given:
        if item in seen:
            raise ConfigError(f"{path}: item {item!r} is there twice", hint="one line for each")
        seen.add(item)
    return [row_of[item] for item in given]
