"""Who is there: clients that have asked within a stated time and have not gone since.

A cohort is drawn among them (`rounds/cohorts.py`). A client waits for a round in a request that the
leader holds for [service] poll, and asks again: who has not asked for `GRACE` longer than that, or
whose connection was closed while it waited, is not there. Whoever was waited for in vain is not
waited for again before it has asked once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from tessera.ids import ClientId, RoundId

GRACE: Final = 10.0
"""Seconds beyond a poll for which a client that does not ask counts as there."""


class Presence:
    """What a leader knows of its clients' whereabouts. Nothing of it is stored: after a restart
    everybody asks again."""

    def __init__(self, poll: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._within, self._clock = poll + GRACE, clock
        self._asked: dict[ClientId, float] = {}
        self._waits: dict[ClientId, tuple[RoundId | None, object]] = {}
        self.missed: set[ClientId] = set()
        """Who was waited for in vain, and has not asked since."""

    def asked(self, client: ClientId) -> None:
        """It has sent a request, whichever."""
        self._asked[client] = self._clock()
        self.missed.discard(client)

    def waits(self, client: ClientId, behind: RoundId | None, request: object) -> None:
        """It is free for a round behind that one, and `request` waits for it."""
        self._waits[client] = behind, request

    def lost(self, client: ClientId, request: object) -> None:
        """Its connection was closed while this request waited, unless it has another by now."""
        if self._waits.get(client, (None, None))[1] is request:
            del self._waits[client]
            self._asked.pop(client, None)

    def give_up(self, clients: Collection[ClientId]) -> None:
        """They were waited for in vain."""
        self.missed.update(clients)

    @property
    def there(self) -> frozenset[ClientId]:
        """Who has asked within the stated time, in a round or free for one."""
        since = self._clock() - self._within
        return frozenset(c for c, at in self._asked.items() if at >= since) - self.missed

    def free(self, last_round: Callable[[ClientId], RoundId | None]) -> frozenset[ClientId]:
        """Who waits for a round behind the last one that it was in."""
        waits = self._waits
        return frozenset(c for c in self.there if c in waits and waits[c][0] == last_round(c))
