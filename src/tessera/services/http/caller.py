"""What a party does to ask the leader: signed requests over one connection, tried until it answers.

Every request has a deadline; a leader that cannot be reached, or whose journal loads, is tried
again.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from tessera.errors import ConfigError, TesseraError
from tessera.plan import ServicePlan
from tessera.services.group_commit import GroupCommit
from tessera.services.http import WAIT, requests
from tessera.services.http.connection import LeaderConnection, NoAnswer
from tessera.services.http.requests import CLOCK, SESSION, WINDOW, signed_headers
from tessera.services.keyring import Keyring
from tessera.services.logs import JsonLog

PATIENCE: Final = 10.0
"""Seconds beyond a poll until the leader counts as unreachable."""
TRY_AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})
"""The journal loads, earlier requests of ours still wait, or a proxy does not reach the leader."""
MOST_REASON: Final = 500
"""Characters of a leader's that go into a log."""


class LeaderRefuses(ConfigError):
    """The leader answers a signed request with a status that does not fit here."""

    def __init__(self, status: int, reason: str) -> None:
        hint = "is this the leader of this bundle, and are these its keys?"
        if CLOCK in reason:
            hint = "set this machine's clock by a time server"
        super().__init__(f"the leader answers {status}: {reason}", hint=hint)
        self.status = status


class BadAnswer(TesseraError):
    """Not an answer of a leader's."""


def connection_to(
    url: str, deadlines: ServicePlan, trust: ssl.SSLContext | None
) -> LeaderConnection:
    """One party's connection to the leader, which answers within a poll."""
    return LeaderConnection(
        url, trust, patience=deadlines.poll + PATIENCE, most=requests.MOST_BYTES
    )


class LeaderCaller(ABC):
    """One party and its connection: what dialers and visitors do alike."""

    party: Any
    rounds_ended: int
    """Rounds, or epochs of a fixed group."""

    def __init__(
        self,
        party: Any,
        keyring: Keyring,
        connection: LeaderConnection,
        deadlines: ServicePlan,
        log: JsonLog,
        steps: GroupCommit,
    ) -> None:
        """`steps` takes the changes of all who share a journal."""
        self.party, self._keyring, self._connection = party, keyring, connection
        self._deadlines, self._log, self._steps = deadlines, log, steps
        self.rounds_ended = 0
        self.refused: LeaderRefuses | None = None
        self.failed: Exception | None = None
        """What its work ended with, if nobody foresaw it."""
        self._session = ""
        self.once = False
        """Whether it ends when nothing is due."""
        self.nothing_due = False

    async def run_or_be_refused(self) -> None:
        """Until the leader says that all rounds are done, or that it does not serve us."""
        try:
            await self.run()
        except LeaderRefuses as refused:
            self.refused = refused
            self._log("refused", reason=str(refused))

    @abstractmethod
    async def run(self) -> None:
        """Until the leader says that all rounds are done."""

    # --- one request ----------------------------------------------------------------------------

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, int] | None = None,
        body: bytes = b"",
    ) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body), tried until the leader answers."""
        asked = "&".join(f"{name}={value}" for name, value in (query or {}).items())
        pause, target, why = self._deadlines.retry, f"{path}?{asked}" if asked else path, ""
        while True:
            signed_at = time.time()
            headers = signed_headers(
                self._keyring.signing,
                self.party.me,
                self._keyring.directory.bundle,
                method,
                target,
                body,
                self._session,
            )
            headers[WAIT] = f"{self._deadlines.poll:g}"
            try:
                answer = await self._connection.ask(method, target, headers, body)
            except NoAnswer as error:
                trouble = str(error)
            else:
                session = answer.headers.get(SESSION, "")
                if session and session != self._session:
                    self._session = session  # the leader was started again
                    continue
                # One of us was suspended for so long that the signature grew old.
                stale = time.time() - signed_at > WINDOW / 2
                old = answer.status == HTTPStatus.UNAUTHORIZED and stale
                if not old and answer.status not in TRY_AGAIN:
                    return answer.status, answer.headers, answer.body
                trouble = f"{answer.status}: {reason_in(answer.body)}"
            if trouble != why:
                why = trouble
                self._log("waiting for the leader", reason=trouble)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._deadlines.poll)


def object_in(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadAnswer("an answer without the fields it should have")
    return found


def reason_in(body: bytes) -> str:
    try:
        found = object_in(body)
    except BadAnswer:
        return ""
    return str(found.get("error") or found.get("refused") or found.get("reason") or "")[
        :MOST_REASON
    ]
