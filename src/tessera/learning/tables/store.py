"""The model store: round number, dense part and touched rows, one SQLite transaction per round.

A leader may show nobody a model that it could forget, so `commit` returns only when the round is
on disk, and what is on disk is always one whole round: the number, every dense array and every
row belong together, whatever was interrupted. A round writes the rows that changed in it and no
others; untouched rows are not in the file at all, they follow from the tables' specs.

Journal: write-ahead log with synchronous=FULL. The log is synced at every commit, so a committed
round survives power loss as it would with a rollback journal, at one sync of one file instead of
several; and `tessera status` can read while a round is written. (WAL with synchronous=NORMAL
would keep the file consistent but could lose the last round, which clients have seen by then.)
Where the file system has no shared memory for a log, SQLite stays with its rollback journal, which
is as safe with FULL.

Arrays are raw little-endian float32 with their shape beside them; nothing is pickled. Row ids and
round numbers are uint64 and SQL integers are signed, so they are stored as the int64 with the same
bits: ids below 2^63 read as themselves in any SQL shell. The statements of a round are what SQLite
and PostgreSQL share; the types and `WITHOUT ROWID` in `SCHEMA`, the pragmas and the look into
`sqlite_master` are SQLite's own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.learning.tables.table import Given, StoredTable

SCHEMA_VERSION: Final = 1

SCHEMA: Final = (
    """CREATE TABLE model_state (
        schema_version INTEGER NOT NULL,
        plan_hash TEXT NOT NULL,
        round_id INTEGER)""",  # NULL until the first commit
    """CREATE TABLE model_table (
        number INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        size INTEGER NOT NULL,
        width INTEGER NOT NULL,
        recipe TEXT NOT NULL)""",
    """CREATE TABLE model_dense (
        name TEXT PRIMARY KEY,
        shape TEXT NOT NULL,
        data BLOB NOT NULL)""",
    """CREATE TABLE model_row (
        table_number INTEGER NOT NULL,
        row_id INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (table_number, row_id)) WITHOUT ROWID""",
    "CREATE TABLE model_engine (data BLOB NOT NULL)",
)

_UPSERT_ROW: Final = (
    "INSERT INTO model_row (table_number, row_id, data) VALUES (?, ?, ?) "
    "ON CONFLICT (table_number, row_id) DO UPDATE SET data = excluded.data"
)

_RESTORE_BATCH: Final = 1 << 16

_CACHE_KIB: Final = 64 * 1024
"""A round's rows lie all over the file; with less, SQLite writes the same page several times."""

_CHECKPOINT_PAGES: Final = 4096
"""Fold the log into the file every 16 MB, not after every round."""


