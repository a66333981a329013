"""Hands: who does a server's evaluations. An engine may bring threads, the protocol has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Hands(Protocol):
    """One or more of them; what they are given does not touch each other's results."""

    @property
    def count(self) -> int:
        """How many calls can be under way at once."""

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Make these calls; return when all are done."""


class OneHand:
    """One call after the other."""

    count = 1

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        for call in calls:
            call()
