"""What a live leader does with bad requests, while five honest clients go on: their sums are exact.

Every line here is tried in the middle of a round, and the model is the simulator's in the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "h11", "prometheus_client")):
    pytest.skip("the extra `http` is not installed", allow_module_level=True)

from services.asking import content, send
from services.processes import Deployment
from services.test_services import plan, simulated
from tessera.cli.main import main
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.keys import SigningKey
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER, ClientId, Party
from tessera.services.bundle import Bundle
from tessera.services.http import RECEIVED, requests
from tessera.services.http.app import MOST_OF_ONE
from tessera.services.http.requests import (
    NONCE,
    SESSION,
    SIGNATURE,
    TIME,
    _statement,
    signed_headers,
)
from tessera.services.http.serving import Address
from tessera.services.journal import NAME, Journal
from tessera.services.keyring import Keyring
from tessera.services.link import Numbered

ABSENT: Final = ClientId(4)


@pytest.fixture(scope="module")
def live() -> Iterator[Deployment]:
    """A leader in its first round, which waits for client 4; the others have sent what is due."""
    with TemporaryDirectory() as folder:
        text = plan("secure-submodel").replace("poll = 5", "poll = 1\nrequest = 2")
        deployment = Deployment(text, Path(folder), rounds=2)
        try:
            deployment.start_all()
            deployment.until(lambda status: status["round"] == 0)
            os.kill(deployment.running[ABSENT].pid or 0, signal.SIGSTOP)
            deployment.until(lambda status: status["missing"] == 1)
            yield deployment
        finally:
            deployment.close()


class Sender:
    """Requests in a party's name, straight to the leader."""

    def __init__(self, deployment: Deployment, party: Party, key: SigningKey | None = None) -> None:
        self.bundle = deployment.bundle.digest
        folder = "helper" if party == HELPER else f"client-{party}"
        keyring = Keyring.read(deployment.keys / folder, party, self.bundle)
        self.party, self.key = party, key or keyring.signing
        self.url = f"http://127.0.0.1:{deployment.port}"
        unsigned = self.send("GET", "/v1/standing?after=999")
        self.session = unsigned.headers.get(SESSION, "")

    session = ""

    def headers(self, method: str, target: str, body: bytes = b"") -> dict[str, str]:
        return signed_headers(self.key, self.party, self.bundle, method, target, body, self.session)

    def send(
        self, method: str, target: str, body: bytes = b"", change: Any = None, **more: Any
    ) -> Any:
        bundle = more.pop("bundle", self.bundle)
        headers = signed_headers(self.key, self.party, bundle, method, target, body, self.session)
        if change is not None:
            change(headers)
        sent = more.pop("sent", body)
        return send(method, self.url + target, headers, sent)


def test_an_unsigned_request_is_401(live: Deployment) -> None:
    answer = send("GET", f"http://127.0.0.1:{live.port}/v1/standing?after=-1")
    assert answer.status == 401


def test_a_wrong_signature_time_nonce_or_bundle_is_401(live: Deployment) -> None:
    client, target = Sender(live, ClientId(0)), "/v1/messages?round=0&received=0"
    assert client.send("POST", target).status in (200, 204)
    stranger = SigningKey.from_secret(SystemEntropy().secret("test"))
    assert Sender(live, ClientId(0), stranger).send("POST", target).status == 401
    for change in (
        lambda h: h.update({TIME: f"{time.time() - 600:.3f}"}),
        lambda h: h.update({NONCE: "00" * 16}),
        lambda h: h.update({SIGNATURE: "zz"}),
        lambda h: h.pop(SIGNATURE),
    ):
        assert client.send("POST", target, change=change).status == 401
    assert client.send("POST", target, bundle=b"another bundle").status == 401


def test_a_request_that_is_sent_again_is_401(live: Deployment) -> None:
    client, target = Sender(live, ClientId(0)), "/v1/messages?round=0&received=0"
    headers = client.headers("POST", target)
    first, second = (send("POST", client.url + target, headers).status for _ in range(2))
    assert first in (200, 204) and second == 401


def test_a_party_without_a_part_is_403(live: Deployment) -> None:
    answer = Sender(live, HELPER).send("GET", "/v1/standing?after=-1")
    assert answer.status == 403, "this scheme has one server"


