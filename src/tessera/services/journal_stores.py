"""A ledger's events as text, for the journal: what was charged is charged after a restart, too.

A record is written with its kind and its fields, and read back by the classes named here; a kind
that is not among them is refused. Nothing is skipped: a charge that cannot be stored is an error
before anything is sent.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, Final, Generic, TypeVar

import numpy as np

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.learning.compression import Offer, Residual
from tessera.learning.tables.submodel import TablePart
from tessera.privacy.dp.events import EVENTS, Event
from tessera.privacy.dp.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.ledger import Entry
from tessera.privacy.dp.mechanism import (
    FixedSizeNoise,
    GaussianNoise,
    GaussianShares,
    PureLevel,
    SkellamNoise,
    Unseen,
)
from tessera.privacy.index.period import (
    Agreement,
    FrozenPeriod,
    add_round,
    read_period,
    read_rounds,
    stored_group,
    write_period,
)
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.two_server.key_period import Marked, OwnKeys, check_rising
from tessera.rounds.attendance import Attendance
from tessera.rounds.party import LocalState, StoredRole
from tessera.rounds.root import lasting_secret
from tessera.services.journal import Journal
from tessera.services.link import Links
from tessera.wire.stored import MAX_STATE_BYTES

RECORDS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        *EVENTS,
        IndexPrivacy,
        GaussianNoise,
        FixedSizeNoise,
        GaussianShares,
        SkellamNoise,
        PureLevel,
        Unseen,
    )
}
CHOICES: Final[Mapping[str, type[Enum]]] = {
    kind.__name__: kind for kind in (Observer, Adjacency, Trust, Unit)
}


def event_text(event: Event) -> str:
    """One line of JSON."""
    return json.dumps(_plain(event), sort_keys=True)


def event_of(text: str) -> Event:
    """The inverse of `event_text`."""
    found = _value(json.loads(text))
    if not isinstance(found, EVENTS):
        raise MisuseError(f"{type(found).__name__} is not a privacy event")
    return found


def _plain(value: Any) -> Any:
    kind = type(value).__name__
    if isinstance(value, Enum):
        if kind not in CHOICES:
            raise MisuseError(f"a charge with a {kind} cannot be stored")
        return {"choice": kind, "value": value.value}
    if is_dataclass(value) and not isinstance(value, type):
        if kind not in RECORDS:
            raise MisuseError(f"a charge with a {kind} cannot be stored")
        return {
            "record": kind,
            "fields": {f.name: _plain(getattr(value, f.name)) for f in fields(value)},
        }
    if isinstance(value, frozenset):
        return {"set": sorted((_plain(v) for v in value), key=json.dumps)}
    if isinstance(value, tuple):
        return {"tuple": [_plain(v) for v in value]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise MisuseError(f"a charge with a {kind} cannot be stored")


def _value(plain: Any) -> Any:
    match plain:
        case {"choice": str(kind), "value": value}:
            return CHOICES[kind](value)
        case {"record": str(kind), "fields": dict(parts)}:
            if kind not in RECORDS:
                raise MisuseError(f"{kind} is not part of a privacy event")
            return RECORDS[kind](**{name: _value(part) for name, part in parts.items()})
        case {"set": list(items)}:
            return frozenset(_value(item) for item in items)
        case {"tuple": list(items)}:
            return tuple(_value(item) for item in items)
    return plain


# --- journal stores -------------------------------------------------------------------------------
#
# What outlives a round, as tables of a journal: periods, report ids, charges, a client's own.
#
# All of them write inside the step that is open; a step that does not commit leaves nothing of it.


LAST_ROUND: Final = "last round"
SECRET: Final = "secret"
LEDGER: Final = "ledger"
"""What the account's store calls the charges of a client in this journal."""
EXAMPLES: Final = "examples of the period"
CUTOFF: Final = "cut-off of the period"
AGREEMENT: Final = "agreement"
ATTENDANCE: Final = "rounds of a training"
KEYS: Final = "keys"
CHAIN: Final = "secrets of correlated noise"
RESIDUAL: Final = "residual"
COUNTED: Final = "rounds that counted"
MOST_COUNTED: Final = 1000
"""Rounds of which a client remembers whether its update was in the sum, the latest ones."""
BROKEN: Final = "broken"

R = TypeVar("R", bound=Marked)


