"""The leader as a service: one round after the other over its journal.

Requests come in batches, and a batch is one step: what was accepted is on disk before anybody is
told so. While a phase collects, an accepted message is stored as it came; the state of a role is
stored when a phase closes, with the lists and messages that close it. The round's end is one step,
too: the opened sum, the stepped model, its round number and everybody's last message.

Phases close when all have answered, or at their deadline. The clock is the caller's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tessera.crypto.keys import Identity
from tessera.errors import ConfigError, PeerError, RoundAborted, RoundIsOver
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId, clients_in
from tessera.learning.tables.store import ModelStore
from tessera.plan import Plan
from tessera.protocols.machine import Outbound, RoundOutcome, RoundOver, to_all
from tessera.protocols.two_server.key_period import KeyPeriod
from tessera.rounds import noise_chain, schemes
from tessera.rounds.course import Course, DrawnRound, PartOutcome, RoundPart, RoundServer
from tessera.rounds.events import RoundAbort, RoundFinished, as_json
from tessera.rounds.noise_chain import NoiseChain
from tessera.rounds.party import ServerModel, ServerParty
from tessera.rounds.schedule import Schedule
from tessera.rounds.two_server.leader import LeaderRound
from tessera.services.journal import MISSING, Journal, outcome_text
from tessera.services.journal_stores import CHAIN, JournalKeys, entries, store_role, stored_role
from tessera.services.link import (
    ACCEPTED,
    Link,
    Links,
    LinkView,
    NumberConflict,
    Numbered,
    OldCopy,
    name_of,
    party_of,
)
from tessera.wire.stored import Kept

FINISHED = frozenset({"done", "aborted", "Over"})
CURRENT = "current round"
SCHEDULE = "schedule"
COHORT = "cohort of the current round"
MISSING_ROUNDS = 20
"""Of which the journal has who was missing."""
MOST_MESSAGES = 64
"""Of a client in a round: those that are refused take a row, too."""
LEFT_AS_OLD = (
    "a peer holds more of the leader's messages than it remembers: its state is an old copy"
)


Acknowledgement = tuple[RoundId, int]
"""A round, and how many of the leader's messages a peer has in its journal."""


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A message from a peer: in which round, and its number."""

    peer: Party
    round_id: RoundId
    message: Numbered


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of a request. `over`: the round has ended; `conflict`: that number cannot be;
    `refused`: it was taken, and why it does not count."""

    taken: bool = False
    refused: str = ""
    conflict: str = ""
    over: str = ""


@dataclass(slots=True)
class PartInHand:
    """A part of the round, with the leader's role in it."""

    number: int
    part: RoundPart
    role: RoundServer
    refused: dict[Party, str] = field(default_factory=dict)
    aborted: RoundAborted | None = None

    @property
    def finished(self) -> bool:
        return self.role.phase in FINISHED


