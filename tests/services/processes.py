"""A deployment on loopback: real processes, and a tap between all dialers and the leader."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from services import zygote
from services.asking import content, send
from services.tap import Tap
from tessera import wire
from tessera.cli.main import main
from tessera.ids import HELPER, SERVER, ClientId, Party
from tessera.protocols.epochs.messages import Delivery
from tessera.rounds import schemes
from tessera.services.bundle import Bundle
from tessera.services.http import FIRST, RECEIVED, REFUSED, requests
from tessera.services.http.dialer import VISIT
from tessera.services.http.metrics import TOKEN
from tessera.services.http.requests import SENDER, SESSION
from tessera.services.journal import NAME
from tessera.services.link import Numbered, party_of

SCRIPT = "a deployment on loopback"
CONTEXT = multiprocessing.get_context("forkserver")
# The server that processes are forked from finds its modules there.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
CONTEXT.set_forkserver_preload(["services.zygote"])

OnMessage = Callable[[Party, str], None]
"""(whose message or answer, "request" or "answer"): before it is passed on."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Wiretap:
    """Passes requests on to the leader, and notes every message with its number."""

    def __init__(self, leader_port: int) -> None:
        self.seen = Tap()
        self.on_message: OnMessage | None = None
        self._guard = threading.Lock()
        tap = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return

            def do_GET(self) -> None:
                self._pass_on("GET")

            def do_POST(self) -> None:
                self._pass_on("POST")

            def _pass_on(self, method: str) -> None:
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                sender = self.headers.get(SENDER, "")
                visit = self.path == VISIT
                if body:
                    if visit:
                        tap.visited(sender, body)
                    else:
                        tap.note(self.path, sender, SERVER, body, "")
                    tap.moment(sender, "request")
                line = http.client.HTTPConnection("127.0.0.1", leader_port, timeout=60)
                try:
                    with closing(line):
                        line.request(method, self.path, body or None, dict(self.headers.items()))
                        answer = line.getresponse()
                        content = answer.read()
                except (OSError, http.client.HTTPException):
                    self.send_error(502)
                    return
                first = answer.getheader(FIRST, "")
                if first:
                    tap.note(self.path, SERVER, sender, content, first)
                if first or visit:
                    tap.moment(sender, "answer")
                try:
                    self.send_response(answer.status)
                    for name in (FIRST, RECEIVED, REFUSED, SESSION, "content-type"):
                        if (value := answer.getheader(name)) is not None:
                            self.send_header(name, value)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    return

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                return  # whoever asked was killed

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def note(self, path: str, sender: str, receiver: str, body: bytes, first: str) -> None:
        query = parse_qs(urlsplit(path).query)
        with self._guard:
            for message in requests.unpack(int(first or query["first"][0]), body):
                self.seen.saw(int(query["round"][0]), sender, receiver, message)

    def visited(self, sender: str, body: bytes) -> None:
        """A member has one content for an epoch."""
        if wire.kind_of(body) is Delivery:
            epoch = wire.decode(body, expect=[Delivery]).statement.epoch
            with self._guard:
                self.seen.saw(epoch, sender, SERVER, Numbered(1, body))

    def moment(self, sender: str, side: str) -> None:
        if self.on_message is not None:
            self.on_message(party_of(sender), side)

    def check(self) -> None:
        with self._guard:
            self.seen.check()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Deployment:
    """Leader, helper and clients as processes; anybody may be killed and started again."""

    def __init__(
        self, plan: str, folder: Path, *, rounds: int | None, script: str | None = SCRIPT
    ) -> None:
        self.folder, self.rounds, self.script = folder, rounds, script
        path = folder / "plan.toml"
        path.write_text(plan, encoding="utf-8")
        self.bundle_file, self.keys = folder / "bundle.npz", folder / "keys"
        rows = ["--rows-per-client", "8"]
        assert main(["pack", str(path), "--out", str(self.bundle_file), *rows]) == 0
        keys = ["keys", str(self.bundle_file), "--out", str(self.keys)]
        assert main([*keys, *self._entropy]) == 0
        self.bundle = Bundle.read(self.bundle_file)
        self.port = free_port()
        self.tap = Wiretap(self.port)
        self.running: dict[Party, BaseProcess] = {}
        self.changing = threading.Lock()
        self.cohort = [ClientId(c) for c in range(self.bundle.clients)]
        self.two = schemes.of(self.bundle.plan).two_servers

    @property
    def _entropy(self) -> list[str]:
        return [] if self.script is None else ["--insecure-test-entropy", self.script]

    @property
    def everybody(self) -> list[Party]:
        return [SERVER, *([HELPER] if self.two else []), *self.cohort]

    def state(self, party: Party) -> Path:
        return self.folder / "state" / str(party)

    def log(self, party: Party) -> str:
        path = self.folder / f"{party}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def start(self, party: Party) -> None:
        both = ["--state", str(self.state(party)), *self._entropy]
        bundle = str(self.bundle_file)
        if party == SERVER:
            line = ["serve", bundle, "--keys", str(self.keys / "leader"), "--plain-http", *both]
            line += ["--port", str(self.port)]
            line += [] if self.rounds is None else ["--rounds", str(self.rounds)]
        elif party == HELPER:
            line = ["help-serve", bundle, self.tap.url, "--keys", str(self.keys / "helper"), *both]
        else:
            line = ["join", bundle, self.tap.url, "--client", str(party), *both]
            line += ["--keys", str(self.keys / f"client-{party}")]
        process = CONTEXT.Process(
            target=zygote.run, args=(str(self.folder / f"{party}.log"), line), daemon=True
        )
        process.start()
        self.running[party] = process

    def start_all(self) -> None:
        for party in self.everybody:
            self.start(party)

    def kill(self, party: Party) -> None:
        """kill -9."""
        process = self.running.pop(party)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def restart(self, party: Party) -> None:
        with self.changing:
            self.kill(party)
            self.start(party)

    def wait(self, seconds: float = 120.0) -> None:
        """Until everybody has ended by itself, with status 0."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self.changing:
                states = {party: process.exitcode for party, process in self.running.items()}
            for party, code in states.items():
                assert not code, f"{party}: {code}\n{self.log(party)}"
            if all(code == 0 for code in states.values()):
                return
            time.sleep(0.05)
        raise AssertionError(f"not at the end in time\n{self.log(SERVER)}")

    def status(self) -> dict[str, Any]:
        token = (self.state(SERVER) / TOKEN).read_text().strip()
        shown = {"Authorization": f"Bearer {token}"}
        found: dict[str, Any] = content(send("GET", f"http://127.0.0.1:{self.port}/status", shown))
        return found

    def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> Any:
        """The status, once it is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                status = self.status()
                if condition(status):
                    return status
            except OSError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"not in time: {self.log(SERVER)}")

    def outcomes(self) -> list[dict[str, Any]]:
        """How the rounds ended, the first one first: as the journal has it, for who is killed
        between a step and its line in the log writes no line."""
        path = self.state(SERVER) / NAME
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            found = database.execute("SELECT data FROM event ORDER BY number").fetchall()
        return [json.loads(data) for (data,) in found]

    def model(self) -> str:
        """The digest of the leader's model at the end, as its log has it."""
        lines = [json.loads(x) for x in self.log(SERVER).splitlines() if x.startswith("{")]
        return str([x for x in lines if x.get("event") == "stopped"][-1]["model"])

    def close(self) -> None:
        for process in list(self.running.values()):
            if process.is_alive():
                process.kill()  # one that was stopped, too
            process.join()
        self.tap.close()
