"""A dialer carries the messages of one client, or of the helper, to the leader and back.

It begins with comparing notes, posts what is on its way until the leader has it on disk, polls for
the next message, and trains in between. Every request has a deadline; a leader that cannot be
reached, or whose journal loads, is tried again.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import httpx

from tessera.engines.http import NUMBER, is_loopback
from tessera.engines.http.requests import signed_headers
from tessera.engines.keyring import Keyring
from tessera.engines.link import LinkStanding, Numbered, OldCopy
from tessera.engines.logs import JsonLog
from tessera.engines.service.client import ClientService
from tessera.engines.service.dialing import DialingParty
from tessera.errors import ConfigError, ServerFault, TesseraError
from tessera.ids import RoundId
from tessera.protocols.machine import RoundOutcome
from tessera.protocols.wire import DEFAULT_CAP
from tessera.rounds.plan import ServicePlan

PATIENCE: Final = 10.0
"""Seconds beyond a poll until the leader counts as unreachable."""
CHUNK: Final = 1 << 16
TRY_AGAIN: Final = frozenset({502, 503, 504})
"""The journal loads, or a proxy before the leader does not reach it."""
OVER: Final = frozenset({"Over", "Left", "done"})


class LeaderRefuses(TesseraError):
    """The leader answers a signed request with a status that does not fit here."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the leader answers {status}: {reason}")
        self.status = status


