"""OfferedRows: which rows the clients of a user account have ever offered, and to which sums.

A fixed group hides who of its members holds a row, for any number of rounds. Two groups do not:
whoever sees the sums of both finds the row's holder among the few members that they have in common,
and so does any other exact sum over the same row. A client's state cannot prevent that, since it is
bound to one federation, and what is called another federation is the leader's choice. So there is
one store for a user account and all its federations. It has a keyed hash of each row, by the names
of the client's own data (`data/row_names.py`), with the group that it was offered to; this is on
disk before a message that depends on the row leaves. A row stays in its group for good. In any
other group, and in any exact sum outside of it, it is refused, unless its owner accepts that.

Rows of sums without fixed groups are kept likewise: there no holder was hidden, and a group in
which such a row comes up later does not hide it again.

What is not seen here: a reinstalled or deleted account, another account or device with the same
data, and data that were renamed (docs/threat-model.md).
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.data.row_names import OwnNames
from tessera.ids import ClientId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.privacy.index.period import AnotherGroup, FrozenPeriod, PeriodStore
from tessera.rounds.noise import noise_of
from tessera.services.account_store import AccountStore

NAME: Final = "offered-rows.sqlite"
AT_ONCE: Final = 500

SCHEMA: Final = (
    # a sum: over a fixed group, or over whoever a federation has in a round
    """CREATE TABLE release (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, federation BLOB NOT NULL, members BLOB NOT NULL,
        fixed INTEGER NOT NULL, UNIQUE (federation, members))""",
    """CREATE TABLE offered_row (
        row BLOB NOT NULL, release INTEGER NOT NULL, PRIMARY KEY (row, release)) WITHOUT ROWID""",
    # whose data from where, and how its rows were named: under other names none can be compared
    """CREATE TABLE offered_data (
        data BLOB NOT NULL, naming BLOB NOT NULL, release INTEGER NOT NULL,
        PRIMARY KEY (data, naming, release)) WITHOUT ROWID""",
)


@dataclass(frozen=True, slots=True)
class ExactSum:
    """An exact sum: of a client's `federation`, by its name there and its own key in it; over
    `members`, b"" where they are not fixed, or not known."""

    name: str
    federation: bytes
    members: bytes
    fixed: bool


@dataclass(frozen=True, slots=True)
class HashedRows:
    """A client's rows as the store has them."""

    rows: frozenset[bytes]
    data: bytes
    naming: bytes


class OfferedRows(AccountStore):
    """The store of one user account."""

    name, schema_version, schema = NAME, 1, SCHEMA
    holds = "the rows that this account has offered"

    # --- what is stored -------------------------------------------------------------------------

    def digest(self, *items: int | bytes | str) -> bytes:
        """What the store has in place of names and keys."""
        named = encode_context(Label.OFFERED_ROW, *items)
        return hashlib.blake2b(named, key=self._key, digest_size=16).digest()

    def offer(self, names: OwnNames, rows: Mapping[str, Ids]) -> HashedRows:
        """These rows of a client, by the names of its own data."""
        person, naming = names.person, names.naming
        return HashedRows(
            frozenset(
                self.digest("row", person, naming, kind, name) for kind, name in names.of(rows)
            ),
            self.digest("data", person, names.source),
            self.digest("naming", naming),
        )

    def flaw(self, offer: HashedRows, to: ExactSum) -> str:
        """Why these rows must not be offered there; "" if they may be."""
        with self._transaction() as database:
            return _flaw(database, offer, to)

    def record(
        self, offer: HashedRows, to: ExactSum, *, accepted: bool, without: bool = False
    ) -> frozenset[bytes]:
        """On disk when this returns; `AnotherGroup`, and nothing is, if they must not be.

        With `without` those that must not be are left out instead, and returned.
        """
        refused: frozenset[bytes] = frozenset()
        with self._transaction() as database:
            if without and not accepted:
                refused = frozenset(_met_others(database, offer, to))
                offer = replace(offer, rows=offer.rows - refused)
            if not accepted and (flaw := _flaw(database, offer, to)):
                raise AnotherGroup(flaw, hint=HINT)
            database.execute(
                "INSERT OR IGNORE INTO release (name, federation, members, fixed) "
                "VALUES (?, ?, ?, ?)",
                (to.name, to.federation, to.members, to.fixed),
            )
            (number,) = database.execute(
                "SELECT id FROM release WHERE federation = ? AND members = ?",
                (to.federation, to.members),
            ).fetchone()
            database.execute(
                "INSERT OR IGNORE INTO offered_data VALUES (?, ?, ?)",
                (offer.data, offer.naming, number),
            )
            database.executemany(
                "INSERT OR IGNORE INTO offered_row VALUES (?, ?)",
                [(row, number) for row in sorted(offer.rows)],
            )
        return refused


HINT: Final = (
    "take part with new rows only; or --accept-identification: then these rows are no longer "
    "hidden among the members of a group (B = 1 for them)"
)


