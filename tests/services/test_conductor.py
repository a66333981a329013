"""The leader's clock: no round waits for ever, whatever comes in between two of its turns."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
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
from tessera.runs.logs import JsonLog
from tessera.services.http.app import LeaderApp, create_app
from tessera.services.http.conductor import FOREVER, Conductor, Submission
from tessera.services.http.requests import RequestChecker, signed_headers
from tessera.services.keyring import Directory
from tessera.services.leader import LeaderService
from tessera.simulation.two_server import TwoServerSetup

PLAN: Final = plan("secure-fedavg", cohort=4)
SLOW: Final = ServicePlan(join=600.0, phase=600.0)
LONG_ENOUGH: Final = 60.0


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(PLAN, tmp_path / "lab")
    yield made
    made.close()


@contextlib.contextmanager
def running(
    lab: Lab,
    deadlines: ServicePlan,
    change: Callable[[Conductor], None] = lambda _: None,
    rounds: int | None = None,
) -> Iterator[Conductor]:
    lab.parties.pop(SERVER).journal.close()

    def load() -> LeaderService:
        lab.start(SERVER)
        return lab.leader

    conductor = Conductor(
        load,
        deadlines,
        rounds=rounds,
        on_step=lambda *_: None,
        on_fatal=lambda: None,
        log=JsonLog("", quiet=True),
    )
    change(conductor)
    conductor.start()
    try:
        yield conductor
    finally:
        conductor.stop()
        conductor.join()
        assert conductor.fatal is None, conductor.fatal


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
    with running(lab, ServicePlan(join=0.2, phase=0.2)) as conductor:
        until(lambda: ended(conductor))


def test_the_last_client_may_come_while_the_leader_is_about_to_sleep(lab: Lab) -> None:
    """It is counted, and the round opens: not only when somebody asks again."""
    *others, last = lab.cohort
    late: list[threading.Thread] = []

    def change(conductor: Conductor) -> None:
        opens_in = conductor._opens_in

        def looked_at(leader: LeaderService) -> float:
            found = opens_in(leader)
            if found > 0 and len(conductor._free) == len(others) and not late:
                # From the event loop, after this look and before the thread sleeps.
                late.append(threading.Thread(target=conductor.waits, args=(last, None)))
                late[0].start()
                late[0].join(0.3)
            return found

        conductor._opens_in = looked_at

    with running(lab, SLOW, change) as conductor:
        for client in others:
            conductor.waits(client, None)
        until(lambda: conductor.leader is not None and conductor.leader.round_id == 0)
        late[0].join()


def test_who_waits_behind_an_earlier_round_is_not_free_for_the_next(lab: Lab) -> None:
    """A client that is about to join a round does not count as one that has ended it."""
    with running(lab, SLOW) as conductor:
        for client in lab.cohort:
            conductor.waits(client, None)
        until(lambda: conductor.shown["round"] == 0)
        leader = conductor.leader
        assert leader is not None
        for client in lab.cohort:
            conductor.waits(client, None)  # its request came before the round opened
        assert conductor._opens_in(leader) == FOREVER
        for client in lab.cohort:
            conductor.waits(client, RoundId(0))
        assert conductor._opens_in(leader) <= 0


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
                assert leader.finished and leader.course.next_round == 1
                seen.append(conductor.finished)
                return server(*arguments)

            leader.course.server = opening  # type: ignore[method-assign]
            return leader

        conductor._load = loaded

    with running(lab, SLOW, change, rounds=1) as conductor:
        for client in lab.cohort:
            conductor.waits(client, None)
        until(lambda: conductor.shown["round"] == 0)
        assert seen == [False] and not conductor.finished


def test_a_leader_that_is_behind_its_peers_opens_no_round(lab: Lab) -> None:
    """Its state was put back between rounds: the model is an older one, and numbers were used."""
    one, *others = lab.cohort
    with running(lab, SLOW) as conductor:
        conductor.ahead(one)
        for client in lab.cohort:
            conductor.waits(client, None)
        until(lambda: conductor.shown["round"] == 0)
        assert not conductor.shown["trouble"], "one client says so: it may lie"
    with running(lab, SLOW) as conductor:
        until(lambda: conductor.shown["round"] == 0)
        leader = conductor.leader
        assert leader is not None
        leader.stop("to the next one")
        for client in others[:-1]:
            conductor.ahead(client)
        for client in lab.cohort:
            conductor.waits(client, RoundId(0))
        until(lambda: conductor.shown["trouble"])
        assert "old copy" in conductor.shown["trouble"]
        assert conductor._opens_in(leader) == FOREVER and leader.round_id == 0


def test_while_a_journal_loads_everybody_is_told_to_come_again(lab: Lab) -> None:
    """503 with Retry-After, never "no such round"; and `/healthz` answers."""
    key = SigningKey.from_secret(SystemEntropy().secret("test"))
    servers = TwoServerSetup.of(SystemEntropy(), "f").servers
    directory = Directory(b"b" * 32, servers, {ClientId(0): key.public})
    checker = RequestChecker(directory, b"b" * 32)
    loading = Conductor(
        lambda: lab.leader,
        SLOW,
        rounds=None,
        on_step=lambda *_: None,
        on_fatal=lambda: None,
        log=JsonLog("", quiet=True),
    )
    leader = LeaderApp(loading, checker, lambda: pytest.fail("nothing is read"), SLOW)

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
        assert content(await connection.ask("GET", "/status", {}))["phase"] == "loading"

    asyncio.run(ask())


def test_what_is_submitted_after_the_end_is_settled_at_once(lab: Lab) -> None:
    with running(lab, SLOW) as conductor:
        until(lambda: conductor.leader is not None)
    settled: list[Submission] = []
    conductor._on_step = lambda each, _: settled.extend(each)
    conductor.submit([Submission([], ticket=ClientId(0))])
    assert [each.answers for each in settled] == [None]


def test_clients_may_come_in_while_it_is_counted_who_is_free(lab: Lab) -> None:
    """A leader of a thousand ended here: the set that was counted had grown."""

    class Counted(dict[ClientId, RoundId | None]):
        def items(self) -> Any:
            for each in super().items():
                client = ClientId(len(self))
                if client < PLAN.cohort:
                    comes = threading.Thread(target=conductor.waits, args=(client, None))
                    comes.start()
                    comes.join(0.2)  # it has to wait until all are counted
                yield each

    with running(lab, SLOW) as conductor:
        until(lambda: conductor.leader is not None)
        conductor._free = Counted()
        for client in lab.cohort[:2]:
            conductor.waits(client, None)
        conductor._opens_in(lab.leader)  # as in a turn of its own
