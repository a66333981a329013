"""A dialer carries the messages of one client, or of the helper, to the leader and back.

It begins with comparing notes. Then it sends what is on its way and waits for the next messages in
one request, takes them in one step, and trains in between. Every request has a deadline; a leader
that cannot be reached, or whose journal loads, is tried again. What a leader cannot answer ends the
round for this party, like any bad message of a server's.

A visitor carries the messages of one client of a fixed group to the leader and back.

It asks what is due, trains, and sends what it has stored: one question and one delivery in an
epoch. The leader holds a question until something is due.
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from tessera import wire
from tessera.errors import ConfigError, TesseraError, WireError
from tessera.ids import RoundId
from tessera.plan import ServicePlan
from tessera.protocols.epochs.messages import ComeBack
from tessera.protocols.machine import RoundOutcome
from tessera.services.client import ClientService
from tessera.services.dialing_party import DialingParty
from tessera.services.group_client import GroupClientService, LeftGroup
from tessera.services.group_commit import GroupCommit
from tessera.services.http import FIRST, RECEIVED, REFUSED, requests
from tessera.services.http.caller import (
    MOST_REASON,
    BadAnswer,
    LeaderCaller,
    LeaderRefuses,
    connection_to,
    object_in,
    reason_in,
)
from tessera.services.http.connection import AnswerTooLong, trusted
from tessera.services.http.serving import prepare_process
from tessera.services.journal import JournalFailed
from tessera.services.keyring import CA, Keyring
from tessera.services.link import LinkStanding, NumberConflict, Numbered, OldCopy
from tessera.services.logs import JsonLog

MOST_NUMBER: Final = 1 << 62


class Dialer(LeaderCaller):
    """A client of cohorts that are drawn, or the helper."""

    party: DialingParty

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
            except (BadAnswer, AnswerTooLong) as error:
                if self.party.is_over:
                    self._log("bad answer", reason=str(error))
                    await asyncio.sleep(self._deadlines.poll)
                else:
                    await self._leave(str(error))

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
        if status != HTTPStatus.OK:
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
            if status == HTTPStatus.OK:
                standing = _standing(body)
                if standing.round_id <= behind:
                    raise BadAnswer(f"round {standing.round_id} comes after round {behind}")
                return standing
            if status == HTTPStatus.GONE:
                return None
            if status != HTTPStatus.NO_CONTENT:
                raise LeaderRefuses(status, reason_in(body))
            if self.once:
                self.nothing_due = True
                return None

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
        ready = party.link.on_its_way
        messages = requests.filled(ready)
        query = {"round": self._round, "received": party.link.received}
        if messages:
            query["first"] = messages[0].number
        if len(messages) < len(ready):
            query["more"] = 1  # the leader need not hold this request: the rest comes at once
        status, headers, body = await self._ask(
            "POST", "/v1/messages", query, requests.pack(messages)
        )
        if status in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
            if reason := unquote(headers.get(REFUSED, "")):
                self._log("refused", round=self._round, reason=reason)
            await self._take(headers, body)
        elif status == HTTPStatus.GONE:
            await self._over(body)
        elif status == HTTPStatus.CONFLICT:
            await self._leave(reason_in(body))
        else:
            raise LeaderRefuses(status, reason_in(body))

    async def _take(self, headers: Mapping[str, str], body: bytes) -> None:
        party = self.party
        try:
            received = _count(headers, RECEIVED)
            messages = requests.unpack(_count(headers, FIRST), body)
        except ValueError as error:
            await self._leave(str(error)[:MOST_REASON])
            return
        try:
            party.acknowledged(received)
            if not messages:
                return
            await self._steps.run(partial(self._take_and_train, messages))
        except OldCopy as error:
            await self._steps.run(partial(party.leave_as_old_copy, error))
            self._log("left", round=self._round, reason=str(error))
            return
        except NumberConflict as error:
            await self._leave(str(error)[:MOST_REASON])
            return
        if party.is_over:
            self.rounds_ended += 1
            why = {"reason": party.left} if party.left else party.ended
            self._log("ended", round=self._round, phase=party.role.phase, **why)

    def _take_and_train(self, messages: Sequence[Numbered]) -> None:
        """In one step: what the leader sends to be trained, and the update that comes of it."""
        self.party.take(messages)
        if isinstance(self.party, ClientService):
            self.party.train()

    async def _leave(self, reason: str) -> None:
        """Nothing more is said in this round."""
        await self._steps.run(lambda: self.party.over(RoundOutcome.ABORTED, reason))
        self._log("left", round=self._round, reason=reason)

    async def _over(self, body: bytes) -> None:
        ended = object_in(body)
        try:
            outcome = RoundOutcome(ended.get("outcome", RoundOutcome.ABORTED.value))
        except ValueError as error:
            raise BadAnswer(str(error)[:MOST_REASON]) from None
        reason = str(ended.get("reason", ""))[:MOST_REASON]
        await self._steps.run(lambda: self.party.over(outcome, reason))
        self.rounds_ended += 1
        self._log("ended", round=self._round, outcome=outcome.value)

    @property
    def _round(self) -> int:
        return int(self.party.round_id or 0)


def _count(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "0")
    return int(text) if text.isdecimal() else 0


def _standing(body: bytes) -> LinkStanding:
    found = object_in(body)

    def number(name: str, least: int = 0) -> int:
        value = found.get(name)
        if type(value) is not int or not least <= value < MOST_NUMBER:
            raise BadAnswer("a standing without its numbers")
        return value

    return LinkStanding(
        RoundId(number("round_id")),
        sent=number("sent"),
        received=number("received"),
        acknowledged=number("acknowledged"),
        before=number("before", least=-1),
        counted=number("counted", least=-1),
    )


# --- a process of dialers: the helper, a client, or many clients over one journal -----------------

QUIET_FROM: int = 20
"""Parties from which on a process does not log each of them."""


def dial(
    url: str,
    parties: Sequence[tuple[DialingParty | GroupClientService, Keyring]],
    deadlines: ServicePlan,
    log: JsonLog,
) -> int:
    """Take part until the leader says that all rounds are done, or until SIGTERM; the status."""
    prepare_process()
    return asyncio.run(_dial(url, parties, deadlines, log))


async def _dial(
    url: str,
    parties: Sequence[tuple[DialingParty | GroupClientService, Keyring]],
    deadlines: ServicePlan,
    log: JsonLog,
) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, stop.set)
    quiet = JsonLog("", quiet=True) if len(parties) >= QUIET_FROM else log
    trust = trusted(url, parties[0][1].folder / CA)
    steps = GroupCommit([party for party, _ in parties], deadlines.retry, log)
    with ExitStack() as stack:
        stack.callback(steps.close)
        dialers: list[LeaderCaller] = []
        for party, keyring in parties:
            connection = connection_to(url, deadlines, trust)
            stack.callback(connection.close)
            kind = Visitor if isinstance(party, GroupClientService) else Dialer
            dialers.append(kind(party, keyring, connection, deadlines, quiet, steps))
        work = asyncio.create_task(_run(dialers, log))
        stopped = asyncio.create_task(_until(stop))
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            log("stopped")
        else:
            log("finished", rounds=sum(dialer.rounds_ended for dialer in dialers))
    failures = [each.refused or each.failed for each in dialers if each.refused or each.failed]
    for error in failures:
        if isinstance(error, TesseraError | OSError):
            raise error  # one reason is enough
    return 1 if failures else 0


def visit_once(
    url: str,
    member: tuple[DialingParty | GroupClientService, Keyring],
    deadlines: ServicePlan,
    log: JsonLog,
) -> tuple[int, bool]:
    """Whatever is due for one client now; how much was delivered, and whether all rounds are done.

    For programs that are not ours: signals and settings of the process are left alone.
    """
    return asyncio.run(_visit_once(url, member, deadlines, log))


async def _visit_once(
    url: str,
    member: tuple[DialingParty | GroupClientService, Keyring],
    deadlines: ServicePlan,
    log: JsonLog,
) -> tuple[int, bool]:
    party, keyring = member
    steps = GroupCommit([party], deadlines.retry, log)
    with ExitStack() as stack:
        stack.callback(steps.close)
        connection = connection_to(url, deadlines, trusted(url, keyring.folder / CA))
        stack.callback(connection.close)
        kind = Visitor if isinstance(party, GroupClientService) else Dialer
        caller = kind(party, keyring, connection, deadlines, log, steps)
        caller.once = True
        await caller.run()
    return caller.rounds_ended, not caller.nothing_due


async def _run(dialers: Sequence[LeaderCaller], log: JsonLog) -> None:
    """A party that the leader refuses, or whose work fails, ends alone; the others of its process
    go on."""
    async with asyncio.TaskGroup() as group:
        for dialer in dialers:
            group.create_task(_run_alone(dialer, log))


async def _run_alone(dialer: LeaderCaller, log: JsonLog) -> None:
    try:
        await dialer.run_or_be_refused()
    except Exception as error:  # noqa: BLE001 (a bug, logged here; the process ends with status 1)
        dialer.failed = error
        # Where, and not what it says: that may have values of the client's.
        frames = traceback.extract_tb(error.__traceback__)
        at = [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames]
        log("failed", member=dialer.party.name, error=type(error).__name__, at=at)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


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
            if self.once and wire.kind_of(body) is ComeBack:
                self.nothing_due = True
                return False
            if ahead := self.party.ahead:
                self._log("clock is slow, or the cut-off too late: waits", seconds=round(ahead))
            await asyncio.sleep(min(ahead, ASK_AGAIN) or _pause(body))
        elif status != HTTPStatus.NO_CONTENT:
            raise LeaderRefuses(status, reason_in(body))
        elif self.once:
            self.nothing_due = True
            return False
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
