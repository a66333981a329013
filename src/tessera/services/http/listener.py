"""Connections that a leader has, and how many it takes.

Before a handshake of TLS nobody knows who is there, and a connection that says nothing costs memory
all the same. So few at a time may be without one, and not for long ([service] handshake); the
others are closed as they come. Behind it there is a cap on all ([service] connections): who is
above it is told so, with 503, and tries again.
"""

from __future__ import annotations

import json
import socket
from typing import Any, Final

HANDSHAKES: Final = 512
"""Connections at a time that have not shaken hands."""
FULL: Final = "the leader has as many connections as it takes ([service] connections)"


class Connections:
    """Counts of one listening socket."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.accepted = self.established = 0
        """Now: of sockets, and of those whose handshake is done."""
        self.closed_early = self.turned_away = 0
        """So far: without a handshake, and with 503."""

    @property
    def are_full(self) -> bool:
        return self.established > self.most


class AcceptedSocket(socket.socket):
    """A socket that is counted until it is closed."""

    connections: Connections | None = None

    def close(self) -> None:
        if self.connections is not None:
            self.connections.accepted -= 1
            self.connections = None
        super().close()


class ListeningSocket(socket.socket):
    """Takes no more than may be without a handshake."""

    connections: Connections | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        accepted = AcceptedSocket(self.family, self.type, self.proto, fileno=descriptor)
        count = self.connections
        if count is not None:
            if count.accepted - count.established >= HANDSHAKES:
                count.closed_early += 1
                accepted.close()
                raise ConnectionAbortedError("too many without a handshake")
            count.accepted += 1
            accepted.connections = count
        return accepted, address


async def full(scope: Any, receive: Any, send: Any) -> None:
    """The answer on a connection above the cap."""
    body = json.dumps({"error": FULL}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"5"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
