"""TableSpec: a table's name, shape and first rows. DerivedMap: from its rows to another table's.

Row ids are sorted, distinct uint64 arrays, as a union comes out. An id outside its table is a
`ConfigError`, because it comes from data or a plan; a wrong shape or order is a `MisuseError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tessera.errors import ConfigError, MisuseError
from tessera.learning.tables.arrays import Floats, Ids, distinct
from tessera.learning.tables.initial import (
    RULE,
    ZEROS,
    Distribution,
    Given,
    PerClient,
    Zeros,
    initial_values,
)

MAX_SIZE: Final = 2**64 - 1
"""The most rows of a table: its size, too, has to fit 64 bits."""

MAX_SEED: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A table's name, its shape, and the rule for rows that nobody has updated yet.

    The seed is public and drives initialisation only; no secret may come from it. Two tables of
    one seed begin differently, because the name is part of the key below.
    """

    name: str
    size: int  # m, the number of rows
    width: int  # d, the number of columns
    initial: Distribution = ZEROS
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("table: the name is empty")
        if not 1 <= self.size <= MAX_SIZE:
            raise ConfigError(f"table {self.name!r}: size {self.size} is not in 1 .. 2^64 - 1")
        if not 1 <= self.width < 2**31:
            raise ConfigError(f"table {self.name!r}: width {self.width} is not in 1 .. 2^31 - 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"table {self.name!r}: seed {self.seed} is not in 0 .. 2^64 - 1")

    @property
    def initial_rule(self) -> str:
        """The rule in words; what a store compares, since it does not hold untouched rows."""
        if isinstance(self.initial, Zeros | Given | PerClient):
            return f"{self.initial}"
        return f"{self.initial} from seed {self.seed}, rule {RULE.decode()}"

    def check(self, ids: Ids) -> None:
        """Raise unless `ids` are sorted distinct uint64 row ids of this table."""
        if not isinstance(ids, np.ndarray) or ids.dtype != np.uint64 or ids.ndim != 1:
            raise MisuseError(f"table {self.name!r}: row ids must be a flat uint64 array")
        if ids.size == 0:
            return
        if ids.size > 1 and not bool((ids[1:] > ids[:-1]).all()):
            raise MisuseError(f"table {self.name!r}: row ids must be ascending, without repeats")
        if int(ids[-1]) >= self.size:
            first = int(ids[np.searchsorted(ids, np.uint64(self.size))])
            raise ConfigError(
                f"table {self.name!r}: row id {first} is outside its {self.size} rows",
                hint=f"ids count from 0, so the last is {self.size - 1}: raise the table's size, "
                "or map the ids into it",
            )

    def initial_values(self, ids: Ids) -> Floats:
        """The rows as they are before any update; the same on every machine and in any batch."""
        self.check(ids)
        if isinstance(self.initial, Given | PerClient):
            raise MisuseError(f"table {self.name!r}: its first rows are {self.initial}")
        return initial_values(self.initial, self._key(), ids, self.width)

    def _key(self) -> bytes:
        seed = self.seed.to_bytes(8, "little")
        return hashlib.sha256(RULE + b"\0" + seed + self.name.encode()).digest()[:16]


class DerivedMap:
    """The public map from a table's rows to those of a derived table, such as items -> category.

    It has to be total: the rows of the derived table follow from the parent's and are never
    randomised on their own, so an id without an image would leave a client's set incomplete, and
    visibly so. A hole is an entry below 0, at or above the derived table's size, or missing.
    """

    def __init__(
        self,
        parent: TableSpec,
        derived: TableSpec,
        source: NDArray[np.integer[Any]] | Callable[[Ids], NDArray[np.integer[Any]]],
    ) -> None:
        """`source` is an array over all of the parent's rows, or a function from ids to ids."""
        self.parent = parent
        self.derived = derived
        if isinstance(source, np.ndarray):
            if source.ndim != 1 or source.size != parent.size:
                missing = f"row {source.size}" if source.size < parent.size else "no row"
                raise ConfigError(
                    f"{self}: the map has shape {source.shape}, {parent.name!r} has {parent.size} "
                    f"rows; {missing} of it is left out",
                    hint="give one entry per row of the parent table, in order",
                )
            self._check(np.arange(source.size, dtype=np.uint64), source)
            array = source.astype(np.uint64)
            self._lookup: Callable[[Ids], NDArray[np.integer[Any]]] = lambda ids: array[ids]
        else:
            self._lookup = source

    def __str__(self) -> str:
        return f"derived table {self.derived.name!r} of {self.parent.name!r}"

    def images(self, ids: Ids) -> NDArray[np.uint64]:
        """The derived row of every id, in the order of `ids`; with repeats, not sorted."""
        self.parent.check(ids)
        images = self._lookup(ids)
        if not isinstance(images, np.ndarray) or images.shape != ids.shape:
            raise ConfigError(f"{self}: the map did not return one row per id")
        self._check(ids, images)
        return images.astype(np.uint64)

    def row_ids(self, ids: Ids) -> Ids:
        """The rows of the derived table that belong to `ids`, sorted and without repeats."""
        return distinct(self.images(ids))

    def _check(self, ids: Ids, images: NDArray[np.integer[Any]]) -> None:
        if images.dtype.kind not in "iu":
            raise ConfigError(f"{self}: the map gives {images.dtype}, not whole numbers")
        hole = images < 0
        hole |= images.astype(np.uint64) >= np.uint64(self.derived.size)
        if hole.any():
            at = int(np.argmax(hole))
            raise ConfigError(
                f"{self}: row {int(ids[at])} maps to {int(images[at])}, which is not one of its "
                f"{self.derived.size} rows ({int(np.count_nonzero(hole))} such)",
                hint="give every row of the parent an image; a row 'unknown' can take the rest",
            )
