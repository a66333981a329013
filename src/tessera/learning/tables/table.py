"""Tables: m rows of d float32 columns, of which a federation reads and updates a few.

    StoredTable     what every table does: values, update, put; and pending, settle for a store
    |- DenseTable   the whole array, for tables that fit in memory and are touched everywhere
    `- LazyTable    only rows that were updated, so that m may be 2^64 - 1

An untouched row is computed from (seed, id) each time it is read, and a row is kept only after an
update with a positive count. So a decoy id in a union leaves no trace in the model: the row of an
id that nobody trained on reads the same before and after (docs/threat-model.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from tessera.errors import ConfigError, MisuseError
from tessera.learning.tables.spec import Given, TableSpec
from tessera.learning.tables.submodel import Counts, Floats, Ids, distinct


class StoredTable(ABC):
    """Values by row id. Reading never changes a table; a row with count 0 is never written.

    `pending` are the rows changed since the last `settle`; a store writes them and settles the
    table once they are durable.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self._pending: Ids = np.empty(0, dtype=np.uint64)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def size(self) -> int:
        """m, the number of rows."""
        return self.spec.size

    @property
    def width(self) -> int:
        """d, the number of columns."""
        return self.spec.width

    @property
    @abstractmethod
    def touched(self) -> int:
        """How many rows no longer follow from (seed, id): what a full checkpoint has to hold."""

    @property
    @abstractmethod
    def touched_ids(self) -> Ids:
        """These rows, ascending."""

    def initial(self, ids: Ids) -> Floats:
        """The rows as they were before any update."""
        return self.spec.initial_values(ids)

    def values(self, ids: Ids) -> Floats:
        """The current rows, as a copy the caller may change."""
        self.spec.check(ids)
        return self._read(ids)

    def update(self, ids: Ids, deltas: Floats, counts: Counts) -> int:
        """Add `deltas` to the rows with a positive count; how many those are.

        A delta is what the row moves by, already averaged; the count only says whether anybody
        trained on it.
        """
        ids, deltas = self._counted(ids, deltas, counts)
        with np.errstate(over="ignore"):  # found below, before anything is written
            values = self._read(ids) + deltas
        return self._keep(ids, values)

    def put(self, ids: Ids, values: Floats, counts: Counts) -> int:
        """Replace the rows with a positive count by `values`; how many those are."""
        return self._keep(*self._counted(ids, values, counts))

    def pending(self) -> tuple[Ids, Floats]:
        """The rows changed since the last `settle`, and what they are now."""
        return self._pending.copy(), self._read(self._pending)

    def settle(self) -> None:
        """Forget which rows have changed: they are durable now."""
        self._pending = self._pending[:0].copy()

    def restore(self, ids: Ids, values: Floats) -> None:
        """Take rows back from a store: kept, and nothing is pending about them."""
        ids, values = self._counted(ids, values, np.ones(ids.size, dtype=np.int64))
        self._write(ids, values)
        if self._pending.size:
            self._pending = self._pending[~np.isin(self._pending, ids)]

    def _counted(self, ids: Ids, values: Floats, counts: Counts) -> tuple[Ids, Floats]:
        """The rows with a positive count, after every check that needs no current value."""
        self.spec.check(ids)
        if values.dtype != np.float32 or values.shape != (ids.size, self.width):
            raise MisuseError(
                f"table {self.name!r}: rows are {values.dtype} {values.shape}, "
                f"expected float32 {(ids.size, self.width)}"
            )
        if counts.shape != ids.shape or counts.dtype.kind not in "iu":
            raise MisuseError(
                f"table {self.name!r}: counts are {counts.dtype} {counts.shape}, "
                f"expected whole numbers {ids.shape}"
            )
        if counts.size and counts.min() < 0:
            raise MisuseError(f"table {self.name!r}: a count is below 0")
        kept = counts > 0
        return (ids, values) if kept.all() else (ids[kept], values[kept])

    def _keep(self, ids: Ids, values: Floats) -> int:
        if not np.isfinite(values).all():
            raise MisuseError(f"table {self.name!r}: an updated row is not finite; none was kept")
        self._write(ids, values)
        self._pending = distinct(np.concatenate((self._pending, ids)))
        return int(ids.size)

    @abstractmethod
    def _read(self, ids: Ids) -> Floats: ...

    @abstractmethod
    def _write(self, ids: Ids, values: Floats) -> None: ...


