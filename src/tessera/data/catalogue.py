"""ItemCatalogue: the public list of items that a federation agrees on, one id per row of tables.

A client reads its own file by it, and nobody tells anybody what it holds. A catalogue only grows:
`grown` appends ids, rows keep their place, and `room` is how many rows of the tables still wait for
an item. Titles, categories and popularity are public, too, where the file has them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.data import columns, values
from tessera.data.columns import BadLines
from tessera.data.row_names import RowNames
from tessera.data.values import encoded
from tessera.errors import ConfigError

MOST_ITEMS: Final = 2**26
MOST_TEXT: Final = 1_000
"""Characters of an id or a title."""


@dataclass(frozen=True, kw_only=True)
class ItemCatalogue:
    """Ids by row; `titles`, `categories` and `popularity` have one entry for each, or none at all.

    `category_names` are the classes that `categories` counts, -1: none.
    """

    ids: tuple[str, ...] = field(repr=False)
    titles: tuple[str, ...] = field(default=(), repr=False)
    categories: tuple[int, ...] = field(default=(), repr=False)
    category_names: tuple[str, ...] = field(default=(), repr=False)
    popularity: tuple[float, ...] = field(default=(), repr=False)
    room: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rows <= MOST_ITEMS or self.room < 0:
            raise ConfigError(f"a catalogue of {self.rows:,} rows", hint=f"1 to {MOST_ITEMS:,}")
        if len(self._row_of) != len(self.ids):
            raise ConfigError("a catalogue with an id twice", hint="each item once")

    @property
    def rows(self) -> int:
        """Of the tables over items, those without an item yet included."""
        return len(self.ids) + self.room

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {one: row for row, one in enumerate(self.ids)}

    def row(self, one: str) -> int:
        """Of this id; -1 if it is not in the catalogue."""
        return self._row_of.get(one, -1)

    @property
    def names(self) -> RowNames:
        return RowNames(self.ids)

    def title(self, row: int) -> str:
        """What people call it."""
        return (self.titles[row] if self.titles else "") or self.ids[row]

    @property
    def all_titles(self) -> list[str]:
        """Of every row; rows without an item have none."""
        return [*map(self.title, range(len(self.ids))), *[""] * self.room] if self.titles else []

    @property
    def weights(self) -> npt.NDArray[np.float64] | None:
        """How popular each row is said to be; rows without an item not at all."""
        if not self.popularity:
            return None
        return np.concatenate([np.array(self.popularity, np.float64), np.zeros(self.room)])

    @property
    def category_of(self) -> npt.NDArray[np.int64] | None:
        """Of each row; those without one share a last category of their own."""
        if not self.category_names:
            return None
        none = len(self.category_names)
        found = np.full(self.rows, none, np.int64)
        found[: len(self.categories)] = [none if c < 0 else c for c in self.categories]
        return found

    @cached_property
    def digest(self) -> bytes:
        """Of which id is in which row, and what is said of it."""
        return hashlib.sha256(encode_context(Label.CATALOGUE, self.to_json())).digest()

    # --- growing --------------------------------------------------------------------------------

    def grown(self, more: ItemCatalogue) -> ItemCatalogue:
        """With the items of `more` that are new, in the rows that wait; those that are known stay
        as they are. The map to categories is fixed when it is packed: new items have none."""
        new = [row for row, one in enumerate(more.ids) if one not in self._row_of]
        if len(new) > self.room:
            raise ConfigError(
                f"{len(new):,} new items, and the tables have room for {self.room:,}",
                hint="pack with more --room; a federation of another name begins from its model",
            )
        return replace(
            self,
            ids=(*self.ids, *(more.ids[row] for row in new)),
            titles=(*self.titles, *(more.title(row) for row in new)) if self.titles else (),
            categories=(*self.categories, *[-1] * len(new)) if self.categories else (),
            popularity=(*self.popularity, *[0.0] * len(new)) if self.popularity else (),
            room=self.room - len(new),
        )

    def extends(self, earlier: ItemCatalogue) -> bool:
        """Whether it is the earlier one with more items behind."""
        known = len(earlier.ids)
        return (
            self.ids[:known] == earlier.ids
            and self.titles[:known] == earlier.titles
            and self.categories[:known] == earlier.categories
            and self.popularity[:known] == earlier.popularity
            and (self.rows, self.category_names) == (earlier.rows, earlier.category_names)
        )

    # --- as text --------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(
            {
                "ids": self.ids,
                "titles": self.titles,
                "categories": self.categories,
                "category_names": self.category_names,
                "popularity": self.popularity,
                "room": self.room,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> ItemCatalogue:
        """What `to_json` gave; `ConfigError` for anything else."""
        try:
            found = json.loads(text)
            lists = {name: tuple(one) for name, one in found.items() if name != "room"}
            made = cls(room=int(found["room"]), **lists)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"not a catalogue: {error}", hint="pack it again") from error
        kinds: Mapping[str, type[Any]] = {"ids": str, "titles": str, "category_names": str}
        flaws = (
            any(not isinstance(one, kind) for one in getattr(made, name))
            for name, kind in kinds.items()
        )
        lengths = {len(made.ids)} | {
            len(some) for some in (made.titles, made.categories, made.popularity) if some
        }
        if any(flaws) or len(lengths) > 1:
            raise ConfigError("not a catalogue: its columns differ", hint="pack it again")
        return made


def read(
    source: Any,
    *,
    item: str = "item",
    title: str = "",
    category: str = "",
    popularity: str = "",
    room: int = 0,
) -> ItemCatalogue:
    """A catalogue of a CSV or Parquet file or a frame, in its order; each item once.

    Without names of their own, columns that are called "title" and "category" count as such.
    """
    there = columns.names_of(source)
    title = title or ("title" if "title" in there else "")
    named = [one for one in (title, category, popularity) if one]
    table = columns.read(source, [item, *named])
    bad, found = BadLines(table), encoded(table, item)
    first = np.zeros(len(table), np.bool_)
    first[np.unique(found.codes, return_index=True)[1]] = True
    bad.add(found.codes < 0, partial(values.missing, table, item), hint="every line has an item")
    bad.add(
        ~first,
        lambda at: f"item {values.quoted(table, item, at)} a second time",
        hint="each item once in a catalogue",
    )
    counts = values.numbers(table, popularity, bad) if popularity else None
    if counts is not None:
        bad.add(
            ~(np.isfinite(counts) & (counts >= 0)),
            lambda at: f"{popularity!r} is {values.quoted(table, popularity, at)}",
            hint="popularity is a number from 0 up, such as how often it was sold",
        )
    bad.settle(columns.STOP)
    texts = found.texts()
    ids = tuple(texts[code] for code in found.codes.tolist())
    if long := next((one for one in ids if len(one) > MOST_TEXT), ""):
        raise ConfigError(f"{table.where}: an id of {len(long):,} characters", hint=str(MOST_TEXT))
    return ItemCatalogue(
        ids=ids,
        titles=_texts(table, title),
        categories=tuple(encoded(table, category).codes.tolist()) if category else (),
        category_names=tuple(encoded(table, category).texts()) if category else (),
        popularity=() if counts is None else tuple(float(one) for one in counts),
        room=room,
    )


def _texts(table: columns.Columns, column: str) -> tuple[str, ...]:
    if not column:
        return ()
    coded = encoded(table, column)
    said = [*coded.texts(), ""]
    return tuple(said[code][:MOST_TEXT] for code in coded.codes.tolist())
