"""The helper's protection against replay: rounds it took part in, reports it saw, lists it summed.

A report that counted twice, or in two rounds, could be subtracted from a sum. Every box names its
round, but a round may be restarted under the same number after a crash, so ids are kept for ever.
A helper that is woken from an older snapshot does not know that it has released its share, and
could be led to another list: the one list of a round is kept here, too.

`MemoryReplayGuard` is the only implementation here. It starts empty in every process: a helper that
restarts with an empty one would accept old reports and repeat old rounds. Whoever runs a helper
beyond one process has to supply a guard with durable storage.
"""

from __future__ import annotations

from typing import Protocol

from tessera.ids import RoundId


class ReplayGuard(Protocol):
    """An append-only store of round numbers and report ids.

    A call returns once its entry is durable; the helper answers on that assumption.
    `MemoryReplayGuard` does not meet it.
    """

    def begin_round(self, round_id: RoundId) -> bool:
        """Record that this round begins; False if it, or a later one, has begun before."""

    def accept(self, report_id: bytes) -> bool:
        """Record a report's id; False if it is recorded already."""

    def release(self, round_id: RoundId, reports: bytes) -> bool:
        """Record the list, by digest, over which this round's share is released; False if another
        one is recorded already."""


class MemoryReplayGuard:
    """A replay guard for simulations and tests; its entries live as long as the object."""

    def __init__(self) -> None:
        self._last: RoundId | None = None
        self._accepted: set[bytes] = set()
        self._released: dict[RoundId, bytes] = {}

    def begin_round(self, round_id: RoundId) -> bool:
        if self._last is not None and round_id <= self._last:
            return False
        self._last = round_id
        return True

    def accept(self, report_id: bytes) -> bool:
        if report_id in self._accepted:
            return False
        self._accepted.add(report_id)
        return True

    def release(self, round_id: RoundId, reports: bytes) -> bool:
        return self._released.setdefault(round_id, reports) == reports