def http_client(
    url: str, deadlines: ServicePlan, authority: Path | None, *, connections: int = 4
) -> httpx.AsyncClient:
    """Connections to the leader at `url`, which is TLS outside loopback, under our authority."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not a leader's address", hint="such as https://HOST:8400")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            f"{url}: outside loopback a leader speaks TLS only", hint="use its https:// address"
        )
    trust: ssl.SSLContext | bool = True
    if authority is not None and parts.scheme == "https":
        trust = ssl.create_default_context(cafile=str(authority))
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=deadlines.poll + PATIENCE,
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        verify=trust,
        trust_env=False,
    )


class Dialer:
    """One party on the line."""

    def __init__(
        self,
        party: DialingParty,
        keyring: Keyring,
        http: httpx.AsyncClient,
        deadlines: ServicePlan,
        log: JsonLog,
        *,
        alone: asyncio.Lock | None = None,
    ) -> None:
        """`alone` is held by those who share a journal while they change it."""
        self.party, self._keyring, self._http = party, keyring, http
        self._deadlines, self._log = deadlines, log
        self._alone = alone or asyncio.Lock()
        self.rounds_ended = 0

    async def run(self) -> None:
        """Round after round, until the leader says that all rounds are done."""
        compared = self.party.round_id is None or self._is_over
        while True:
            if self._is_over:
                standing = await self._standing()
                if standing is None:
                    return
                await self._changed(partial(self._begin, standing))
                compared = True
            elif not compared:
                await self._compare()
                compared = True
            else:
                await self._go_on()

    @property
    def _is_over(self) -> bool:
        role = self.party.role
        return role is None or role.phase in OVER

    async def _changed(self, change: Callable[[], Any]) -> Any:
        """A step of the party's; others of the same journal wait."""
        async with self._alone:
            return change()

    def _begin(self, standing: LinkStanding) -> None:
        try:
            self.party.begin(standing)
        except OldCopy as error:
            self._log("left", round=standing.round_id, reason=str(error))
            return
        reason = self.party.left
        self._log("begun", round=standing.round_id, **({"declined": reason} if reason else {}))

    async def _compare(self) -> None:
        """After a restart: how far does the leader think that we are?"""
        here = self.party.round_id
        assert here is not None
        status, _, body = await self._ask(
            "GET", "/v1/standing", {"after": int(here) - 1, "again": 1}
        )
        if status != httpx.codes.OK:
            return
        standing = _standing(body)
        try:
            await self._changed(lambda: self.party.meets(standing))
        except OldCopy as error:
            self._log("left", round=here, reason=str(error))

    async def _standing(self) -> LinkStanding | None:
        """The next round of ours; None if there are no more."""
        while True:
            behind = -1 if self.party.round_id is None else int(self.party.round_id)
            query = {"after": behind, "received": self.party.link.received}
            status, _, body = await self._ask("GET", "/v1/standing", query)
            if status == httpx.codes.OK:
                return _standing(body)
            if status == httpx.codes.GONE:
                return None
            if status != httpx.codes.NO_CONTENT:
                raise LeaderRefuses(status, _reason(body))

    async def _go_on(self) -> None:
        """Post, train or poll: whatever comes next."""
        party = self.party
        if (message := party.outgoing()) is not None:
            await self._post(message)
        elif isinstance(party, ClientService) and party.pending is not None:
            await self._changed(party.train)
        else:
            await self._poll()

    async def _post(self, message: Numbered) -> None:
        query = {"round": self._round, "number": message.number}
        status, _, body = await self._ask("POST", "/v1/messages", query, message.data)
        if status in (httpx.codes.ACCEPTED, httpx.codes.OK):
            if status == httpx.codes.OK:
                self._log("refused", round=self._round, reason=_reason(body))
            await self._changed(lambda: self.party.acknowledged(message.number))
        elif status == httpx.codes.GONE:
            # Too late. Whether its update has counted is in its own last message, if it is there.
            await self._changed(lambda: self.party.acknowledged(message.number))
        elif status == httpx.codes.CONFLICT:
            await self._changed(lambda: self.party.over(RoundOutcome.ABORTED, _reason(body)))
            self._log("left", round=self._round, reason=_reason(body))
        else:
            raise LeaderRefuses(status, _reason(body))

    async def _poll(self) -> None:
        after = self.party.link.received
        query = {"round": self._round, "after": after}
        status, number, body = await self._ask("GET", "/v1/messages", query)
        if status == httpx.codes.OK:
            await self._changed(lambda: self.party.take(Numbered(number, body)))
            if self._is_over:
                self.rounds_ended += 1
                self._log("ended", round=self._round, phase=self.party.role.phase)
        elif status == httpx.codes.GONE:
            await self._over(body)
        elif status != httpx.codes.NO_CONTENT:
            raise LeaderRefuses(status, _reason(body))

    async def _over(self, body: bytes) -> None:
        ended = json.loads(body)
        outcome = RoundOutcome(ended.get("outcome", RoundOutcome.ABORTED.value))
        await self._changed(lambda: self.party.over(outcome, str(ended.get("reason", ""))))
        self.rounds_ended += 1
        self._log("ended", round=self._round, outcome=outcome.value)

    @property
    def _round(self) -> int:
        return int(self.party.round_id or 0)

    # --- one request ----------------------------------------------------------------------------

    async def _ask(
        self, method: str, path: str, query: dict[str, int], body: bytes = b""
    ) -> tuple[int, int, bytes]:
        """(status, message number or 0, body), tried until the leader answers."""
        pause, target = self._deadlines.retry, f"{path}?{urlencode(query)}"
        while True:
            headers = signed_headers(
                self._keyring.signing,
                self.party.me,
                self._keyring.directory.bundle,
                method,
                target,
                body,
            )
            try:
                async with self._http.stream(
                    method, target, content=body or None, headers=headers
                ) as answer:
                    content = bytearray()
                    async for part in answer.aiter_bytes(CHUNK):
                        content += part
                        if len(content) > DEFAULT_CAP:
                            raise ServerFault(
                                "sent more than a message can have",
                                round_id=RoundId(self._round),
                                phase="transport",
                            )
                if answer.status_code not in TRY_AGAIN:
                    number = answer.headers.get(NUMBER, "0")
                    return (
                        answer.status_code,
                        int(number) if number.isdecimal() else 0,
                        bytes(content),
                    )
            except (httpx.TransportError, ssl.SSLError):
                pass  # not there, or gone in the middle: the numbers make it safe to ask again
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._deadlines.poll)


def _standing(body: bytes) -> LinkStanding:
    found = json.loads(body)
    return LinkStanding(
        RoundId(int(found["round_id"])),
        int(found["sent"]),
        int(found["received"]),
        int(found["acknowledged"]),
    )


def _reason(body: bytes) -> str:
    try:
        found = json.loads(body)
        return str(found.get("error") or found.get("refused") or found.get("reason") or "")
    except (ValueError, AttributeError):
        return ""
