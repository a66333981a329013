"""Outcomes of rounds in the leader's journal, read beside the thread that writes it.

A connection of its own sees whole steps only: an outcome that is read here is on disk.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.services.dialing import OLD_COPY
from tessera.services.journal import NAME


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


# --- state ----------------------------------------------------------------------------------------
#
# A party's state as an operator may see it, read from its folder while it runs or afterwards.


def state_of(folder: Path, most: int = 10) -> dict[str, Any]:
    """Whose it is, its round, its last rounds, restarts and disk. No payloads, no row ids."""
    path = folder / NAME
    if not path.exists():
        raise ConfigError(f"{folder}: there is no state here", hint="name a party's --state folder")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            owner, plan, starts = database.execute(
                "SELECT owner, plan, starts FROM journal"
            ).fetchone()
            (round_id,) = database.execute("SELECT MAX(round_id) FROM link").fetchone()
            (waiting,) = database.execute("SELECT COUNT(*) FROM outgoing").fetchone()
            old = database.execute(
                "SELECT value FROM fact WHERE name = ? ORDER BY party LIMIT 1", (OLD_COPY,)
            ).fetchone()
            events = database.execute(
                "SELECT round_id, data FROM event ORDER BY number DESC LIMIT ?", (most,)
            ).fetchall()
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{path}: {error}", hint="the file is damaged, or not a state of tessera"
        ) from error
    log = path.with_name(path.name + "-wal")
    return {
        "party": owner,
        "bundle": plan[:16],
        "round": round_id,
        "outgoing": waiting,
        "trouble": "" if old is None else bytes(old[0]).decode(),
        "restarts": starts - 1,
        "disk": path.stat().st_size + (log.stat().st_size if log.exists() else 0),
        "rounds": [{"round": number, **outcome_of(json.loads(data))} for number, data in events],
    }