class OneGroup:
    """A client's periods (`privacy/index/period.py`); each of its rows has one group for life.

    `members` are those of its fixed group, if it has one; `directory` has the keys by which they
    are told.
    """

    def __init__(
        self,
        periods: PeriodStore,
        store: OfferedRows,
        plan: Plan,
        client: ClientId,
        names: OwnNames,
        *,
        directory: Mapping[ClientId, bytes],
        members: tuple[int, ...] = (),
        accepted: bool = False,
    ) -> None:
        self._periods, self._store, self._plan, self._client = periods, store, plan, client
        self._names, self._directory, self._accepted = names, directory, accepted
        self._members, self._exact = members, noise_of(plan).opens_exactly
        self.price = ""
        self._offer: HashedRows | None = None
        self._recorded: set[tuple[bytes, HashedRows]] = set()

    # --- before a round -------------------------------------------------------------------------

    def check(self, rows: Mapping[str, Ids]) -> None:
        """`AnotherGroup` for rows that were offered elsewhere; nothing is stored.

        Where that is accepted, `price` says it.
        """
        if not self._exact:
            return
        begun = self._periods.latest(self._plan.federation) if self._members else None
        if begun is not None and not self._accepted:  # newer ones are left out when they are due
            rows = self._rows_of(begun)
        self._offer = offer = self._store.offer(self._names, rows)
        flaw = self._store.flaw(offer, self._release())
        if flaw and not self._accepted:
            raise AnotherGroup(f"client {self._client}: {flaw}", hint=HINT)
        self.price = f"client {self._client}: {flaw}; accepted: B = 1 for them" if flaw else ""

    def begin_round(self, rows: Mapping[str, Ids]) -> None:
        """Before a round without fixed groups: there the sum is over whoever comes."""
        if self._exact and not self._members:
            self._record(self._store.offer(self._names, rows))

    # --- the periods ----------------------------------------------------------------------------

    def group(self, federation: str, members: tuple[int, ...]) -> tuple[int, ...]:
        """On disk here, too, for all rows that were checked: before the client joins."""
        if self._offer is not None:
            self._record(self._offer)
        return self._periods.group(federation, members)

    def begin(self, requested: FrozenPeriod) -> FrozenPeriod:
        """Likewise for the rows of a period, before any is offered.

        Once its group has begun, a new row that has met others is left out: a client that left for
        it would show its data.
        """
        if self._members and self._exact:
            offer = self._store.offer(self._names, self._rows_of(requested))
            if self._periods.latest(requested.federation) is None:
                self._record(offer)
            else:
                to, accepted = self._release(), self._accepted
                refused = self._store.record(offer, to, accepted=accepted, without=True)
                requested = self._without(requested, refused)
        return self._periods.begin(requested)

    def _rows_of(self, period: FrozenPeriod) -> dict[str, Ids]:
        return {self._plan.tables[part.table].name: part.offered for part in period.tables}

    def _without(self, period: FrozenPeriod, refused: frozenset[bytes]) -> FrozenPeriod:
        """The period with these rows among those that are left out (`FrozenTable.left_out`)."""
        if not refused:
            return period

        def kept(name: str, ids: Ids) -> Ids:
            met = [
                bool(self._store.offer(self._names, {name: ids[at : at + 1]}).rows & refused)
                for at in range(len(ids))
            ]
            left: Ids = ids[~np.array(met, dtype=bool)]
            return left

        tables = (
            replace(part, offered=kept(self._plan.tables[part.table].name, part.offered))
            for part in period.tables
        )
        return replace(period, tables=tuple(tables))

    def latest(self, federation: str) -> FrozenPeriod | None:
        return self._periods.latest(federation)

    def rounds(self, federation: str) -> int:
        return self._periods.rounds(federation)

    def count_round(self, federation: str) -> None:
        self._periods.count_round(federation)

    def _record(self, offer: HashedRows) -> None:
        to = self._release()
        if (to.members, offer) not in self._recorded:  # else it is on disk
            self._store.record(offer, to, accepted=self._accepted)
            self._recorded.add((to.members, offer))

    def _release(self) -> ExactSum:
        """Clients are told by id and key: a leader may give the ids of one group to another."""
        name, digest, members = self._plan.federation, self._store.digest, sorted(self._members)
        keys = [item for m in members for item in (m, self._directory[ClientId(m)])]
        return ExactSum(
            name,
            digest("federation", name, self._directory[self._client]),
            digest("group", *keys) if members else b"",
            bool(members),
        )


def _elsewhere(before: Collection[ExactSum], to: ExactSum) -> str:
    """The federation in which something was offered before; "" where that is no matter."""
    for one in before:
        if one.federation == to.federation and one.members == to.members:
            return ""
    return next((one.name for one in before if one.fixed or to.fixed), "")


def _met_others(database: sqlite3.Connection, offer: HashedRows, to: ExactSum) -> dict[bytes, str]:
    """Rows that were offered elsewhere, with the name of the federation."""
    found = _before(database, "offered_row", "row", "row", offer.rows)
    return {row: name for row, before in found.items() if (name := _elsewhere(before, to))}


def _flaw(database: sqlite3.Connection, offer: HashedRows, to: ExactSum) -> str:
    again = list(_met_others(database, offer, to).values())
    if again:
        return (
            f"{len(again)} of its {len(offer.rows)} rows were offered in federation "
            f"{again[0]!r} before, with other clients: whoever has the sums of both finds "
            "whose rows they are"
        )
    namings = _before(database, "offered_data", "naming", "data", [offer.data])
    if offer.naming in namings and not _elsewhere(namings[offer.naming], to):
        return ""
    for naming, before in namings.items():
        if naming != offer.naming and (name := _elsewhere(before, to)):
            return (
                f"its data were offered in federation {name!r} before, with rows named in "
                "another way: whether these are the same rows cannot be told"
            )
    return ""


def _before(
    database: sqlite3.Connection, table: str, what: str, by: str, keys: Collection[bytes]
) -> dict[bytes, list[ExactSum]]:
    """What was offered before under these keys, and to which sums."""
    found, every = defaultdict(list), sorted(keys)
    for start in range(0, len(every), AT_ONCE):
        some = every[start : start + AT_ONCE]
        for one, name, federation, members, fixed in database.execute(
            f"SELECT {what}, name, federation, members, fixed FROM {table} "
            f"JOIN release ON release.id = release WHERE {by} IN ({', '.join('?' * len(some))})",
            some,
        ):
            release = ExactSum(name, bytes(federation), bytes(members), bool(fixed))
            found[bytes(one)].append(release)
    return found
