"""Listening: a socket, TLS, deadlines for requests that never end, and SIGTERM.

uvicorn closes idle connections, but waits for ever for the end of headers; here a request whose
headers do not come in time is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tessera.engines.http import is_loopback
from tessera.errors import ConfigError

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

    def bound(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sends at once (TCP_NODELAY) only on sockets that say they are TCP. On others the
        # second part of an answer would wait for the other side's delayed acknowledgement: 40 ms.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


def http_server(app: FastAPI, address: Address, *, request: float, keep: float) -> HttpServer:
    """`request`: seconds for the headers of a request; `keep`: for an idle connection."""

    class Limited(HeaderDeadline):
        limit = request

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
            timeout_keep_alive=max(1, round(keep)),
            timeout_graceful_shutdown=2,
            ssl_certfile=address.certificate,
            ssl_keyfile=address.key,
            backlog=BACKLOG,
        )
    )


class HeaderDeadline(H11Protocol):
    """Closes a connection whose request's headers do not end in time."""

    limit: float = 30.0
    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._headers_came()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(self.limit, self._overdue)

    def _headers_came(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _overdue(self) -> None:
        self._headers_due = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
