"""Fixed groups over HTTP: a client comes with one message and is answered with one.

    POST /v1/visit      a deposit, a question what is due, or a delivery

A question is held as long as nothing is due, [service] poll at most. Every message is one step of
the leader's, on disk before the answer; those that come together share a sync of the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tessera.ids import ClientId, Party, RoundId
from tessera.plan import ServicePlan
from tessera.privacy.index.bound import ON_THE_OPERATORS_WORD
from tessera.privacy.index.groups import CORRUPT_SHARES
from tessera.services.group_commit import GroupCommit
from tessera.services.group_leader import GroupLeaderService, VisitAnswer
from tessera.services.http.app import FewAtOnce, LeaderApp, Route, json_answer
from tessera.services.http.metrics import (
    DISK,
    LOADING,
    LeaderFigures,
    LeaderMetrics,
    OperatorToken,
)
from tessera.services.http.presence import Presence
from tessera.services.http.requests import RefusedRequest, RequestChecker
from tessera.services.journal import JournalFailed, counted_reasons
from tessera.services.logs import JsonLog


@dataclass(frozen=True, slots=True)
class LeaderStatus:
    """A leader after a step: what is shown of it, how its last round ended, and who has news."""

    shown: dict[str, Any]
    outcome: str
    news: set[ClientId]


class GroupConductor:
    """Drives a `GroupLeaderService`; `load` makes it, in a thread. It has no clock."""

    def __init__(
        self,
        load: Callable[[], GroupLeaderService],
        deadlines: ServicePlan,
        *,
        rounds: int | None,
        log: JsonLog,
        clock: Callable[[], float] = time.monotonic,
        metrics: LeaderMetrics | None = None,
    ) -> None:
        self.leader: GroupLeaderService | None = None
        self.finished: bool = False
        """All rounds that were asked for are done."""
        self.on_news: Callable[[Collection[Party]], None] = lambda _: None
        """Called after a step with those to whom something may be due."""
        self.deadline: float | None = None
        self.shown: dict[str, Any] = {"round": None, "phase": "loading"}  # after the last step
        self._load, self._deadlines, self._rounds, self._log = load, deadlines, rounds, log
        self._steps: GroupCommit | None = None
        self._stopping = asyncio.Event()
        self._trouble = ""  # why steps do not commit, until one does
        self._recovery: asyncio.Task[None] | None = None
        self.presence, self._clock = Presence(deadlines.poll, clock), clock
        self._ended = clock()
        self.metrics = metrics or LeaderMetrics()

    async def run(self) -> None:
        """Until `stop`. What the journal refuses when it is loaded is raised."""
        leader = await asyncio.to_thread(self._load)
        steps = GroupCommit([leader], self._deadlines.retry, self._log, fold=False)
        steps.on_batch = self.metrics.committed
        self._log("loaded", round=leader.next_round, starts=leader.journal.starts)
        try:
            self._steps, self.leader = steps, leader
            found = await steps.run(partial(self._looked_at, leader))
            self.shown = found.shown  # its last round ended in another process
            self._after(found)
            await self._stopping.wait()
        finally:
            self._steps = None
            steps.close()

    def stop(self) -> None:
        """No new step."""
        self._stopping.set()

    async def take(self, client: ClientId, data: bytes, *, last: bool) -> VisitAnswer | None:
        """What becomes of a message, once it is on disk; None if it cannot be."""
        steps, leader = self._steps, self.leader
        self.presence.asked(client)
        if steps is None or leader is None or self._stopping.is_set():
            return None

        tried = bool(self._trouble)

        def change() -> tuple[VisitAnswer, LeaderStatus]:
            if tried:  # is it over? A step that has nothing to write would not know
                leader.journal.probe()
            return leader.take(client, data, last=last), self._looked_at(leader)

        try:
            answer, seen = await steps.run(change)
        except JournalFailed as error:  # nothing has happened
            if not self._trouble:
                self._log("trouble", reason=str(error))
            self._trouble = str(error)
            self.shown = {**self.shown, "trouble": self._trouble}
            if self._recovery is None or self._recovery.done():
                self._recovery = asyncio.create_task(self._recover(steps, leader))
            return None
        if tried:
            self._over()
        self._after(seen)
        return answer

    def _over(self) -> None:
        if self._trouble:
            self._log("trouble is over")
        self._trouble = ""
        self.shown = {**self.shown, "trouble": ""}

    async def _recover(self, steps: GroupCommit, leader: GroupLeaderService) -> None:
        """Until a step comes to disk."""
        while self._trouble and not self._stopping.is_set():
            await asyncio.sleep(self._deadlines.retry)
            with contextlib.suppress(JournalFailed):
                await steps.run(leader.journal.probe)
                self._over()

    def figures(self) -> LeaderFigures:
        """What an operator sees of it now."""
        leader = self.leader
        if leader is None:
            return LeaderFigures(shown=self.shown, trouble={LOADING: "the journal is loading"})
        there = len(self.presence.there)
        return LeaderFigures(
            shown=self.shown,
            clients={"enrolled": len(leader.members), "there": there},
            phase_seconds=self._clock() - self._ended,
            trouble={DISK: self._trouble} if self._trouble else {},
        )

    def _looked_at(self, leader: GroupLeaderService) -> LeaderStatus:
        """In the journal's thread: what is shown, and who has news."""
        news, leader.news = leader.news, set()
        round_id = leader.next_round - 1
        done = self._rounds is not None and leader.next_round >= self._rounds
        shown = {
            "round": None if round_id < 0 else round_id,
            "phase": "groups wait",
            "groups": len(leader.groups) - len(leader.retired),
            "retired": len(leader.retired),
            "retired_for": counted_reasons(leader.retired.values()),
            "open": len(leader.open),
            "missing": sum(each.missing for each in leader.open.values()),
            "membership": ON_THE_OPERATORS_WORD,
            "void": leader.drawn.void,
            "B": leader.drawn.in_words(CORRUPT_SHARES[0]),
            "restarts": leader.journal.starts - 1,
            "disk": leader.journal.bytes_on_disk,
            "trouble": "",
            "model": leader.model.digest.hex() if done else None,
        }
        ended = round_id != self.shown.get("round")
        return LeaderStatus(shown, leader.outcome(RoundId(round_id)) if ended else "", news)

    def _after(self, seen: LeaderStatus) -> None:
        if seen.outcome and seen.shown["round"] != self.shown.get("round"):
            event, now = json.loads(seen.outcome), self._clock()
            first = self.shown.get("round") is None
            self.metrics.round_ended(event, None if first else now - self._ended)
            self._ended = now
            self._log("round ended", outcome=json.dumps(self.metrics.charged(event)))
        self.shown = {**seen.shown, "trouble": self._trouble}
        self.finished = self.shown["model"] is not None
        self.on_news(seen.news)


