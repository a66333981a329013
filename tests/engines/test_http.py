"""A round between processes gives the simulator's model, and the leader refuses what is not due."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "httpx")):
    pytest.skip("the extra `http` is not installed", allow_module_level=True)

import httpx
import uvicorn

from tessera.crypto.entropy import ScriptedEntropy
from tessera.engines import http, population
from tessera.engines.faults import Drop
from tessera.engines.federation import Federation
from tessera.engines.http import NUMBER
from tessera.engines.http import client as http_client
from tessera.engines.http.client import leader_at, synthetic_role, take_part
from tessera.engines.http.client import main as client_main
from tessera.engines.http.leader import (
    Deadlines,
    RoundService,
    create_app,
    largest_upload,
    main,
    model_digest,
)
from tessera.engines.two_server import TwoServerSetup
from tessera.errors import ConfigError, ServerFault
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import Averaging, ServerStep
from tessera.protocols.secagg.identity import identities
from tessera.rounds.client import ClientRound
from tessera.rounds.events import RoundFinished
from tessera.rounds.plan import Plan, Scheme
from tessera.rounds.server import ServerRound
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.leader import LeaderRound

SCRIPT: Final = "a round over loopback"
ROWS: Final = 12
COHORT: Final = 6
GONE: Final = 4

PLAN: Final = f"""
federation = "loopback"
scheme = "secure-submodel"
cohort = {COHORT}
seed = 7

[model]
dense = 30

[[table]]
name = "goods"
rows = 60
width = 3

[[table]]
name = "kinds"
rows = 7
width = 2
derived_from = "goods"

[privacy]
level = "cpp4"

[union]
max_rows = {ROWS}
"""

VANISHING: Final = """
import os, signal, sys
from pathlib import Path
from tessera.engines.http.client import synthetic_role, take_part
from tessera.ids import ClientId, RoundId
from tessera.rounds.plan import Plan

url, plan, client, rows, script = sys.argv[1:]
role = synthetic_role(Plan.read(Path(plan)), RoundId(0), ClientId(int(client)), int(rows), script)
take_part(url, role, lambda submodel: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture
def plan() -> Plan:
    return Plan.parse(PLAN)


def simulated(plan: Plan, *gone: int) -> tuple[str, list[int]]:
    """(the model's digest, the survivors) of the same round in one process."""
    federation = Federation(
        plan,
        population.participants(plan, COHORT, ROWS),
        dense=population.dense(plan),
        tables=population.tables(plan),
        trainer=population.cohort_trainer(plan, COHORT),
        derived=population.derived_maps(plan),
        entropy=ScriptedEntropy(SCRIPT.encode()),
        faults=lambda _, __: [Drop(ClientId(c), "collect", stage=1) for c in gone],
    )
    *_, last = federation.round()
    assert isinstance(last, RoundFinished) and federation.last is not None
    survivors = [int(c) for c in federation.last.result.survivors]
    return model_digest(federation.dense, federation.tables), survivors


def joined(plan: Plan, url: str, role: ClientRound) -> None:
    take_part(url, role, population.trainer(plan, role.me))


def leader_of(plan: Plan, **deadlines: float) -> RoundService:
    cohort = [ClientId(c) for c in range(COHORT)]
    server = ServerRound(
        plan,
        RoundId(0),
        cohort,
        dense=population.dense(plan),
        tables=population.tables(plan),
        derived=population.derived_maps(plan),
        entropy=ScriptedEntropy(SCRIPT.encode()),
    )
    return RoundService(server, cohort, deadlines=Deadlines(**{"linger": 0.0, **deadlines}))


@contextmanager
def listening(leader: RoundService) -> Iterator[str]:
    """The leader's address; it serves from a thread until the block ends."""
    config = uvicorn.Config(create_app(leader), port=0, log_level="error", lifespan="on")
    service = uvicorn.Server(config)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        while not service.started:
            time.sleep(0.01)
        port = service.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        service.should_exit = True
        thread.join()


def ask(leader: RoundService, method: str, path: str, **request: Any) -> httpx.Response:
    """One request to the app itself, whose clock stands still."""

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(leader))
        async with httpx.AsyncClient(transport=transport, base_url="http://leader") as line:
            return await line.request(method, path, **request)

    return asyncio.run(once())


