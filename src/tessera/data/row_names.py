"""RowNames: the ids of one kind, such as items, and the row of each.

Rows are what a model knows; ids are what its user knows. A run keeps them beside its log,
and an exported model those of its items, so that answers come in the user's own ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowNames:
    """`names[k]` is in row `rows[k]`, or in row k if there are no `rows`.

    With hashed ids several names may share a row, and most rows have none.
    """

    names: Sequence[str] = field(repr=False)
    rows: Ints | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.rows is not None and len(self.rows) != len(self.names):
            raise ConfigError(f"{len(self.names)} ids with {len(self.rows)} rows")

    @classmethod
    def of(cls, ids: npt.NDArray[Any]) -> RowNames:
        """The ids by row, as text."""
        return cls([str(one) for one in ids.tolist()])

    @classmethod
    def numbered(cls, size: int) -> RowNames:
        """For data whose ids are its rows."""
        return cls([str(row) for row in range(size)])

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        rows = range(len(self.names)) if self.rows is None else self.rows.tolist()
        return dict(zip(self.names, rows, strict=True))

    @cached_property
    def _name_of(self) -> dict[int, str]:
        # Of several names in one row the first stands for all.
        return {row: name for name, row in reversed(self._row_of.items())}

    @cached_property
    def filled(self) -> Ints:
        """The rows that have a name, ascending."""
        if self.rows is None:
            return np.arange(len(self.names), dtype=np.int64)
        return np.unique(self.rows)

    @property
    def rows_of(self) -> list[int]:
        """The row of each name."""
        return list(range(len(self.names))) if self.rows is None else list(self.rows.tolist())

    def all_by_row(self, size: int) -> list[str]:
        """The name of each of so many rows, "" where there is none."""
        return [self._name_of.get(row, "") for row in range(size)]

    def row(self, name: object, *, what: str = "id") -> int:
        """The row of a name; a number stands for its digits."""
        found = self._row_of.get(str(name))
        if found is None:
            near = get_close_matches(str(name), self._row_of, n=1) if len(self) < 100_000 else []
            such = near[0] if near else next(iter(self.names), None)
            raise ConfigError(
                f"no {what} {str(name)[:60]!r} among the {len(self):,} of this model",
                hint=None if such is None else f"{'did you mean' if near else 'such as'} {such!r}?",
            )
        return found

    def known(self, names: Iterable[object]) -> Ints:
        """The rows of those names that are known, in the order given."""
        rows = (self._row_of.get(str(name)) for name in names)
        return np.array([row for row in rows if row is not None], dtype=np.int64)

    def name(self, row: int) -> str:
        return self._name_of[int(row)]

    def all_in(self, rows: npt.NDArray[Any]) -> list[str]:
        """Every name in these rows; "" stands for rows that have none."""
        if self.rows is None:
            places = rows[rows < len(self.names)].astype(np.int64)
            unnamed = len(places) < len(rows)
        else:
            places = np.flatnonzero(np.isin(self.rows, rows.astype(np.int64)))
            unnamed = not np.isin(rows.astype(np.int64), self.rows).all()
        return [*(self.names[place] for place in places.tolist()), *([""] if unnamed else [])]

    def as_json(self) -> dict[str, Any]:
        rows = None if self.rows is None else self.rows.tolist()
        return {"names": list(self.names), "rows": rows}

    @classmethod
    def from_json(cls, found: object) -> RowNames:
        """What `as_json` gave; ConfigError for anything else."""
        names = found.get("names") if isinstance(found, Mapping) else None
        rows = found.get("rows") if isinstance(found, Mapping) else None
        good = isinstance(names, list) and all(isinstance(one, str) for one in names)
        if rows is not None:
            good = good and isinstance(rows, list)
            good = good and all(type(row) is int and 0 <= row < 2**63 for row in rows)
        if not good:
            raise ConfigError("not a list of ids and their rows")
        assert isinstance(names, list)
        return cls(names, None if rows is None else np.array(rows, dtype=np.int64))


# --- own names ------------------------------------------------------------------------------------
#
# OwnNames: whose data a client's is, and what its rows are called there.
#
# Federations number and name rows as their plans say. What is the same row of the same person in
# two of them is told by the client's own data: by the id of its item there, never by the row that
# a plan gives it, the name of a table, the number of a client or the name of a federation.


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNames:
    """Of one client: its `person` in the data, where these are, and how their rows are named.

    `source` is a file or a folder. Rows are compared by name where `naming` is the same: the
    reader, its columns, its dictionary and whatever else names may depend on, but not the source.
    `kinds` are the kinds of ids, by table.
    """

    person: str
    source: str
    naming: str
    kinds: Mapping[str, str]
    names: Mapping[str, RowNames] = field(default_factory=dict, repr=False)

    def of(self, rows: Mapping[str, npt.NDArray[np.uint64]]) -> Iterator[tuple[str, str]]:
        """(kind, name) of all ids in these rows; where ids have no names, of the rows."""
        for table, ids in rows.items():
            kind = self.kinds[table]
            names = self.names.get(kind)
            found = map(str, ids.tolist()) if names is None else names.all_in(ids)
            yield from ((kind, name) for name in found)
