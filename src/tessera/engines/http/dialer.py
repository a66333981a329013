"""A dialer carries the messages of one client, or of the helper, to the leader and back.

It begins with comparing notes. Then it sends what is on its way and waits for the next messages in
one request, takes them in one step, and trains in between. Every request has a deadline; a leader
that cannot be reached, or whose journal loads, is tried again.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlencode, urlsplit

import httpx

from tessera.engines.http import FIRST, RECEIVED, REFUSED, is_loopback, parcel
from tessera.engines.http.requests import SESSION, signed_headers
from tessera.engines.http.shared_steps import SharedSteps
from tessera.engines.journal import JournalFailed
from tessera.engines.keyring import Keyring
from tessera.engines.link import LinkStanding, NumberConflict, OldCopy
from tessera.engines.logs import JsonLog
from tessera.engines.service.client import ClientService
from tessera.engines.service.dialing import DialingParty
from tessera.errors import ConfigError, ServerFault, TesseraError
from tessera.ids import RoundId
from tessera.protocols.machine import RoundOutcome
from tessera.rounds.plan import ServicePlan

PATIENCE: Final = 10.0
"""Seconds beyond a poll until the leader counts as unreachable."""
CHUNK: Final = 1 << 16
TRY_AGAIN: Final = frozenset({502, 503, 504})
"""The journal loads, or a proxy before the leader does not reach it."""


class LeaderRefuses(TesseraError):
    """The leader answers a signed request with a status that does not fit here."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the leader answers {status}: {reason}")
        self.status = status


def trusted(url: str, authority: Path | None) -> ssl.SSLContext | bool:
    """Whom to trust at `url`, which is TLS outside loopback: our authority."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not a leader's address", hint="such as https://HOST:8400")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            f"{url}: outside loopback a leader speaks TLS only", hint="use its https:// address"
        )
    if authority is None or parts.scheme == "http":
        return parts.scheme == "https"
    return ssl.create_default_context(cafile=str(authority))


def http_client(
    url: str, deadlines: ServicePlan, trust: ssl.SSLContext | bool
) -> httpx.AsyncClient:
    """One party's connection to the leader. Each has a pool of its own: in a pool of many, every
    request looks at every connection."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=deadlines.poll + PATIENCE,
        limits=httpx.Limits(
            max_connections=2, max_keepalive_connections=1, keepalive_expiry=2 * deadlines.poll
        ),
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
        steps: SharedSteps,
    ) -> None:
        """`steps` takes the changes of all who share a journal."""
        self.party, self._keyring, self._http = party, keyring, http
        self._deadlines, self._log, self._steps = deadlines, log, steps
        self.rounds_ended = 0
        self._session = ""

    async def run(self) -> None:
        """Round after round, until the leader says that all rounds are done."""
        compared = self.party.round_id is None or self.party.is_over
        while True:
            try:
                if self.party.is_over:
                    standing = await self._standing()
                    if standing is None:
                        return
                    await self._steps.run(partial(self._begin, standing))
                elif not compared:
                    await self._compare()
                else:
                    await self._go_on()
                compared = True
            except JournalFailed:
                compared = False  # the party is where its journal is: has the leader more?

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
            await self._steps.run(lambda: self.party.meets(standing))
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
        """Train, or send and wait: whatever comes next."""
        party = self.party
        if isinstance(party, ClientService) and party.pending is not None:
            await self._steps.run(party.train)
        else:
            await self._exchange()

    async def _exchange(self) -> None:
        """Send what is on its way, and take what comes back."""
        party = self.party
        messages = parcel.filled(party.link.on_its_way)
        query = {"round": self._round, "received": party.link.received}
        if messages:
            query["first"] = messages[0].number
        status, headers, body = await self._ask(
            "POST", "/v1/messages", query, parcel.pack(messages)
        )
        if status in (httpx.codes.OK, httpx.codes.NO_CONTENT):
            if reason := unquote(headers.get(REFUSED, "")):
                self._log("refused", round=self._round, reason=reason)
            await self._take(headers, body)
        elif status == httpx.codes.GONE:
            await self._over(body)
        elif status == httpx.codes.CONFLICT:
            await self._leave(_reason(body))
        else:
            raise LeaderRefuses(status, _reason(body))

    async def _take(self, headers: Mapping[str, str], body: bytes) -> None:
        party = self.party
        try:
            party.acknowledged(_count(headers, RECEIVED))
            messages = parcel.unpack(_count(headers, FIRST), body)
            if not messages:
                return
            await self._steps.run(lambda: party.take_all(messages))
        except (OldCopy, NumberConflict, ValueError) as error:
            await self._leave(str(error))
            return
        if party.is_over:
            self.rounds_ended += 1
            self._log("ended", round=self._round, phase=party.role.phase)

    async def _leave(self, reason: str) -> None:
        """Nothing more is said in this round."""
        await self._steps.run(lambda: self.party.over(RoundOutcome.ABORTED, reason))
        self._log("left", round=self._round, reason=reason)

    async def _over(self, body: bytes) -> None:
        ended = json.loads(body)
        outcome = RoundOutcome(ended.get("outcome", RoundOutcome.ABORTED.value))
        await self._steps.run(lambda: self.party.over(outcome, str(ended.get("reason", ""))))
        self.rounds_ended += 1
        self._log("ended", round=self._round, outcome=outcome.value)

    @property
    def _round(self) -> int:
        return int(self.party.round_id or 0)

    # --- one request ----------------------------------------------------------------------------

    async def _ask(
        self, method: str, path: str, query: dict[str, int], body: bytes = b""
    ) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body), tried until the leader answers."""
        pause, target = self._deadlines.retry, f"{path}?{urlencode(query)}"
        while True:
            headers = signed_headers(
                self._keyring.signing,
                self.party.me,
                self._keyring.directory.bundle,
                method,
                target,
                body,
                self._session,
            )
            try:
                async with self._http.stream(
                    method, target, content=body or None, headers=headers
                ) as answer:
                    content = bytearray()
                    async for part in answer.aiter_bytes(CHUNK):
                        content += part
                        if len(content) > parcel.MOST_BYTES:
                            raise ServerFault(
                                "sent more than an answer can have",
                                round_id=RoundId(self._round),
                                phase="transport",
                            )
                session = answer.headers.get(SESSION, "")
                if session and session != self._session:
                    self._session = session  # the leader was started again
                    continue
                if answer.status_code not in TRY_AGAIN:
                    return answer.status_code, answer.headers, bytes(content)
            except (httpx.TransportError, ssl.SSLError):
                pass  # not there, or gone in the middle: the numbers make it safe to ask again
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._deadlines.poll)


def _count(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "0")
    return int(text) if text.isdecimal() else 0


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
