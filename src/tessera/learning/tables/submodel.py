"""Submodel and ModelUpdate: what a client gets to train, and what it gives back.

Plain arrays: the rounds carry them, and whatever trains (`learning/training/`,
or something that is not PyTorch) turns the one into the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.learning.tables.arrays import Floats, Ids


@dataclass(frozen=True, slots=True)
class TablePart:
    """Some rows of a table, ascending, and their values."""

    ids: Ids = field(repr=False)
    values: Floats = field(repr=False)

    def of(self, ids: Ids) -> Floats:
        """The values of these rows, all of which are here."""
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
