"""DerivedMap: the public map from a table's rows to those of a derived table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.errors import ConfigError
from tessera.learning.tables.arrays import Ids, distinct
from tessera.learning.tables.spec import TableSpec


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
