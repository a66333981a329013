"""Visits of fixed groups over HTTP: what is held, what is refused, and how a client's life ends."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "h11", "prometheus_client")):
    pytest.skip("the extra `http` is not installed", allow_module_level=True)

from services.group_lab import GroupLab, grouped
from tessera import wire
from tessera.errors import ConfigError
from tessera.ids import SERVER, ClientId
from tessera.plan import ServicePlan
from tessera.protocols.epochs.messages import ComeBack
from tessera.rounds.epochs.group import EpochWork
from tessera.services.group_client import LeftGroup
from tessera.services.group_commit import GroupCommit
from tessera.services.http.dialer import Visitor
from tessera.services.http.groups import GroupApp, GroupConductor
from tessera.services.http.requests import RefusedRequest, SignedRequest
from tessera.services.journal import Moment
from tessera.services.logs import JsonLog

SIZE = 4
QUIET = JsonLog("", quiet=True)
DEADLINES = ServicePlan(poll=0.2, retry=0.01)


@pytest.fixture
def lab() -> Iterator[GroupLab]:
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        made = GroupLab(grouped(2 * SIZE, SIZE), Path(folder) / "lab", 2 * SIZE)
        made.ready()
        yield made
        made.close()


class Door(GroupApp):
    """The application behind its signatures: whoever says who it is is believed."""

    def waits_until(self, request: Any) -> float:
        return time.monotonic() + self._deadlines.poll

    def checked(self, request: Any) -> tuple[SignedRequest, dict[str, str]]:
        sender, body = request
        if not self.takes_part(sender):
            raise RefusedRequest(403, "the sender takes no part in these rounds")
        return SignedRequest(sender, len(body), ""), {}

    async def body(self, request: Any, signed: SignedRequest) -> bytes:
        return request[1]


@asynccontextmanager
async def opened(
    lab: GroupLab, *, rounds: int | None = None, deadlines: ServicePlan = DEADLINES
) -> AsyncIterator[Door]:
    conductor = GroupConductor(lambda: lab.leader, deadlines, rounds=rounds, log=QUIET)
    door = Door(conductor, None, deadlines)  # type: ignore[arg-type]
    work = asyncio.create_task(conductor.run())
    while conductor.leader is None:
        await asyncio.sleep(0.001)
    try:
        yield door
    finally:
        conductor.stop()
        await work


def in_group(lab: GroupLab, group: int = 0) -> list[ClientId]:
    return list(lab.groups[group].members)


# --- the leader -----------------------------------------------------------------------------------


def test_a_question_is_held_until_something_is_due(lab: GroupLab) -> None:
    """The last member's delivery wakes those who wait; nobody is told before, and none too late."""

    async def run() -> None:
        first, *_, last = members = in_group(lab)
        for client in members[:-1]:
            lab.visit(client, once=True)
        async with opened(lab) as door:
            early = await door.visit((first, lab.client(first).fetch()))
            assert wire.kind_of(early.body) is ComeBack, "after [service] poll"
        async with opened(lab, deadlines=ServicePlan(poll=600.0)) as door:
            waits = asyncio.create_task(door.visit((first, lab.client(first).fetch())))
            work = await door.visit((last, lab.client(last).fetch()))
            assert not waits.done()
            lab.client(last).take(work.body)
            lab.client(last).train()
            sent = await door.visit((last, lab.client(last).outgoing[0]))
            assert sent.status_code == 204
            answer = await asyncio.wait_for(waits, 60.0)
            assert wire.kind_of(answer.body) is EpochWork, "its group was full: the round ended"
            assert door.status()["round"] == 0
            assert door.status()["membership"] == "groups on the operator's word"
            assert (door.status()["retired"], door.status()["retired_for"]) == (0, "")

    asyncio.run(run())


def test_what_is_refused_and_what_is_not_stored(lab: GroupLab) -> None:
    def full(moment: Moment) -> None:
        if moment is Moment.BEFORE_COMMIT:
            raise sqlite3.OperationalError("database or disk is full")

    async def run() -> None:
        first, second, *_ = in_group(lab)
        async with opened(lab) as door:
            with pytest.raises(RefusedRequest, match="takes no part") as refused:
                await door.visit((ClientId(99), b""))
            assert refused.value.status == 403
            with pytest.raises(RefusedRequest, match="another client's name") as refused:
                await door.visit((second, lab.client(first).fetch()))
            assert refused.value.status == 409
            question, journal = lab.client(first).fetch(), lab.leader.journal
            watched, journal.watch = journal.watch, full
            answer = await door.visit((first, question))
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert "disk" in door.status()["trouble"]
            journal.watch = watched
            answer = await door.visit((first, question))
            assert wire.kind_of(answer.body) is EpochWork
            assert not door.status()["trouble"]

    asyncio.run(run())