class JournalPeriods:
    """A client's latest frozen period (`privacy/index/period.py`), in its process's journal."""

    def __init__(self, journal: Journal, party: str) -> None:
        self._database, self._party = journal.database, party
        self._latest: dict[str, FrozenPeriod | None] = {}

    def _key(self, federation: str) -> str:
        return f"{self._party} in {federation}"

    def begin(self, requested: FrozenPeriod) -> FrozenPeriod:
        stored = self.latest(requested.federation)
        if stored is None or stored.period < requested.period:
            key = self._key(requested.federation)
            write_period(self._database, replace(requested, federation=key))
            stored = self._latest[requested.federation] = requested
        return stored

    def latest(self, federation: str) -> FrozenPeriod | None:
        if federation not in self._latest:
            found = read_period(self._database, self._key(federation))
            self._latest[federation] = found and replace(found, federation=federation)
        return self._latest[federation]

    def group(self, federation: str, members: tuple[int, ...]) -> tuple[int, ...]:
        return stored_group(self._database, self._key(federation), members)

    def rounds(self, federation: str) -> int:
        return read_rounds(self._database, self._key(federation))

    def count_round(self, federation: str) -> None:
        add_round(self._database, self._key(federation))


class JournalReplayGuard:
    """The helper's memory of rounds, report ids and the one list of a round, for good.

    What a role has accepted since its last snapshot is handled once more when it is woken, and is
    new to it: those entries are not `settled` until the next snapshot.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.replaying = False

    def begin_round(self, round_id: RoundId) -> bool:
        return self._accept(f"round {int(round_id):020}".encode())

    def accept(self, report_id: bytes) -> bool:
        return self._accept(b"report " + report_id)

    def release(self, round_id: RoundId, reports: bytes) -> bool:
        """The same list again is no other one: a role that is woken comes to it once more."""
        database, prefix = self._journal.database, f"share {int(round_id):020} ".encode()
        name = prefix + reports
        first = "SELECT id FROM report WHERE id >= ? AND id < ?"
        if (found := database.execute(first, (prefix, prefix[:-1] + b"!")).fetchone()) is not None:
            return bool(found[0] == name)
        database.execute("INSERT INTO report VALUES (?, 0)", (name,))
        return True

    def _accept(self, name: bytes) -> bool:
        database = self._journal.database
        if self.replaying:
            found = database.execute("SELECT settled FROM report WHERE id = ?", (name,)).fetchone()
            return found is not None and not found[0]
        if name.startswith(b"round "):
            later = "SELECT 1 FROM report WHERE id >= ? AND id < ?"
            if database.execute(later, (name, b"round ~")).fetchone():
                return False
        added = database.execute("INSERT OR IGNORE INTO report VALUES (?, 0)", (name,))
        return added.rowcount == 1

    def settle(self) -> None:
        """What was accepted is part of a stored snapshot now."""
        self._journal.database.execute("UPDATE report SET settled = 1 WHERE settled = 0")


class JournalKeys(Generic[R]):
    """Secrets that last longer than a round: keys (`protocols/two_server/key_period.py`), or what
    correlated noise follows from (`rounds/noise_chain.py`), each under a name of its own."""

    def __init__(self, journal: Journal, party: str, kind: type[R], name: str = KEYS) -> None:
        self._journal, self._party, self._kind, self._name = journal, party, kind, name

    def latest(self) -> R | None:
        data = self._journal.fact(self._party, self._name)
        if data is None:
            return None
        found: R = wire.decode(data, expect=[self._kind], cap=MAX_STATE_BYTES)
        return found

    def keep(self, record: R) -> None:
        stored = self.latest()
        check_rising(stored, record)
        if stored is None or stored.mark != record.mark:
            self._journal.set_fact(self._party, self._name, wire.encode(record))


# --- roles ----------------------------------------------------------------------------------------


def store_role(
    links: Links, part: int, round_id: RoundId, role: Any, *, keep_received: bool = False
) -> None:
    """A role as it is now, with all that its links have received, in place of what was stored.

    `keep_received`: the messages are in the journal as they were received, and are only named.
    """
    database, here = links.journal.database, (links.party, part)
    database.execute(
        "INSERT INTO role VALUES (?, ?, ?, ?, ?) ON CONFLICT (party, part) DO UPDATE SET "
        "round_id = excluded.round_id, included = excluded.included, snapshot = excluded.snapshot",
        (*here, int(round_id), links.received, role.snapshot()),
    )
    named: Mapping[bytes, bytes] = role.messages
    there = {
        bytes(digest)
        for (digest,) in database.execute(
            "SELECT digest FROM kept WHERE party = ? AND part = ?", here
        )
    }
    database.executemany(
        "DELETE FROM kept WHERE party = ? AND part = ? AND digest = ?",
        [(*here, digest) for digest in there - named.keys()],
    )
    new = []
    for digest in named.keys() - there:
        source = links.row_of(named[digest]) if keep_received else None
        new.append((*here, digest, source, named[digest] if source is None else None))
    database.executemany("INSERT INTO kept VALUES (?, ?, ?, ?, ?)", new)


def stored_role(links: Links, part: int) -> tuple[RoundId, StoredRole] | None:
    """The round and the role as last stored; `entries` has what was accepted since."""
    database, here = links.journal.database, (links.party, part)
    found = database.execute(
        "SELECT round_id, snapshot FROM role WHERE party = ? AND part = ?", here
    ).fetchone()
    if found is None:
        return None
    messages = {
        bytes(digest): bytes(data)
        for digest, data in database.execute(
            "SELECT k.digest, COALESCE(k.data, r.data) FROM kept k "
            "LEFT JOIN received r ON r.id = k.source WHERE k.party = ? AND k.part = ?",
            here,
        )
    }
    return RoundId(found[0]), StoredRole(bytes(found[1]), messages)


def entries(links: Links, part: int) -> list[tuple[str, str, bytes | None]]:
    """(sender, answer, message) received since the role was stored, in their order; None for a
    message that was refused and is not kept."""
    database = links.journal.database
    (included,) = database.execute(
        "SELECT included FROM role WHERE party = ? AND part = ?", (links.party, part)
    ).fetchone() or (0,)
    return [
        (sender, answer, None if data is None else bytes(data))
        for sender, answer, data in database.execute(
            "SELECT peer, answer, data FROM received WHERE party = ? ORDER BY id LIMIT -1 OFFSET ?",
            (links.party, included),
        )
    ]


# --- a client's own -------------------------------------------------------------------------------


def load_local(journal: Journal, party: str, local: LocalState) -> None:
    """Bring a client's own state to where the journal has it; its ledger is made with `charges`."""
    local.own_keys = JournalKeys(journal, party, OwnKeys)
    last = journal.fact(party, LAST_ROUND)
    local.last_round = None if last is None else RoundId(int(last))
    secret = journal.fact(party, SECRET)
    local.secret = None if secret is None else Secret(secret)
    agreed = journal.fact(party, AGREEMENT)
    local.agreement = None if agreed is None else _agreement(agreed)
    attended = journal.fact(party, ATTENDANCE)
    local.attendance = {} if attended is None else _attendance(attended)
    rounds = json.loads(journal.fact(party, COUNTED) or b"{}")
    local.counted = {int(each): bool(is_in) for each, is_in in rounds.items()}
    kept = journal.fact(party, RESIDUAL)
    local.residual = None if kept is None else _residual(kept)
    local.broken = (journal.fact(party, BROKEN) or b"").decode()


