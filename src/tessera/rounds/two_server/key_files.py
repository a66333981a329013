"""FileStore: keys that last longer than a round, in one SQLite file, readable by its owner only."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

from tessera.errors import ConfigError
from tessera.protocols import wire
from tessera.protocols.stored import MAX_STATE_BYTES
from tessera.protocols.two_server.key_period import Marked, check_rising

R = TypeVar("R", bound=Marked)

SCHEMA: Final = "CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, data BLOB NOT NULL)"


class FileStore(Generic[R]):
    """A `RisingStore` of one kind of record, by name; on disk before `keep` returns.

    What was kept before is overwritten in the file: keys of an earlier period do not stay in it.
    """

    def __init__(self, path: Path, kind: type[R], name: str = "") -> None:
        self.path, self._kind, self._name = path, kind, name or kind.__name__
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # before SQLite would, by the umask
        with self._database() as database:
            database.execute(SCHEMA)

    def latest(self) -> R | None:
        with self._database() as database:
            return self._read(database)

    def keep(self, record: R) -> None:
        with self._database() as database:
            check_rising(self._read(database), record)
            database.execute(
                "INSERT OR REPLACE INTO kept VALUES (?, ?)", (self._name, wire.encode(record))
            )

    def _read(self, database: sqlite3.Connection) -> R | None:
        found = database.execute("SELECT data FROM kept WHERE name = ?", (self._name,)).fetchone()
        if found is None:
            return None
        record: R = wire.decode(found[0], expect=[self._kind], cap=MAX_STATE_BYTES)
        return record

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which is on disk when this ends without an exception."""
        try:
            with closing(
                sqlite3.connect(self.path, isolation_level=None, timeout=60.0)
            ) as database:
                database.execute("PRAGMA synchronous = EXTRA")  # the directory entry too
                database.execute("PRAGMA secure_delete = ON")  # an old key leaves no trace
                database.execute("BEGIN IMMEDIATE")  # left without COMMIT, closing rolls back
                yield database
                database.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"two servers: {self.path} cannot be used as a store of keys: {error}",
                hint="name a new file: keys are made anew in the next period. An old copy must not "
                "be put back: it would use an epoch twice",
            ) from error
