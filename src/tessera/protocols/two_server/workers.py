"""Workers: how a server runs its evaluations. An engine may bring threads; a protocol has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Workers(Protocol):
    """An executor of independent calls."""

    @property
    def count(self) -> int:
        """How many calls can run at once."""

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Make these calls; return when all are done."""


class SingleWorker:
    """One call after the other, in the caller's thread."""

    count = 1

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        for call in calls:
            call()
