"""The leader of fixed groups that wait: clients come when they can, and nobody has a deadline.

What a client sends is taken in one step, with all that comes of it: the base of an epoch and its
first fetch, a vector in the running sum, the model of a round with the groups that it merges. It is
on disk before the client is answered. A group's role, with the sum of the vectors that wait, is
woken from the journal when somebody of the group comes; a few of them stay in memory.

A round ends when as many updates as a cohort has have come since the last one and a group is full;
or as soon as a client comes back to whose group nothing is due because it is full. The next epoch
of a group is opened for its first member that comes, an update's only while fewer updates than a
cohort has are missing in groups that have begun and are under way.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.errors import PeerError, WireError
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.learning.tables.store import ModelStore
from tessera.plan import Plan
from tessera.privacy.index.groups import DrawnGroups
from tessera.protocols.epochs.group import FixedGroup
from tessera.protocols.epochs.messages import Delivery, EpochKind, Fetch
from tessera.protocols.machine import RoundOutcome, RoundOver
from tessera.rounds.epochs.server import EpochCourse, EpochServer, EpochServerSetup
from tessera.rounds.events import as_json
from tessera.rounds.party import ServerModel
from tessera.services.journal import NAME, RETIRED, Journal, outcome_text
from tessera.services.journal_stores import store_role, stored_role
from tessera.services.link import Links

NEXT_ROUND: Final = "next round"
DELIVERED: Final = "delivered"
CACHED: Final = 64
"""Groups whose roles stay in memory."""
CUTOFF: Final = "cut-off "
BEFORE_NOW: Final = 300
"""Seconds that a cut-off has passed when it is named: so much may a client's clock be slow."""
WAIT: Final = 1
"""Seconds until a client asks again; the leader holds its question as long as [service] poll."""
NOT_COME: Final = "a member has not come for too long"


@dataclass(frozen=True, slots=True)
class VisitAnswer:
    """What becomes of a client's message. `waits`: nothing is due, and it was not taken yet;
    `refused`: why it does not count."""

    message: bytes = field(default=b"", repr=False)
    refused: str = ""
    waits: bool = False


@dataclass(frozen=True, slots=True)
class EpochPlace:
    """An epoch of a group in the order of a training: the round in which it was opened, and the one
    that took its sum; None: none yet, -1: none, its group is retired."""

    part: int
    epoch: int
    kind: EpochKind
    opened: int
    closed: int | None


def epochs_in(state: Path) -> list[EpochPlace]:
    """All epochs of a leader's groups, as its state has them."""
    with closing(sqlite3.connect(f"file:{state / NAME}?mode=ro", uri=True)) as database:
        return [
            EpochPlace(part, epoch, EpochKind(kind), opened, closed)
            for part, epoch, kind, opened, closed in database.execute(
                "SELECT part, epoch, kind, opened, closed FROM group_epoch ORDER BY part, epoch"
            )
        ]


@dataclass(slots=True)
class OpenGroup:
    """A group whose epoch is open: what it takes to decide who is served."""

    epoch: int
    kind: EpochKind
    opened: int
    """The round in which it was."""
    missing: int
    touched: float = field(default_factory=time.monotonic)
    """When this process last had an update of it."""


