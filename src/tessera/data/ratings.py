"""Ratings on a scale, with what is publicly known of items and what a client knows of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera.data.examples import ClientData
from tessera.errors import MisuseError


@dataclass(frozen=True, slots=True)
class Attributes:
    """One row of numbers per item, or per client, with the names of the columns."""

    names: tuple[str, ...]
    values: npt.NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingData(ClientData):
    """Examples with the fields `user`, `item` and `label` (the rating), client c being user c.

    Ratings lie between `low` and `high`, `step` apart. `items` are public attributes; row c of
    `people` is known to client c alone. `titles` are public names of the items.
    """

    low: float
    high: float
    step: float
    items: Attributes
    people: Attributes
    titles: Sequence[str] = field(repr=False)

    def __post_init__(self) -> None:
        ClientData.__post_init__(self)
        if len(self.items.values) != self.sizes["item"] or len(self.titles) != self.sizes["item"]:
            raise MisuseError(f"{self.name}: not one row of attributes and one title per item")
        if len(self.people.values) != self.clients:
            raise MisuseError(f"{self.name}: not one row of attributes per client")