class ModelStore:
    """One model on disk. Open it with fresh tables; they then hold the last committed round.

        with ModelStore.open(path, plan_hash=plan.digest, tables=[items, categories]) as store:
            dense = store.dense() if store.round_id is not None else first_dense
            ...
            items.update(union, mean, counts)
            store.commit(round_id, dense)  # durable when it returns

    One process writes a store. A commit after somebody else's is refused, not merged.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        tables: Sequence[StoredTable],
        round_id: RoundId | None,
    ) -> None:
        """Not for callers: `open` checks what this takes for granted."""
        self.path = path
        self.round_id = round_id
        self._connection = connection
        self._tables = tuple(tables)

    @classmethod
    def open(cls, path: Path, *, plan_hash: bytes, tables: Sequence[StoredTable]) -> ModelStore:
        """Open the store of this plan, or make it, and bring `tables` to its last round.

        A file of another plan, another schema, other tables or another program is a `ConfigError`
        and is left as it was.
        """
        _check_arguments(path, plan_hash, tables)
        with _explained(path, "open"):
            connection = sqlite3.connect(path, isolation_level=None)
        try:
            with _explained(path, "open"):
                store = cls._attach(path, connection, plan_hash, tables)
                store._restore()
        except BaseException:
            connection.close()
            raise
        return store

    @classmethod
    def within(
        cls,
        path: Path,
        connection: sqlite3.Connection,
        *,
        plan_hash: bytes,
        tables: Sequence[StoredTable],
    ) -> ModelStore:
        """The same as tables of a database that its owner keeps open, beside other tables.

        What is done inside a transaction of the owner's is durable when that one commits. If it
        does not commit, the tables in memory are ahead of the file: drop them and open again.
        """
        _check_arguments(path, plan_hash, tables)
        with _explained(path, "open"):
            with _transaction(connection):
                if not _has_model(connection):
                    _create(connection, plan_hash, tables)
                round_id = _check(path, connection, plan_hash, tables)
            store = cls(path, connection, tables, round_id)
            store._restore()
        return store

    @classmethod
    def reading(
        cls,
        path: Path,
        connection: sqlite3.Connection,
        *,
        plan_hash: bytes,
        tables: Sequence[StoredTable],
    ) -> ModelStore:
        """The same inside a transaction that only reads, whoever writes meanwhile."""
        _check_arguments(path, plan_hash, tables)
        with _explained(path, "read"):
            there = _has_model(connection)
            round_id = _check(path, connection, plan_hash, tables) if there else None
            store = cls(path, connection, tables, round_id)
            store._restore()
        return store

    @classmethod
    def _attach(
        cls,
        path: Path,
        connection: sqlite3.Connection,
        plan_hash: bytes,
        tables: Sequence[StoredTable],
    ) -> ModelStore:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        with _transaction(connection):
            if connection.execute("SELECT name FROM sqlite_master").fetchone() is None:
                _create(connection, plan_hash, tables)
            elif not _has_model(connection):
                raise ConfigError(
                    f"store {path}: this is a database of something else; it was not changed",
                    hint="name a file of its own for the model",
                )
            round_id = _check(path, connection, plan_hash, tables)
        # Only now, as the mode is written into the file, and one that is not ours stays as it was.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        return cls(path, connection, tables, round_id)

    def dense(self) -> dict[str, NDArray[np.float32]]:
        """The dense part as last committed, by name; empty before the first commit."""
        with _explained(self.path, "read the dense part of"):
            found = self._connection.execute(
                "SELECT name, shape, data FROM model_dense ORDER BY name"
            ).fetchall()
        part = {}
        for name, text, data in found:
            try:
                shape = tuple(int(side) for side in text.split())
                whole = all(side >= 0 for side in shape) and isinstance(data, bytes)
            except (AttributeError, ValueError):
                whole = False
            if not whole:
                raise _damaged(self.path, f"dense array {name!r} has no shape, or no values")
            if len(data) != 4 * int(np.prod(shape, dtype=np.int64)):
                raise _damaged(self.path, f"dense array {name!r} does not fill its shape {shape}")
            part[name] = np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(shape)
        return part

    def engine(self) -> bytes:
        """What the engine stored with the last commit."""
        with _explained(self.path, "read"):
            found = self._connection.execute("SELECT data FROM model_engine").fetchone()
        if found is None:
            return b""
        if not isinstance(found[0], bytes):
            raise _damaged(self.path, "what the engine stored is not bytes")
        return found[0]

    def commit(
        self, round_id: RoundId, dense: Mapping[str, NDArray[np.float32]], engine: bytes = b""
    ) -> int:
        """Make this round the last one, durably: all of it or nothing. The number of rows written.

        `dense` replaces the whole dense part, and `engine` what an engine has beside the model. If
        this raises, the file holds the round before, and the tables still know what they have to
        write.
        """
        if self.round_id is not None and round_id <= self.round_id:
            raise MisuseError(
                f"store {self.path}: round {round_id} comes after round {self.round_id}"
            )
        for name, array in dense.items():
            if array.dtype != np.float32:
                raise MisuseError(f"store: dense array {name!r} is {array.dtype}, not float32")
        written = 0
        with _explained(self.path, f"commit round {round_id} to"), _transaction(self._connection):
            self._expect_our_round()
            for number, table in enumerate(self._tables):
                written += self._write_rows(number, table)
            self._connection.execute("DELETE FROM model_dense")
            self._connection.executemany(
                "INSERT INTO model_dense (name, shape, data) VALUES (?, ?, ?)",
                [
                    (name, " ".join(map(str, array.shape)), array.astype("<f4").tobytes())
                    for name, array in dense.items()
                ],
            )
            self._connection.execute("DELETE FROM model_engine")
            self._connection.execute("INSERT INTO model_engine (data) VALUES (?)", (engine,))
            self._connection.execute("UPDATE model_state SET round_id = ?", (_signed(round_id),))
        for table in self._tables:
            table.settle()
        self.round_id = round_id
        return written

    def close(self) -> None:
        """Fold the log into the file and let go of it."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _expect_our_round(self) -> None:
        (found,) = self._connection.execute("SELECT round_id FROM model_state").fetchone()
        theirs = None if found is None else _unsigned(found)
        if theirs != self.round_id:
            raise ConfigError(
                f"store {self.path}: another process has brought it from round {self.round_id} "
                f"to round {theirs}",
                hint="one leader per store: stop the other one, then resume",
            )

    def _write_rows(self, number: int, table: StoredTable) -> int:
        ids, values = table.pending()
        data = memoryview(values.astype("<f4").tobytes())
        step = 4 * table.width
        self._connection.executemany(
            _UPSERT_ROW,
            (
                (number, row_id, data[at * step : (at + 1) * step])
                for at, row_id in enumerate(ids.view(np.int64).tolist())
            ),
        )
        return int(ids.size)

    def _restore(self) -> None:
        if self.round_id is None:
            return
        for number, table in enumerate(self._tables):
            if table.touched and not isinstance(table.spec.initial, Given):
                raise MisuseError(
                    f"store {self.path}: table {table.name!r} was updated before it was restored"
                )
            cursor = self._connection.execute(
                "SELECT row_id, data FROM model_row WHERE table_number = ? ORDER BY row_id",
                (number,),
            )
            while batch := cursor.fetchmany(_RESTORE_BATCH):
                if not all(isinstance(i, int) and isinstance(row, bytes) for i, row in batch):
                    raise _damaged(self.path, f"a row of {table.name!r} is of another type")
                ids = np.array([row_id for row_id, _ in batch], dtype=np.int64).view(np.uint64)
                data = b"".join(row for _, row in batch)
                if any(len(row) != 4 * table.width for _, row in batch):
                    raise _damaged(self.path, f"a row of {table.name!r} is not {table.width} wide")
                values = np.frombuffer(data, dtype="<f4").astype(np.float32)
                order = np.argsort(ids)  # as int64, ids from 2^63 on came first
                table.restore(ids[order], values.reshape(ids.size, table.width)[order])


