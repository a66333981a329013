"""The leader's addresses. Nothing here waits for the disk or for a role: `/healthz` answers while a
phase closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, quote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route as Served

from tessera.ids import Party, RoundId
from tessera.plan import ServicePlan
from tessera.protocols.machine import RoundOutcome
from tessera.services.http import FIRST, RECEIVED, REFUSED, WAIT
from tessera.services.http import requests as parcel
from tessera.services.http.conductor import Conductor
from tessera.services.http.metrics import LOADING, LeaderFigures, LeaderMetrics, OperatorToken
from tessera.services.http.requests import SESSION, RefusedRequest, RequestChecker, SignedRequest
from tessera.services.journal import CommittedOutcomes, Journal
from tessera.services.leader import MessageRequest
from tessera.services.link import LinkView, Numbered, name_of
from tessera.services.logs import JsonLog
from tessera.services.model_export import newest

Handler = Callable[[Request], Awaitable[Response]]
Route = tuple[str, Handler, str]

MODEL: Final = "/v1/model"
RETRY: Final = {"Retry-After": "1"}
OCTETS: Final = "application/octet-stream"
PROMETHEUS: Final = "text/plain; version=1.0.0; charset=utf-8"
MOST_NUMBER: Final = 1 << 62
MOST_REASON: Final = 200
MOST_SENDING: Final = 64
PATIENCE: Final = 0.5
LOST: Final = "tessera.lost"
"""In the scope of a request: what to call if its connection is closed before it is answered."""
MOST_OF_ONE: Final = 8
"""Requests of one sender at a time; an honest one has one, and a second after a lost connection."""


class AnyLeader(Protocol):
    """A leader whose journal is loaded."""

    journal: Journal


class AnyConductor(Protocol):
    """What drives a leader."""

    finished: bool
    on_news: Callable[[Collection[Party]], None]
    deadline: float | None
    shown: dict[str, Any]
    metrics: LeaderMetrics

    @property
    def leader(self) -> AnyLeader | None: ...

    def figures(self) -> LeaderFigures:
        """As they are now."""


class LeaderApp(ABC):
    """What the leaders of cohorts and of fixed groups answer alike."""

    def __init__(
        self,
        conductor: AnyConductor,
        checker: RequestChecker,
        deadlines: ServicePlan,
        *,
        cap: int = parcel.MOST_BYTES,
        token: OperatorToken | None = None,
        log: JsonLog | None = None,
    ) -> None:
        """`token`: what an operator shows; without one nobody sees more than that it is alive."""
        self._conductor, self._checker = conductor, checker
        self._deadlines, self._cap = deadlines, cap
        self._token, self._log = token, log or JsonLog("", quiet=True)
        self.metrics = conductor.metrics
        self.metrics.figures = conductor.figures
        self._outcomes: CommittedOutcomes | None = None
        self._news: dict[Party, asyncio.Event] = {}
        self._waiting: Counter[Party] = Counter()
        self._packed: tuple[bytes, bytes] = b"", b""
        self._sending = asyncio.Semaphore(MOST_SENDING)
        self.not_dismissed: set[Party] = set()
        """Who took part and does not know yet that there are no more rounds."""
        self.closing = False
        self.models: Path | None = None
        """The folder of exported models, of which the newest is for everybody."""
        conductor.on_news = self.wake

    # --- waiting for news -----------------------------------------------------------------------

    def wake(self, peers: Collection[Party]) -> None:
        """These peers have news, and only they are woken; at the end everybody is."""
        for peer in list(self._news) if self._conductor.finished or self.closing else peers:
            if (event := self._news.get(peer)) is not None:
                event.set()

    def news_of(self, peer: Party) -> asyncio.Event:
        return self._news.setdefault(peer, asyncio.Event())

    def waits_until(self, request: Request) -> float:
        """When a request is answered at the latest: [service] poll of the leader's, or as long as
        its sender waits, if that is shorter."""
        text, poll = request.headers.get(WAIT, ""), self._deadlines.poll
        try:
            poll = max(0.0, min(poll, float(text)))
        except ValueError:
            pass
        return time.monotonic() + poll

    async def wait_for(self, peer: Party, news: asyncio.Event, until: float) -> bool:
        """Whether there may be news before then."""
        if self._waiting[peer] >= MOST_OF_ONE:
            raise RefusedRequest(429, "too many requests of one sender wait")
        self._waiting[peer] += 1
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await news.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting[peer] -= 1
        return True

    @property
    def outcomes(self) -> CommittedOutcomes | None:
        """None while the journal loads."""
        if self._outcomes is None and self._conductor.leader is not None:
            self._outcomes = CommittedOutcomes(self._conductor.leader.journal.path)
        return self._outcomes

    # --- requests -------------------------------------------------------------------------------

    def checked(self, request: Request) -> tuple[SignedRequest, dict[str, str]]:
        """Who asks, and the query."""
        query = request.scope["query_string"].decode("latin-1")
        target = request.scope["path"] + (f"?{query}" if query else "")
        signed = self._checker.check(request.method, target, request.headers)
        if signed.length > self._cap:
            raise RefusedRequest(
                413,
                f"{signed.length} bytes; a request has at most {self._cap}",
                sender=signed.sender,
            )
        if not self.takes_part(signed.sender):
            raise RefusedRequest(
                403, "the sender takes no part in these rounds", sender=signed.sender
            )
        return signed, dict(parse_qsl(query))

    async def body(self, request: Request, signed: SignedRequest) -> bytes | Response:
        """As much as was declared and signed; or what to answer if it does not come."""
        try:
            async with asyncio.timeout(self._deadlines.request):
                found = await _body(request, signed)
        except TimeoutError:
            late = RefusedRequest(408, "the body did not come in time", sender=signed.sender)
            return self.refused(late)
        except ClientDisconnect:
            cut = RefusedRequest(400, "the body did not come to its end", sender=signed.sender)
            return self.refused(cut)
        self.metrics.transferred("in", len(found))
        return found

    def refused(
        self, error: RefusedRequest, *, close: bool = True, retry: bool = False
    ) -> Response:
        """The answer to a request that is not taken; counted, and said in the log."""
        if not error.session:
            self.metrics.refusals.labels(error.kind).inc()
            told = {"status": error.status, "reason": str(error)}
            who = None if error.sender is None else name_of(error.sender)
            self._log.seldom("refused", error.kind, client=who, **told)
        answer = json_answer(
            {"error": str(error)},
            status=error.status,
            close=close and not error.session,
            retry=retry,
        )
        if error.session:
            answer.headers[SESSION] = error.session
        return answer

    def loading(self) -> Response:
        return self.refused(
            RefusedRequest(503, "the journal is loading", kind=LOADING), close=False, retry=True
        )

    def not_stored(self, sender: Party) -> Response:
        error = RefusedRequest(
            503, "not stored, and so not taken", kind="not stored", sender=sender
        )
        return self.refused(error, close=False, retry=True)

    # --- what differs ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def routes(self) -> tuple[Route, ...]:
        """(path, handler, method) of what its parties ask."""

    @property
    def still_to_hear(self) -> Collection[Party]:
        """Who does not know yet that there are no more rounds."""
        return self.not_dismissed

    @property
    def linger(self) -> float:
        """Seconds for which they are waited for."""
        return self._deadlines.poll

    @abstractmethod
    def takes_part(self, party: Party) -> bool:
        """Whether this party is one of the leader's; nobody knows while the journal loads."""

    # --- operators ------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the federation is, why rounds were aborted and who was missing. Nothing in it is
        anybody's own; what nobody is charged for is left out where the plan has [dp]."""
        outcomes, figures = self.outcomes, self.metrics.figures()
        left = figures.deadline_seconds
        shown = {
            **self._conductor.shown,
            "deadline": None if left is None else round(left, 1),
            "clients": figures.clients,
            "trouble": "; ".join(self.metrics.trouble.values()),
            "rounds": [] if outcomes is None else outcomes.last_rounds(),
        }
        return self.metrics.charged(shown)

    def is_operator(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return self._token is not None and self._token.matches(given)

    def for_operators(self, answer: Callable[[], Response]) -> Handler:
        """What is answered to whoever shows the operator's token."""

        async def answered(request: Request) -> Response:
            if self.is_operator(request):
                return answer()
            given = "authorization" in request.headers
            why = "the token is not the operator's" if given else "an operator's token is needed"
            refused = self.refused(RefusedRequest(401, why, kind="operator token"))
            refused.headers["WWW-Authenticate"] = "Bearer"
            return refused

        return answered

    @property
    def operators_routes(self) -> tuple[Route, ...]:
        """(path, handler, method) of what operators and their tools ask."""

        async def healthz(request: Request) -> Response:
            return json_answer({"ok": True})

        async def readyz(request: Request) -> Response:
            kinds = sorted(self.metrics.trouble)
            return json_answer({"ready": not kinds, "trouble": kinds}, status=503 if kinds else 200)

        def metrics() -> Response:
            return Response(self.metrics.text, media_type=PROMETHEUS)

        return (
            ("/healthz", healthz, "GET"),
            ("/readyz", readyz, "GET"),
            ("/status", self.for_operators(lambda: json_answer(self.status())), "GET"),
            ("/metrics", self.for_operators(metrics), "GET"),
        )


class CohortApp(LeaderApp):
    """Turns requests into what the conductor and the journal answer."""

    _conductor: Conductor

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            ("/v1/standing", self.standing, "GET"),
            ("/v1/messages", self.exchange, "POST"),
        )

    def takes_part(self, party: Party) -> bool:
        leader = self._conductor.leader
        return leader is None or party in leader.links

    def _seen(self, peer: Party) -> None:
        self._conductor.asked(peer)

    async def _wait(self, peer: Party, until: float) -> bool:
        """Whether there may be news before then."""
        news = self.news_of(peer)
        news.clear()
        return await self.wait_for(peer, news, until)

    async def standing(self, request: Request) -> Response:
        """The round that the sender takes part in, once there is one behind `after`."""
        signed, query = self.checked(request)
        leader, outcomes = self._conductor.leader, self.outcomes
        if leader is None or outcomes is None:
            return self.loading()
        behind, again = _number(query, "after", least=-1), "again" in query
        peer, until = signed.sender, self.waits_until(request)
        self.not_dismissed.add(peer)
        self._seen(peer)
        view = leader.view(peer)
        if behind > (-1 if view is None else view.standing.round_id):
            self._conductor.ahead(peer)
        if view is not None and view.standing.round_id == behind:
            self._conductor.acknowledged(peer, view.standing.round_id, _number(query, "received"))
        while True:
            view = leader.view(peer)
            if view is not None and (found := view.standing).round_id > behind:
                # Of a round that has ended the helper has yet to hear; a client, if it was in it.
                if again or isinstance(peer, str) or outcomes.outcome(found.round_id) is None:
                    return json_answer(asdict(found))
            if self._conductor.finished:
                self.not_dismissed.discard(peer)
                return json_answer({"finished": True}, status=410)
            if not isinstance(peer, str):
                behind_it = None if view is None else view.standing.round_id
                self._conductor.waits(peer, behind_it, request)
                lost = partial(self._conductor.presence.lost, peer, request)
                request.scope[LOST] = lost  # the connection calls it (`serving.py`)
            if self.closing or not await self._wait(peer, until):
                return Response(status_code=204)

    async def exchange(self, request: Request) -> Response:
        """Take the sender's messages, none or several; answer with the next ones for it.

        All that is taken is on disk when this answers, and so is all that the answer has. A sender
        with more than one request holds (`more`) is answered at once, to send the rest.
        """
        signed, query = self.checked(request)
        leader, outcomes = self._conductor.leader, self.outcomes
        if leader is None or outcomes is None:
            return self.loading()
        round_id, received = RoundId(_number(query, "round")), _number(query, "received")
        peer, until = signed.sender, self.waits_until(request)
        self._seen(peer)
        view, refused = leader.view(peer), ""
        if view is not None and view.standing.round_id == round_id:
            self._conductor.acknowledged(peer, round_id, received)
            if received > view.standing.sent:
                raise RefusedRequest(409, f"the leader has sent {view.standing.sent} messages")
        if signed.length:
            body = await self.body(request, signed)
            if isinstance(body, Response):
                return body
            try:
                sent = parcel.unpack(_number(query, "first", least=1), body)
            except ValueError as error:
                return self.refused(RefusedRequest(400, str(error), sender=peer), close=False)
            requests = [MessageRequest(peer, round_id, message) for message in sent]
            answers = await self._conductor.take(requests)
            if answers is None:
                return self.not_stored(peer)
            for answer in answers:
                if answer.conflict:
                    conflict = RefusedRequest(409, answer.conflict, sender=peer)
                    return self.refused(conflict, close=False)
                if answer.refused:
                    refused = answer.refused
                    self.metrics.refusals.labels("message").inc()
                    told = {"round": round_id, "reason": refused}
                    self._log.seldom("message refused", "message", client=name_of(peer), **told)
        while True:
            view = leader.view(peer)
            if view is None or view.standing.round_id != round_id:
                return json_answer(outcomes.outcome(round_id) or _unknown(round_id), status=410)
            if messages := parcel.filled(view.after(received)):
                return self._parcel(messages, view, refused)
            outcome = outcomes.outcome(round_id)
            if outcome is not None:
                return json_answer(outcome, status=410)
            if "more" in query or self.closing or not await self._wait(peer, until):
                return self._parcel((), leader.view(peer) or view, refused)

    def _parcel(self, messages: Sequence[Numbered], view: LinkView, refused: str) -> Response:
        headers = {RECEIVED: str(view.standing.received)}
        if refused:
            headers[REFUSED] = quote(refused[:MOST_REASON])
        if not messages:
            return Response(status_code=204, headers=headers)
        headers[FIRST] = str(messages[0].number)
        self.metrics.transferred("out", sum(len(each.data) for each in messages))
        body = self._packed[1]
        if len(messages) != 1 or messages[0].data is not self._packed[0]:
            body = parcel.pack(messages)
            if len(messages) == 1:
                self._packed = messages[0].data, body  # what all are sent is packed once
        return FewAtOnce(self._sending, self._deadlines.request, body, headers)


