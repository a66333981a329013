"""Outcomes of rounds in the leader's journal, read beside the thread that writes it.

A connection of its own sees whole steps only: an outcome that is read here is on disk.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from tessera.ids import RoundId


class CommittedOutcomes:
    """Reads how rounds ended. What was read once does not change."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(
            f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        self._last: tuple[RoundId, dict[str, Any]] | None = None

    def outcome(self, round_id: RoundId) -> dict[str, Any] | None:
        """How a round ended, as far as its clients may know; None if it has not."""
        if self._last is not None and self._last[0] == round_id:
            return self._last[1]
        found = self._database.execute(
            "SELECT data FROM event WHERE round_id = ? ORDER BY number DESC LIMIT 1",
            (int(round_id),),
        ).fetchone()
        if found is None:
            return None
        self._last = round_id, outcome_of(json.loads(found[0]))
        return self._last[1]

    def last_rounds(self, most: int = 10) -> list[dict[str, Any]]:
        """The last rounds with their outcomes, the latest first."""
        return [
            {"round": round_id, **outcome_of(json.loads(data))}
            for round_id, data in self._database.execute(
                "SELECT round_id, data FROM event ORDER BY number DESC LIMIT ?", (most,)
            )
        ]

    def close(self) -> None:
        self._database.close()


def outcome_of(event: dict[str, Any]) -> dict[str, Any]:
    """A round's end in the words of `RoundOver`."""
    if event["event"] == "RoundFinished":
        return {
            "outcome": "done",
            "reason": "",
            "survivors": event["survivors"],
            "excluded": sum(event["excluded"].values()),
        }
    return {"outcome": "aborted", "reason": event["reason"], "phase": event["phase"]}
