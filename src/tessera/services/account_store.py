"""AccountStore: a database of one user account, for all its federations and states.

A client's state is bound to one federation, and what is called another federation is the leader's
choice. What has to be known over all of them is in one folder of the user account: which rows were
offered to whom (`offered_rows.py`), and what trainings have cost (`charged_trainings.py`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar, Final

from tessera.errors import ConfigError
from tessera.services.journal import explained

WAIT: Final = 60.0
"""Seconds for which a process waits for another one of the account."""
ACCOUNT: Final = "CREATE TABLE account (schema_version INTEGER NOT NULL, key BLOB NOT NULL)"


def default_home() -> Path:
    """Where a user account keeps it: $XDG_STATE_HOME/tessera, or ~/.local/state/tessera."""
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".local" / "state") / "tessera"


class AccountStore:
    """One store of a user account; several processes of it may use it at the same time."""

    name: ClassVar[str]
    schema_version: ClassVar[int]
    schema: ClassVar[tuple[str, ...]]
    holds: ClassVar[str]

    def __init__(self, home: Path) -> None:
        """The store in this folder, or a new one with a key of its own."""
        self.path = home / self.name
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # before SQLite
        except OSError as error:
            raise ConfigError(
                f"{self.path}: {error.strerror}: {self.holds} are there",
                hint="--home DIR keeps them elsewhere; always name the same one",
            ) from error
        with self._transaction() as database:
            self._key = self._attach(database)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """On disk when it ends; no other process of the account writes meanwhile."""
        with explained(self.path, "open"):
            database = sqlite3.connect(self.path, isolation_level=None, timeout=WAIT)
        with closing(database), explained(self.path, "write"):
            database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            yield database  # what is not committed is rolled back
            database.execute("COMMIT")

    def _attach(self, database: sqlite3.Connection) -> bytes:
        """The store's key, drawn when it is made."""
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if not names:
            for statement in (ACCOUNT, *self.schema):
                database.execute(statement)
            row = (self.schema_version, os.urandom(32))
            database.execute("INSERT INTO account VALUES (?, ?)", row)
        elif "account" not in names:
            raise ConfigError(
                f"{self.path}: this is a database of something else; it was not changed",
                hint="--home DIR names another folder",
            )
        version, key = database.execute("SELECT schema_version, key FROM account").fetchone()
        if version != self.schema_version:
            raise ConfigError(
                f"{self.path}: schema version {version}, this tessera reads {self.schema_version}",
                hint="use the tessera that wrote it",
            )
        return bytes(key)
