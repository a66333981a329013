"""The journal: all that a party remembers, in one SQLite database; a step is one transaction.

A step is what a party does with one input: the input's number, its role's new state, the messages
that come of it with their numbers, and what belongs to them (a charge, a frozen period, report ids,
local rows, the model and its round). All of it is on disk before any of the messages leaves, or
none of it is. So a process that is killed at any instant goes on as if it had only been slow: what
it had said is in the database, and what is not in the database it had not said.

Write-ahead log with synchronous=FULL, as in `learning/tables/store.py`: a commit is one sync of one
file, and `tessera status` reads while a step is written. Steps that are ready together share a
sync: `group` makes one transaction of them (`docs/decisions/0016-group-commit.md`).

If a step does not commit, what is in memory is ahead of the disk. Its owner drops its objects and
begins again from the journal; nothing has been sent.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import closing, contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final, Self

from tessera.errors import ConfigError, MisuseError
from tessera.ids import SERVER, RoundId
from tessera.privacy.index import period
from tessera.privacy.index.bound import ON_THE_OPERATORS_WORD

SCHEMA_VERSION: Final = 8
NAME: Final = "journal.sqlite"
LOCK: Final = "lock"
GROUP: Final = "group"
VOID_BEFORE: Final = "void snapshots before the group"
"""The fact that a client has joined a fixed group, which it has one of in its life."""
LEFT_GROUP: Final = "left its group"
RETIRED: Final = "retired "
"""Before the number of a group: why its leader has retired it."""
"""The fact that it is out of it for good, and why."""
MISSING: Final = "missing at deadlines"
"""By round and phase: who did not answer; for the leader's operator only."""
OLD_COPY: Final = "old copy"
"""The fact that a party's state is one, for good: it would repeat what it has forgotten."""

