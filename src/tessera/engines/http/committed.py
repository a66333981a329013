"""What the leader's journal has, read beside the thread that writes it.

A connection of its own sees whole steps only: a message that is read here is on disk.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from tessera.engines.link import LinkStanding, Numbered, name_of
from tessera.ids import SERVER, Party, RoundId


class CommittedLinks:
    """Reads links, messages on their way, and outcomes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database = sqlite3.connect(
            f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )

    def standing(self, peer: Party) -> LinkStanding | None:
        found = self._database.execute(
            "SELECT round_id, sent, received, acknowledged FROM link WHERE party = ? AND peer = ?",
            (SERVER, name_of(peer)),
        ).fetchone()
        return None if found is None else LinkStanding(RoundId(found[0]), *found[1:])

    def after(self, peer: Party, round_id: RoundId, number: int) -> Numbered | None:
        """This peer's first message of the round behind that number."""
        found = self._database.execute(
            "SELECT o.number, c.data FROM outgoing o JOIN content c ON c.digest = o.digest "
            "JOIN link l ON l.party = o.party AND l.peer = o.peer "
            "WHERE o.party = ? AND o.peer = ? AND l.round_id = ? AND o.number > ? "
            "AND o.number <= l.released ORDER BY o.number LIMIT 1",
            (SERVER, name_of(peer), int(round_id), number),
        ).fetchone()
        return None if found is None else Numbered(found[0], bytes(found[1]))

    def outcome(self, round_id: RoundId) -> dict[str, Any] | None:
        """How a round ended, as far as its clients may know; None if it has not."""
        found = self._database.execute(
            "SELECT data FROM event WHERE round_id = ? ORDER BY number DESC LIMIT 1",
            (int(round_id),),
        ).fetchone()
        return None if found is None else outcome_of(json.loads(found[0]))

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
        return {"outcome": "done", "reason": "", "survivors": event["survivors"]}
    return {"outcome": "aborted", "reason": event["reason"], "phase": event["phase"]}
