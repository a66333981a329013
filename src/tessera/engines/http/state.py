"""A party's state as an operator may see it, read from its folder while it runs or afterwards."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tessera.engines.http.committed import outcome_of
from tessera.engines.journal import NAME
from tessera.engines.service.dialing import OLD_COPY
from tessera.errors import ConfigError


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