class GroupApp(LeaderApp):
    """Turns visits into what the leader of fixed groups answers."""

    _conductor: GroupConductor

    def __init__(
        self,
        conductor: GroupConductor,
        checker: RequestChecker,
        deadlines: ServicePlan,
        *,
        token: OperatorToken | None = None,
        log: JsonLog | None = None,
    ) -> None:
        super().__init__(conductor, checker, deadlines, token=token, log=log)
        self._dismissed: set[Party] = set()

    @property
    def routes(self) -> tuple[Route, ...]:
        return (("/v1/visit", self.visit, "POST"),)

    def takes_part(self, party: Party) -> bool:
        leader = self._conductor.leader
        return leader is None or leader.takes_part(party)

    @property
    def still_to_hear(self) -> Collection[Party]:
        """All members, not only those that have come to this process: it may have been started
        again just before the end, and they try again at intervals of up to [service] poll."""
        leader = self._conductor.leader
        return () if leader is None else leader.members - self._dismissed

    @property
    def linger(self) -> float:
        return 2 * self._deadlines.poll

    async def visit(self, request: Request) -> Response:
        """Take the sender's message; a question is answered when something is due."""
        signed, _ = self.checked(request)
        if self._conductor.leader is None:
            return self.loading()
        peer, until = signed.sender, self.waits_until(request)
        assert not isinstance(peer, str)  # only clients take part
        body = await self.body(request, signed)
        if isinstance(body, Response):
            return body
        while not self._conductor.finished:
            news = self.news_of(peer)
            news.clear()
            last = self.closing or time.monotonic() >= until
            answer = await self._conductor.take(peer, body, last=last)
            if answer is None:
                return self.not_stored(peer)
            if answer.refused:
                raise RefusedRequest(409, answer.refused, sender=peer)
            if not answer.waits:
                if not answer.message:
                    return Response(status_code=204)
                limit = self._deadlines.request
                self.metrics.transferred("out", len(answer.message))
                return FewAtOnce(self._sending, limit, answer.message, {})
            await self.wait_for(peer, news, until)
        self._dismissed.add(peer)
        return json_answer({"finished": True}, status=410)
