"""A link: messages between two parties in one round, numbered both ways.

A message gets its number in the step that makes it, and is repeated, the same stored bytes, until
its receiver acknowledges it. A receiver acknowledges what is in its journal. A number that was
taken already changes nothing: with the same bytes the stored answer is given again, and other bytes
are refused (`NumberConflict`). So between any two parties there is one content per round and
number, whoever is killed.

If a peer holds more of mine than I remember, my state is an old copy (a restored backup, a copied
folder). To go on would be to say something else under a number that was used: `OldCopy`, and I
leave the round.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tessera.engines.journal import Journal
from tessera.errors import MisuseError, TesseraError
from tessera.ids import ClientId, Party, RoundId

ACCEPTED = ""
"""The answer to a message that was taken; any other is why it was refused."""


def name_of(party: Party) -> str:
    """A party as the journal and the wire have it."""
    return party if isinstance(party, str) else f"client {party}"


def party_of(name: str) -> Party:
    """The inverse of `name_of`."""
    return ClientId(int(name[7:])) if name.startswith("client ") else name


class NumberConflict(TesseraError):
    """A number that was taken with other bytes, or one that leaves a gap. Nothing has changed."""


class OldCopy(TesseraError):
    """The peer holds more of this party's messages than this party remembers."""


@dataclass(frozen=True, slots=True)
class LinkStanding:
    """How far one side of a link is: in which round, how many messages it has sent and received,
    and how many of those it sent its peer has acknowledged."""

    round_id: RoundId
    sent: int
    received: int
    acknowledged: int


@dataclass(frozen=True, slots=True)
class Numbered:
    """A message on its way."""

    number: int
    data: bytes = field(repr=False)


class Link:
    """One side of the messages between `party` and `peer`. Changed inside steps only."""

    def __init__(self, journal: Journal, party: str, peer: str) -> None:
        self._journal, self.party, self.peer = journal, party, peer
        found = journal.database.execute(
            "SELECT round_id, sent, released, received, acknowledged FROM link "
            "WHERE party = ? AND peer = ?",
            (party, peer),
        ).fetchone()
        self.round_id: RoundId | None = None
        self.sent = self.released = self.received = self.acknowledged = 0
        if found is not None:
            round_id, self.sent, self.released, self.received, self.acknowledged = found
            self.round_id = RoundId(round_id)

    @property
    def standing(self) -> LinkStanding:
        if self.round_id is None:
            raise MisuseError(f"{self.party} and {self.peer} are in no round")
        return LinkStanding(self.round_id, self.sent, self.received, self.acknowledged)

    def begin(self, round_id: RoundId) -> None:
        """Another round: what belonged to the last one is let go."""
        if self.round_id is not None and round_id <= self.round_id:
            raise MisuseError(f"round {round_id} comes after round {self.round_id}")
        self._forget("taken", "number >= 0")
        self._forget("outgoing", "number >= 0")
        self.round_id = round_id
        self.sent = self.released = self.received = self.acknowledged = 0
        self._save()

    def must_be_no_old_copy(self, theirs: LinkStanding) -> None:
        """`OldCopy` if the peer has more of ours than we remember, or we have acknowledged more."""
        same = theirs.round_id == self.round_id
        sent, received = (self.sent, self.received) if same else (0, 0)
        if theirs.received > sent or theirs.acknowledged > received:
            raise OldCopy(
                f"{self.peer} has {theirs.received} messages of {self.party} in round "
                f"{theirs.round_id}, which acknowledged {theirs.acknowledged} of its; {self.party} "
                f"remembers {sent} and {received}: its state is an old copy"
            )

    # --- sending --------------------------------------------------------------------------------

    def put(self, data: bytes, *, held: bool = False) -> int:
        """Number a message; on its way once the step has committed, or `release` is called."""
        self.sent += 1
        if not held:
            self.released = self.sent
        digest = hashlib.sha256(data).digest()
        database = self._journal.database
        # What is sent to many alike is stored once.
        database.execute("INSERT OR IGNORE INTO content VALUES (?, ?)", (digest, data))
        database.execute(
            "INSERT INTO outgoing VALUES (?, ?, ?, ?)", (self.party, self.peer, self.sent, digest)
        )
        self._save()
        return self.sent

    def release(self) -> bool:
        """Let go of what was held back; whether there was something."""
        if self.released == self.sent:
            return False
        self.released = self.sent
        self._save()
        return True

    def after(self, number: int) -> Numbered | None:
        """The first message on its way behind this number."""
        if number >= self.released:
            return None
        found = self._journal.database.execute(
            "SELECT number, data FROM outgoing NATURAL JOIN content "
            "WHERE party = ? AND peer = ? AND number > ? ORDER BY number LIMIT 1",
            (self.party, self.peer, number),
        ).fetchone()
        return None if found is None else Numbered(found[0], bytes(found[1]))

    def acknowledge(self, number: int) -> None:
        """The peer has these in its journal: they need not be repeated."""
        if number > self.sent:
            raise OldCopy(
                f"{self.peer} has message {number} of {self.party}, which remembers {self.sent}"
            )
        if number > self.acknowledged:
            self._forget("outgoing", "number <= ?", number)
            self.acknowledged = number
            self._save()

    # --- receiving ------------------------------------------------------------------------------

    def repeated(self, number: int, data: bytes) -> str | None:
        """The stored answer, if this was taken before; None if it is the next one."""
        if number == self.received + 1:
            return None
        if number > self.received:
            raise NumberConflict(
                f"message {number} of {self.peer} where {self.received + 1} is the next"
            )
        digest, answer = self._journal.database.execute(
            "SELECT digest, answer FROM taken WHERE party = ? AND peer = ? AND number = ?",
            (self.party, self.peer, number),
        ).fetchone() or (b"", ACCEPTED)
        if digest != hashlib.sha256(data).digest():
            raise NumberConflict(f"message {number} of {self.peer} was taken with other bytes")
        return str(answer)

    def take(self, number: int, data: bytes, answer: str = ACCEPTED) -> None:
        """Record that the next message was handled, and how."""
        if number != self.received + 1:
            raise MisuseError(f"message {number} is not the next of {self.peer}")
        self.received = number
        self._journal.database.execute(
            "INSERT INTO taken VALUES (?, ?, ?, ?, ?)",
            (self.party, self.peer, number, hashlib.sha256(data).digest(), answer),
        )
        self._save()

    # --- the database ---------------------------------------------------------------------------

    def _save(self) -> None:
        self._journal.database.execute(
            "REPLACE INTO link VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                self.party,
                self.peer,
                self.round_id,
                self.sent,
                self.released,
                self.received,
                self.acknowledged,
            ),
        )

    def _forget(self, table: str, which: str, *values: int) -> None:
        self._journal.database.execute(
            f"DELETE FROM {table} WHERE party = ? AND peer = ? AND {which}",
            (self.party, self.peer, *values),
        )


def forget_unsent(journal: Journal) -> None:
    """Let go of contents that nobody is to be sent any more; inside a step."""
    journal.database.execute(
        "DELETE FROM content WHERE digest NOT IN (SELECT digest FROM outgoing)"
    )