def test_another_body_than_was_signed_is_401_and_changes_nothing(live: Deployment) -> None:
    target = "/v1/messages?round=0&received=0&first=9"
    client = Sender(live, ClientId(0))
    assert client.send("POST", target, b"signed", sent=b"sent!!").status == 401


def test_an_oversized_request_is_413_before_its_body_is_read(live: Deployment) -> None:
    client, target = Sender(live, ClientId(0)), "/v1/messages?round=0&received=0&first=9"
    huge = requests.MOST_BYTES + 1
    headers = client.headers("POST", target)
    digest = hashlib.sha256(b"").hexdigest()
    when, nonce = headers[TIME], headers[NONCE]
    parts = ("client 0", client.session, "POST", target, huge, digest, when, nonce)
    statement = _statement(client.bundle, *parts)
    headers[SIGNATURE] = client.key.sign(statement).hex()
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as line:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        start = f"POST {target} HTTP/1.1\r\nHost: leader\r\nContent-Length: {huge}\r\n"
        line.sendall(f"{start}{head}\r\n".encode())
        assert b" 413 " in line.recv(4096).split(b"\r\n")[0]


def test_a_number_that_was_taken_gets_its_answer_and_other_bytes_409(live: Deployment) -> None:
    sent = {place: body for place, body in live.tap.seen.bodies.items() if place[1] == "client 1"}
    (round_id, _, _, number), body = min(sent.items())
    client = Sender(live, ClientId(1))
    target = f"/v1/messages?round={round_id}&received=0&first={number}"
    again = client.send("POST", target, requests.pack([Numbered(number, body)]))
    assert again.status in (200, 204) and int(again.headers[RECEIVED]) >= number
    other = requests.pack([Numbered(number, body + b"\0")])
    assert client.send("POST", target, other).status == 409
    gap = "/v1/messages?round=0&received=0&first=77"
    refused = client.send("POST", gap, requests.pack([Numbered(77, b"too early")]))
    assert refused.status == 409 and "is the next" in content(refused)["error"]


def test_nonsense_is_400(live: Deployment) -> None:
    client = Sender(live, ClientId(0))
    for target in ("/v1/messages?round=x&received=0", "/v1/messages"):
        assert client.send("POST", target).status == 400
    assert client.send("GET", "/v1/standing?after=-9").status == 400
    target = "/v1/messages?round=0&received=0&first=9"
    for body in (b"\0", b"\0\0\0\x09short", b"\0\0\0\0" * (requests.MOST_MESSAGES + 1)):
        assert client.send("POST", target, body).status == 400
    target = "/v1/messages?round=0&received=0"
    assert client.send("POST", target, requests.pack([Numbered(1, b"x")])).status == 400


def test_a_round_that_is_not_there_is_410_or_409(live: Deployment) -> None:
    client, target = Sender(live, ClientId(0)), "/v1/messages?round=7&received=0"
    assert client.send("POST", target).status == 410
    body = requests.pack([Numbered(1, b"x")])
    assert client.send("POST", f"{target}&first=1", body).status == 409


def test_a_request_that_never_ends_is_closed_at_its_deadline(live: Deployment) -> None:
    client, target = Sender(live, ClientId(0)), "/v1/messages?round=0&received=0&first=9"
    headers = client.headers("POST", target, b"12345")
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    unfinished = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n{head}\r\n12"
    unread = "POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n1"
    for opening in ("GET /healthz HTTP/1.1\r\nHost: x\r\n", unfinished):
        with socket.create_connection(("127.0.0.1", live.port), timeout=20) as line:
            line.sendall(opening.encode())
            rest = line.recv(4096)  # closed, or told so
            assert rest == b"" or b" 408 " in rest
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as line:
        line.sendall(unread.encode())
        assert b" 405 " in line.recv(4096), "answered before its body, which nobody reads"
        started = time.monotonic()
        with contextlib.suppress(OSError):  # closed under our hands
            while time.monotonic() - started < 60:
                line.sendall(b"1")
                time.sleep(0.1)
        assert time.monotonic() - started < 60, "a byte now and then does not keep it open"