def own_secret(
    journal: Journal, party: str, entropy: Entropy, federation: str, client: int
) -> Secret:
    """A client's lasting secret: on disk before anything is drawn from it, and for good."""
    stored = journal.fact(party, SECRET)
    if stored is not None:
        return Secret(stored)
    if journal.fact(party, LAST_ROUND) is not None:
        raise ConfigError(
            f"{party} has been in rounds, and its secret is not in {journal.path}: with another "
            "one its own rows and negatives would change, which shows whose they are",
            hint="restore the folder as it was, or enrol as a new client with rows of its own",
        )
    fresh = lasting_secret(entropy, federation, client)
    with journal.step():
        journal.set_fact(party, SECRET, fresh.reveal())
    return fresh


def ledger_id(journal: Journal, party: str) -> bytes:
    """By which a client's charges in this journal are told from those in any other, for good."""
    stored = journal.fact(party, LEDGER)
    if stored is None:
        stored = os.urandom(16)
        with journal.step():
            journal.set_fact(party, LEDGER, stored)
    return stored


def charges(journal: Journal, party: str) -> list[Entry]:
    """What a client was charged so far."""
    return [
        Entry(event=event_of(event), reason=reason)
        for event, reason in journal.database.execute(
            "SELECT event, reason FROM charge WHERE party = ? ORDER BY number", (party,)
        )
    ]


def save_local(journal: Journal, party: str, local: LocalState) -> None:
    """What has changed of it, inside a step."""
    if local.last_round is not None:
        journal.set_fact(party, LAST_ROUND, str(int(local.last_round)).encode())
    if local.secret is not None:
        journal.set_fact(party, SECRET, local.secret.reveal())
    if local.agreement is not None:
        journal.set_fact(party, AGREEMENT, _agreement_text(local.agreement))
    if local.attendance:
        journal.set_fact(party, ATTENDANCE, attendance_text(local.attendance))
    if local.counted:
        last = sorted(local.counted)[-MOST_COUNTED:]
        rounds = {str(each): local.counted[each] for each in last}
        journal.set_fact(party, COUNTED, json.dumps(rounds).encode())
    if local.residual is not None:
        journal.set_fact(party, RESIDUAL, _residual_bytes(local.residual))
    if local.broken or journal.fact(party, BROKEN):
        journal.set_fact(party, BROKEN, local.broken.encode())
    (stored,) = journal.database.execute(
        "SELECT COALESCE(MAX(number), -1) + 1 FROM charge WHERE party = ?", (party,)
    ).fetchone()
    journal.database.executemany(
        "INSERT INTO charge VALUES (?, ?, ?, ?)",
        [
            (party, number, event_text(entry.event), entry.reason)
            for number, entry in enumerate(local.ledger.entries)
            if number >= stored
        ],
    )