# --- the round ------------------------------------------------------------------------------------


def test_a_round_over_sockets_gives_the_simulators_model(plan: Plan) -> None:
    leader = leader_of(plan)
    with listening(leader) as url:
        roles = [synthetic_role(plan, RoundId(0), ClientId(c), ROWS, SCRIPT) for c in range(COHORT)]
        threads = [threading.Thread(target=joined, args=(plan, url, role)) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [role.phase for role in roles] == ["Over"] * COHORT
    assert leader.result is not None
    tables = population.tables(plan)
    step = Averaging(ServerStep(), plan.model.dense, tables)
    dense = step.apply(population.dense(plan), leader.result.dense, leader.result.tables)
    digest, survivors = simulated(plan)
    assert [int(c) for c in leader.result.survivors] == survivors == list(range(COHORT))
    assert model_digest(dense, tables) == digest
    assert leader.refused == 0


@pytest.mark.slow
def test_processes_of_which_one_is_killed_give_the_simulators_model(
    plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started: list[subprocess.Popen[str]] = []

    def spawn(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    script = ("--insecure-test-entropy", SCRIPT)
    try:
        cohort = ",".join(map(str, range(COHORT)))
        leading = spawn(
            *("-m", "tessera.engines.http.leader", path, "--clients", cohort, *script),
            *("--phase-seconds", 10, "--join-seconds", 120, "--linger-seconds", 2),
        )
        assert leading.stdout is not None
        url = json.loads(leading.stdout.readline())["listening"]
        clients = {
            c: spawn(
                *("-m", "tessera.engines.http.client", url, path, "--client", c, *script),
                *("--rows-per-client", ROWS),
            )
            for c in range(COHORT)
            if c != GONE
        }
        victim = spawn("-c", VANISHING, url, path, GONE, ROWS, SCRIPT)
        printed, complaints = leading.communicate(timeout=180)
        assert leading.returncode == 0, complaints
        for process in clients.values():
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert json.loads(out)["phase"] == "Over"
            assert "insecure test entropy" in err
        assert victim.wait(timeout=60) < 0  # by a signal
    finally:
        for process in started:
            process.kill()
            process.communicate()
    final = json.loads(printed)
    digest, survivors = simulated(plan, GONE)
    assert final["survivors"] == survivors == [c for c in range(COHORT) if c != GONE]
    assert final["model"] == digest
    assert digest != simulated(plan)[0]


def test_a_round_that_too_few_join_is_aborted_and_says_so(plan: Plan) -> None:
    leader = leader_of(plan, join=1.5)
    with listening(leader) as url:
        role = synthetic_role(plan, RoundId(0), ClientId(0), ROWS, SCRIPT)
        outcome = take_part(url, role, population.trainer(plan, role.me))
        status = httpx.get(f"{url}/rounds/0/status").json()
    assert outcome.received == 1 and role.phase == "Over"  # it is told that nothing comes
    assert status["phase"] == "aborted"
    assert "1 answered" in status["aborted"]
    assert leader.result is None


# --- refusals -------------------------------------------------------------------------------------


def first_message(plan: Plan, client: int) -> bytes:
    (out,) = synthetic_role(plan, RoundId(0), ClientId(client), ROWS, SCRIPT).start()
    return out.data


def test_a_stranger_is_refused_and_changes_nothing(plan: Plan) -> None:
    leader = leader_of(plan)
    data = first_message(plan, 0)
    answer = ask(leader, "POST", "/rounds/0/messages?client=77", content=data)
    assert answer.status_code == 403
    assert ask(leader, "GET", "/rounds/0/messages?client=77").status_code == 403
    assert len(leader.missing) == COHORT


def test_a_client_cannot_speak_for_another(plan: Plan) -> None:
    leader = leader_of(plan)
    answer = ask(leader, "POST", "/rounds/0/messages?client=1", content=first_message(plan, 0))
    assert answer.status_code == 409
    assert "client 1" in answer.json()["detail"]
    assert leader.refused == 1 and len(leader.missing) == COHORT


def test_an_oversized_message_is_refused_before_its_body_is_read(plan: Plan) -> None:
    leader = leader_of(plan)

    async def never_read() -> Any:
        pytest.fail("the body was read")
        yield b""

    answer = ask(
        leader,
        "POST",
        "/rounds/0/messages?client=0",
        content=never_read(),
        headers={"Content-Length": str(leader.cap + 1)},
    )
    assert answer.status_code == 413


def test_a_message_longer_than_it_said_is_cut_off(plan: Plan) -> None:
    leader = leader_of(plan)

    async def endless() -> Any:
        sent = 0
        while sent <= 4 * leader.cap:
            sent += leader.cap // 2
            yield bytes(leader.cap // 2)

    headers = {"Content-Length": "10"}
    answer = ask(leader, "POST", "/rounds/0/messages?client=0", content=endless(), headers=headers)
    assert answer.status_code == 413


def test_a_message_without_a_length_is_refused(plan: Plan) -> None:
    async def some() -> Any:
        yield first_message(plan, 0)

    answer = ask(leader_of(plan), "POST", "/rounds/0/messages?client=0", content=some())
    assert answer.status_code == 411


@pytest.mark.parametrize("content", [b"", b"\x00", b"no message of ours"])
def test_bytes_that_are_no_message_are_refused(plan: Plan, content: bytes) -> None:
    answer = ask(leader_of(plan), "POST", "/rounds/0/messages?client=0", content=content)
    assert answer.status_code == 409


def test_a_message_is_taken_once(plan: Plan) -> None:
    leader = leader_of(plan)
    data = first_message(plan, 0)
    assert ask(leader, "POST", "/rounds/0/messages?client=0", content=data).status_code == 202
    other = first_message(plan, 0)[:-1] + b"\x00"
    assert ask(leader, "POST", "/rounds/0/messages?client=0", content=other).status_code == 409
    assert ask(leader, "GET", "/rounds/0/status").json()["missing"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/rounds/1/messages?client=0", 404),
        ("/rounds/1/status", 404),
        ("/rounds/0/messages?client=0&after=3", 400),
        ("/rounds/0/messages?client=x", 422),
        ("/rounds/0/messages", 422),
        ("/docs", 404),
        ("/openapi.json", 404),
    ],
)
def test_what_is_not_there_is_not_answered(plan: Plan, path: str, status: int) -> None:
    assert ask(leader_of(plan), "GET", path).status_code == status


def test_a_poll_ends_without_a_message_when_there_is_none(plan: Plan) -> None:
    answer = ask(leader_of(plan), "GET", "/rounds/0/messages?client=0&wait=0.01")
    assert (answer.status_code, answer.content) == (204, b"")


def test_the_cap_has_room_for_the_longest_message_of_a_round(plan: Plan) -> None:
    sent: list[int] = []
    leader = leader_of(plan)
    taken = leader.server.receive
    leader.server.receive = lambda c, data: (sent.append(len(data)), taken(c, data))[1]  # type: ignore[method-assign]
    with listening(leader) as url:
        roles = [synthetic_role(plan, RoundId(0), ClientId(c), ROWS, SCRIPT) for c in range(COHORT)]
        threads = [threading.Thread(target=joined, args=(plan, url, role)) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 0 < max(sent) <= largest_upload(plan) < 1 << 16


# --- loopback, and what is missing ----------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org", "", "127.0.0.1.x"])
def test_nothing_but_loopback_is_bound(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-plan.toml", "--clients", "0", "--host", host]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is not a loopback address" in captured.err
    assert "hint: use 127.0.0.1" in captured.err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
def test_loopback_is_accepted(host: str) -> None:
    assert http.loopback(host)


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:80", "https://127.0.0.1:1", "127.0.0.1:8000", "http://"]
)
def test_a_client_talks_to_loopback_only(url: str) -> None:
    with pytest.raises(ConfigError):
        leader_at(url)


def test_a_leader_that_is_not_there_is_bad_input(plan: Plan) -> None:
    role = synthetic_role(plan, RoundId(0), ClientId(0), ROWS, SCRIPT)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9") as caught:
        take_part("http://127.0.0.1:9", role, population.trainer(plan, role.me))
    assert caught.value.hint == "start the leader first; is it there?"


def test_a_leader_that_answers_nonsense_has_lost_this_client(plan: Plan) -> None:
    def nonsense(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500 if request.method == "GET" else 202)

    role = synthetic_role(plan, RoundId(0), ClientId(0), ROWS, SCRIPT)
    with pytest.raises(ServerFault, match="status 500"):
        take_part(
            "http://127.0.0.1:9",
            role,
            population.trainer(plan, role.me),
            http=httpx.Client(transport=httpx.MockTransport(nonsense)),
        )


def test_an_answer_is_capped_after_decompression(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes on the line that would be megabytes in memory."""
    bomb = gzip.compress(bytes(1 << 22))
    monkeypatch.setattr(http_client, "DEFAULT_CAP", 1 << 20)
    assert len(bomb) < 1 << 14

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(202)
        headers = {"content-encoding": "gzip", NUMBER: "1"}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(bomb))

    role = synthetic_role(plan, RoundId(0), ClientId(0), ROWS, SCRIPT)
    with pytest.raises(ServerFault, match="status 200, which does not fit"):
        take_part(
            "http://127.0.0.1:9",
            role,
            population.trainer(plan, role.me),
            http=httpx.Client(transport=httpx.MockTransport(answer)),
        )


def test_a_plan_with_pseudonyms_is_refused_outside_simulation(plan: Plan) -> None:
    covered = replace(plan, privacy=replace(plan.privacy, pseudonyms=True))
    with pytest.raises(ConfigError, match="simulation"):
        leader_of(covered)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name)
    )
    with pytest.raises(ConfigError, match="uvicorn") as caught:
        importlib.reload(http)
    assert caught.value.hint == "pip install tessera[http]"
    monkeypatch.undo()
    importlib.reload(http)


# --- two servers ----------------------------------------------------------------------------------


def two_servers(plan: Plan) -> Plan:
    return replace(plan, scheme=Scheme.TWO_SERVER)


def test_a_plan_for_two_servers_is_refused_before_anything_is_sent(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This carrier has one server, which would see rows and updates in the clear."""
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace("secure-submodel", "two-server"))
    cohort = ",".join(map(str, range(COHORT)))
    short = ("--join-seconds", "0.1", "--linger-seconds", "0")
    assert main([str(path), "--clients", cohort, *short]) == 2
    out, complaints = capsys.readouterr()
    assert not out and "ServerRound does not run scheme 'two-server'" in complaints
    assert client_main(["http://127.0.0.1:9", str(path), "--client", "0"]) == 2
    assert "ClientRound does not run scheme 'two-server'" in capsys.readouterr().err


def test_roles_of_two_servers_do_not_get_on_this_carrier(plan: Plan) -> None:
    settings, entropy = two_servers(plan), ScriptedEntropy(SCRIPT.encode())
    both = TwoServerSetup.of(entropy, settings.federation)
    cohort = [ClientId(c) for c in range(COHORT)]
    leading = LeaderRound(
        settings,
        RoundId(0),
        cohort,
        dense=population.dense(settings),
        tables=population.tables(settings),
        derived=population.derived_maps(settings),
        entropy=entropy,
        servers=both.servers,
        key=both.leader,
    )
    with pytest.raises(ConfigError, match="'two-server'"):
        RoundService(leading, cohort, deadlines=Deadlines())
    role = TwoServerClientRound(
        settings,
        RoundId(0),
        cohort[0],
        local=population.participants(settings, COHORT, ROWS)[cohort[0]].local,
        entropy=entropy,
        identity=identities(cohort, entropy, settings.federation)[cohort[0]],
        servers=both.servers,
    )
    with pytest.raises(ConfigError, match="'two-server'"):
        joined(settings, "http://127.0.0.1:9", role)
    assert role.phase == "NotJoined"
