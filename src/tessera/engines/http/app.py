"""The leader's addresses. Nothing here waits for the disk or for a role: `/healthz` answers while a
phase closes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from fastapi import FastAPI, Request, Response

from tessera.engines.http import NUMBER, ROUND
from tessera.engines.http.committed import CommittedLinks
from tessera.engines.http.conductor import Conductor
from tessera.engines.http.requests import RefusedRequest, RequestChecker, SignedRequest
from tessera.engines.journal import JournalFailed
from tessera.engines.link import Numbered
from tessera.engines.service.leader import MessageRequest
from tessera.ids import ClientId, Party, RoundId
from tessera.protocols.machine import RoundOutcome
from tessera.protocols.wire import DEFAULT_CAP
from tessera.rounds.plan import ServicePlan

RETRY: Final = {"Retry-After": "1"}
OCTETS: Final = "application/octet-stream"
MOST_NUMBER: Final = 1 << 62


class LeaderApp:
    """Turns requests into what the conductor and the journal answer."""

    def __init__(
        self,
        conductor: Conductor,
        checker: RequestChecker,
        links: Callable[[], CommittedLinks],
        deadlines: ServicePlan,
        *,
        cap: int = DEFAULT_CAP,
    ) -> None:
        self._conductor, self._checker = conductor, checker
        self._make_links, self._deadlines, self._cap = links, deadlines, cap
        self._links: CommittedLinks | None = None
        self._news: dict[Party, asyncio.Event] = {}
        self.closing = False

    # --- waiting for news -----------------------------------------------------------------------

    def wake(self, peers: frozenset[Party]) -> None:
        """There is news for these, and only these are woken."""
        for peer in list(self._news) if self._conductor.finished or self.closing else peers:
            if (event := self._news.get(peer)) is not None:
                event.set()

    async def _wait(self, peer: Party, until: float) -> bool:
        """Whether there may be news before then."""
        event = self._news.setdefault(peer, asyncio.Event())
        event.clear()
        try:
            await asyncio.wait_for(event.wait(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            return False
        return True

    @property
    def links(self) -> CommittedLinks | None:
        """None while the journal loads."""
        if self._links is None and self._conductor.leader is not None:
            self._links = self._make_links()
        return self._links

    # --- requests -------------------------------------------------------------------------------

    def checked(self, request: Request) -> SignedRequest:
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        signed = self._checker.check(request.method, target, request.headers)
        if signed.length > self._cap:
            raise RefusedRequest(413, f"{signed.length} bytes; a message has at most {self._cap}")
        leader = self._conductor.leader
        if leader is not None and signed.sender not in leader.links:
            raise RefusedRequest(403, "the sender takes no part in these rounds")
        return signed

    async def standing(self, request: Request) -> Response:
        """The round that the sender takes part in, once there is one behind `after`."""
        signed = self.checked(request)
        links = self.links
        if links is None:
            return _loading()
        behind, again = _number(request, "after", least=-1), "again" in request.query_params
        peer, until = signed.sender, time.monotonic() + self._deadlines.poll
        found = links.standing(peer)
        if found is not None and found.round_id == behind:
            self._conductor.heard(peer, found.round_id, _number(request, "received"))
        if not isinstance(peer, str):
            self._conductor.waits(ClientId(peer), None if found is None else found.round_id)
        while True:
            found = links.standing(peer)
            if found is not None and found.round_id > behind:
                # Of a round that has ended the helper has yet to hear; a client, if it was in it.
                if again or isinstance(peer, str) or links.outcome(found.round_id) is None:
                    return _json(asdict(found))
            if self._conductor.finished:
                return _json({"finished": True}, status=410)
            if self.closing or not await self._wait(peer, until):
                return Response(status_code=204)

    async def fetch(self, request: Request) -> Response:
        """The sender's next message, waited for."""
        signed = self.checked(request)
        links = self.links
        if links is None:
            return _loading()
        round_id, after = RoundId(_number(request, "round")), _number(request, "after")
        peer, until = signed.sender, time.monotonic() + self._deadlines.poll
        standing = links.standing(peer)
        if standing is not None and standing.round_id == round_id:
            self._conductor.heard(peer, round_id, after)
        while True:
            message = links.after(peer, round_id, after)
            if message is not None:
                head = {ROUND: str(round_id), NUMBER: str(message.number)}
                return Response(message.data, media_type=OCTETS, headers=head)
            outcome = links.outcome(round_id)
            if outcome is not None:
                return _json(outcome, status=410)
            standing = links.standing(peer)
            if standing is None or standing.round_id != round_id:
                return _json(_unknown(round_id), status=410)
            if self.closing or not await self._wait(peer, until):
                return Response(status_code=204)

    async def post(self, request: Request) -> Response:
        """One message of the sender's; it is on disk when this answers."""
        signed = self.checked(request)
        if self.links is None:
            return _loading()
        round_id, number = RoundId(_number(request, "round")), _number(request, "number", least=1)
        try:
            body = await asyncio.wait_for(_body(request, signed), self._deadlines.request)
        except TimeoutError:
            return _json({"error": "the body did not come in time"}, status=408, close=True)
        message = Numbered(number, body)
        future = self._conductor.submit(MessageRequest(signed.sender, round_id, message))
        try:
            answer = await asyncio.wrap_future(future)
        except (JournalFailed, asyncio.CancelledError):
            return _json({"error": "not stored, and so not taken"}, status=503, retry=True)
        if answer.over:
            links = self.links
            ended = links.outcome(round_id) if links is not None else None
            return _json(ended or _unknown(round_id), status=410)
        if answer.conflict:
            return _json({"error": answer.conflict}, status=409)
        if answer.refused:
            return _json({"refused": answer.refused}, status=200)
        return Response(status_code=202)

    # --- operators ------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the federation is. Nothing in it is anybody's own."""
        links, deadline = self.links, self._conductor.deadline
        left = None if deadline is None else round(deadline - time.monotonic(), 1)
        rounds = [] if links is None else links.last_rounds()
        return {**self._conductor.shown, "deadline": left, "rounds": rounds}