SCHEMA: Final = (
    """CREATE TABLE journal (
        schema_version INTEGER NOT NULL, owner TEXT NOT NULL, plan TEXT NOT NULL,
        starts INTEGER NOT NULL)""",
    """CREATE TABLE fact (
        party TEXT NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL,
        PRIMARY KEY (party, name)) WITHOUT ROWID""",
    # a role at rest, how many received messages are in it, and the messages its snapshot names
    """CREATE TABLE role (
        party TEXT NOT NULL, part INTEGER NOT NULL, round_id INTEGER NOT NULL,
        included INTEGER NOT NULL, snapshot BLOB NOT NULL,
        PRIMARY KEY (party, part)) WITHOUT ROWID""",
    """CREATE TABLE kept (
        party TEXT NOT NULL, part INTEGER NOT NULL, digest BLOB NOT NULL,
        source INTEGER, data BLOB, PRIMARY KEY (party, part, digest)) WITHOUT ROWID""",
    # links: the round of each, the last one before it in which the peer spoke and the last one in
    # which its update counted, what was received from a peer, and what is on its way to it. Rows
    # are appended, so that a step writes few pages however many peers there are.
    """CREATE TABLE link (
        party TEXT NOT NULL, peer TEXT NOT NULL, round_id INTEGER NOT NULL, before INTEGER NOT NULL,
        counted INTEGER NOT NULL, PRIMARY KEY (party, peer)) WITHOUT ROWID""",
    """CREATE TABLE received (
        id INTEGER PRIMARY KEY, party TEXT NOT NULL, peer TEXT NOT NULL, number INTEGER NOT NULL,
        digest BLOB NOT NULL, answer TEXT NOT NULL, data BLOB)""",
    """CREATE TABLE outgoing (
        id INTEGER PRIMARY KEY, party TEXT NOT NULL, peer TEXT NOT NULL, number INTEGER NOT NULL,
        held INTEGER NOT NULL, content INTEGER NOT NULL)""",
    "CREATE TABLE content (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    # what outlives a round
    """CREATE TABLE charge (
        party TEXT NOT NULL, number INTEGER NOT NULL, event TEXT NOT NULL, reason TEXT NOT NULL,
        PRIMARY KEY (party, number)) WITHOUT ROWID""",
    "CREATE TABLE report (id BLOB PRIMARY KEY, settled INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE local_row (
        party TEXT NOT NULL, name TEXT NOT NULL, row_id INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (party, name, row_id)) WITHOUT ROWID""",
    # the same as a round has trained it whose outcome is not known yet
    """CREATE TABLE pending_row (
        party TEXT NOT NULL, name TEXT NOT NULL, row_id INTEGER NOT NULL, data BLOB NOT NULL,
        round_id INTEGER NOT NULL, PRIMARY KEY (party, name, row_id)) WITHOUT ROWID""",
    # epochs of fixed groups: the round in which each was opened, how many vectors are missing, and
    # the round that took its sum; -1: none, the group is retired
    """CREATE TABLE group_epoch (
        part INTEGER NOT NULL, epoch INTEGER NOT NULL, kind TEXT NOT NULL, opened INTEGER NOT NULL,
        missing INTEGER NOT NULL, closed INTEGER, PRIMARY KEY (part, epoch)) WITHOUT ROWID""",
    """CREATE TABLE event (
        number INTEGER PRIMARY KEY AUTOINCREMENT, round_id INTEGER NOT NULL, data TEXT NOT NULL)""",
    *period.SCHEMA,
)


BY_PARTY: Final = (
    "CREATE INDEX IF NOT EXISTS received_by ON received (party)",
    "CREATE INDEX IF NOT EXISTS outgoing_by ON outgoing (party)",
)
"""For a journal of many clients only: every step would write pages of these, too."""
CHECKPOINT_PAGES: Final = 1 << 14
"""The log goes into the file after every 64 MB: what a round wrote and the next one overwrites is
copied once, and not once for each."""

SHORT: Final = 1024
"""Bytes of a fact that is kept in memory, too."""


class Moment(Enum):
    """Where a process may be killed, as a test sees it."""

    BEFORE_COMMIT = auto()
    AFTER_COMMIT = auto()


class Journal:
    """One party's database, or that of many clients in one process; locked while it is open."""

    def __init__(
        self, path: Path, database: sqlite3.Connection, lock: int, starts: int, erases: bool
    ) -> None:
        """Not for callers: `open` checks what this takes for granted."""
        self.path, self.database, self.starts, self.erases = path, database, starts, erases
        self.watch: Callable[[Moment], None] | None = None
        self._lock = lock
        self._grouped = False
        self._facts: dict[tuple[str, str], bytes | None] = {}
        self._last: dict[Hashable, Callable[[], None]] = {}
        self._afterwards: list[Callable[[], None]] = []

    @classmethod
    def open(
        cls, folder: Path, *, owner: str, plan: bytes, parties: int = 1, erase: bool = True
    ) -> Journal:
        """The journal in this folder, or a new one. One process at a time has it.

        `erase`: what is deleted is overwritten at once. Without it whole pages that become free
        keep their bytes until they are used again; half of what a leader writes would be zeros.

        Another party's, another plan's, a damaged one, or one that is in use: `ConfigError`, and it
        is left as it was.
        """
        if not plan:
            raise MisuseError("a journal belongs to a plan")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _locked(folder)
        path = folder / NAME
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # before SQLite, by the umask
            with explained(path, "open"):
                database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                try:
                    starts = _attach(path, database, owner, plan.hex())
                    if not erase:
                        database.execute("PRAGMA secure_delete = FAST")
                    for statement in BY_PARTY if parties > 1 else ():
                        database.execute(statement)
                except BaseException:
                    database.close()
                    raise
        except BaseException:
            os.close(lock)
            raise
        return cls(path, database, lock, starts, erase)

    @contextmanager
    def step(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which is on disk when this ends without an exception.

        Inside a group it is a part of that one's, and on disk when the group ends.
        """
        if self._grouped:
            yield self.database
            return
        if self.database.in_transaction:
            raise MisuseError(f"journal {self.path}: a step inside a step")
        with explained(self.path, "write"):
            self._last.clear()
            self._afterwards.clear()
            self.database.execute("BEGIN IMMEDIATE")
            try:
                yield self.database
                for action in self._last.values():
                    action()
                self._at(Moment.BEFORE_COMMIT)
                self.database.execute("COMMIT")
            except BaseException:
                self._facts.clear()  # as they would have been
                if self.database.in_transaction:
                    self.database.execute("ROLLBACK")
                raise
        self._at(Moment.AFTER_COMMIT)
        for action in self._afterwards:
            action()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Steps that share one transaction and one sync: all of them are on disk, or none is."""
        with self.step():
            self._grouped = True
            try:
                yield
            finally:
                self._grouped = False

    def before_commit(self, key: Hashable, action: Callable[[], None]) -> None:
        """Inside a step: do this at its end, once for each key. A state that several inputs of a
        group have changed is written so when all of them are in it."""
        self._last[key] = action

    def after_commit(self, action: Callable[[], None]) -> None:
        """Inside a step: do this once it is on disk. What is to be sent becomes visible so."""
        self._afterwards.append(action)

    def fold(self) -> None:
        """Bring the log into the file and empty it: what was erased is gone from both."""
        with explained(self.path, "write"):
            self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _at(self, moment: Moment) -> None:
        if self.watch is not None:
            self.watch(moment)

    # --- single facts ---------------------------------------------------------------------------

    def fact(self, party: str, name: str) -> bytes | None:
        key = (party, name)
        if key not in self._facts:
            found = self.database.execute(
                "SELECT value FROM fact WHERE party = ? AND name = ?", key
            ).fetchone()
            return self._remembered(key, None if found is None else bytes(found[0]))
        return self._facts[key]

    def _remembered(self, key: tuple[str, str], value: bytes | None) -> bytes | None:
        """A short one is asked for in every step: it is not read from the database again."""
        if value is None or len(value) <= SHORT:
            self._facts[key] = value
        else:
            self._facts.pop(key, None)
        return value

    def set_fact(self, party: str, name: str, value: bytes) -> None:
        """Inside a step."""
        if self.fact(party, name) == value:
            return
        self.database.execute(
            "INSERT INTO fact VALUES (?, ?, ?) "
            "ON CONFLICT (party, name) DO UPDATE SET value = excluded.value",
            (party, name, value),
        )
        self._remembered((party, name), value)

    def probe(self) -> None:
        """Write something: it fails as long as steps do."""
        with self.step():
            self.set_fact("", "probe", time.time_ns().to_bytes(8, "big"))

    @property
    def bytes_on_disk(self) -> int:
        """The database and its log."""
        both = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(path.stat().st_size for path in both if path.exists())

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Fold the log into the file, and let the next process in."""
        self.database.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(folder: Path) -> int:
    """A file that this process has locked until it ends, however it ends."""
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"{folder}: another process has this state",
            hint="one process per state directory: stop the other one first",
        ) from None
    return lock


def _attach(path: Path, database: sqlite3.Connection, owner: str, plan: str) -> int:
    """How often it was opened, this time included, if it is this owner's."""
    # Every page once: one that is damaged would be found in the middle of a round, or never.
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    database.execute("PRAGMA synchronous = FULL")
    database.execute("PRAGMA secure_delete = ON")  # an old secret leaves no trace in the file
    database.execute("BEGIN IMMEDIATE")
    try:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if not names:
            for statement in SCHEMA:
                database.execute(statement)
            row = (SCHEMA_VERSION, owner, plan, 0)
            database.execute("INSERT INTO journal VALUES (?, ?, ?, ?)", row)
        elif "journal" not in names:
            raise ConfigError(
                f"journal {path}: this is a database of something else; it was not changed",
                hint="name a folder of its own for the state",
            )
        starts = _check(path, database, owner, plan)
        database.execute("UPDATE journal SET starts = starts + 1")
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
    database.execute("PRAGMA journal_mode = WAL")
    database.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    return starts + 1


def _check(path: Path, database: sqlite3.Connection, owner: str, plan: str) -> int:
    (version,) = database.execute("SELECT schema_version FROM journal").fetchone()
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"journal {path}: schema version {version}, this tessera reads {SCHEMA_VERSION}",
            hint="use the tessera that wrote it, or a new folder",
        )
    whose, under, starts = database.execute("SELECT owner, plan, starts FROM journal").fetchone()
    if whose != owner:
        raise ConfigError(
            f"journal {path}: it is the state of {whose}, not of {owner}",
            hint="every party has a folder of its own",
        )
    if under != plan:
        raise ConfigError(
            f"journal {path}: it belongs to plan {under[:16]}, this is plan {plan[:16]}",
            hint="go on with the bundle it was begun with, or name a new folder",
        )
    return int(starts)


