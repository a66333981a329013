"""FrozenPeriod: what a client's permanent answers depend on, written down before the first of them.

Permanent answers are a keyed function, so they never change as long as key, real set and
probabilities do not. Within a period all three are immutable, and durable before anything is sent.
Otherwise one key would answer under moving thresholds: sweeping p2 bisects a row's hidden word, at
p2 = 0 every yes is real, and a row that joins the real set shows as an answer that flips. So are
the rest of the plan and the decoys' share and catalogue: with a share of 0.5 and then 0, what is
left of a client's rows in the unions is real.

A new period has a new secret and may have other data and other probabilities. Its answers are new
evidence about the same rows: the epsilons of periods add up (`privacy/dp/ledger.py`). Its number
follows from the round's, which the leader says; so a client counts its own rounds, and refuses a
period that comes too early by that count (`must_not_be_early`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId, TableId
from tessera.privacy.index.response import (
    Answers,
    IndexPrivacy,
    Mask,
    Perturbation,
    RowIds,
    Rows,
    as_rows,
    below,
    contained,
    fresh_words,
    keyed_words,
    must_be_sorted,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenTable:
    """What one table looked like when the period began."""

    table: TableId
    real: Rows = field(repr=False)  # the snapshot, before anything below
    offered: Rows = field(repr=False)  # S in Algorithm 2: what enters the union
    max_rows: int | None = None

    @property
    def trained(self) -> Rows:
        """The real rows that are offered: these can be trained."""
        return self.real[contained(self.real, self.offered)]

    @property
    def left_out(self) -> Rows:
        """Real rows that are left out this period (over the cap, or not kept). Reported locally."""
        return self.real[~contained(self.real, self.offered)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the decoys and everything else in a round follow from, beside the probabilities."""

    plan: bytes = b""
    """Digest of the whole plan."""
    decoys: float = 0.0
    """Decoys per real id."""
    catalogue: bytes = b""
    """Digest of the ids that decoys are drawn from."""

    def must_match(self, requested: Agreement, where: str, hint: str) -> None:
        """Refuse other decoys than these, and another plan."""
        if requested.decoys != self.decoys:
            raise ConfigError(
                f"{where} has decoys = {self.decoys}, and {requested.decoys} was requested: rows "
                "that stay in the union when decoys leave it are real",
                hint=hint,
            )
        if requested.catalogue != self.catalogue:
            raise ConfigError(
                f"{where} has decoys from another catalogue than the one requested: rows that "
                "stay in the union when decoys leave it are real",
                hint=hint,
            )
        if requested.plan != self.plan:
            raise ConfigError(
                f"{where} was frozen under another plan (digest {self.plan.hex()[:16]}, and "
                f"{requested.plan.hex()[:16]} was requested)",
                hint=hint,
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenPeriod:
    """Everything an answer depends on, immutable from the period's first answer to its last.

    Made by `freeze`, which writes it to a `PeriodStore` first. Answers take no probabilities and no
    real set: there is no way to ask a frozen period for others.
    """

    federation: str
    period: int
    secret: Secret
    privacy: IndexPrivacy
    perturbation: Perturbation | None
    tables: tuple[FrozenTable, ...]  # in order of table id
    agreement: Agreement = Agreement()

    def permanent(self, table: TableId, rows: Rows) -> Mask:
        """The permanent answer about each row (sorted, no repeats): Algorithm 2, lines 2-10."""
        must_be_sorted(rows)
        words = keyed_words(
            self.secret, Label.PERMANENT_RESPONSE, (self.federation, self.period, table), rows
        )
        real = contained(rows, self._table(table).offered)
        return np.where(real, below(words, self.privacy.p1), below(words, self.privacy.p2))

    def answer(
        self, table: TableId, union: Rows, *, round_id: RoundId, entropy: Entropy
    ) -> Answers:
        """This round's answers about the union (sorted, no repeats): Algorithm 2, lines 11-16.

        Ask once per (round, table), and store `revealed` before it leaves: after a crash the stored
        set is sent again. A second draw in the same round would be a second answer.
        """
        yes = self.permanent(table, union)
        secret = entropy.secret(
            Label.INSTANTANEOUS_RESPONSE, self.federation, self.period, round_id, table, size=16
        )
        words = fresh_words(secret, union.size)
        instantaneous = np.where(yes, below(words, self.privacy.p3), below(words, self.privacy.p4))
        revealed = union[instantaneous]
        return Answers(
            permanent=union[yes],
            revealed=revealed,
            succinct=revealed[contained(revealed, self._table(table).trained)],
        )

    def must_match(self, requested: FrozenPeriod) -> None:
        """Refuse a request for this period under other terms than it was frozen with."""
        where = f"index privacy: federation {self.federation!r}, period {self.period}"
        wait = f"keep the terms, or make the change in period {self.period + 1}"
        if requested.period < self.period or requested.federation != self.federation:
            raise ConfigError(
                f"{where} is the latest one frozen, and period {requested.period} of "
                f"{requested.federation!r} was requested: an old number would get a second secret",
                hint=f"period numbers only increase; the next is {self.period + 1}",
            )
        if requested.period != self.period:
            raise MisuseError(f"{where} was compared with period {requested.period}")
        if (requested.privacy, requested.perturbation) != (self.privacy, self.perturbation):
            raise ConfigError(
                f"{where} was frozen with {terms(self)}, and {terms(requested)} was requested: "
                "answers from one key under changing probabilities bisect the hidden value "
                "(at p2 = 0 every yes is real)",
                hint=wait,
            )
        frozen = {item.table: item for item in self.tables}
        other = {item.table: item for item in requested.tables}
        for table in sorted(frozen.keys() | other.keys()):
            a, b = frozen.get(table), other.get(table)
            if a is None or b is None or not np.array_equal(a.real, b.real):
                raise ConfigError(
                    f"{where}: the real set of table {table} is not the one frozen: a row that "
                    "joins or leaves would show as an answer that flips",
                    hint="use the frozen set until the period ends (FrozenPeriod.tables)",
                )
            if a.max_rows != b.max_rows:
                raise ConfigError(
                    f"{where}: table {table} was frozen with max_rows {a.max_rows}, and "
                    f"{b.max_rows} was requested",
                    hint=wait,
                )
        self.agreement.must_match(requested.agreement, where, wait)

    def to_fields(self) -> dict[str, Any]:
        """Plain values only (str, int, float, bytes, None, tuples), for a store or an encoding.

        It holds the secret in the clear: where this goes, the client's answers can be undone.
        """
        keep = self.perturbation
        return {
            "federation": self.federation,
            "period": self.period,
            "secret": self.secret.reveal(),
            "probabilities": tuple(
                getattr(self.privacy, item.name) for item in fields(IndexPrivacy)
            ),
            "perturbation": None if keep is None else (keep.keep, keep.add),
            "tables": tuple(
                (
                    t.table,
                    t.max_rows,
                    t.real.astype("<u8").tobytes(),
                    t.offered.astype("<u8").tobytes(),
                )
                for t in self.tables
            ),
            "agreement": astuple(self.agreement),
        }

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> FrozenPeriod:
        """The inverse of `to_fields`."""
        p1, p2, p3, p4 = values["probabilities"]
        keep = values["perturbation"]
        return cls(
            federation=values["federation"],
            period=values["period"],
            secret=Secret(values["secret"]),
            privacy=IndexPrivacy(p1=p1, p2=p2, p3=p3, p4=p4),
            perturbation=None if keep is None else Perturbation(keep=keep[0], add=keep[1]),
            tables=tuple(
                FrozenTable(
                    table=TableId(table),
                    max_rows=max_rows,
                    real=as_rows(np.frombuffer(real, dtype="<u8"), what=f"table {table}"),
                    offered=as_rows(np.frombuffer(offered, dtype="<u8"), what=f"table {table}"),
                )
                for table, max_rows, real, offered in values["tables"]
            ),
            agreement=Agreement(**dict(zip(AGREED, values["agreement"], strict=True))),
        )

    def _table(self, table: TableId) -> FrozenTable:
        for item in self.tables:
            if item.table == table:
                return item
        raise MisuseError(
            f"period {self.period} froze no table {table}; a derived table follows its parent"
        )


AGREED: Final = tuple(item.name for item in fields(Agreement))


def terms(frozen: FrozenPeriod) -> str:
    """The probabilities of a period, for a message."""
    p = frozen.privacy
    text = f"p1..p4 = {p.p1}, {p.p2}, {p.p3}, {p.p4}"
    if frozen.perturbation is not None:
        text += f", keep {frozen.perturbation.keep}, add {frozen.perturbation.add}"
    return text


def freeze(
    store: PeriodStore,
    *,
    federation: str,
    period: int,
    privacy: IndexPrivacy,
    real: Mapping[TableId, RowIds],
    entropy: Entropy,
    sizes: Mapping[TableId, int] | None = None,
    max_rows: Mapping[TableId, int] | None = None,
    perturbation: Perturbation | None = None,
    pool: Mapping[TableId, RowIds] | None = None,
    agreement: Agreement | None = None,
) -> FrozenPeriod:
    """Begin a period, or come back to it after a restart; durable when this returns.

    Coming back needs the same probabilities, real sets, caps and agreement, and gives the stored
    record; other ones are refused. `sizes` are the tables' row counts, to refuse ids outside them;
    `pool` holds the public candidates that a perturbation adds from.
    """
    if not 0 <= period < 1 << 63:
        raise ConfigError(
            f"index privacy: period {period} is out of range", hint="periods are 0 .. 2^63 - 1"
        )
    secret = entropy.secret(Label.PERIOD_SECRET, federation, period)
    tables = []
    for table in sorted(real):
        what, size = f"table {table}", (sizes or {}).get(table)
        rows = offered = as_rows(real[table], what=what, size=size)
        context = (federation, period, table)
        if perturbation is not None:
            candidates = as_rows((pool or {}).get(table, ()), what=f"{what}, pool", size=size)
            offered = perturbed(rows, candidates, perturbation, secret=secret, context=context)
        cap = (max_rows or {}).get(table)
        if cap is not None:
            offered = keyed_subset(offered, cap, secret=secret, context=context)
        tables.append(FrozenTable(table=table, real=rows, offered=offered, max_rows=cap))
    requested = FrozenPeriod(
        federation=federation,
        period=period,
        secret=secret,
        privacy=privacy,
        perturbation=perturbation,
        tables=tuple(tables),
        agreement=agreement or Agreement(),
    )
    frozen = store.begin(requested)
    frozen.must_match(requested)
    return frozen


def must_not_be_early(store: PeriodStore, federation: str, period: int, least: int) -> None:
    """Refuse another period than the stored one before the client has had `least` of its rounds.

    A round that is refused counts, too: a client that missed some comes back, and a leader gains
    nothing, since each new period takes it as many rounds as an honest one.
    """
    stored = store.latest(federation)
    if stored is None or period <= stored.period:
        return
    rounds = store.rounds(federation)
    if rounds < least:
        store.count_round(federation)
        raise EarlyPeriod(
            f"index privacy: federation {federation!r} would begin period {period} after {rounds} "
            f"rounds of this client in period {stored.period}, and {least} are due: every new "
            "period answers about the same rows once more",
            hint="a leader numbers rounds one by one; where cohorts are drawn, own_rounds in "
            "[privacy] says how many rounds of its own a client waits for",
        )


def perturbed(
    real: Rows, pool: Rows, how: Perturbation, *, secret: Secret, context: tuple[int | str, ...]
) -> Rows:
    """The perturbed real set: a keyed choice, the same for the whole period."""
    others = pool[~contained(pool, real)]
    kept = real[below(keyed_words(secret, Label.PERTURBED_SET, context, real), how.keep)]
    added = others[below(keyed_words(secret, Label.PERTURBED_SET, context, others), how.add)]
    return as_rows(np.concatenate([kept, added]), what="perturbed set")


def keyed_subset(rows: Rows, cap: int, *, secret: Secret, context: tuple[int | str, ...]) -> Rows:
    """At most `cap` of these rows: those with the smallest keyed words, fixed for the period."""
    if cap < 1:
        raise ConfigError(
            f"index privacy: max_rows = {cap} leaves nothing to train", hint="max_rows is 1 or more"
        )
    if rows.size <= cap:
        return rows
    order = np.argsort(keyed_words(secret, Label.PERIOD_ROWS_KEPT, context, rows), kind="stable")
    return as_rows(rows[order[:cap]], what="kept rows")


class EarlyPeriod(ConfigError):
    """A new period before the client's own rounds allow one. Nothing was sent."""


class AnotherGroup(ConfigError):
    """Rows of this client were offered to a group of other members before."""


class PeriodStore(Protocol):
    """Where a client keeps its latest frozen period, one per federation."""

    def begin(self, requested: FrozenPeriod) -> FrozenPeriod:
        """Store `requested` if its number is above the stored one; return what is now stored.

        One atomic step, so that two processes of one client cannot freeze two secrets. For the
        number already stored that record comes back unchanged; the caller compares. Durable on
        return.
        """
        ...

    def latest(self, federation: str) -> FrozenPeriod | None:
        """The stored period of this federation, if there is one."""
        ...

    def group(self, federation: str, members: tuple[int, ...]) -> tuple[int, ...]:
        """The fixed group this client meets in: these members if none are stored yet, for good.

        Durable on return. Among other members the old group and the new one have only few in
        common, and a holder is hidden among those alone. `AnotherGroup` where the client's rows
        have met others elsewhere.
        """
        ...

    def rounds(self, federation: str) -> int:
        """The rounds that this client has counted in the stored period."""
        ...

    def count_round(self, federation: str) -> None:
        """Count one more round of this client in the stored period; durable on return."""
        ...


class MemoryPeriods:
    """For simulations: periods that last as long as the process."""

    def __init__(self) -> None:
        self._latest: dict[str, FrozenPeriod] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._rounds: dict[str, int] = {}

    def begin(self, requested: FrozenPeriod) -> FrozenPeriod:
        stored = self._latest.get(requested.federation)
        if stored is None or stored.period < requested.period:
            stored = self._latest[requested.federation] = requested
            self._rounds[requested.federation] = 0
        return stored

    def latest(self, federation: str) -> FrozenPeriod | None:
        return self._latest.get(federation)

    def group(self, federation: str, members: tuple[int, ...]) -> tuple[int, ...]:
        return self._groups.setdefault(federation, members)

    def rounds(self, federation: str) -> int:
        return self._rounds.get(federation, 0)

    def count_round(self, federation: str) -> None:
        self._rounds[federation] = self.rounds(federation) + 1


SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS period (
        federation TEXT PRIMARY KEY, number INTEGER NOT NULL, secret BLOB NOT NULL,
        p1 REAL NOT NULL, p2 REAL NOT NULL, p3 REAL NOT NULL, p4 REAL NOT NULL,
        keep REAL, added REAL
    )""",
    """CREATE TABLE IF NOT EXISTS real_set (
        federation TEXT NOT NULL, table_id INTEGER NOT NULL, max_rows INTEGER,
        real_rows BLOB NOT NULL, offered BLOB NOT NULL, PRIMARY KEY (federation, table_id)
    )""",
    """CREATE TABLE IF NOT EXISTS agreement (
        federation TEXT PRIMARY KEY, plan BLOB NOT NULL, decoys REAL NOT NULL,
        catalogue BLOB NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS fixed_group (
        federation TEXT PRIMARY KEY, members BLOB NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS own_rounds (
        federation TEXT PRIMARY KEY, rounds INTEGER NOT NULL
    )""",
)


class SqlitePeriods:
    """Periods in one SQLite file, readable by its owner only; on disk before `begin` returns.

    The record of an earlier period is overwritten in the file together with its secret: nothing in
    it can tell which answers of a finished period were true. What the disk keeps of overwritten
    blocks, and of SQLite's deleted journal, is beyond us.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # before SQLite would, by the umask
        with self._database() as database:
            for statement in SCHEMA:
                database.execute(statement)

    def begin(self, requested: FrozenPeriod) -> FrozenPeriod:
        with self._database() as database:
            stored = read_period(database, requested.federation)
            if stored is None or stored.period < requested.period:
                write_period(database, requested)
                stored = requested
        return stored

    def latest(self, federation: str) -> FrozenPeriod | None:
        with self._database() as database:
            return read_period(database, federation)

    def group(self, federation: str, members: tuple[int, ...]) -> tuple[int, ...]:
        with self._database() as database:
            return stored_group(database, federation, members)

    def rounds(self, federation: str) -> int:
        with self._database() as database:
            return read_rounds(database, federation)

    def count_round(self, federation: str) -> None:
        with self._database() as database:
            add_round(database, federation)

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which is on disk when this ends without an exception."""
        try:
            with closing(
                sqlite3.connect(self.path, isolation_level=None, timeout=60.0)
            ) as database:
                database.execute("PRAGMA synchronous = EXTRA")  # the directory entry too
                database.execute("PRAGMA secure_delete = ON")  # an old secret leaves no trace
                database.execute("BEGIN IMMEDIATE")  # left without COMMIT, closing rolls back
                yield database
                database.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"index privacy: {self.path} cannot be used as a store of periods: {error}",
                hint="name a new file and begin a period this client never had. An old copy must "
                "not be put back: it would answer again",
            ) from error


def read_period(database: sqlite3.Connection, federation: str) -> FrozenPeriod | None:
    """This federation's stored period."""
    row = database.execute(
        "SELECT number, secret, p1, p2, p3, p4, keep, added FROM period WHERE federation = ?",
        (federation,),
    ).fetchone()
    if row is None:
        return None
    number, secret, p1, p2, p3, p4, keep, added = row
    tables = database.execute(
        "SELECT table_id, max_rows, real_rows, offered FROM real_set WHERE federation = ? "
        "ORDER BY table_id",
        (federation,),
    ).fetchall()
    agreement = database.execute(
        "SELECT plan, decoys, catalogue FROM agreement WHERE federation = ?", (federation,)
    ).fetchone()
    return FrozenPeriod.from_fields(
        {
            "federation": federation,
            "period": number,
            "secret": secret,
            "probabilities": (p1, p2, p3, p4),
            "perturbation": None if keep is None else (keep, added),
            "tables": tables,
            # a file from before it was frozen: whatever is requested differs, until the next period
            "agreement": agreement or astuple(Agreement()),
        }
    )


def stored_group(
    database: sqlite3.Connection, federation: str, members: tuple[int, ...]
) -> tuple[int, ...]:
    """The federation's fixed group: these members if none are stored yet."""
    database.execute(
        "INSERT OR IGNORE INTO fixed_group VALUES (?, ?)",
        (federation, np.array(members, dtype="<u8").tobytes()),
    )
    (stored,) = database.execute(
        "SELECT members FROM fixed_group WHERE federation = ?", (federation,)
    ).fetchone()
    return tuple(np.frombuffer(stored, dtype="<u8").tolist())


def read_rounds(database: sqlite3.Connection, federation: str) -> int:
    """The rounds counted in the federation's period."""
    found = database.execute(
        "SELECT rounds FROM own_rounds WHERE federation = ?", (federation,)
    ).fetchone()
    return int(found[0]) if found else 0


def add_round(database: sqlite3.Connection, federation: str) -> None:
    """Count one more."""
    database.execute(
        "INSERT INTO own_rounds VALUES (?, 1) "
        "ON CONFLICT (federation) DO UPDATE SET rounds = rounds + 1",
        (federation,),
    )


def write_period(database: sqlite3.Connection, frozen: FrozenPeriod) -> None:
    """Put this period in the place of the federation's earlier one."""
    values = frozen.to_fields()
    federation = values["federation"]
    for table in ("real_set", "period", "agreement", "own_rounds"):
        database.execute(f"DELETE FROM {table} WHERE federation = ?", (federation,))
    database.execute(
        "INSERT INTO agreement VALUES (?, ?, ?, ?)", (federation, *values["agreement"])
    )
    database.execute(
        "INSERT INTO period VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            federation,
            values["period"],
            values["secret"],
            *values["probabilities"],
            *(values["perturbation"] or (None, None)),
        ),
    )
    database.executemany(
        "INSERT INTO real_set VALUES (?, ?, ?, ?, ?)",
        [(federation, *table) for table in values["tables"]],
    )