def test_healthz_answers_and_status_has_no_payload(live: Deployment) -> None:
    url = f"http://127.0.0.1:{live.port}"
    assert content(send("GET", f"{url}/healthz")) == {"ok": True}
    status = live.status()
    assert status["round"] == 0 and status["missing"] >= 1 and status["deadline"] > 0
    assert send("GET", f"{url}/status").status == 401
    assert main(["status", url, "--json"]) == 2
    token = str(live.state(SERVER) / "operator-token")
    assert main(["status", url, "--json", "--token-file", token]) == 0
    assert main(["status", str(live.state(SERVER))]) == 0


def test_a_second_process_and_other_states_are_refused(
    live: Deployment, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    leader = ["serve", str(live.bundle_file), "--port", "0", "--plain-http"]
    keys, state = ["--keys", str(live.keys / "leader")], ["--state", str(live.state(SERVER))]
    assert main([*leader, *keys, *state]) == 2
    assert "another process has this state" in capfd.readouterr().err
    line = ["join", str(live.bundle_file), live.tap.url, "--client", "0"]
    other = ["--keys", str(live.keys / "client-1"), "--state", str(tmp_path / "s")]
    assert main([*line, *other]) == 2
    assert "not the key that the directory has for client-0" in capfd.readouterr().err
    Journal.open(tmp_path / "one", owner="client 1", plan=live.bundle.digest).close()
    own = ["--keys", str(live.keys / "client-0"), "--state", str(tmp_path / "one")]
    assert main([*line, *own]) == 2
    assert "it is the state of client 1, not of client 0" in capfd.readouterr().err
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / NAME).write_bytes(b"damaged" * 1000)
    assert main([*leader, *keys, "--state", str(damaged)]) == 2
    assert str(damaged / NAME) in capfd.readouterr().err


