"""The conductor drives the leader, and has the only clock of a deployment.

Requests are handed to it and wait for the step that takes them; all that came in while the journal
was busy is one step, and one sync of the disk. It closes phases at their deadlines and opens the
next round, among those who are there, once the helper has the last one in its journal. After a
restart a phase has its whole time again.

It decides in the event loop, and only while no step is at work. Steps are made in the thread of
`GroupCommit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

from tessera.ids import HELPER, ClientId, Party, RoundId, clients_in
from tessera.plan import ServicePlan
from tessera.services.group_commit import GroupCommit
from tessera.services.http.metrics import (
    DISK,
    HELPER_GONE,
    LOADING,
    OLD,
    LeaderFigures,
    LeaderMetrics,
)
from tessera.services.http.presence import GRACE, Presence
from tessera.services.journal import JournalFailed
from tessera.services.leader import Acknowledgement, Answer, LeaderService, MessageRequest
from tessera.services.logs import JsonLog

T = TypeVar("T")
Submission = tuple[Sequence[MessageRequest], asyncio.Future[list[Answer] | None]]

FOREVER: Final = 3600.0
GATHER: Final = 0.005
"""Seconds; a few times what one step takes."""
OLD_STATE: Final = (
    "peers remember later rounds than the leader does: its state is an old copy, and no round opens"
)


class Conductor:
    """Drives a `LeaderService`; `load` makes it, in a thread."""

    def __init__(
        self,
        load: Callable[[], LeaderService],
        deadlines: ServicePlan,
        *,
        rounds: int | None,
        log: JsonLog,
        clock: Callable[[], float] = time.monotonic,
        metrics: LeaderMetrics | None = None,
    ) -> None:
        self.leader: LeaderService | None = None
        self.finished: bool = False
        """All rounds that were asked for are done, and everybody needed knows. As it was
        after the last turn: while a round is being opened the leader has none in hand."""
        self.on_news: Callable[[Collection[Party]], None] = lambda _: None
        """Called after a step with those for whom there is news."""
        self.trouble = ""  # why steps do not commit, until one does
        self.metrics = metrics or LeaderMetrics()
        self.deadline: float | None = None  # of the phase under way, by the clock
        self.presence = Presence(deadlines.poll, clock)
        self.shown: dict[str, Any] = {"round": None, "phase": "loading"}  # after the last step
        self._load, self._deadlines, self._rounds, self._log = load, deadlines, rounds, log
        self._clock = clock
        self._wake = asyncio.Event()
        self._submitted: list[Submission] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._acknowledged: dict[Party, Acknowledgement] = {}
        self._came: set[Party] = set()  # who was drawn, was not there, and has come
        self._ahead: set[Party] = set()  # who remembers a later round than there is
        self._stopping = self._over = False
        self._timed = (-1, -1)  # (round, phases closed) that the deadline is for
        self._ended = self._opened = self._phase_began = clock()
        self._helper_asked, self._helper_came = clock(), False

    # --- requests -------------------------------------------------------------------------------

    async def take(self, requests: Sequence[MessageRequest]) -> list[Answer] | None:
        """What becomes of these messages, once they are on disk; None if they cannot be. They are
        taken when everybody has spoken who is due, and after `GATHER` at the latest: a step for
        each of many would cost more than it gains."""
        if self._over:
            return None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Answer] | None] = loop.create_future()
        self._submitted.append((requests, future))
        if len(self._submitted) >= self.shown.get("missing", 0):
            self._wake.set()
        elif self._gathering is None:
            self._gathering = loop.call_later(GATHER, self._wake.set)
        return await future

    def acknowledged(self, peer: Party, round_id: RoundId, number: int) -> None:
        """This peer has its messages of the round up to `number` in its journal."""
        leader = self.leader
        if leader is None or number <= leader.links[peer].acknowledged:
            return
        self._acknowledged[peer] = max(
            (round_id, number), self._acknowledged.get(peer, (round_id, 0))
        )
        # Others' may wait for the next step: nothing depends on them.
        if peer == HELPER or number > leader.links[peer].sent:
            self._wake.set()

    def asked(self, peer: Party) -> None:
        """This peer is there."""
        if isinstance(peer, str):
            self._helper_asked, self._helper_came = self._clock(), True
            return
        self.presence.asked(peer)
        if self.leader is not None and peer in self.leader.absent:
            self._came.add(peer)

    def waits(self, client: ClientId, behind: RoundId | None, request: object) -> None:
        """This client is free for a round behind that one."""
        self.presence.waits(client, behind, request)
        if self.leader is not None and self.leader.is_over:
            self._wake.set()

    def ahead(self, peer: Party) -> None:
        """This peer asks for what comes after a round that the leader does not know."""
        self._ahead.add(peer)
        self._wake.set()

    def stop(self) -> None:
        """No new round and no new step."""
        self._stopping = True
        self._wake.set()

    # --- turns ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `stop`. What the journal refuses when it is loaded is raised, and what nobody
        foresaw."""
        steps: GroupCommit | None = None
        try:
            leader = await asyncio.to_thread(self._load)
            # Where its log has secrets a leader folds it itself, after the step that ends a round.
            steps = GroupCommit([leader], self._deadlines.retry, self._log, fold=False)
            steps.on_batch = self.metrics.committed
            self.leader = leader
            self._log("loaded", round=leader.round_id, starts=leader.journal.starts)
            while not self._stopping:
                await self._turn(leader, steps)  # first: a phase under way has its deadline again
                await self._wait(leader)
        finally:
            self._over = True
            self._settle(self._submitted)
            if steps is not None:
                steps.close()

    async def _wait(self, leader: LeaderService) -> None:
        """Until something came in, or a deadline."""
        due = FOREVER if self.deadline is None else self.deadline - self._clock()
        if leader.is_over and not self._done(leader):
            due = min(due, self._opens_in(leader))
        if self.trouble:
            due = min(due, self._deadlines.retry)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due)):
                await self._wake.wait()

    async def _turn(self, leader: LeaderService, steps: GroupCommit) -> None:
        self._wake.clear()
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        taken, self._submitted = self._submitted, []
        acknowledged, self._acknowledged = self._acknowledged, {}
        before = leader.round_id, leader.is_over
        leader.absent -= self._came
        self._came.clear()
        answers: list[Answer] | None = None
        try:
            if self.trouble:  # is it over? A step that has nothing to write would not know
                await steps.run(leader.journal.probe)
                self.trouble = ""
                self._log("trouble is over")
            if taken or acknowledged:
                requests = [each for sent, _ in taken for each in sent]
                answers = await steps.run(partial(leader.handle, requests, acknowledged))
            await self._keep_time(leader, steps)
            if self._done(leader) and self.shown.get("model") is None:
                digest = await steps.run(lambda: leader.model.digest.hex())
                self.shown = {**self.shown, "model": digest}
        except JournalFailed as error:  # no step, nothing sent: the leader is where its journal is
            if not self.trouble:
                self._log("trouble", reason=str(error))
            self.trouble = str(error)
        finally:
            self._settle(taken, answers)
        if leader.is_over and before != (leader.round_id, True) and leader.round_id is not None:
            self._ended = self._clock()
            event = json.loads(leader.outcome(leader.round_id) or "{}")
            self.metrics.round_ended(event, self._ended - self._opened)
            self._log("round ended", outcome=json.dumps(self.metrics.charged(event)))
        self.finished = self._done(leader) and leader.helper_has_all
        changed, leader.changed = leader.changed, set()
        self.shown = {
            "round": leader.round_id,
            "phase": "between rounds" if leader.is_over else ", ".join(leader.phases),
            "missing": len(leader.missing),
            "restarts": leader.journal.starts - 1,
            "disk": leader.journal.bytes_on_disk,
            "trouble": self.trouble or (OLD_STATE if self._is_old_copy(leader) else ""),
            "model": self.shown.get("model"),
            "missing_clients": sorted(clients_in(leader.missing)),
        }
        self.on_news(changed)

    @staticmethod
    def _settle(taken: Sequence[Submission], answers: Sequence[Answer] | None = None) -> None:
        """Everybody's own; None for everybody if nothing came to disk."""
        rest = iter(answers or ())
        for requests, future in taken:
            own = None if answers is None else list(islice(rest, len(requests)))
            if not future.done():  # else whoever asked is gone
                future.set_result(own)

    # --- the clock ------------------------------------------------------------------------------

    async def _keep_time(self, leader: LeaderService, steps: GroupCommit) -> None:
        """Open a round that is due, or close a phase that is overdue."""
        if leader.is_over:
            if not self._done(leader) and self._opens_in(leader) <= 0:
                there = self._free(leader)
                self.presence.give_up(self._awaited(leader, there))
                round_id = await steps.run(partial(leader.open_round, there))
                self._opened = self._clock()
                self._log("round opened", round=round_id, there=len(there))
        elif self.deadline is not None and self._clock() >= self.deadline:
            phases, missing = leader.phases, leader.missing
            await steps.run(leader.close_overdue)
            self.presence.give_up(clients_in(missing))
            for phase in phases:
                self.metrics.closed_at_deadline(phase, len(missing))
            gone = sorted(clients_in(missing))
            about = {"phases": phases, "missing": len(missing), "helper": HELPER in missing}
            self._log("deadline", round=leader.round_id, client=gone, **about)
        if leader.is_over:
            self.deadline = None
            return
        here = (int(leader.round_id or 0), leader.closed)
        if here != self._timed:
            first = here[0] != self._timed[0]
            self._timed = here
            limit = self._deadlines.join if first else self._deadlines.phase
            self._phase_began = self._clock()
            self.deadline = self._phase_began + limit

    def figures(self) -> LeaderFigures:
        """What an operator sees of it now."""
        leader, now = self.leader, self._clock()
        if leader is None:
            return LeaderFigures(shown=self.shown, trouble={LOADING: "the journal is loading"})
        trouble = {DISK: self.trouble} if self.trouble else {}
        if self._is_old_copy(leader):
            trouble[OLD] = OLD_STATE
        silent = now - self._helper_asked if leader.helpers else None
        if silent is not None and not (self.finished or self._done(leader)):
            if not self._helper_came or silent > self._deadlines.poll + GRACE:
                trouble[HELPER_GONE] = f"the helper has not asked for {silent:.0f} s"
        there = self.presence.there
        return LeaderFigures(
            shown=self.shown,
            clients={
                "enrolled": len(leader.clients),
                "there": len(there),
                "free": len(self._free(leader)),
            },
            phase_seconds=now - self._phase_began,
            deadline_seconds=None if self.deadline is None else self.deadline - now,
            helper_silent=silent,
            trouble=trouble,
        )

    def _done(self, leader: LeaderService) -> bool:
        course, rounds = leader.course, self._rounds
        had_all = rounds is not None and course.next_round >= rounds
        return leader.is_over and (had_all or course.is_over)

    def _opens_in(self, leader: LeaderService) -> float:
        """Seconds until the next round may open; FOREVER if somebody has to come first."""
        if not leader.helper_has_all or self._stopping or self._is_old_copy(leader):
            return FOREVER
        free = self._free(leader)
        if len(free) < leader.least_clients:
            return FOREVER
        since = self._clock() - self._ended
        # With too few of those who may be drawn a round is aborted: not one after the other.
        too_few = len(free & leader.candidates) < leader.least_clients
        if too_few or self._awaited(leader, free):
            return max(self._deadlines.pause, self._deadlines.join) - since
        return self._deadlines.pause - since

    @staticmethod
    def _last_round(leader: LeaderService, client: ClientId) -> RoundId | None:
        return leader.links[client].round_id

    def _free(self, leader: LeaderService) -> frozenset[ClientId]:
        """Who is there and in no round."""
        return self.presence.free(partial(self._last_round, leader))

    def _awaited(self, leader: LeaderService, free: Collection[ClientId]) -> frozenset[ClientId]:
        """For whom the next round waits, [service] join at most and once: those who are on their
        way back from the last one; and while there are fewer than a cohort, everybody."""
        candidates = leader.candidates
        if len(candidates & frozenset(free)) >= leader.plan.cohort:
            last = frozenset() if leader.drawn is None else frozenset(leader.drawn.named)
            candidates &= last & self.presence.there
        return candidates - frozenset(free) - self.presence.missed

    def _is_old_copy(self, leader: LeaderService) -> bool:
        return leader.believes(self._ahead, leader.clients)
