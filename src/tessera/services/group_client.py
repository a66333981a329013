"""A client of a fixed group as a service: visit after visit over its journal, for life.

What it has stored it sends again as it is and never computes again; until then it may be killed at
any instant. A fault of the leader's, and a state that was set back, end it for good; so does its
group's retirement. What it sends leaves at a fixed delay after its download ([groups] delay), later
than training takes: a member that is late because of its data would be identified. After a restart
it asks as one that has not trained yet, whether it has or not, and the delay begins anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import SigningKey
from tessera.errors import MisuseError, ServerFault, TesseraError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import Submodel
from tessera.plan import Plan
from tessera.privacy.dp.ledger import Ledger
from tessera.protocols.epochs.messages import EpochHeader
from tessera.protocols.machine import Outbound, Over
from tessera.protocols.membership.proof import CheckedGroup
from tessera.rounds.epochs.client import CutoffAhead, EpochClient, EpochClientSetup
from tessera.rounds.epochs.group import EpochWork
from tessera.rounds.noise import noise_of
from tessera.rounds.party import LocalState, Word
from tessera.services.client import MakeLocal, Train, TrainingResult
from tessera.services.dialing_party import ONLY
from tessera.services.journal import LEFT_GROUP, Journal
from tessera.services.journal_stores import (
    JournalPeriods,
    charges,
    load_local,
    save_local,
    store_role,
    stored_role,
)
from tessera.services.link import Links, name_of

LEAVES_AT: Final = "leaves at"
KEY_SINCE: Final = "mask key since"
LEAVE_TOLD: Final = "leave told"
DELIVERY_TOLD: Final = "delivery told"
"""The last epoch whose delivery the leader is known to have."""
AHEAD_SINCE: Final = "cut-off ahead since"
LONGEST_AHEAD: Final = 86400.0
"""Seconds for which a client waits for a cut-off that has not passed by its clock, and then leaves:
its clock is slow, or the leader lies."""
OWN_DEADLINE: Final = "its own deadline has passed before it delivered"
OWN_WILL: Final = "it was told to leave"
DEPOSITED: Final = "Deposited"
FOLD: Final = "fold"
"""Once for all clients of a journal that have stored what they send, before any of it leaves."""


class LeftGroup(TesseraError):
    """This client is out of its group for good."""

    hint = "who has left does not come back; with new keys it takes part with new rows only"


class GroupClientService:
    """One client of a fixed group."""

    local: LocalState

    def __init__(
        self,
        journal: Journal,
        plan: Plan,
        me: ClientId,
        *,
        group: CheckedGroup,
        key: SigningKey,
        local: MakeLocal,
        train: Train,
        entropy: Entropy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self.journal, self.plan, self.me, self.name = journal, plan, me, name_of(me)
        self.group, self._key = group, key
        self._make_local, self._train, self._entropy = local, train, entropy
        self.leaving = False
        """Whether this process was started to leave."""
        self.ahead = 0.0
        """Seconds by which the cut-off that it was last given is ahead of its clock: it waits."""
        self.load()
        self.expire()  # whatever happens next

    def load(self) -> None:
        """Bring everything in memory to where the journal is: at the start, and after a step that
        did not commit."""
        journal, name = self.journal, self.name
        self._links = Links(journal, name, [SERVER])
        ledger = Ledger(entries=charges(journal, name))
        self.local = self._make_local(JournalPeriods(journal, name), ledger)
        load_local(journal, name, self.local)
        self.left = (journal.fact(name, LEFT_GROUP) or b"").decode()
        self._told = int(journal.fact(name, DELIVERY_TOLD) or 0)
        self.outgoing: list[bytes] = []
        self._asked = False
        self.role: EpochClient | None = None
        found = stored_role(self._links, ONLY)
        self._in_hand = found is not None
        if found is not None:
            self.role = EpochClient.wake(found[1].snapshot, found[1].messages, self._setup)
            if self.role.phase == DEPOSITED:  # a fetch would not show that it has not come
                self._send(self.role.resend())
        if self.left and journal.fact(name, LEAVE_TOLD) is None:
            self.outgoing = [self._leave_message]

    @property
    def _setup(self) -> EpochClientSetup:
        return EpochClientSetup(
            plan=self.plan,
            group=self.group.group,
            party=self.me,
            key=self._key,
            local=self.local,
            entropy=self._entropy,
        )

    # --- where it stands ------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing of an epoch is in hand: what was erased may leave the log."""
        return not self._in_hand

    @property
    def retired(self) -> str:
        """Why its group is retired; "" if it is not."""
        state = None if self.role is None else self.role.state
        return (state.reason or "no reason was given") if isinstance(state, Over) else ""

    @property
    def pending(self) -> Submodel | None:
        """What is to be trained now: after a start not before the leader was asked. It has the
        delivery of a client that was restored to an earlier state, which then leaves."""
        if self.role is None or self.left or self.retired or not self._asked:
            return None
        return self.role.pending

    @property
    def leaves_in(self) -> float:
        """Seconds until what is stored may be sent."""
        stored = self.journal.fact(self.name, LEAVES_AT)
        left = 0.0 if stored is None else float(stored) - self._clock()
        return min(max(0.0, left), self.plan.groups.delay)  # whatever the clock was set to

    @property
    def expires_in(self) -> float | None:
        """Seconds until its own deadline: by then it has delivered, or its mask key is erased.
        Nobody else's word moves it, nor how long its data took it. None if it has no key."""
        since = self.journal.fact(self.name, KEY_SINCE)
        if self._epoch is None or since is None:
            return None
        return max(0.0, float(since) + self.plan.groups.deadline - self._clock())

    @property
    def _leave_message(self) -> bytes:
        return wire.encode(self._setup.member.leave)

    @property
    def _epoch(self) -> tuple[int, EpochHeader | None] | None:
        """What it has delivered and what is due; None if it is out."""
        if self.role is None or self.left or self.retired:
            return None
        return self.role.delivered, self.role.due

    # --- a visit --------------------------------------------------------------------------------

    def join(self) -> None:
        """Once: record the group and deposit the first mask key."""
        with self.journal.step():
            self.role, out = EpochClient.join(self._setup)
            self._send(out)
            self._store()
            self._note_key(self._clock())

    def fetch(self) -> bytes:
        """A question that was not asked before."""
        if self.role is None:
            raise MisuseError(f"{self.name} has not joined")
        visit, told = int.from_bytes(os.urandom(8), "big"), self.role.delivered <= self._told
        now, since = self._clock(), self.journal.fact(self.name, AHEAD_SINCE)
        patient = not since or now - float(since) < LONGEST_AHEAD
        (question,) = self.role.fetch(visit, now, told=told, patient=patient)
        return question.data

    def take(self, data: bytes) -> None:
        """What the leader answers: an epoch, a time to come back, or the group's end."""
        assert self.role is not None
        self.ahead = 0.0
        with self.journal.step():
            before = self._epoch
            try:
                out = self.role.receive(SERVER, data)
            except ServerFault as fault:
                self._leave(fault.reason)
                out = []
            except CutoffAhead as early:
                self.ahead = early.seconds
                if not self.journal.fact(self.name, AHEAD_SINCE):
                    self.journal.set_fact(self.name, AHEAD_SINCE, str(self._clock()).encode())
                return
            work = wire.kind_of(data) is EpochWork
            if work and self.journal.fact(self.name, AHEAD_SINCE):
                self.journal.set_fact(self.name, AHEAD_SINCE, b"")
            self._asked = self._asked or work
            if self.retired and (last := self.local.unsettled) is not None:
                self.local.settle(last, counted=False, by=Word.SERVER)
            self._in_hand = self._epoch not in (before, None) or bool(out)
            if work and self._epoch is not None:
                self._note_told(self.role.settled if out else self.role.delivered)
                if out or self.role.due:  # after a restart, too: trained already or not
                    leaves = self._clock() + self.plan.groups.delay
                    self.journal.set_fact(self.name, LEAVES_AT, str(leaves).encode())
            self._send(out)
            self._store()

    def decline(self, reason: str) -> None:
        """What its own rules do not allow: no budget is left, or rows that met another group."""
        with self.journal.step():
            self._leave(reason)

    def leave(self) -> None:
        """By its own will, for good."""
        self.leaving = True
        if not self.left and not self.retired:
            self.decline(OWN_WILL)

    def expire(self) -> None:
        """If its own deadline has passed: its mask key and the root of its coins are erased, and it
        is out. Whoever takes the device later cannot open what others have delivered."""
        if self.expires_in == 0.0:
            self.decline(OWN_DEADLINE)

    def train(self) -> bool:
        """Train what is pending, and have the update on its way; False if nothing is."""
        submodel = self.pending
        if submodel is None or self.role is None:
            return False
        coins = self.role.coins
        trained = self._train(RoundId(self.role.base_round), submodel, coins)
        update = noise_of(self.plan).contribution(trained.update, coins)
        self.supply(replace(trained, update=update))
        return True

    def supply(self, trained: TrainingResult) -> None:
        """What came out of training `pending`: on disk with the bytes that are sent."""
        assert self.role is not None
        with self.journal.step():
            base = RoundId(self.role.base_round)
            self._send(self.role.supply(trained.update))
            self.local.keep_pending(base, trained.local)
            self.local.broken = trained.broken
            self._store()

    def sent(self) -> None:
        """The leader has the first of what was on its way."""
        with self.journal.step():
            self.outgoing = self.outgoing[1:]
            self._in_hand = bool(self.outgoing)
            if self.left:
                self.journal.set_fact(self.name, LEAVE_TOLD, b"1")
            elif self.role is not None and self._epoch is not None:
                self._note_told(self.role.delivered)

    # --- inside a step --------------------------------------------------------------------------

    def _leave(self, reason: str) -> None:
        """Nothing of an epoch is left here, and the leader is told: the group cannot go on."""
        self.left, self.outgoing, self._in_hand = reason, [self._leave_message], False
        self.journal.set_fact(self.name, LEFT_GROUP, reason.encode())
        if self.role is not None:
            self.role.withdraw(reason)
            self._store()
        self.journal.after_commit(self.journal.fold)  # the key leaves the log, too

    def _note_told(self, epoch: int) -> None:
        """The leader has this delivery. The mask key that was drawn with it counts from the
        download before: when training ended is nobody's business."""
        if epoch > self._told:
            self._told = epoch
            self.journal.set_fact(self.name, DELIVERY_TOLD, str(epoch).encode())
            leaves = float(self.journal.fact(self.name, LEAVES_AT) or 0.0)
            self._note_key(leaves - self.plan.groups.delay)

    def _note_key(self, since: float) -> None:
        """A mask key was drawn, for an epoch that it has not delivered."""
        self.journal.set_fact(self.name, KEY_SINCE, str(since).encode())

    def _send(self, out: list[Outbound]) -> None:
        self.outgoing = [message.data for message in out] or self.outgoing

    def _store(self) -> None:
        self.journal.before_commit(self.name, self._write)
        if self.outgoing:  # the key under which they are masked leaves the log, too, before they go
            self.journal.before_commit(FOLD, partial(self.journal.after_commit, self.journal.fold))

    def _write(self) -> None:
        assert self.role is not None
        store_role(self._links, ONLY, RoundId(self.group.group.number), self.role)
        save_local(self.journal, self.name, self.local)
