"""What the helper never forgets: rounds it has opened and reports it has seen.

A report that counted twice, or in two rounds, could be subtracted. The round's number is in every
box, but a round may be started again under its number after a crash, so ids are kept for ever.

Nothing in this repository keeps them on disk. `MemoryLedger` is the only implementation, and it
starts empty in every process: a helper that was restarted with one would take reports it has seen
and open rounds it has opened. Whoever runs a helper beyond one process brings a ledger of its own.

This is no account of privacy spent; that one is in `tessera.privacy.ledger`.
"""

from __future__ import annotations

from typing import Protocol

from tessera.ids import RoundId


class Ledger(Protocol):
    """An append-only store of round numbers and report ids.

    It promises that what it was told survives the process once a call has returned: the helper
    answers on the strength of that. `MemoryLedger` does not keep this promise.
    """

    def open_round(self, round_id: RoundId) -> bool:
        """Record that this round begins; False if it, or a later one, has begun before."""

    def take(self, report_id: bytes) -> bool:
        """Record a report's id; False if it is there already."""


class MemoryLedger:
    """A ledger for simulations and tests: as long-lived as the object, and empty at the start."""

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