def _check_arguments(path: Path, plan_hash: bytes, tables: Sequence[StoredTable]) -> None:
    if not plan_hash:
        raise MisuseError("store: a plan hash is needed, or any plan could resume it")
    if len({table.name for table in tables}) != len(tables):
        raise MisuseError(f"store {path}: two tables have the same name")


def _has_model(connection: sqlite3.Connection) -> bool:
    named = "SELECT 1 FROM sqlite_master WHERE name = 'model_state'"
    return connection.execute(named).fetchone() is not None


def _create(
    connection: sqlite3.Connection, plan_hash: bytes, tables: Sequence[StoredTable]
) -> None:
    for statement in SCHEMA:
        connection.execute(statement)
    connection.execute(
        "INSERT INTO model_state (schema_version, plan_hash, round_id) VALUES (?, ?, NULL)",
        (SCHEMA_VERSION, plan_hash.hex()),
    )
    connection.executemany(
        "INSERT INTO model_table (number, name, size, width, recipe) VALUES (?, ?, ?, ?, ?)",
        [
            (number, table.name, _signed(table.size), table.width, table.spec.initial_rule)
            for number, table in enumerate(tables)
        ],
    )


def _check(
    path: Path, connection: sqlite3.Connection, plan_hash: bytes, tables: Sequence[StoredTable]
) -> RoundId | None:
    """The last committed round, if this is a store of our schema, plan and tables."""
    # The version by itself first: of another schema we do not even know the columns.
    stored = connection.execute("SELECT schema_version FROM model_state").fetchone()
    if stored is None:
        raise _damaged(path, "it has no state")
    (version,) = stored
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"store {path}: schema version {version}, this tessera reads version {SCHEMA_VERSION}",
            hint="use the tessera that wrote it, or a new file",
        )
    found, round_id = connection.execute("SELECT plan_hash, round_id FROM model_state").fetchone()
    if not isinstance(found, str) or not isinstance(round_id, int | None):
        raise _damaged(path, "its plan or round is of another type")
    if found != plan_hash.hex():
        raise ConfigError(
            f"store {path}: it belongs to plan {found[:12]}, this is plan {plan_hash.hex()[:12]}",
            hint="resume with the plan it was started with, or name a new file",
        )
    known = connection.execute(
        "SELECT name, size, width, recipe FROM model_table ORDER BY number"
    ).fetchall()
    if not all(isinstance(size, int) for _, size, *_ in known):
        raise _damaged(path, "a table's size is no number")
    ours = [(t.name, _signed(t.size), t.width, t.spec.initial_rule) for t in tables]
    if known != ours:
        theirs = [row for row in known if row not in ours]
        name, size, width, rule = (theirs or known or [("no table", 0, 0, "none")])[0]
        raise ConfigError(
            f"store {path}: its tables are not those of this task; it has {name!r} with "
            f"{_unsigned(size)} rows of {width}, {rule}",
            hint="resume with the same task and seed, or name a new file",
        )
    return None if round_id is None else RoundId(_unsigned(round_id))


def _signed(value: int) -> int:
    """The int64 with the bits of this uint64."""
    return value - 2**64 if value >= 2**63 else value


def _unsigned(value: int) -> int:
    """The uint64 with the bits of this int64."""
    return value + 2**64 if value < 0 else value


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"store {path}: {what}: the file is damaged",
        hint="restore it from a backup, or name a new file to start again",
    )


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; IMMEDIATE, so that what is read first still holds when it is written.

    Inside a transaction that is open already: a part of that one.
    """
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """SQLite's word for a full disk, a lock or a foreign file, with the way out."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a bug of ours
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"store {path}: cannot {what} it: {error}",
            hint="is it a store, writable, used by no other process, and is the disk not full? "
            "Its last committed round is untouched",
        ) from error
