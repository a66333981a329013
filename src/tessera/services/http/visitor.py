"""A visitor carries the messages of one client of a fixed group to the leader and back.

It asks what is due, trains, and sends what it has stored: one question and one delivery in an
epoch. The leader holds a question until something is due.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Final

from tessera import wire
from tessera.errors import ConfigError, WireError
from tessera.protocols.epochs.messages import ComeBack
from tessera.services.group_client import GroupClientService, LeftGroup
from tessera.services.http.caller import (
    MOST_REASON,
    BadAnswer,
    LeaderCaller,
    LeaderRefuses,
    reason_in,
)
from tessera.services.http.connection import AnswerTooLong
from tessera.services.journal import JournalFailed

VISIT: Final = "/v1/visit"
ASK_AGAIN: Final = 600.0
"""Seconds at most until a client asks again whose clock is behind a period's cut-off."""


class Visitor(LeaderCaller):
    """A client of a fixed group, epoch after epoch."""

    party: GroupClientService

    async def run(self) -> None:
        """Until the leader says that all rounds are done, or the group or this client is out."""
        while not (self.party.left or self.party.retired):
            try:
                async with asyncio.timeout(self.party.expires_in):
                    if not await self._go_on():
                        return
            except TimeoutError:
                await self._steps.run(self.party.expire)
            except JournalFailed:
                continue  # it is where its journal is, and has sent nothing
            except (BadAnswer, AnswerTooLong) as error:
                self._log("bad answer", reason=str(error)[:MOST_REASON])
                await asyncio.sleep(self._deadlines.poll)
            except ConfigError as error:
                await self._steps.run(partial(self.party.decline, str(error)))
        if self.party.left:
            while self.party.outgoing:
                await self._tell(self.party.outgoing[0])
            self._log("left", reason=self.party.left)
            if self.party.leaving:
                return
            raise LeftGroup(f"{self.party.name}: {self.party.left}")
        self._log("retired", reason=self.party.retired)

    async def _go_on(self) -> bool:
        """Join, train, send or ask: whatever comes next; False at the end of all rounds."""
        client = self.party
        if client.role is None:
            await self._steps.run(client.join)
        elif client.outgoing:
            return await self._send(client.outgoing[0])
        elif client.pending is not None:
            await self._steps.run(client.train)
        else:
            return await self._fetch()
        return True

    async def _send(self, data: bytes) -> bool:
        """What is stored, at its time."""
        await asyncio.sleep(self.party.leaves_in)
        status, _, body = await self._ask("POST", VISIT, body=data)
        if status == HTTPStatus.GONE:
            return False
        if status == HTTPStatus.CONFLICT:
            reason = f"the leader refuses what this client has sent: {reason_in(body)}"
            await self._steps.run(partial(self.party.decline, reason))
        elif status == HTTPStatus.OK:  # the group is retired
            await self._steps.run(partial(self.party.take, body))
        elif status == HTTPStatus.NO_CONTENT:
            await self._steps.run(self.party.sent)
            self.rounds_ended += 1
        else:
            raise LeaderRefuses(status, reason_in(body))
        return True

    async def _tell(self, leave: bytes) -> None:
        """That this client is out: the leader takes it, or the group or all rounds are over."""
        status, _, body = await self._ask("POST", VISIT, body=leave)
        if status == HTTPStatus.CONFLICT:
            self._log("leave refused", reason=reason_in(body))
        elif status not in (HTTPStatus.NO_CONTENT, HTTPStatus.OK, HTTPStatus.GONE):
            raise LeaderRefuses(status, reason_in(body))
        await self._steps.run(self.party.sent)

    async def _fetch(self) -> bool:
        status, _, body = await self._ask("POST", VISIT, body=self.party.fetch())
        if status == HTTPStatus.GONE:
            return False
        if status == HTTPStatus.OK:
            await self._steps.run(partial(self.party.take, body))
            if ahead := self.party.ahead:
                self._log("clock is slow, or the cut-off too late: waits", seconds=round(ahead))
            await asyncio.sleep(min(ahead, ASK_AGAIN) or _pause(body))
        elif status != HTTPStatus.NO_CONTENT:
            raise LeaderRefuses(status, reason_in(body))
        return True


def _pause(body: bytes) -> float:
    """Until it asks again, where nothing is due."""
    if wire.kind_of(body) is not ComeBack:
        return 0.0
    try:
        found: ComeBack = wire.decode(body, expect=[ComeBack])
    except WireError:
        return 0.0  # the client has left for it
    return float(found.seconds)
