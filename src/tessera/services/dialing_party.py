"""DialingParty: what a client and the helper do alike. They talk to the leader only, in one round.

A member is woken from its journal, takes the leader's messages in the order of their numbers, and
has messages of its own on their way. Every change is a step: if it does not commit, the member is
as it was after its last one, and nothing has been sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from tessera.errors import PeerError, RoundIsOver, ServerFault
from tessera.ids import SERVER, Party, RoundId
from tessera.protocols.machine import Outbound, RoundOutcome
from tessera.rounds.party import StoredRole
from tessera.services.journal import OLD_COPY, Journal
from tessera.services.journal_stores import entries, store_role, stored_role
from tessera.services.link import ACCEPTED, Link, Links, LinkStanding, Numbered, OldCopy, name_of

ONLY: Final = 0
"""A member has one role at a time."""
OVER: Final = frozenset({"Over", "Left", "done"})


class DialingParty(ABC):
    """One client, or the helper, over its journal."""

    snapshot_each: bool = True
    """Whether its state is stored after each message, and not the message alone."""

    journal: Journal
    links: Links

    def __init__(self, journal: Journal, me: Party) -> None:
        self.journal, self.me, self.name = journal, me, name_of(me)
        self.role: Any = None
        self.left = ""
        self.ended: dict[str, int] = {}
        """What its log says of the last round that has ended."""
        self.links = Links(journal, self.name, [SERVER])

    @property
    def link(self) -> Link:
        """With the leader."""
        return self.links[SERVER]

    def load(self) -> None:
        """Bring everything in memory to where the journal is: at the start, and after a step that
        did not commit."""
        self.links = Links(self.journal, self.name, [SERVER])
        self.role, self.left = None, ""
        self._load_own()
        found = stored_role(self.links, ONLY)
        if found is not None:
            round_id, stored = found
            self.role = self._make(round_id, stored)
            self._replay()

    def _replay(self) -> None:
        """What was accepted since the last snapshot, once more; answers are numbered already."""
        for sender, _, data in entries(self.links, ONLY):
            if data is None:
                continue
            try:
                self.role.receive(sender, data)
            except (PeerError, ServerFault, RoundIsOver):
                continue  # as it was then

    # --- what differs ---------------------------------------------------------------------------

    @abstractmethod
    def _make(self, round_id: RoundId, stored: StoredRole | None) -> Any:
        """Its role in a round, new or woken."""

    @abstractmethod
    def _load_own(self) -> None:
        """What it remembers beside its role."""

    @abstractmethod
    def _save_own(self) -> None:
        """The same, inside a step."""

    def _begun(self, role: Any) -> list[Outbound]:
        """Its first messages in a round."""
        return []

    def _moved(self) -> None:
        """After its role has taken a message, in the same step."""
        return

    # --- a round --------------------------------------------------------------------------------

    @property
    def round_id(self) -> RoundId | None:
        """The round it takes part in or has taken part in last."""
        return self.link.round_id

    @property
    def is_over(self) -> bool:
        """Whether it is in no round, or has nothing more to do in its last one."""
        return self.role is None or self.role.phase in OVER

    def begin(self, standing: LinkStanding) -> None:
        """Take part in this round. Charged, drawn and stored before the first word leaves."""
        round_id = standing.round_id
        old = self._old_copy(standing)
        with self.journal.step():
            self.link.begin(round_id)
            self.role, self.left = self._make(round_id, None), ""
            if old is None:
                self._send(self._begun(self.role))
            self._store()
        if old is not None:
            self._leave(old)

    def meets(self, standing: LinkStanding) -> None:
        """Compare notes with the leader about this round. An old copy leaves it, for good."""
        if (old := self._old_copy(standing)) is not None:
            self._leave(old)
        if standing.round_id == self.round_id:
            self.link.acknowledge(standing.received)

    def _old_copy(self, standing: LinkStanding) -> OldCopy | None:
        if (known := self.journal.fact(self.name, OLD_COPY)) is not None:
            return OldCopy(known.decode())
        if self.left:
            return None
        try:
            self.link.must_be_no_old_copy(standing)
        except OldCopy as error:
            return error
        return None

    def _leave(self, old: OldCopy) -> NoReturn:
        """The role of an old copy says nothing: it would say it a second time, and otherwise."""
        self.leave_as_old_copy(old)
        raise old

    def leave_as_old_copy(self, old: OldCopy) -> None:
        """This round and every later one."""
        self.left = str(old)
        with self.journal.step():
            self.journal.set_fact(self.name, OLD_COPY, self.left.encode())
            self._end(RoundOutcome.ABORTED, self.left)

    def take(self, messages: Sequence[Numbered]) -> None:
        """The leader's next messages, in one step; what was taken before changes nothing."""
        new = [each for each in messages if self._is_new(each)]
        if not new:
            return
        with self.journal.step():
            for message in new:
                self._take(message)

    def _is_new(self, message: Numbered) -> bool:
        """`NumberConflict`: a number that was used with other bytes."""
        behind = message.number > self.link.received
        return behind or self.link.repeated(message.number, message.data) is None

    def _take(self, message: Numbered) -> None:
        self.link.repeated(message.number, message.data)  # the next one, and no gap
        phase, answer = self.role.phase, ACCEPTED
        try:
            self._send(self.role.receive(SERVER, message.data))
        except ServerFault as fault:
            answer = self.left = fault.reason
        except RoundIsOver as late:
            answer = str(late)
        except PeerError as refused:  # at the helper: that client is left out
            answer = refused.reason
        self.link.take(message.number, message.data, answer, keep=not self.snapshot_each)
        self._moved()
        if self.snapshot_each or self.role.phase != phase:
            self._store()

    def acknowledged(self, number: int) -> None:
        """The leader has its messages up to `number` in its journal. `OldCopy`: there are fewer."""
        self.link.acknowledge(number)

    def over(self, outcome: RoundOutcome, reason: str) -> None:
        """The round has ended, as the leader says outside its messages."""
        with self.journal.step():
            self._end(outcome, reason)

    # --- inside a step --------------------------------------------------------------------------

    def _end(self, outcome: RoundOutcome, reason: str) -> None:
        if self.role is not None:
            self.role.over(outcome, reason)
        self._store()

    def _send(self, out: list[Outbound]) -> None:
        for message in out:
            self.link.put(message.data)

    def _store(self) -> None:
        """Once for all that happens in a step."""
        self.journal.before_commit(self.name, self._write)

    def _write(self) -> None:
        assert self.round_id is not None
        if self.role is not None:
            keep = not self.snapshot_each
            store_role(self.links, ONLY, self.round_id, self.role, keep_received=keep)
            if keep and self.is_over:
                self.links.erase_received()
        self._save_own()