@contextmanager
def explained(path: Path, what: str) -> Iterator[None]:
    """SQLite's word for a full disk or a damaged file, with the way out."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a bug of ours
    except sqlite3.DatabaseError as error:
        raise JournalFailed(
            f"journal {path}: cannot {what} it: {error}",
            hint="is the disk full, or the file damaged? Nothing was sent that is not in it. "
            "A state is never restored from a backup: see docs/deploy.md",
        ) from error


class JournalFailed(ConfigError):
    """A step is not on disk: it has not happened, and what is in memory must be dropped."""


# --- read beside the thread that writes it --------------------------------------------------------
#
# A connection of its own sees whole steps only: an outcome that is read here is on disk.


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
        found = outcome_text(self._database, round_id)
        if not found:
            return None
        self._last = round_id, outcome_of(json.loads(found))
        return self._last[1]

    def last_rounds(self) -> list[dict[str, Any]]:
        return last_rounds(self._database)


def outcome_text(database: sqlite3.Connection, round_id: RoundId) -> str:
    """How a round ended, as JSON; "" if it has not."""
    found = database.execute(
        "SELECT data FROM event WHERE round_id = ? ORDER BY number DESC LIMIT 1", (int(round_id),)
    ).fetchone()
    return "" if found is None else str(found[0])


def last_rounds(database: sqlite3.Connection, most: int = 10) -> list[dict[str, Any]]:
    """The last rounds with their outcomes, the latest first; for operators, with who was missing at
    a deadline."""
    found = database.execute("SELECT value FROM fact WHERE name = ?", (MISSING,)).fetchone()
    gone: dict[str, Any] = {} if found is None else json.loads(found[0])
    return [
        {
            "round": round_id,
            **outcome_of(event := json.loads(data)),
            **{name: event[name] for name in ("answered", "needed") if name in event},
            **({"missing": gone[str(round_id)]} if str(round_id) in gone else {}),
        }
        for round_id, data in database.execute(
            "SELECT round_id, data FROM event ORDER BY number DESC LIMIT ?", (most,)
        )
    ]


def rounds_ended(folder: Path, bundle: bytes) -> int:
    """Rounds that a leader's state has seen the end of, under this bundle: all are charged."""
    path = folder / NAME
    if not path.exists():
        raise ConfigError(f"{folder}: there is no state here", hint="name a party's --state folder")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            owner, under = database.execute("SELECT owner, plan FROM journal").fetchone()
            (rounds,) = database.execute("SELECT COUNT(DISTINCT round_id) FROM event").fetchone()
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{path}: {error}", hint="the file is damaged, or not a state of tessera"
        ) from error
    if str(under) != bundle.hex():
        raise ConfigError(
            f"{folder} is the state of another federation", hint="name the bundle it was served by"
        )
    if owner != SERVER:
        raise ConfigError(f"{folder} is the state of {owner}", hint="name the leader's")
    return int(rounds)


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


