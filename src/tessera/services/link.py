"""Links: messages between two parties in one round, numbered both ways.

A message gets its number in the step that makes it, and is repeated, the same stored bytes, until
its receiver acknowledges it. A receiver acknowledges what is in its journal. A number that was
received already changes nothing: with the same bytes the stored answer is given again, and other
bytes are refused (`NumberConflict`). So between any two parties there is one content per round and
number, whoever is killed.

What was received and what is on its way is in the journal. How far a peer has acknowledged is in
memory only: after a restart messages are offered once more, until the peer says again what it has.
A message can be seen by whoever sends it (`LinkView`) once the step that made it has committed.

If a peer holds more of mine than I remember, in this round or in a later one than my last, my state
is an old copy (a restored backup, a copied folder). To go on would be to say something else under a
number that was used, or to answer again what was answered: `OldCopy`, and I say nothing any more.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tessera.errors import MisuseError, TesseraError
from tessera.ids import ClientId, Party, RoundId
from tessera.services.journal import Journal

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
    how many of those it sent its peer has acknowledged, in which round before this one it last
    received any (-1: in none), and in which one the peer's update last counted (-1: in none)."""

    round_id: RoundId
    sent: int
    received: int
    acknowledged: int
    before: int = -1
    counted: int = -1


@dataclass(frozen=True, slots=True)
class Numbered:
    """A message on its way."""

    number: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link as the last step that is on disk left it; `messages` may be sent."""

    standing: LinkStanding
    messages: tuple[Numbered, ...] = field(repr=False)

    def after(self, number: int) -> tuple[Numbered, ...]:
        """What is on its way behind this number."""
        return tuple(each for each in self.messages if each.number > number)


Taken = tuple[int, bytes, str]
"""The row of a received message, its digest, and what was answered."""


@dataclass(slots=True)
class Content:
    """Bytes on their way to one peer or to many, stored once."""

    row: int
    uses: int


@dataclass(slots=True)
class Outgoing:
    """A numbered message in the journal; its bytes are let go when it is acknowledged."""

    row: int
    number: int
    digest: bytes
    message: Numbered | None = field(repr=False)


class Link:
    """One side of the messages between a party and a peer. Changed inside steps only, but for what
    the peer acknowledges."""

    def __init__(self, links: Links, peer: str) -> None:
        self._links, self.peer = links, peer
        self.round_id: RoundId | None = None
        self.before = self.counted = -1
        self.released = self.acknowledged = 0
        self.view: LinkView | None = None
        self._taken: list[Taken] = []  # by number
        self._outgoing: list[Outgoing] = []

    @property
    def party(self) -> str:
        return self._links.party

    @property
    def sent(self) -> int:
        return len(self._outgoing)

    @property
    def received(self) -> int:
        return len(self._taken)

    @property
    def standing(self) -> LinkStanding:
        if self.round_id is None:
            raise MisuseError(f"{self.party} and {self.peer} are in no round")
        counts = (self.sent, self.received, self.acknowledged)
        return LinkStanding(self.round_id, *counts, self.before, self.counted)

    def begin(self, round_id: RoundId) -> None:
        """Another round: what belonged to the last one is let go."""
        if self.round_id is not None and round_id <= self.round_id:
            raise MisuseError(f"round {round_id} comes after round {self.round_id}")
        self._links.forget(self._taken, self._outgoing)
        if self.round_id is not None and self.received:
            self.before = int(self.round_id)
        self.round_id = round_id
        self._taken, self._outgoing = [], []
        self.released = self.acknowledged = 0
        self._write()

    def has_counted(self) -> None:
        """The peer's update is in the sum of this round."""
        assert self.round_id is not None
        self.counted = int(self.round_id)
        self._write()

    def _write(self) -> None:
        assert self.round_id is not None
        self._links.database.execute(
            "REPLACE INTO link VALUES (?, ?, ?, ?, ?)",
            (self.party, self.peer, int(self.round_id), self.before, self.counted),
        )
        self._changed()

    def must_be_no_old_copy(self, theirs: LinkStanding) -> None:
        """`OldCopy` if the peer has more of ours than we remember, or we have acknowledged more."""
        if theirs.before > (-1 if self.round_id is None else self.round_id):
            raise OldCopy(
                f"{self.peer} has messages of {self.party} in round {theirs.before}; the last one "
                f"that {self.party} remembers is {self.round_id}: its state is an old copy"
            )
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
        number = self.sent + 1
        if not held:
            self.released = number
        digest, content = self._links.stored(data)
        row = self._links.database.execute(
            "INSERT INTO outgoing (party, peer, number, held, content) VALUES (?, ?, ?, ?, ?)",
            (self.party, self.peer, number, int(held), content),
        ).lastrowid
        assert row is not None
        self._outgoing.append(Outgoing(row, number, digest, Numbered(number, data)))
        self._changed()
        return number

    def release(self) -> bool:
        """Let go of what was held back; whether there was something."""
        if self.released == self.sent:
            return False
        self._links.database.executemany(
            "UPDATE outgoing SET held = 0 WHERE id = ?",
            [(each.row,) for each in self._outgoing[self.released :]],
        )
        self.released = self.sent
        self._changed()
        return True

    @property
    def on_its_way(self) -> tuple[Numbered, ...]:
        """What is on disk, may be sent, and is not acknowledged."""
        return () if self.view is None else self.view.messages

    def acknowledge(self, number: int) -> None:
        """The peer has these in its journal: they need not be repeated."""
        if number > self.sent:
            raise OldCopy(
                f"{self.peer} has message {number} of {self.party}, which remembers {self.sent}"
            )
        if number > self.acknowledged:
            for each in self._outgoing[self.acknowledged : number]:
                each.message = None
            self.acknowledged = number
            if self.view is not None:
                standing = replace(self.view.standing, acknowledged=number)
                self.view = LinkView(standing, self.view.after(number))

    # --- receiving ------------------------------------------------------------------------------

    def repeated(self, number: int, data: bytes) -> str | None:
        """The stored answer, if this was taken before; None if it is the next one."""
        if number == self.received + 1:
            return None
        if not 0 < number <= self.received:
            raise NumberConflict(
                f"message {number} of {self.peer} where {self.received + 1} is the next"
            )
        _, digest, answer = self._taken[number - 1]
        if digest != hashlib.sha256(data).digest():
            raise NumberConflict(f"message {number} of {self.peer} was taken with other bytes")
        return answer

    def take(self, number: int, data: bytes, answer: str = ACCEPTED, *, keep: bool = False) -> None:
        """Record that the next message was handled, and how; `keep`: with its bytes."""
        if number != self.received + 1:
            raise MisuseError(f"message {number} is not the next of {self.peer}")
        digest = hashlib.sha256(data).digest()
        row = self._links.append(self.peer, number, digest, answer, data if keep else None)
        self._taken.append((row, digest, answer))
        self._changed()

    # --- the database ---------------------------------------------------------------------------

    def _changed(self) -> None:
        self._links.changed(self)

    def publish(self) -> None:
        """What was changed is on disk: let it be seen."""
        if self.round_id is None:
            return
        ready = self._outgoing[self.acknowledged : self.released]
        messages = tuple(each.message for each in ready if each.message is not None)
        self.view = LinkView(self.standing, messages)

    def restore_received(self, row: int, digest: bytes, answer: str) -> None:
        self._taken.append((row, digest, answer))

    def restore_outgoing(self, each: Outgoing, held: bool) -> None:
        self._outgoing.append(each)
        if not held:
            self.released = each.number