def test_after_the_last_round_everybody_is_dismissed(lab: GroupLab) -> None:
    async def run() -> None:
        members = in_group(lab)
        for client in (*members, members[0]):
            lab.visit(client, once=True)
        async with opened(lab, rounds=1) as door:
            answer = await door.visit((members[0], lab.client(members[0]).fetch()))
            assert answer.status_code == 410 and door._conductor.finished
            others = set(lab.clients) - {members[0]}
            assert door.still_to_hear == others, "who has not come to this process, too"
            for client in others:
                await door.visit((client, lab.client(client).fetch()))
            assert not door.still_to_hear
            assert door.status()["model"] == lab.leader.model.digest.hex()

    asyncio.run(run())


# --- a client -------------------------------------------------------------------------------------


class Direct(Visitor):
    """A visitor that has the leader in its own process; `answers` come first, if there are any."""

    def __init__(self, lab: GroupLab, client: ClientId, answers: Any = ()) -> None:
        party = lab.client(client)
        steps = GroupCommit([party], 0.01, QUIET)
        super().__init__(party, None, None, DEADLINES, QUIET, steps)  # type: ignore[arg-type]
        self.lab, self.answers, self.asked = lab, list(answers), 0

    async def _ask(self, method: str, path: str, query: Any = None, body: bytes = b"") -> Any:
        self.asked += 1
        if self.answers:
            return self.answers.pop(0), {}, b""
        answer = self.lab.leader.take(self.party.me, body)
        if wire.kind_of(answer.message) is ComeBack:
            return 410, {}, b""
        if answer.refused:
            return 409, {}, b'{"error": "%b"}' % answer.refused.encode()
        return (200 if answer.message else 204), {}, answer.message


def test_an_epoch_takes_one_question_and_one_delivery(lab: GroupLab) -> None:
    visitor = Direct(lab, in_group(lab)[0])
    asyncio.run(visitor.run())
    assert visitor.rounds_ended == 1
    assert visitor.asked == 3, "and one question to which nothing was due"


def test_a_lost_answer_is_asked_for_again(lab: GroupLab) -> None:
    """The leader has answered, the connection broke: the same question again gets no second answer,
    another question does."""
    visitor = Direct(lab, in_group(lab)[0], answers=[204, 204])
    asyncio.run(visitor.run())
    assert visitor.rounds_ended == 1


def test_a_client_whose_group_is_retired_ends_quietly(lab: GroupLab) -> None:
    with lab.leader.journal.step():
        lab.leader.retire(0, "a member has left")
    client = in_group(lab)[0]
    visitor = Direct(lab, client)
    asyncio.run(visitor.run())
    assert lab.client(client).retired == "a member has left"
    lab.restart(client)
    assert lab.client(client).retired == "a member has left", "for good"


def test_a_client_that_is_refused_has_left_for_good(lab: GroupLab) -> None:
    client = in_group(lab)[0]
    visitor = Direct(lab, client, answers=[200])  # nothing, where a message is due
    with pytest.raises(LeftGroup, match="invalid message") as left:
        asyncio.run(visitor.run())
    assert left.value.hint
    lab.restart(client)
    again = Direct(lab, client)
    with pytest.raises(LeftGroup):
        asyncio.run(again.run())
    assert again.asked == 0, "it says nothing any more"


def test_a_client_without_budget_declines_for_good(
    lab: GroupLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = in_group(lab)[0]

    def spent(*_: Any) -> None:
        raise ConfigError("no budget is left")

    monkeypatch.setattr("tessera.rounds.epochs.client.MemberWork.charge", spent)
    with pytest.raises(LeftGroup, match="no budget is left"):
        asyncio.run(Direct(lab, client).run())
    lab.restart(client)
    assert lab.client(client).left == "no budget is left"
    assert lab.client(client).role.phase == "Over", "no key is left"
    assert lab.parties[SERVER].retired == {0: "a member has left"}, "it was told"


def test_a_client_that_is_told_to_leave_tells_the_leader_and_ends(lab: GroupLab) -> None:
    client, other = in_group(lab)[:2]
    lab.client(client).leave()
    asyncio.run(Direct(lab, client).run())
    assert lab.parties[SERVER].retired == {0: "a member has left"}
    asyncio.run(Direct(lab, other).run())
    assert lab.client(other).retired == "a member has left"
    lab.restart(client)
    with pytest.raises(LeftGroup, match="told to leave"):
        asyncio.run(Direct(lab, client).run())


def test_a_deadline_that_passes_while_the_leader_cannot_be_reached_is_kept(lab: GroupLab) -> None:
    client = in_group(lab)[0]
    one = lab.client(client)
    lab.now += one.expires_in - 20

    class Silent(Direct):
        async def _ask(self, method: str, path: str, query: Any = None, body: bytes = b"") -> Any:
            if not one.left:
                lab.now += 30
                await asyncio.sleep(3600)
            return await super()._ask(method, path, query, body)

    one._clock = lambda: lab.now
    visitor = Silent(lab, client)
    lab.now += 19.9
    with pytest.raises(LeftGroup, match="its own deadline has passed"):
        asyncio.run(visitor.run())
    assert lab.parties[SERVER].retired == {0: "a member has left"}