class DenseTable(StoredTable):
    """All m rows in one array: m * d * 4 bytes, and one indexing step per read or update."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        if isinstance(spec.initial, Given):
            raise MisuseError(f"table {spec.name!r}: use DenseTable.from_array for given rows")
        self._array = spec.initial_values(np.arange(spec.size, dtype=np.uint64))
        self._updated = np.zeros(spec.size, dtype=np.bool_)

    @classmethod
    def from_array(cls, name: str, array: Floats) -> DenseTable:
        """A table that begins as a copy of `array`. All of it is pending, until first stored."""
        if array.ndim != 2 or array.dtype != np.float32:
            raise MisuseError(
                f"table {name!r}: given rows are {array.dtype} {array.shape}, "
                "expected float32 (m, d)"
            )
        if not np.isfinite(array).all():
            raise ConfigError(
                f"table {name!r}: the given array holds values that are not finite",
                hint="look at what exported it; a trained row is never NaN or infinite",
            )
        size, width = array.shape
        table = cls.__new__(cls)
        StoredTable.__init__(table, TableSpec(name=name, size=size, width=width, initial=Given()))
        table._array = np.array(array, order="C")
        table._updated = np.ones(size, dtype=np.bool_)
        table._pending = np.arange(size, dtype=np.uint64)
        return table

    @property
    def touched(self) -> int:
        return int(np.count_nonzero(self._updated))

    @property
    def touched_ids(self) -> Ids:
        return np.flatnonzero(self._updated).astype(np.uint64)

    def _read(self, ids: Ids) -> Floats:
        return self._array[ids]

    def _write(self, ids: Ids, values: Floats) -> None:
        self._array[ids] = values
        self._updated[ids] = True


class LazyTable(StoredTable):
    """Only rows that were updated: about 16 + 5 d bytes for each, whatever m is.

    A kept row has a slot in an arena of rows, in the order of first update; `_SlotIndex` finds it.
    """

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        if isinstance(spec.initial, Given):
            raise MisuseError(f"table {spec.name!r}: given rows are a DenseTable")
        self._slots = _SlotIndex()
        self._arena = np.empty((0, spec.width), dtype=np.float32)

    @property
    def touched(self) -> int:
        return self._slots.count

    @property
    def touched_ids(self) -> Ids:
        return self._slots.ids

    def holds(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of these rows are kept."""
        return self._slots.find(ids) >= 0

    def _read(self, ids: Ids) -> Floats:
        slots = self._slots.find(ids)
        untouched = slots < 0
        if not untouched.any():
            return self._arena[slots]
        if untouched.all():
            return self.initial(ids)
        values = np.empty((ids.size, self.width), dtype=np.float32)
        values[untouched] = self.initial(ids[untouched])
        values[~untouched] = self._arena[slots[~untouched]]
        return values

    def _write(self, ids: Ids, values: Floats) -> None:
        slots = self._slots.find(ids)
        untouched = slots < 0
        if untouched.any():
            slots[untouched] = self._slots.add(ids[untouched])
            self._reserve(self._slots.count)
        self._arena[slots] = values

    def _reserve(self, count: int) -> None:
        """Room for `count` rows; a quarter more when it has to grow, so that growing is rare."""
        if count > len(self._arena):
            capacity = count + count // 4
            # In place, so that old and new arena need not exist together. Every read of ours is a
            # copy, hence no array elsewhere can still point into the old memory.
            self._arena.resize((capacity, self.width), refcheck=False)


class _SlotIndex:
    """id -> slot for ids that get slots 0, 1, 2 ... as they are added.

    A few sorted runs, each more than twice as long as the next: a lookup is one binary search per
    run, and an id is merged O(log n) times in all. No hash table: a dict of Python integers costs
    over 100 bytes per id and cannot look up an array.
    """

    def __init__(self) -> None:
        self.count = 0
        self._runs: list[tuple[Ids, NDArray[np.int64]]] = []

    @property
    def ids(self) -> Ids:
        """Every id with a slot, ascending."""
        none = np.empty(0, dtype=np.uint64)
        return np.sort(np.concatenate([none, *(known for known, _ in self._runs)]))

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """The slot of every id, -1 where there is none."""
        slots = np.full(ids.size, -1, dtype=np.int64)
        for known, slot in self._runs:
            at = np.searchsorted(known, ids)
            at[at == known.size] = 0  # past the end: compare with any, it cannot be equal
            hit = known[at] == ids
            slots[hit] = slot[at[hit]]
        return slots

    def add(self, ids: Ids) -> NDArray[np.int64]:
        """Give the next slots to `ids`, sorted and none of them known."""
        slots = np.arange(self.count, self.count + ids.size, dtype=np.int64)
        self.count += ids.size
        self._runs.append((ids, slots))
        while len(self._runs) > 1 and self._runs[-2][0].size <= 2 * self._runs[-1][0].size:
            (old_ids, old_slots), (new_ids, new_slots) = self._runs[-2:]
            merged = np.concatenate((old_ids, new_ids))
            order = np.argsort(merged, kind="stable")  # finds the two runs and merges them
            self._runs[-2:] = [(merged[order], np.concatenate((old_slots, new_slots))[order])]
        return slots
