"""LazyTable: a table that holds only the rows that were updated, so that m may be 2^64 - 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tessera.errors import MisuseError
from tessera.learning.tables.arrays import Floats, Ids
from tessera.learning.tables.initial import Given
from tessera.learning.tables.spec import TableSpec
from tessera.learning.tables.stored import StoredTable


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