def test_another_bundle_is_refused_with_both_digests(
    live: Deployment, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(live.folder / "plan.toml", tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text().replace("seed = 3", "seed = 4")
    (tmp_path / "plan.toml").write_text(text)
    other = tmp_path / "other.npz"
    assert main(["pack", str(tmp_path / "plan.toml"), "--out", str(other)]) == 0
    line = ["serve", str(other), "--keys", str(live.keys / "leader"), "--state", str(tmp_path)]
    assert main(line) == 2
    told = capfd.readouterr().err
    assert live.bundle.digest.hex()[:16] in told
    assert Bundle.read(other).digest.hex()[:16] in told


def test_outside_loopback_neither_plain_http_nor_test_entropy(
    live: Deployment, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = ["serve", str(live.bundle_file), "--keys", str(live.keys / "leader")]
    line += ["--state", str(tmp_path / "s"), "--host", "0.0.0.0"]
    assert main([*line, "--plain-http"]) == 2
    assert "TLS only" in capfd.readouterr().err
    assert main([*line, "--insecure-test-entropy", "x"]) == 2
    assert "outside loopback" in capfd.readouterr().err
    joined = ["join", str(live.bundle_file), "http://192.0.2.1:80", "--client", "0"]
    joined += ["--keys", str(live.keys / "client-0"), "--state", str(tmp_path / "c")]
    assert main(joined) == 2
    assert "TLS only" in capfd.readouterr().err


def test_what_was_signed_for_another_session_is_401(live: Deployment) -> None:
    """A leader that was started again remembers no nonces; what it had seen is of no use to it."""
    client, target = Sender(live, ClientId(0)), "/v1/messages?round=0&received=0"
    client.session = "00" * 16
    answer = client.send("POST", target)
    assert answer.status == 401 and "another session" in content(answer)["error"]
    client.session = answer.headers[SESSION]
    assert client.send("POST", target).status in (200, 204)


def test_who_claims_more_than_it_was_sent_is_409_and_ends_nobodys_round(live: Deployment) -> None:
    answer = Sender(live, ClientId(0)).send("POST", "/v1/messages?round=0&received=99")
    assert answer.status == 409
    assert live.status()["phase"] != "between rounds"


def test_one_sender_has_few_requests_at_a_time(live: Deployment) -> None:
    client = Sender(live, ClientId(0))
    sent = content(client.send("GET", "/v1/standing?after=-1&again=1"))["sent"]
    target = f"/v1/messages?round=0&received={sent}"
    with ThreadPoolExecutor(MOST_OF_ONE + 4) as many:
        found = Counter(
            many.map(lambda _: client.send("POST", target).status, range(MOST_OF_ONE + 4))
        )
    assert found[429] > 0 and found[204] > 0


def test_oversized_headers_and_slow_ones_are_closed(live: Deployment) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(OSError):
            for _ in range(64):
                line.sendall(b"X-Long: " + b"x" * 16_000 + b"\r\n")
            assert line.recv(4096)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431")
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as line:
        started = time.monotonic()
        with contextlib.suppress(OSError):  # closed under our hands
            for byte in b"GET /healthz HTTP/1.1\r\nHost: " + b"x" * 1000:
                line.sendall(bytes([byte]))
                time.sleep(0.1)
        assert time.monotonic() - started < 60, "a byte now and then does not keep it open"


def test_who_does_not_read_keeps_nobody_from_reading(live: Deployment) -> None:
    client, target = Sender(live, ClientId(0)), "/v1/messages?round=0&received=0"
    with contextlib.ExitStack() as lines:
        for _ in range(70):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", live.port), 20))
            head = "".join(f"{k}: {v}\r\n" for k, v in client.headers("POST", target).items())
            line.sendall(f"POST {target} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        assert Sender(live, ClientId(1)).send("POST", target).status in (200, 204)


def test_a_full_disk_is_no_step_and_nothing_is_sent(live: Deployment) -> None:
    """The leader may write nothing more; then there is room, and it goes on (see the end)."""
    pid = live.running[SERVER].pid or 0
    log = live.state(SERVER) / f"{NAME}-wal"
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (log.stat().st_size, hard))
    try:
        os.kill(live.running[ABSENT].pid or 0, signal.SIGCONT)
        trouble = live.until(lambda status: status["trouble"])["trouble"]
        assert "cannot write it" in trouble and NAME in trouble
        os.kill(live.running[ABSENT].pid or 0, signal.SIGSTOP)
        assert live.status()["round"] == 0
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def test_a_second_leader_on_the_same_address_is_refused(
    live: Deployment, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = ["serve", str(live.bundle_file), "--keys", str(live.keys / "leader"), "--plain-http"]
    assert main([*line, "--state", str(tmp_path / "s"), "--port", str(live.port)]) == 2
    assert "Address already in use" in capfd.readouterr().err
    with Address("127.0.0.1", 0).bound() as one:
        again = Address("127.0.0.1", one.getsockname()[1])
        with pytest.raises(ConfigError, match="already in use"):
            again.bound()


def test_the_honest_clients_were_not_disturbed(live: Deployment) -> None:
    os.kill(live.running[ABSENT].pid or 0, signal.SIGCONT)
    ended = live.until(lambda status: (status["round"] or 0) >= 1)["rounds"][-1]
    answer = Sender(live, ClientId(0)).send("POST", "/v1/messages?round=0&received=99")
    assert answer.status == 410 and content(answer) == {
        key: ended[key] for key in ("outcome", "reason", "survivors", "excluded")
    }
    live.wait(60)
    assert [e["survivors"] for e in live.outcomes()] == [5, 5]
    assert live.model() == simulated(live, 2)
    live.tap.check()


def test_sigterm_ends_everybody_with_status_0() -> None:
    with TemporaryDirectory() as folder:
        deployment = Deployment(plan("submodel"), Path(folder), rounds=None)
        try:
            deployment.start_all()
            deployment.until(lambda status: (status["round"] or 0) >= 1)
            for party in reversed(deployment.everybody):
                os.kill(deployment.running[party].pid or 0, signal.SIGTERM)
            deployment.wait(30)
        finally:
            deployment.close()


@pytest.mark.slow
def test_a_client_that_stays_away_is_missing_and_joins_the_next_round() -> None:
    with TemporaryDirectory() as folder:
        # Nobody waits for it a second time: a pause is what it has to come back in.
        text = plan("two-server", phase=4.0).replace("[service]", "[service]\npause = 6.0")
        deployment = Deployment(text, Path(folder), rounds=3)
        try:
            deployment.start_all()
            deployment.until(lambda status: status["round"] == 0)
            deployment.kill(ClientId(2))
            deployment.until(lambda status: len(status["rounds"]) >= 1)
            deployment.start(ClientId(2))
            deployment.wait(60)
            ended = deployment.outcomes()
            assert [e["event"] for e in ended] == ["RoundFinished"] * 3
            assert ended[-1]["survivors"] == 5
            gone = {number: [2] for number, e in enumerate(ended) if e["survivors"] == 4}
            assert deployment.model() == simulated(deployment, 3, gone)
        finally:
            deployment.close()
