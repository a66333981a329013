"""A leader's process: the conductor and the server in one event loop, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sys
import threading
import time
from asyncio import constants
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tessera.crypto import kernel
from tessera.errors import ConfigError
from tessera.services.bundle import Bundle
from tessera.services.http import is_loopback
from tessera.services.http.app import LOST, CohortApp, LeaderApp, create_app
from tessera.services.http.conductor import Conductor
from tessera.services.http.groups import GroupApp, GroupConductor
from tessera.services.http.listener import Connections, ListeningSocket, full
from tessera.services.http.metrics import LeaderMetrics, OperatorToken
from tessera.services.http.requests import RequestChecker
from tessera.services.keyring import Directory
from tessera.services.logs import JsonLog

# --- serving --------------------------------------------------------------------------------------
#
# Listening: a socket, TLS, deadlines for requests that never end, and SIGTERM.
#
# uvicorn closes idle connections, but waits forever for the end of a request; here one that does
# not come in time is closed, headers and body.


BACKLOG: Final = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and with which certificate."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.certificate is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: outside loopback a service speaks TLS only",
                hint="leave --plain-http out, or listen on 127.0.0.1",
            )

    def bound(self) -> ListeningSocket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sends at once (TCP_NODELAY) only on sockets that say they are TCP. On others the
        # second part of an answer would wait for the other side's delayed acknowledgement: 40 ms.
        listening = ListeningSocket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
            listening.listen(BACKLOG)  # now: two that only bind could have the same address
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"{self.host}:{self.port}: {error.strerror}", hint="--port 0 takes a free one"
            ) from error
        return listening

    def url(self, listening: socket.socket) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{shown}:{listening.getsockname()[1]}"


class HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to us, so that SIGTERM ends in exit status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            self.should_exit = True

        before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)


def http_server(
    app: Any,
    address: Address,
    *,
    request: float,
    keep: float,
    connections: Connections | None = None,
) -> HttpServer:
    """`request`: seconds for a request to come in; `keep`: for an idle connection. `connections`
    counts those of the socket that it is to listen on."""

    class Limited(RequestDeadline):
        limit = request
        count = connections

    return HttpServer(
        uvicorn.Config(
            app,
            http=Limited,
            loop="asyncio",
            lifespan="off",
            log_config=None,  # its set-up would close handlers of the process
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # who asks is known by a signature, not by an address
            timeout_keep_alive=max(1, round(keep)),
            timeout_graceful_shutdown=2,
            ssl_certfile=address.certificate,
            ssl_keyfile=address.key,
            backlog=BACKLOG,
        )
    )


class RequestDeadline(H11Protocol):
    """Closes a connection whose request does not end in time: its headers within `limit`, and its
    body within as much again and a second, in which a handler that reads it can answer."""

    limit: float = 30.0
    count: Connections | None = None
    _due: asyncio.TimerHandle | None = None
    _headers_came = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._allow(self.limit)
        if self.count is not None:
            self.count.established += 1
            if self.count.are_full:
                self.count.turned_away += 1
                self.app = full

    def data_received(self, data: bytes) -> None:
        if self._due is None and self.conn.their_state is h11.IDLE:
            self._allow(self.limit)
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.SEND_BODY and not self._headers_came:
            self._headers_came = True
            self._allow(self.limit + 1.0)
        elif state not in (h11.IDLE, h11.SEND_BODY) or (state is h11.IDLE and self._headers_came):
            self._ended()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        if self.count is not None:
            self.count.established -= 1
        waits = self.cycle is not None and not self.cycle.response_complete
        super().connection_lost(exc)
        lost: Any = self.scope.get(LOST) if waits else None
        if lost is not None:
            lost()

    def _allow(self, seconds: float) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = self.loop.call_later(seconds, self._overdue)

    def _ended(self) -> None:
        self._headers_came = False
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _overdue(self) -> None:
        self._due = None
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.close()


# --- leading --------------------------------------------------------------------------------------

SWITCH: Final = 0.001
"""Seconds until a thread that waits for the interpreter gets it. Two matter in a process, the event
loop's and the journal's, and each waits for the other in every stage of a round."""
NEW_OBJECTS: Final = 10_000
"""Containers made and not yet freed until garbage is looked for among them."""
TLS_BUFFER: Final = 1 << 15
"""Bytes that asyncio sets aside for reading on each connection, 256 kB left to itself: most of a
leader's memory where a thousand clients wait for news."""
LINGER: Final = 1.0
"""Seconds after the last round, at least, for parties that still have to hear of it."""


def lead(
    load: Callable[[], Any],
    bundle: Bundle,
    directory: Directory,
    address: Address,
    *,
    rounds: int | None,
    log: JsonLog,
    on_listening: Callable[[str], None],
    models: Path | None = None,
    state: Path | None = None,
    token: OperatorToken | None = None,
) -> int:
    """Serve until all rounds are done, or until SIGTERM; the exit status. `load` makes the leader.

    What the journal refuses is raised here. `state`: the folder whose disk has to have room;
    `models`: a folder of exported models.
    """
    prepare_process()
    deadlines = bundle.plan.service
    constants.SSL_HANDSHAKE_TIMEOUT = deadlines.handshake
    connections = Connections(deadlines.connections)
    metrics = LeaderMetrics(bundle.plan, state)
    metrics.connections = connections
    checker = RequestChecker(directory, bundle.digest)
    conductor: Conductor | GroupConductor
    app: LeaderApp
    if bundle.plan.grouped:
        conductor = GroupConductor(load, deadlines, rounds=rounds, log=log, metrics=metrics)
        app = GroupApp(conductor, checker, deadlines, token=token, log=log)
    else:
        conductor = Conductor(load, deadlines, rounds=rounds, log=log, metrics=metrics)
        app = CohortApp(conductor, checker, deadlines, token=token, log=log)
    app.models = models
    server = http_server(
        create_app(app),
        address,
        request=deadlines.request,
        keep=2 * deadlines.poll,
        connections=connections,
    )

    async def main() -> None:
        work = asyncio.create_task(conductor.run())
        watch = asyncio.create_task(watch_the_end(work))
        try:
            await server.serve(sockets=[listening])
        finally:
            watch.cancel()
            conductor.stop()
            await work

    async def watch_the_end(work: asyncio.Task[None]) -> None:
        while not (conductor.finished or work.done() or server.should_exit):
            await asyncio.sleep(0.1)
        if conductor.finished:
            await asyncio.sleep(LINGER)
            last = time.monotonic() + app.linger
            while app.still_to_hear and time.monotonic() < last and not server.should_exit:
                await asyncio.sleep(0.1)
        app.closing = True
        app.wake(())
        server.should_exit = True

    try:
        with address.bound() as listening:
            listening.connections = connections
            on_listening(address.url(listening))
            asyncio.run(main())
    finally:
        if conductor.leader is not None:
            conductor.leader.journal.close()
    log("stopped", **{k: v for k, v in conductor.shown.items() if k in ("round", "model")})
    return 0


def prepare_process() -> None:
    """Small buffers for each connection; the kernel tested, which takes a second, before anybody
    waits for us; no search for garbage among all that was imported, 35 ms in the middle of a round,
    and less often for what is new; threads that give way to each other; and as many open
    connections as the system lets this process have."""
    SSLProtocol.max_size = TLS_BUFFER
    kernel.active()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    sys.setswitchinterval(SWITCH)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