class GroupLeaderService:
    """The leader; `first_model` makes the model of the bundle."""

    def __init__(
        self,
        journal: Journal,
        plan: Plan,
        groups: Sequence[FixedGroup],
        *,
        first_model: Callable[[], ServerModel],
        entropy: Entropy,
        drawn: DrawnGroups | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`drawn`: how the groups were, for those whose draw had most void snapshots before it."""
        self.drawn = drawn or DrawnGroups(size=plan.group_size)
        self.journal, self.plan, self.groups = journal, plan, tuple(groups)
        self._clock = clock
        self._of = {c: at for at, group in enumerate(self.groups) for c in group.members}
        self._first_model, self._entropy = first_model, entropy
        self.load()

    def load(self) -> None:
        """Bring everything in memory to where the journal is: at the start, and after a step that
        did not commit."""
        model, journal = self._first_model(), self.journal
        self._store = ModelStore.within(
            journal.path,
            journal.database,
            plan_hash=self.plan.digest,
            tables=model.stored_tables,
        )
        if self._store.round_id is not None:
            model.restore(self._store.dense())
        self.model = model
        self._links = Links(journal, SERVER, ())
        self._cached: OrderedDict[int, EpochServer] = OrderedDict()
        self._changed: dict[int, EpochServer] = {}  # in the step under way
        self._held: dict[int, None] = {}  # groups that may open an epoch when others are further
        self.news: set[ClientId] = set()  # to whom something may be due since somebody last looked
        self.next_round = int(journal.fact(SERVER, NEXT_ROUND) or 0)
        self.delivered = int(journal.fact(SERVER, DELIVERED) or 0)
        rows = journal.database.execute(
            "SELECT part, epoch, kind, opened, missing FROM group_epoch WHERE closed IS NULL"
        )
        self.open = {at: OpenGroup(e, EpochKind(k), o, m) for at, e, k, o, m in rows}
        facts = journal.database.execute(
            "SELECT name, value FROM fact WHERE party = ? AND name LIKE ?", (SERVER, f"{RETIRED}%")
        )
        self.retired = {int(name.removeprefix(RETIRED)): text.decode() for name, text in facts}

    # --- where the groups stand -----------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """There is always a round in hand, and none of its secrets are the leader's."""
        return True

    def outcome(self, round_id: RoundId) -> str:
        """How a round ended, as JSON; "" if it has not."""
        return outcome_text(self.journal.database, round_id)

    def takes_part(self, party: Party) -> bool:
        return party in self._of

    @property
    def members(self) -> frozenset[ClientId]:
        """Of all groups that are not retired."""
        return frozenset(c for c, at in self._of.items() if at not in self.retired)

    @property
    def outstanding(self) -> int:
        """Updates that are missing in groups that have begun. A group that nobody has come to for a
        while does not keep others waiting."""
        recent = time.monotonic() - self.plan.service.phase
        return sum(
            each.missing
            for each in self.open.values()
            if each.kind is EpochKind.UPDATE and each.touched >= recent
        )

    @property
    def full(self) -> list[int]:
        """Groups whose updates wait to be merged."""
        return sorted(
            at
            for at, o in self.open.items()
            if o.kind is EpochKind.UPDATE and not o.missing and at not in self.retired
        )

    # --- one message ----------------------------------------------------------------------------

    def take(self, client: ClientId, data: bytes, *, last: bool = True) -> VisitAnswer:
        """Take a client's message in one step. `last`: it has waited long enough, and is told to
        come back if nothing is due."""
        at = self._of[client]
        with self.journal.step():
            try:
                if at in self.retired:
                    return self._retirement(at)
                if wire.kind_of(data) is Fetch:
                    return self._fetched(at, client, data, last=last)
                return self._taken(at, client, data)
            except PeerError as refused:
                return VisitAnswer(refused=refused.reason)
            finally:
                self._wake_next()

    def _fetched(self, at: int, client: ClientId, data: bytes, *, last: bool) -> VisitAnswer:
        try:
            asked: Fetch = wire.decode(data, expect=[Fetch])
        except WireError as error:
            return VisitAnswer(refused=f"sent an invalid message: {error}")
        if at in self.open and not self.open[at].missing:
            self._merge()
            if at in self.retired:
                return self._retirement(at)
        role = self._role(at)
        self._open_if_possible(at, role)
        progress = role.epochs.at
        current = progress.number if progress.open is None else progress.open.header.epoch
        if asked.delivered == current and not last:
            return VisitAnswer(waits=True)
        phase, out = role.phase, role.receive(client, data)
        if role.phase != phase:  # the first fetch: from now on this epoch is the only one
            self._store_role(at, role)
        return VisitAnswer(message=out[0].data if out else b"")

    def _taken(self, at: int, client: ClientId, data: bytes) -> VisitAnswer:
        """A deposit, a delivery, or that it has left."""
        role = self._role(at)
        expected, phase = role.expected, role.phase
        role.receive(client, data)
        if reason := role.epochs.at.retired:
            self._put_away(at, role, reason)
            return VisitAnswer()
        if role.expected == expected and role.phase == phase:
            return VisitAnswer()  # known before
        self._store_role(at, role)
        if wire.kind_of(data) is Delivery:
            self._count(at, role)
        elif role.has_begun:
            self.news.update(self.groups[at].members)
        return VisitAnswer()

    def _count(self, at: int, role: EpochServer) -> None:
        """One more vector; with the last one a union is read, and an update may be merged."""
        row = self.open[at]
        row.missing, row.touched = len(role.due), time.monotonic()
        self.journal.database.execute(
            "UPDATE group_epoch SET missing = ? WHERE part = ? AND epoch = ?",
            (row.missing, at, row.epoch),
        )
        if row.kind is EpochKind.UPDATE:
            self._set_delivered(self.delivered + 1)
        if role.full:
            self.news.update(self.groups[at].members)  # whoever is back ends the round
            if row.kind is EpochKind.UNION:
                self._course([role]).take_unions()
                self._closed(at, role)
        if self.delivered >= self.plan.cohort and self.full:
            self._merge()

    # --- epochs ---------------------------------------------------------------------------------

    def _open_if_possible(self, at: int, role: EpochServer) -> None:
        if role.epochs.at.open is not None or not role.has_begun:
            return
        update = role.epochs.next_kind is EpochKind.UPDATE
        if update and self.outstanding >= self.plan.cohort:
            self._held.setdefault(at)
            return
        role.open_next(self.model, RoundId(self.next_round))
        self._store_role(at, role)
        self._record_open(at, role)

    def _record_open(self, at: int, role: EpochServer) -> None:
        opened = role.epochs.at.open
        assert opened is not None
        header = opened.header
        row = OpenGroup(header.epoch, header.kind, int(opened.round_id), len(role.due))
        self.open[at] = row
        self._held.pop(at, None)
        self.journal.database.execute(
            "INSERT INTO group_epoch VALUES (?, ?, ?, ?, ?, NULL)",
            (at, row.epoch, row.kind.value, row.opened, row.missing),
        )

    def _closed(self, at: int, role: EpochServer) -> None:
        """The sum of its epoch was taken; the group may be retired for it."""
        row = self.open.pop(at)
        self.journal.database.execute(
            "UPDATE group_epoch SET closed = ? WHERE part = ? AND epoch = ?",
            (self.next_round, at, row.epoch),
        )
        if reason := role.epochs.at.retired:
            role.over(RoundOutcome.ABORTED, reason)
            self._record_retired(at, reason)
        self._store_role(at, role)
        self.news.update(self.groups[at].members)

    def _merge(self) -> None:
        """End the round: merge the groups that are full, step and store the model."""
        round_id, full = RoundId(self.next_round), self.full
        roles = {at: self._role(at) for at in full}
        course = self._course(list(roles.values()))
        members = [c for at in full for c in self.groups[at].members]
        event = course.conclude(round_id, members, self.delivered)
        for at, role in roles.items():
            self._closed(at, role)
        for at, row in list(self.open.items()):
            if int(round_id) - row.opened >= self.plan.groups.longest_wait:
                self.retire(at, NOT_COME)
        event = replace(event, groups_retired=len(self.retired))
        self.journal.database.execute(
            "INSERT INTO event (round_id, data) VALUES (?, ?)",
            (event.round_id, json.dumps(as_json(event))),
        )
        self.next_round += 1
        self.journal.set_fact(SERVER, NEXT_ROUND, str(self.next_round).encode())
        self._set_delivered(0)
        if self.journal.erases:  # what its noise came from leaves the log, too
            self.journal.after_commit(self.journal.fold)

    def _course(self, roles: Sequence[EpochServer]) -> EpochCourse:
        """Of the groups that are to be merged."""
        met = dict(enumerate(role.epochs for role in roles))  # each snapshot has a group 0
        course = EpochCourse(
            self.plan,
            (),
            lambda at, _: met[at],
            self.model,
            self._entropy,
            commit=self._commit_model,
        )
        course.groups.update(met)
        return course

    def _commit_model(self, round_id: RoundId, model: ServerModel) -> None:
        self._store.commit(round_id, model.dense_parts)

    def _set_delivered(self, count: int) -> None:
        self.delivered = count
        self.journal.set_fact(SERVER, DELIVERED, str(count).encode())

    # --- groups that cannot go on ---------------------------------------------------------------

    def retire(self, at: int, reason: str) -> None:
        """Inside a step: for good, and nothing of its open epoch is used or kept."""
        role = self._role(at)
        role.retire(reason)
        self._put_away(at, role, reason)

    def _put_away(self, at: int, role: EpochServer, reason: str) -> None:
        """A group that is retired: durably, and its members hear of it when they come."""
        self._store_role(at, role)
        if (row := self.open.pop(at, None)) is not None:
            self.journal.database.execute(
                "UPDATE group_epoch SET closed = -1 WHERE part = ? AND epoch = ?", (at, row.epoch)
            )
        self._record_retired(at, reason)
        self.news.update(self.groups[at].members)

    def _record_retired(self, at: int, reason: str) -> None:
        self.retired[at] = reason
        self._held.pop(at, None)
        self.journal.set_fact(SERVER, f"{RETIRED}{at}", reason.encode())

    def _retirement(self, at: int) -> VisitAnswer:
        number = RoundId(self.groups[at].number)
        told = RoundOver.of(number, RoundOutcome.ABORTED, self.retired[at])
        return VisitAnswer(message=wire.encode(told))

    def _wake_next(self) -> None:
        """Those who wait for the next epoch of their group, where there is room for one."""
        if self._held and self.outstanding < self.plan.cohort:
            at = next(iter(self._held))
            del self._held[at]
            self.news.update(self.groups[at].members)

    # --- periods --------------------------------------------------------------------------------

    def _cutoff(self, snapshot: int, period: int) -> int | None:
        """Inside a step: that of a period, the same for all groups of a snapshot, named when the
        first of them begins it. None if none has passed that is later than the last one."""
        name = f"{CUTOFF}{snapshot} {period}"
        if (stored := self.journal.fact(SERVER, name)) is not None:
            return int(stored)
        cutoff = int(self._clock()) - BEFORE_NOW
        before = self.journal.fact(SERVER, f"{CUTOFF}{snapshot} {period - 1}")
        if before is not None and cutoff <= int(before):
            return None
        self.journal.set_fact(SERVER, name, str(cutoff).encode())
        return cutoff

    # --- roles on disk --------------------------------------------------------------------------

    def _role(self, at: int) -> EpochServer:
        role = self._changed.get(at) or self._cached.get(at)
        if role is None:
            group = self.groups[at]
            cutoffs = partial(self._cutoff, group.snapshot)
            setup = EpochServerSetup(plan=self.plan, group=group, wait=WAIT, cutoffs=cutoffs)
            found = stored_role(self._links, at)
            if found is None:
                role = EpochServer(setup)
            else:
                role = EpochServer.wake(found[1].snapshot, found[1].messages, setup)
        self._cached[at] = role
        self._cached.move_to_end(at)
        if len(self._cached) > CACHED:
            self._cached.popitem(last=False)
        return role

    def _store_role(self, at: int, role: EpochServer) -> None:
        """Once for all that happens in a step; until then the role stays in memory."""
        self._changed[at] = role

        def write() -> None:
            del self._changed[at]
            store_role(self._links, at, RoundId(self.groups[at].number), role)

        self.journal.before_commit((SERVER, at), write)
