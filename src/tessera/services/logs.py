"""Logs of a service: one JSON object per line on stderr; never a payload or a row id."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class JsonLog:
    """Writes lines with the time and the party's name."""

    def __init__(self, party: str, *, quiet: bool = False) -> None:
        self._party, self._quiet = party, quiet

    def __call__(self, event: str, **facts: Any) -> None:
        if self._quiet:
            return
        line = {"time": round(time.time(), 3), "party": self._party, "event": event, **facts}
        print(json.dumps(line, default=str), file=sys.stderr, flush=True)
