"""What the helper never forgets: rounds it has opened and reports it has seen.

A report that counted twice, or in two rounds, could be subtracted. The round's number is in every
box, but a round may be started again under its number after a crash, so ids are kept for ever.
"""

from __future__ import annotations

from typing import Protocol

from tessera.ids import RoundId


class Ledger(Protocol):
    """An append-only store. What it was told is on disk when a call returns."""

    def open_round(self, round_id: RoundId) -> bool:
        """Record that this round begins; False if it, or a later one, has begun before."""

    def take(self, report_id: bytes) -> bool:
        """Record a report's id; False if it is there already."""


class MemoryLedger:
    """A ledger for simulations and tests: as long-lived as the object."""

    def __init__(self) -> None:
        self._last: RoundId | None = None
        self._taken: set[bytes] = set()

    def open_round(self, round_id: RoundId) -> bool:
        if self._last is not None and round_id <= self._last:
            return False
        self._last = round_id
        return True

    def take(self, report_id: bytes) -> bool:
        if report_id in self._taken:
            return False
        self._taken.add(report_id)
        return True
