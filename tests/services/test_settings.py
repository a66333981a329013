"""Settings that an operator may change: by option, environment or file, under the same digests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from rounds.population import plan
from services.asking import content, send
from services.one_loop import OneLoop
from tessera.cli.main import main
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import SigningKey
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.plan import ServicePlan
from tessera.services.bundle import Bundle, pack_synthetic
from tessera.services.http import listener
from tessera.services.http.caller import LeaderRefuses
from tessera.services.http.listener import Connections, ListeningSocket
from tessera.services.http.requests import RefusedRequest, RequestChecker, signed_headers
from tessera.services.http.serving import Address, http_server
from tessera.services.keyring import Directory
from tessera.services.settings import service_settings
from tessera.simulation.two_server import TwoServerSetup


def test_an_option_beats_the_environment_and_that_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[service]\njoin = 1\nphase = 2\npoll = 3\nconnections = 7\n")
    said = {"TESSERA_SERVICE_PHASE": "20", "TESSERA_SERVICE_POLL": "30", "TESSERA_DATA": "x"}
    found = service_settings(
        ServicePlan(retry=9.0), file=file, given=["poll=300"], environment=said
    )
    assert found == ServicePlan(join=1.0, phase=20.0, poll=300.0, retry=9.0, connections=7)


@pytest.mark.parametrize(
    ("text", "given", "environment"),
    [
        ("[service]\nwait = 1\n", (), {}),
        ("[service]\njoin = 0\n", (), {}),
        ("[service]\nconnections = 2.5\n", (), {}),
        ("[plan]\nscheme = 'fedavg'\n", (), {}),
        ("join = 1\n", (), {}),
        ("not toml", (), {}),
        ("", ["join"], {}),
        ("", ["join=soon"], {}),
        ("", ["joins=1"], {}),
        ("", (), {"TESSERA_SERVICE_JOIN": "nan"}),
        ("", (), {"TESSERA_SERVICE_CLIENTS": "1"}),
    ],
)
def test_what_is_no_setting_is_refused_with_what_there_is(
    text: str, given: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text or "[service]\n")
    with pytest.raises(ConfigError) as refused:
        service_settings(ServicePlan(), file=file, given=given, environment=environment)
    assert refused.value.hint


def test_no_digest_covers_the_settings() -> None:
    """Journals and requests are bound to the bundle's digest: an operator may change these."""
    packed = pack_synthetic(plan("secure-fedavg", cohort=4), 4, 8)
    changed = packed.served(ServicePlan(join=3.0, connections=9))
    assert changed.digest == packed.digest and changed.plan.digest == packed.plan.digest
    assert changed.plan.model.packed == packed.plan.model.packed
    other = pack_synthetic(plan("secure-fedavg", cohort=4, seed=9), 4, 8)
    assert other.digest != packed.digest


def test_settings_are_read_at_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle.npz"
    packed = pack_synthetic(plan("secure-fedavg", cohort=4), 4, 8)
    packed.write(bundle)
    assert Bundle.read(bundle).digest == packed.digest
    line = ["serve", str(bundle), "--keys", str(tmp_path), "--state", str(tmp_path / "s")]
    assert main([*line, "--service", "wait=3"]) == 2
    assert "error: --service wait" in (told := capsys.readouterr().err) and "hint: one of" in told


# --- whom a leader refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(("off", "told"), [(-300.0, "300 s ahead of"), (3000.0, "3000 s behind")])
def test_a_clock_that_is_off_is_told_by_how_much(off: float, told: str) -> None:
    import time

    key = SigningKey.from_secret(ScriptedEntropy(b"a").secret("test"))
    servers = TwoServerSetup.of(ScriptedEntropy(b"a"), "f").servers
    directory = Directory(b"b" * 32, servers, {ClientId(0): key.public})
    checker = RequestChecker(directory, b"b" * 32, clock=lambda: time.time() + off)
    about = (key, ClientId(0), b"b" * 32, "GET", "/v1/standing", b"", checker.session)
    with pytest.raises(RefusedRequest, match=told) as refused:
        checker.check("GET", "/v1/standing", signed_headers(*about))
    assert refused.value.kind == "clock" and refused.value.sender == 0
    assert "time server" in str(LeaderRefuses(401, str(refused.value)).hint)


def test_a_refused_party_ends_with_the_status_that_the_docs_name(tmp_path: Path) -> None:
    """Exit status 2, as for everything that somebody has to set right: it is a ConfigError."""

    async def refused() -> None:
        made = OneLoop(plan("secure-fedavg", cohort=4), 4, tmp_path)
        made.start()
        made.app._checker._clock = lambda: 0.0
        made.join([0])
        try:
            await made.until(lambda: made.dialers[0].refused is not None)
            error = made.dialers[0].refused
            assert isinstance(error, ConfigError) and "ahead of the leader's" in str(error)
        finally:
            await made.close()

    asyncio.run(refused())


# --- connections ----------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[tuple[str, Connections]]:
    """A server that takes two connections at a time."""

    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    address, connections = Address("127.0.0.1", 0), Connections(2)
    server = http_server(app, address, request=30, keep=30, connections=connections)
    with address.bound() as listening:
        listening.connections = connections
        work = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        work.start()
        yield address.url(listening), connections
        server.should_exit = True
        work.join()


def test_who_is_above_the_cap_is_told_so_and_the_others_go_on(
    served: tuple[str, Connections],
) -> None:
    import http.client

    url, connections = served
    place = url.removeprefix("http://")
    two = [http.client.HTTPConnection(place, timeout=10) for _ in range(2)]
    for each in two:
        each.request("GET", "/")
        assert each.getresponse().read() == b""
    above = send("GET", url)
    assert above.status == 503 and above.headers["retry-after"]
    assert "as many connections as it takes" in content(above)["error"]
    for each in two:
        each.request("GET", "/")
        assert each.getresponse().status == 204
        each.close()
    while connections.established:
        pass
    assert send("GET", url).status == 204 and connections.turned_away == 1


def test_few_connections_at_a_time_are_without_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKES", 3)
    connections = Connections(100)
    with ListeningSocket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        listening.connections = connections
        dialled = [socket.create_connection(listening.getsockname()) for _ in range(5)]
        silent = [listening.accept()[0] for _ in range(3)]
        with pytest.raises(ConnectionAbortedError):
            listening.accept()
        assert connections.accepted == 3 and connections.closed_early == 1
        connections.established += 1  # one has ended its handshake
        silent.append(listening.accept()[0])
        for each in silent:
            each.close()
            each.close()
        assert connections.accepted == 0
        for each in dialled:
            each.close()
