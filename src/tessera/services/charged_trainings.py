"""ChargedTrainings: what all trainings of a user account have cost each of its people.

A client's ledger is in its journal, and another training has another journal. Two trainings over
one person add up nevertheless, whatever they are called. So every charge of a training with [dp]
is on disk here, too: first here, then in the journal, and only then does a message leave. A crash
in between leaves a charge for what was never sent, and the same charge after a restart is not a
second one. What is charged from a new journal is: nobody can tell what was sent from the lost one.

A client's own budget (`OwnBudget`) is for all of them. It is kept before a training begins, for all
that the training can cost, and with each charge, as other processes of the account charge as well.

What is not seen here: a deleted or reinstalled account, and another account or device of the same
person (docs/threat-model.md).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Final

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import ConfigError
from tessera.privacy.dp.accounting import check_delta
from tessera.privacy.dp.events import Bounds, Event, NoisySum
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.privacy.dp.ledger import BudgetExceeded, Entry, Ledger, Limit
from tessera.privacy.dp.mechanism import NoAccount, Unseen
from tessera.services.account_store import AccountStore
from tessera.services.journal_stores import event_of, event_text

NAME: Final = "charged-trainings.sqlite"
DELTA: Final = 1e-6
"""Of a client's own budget that does not name another, and of what a status says."""


@dataclass(frozen=True, slots=True)
class OwnBudget:
    """The most that a client spends on all trainings of its account together."""

    epsilon: float
    delta: float = DELTA

    def __post_init__(self) -> None:
        if not self.epsilon > 0.0:
            raise ConfigError(
                f"a budget of epsilon {self.epsilon:g}", hint="--budget-epsilon takes more than 0"
            )
        check_delta(self.delta)


@dataclass(frozen=True, slots=True)
class ChargedTraining:
    """One journal's part in a training, as the store has it: whose, and what it is called."""

    person: bytes
    digest: bytes
    name: str
    bounds: Bounds


class ChargedTrainings(AccountStore):
    """The store of one user account."""

    name, schema_version = NAME, 1
    schema = (
        """CREATE TABLE training (
            id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, person BLOB NOT NULL,
            name TEXT NOT NULL, bounds TEXT NOT NULL)""",
        # a ledger has no noisy event twice, and what is exact is no more exact if it is
        """CREATE TABLE charge (
            training INTEGER NOT NULL, event TEXT NOT NULL, reason TEXT NOT NULL,
            PRIMARY KEY (training, event)) WITHOUT ROWID""",
    )
    holds = "the charges of all trainings of this account"

    def digest(self, *items: int | bytes | str) -> bytes:
        """What the store has in place of people and journals."""
        named = encode_context(Label.CHARGED_TRAINING, *items)
        return hashlib.blake2b(named, key=self._key, digest_size=16).digest()

    def training(self, name: str, ledger: bytes, person: str, bounds: Bounds) -> ChargedTraining:
        """`ledger` tells journals apart (`ledger_id`), `person` the people of the account."""
        digests = self.digest("person", person), self.digest("ledger", ledger)
        return ChargedTraining(*digests, name, bounds)

    def record(self, training: ChargedTraining, entries: Iterable[Entry]) -> None:
        """What a journal has, where this store lacks it."""
        with self._transaction() as database:
            for entry in entries:
                _insert(database, training, entry)

    def charge(self, training: ChargedTraining, entry: Entry, limits: tuple[Limit, ...]) -> None:
        """On disk when this returns; `BudgetExceeded`, and nothing is, if a limit is passed."""
        with self._transaction() as database:
            if _insert(database, training, entry):
                _must_keep(limits, _charged(database, training.person), training, entry.reason)

    def must_afford(
        self, training: ChargedTraining, foreseen: Iterable[Entry], limits: tuple[Limit, ...]
    ) -> None:
        """`BudgetExceeded` if all that a training can cost is over a limit; nothing is charged."""
        with self._transaction() as database:
            found = _charged(database, training.person)
        others = [each for each in found if each[0].digest != training.digest]
        whole = [*others, *((training, entry) for entry in foreseen)]
        _must_keep(limits, whole, training, "all its rounds")

    def spent_with(self, ledger: bytes) -> list[tuple[ChargedTraining, Entry]]:
        """All charges, from whatever journal, of the person whose ledger this is."""
        with self._transaction() as database:
            found = database.execute(
                "SELECT person FROM training WHERE digest = ?", (self.digest("ledger", ledger),)
            ).fetchone()
            return [] if found is None else _charged(database, bytes(found[0]))


