"""The leader's clock: no round waits for ever, whatever comes in between two of its turns."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("uvicorn")

from rounds.population import plan
from services.asking import MemoryConnection, content
from services.service_lab import Lab
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.keys import SigningKey
from tessera.ids import SERVER, ClientId, RoundId
from tessera.plan import ServicePlan
from tessera.services.http.app import CohortApp, create_app
from tessera.services.http.conductor import FOREVER, Conductor
from tessera.services.http.requests import RequestChecker, signed_headers
from tessera.services.keyring import Directory
from tessera.services.leader import LeaderService
from tessera.services.logs import JsonLog
from tessera.simulation.two_server import TwoServerSetup

PLAN: Final = plan("secure-fedavg", cohort=4)
SLOW: Final = ServicePlan(join=600.0, phase=600.0)
LONG_ENOUGH: Final = 60.0


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(PLAN, tmp_path / "lab")
    yield made
    made.close()


class Running:
    """A conductor at work in an event loop of its own; what a test does to it is done there."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor, self._loop = conductor, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work)
        self.failed: BaseException | None = None

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self.conductor.run())
        except Exception as error:  # noqa: BLE001 (the test shows it)
            self.failed = error

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.there(self.conductor.stop)
        self._thread.join()
        self._loop.close()
        assert self.failed is None, self.failed

    def there(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What it returns, called between two turns of the loop."""

        async def called() -> Any:
            return call(*arguments)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(LONG_ENOUGH)

    def wait_all(self, clients: Iterable[ClientId], behind: RoundId | None = None) -> None:
        for client in clients:
            self.there(self.conductor.asked, client)
            self.there(self.conductor.waits, client, behind, object())


def running(
    lab: Lab,
    deadlines: ServicePlan,
    change: Callable[[Conductor], None] = lambda _: None,
    rounds: int | None = None,
) -> Running:
    lab.parties.pop(SERVER).journal.close()

    def load() -> LeaderService:
        lab.start(SERVER)
        return lab.leader

    conductor = Conductor(load, deadlines, rounds=rounds, log=JsonLog("", quiet=True))
    change(conductor)
    return Running(conductor)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + LONG_ENOUGH
    while not condition():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.005)


def ended(conductor: Conductor) -> bool:
    leader = conductor.leader
    return leader is not None and leader.round_id == 0 and bool(leader.outcome(RoundId(0)))


def test_a_phase_has_its_deadline_again_after_a_restart_though_nobody_speaks(lab: Lab) -> None:
    """All that live have answered, one is gone, and the leader is killed: who would wake it?"""
    lab.leader.open_round()
    for client in lab.cohort[:-1]:
        lab._exchange(client)
    assert lab.leader.missing == {lab.cohort[-1]}
    with running(lab, ServicePlan(join=0.2, phase=0.2)) as run:
        until(lambda: ended(run.conductor))


def test_clients_may_come_while_a_step_is_written(lab: Lab) -> None:
    """They are counted, and the round opens: not only when somebody asks again."""
    first, *others = lab.cohort
    came: list[ClientId] = []

    def change(conductor: Conductor) -> None:
        load = conductor._load

        def loaded() -> LeaderService:
            leader = load()
            handle = leader.handle

            def at_work(*arguments: Any) -> Any:  # in the journal's thread
                if not came:
                    came.extend(others)
                    run.wait_all(others)
                return handle(*arguments)

            leader.handle = at_work  # type: ignore[method-assign]
            return leader

        conductor._load = loaded

    with running(lab, SLOW, change) as run:
        until(lambda: run.conductor.leader is not None)
        run.wait_all([first])
        run.there(run.conductor._acknowledged.__setitem__, first, (RoundId(0), 0))
        run.there(run.conductor._wake.set)
        until(lambda: run.conductor.shown["round"] == 0)
        assert came == others


def test_who_waits_behind_an_earlier_round_is_not_free_for_the_next(lab: Lab) -> None:
    """A client that is about to join a round does not count as one that has ended it."""
    with running(lab, SLOW) as run:
        conductor = run.conductor
        run.wait_all(lab.cohort)
        until(lambda: conductor.shown["round"] == 0)
        leader = conductor.leader
        assert leader is not None
        run.wait_all(lab.cohort)  # their requests came before the round opened
        assert run.there(conductor._opens_in, leader) == FOREVER
        run.wait_all(lab.cohort, RoundId(0))
        assert run.there(conductor._opens_in, leader) <= 0


def test_all_rounds_are_not_done_while_the_last_one_is_being_opened(lab: Lab) -> None:
    """Its number is drawn and it is not in hand yet: a process that looked then ended, and told
    everybody that there are no more rounds."""
    seen: list[bool] = []

    def change(conductor: Conductor) -> None:
        load = conductor._load

        def loaded() -> LeaderService:
            leader = load()
            server = leader.course.server

            def opening(*arguments: Any) -> Any:
                assert leader.is_over and leader.course.next_round == 1
                seen.append(conductor.finished)
                return server(*arguments)

            leader.course.server = opening  # type: ignore[method-assign]
            return leader

        conductor._load = loaded

    with running(lab, SLOW, change, rounds=1) as run:
        run.wait_all(lab.cohort)
        until(lambda: run.conductor.shown["round"] == 0)
        assert seen == [False] and not run.conductor.finished


def test_a_leader_that_is_behind_its_peers_opens_no_round(lab: Lab) -> None:
    """Its state was put back between rounds: the model is an older one, and numbers were used."""
    one, *others = lab.cohort
    with running(lab, SLOW) as run:
        run.there(run.conductor.ahead, one)
        run.wait_all(lab.cohort)
        until(lambda: run.conductor.shown["round"] == 0)
        assert not run.conductor.shown["trouble"], "one client says so: it may lie"
    with running(lab, SLOW) as run:
        conductor = run.conductor
        until(lambda: conductor.shown["round"] == 0)
        leader = conductor.leader
        assert leader is not None
        run.there(leader.stop, "to the next one")
        for client in others[:-1]:
            run.there(conductor.ahead, client)
        run.wait_all(lab.cohort, RoundId(0))
        until(lambda: conductor.shown["trouble"])
        assert "old copy" in conductor.shown["trouble"]
        assert run.there(conductor._opens_in, leader) == FOREVER and leader.round_id == 0


def test_while_a_journal_loads_everybody_is_told_to_come_again(lab: Lab) -> None:
    """503 with Retry-After, never "no such round"; and `/healthz` answers."""
    key = SigningKey.from_secret(SystemEntropy().secret("test"))
    servers = TwoServerSetup.of(SystemEntropy(), "f").servers
    directory = Directory(b"b" * 32, servers, {ClientId(0): key.public})
    checker = RequestChecker(directory, b"b" * 32)
    loading = Conductor(lambda: lab.leader, SLOW, rounds=None, log=JsonLog("", quiet=True))
    leader = CohortApp(loading, checker, SLOW)

    async def ask() -> None:
        connection = MemoryConnection(create_app(leader))
        for method, target in (
            ("GET", "/v1/standing?after=-1"),
            ("POST", "/v1/messages?round=0&received=0"),
        ):
            about = (key, ClientId(0), b"b" * 32, method, target, b"", checker.session)
            answer = await connection.ask(method, target, signed_headers(*about))
            assert answer.status == 503 and answer.headers["retry-after"]
        assert content(await connection.ask("GET", "/healthz", {})) == {"ok": True}
        ready = await connection.ask("GET", "/readyz", {})
        assert ready.status == 503 and content(ready)["trouble"] == ["loading"]
        assert (await connection.ask("GET", "/status", {})).status == 401

    asyncio.run(ask())


def test_what_is_submitted_after_the_end_is_settled_at_once(lab: Lab) -> None:
    with running(lab, SLOW) as run:
        until(lambda: run.conductor.leader is not None)
    assert asyncio.run(run.conductor.take([])) is None


def test_a_step_that_does_not_come_to_disk_is_no_step_and_the_leader_goes_on(lab: Lab) -> None:
    """Whoever asked is told to come again; nothing of the round that was not opened is left."""
    full = [True]

    def change(conductor: Conductor) -> None:
        load = conductor._load

        def loaded() -> LeaderService:
            leader = load()
            open_round = leader.open_round

            def opening(there: Collection[ClientId]) -> RoundId:
                found = open_round(there)
                if full.pop() if full else False:
                    raise sqlite3.OperationalError("database or disk is full")
                return found

            leader.open_round = opening  # type: ignore[method-assign]
            return leader

        conductor._load = loaded

    troubles: list[str] = []
    with running(lab, ServicePlan(join=600.0, phase=600.0, retry=0.01), change) as run:
        run.conductor.on_news = lambda _: troubles.append(run.conductor.shown["trouble"])
        run.wait_all(lab.cohort)
        until(lambda: run.conductor.shown["round"] == 0)
        assert not full and any("disk is full" in each for each in troubles)
        assert not run.conductor.shown["trouble"]