class LeaderService:
    """The leader; `first_model` makes the model of the bundle."""

    def __init__(
        self,
        journal: Journal,
        plan: Plan,
        clients: Collection[ClientId],
        *,
        first_model: Callable[[], ServerModel],
        party: ServerParty,
        identity: Identity | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        """`identity` has the directory of clients; with it the leader checks their signatures.
        `schedule` has their places, where the plan gives them any."""
        self.journal, self.plan, self._schedule = journal, plan, schedule
        self.clients = frozenset(clients)
        self._first_model, self._identity = first_model, identity
        self._chain = JournalKeys(journal, SERVER, NoiseChain, CHAIN)
        self._party = replace(
            party, key_store=JournalKeys(journal, SERVER, KeyPeriod), chain_store=self._chain
        )
        self.load()

    def load(self) -> None:
        """Bring everything in memory to where the journal is: at the start, and after a step that
        did not commit."""
        model = self._first_model()
        self._store = ModelStore.within(
            self.journal.path,
            self.journal.database,
            plan_hash=self.plan.digest,
            tables=model.stored_tables,
        )
        if self._store.round_id is not None:
            model.restore(self._store.dense())
        self.course = Course(
            self.plan,
            self.clients,
            model,
            self._party,
            commit=self._commit_model,
            schedule=self._schedule,
        )
        self._same_schedule()
        self.helpers = schemes.of(self.plan).sum.helpers
        peers = (*sorted(self.clients), *self.helpers)
        self._links = Links(self.journal, SERVER, map(name_of, peers))
        self.links: dict[Party, Link] = {peer: self._links[name_of(peer)] for peer in peers}
        self.drawn: DrawnRound | None = None
        self.parts: list[PartInHand] = []
        self.claims: set[Party] = set()  # who says that it has more than was sent
        self.changed: set[Party] = set()  # peers with news since somebody last looked
        self.closed = 0  # phases, since the process began
        self.absent: frozenset[Party] = frozenset()
        """Who was drawn and is not there: phases close without them. Changed by the carrier when
        somebody comes; after a restart nobody knows, and everybody is waited for."""
        found = self.journal.fact(SERVER, CURRENT)
        if found is not None:
            self._resume(RoundId(int(found)))

    def _same_schedule(self) -> None:
        """Nobody changes places within a training: those of its first start are for good."""
        schedule, stored = self.course.cohorts.schedule, self.journal.fact(SERVER, SCHEDULE)
        if schedule is None:
            return
        if stored is None:
            with self.journal.step():
                self.journal.set_fact(SERVER, SCHEDULE, schedule.digest)
        elif stored != schedule.digest:
            raise ConfigError(
                f"{self.journal.path}: the training was begun with another schedule",
                hint="go on with the keys that it was begun with: clients keep their places",
            )

    def _commit_model(self, round_id: RoundId, model: ServerModel) -> None:
        self._store.commit(round_id, model.dense_parts)

    def _resume(self, round_id: RoundId) -> None:
        """The round as it was, cohort and roles, from the journal."""
        record = self.journal.fact(SERVER, COHORT)
        assert record is not None
        self.drawn = drawn = self.course.resume(round_id, record.decode())
        for number, part in enumerate(drawn.parts):
            found = stored_role(self._links, number)
            assert found is not None and found[0] == round_id
            role = self.course.server(drawn, part, self._identity, found[1])
            hand = PartInHand(number, part, role)
            for sender, answer, data in entries(self._links, number):
                peer = party_of(sender)
                if peer != HELPER and peer not in part.named:
                    continue
                if data is not None:
                    self._given(hand, peer, data)
                elif answer:
                    hand.refused.setdefault(peer, answer.partition(":")[0])
            self.parts.append(hand)

    # --- where the round stands -----------------------------------------------------------------

    @property
    def model(self) -> ServerModel:
        return self.course.model

    @property
    def round_id(self) -> RoundId | None:
        """The round in hand, or the last one."""
        return None if self.drawn is None else self.drawn.round_id

    @property
    def is_over(self) -> bool:
        """Whether no round is under way."""
        return all(hand.finished for hand in self.parts)

    @property
    def helper_has_all(self) -> bool:
        """Whether the helper has everything of the last round in its journal."""
        link = self.links.get(HELPER)
        return link is None or link.acknowledged == link.sent

    @property
    def phases(self) -> tuple[str, ...]:
        """Of every part that goes on."""
        return tuple(hand.role.phase for hand in self.parts if not hand.finished)

    @property
    def missing(self) -> frozenset[Party]:
        """Whose messages are due and waited for."""
        return frozenset(p for hand in self.parts for p in hand.role.expected) - self.absent

    def outcome(self, round_id: RoundId) -> str:
        """How a round ended, as JSON; "" if it has not."""
        return outcome_text(self.journal.database, round_id)

    def view(self, peer: Party) -> LinkView | None:
        """How the link with this peer stands on disk, with what is on its way; None before its
        first round."""
        return self.links[peer].view

    # --- rounds ---------------------------------------------------------------------------------

    @property
    def candidates(self) -> frozenset[ClientId]:
        """Who may be drawn for the next round."""
        return frozenset(self.course.cohorts.candidates(RoundId(self.course.next_round)))

    def open_round(self, there: Collection[ClientId] | None = None) -> RoundId:
        """The next round, among those who are there, if that is known: its cohort, roots and first
        messages in one step. Who is drawn and not there is not waited for."""
        with self.journal.step():
            drawn = self.drawn = self.course.draw(there=there)
            round_id = drawn.round_id
            self.claims = set()
            cohort = self.course.cohorts.record(drawn.named.values())
            self.journal.set_fact(SERVER, COHORT, cohort.encode())
            self.absent = frozenset() if there is None else frozenset(drawn.named) - set(there)
            self.journal.set_fact(SERVER, CURRENT, str(int(round_id)).encode())
            for peer in (*drawn.named, *self.helpers):
                self.links[peer].begin(round_id)
                self.changed.add(peer)
            self._drop_parts()
            for number, part in enumerate(drawn.parts):
                role = self.course.server(drawn, part, self._identity)
                hand = PartInHand(number, part, role)
                self.parts.append(hand)
                self._send(role.start())
                self._store_part(hand)
        return round_id

    def _drop_parts(self) -> None:
        self.parts = []
        for table in ("role", "kept"):
            self.journal.database.execute(f"DELETE FROM {table} WHERE party = ?", (SERVER,))

    def handle(
        self,
        requests: Sequence[MessageRequest],
        acknowledged: Mapping[Party, Acknowledgement] | None = None,
    ) -> list[Answer]:
        """Take these messages in one step, and close what is complete; and what peers have."""
        for peer, (round_id, number) in (acknowledged or {}).items():
            if self.links[peer].round_id == round_id:
                self._acknowledge(peer, number)
        drawn = self.drawn
        old = not self.is_over and drawn is not None and self.believes(self.claims, drawn.named)
        if not requests and not old:
            return []
        with self.journal.step():
            if old:
                self._stop(LEFT_AS_OLD)
            answers = [self._take(request) for request in requests]
            self._close_complete()
        return answers

    def _acknowledge(self, peer: Party, number: int) -> None:
        try:
            self.links[peer].acknowledge(number)
        except OldCopy:
            self.claims.add(peer)

    def believes(self, claims: Collection[Party], clients: Collection[ClientId]) -> bool:
        """Whether the leader's state is an old copy, if these remember more than it does: the
        helper is among them, or no quorum of these clients is left without them. One client that
        says so is believed by nobody."""
        return HELPER in claims or len(claims) > len(clients) - self.least_clients

    @property
    def least_clients(self) -> int:
        """With fewer there is no sum."""
        return self.plan.least_survivors

    def _take(self, request: MessageRequest) -> Answer:
        link, message = self.links[request.peer], request.message
        if link.round_id != request.round_id or self.drawn is None:
            ended = self.outcome(request.round_id)
            return Answer(over=ended) if ended else Answer(conflict="there is no such round")
        try:
            before = link.repeated(message.number, message.data)
        except NumberConflict as error:
            return Answer(conflict=str(error))
        if before is not None:
            return Answer(taken=True, refused=before)
        if message.number > MOST_MESSAGES and request.peer != HELPER:
            return Answer(conflict=f"a client has at most {MOST_MESSAGES} messages in a round")
        hand = self._part_of(request.peer)
        if self.is_over:
            return Answer(over=self.outcome(request.round_id))
        phase = hand.role.phase
        answer, out = self._given(hand, request.peer, message.data)
        link.take(message.number, message.data, answer, keep=answer == ACCEPTED)
        same = hand.role.phase == phase
        # Whoever is answered before the others could be in the next phase before the leader is.
        self._send(out, held=same)
        if not same:
            self.closed += 1
            self._store_part(hand)
            self._release(hand)
        self._conclude_if_finished()
        return Answer(taken=True, refused=answer)

    def _part_of(self, peer: Party) -> PartInHand:
        """The helper takes part in the one part there is, with two servers."""
        for hand in self.parts:
            if peer == HELPER or peer in hand.part.named:
                return hand
        raise AssertionError("a link in a round belongs to one of its parts")

    def _given(self, hand: PartInHand, peer: Party, data: bytes) -> tuple[str, list[Outbound]]:
        """(why it was refused or "", what to send) after the role has taken a message."""
        try:
            return ACCEPTED, hand.role.receive(peer, data)
        except PeerError as error:
            hand.refused.setdefault(peer, error.reason.partition(":")[0])
            return error.reason, []
        except RoundAborted as error:
            hand.aborted = error
            return ACCEPTED, []
        except RoundIsOver as error:
            return str(error), []

    # --- the clock ------------------------------------------------------------------------------

    def close_overdue(self) -> None:
        """The deadline has come: go on without those who are missing, or abort."""
        with self.journal.step():
            self._record_missing()
            for hand in self.parts:
                if not hand.finished:
                    self._close(hand)
            self._close_complete()

    def _record_missing(self) -> None:
        """For the operator: who did not answer in which phase, of the last rounds."""
        assert self.drawn is not None
        stored = json.loads(self.journal.fact(SERVER, MISSING) or b"{}")
        of_round = stored.setdefault(str(int(self.drawn.round_id)), {})
        of_round[", ".join(self.phases)] = [name_of(p) for p in sorted(self.missing, key=str)]
        last = sorted(stored, key=int)[-MISSING_ROUNDS:]
        kept = {each: stored[each] for each in last}
        self.journal.set_fact(SERVER, MISSING, json.dumps(kept).encode())

    def _close_complete(self) -> None:
        """Close every phase in which nobody is missing but those who are not there."""
        for hand in self.parts:
            while not hand.finished and hand.role.expected <= self.absent:
                self._close(hand)
        self._conclude_if_finished()

    def _close(self, hand: PartInHand) -> None:
        try:
            self._send(hand.role.close_phase())
        except RoundAborted as error:
            hand.aborted = error
        self.closed += 1
        self._store_part(hand)
        self._release(hand)

    def stop(self, reason: str) -> None:
        """Abort the round in hand."""
        with self.journal.step():
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        if self.drawn is None or self.is_over:
            return
        for hand in self.parts:
            hand.aborted = RoundAborted(
                round_id=self.drawn.round_id,
                phase=hand.role.phase,
                answered=0,
                needed=0,
                reason=reason,
            )
        self._conclude()

    # --- the end --------------------------------------------------------------------------------

    def _conclude_if_finished(self) -> None:
        """Once: afterwards the roles are over."""
        if self.parts and all(hand.role.phase in {"done", "aborted"} for hand in self.parts):
            self._conclude()

    def _conclude(self) -> None:
        """Merge, step and store the model, tell everybody, and erase what is left of the round."""
        drawn = self.drawn
        assert drawn is not None
        event = self.course.conclude(drawn, [self._outcome_of(hand) for hand in self.parts])
        if isinstance(event, RoundFinished):
            for client in self.course.survivors:
                self.links[client].has_counted()
        for hand in self.parts:
            why = _why_aborted(hand)
            outcome = RoundOutcome.DONE if why is None else RoundOutcome.ABORTED
            reason = "" if why is None else why.reason
            if why is None:
                # Each is told whether it is in the sum; a helper that was shown the sum knows.
                self._send([each for each in hand.role.farewell() if each.to != HELPER])
            else:
                last = Kept.of(RoundOver.of(drawn.round_id, outcome, reason))
                self._send(to_all(hand.part.named, last))
                self._send([Outbound.again(each, last.data) for each in self.helpers])
            hand.role.over(outcome, reason)
            self._store_part(hand)
        self._record(event)
        noise_chain.settle(self._chain, self.plan)
        if self.journal.erases:  # what its noise came from leaves the log, too
            self.journal.after_commit(self.journal.fold)

    def _outcome_of(self, hand: PartInHand) -> PartOutcome:
        role, aborted = hand.role, _why_aborted(hand)
        if aborted is not None:
            return PartOutcome(part=hand.part, aborted=aborted, reason=aborted.reason)
        why: dict[Party, str] = dict(hand.refused)
        writing: dict[str, str] = {}
        if isinstance(role, LeaderRound):
            for client, reason in role.excluded.items():
                why.setdefault(client, reason)
            writing = {cost.table: cost.reason for cost in role.writing}
        for survivor in role.result.survivors:
            why.pop(survivor, None)
        excluded = Counter(why[peer] for peer in clients_in(why))
        return PartOutcome(part=hand.part, result=role.result, excluded=excluded, writing=writing)

    def _record(self, event: RoundFinished | RoundAbort) -> None:
        self.journal.database.execute(
            "INSERT INTO event (round_id, data) VALUES (?, ?)",
            (event.round_id, json.dumps(as_json(event))),
        )

    # --- inside a step --------------------------------------------------------------------------

    def _send(self, out: Sequence[Outbound], *, held: bool = False) -> None:
        """`held`: clients get theirs when the phase closes."""
        for message in out:
            self.links[message.to].put(message.data, held=held and message.to != HELPER)
            self.changed.add(message.to)

    def _release(self, hand: PartInHand) -> None:
        self.changed.update(peer for peer in hand.part.named if self.links[peer].release())

    def _store_part(self, hand: PartInHand) -> None:
        """Once for all that happens in a step: phases may close one after the other in it."""

        def write() -> None:
            round_id, role = hand.role.round_id, hand.role
            store_role(self._links, hand.number, round_id, role, keep_received=True)

        self.journal.before_commit((SERVER, hand.number), write)


def _why_aborted(hand: PartInHand) -> RoundAborted | None:
    """Why a part opened no sum; None if it has. After a restart only the reason is known."""
    if hand.aborted is not None or hand.role.phase == "done":
        return hand.aborted
    reason = getattr(hand.role.state, "reason", "")
    phase = getattr(hand.role.state, "phase", hand.role.phase)
    return RoundAborted(
        round_id=hand.role.round_id, phase=phase, answered=0, needed=0, reason=reason
    )
