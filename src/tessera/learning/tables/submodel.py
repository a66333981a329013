"""Rows as arrays: ids, values; Submodel and ModelUpdate, what a client trains and gives back.

Plain arrays: the rounds carry them, and whatever trains (`learning/training/`,
or something that is not PyTorch) turns the one into the other.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from numpy.typing import NDArray

# --- arrays ---------------------------------------------------------------------------------------
#
# Array types of the learning layer, sorted sets of row ids, and arrays from .npz files.


Ids: TypeAlias = NDArray[np.uint64]
"""Row ids of one table, ascending and without repeats."""

Floats: TypeAlias = NDArray[np.float32]
"""Parameters; the values of k rows have shape (k, d)."""

Counts: TypeAlias = NDArray[np.integer[Any]]
"""How many examples stand behind each row, shape (k,)."""


def places(ids: Ids, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each of `wanted` stands among these ascending ids, and whether it does."""
    at = np.searchsorted(ids, wanted.astype(np.uint64))
    there = np.zeros(len(wanted), np.bool_)
    inside = at < len(ids)
    there[inside] = ids[at[inside]] == wanted[inside].astype(np.uint64)
    return at, there


def distinct(ids: NDArray[np.uint64]) -> Ids:
    """Sorted, without repeats. By sorting: `np.unique` hashes uint64, over 100x slower here."""
    ids = np.sort(ids, kind="stable")
    first = np.ones(ids.size, dtype=np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    return ids[first]


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Arrays of a file that may be damaged or hostile; ValueError for what `savez` never writes.

    Entries are stored and not compressed, and no header claims more than its entry holds, so that
    memory stays in proportion to the file.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed")
            with archive.open(entry) as file:
                version = npy.read_magic(file)
                if version not in ((1, 0), (2, 0)):
                    raise ValueError(f"{entry.filename} has an unknown version")
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(file)
            claimed = dtype.itemsize
            for length in shape:  # Python integers: a product of any size
                claimed *= int(length)
            if dtype.hasobject or claimed > entry.file_size:
                raise ValueError(f"{entry.filename} claims more than it holds")
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


# --- submodel -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TablePart:
    """Some rows of a table, ascending, and their values."""

    ids: Ids = field(repr=False)
    values: Floats = field(repr=False)

    def of(self, ids: Ids) -> Floats:
        """The values of these rows, all of which are here."""
        if self.ids is ids or np.array_equal(self.ids, ids):
            return self.values.copy()
        return self.values[np.searchsorted(self.ids, ids)]


@dataclass(frozen=True, slots=True)
class Submodel:
    """What a client trains: the dense part, the rows it fetched, and which of them are its own.

    `trained` is the succinct set (S and S''): rows fetched as cover are not in it.
    """

    dense: Floats = field(repr=False)
    tables: Mapping[str, TablePart]
    trained: Mapping[str, Ids] = field(repr=False)


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """The delta of each trained row of a table, and how many examples stand behind it."""

    values: npt.NDArray[np.floating[Any]] = field(repr=False)
    counts: npt.NDArray[np.integer[Any]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ModelUpdate:
    """A client's contribution: deltas of the dense part and of its rows, and on how many examples.

    Deltas are not weighted here: the round does that, by rows or by the training set's size.
    """

    dense: npt.NDArray[np.floating[Any]] = field(repr=False)
    weight: int
    tables: Mapping[str, TableUpdate] = field(default_factory=dict)
