"""How a user declares a table: `Table`, `Derived` or `Local`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.learning.tables.arrays import Ids
from tessera.learning.tables.initial import Rule

Source: TypeAlias = npt.NDArray[np.integer[Any]] | Callable[[Ids], npt.NDArray[np.integer[Any]]]
"""A public map from a parent's rows: an array over all of them, or a function of ids."""


class Table:
    """A table: its rows are fetched and updated. `fields` hold its ids, (N,) or (N, T).

    With `initial`, a row starts by that rule and not from the module's own values, and `size` may
    be any number of rows: the module's parameter then only gives the width.
    """

    def __init__(self, *fields: str, size: int | None = None, initial: Rule | None = None) -> None:
        self.fields = fields
        self.size = size
        self.initial = initial


class Derived:
    """A table whose rows follow from a parent's by a public map (items -> category).

    `fields` says which field of its own comes from which of the parent's; they are computed here,
    examples do not hold them.
    """

    def __init__(
        self,
        parent: str,
        source: Source,
        fields: Mapping[str, str],
        *,
        size: int | None = None,
        initial: Rule | None = None,
    ) -> None:
        self.parent = parent
        self.source = source
        self.fields = dict(fields)
        self.size = size
        self.initial = initial


class Local:
    """A table whose rows never leave their client, such as its own user embedding."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields


Declaration: TypeAlias = Table | Derived | Local
