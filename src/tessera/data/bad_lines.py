"""Bad lines of a table: the first ten by line and reason, and how many; refused, or left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tessera.data.columns import LISTED, Columns, Ints, Mask
from tessera.errors import ConfigError

STOP: Final = "stop"
SKIP: Final = "skip"


@dataclass
class BadLines:
    """Collects what is wrong with a table. Of a line with several faults the first counts."""

    columns: Columns
    good: Mask = field(init=False, repr=False)
    hint: str | None = None
    _reasons: dict[int, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.good = np.ones(len(self.columns), dtype=np.bool_)

    def add(self, wrong: Mask, reason: Callable[[int], str], *, hint: str | None = None) -> None:
        """Rows that are wrong; the reason is asked for by row, for those that may be listed."""
        new = np.flatnonzero(wrong & self.good)
        if not len(new):
            return
        self.good[new] = False
        self.hint = self.hint or hint
        for row in new[:LISTED].tolist():
            self._reasons[row] = reason(row)

    @property
    def count(self) -> int:
        return len(self.columns.odd) + int((~self.good).sum())

    def listed(self) -> list[tuple[int, str]]:
        """Line and reason of the first bad lines."""
        rows: Ints = np.array(sorted(self._reasons), dtype=np.int64)
        numbers = self.columns.records(rows).tolist()
        found = [*zip(numbers, (self._reasons[int(row)] for row in rows), strict=True)]
        found = sorted([*found, *self.columns.odd[:LISTED]])[:LISTED]
        places = self.columns.places([record for record, _ in found])
        return [(place, reason) for place, (_, reason) in zip(places, found, strict=True)]

    def settle(self, on_bad: str) -> dict[str, Any]:
        """Refuse, or say what is left out; the facts."""
        if not self.count:
            return {}
        total, unit = len(self.columns) + len(self.columns.odd), self.columns.unit
        listed = self.listed()
        if on_bad == SKIP and self.good.any():
            return {
                f"bad {unit}s, left out": self.count,
                f"the first bad {unit}s": [f"{unit} {at}: {why}" for at, why in listed],
            }
        skip = 'on_bad = "skip" leaves bad lines out, and counts them'
        hint = self.hint or "a text with the separator in it has to stand in quotes"
        if self.count == 1:
            at, why = listed[0]
            raise ConfigError(
                f"{self.columns.where}, {unit} {at}: {why}",
                hint=f"{hint}; {skip}" if total > 1 else hint,
            )
        lines = "".join(f"\n  {unit} {at}: {why}" for at, why in listed)
        more = f", the first {len(listed)}" if self.count > len(listed) else ""
        raise ConfigError(
            f"{self.columns.where}: {self.count:,} of {total:,} {unit}s are bad{more}:{lines}",
            hint=f"{hint}; {skip}" if self.good.any() else hint,
        )