def create_app(leader: LeaderApp) -> FastAPI:
    # No pages that describe the service: nobody but our own parties should talk to it.
    app = FastAPI(title="tessera leader", openapi_url=None)

    @app.exception_handler(RefusedRequest)
    async def refused(_: Request, error: RefusedRequest) -> Response:
        return _json({"error": str(error)}, status=error.status, close=True)

    app.add_api_route("/v1/standing", _plain(leader.standing), methods=["GET"])
    app.add_api_route("/v1/messages", _plain(leader.fetch), methods=["GET"])
    app.add_api_route("/v1/messages", _plain(leader.post), methods=["POST"])

    async def healthz(request: Request) -> Response:
        return _json({"ok": True})

    async def status(request: Request) -> Response:
        return _json(leader.status())

    app.add_api_route("/healthz", healthz, methods=["GET"])
    app.add_api_route("/status", status, methods=["GET"])
    return app


def _plain(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def handle(request: Request) -> Response:
        found: Response = await handler(request)
        return found

    return handle


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


def _number(request: Request, name: str, least: int = 0) -> int:
    text = request.query_params.get(name, "")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < MOST_NUMBER:
        raise RefusedRequest(400, f"{name} = {text[:20]!r} is not a number from {least} up")
    return value


def _loading() -> Response:
    return _json({"error": "the journal is loading"}, status=503, retry=True)


def _unknown(round_id: RoundId) -> dict[str, Any]:
    return {
        "outcome": RoundOutcome.ABORTED.value,
        "reason": f"the leader has no round {round_id} with this party",
    }


def _json(
    content: dict[str, Any], *, status: int = 200, retry: bool = False, close: bool = False
) -> Response:
    headers = dict(RETRY) if retry else {}
    if close:
        headers["Connection"] = "close"
    return Response(
        json.dumps(content), status_code=status, media_type="application/json", headers=headers
    )