class Links:
    """All links of one party, in memory as in its journal."""

    def __init__(self, journal: Journal, party: str, peers: Iterable[str]) -> None:
        self.journal, self.party = journal, party
        self._contents: dict[bytes, Content] = {}
        self._kept: dict[bytes, int] = {}  # the digest of received bytes -> their row
        self._unseen: dict[str, Link] = {}
        self.received = 0
        """Messages of this party's in the journal, of all peers."""
        self._links = {peer: Link(self, peer) for peer in peers}
        self._restore()

    def __getitem__(self, peer: str) -> Link:
        return self._links[peer]

    @property
    def database(self) -> sqlite3.Connection:
        return self.journal.database

    def _restore(self) -> None:
        """In the order in which everything was written, which is that of the numbers."""
        mine = (self.party,)
        for peer, round_id, before, counted in self.database.execute(
            "SELECT peer, round_id, before, counted FROM link WHERE party = ?", mine
        ):
            link = self._links[peer]
            link.round_id, link.before, link.counted = RoundId(round_id), before, counted
        for row, peer, digest, answer, kept in self.database.execute(
            "SELECT id, peer, digest, answer, data IS NOT NULL FROM received "
            "WHERE party = ? ORDER BY id",
            mine,
        ):
            self._links[peer].restore_received(row, bytes(digest), answer)
            self.received += 1
            if kept:
                self._kept[bytes(digest)] = row
        bodies: dict[int, tuple[bytes, bytes]] = {}  # what was sent to many alike, once
        for row, peer, number, held, content in self.database.execute(
            "SELECT id, peer, number, held, content FROM outgoing WHERE party = ? ORDER BY id", mine
        ).fetchall():
            if content not in bodies:
                (found,) = self.database.execute(
                    "SELECT data FROM content WHERE id = ?", (content,)
                ).fetchone()
                bodies[content] = hashlib.sha256(found).digest(), bytes(found)
            digest, data = bodies[content]
            self._contents.setdefault(digest, Content(content, 0)).uses += 1
            outgoing = Outgoing(row, number, digest, Numbered(number, data))
            self._links[peer].restore_outgoing(outgoing, bool(held))
        for link in self._links.values():
            link.publish()

    # --- for a link -----------------------------------------------------------------------------

    def changed(self, link: Link) -> None:
        if not self._unseen:
            self.journal.after_commit(self._publish)
        self._unseen[link.peer] = link

    def _publish(self) -> None:
        for link in self._unseen.values():
            link.publish()
        self._unseen.clear()

    def append(self, peer: str, number: int, digest: bytes, answer: str, data: bytes | None) -> int:
        row = self.database.execute(
            "INSERT INTO received (party, peer, number, digest, answer, data) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (self.party, peer, number, digest, answer, data),
        ).lastrowid
        assert row is not None
        self.received += 1
        if data is not None:
            self._kept[digest] = row
        return row

    def erase_received(self) -> None:
        """What was received is not needed any more, and nobody shall find it: bytes, not numbers
        and digests, which say what was taken."""
        self.database.execute(
            "UPDATE received SET data = NULL WHERE party = ? AND data IS NOT NULL", (self.party,)
        )
        self._kept.clear()

    def row_of(self, data: bytes) -> int | None:
        """Where these bytes are among what was received; None if they are not."""
        return self._kept.get(hashlib.sha256(data).digest())

    def stored(self, data: bytes) -> tuple[bytes, int]:
        """(digest, row) of these bytes: what is sent to many alike is stored once."""
        digest = hashlib.sha256(data).digest()
        found = self._contents.get(digest)
        if found is None:
            row = self.database.execute("INSERT INTO content (data) VALUES (?)", (data,)).lastrowid
            assert row is not None
            found = self._contents[digest] = Content(row, 0)
        found.uses += 1
        return digest, found.row

    def forget(self, received: list[Taken], outgoing: list[Outgoing]) -> None:
        """Rows of a round that is gone."""
        remove = self.database.executemany
        remove("DELETE FROM received WHERE id = ?", [(row,) for row, _, _ in received])
        remove("DELETE FROM outgoing WHERE id = ?", [(each.row,) for each in outgoing])
        self.received -= len(received)
        for row, digest, _ in received:
            if self._kept.get(digest) == row:
                del self._kept[digest]
        for each in outgoing:
            content = self._contents[each.digest]
            content.uses -= 1
            if not content.uses:
                del self._contents[each.digest]
                self.database.execute("DELETE FROM content WHERE id = ?", (content.row,))
