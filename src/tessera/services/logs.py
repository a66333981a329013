"""Logs of a service: one JSON object per line on stderr, with its level; never a payload or a row
id, and which client it is about only where the operator asks for it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

LEVELS: Final = ("debug", "info", "warning", "error")
LEVEL_OF: Final = {
    **dict.fromkeys(("request", "session"), "debug"),
    **dict.fromkeys(("refused", "deadline", "bad answer", "left", "leave refused"), "warning"),
    **dict.fromkeys(("waiting for the leader", "message refused", "trouble", "retired"), "warning"),
    **dict.fromkeys(("step failed", "failed"), "error"),
}
"""By event; every other is information."""
PAUSE: Final = 1.0
"""Seconds between two lines of one kind that anybody can cause: those between are counted."""
MOST_KINDS: Final = 256


class JsonLog:
    """Writes lines with the time, a level and the party's name."""

    def __init__(
        self,
        party: str,
        *,
        quiet: bool = False,
        level: str = "info",
        clients: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Lines below `level` are left out; `clients`: lines say which client they are about."""
        self._party, self._quiet, self._clients = party, quiet, clients
        self._least, self._clock = LEVELS.index(level), clock
        self._last: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def __call__(self, event: str, *, client: Any = None, **facts: Any) -> None:
        """`client`: one, or several, whom this is about."""
        level = LEVEL_OF.get(event, "info")
        if self._quiet or LEVELS.index(level) < self._least:
            return
        line = {
            "time": round(self._clock(), 3),
            "level": level,
            "party": self._party,
            "event": event,
            **facts,
        }
        if self._clients and client is not None:
            line["client"] = client
        print(json.dumps(line, default=str), file=sys.stderr, flush=True)

    def seldom(self, event: str, kind: str, *, client: Any = None, **facts: Any) -> None:
        """A line that whoever reaches the port can cause: one a second of each kind, with the
        number of those that were left out since."""
        key, now = (event, kind), self._clock()
        if now - self._last.get(key, -PAUSE) < PAUSE or len(self._last) > MOST_KINDS:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return
        self._last[key] = now
        more = self._left_out.pop(key, 0)
        self(event, client=client, kind=kind, **facts, **({"left_out": more} if more else {}))