class AccountLedger(Ledger):
    """A client's ledger of one training, each charge of which is in the account's store first."""

    def __init__(
        self,
        store: ChargedTrainings,
        training: ChargedTraining,
        *,
        limits: tuple[Limit, ...] = (),
        entries: Iterable[Entry] = (),
    ) -> None:
        """`limits` are the client's own, over all trainings."""
        super().__init__(entries=entries)
        self._store, self._training, self._over_all = store, training, limits
        store.record(training, self.entries)

    def must_afford(self, foreseen: Iterable[Entry]) -> None:
        """`BudgetExceeded` if its own budget does not cover all that the training can cost."""
        if self._over_all:
            self._store.must_afford(self._training, foreseen, self._over_all)

    def spend(
        self,
        event: Event,
        *,
        reason: str,
        planned: float = 0.0,
        limits: Iterable[Limit] = (),
    ) -> None:
        super().spend(event, reason=reason, planned=planned, limits=limits)
        try:
            self._store.charge(self._training, self._entries[-1], self._over_all)
        except BaseException:
            self._entries.pop()
            raise


def _insert(database: sqlite3.Connection, training: ChargedTraining, entry: Entry) -> bool:
    """False if it is there."""
    database.execute(
        "INSERT OR IGNORE INTO training (digest, person, name, bounds) VALUES (?, ?, ?, ?)",
        (training.digest, training.person, training.name, json.dumps(asdict(training.bounds))),
    )
    added = database.execute(
        "INSERT OR IGNORE INTO charge SELECT id, ?, ? FROM training WHERE digest = ?",
        (event_text(entry.event), entry.reason, training.digest),
    )
    return added.rowcount == 1


def _charged(database: sqlite3.Connection, person: bytes) -> list[tuple[ChargedTraining, Entry]]:
    """All charges of one person."""
    return [
        (
            ChargedTraining(person, bytes(digest), name, Bounds(**json.loads(bounds))),
            Entry(event=event_of(event), reason=reason),
        )
        for digest, name, bounds, event, reason in database.execute(
            "SELECT digest, name, bounds, event, reason FROM charge "
            "JOIN training ON training.id = training WHERE person = ? ORDER BY training.id",
            (person,),
        )
    ]


def composed(charged: Iterable[tuple[ChargedTraining, Entry]]) -> Ledger:
    """One ledger of all these. Each training has rounds of its own, whatever its name is; whoever
    has no part in it, such as the helper of another one, may be a reader of its model."""
    charged = list(charged)
    readers: dict[bytes, set[Observer]] = {}
    for each, entry in charged:
        for event in entry.event.noisy:
            seen = {by for by in Observer if not isinstance(event.view(by), Unseen)}
            readers[each.digest] = readers.get(each.digest, set(Observer)) - seen
    most = {
        item.name: max((getattr(each.bounds, item.name) for each, _ in charged), default=0)
        for item in fields(Bounds)
    }
    return Ledger(
        bounds=Bounds(**most),
        entries=[
            replace(entry, event=_in_training(entry.event, each, readers.get(each.digest, set())))
            for each, entry in charged
        ],
    )


def _in_training(event: Event, training: ChargedTraining, readers: Collection[Observer]) -> Event:
    found = replace(event, federation=training.digest.hex())
    if not isinstance(found, NoisySum):
        return found
    model = found.view(Observer.READERS)
    own = tuple((by, mechanism) for by, mechanism in found.seen if by not in readers)
    return replace(found, seen=own + tuple((by, model) for by in readers if model is not None))


def _must_keep(
    limits: Iterable[Limit],
    charged: list[tuple[ChargedTraining, Entry]],
    training: ChargedTraining,
    why: str,
) -> None:
    names = list(dict.fromkeys((each.digest, each.name) for each, _ in charged))
    over = f"over {len(names)} trainings of this account ({', '.join(n for _, n in names)})"
    for limit in limits:
        told = f"{training.name!r}, {why}: privacy per {limit.unit.value} against"
        _one_unit(limit.unit, charged, training)
        try:
            spent = composed(charged).guarantee(
                unit=limit.unit, against=limit.against, delta=limit.delta
            )
        except NoAccount as refusal:
            told = f"{told} {limit.against.value}: {refusal}, {over}"
            raise BudgetExceeded(told, hint=NO_SUM) from refusal
        if spent.epsilon > limit.epsilon:
            raise BudgetExceeded(
                f"{told} {limit.against.value} would reach epsilon {spent.epsilon:.4g} of its own "
                f"budget of {limit.epsilon:.4g} at delta {limit.delta:.3g}, {over}",
                hint="--budget-epsilon with more allows it; what is spent stays spent",
            )


NO_SUM: Final = "take part without a budget of your own, or in trainings that add up"


def _one_unit(
    unit: Unit, charged: Iterable[tuple[ChargedTraining, Entry]], training: ChargedTraining
) -> None:
    """A bound by which one unit is converted to another is of one training's data only."""
    for each, entry in charged:
        for event in entry.event.noisy:
            if event.unit is not unit and each.digest != training.digest:
                raise BudgetExceeded(
                    f"{training.name!r}: its noise is per {unit.value}, and that of {each.name!r}, "
                    f"which this account was in, per {event.unit.value}: they have no sum",
                    hint=NO_SUM,
                )