class FewAtOnce(Response):
    """An answer with messages. When a phase closes everybody is answered, and all answers would be
    in buffers at the same time. Who does not read has its turn no longer than a request may take,
    and keeps nobody from theirs for longer than `PATIENCE`."""

    def __init__(
        self, turns: asyncio.Semaphore, limit: float, content: bytes, headers: dict[str, str]
    ) -> None:
        super().__init__(content, media_type=OCTETS, headers=headers)
        self._turns, self._limit = turns, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        turn = False
        if not self._turns.locked():
            turn = await self._turns.acquire()
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    turn = await self._turns.acquire()
        try:
            async with asyncio.timeout(self._limit):
                await super().__call__(scope, receive, send)
        finally:
            if turn:
                self._turns.release()


def create_app(leader: LeaderApp) -> Starlette:
    """Routes, and nothing else: no pages that describe the service, since nobody but our own
    parties and operators should talk to it (`docs/decisions/0020-starlette.md`)."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedRequest)
        return leader.refused(error)

    async def model(request: Request) -> Response:
        """The newest exported model, whole: the same answer for whoever asks."""
        path = None if leader.models is None else newest(leader.models)
        if path is None:
            return json_answer({"error": "no model is exported here"}, status=404)
        tag = f'"{path.stem}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return FileResponse(path, media_type=OCTETS, headers={"ETag": tag})

    routes = (*leader.routes, (MODEL, model, "GET"), *leader.operators_routes)
    return Starlette(
        routes=[Served(path, handler, methods=[method]) for path, handler, method in routes],
        exception_handlers={RefusedRequest: refused},
    )


async def _body(request: Request, signed: SignedRequest) -> bytes:
    """As much as was declared and signed, and nothing else."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > signed.length:
            raise RefusedRequest(413, "more bytes than were declared")
    body = bytes(data)
    if not signed.matches(body):
        raise RefusedRequest(401, "the body is not the one that was signed")
    return body


def _number(query: dict[str, str], name: str, least: int = 0) -> int:
    text = query.get(name, "")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < MOST_NUMBER:
        raise RefusedRequest(400, f"{name} = {text[:20]!r} is not a number from {least} up")
    return value


def _unknown(round_id: RoundId) -> dict[str, Any]:
    return {
        "outcome": RoundOutcome.ABORTED.value,
        "reason": f"the leader has no round {round_id} with this party",
    }


def json_answer(
    content: dict[str, Any], *, status: int = 200, retry: bool = False, close: bool = False
) -> Response:
    headers = dict(RETRY) if retry else {}
    if close:
        headers["Connection"] = "close"
    return Response(
        json.dumps(content), status_code=status, media_type="application/json", headers=headers
    )
