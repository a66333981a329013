"""OwnNames: whose data a client's is, and what its rows are called there.

Federations number and name rows as their plans say. What is the same row of the same person in two
of them is told by the client's own data: by the id of its item there, never by the row that a plan
gives it, the name of a table, the number of a client or the name of a federation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera.data.row_names import RowNames


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