def counted_reasons(reasons: Iterable[str]) -> str:
    """Each reason with how often it is there, the most frequent first."""
    return ", ".join(f"{why} ({count})" for why, count in Counter(reasons).most_common())


def state_of(folder: Path) -> dict[str, Any]:
    """A party's state as an operator may see it: whose it is, its round, its last rounds, restarts
    and disk. No payloads, no row ids."""
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
            out = database.execute(
                "SELECT value FROM fact WHERE name IN (?, ?) ORDER BY party LIMIT 1",
                (OLD_COPY, LEFT_GROUP),
            ).fetchone()
            joined = database.execute("SELECT 1 FROM fact WHERE name = ?", (GROUP,)).fetchone()
            (void,) = database.execute(
                "SELECT MAX(CAST(value AS INTEGER)) FROM fact WHERE name = ?", (VOID_BEFORE,)
            ).fetchone()
            epochs, missing = database.execute(
                "SELECT COUNT(*), SUM(missing) FROM group_epoch WHERE closed IS NULL"
            ).fetchone()
            retired = [
                bytes(why).decode()
                for (why,) in database.execute(
                    "SELECT value FROM fact WHERE name LIKE ?", (f"{RETIRED}%",)
                )
            ]
            rounds = last_rounds(database)
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
        "retired": len(retired) or None,
        "retired_for": counted_reasons(retired),
        "open": epochs or None,
        "missing": missing,
        "membership": ON_THE_OPERATORS_WORD if joined or epochs else "",
        "void": void,
        "trouble": "" if out is None else bytes(out[0]).decode(),
        "restarts": starts - 1,
        "disk": path.stat().st_size + (log.stat().st_size if log.exists() else 0),
        "rounds": rounds,
    }