def _residual_bytes(residual: Residual) -> bytes:
    content, offer = io.BytesIO(), residual.offer
    arrays: dict[str, Any] = {"kept": residual.kept, "dropped": np.array(residual.dropped)}
    if offer is not None:
        arrays |= {"round": np.array(offer.round_id), "total": offer.total, "sent": offer.sent}
    np.savez(content, **arrays)
    return content.getvalue()


def _residual(content: bytes) -> Residual:
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        offer = None
        if "round" in found:
            offer = Offer(int(found["round"]), found["total"], found["sent"])
        return Residual(found["kept"], offer, int(found["dropped"]))


def _agreement_text(agreement: Agreement) -> bytes:
    plan, catalogue = agreement.plan.hex(), agreement.catalogue.hex()
    return json.dumps([plan, agreement.decoys, catalogue]).encode()


def _agreement(text: bytes) -> Agreement:
    plan, decoys, catalogue = json.loads(text)
    return Agreement(plan=bytes.fromhex(plan), decoys=decoys, catalogue=bytes.fromhex(catalogue))


def attendance_text(attendance: Mapping[str, Attendance]) -> bytes:
    found = {
        name: [each.training.hex(), each.last, each.count] for name, each in attendance.items()
    }
    return json.dumps(found, sort_keys=True).encode()


def _attendance(text: bytes) -> dict[str, Attendance]:
    return {
        name: Attendance(training=bytes.fromhex(training), last=last, count=count)
        for name, (training, last, count) in json.loads(text).items()
    }


class JournalExamples:
    """The examples of a client's period, as they were when it began: whatever its data become."""

    def __init__(self, journal: Journal, party: str) -> None:
        self._journal, self._party = journal, party

    def load(self) -> Examples | None:
        """None before the first period."""
        stored = self._journal.fact(self._party, EXAMPLES)
        if stored is None:
            return None
        with np.load(io.BytesIO(stored), allow_pickle=False) as columns:
            return Examples({name: columns[name] for name in columns.files})

    @property
    def cutoff(self) -> tuple[int, bytes] | None:
        """Up to when they are, and the digest of what was read; None before the first period."""
        stored = self._journal.fact(self._party, CUTOFF)
        if stored is None:
            return None
        moment, _, digest = stored.decode().partition(" ")
        return int(moment), bytes.fromhex(digest)

    def keep(self, examples: Examples, cutoff: int, read: bytes) -> None:
        """Inside the step that begins the period; `read`: the digest of what they were made of."""
        written = io.BytesIO()
        np.savez(written, allow_pickle=False, **examples.fields)
        self._journal.set_fact(self._party, EXAMPLES, written.getvalue())
        self._journal.set_fact(self._party, CUTOFF, f"{cutoff} {read.hex()}".encode())


class JournalRows:
    """A client's rows of tables that never leave it: as they count, and as its last round has
    trained them, until it is known whether that round did."""

    def __init__(self, journal: Journal, party: str) -> None:
        self._database, self._party = journal.database, party

    def of(self, name: str, width: int) -> TablePart:
        """The rows of a table that have been trained."""
        found = self._database.execute(
            "SELECT row_id, data FROM local_row WHERE party = ? AND name = ? ORDER BY row_id",
            (self._party, name),
        ).fetchall()
        ids = np.array([row for row, _ in found], dtype=np.uint64)
        values = np.frombuffer(b"".join(data for _, data in found), dtype="<f4").astype(np.float32)
        return TablePart(ids, values.reshape(len(ids), width))

    @property
    def pending(self) -> RoundId | None:
        found = self._database.execute(
            "SELECT round_id FROM pending_row WHERE party = ? LIMIT 1", (self._party,)
        ).fetchone()
        return None if found is None else RoundId(found[0])

    def offer(self, round_id: RoundId, rows: Mapping[str, TablePart]) -> None:
        """Inside the step that sends the update they were trained with."""
        self._forget()
        for name, part in rows.items():
            self._database.executemany(
                "INSERT INTO pending_row VALUES (?, ?, ?, ?, ?)",
                [
                    (self._party, name, row, values.astype("<f4").tobytes(), int(round_id))
                    for row, values in zip(part.ids.tolist(), part.values, strict=True)
                ],
            )

    def settle(self, *, counted: bool) -> None:
        if counted:
            self._database.execute(
                "INSERT OR REPLACE INTO local_row "
                "SELECT party, name, row_id, data FROM pending_row WHERE party = ?",
                (self._party,),
            )
        self._forget()

    def _forget(self) -> None:
        self._database.execute("DELETE FROM pending_row WHERE party = ?", (self._party,))
