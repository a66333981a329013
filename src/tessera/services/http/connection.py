"""One party's connection to the leader, kept open from request to request.

HTTP/1.1 as h11 reads and writes it, over a stream of asyncio. A request leaves in one piece and
before anything else runs, so that a leader works on the first of many requests while a process is
writing the others. Every wait has a deadline: an answer begins within `patience` and then comes
faster than `LEAST_RATE`. What cannot be an answer of a leader is an end of the connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

import h11

from tessera.errors import ConfigError, TesseraError
from tessera.services.http import is_loopback

CHUNK: Final = 1 << 16
LEAST_RATE: Final = 1024
"""Bytes a second of an answer that is on its way."""


class NoAnswer(TesseraError):
    """Not there, or gone in the middle. Whether the leader has the request nobody knows; the
    numbers of messages make it safe to ask again."""


class AnswerTooLong(TesseraError):
    """More bytes than a leader's answer can have."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


def address(url: str) -> SplitResult:
    """The parts of a leader's address; `ConfigError` if it is not one."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port
        known = False
    if not known:
        raise ConfigError(f"{url!r} is not a leader's address", hint="such as https://HOST:8400")
    return parts


def trusted(url: str, authority: Path) -> ssl.SSLContext | None:
    """Whom to trust at `url`, which is TLS outside loopback: our authority. None without TLS."""
    parts = address(url)
    if parts.scheme == "https":
        return ssl.create_default_context(cafile=str(authority))
    if not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"{url}: outside loopback a leader speaks TLS only", hint="use its https:// address"
        )
    return None


class LeaderConnection:
    """One request at a time."""

    def __init__(
        self, url: str, trust: ssl.SSLContext | None, *, patience: float, most: int
    ) -> None:
        """`trust`: whom to trust at an https address; None for http. `most` bytes in an answer."""
        parts = address(url)
        self._host, self._trust = parts.hostname or "", trust
        self._port = parts.port or (80 if trust is None else 443)
        self._name = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/")
        self._patience, self._most = patience, most
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._http = h11.Connection(h11.CLIENT)

    async def ask(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
    ) -> HttpAnswer:
        """`NoAnswer`: no answer. Afterwards it can be used again."""
        try:
            async with asyncio.timeout(self._patience) as deadline:
                reader, writer = await self._connected()
                writer.write(self._request(method, target, headers, body))
                await writer.drain()
                answer = await self._answer(reader, deadline)
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            self.close()
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self.close()
        return answer

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None and not self._streams[0].at_eof():
            return self._streams
        self.close()
        self._http = h11.Connection(h11.CLIENT)
        self._streams = await asyncio.open_connection(self._host, self._port, ssl=self._trust)
        return self._streams

    def _request(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
        about = [("Host", self._name), ("Content-Length", str(len(body))), *headers.items()]
        head = h11.Request(method=method, target=self._prefix + target, headers=about)
        parts = [self._http.send(head)]
        if body:
            parts.append(self._http.send(h11.Data(data=body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        return b"".join(part for part in parts if part)

    async def _answer(self, reader: asyncio.StreamReader, deadline: asyncio.Timeout) -> HttpAnswer:
        began: h11.Response | None = None
        at, content = 0.0, bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if began is not None:
                    deadline.reschedule(at + self._patience + len(content) / LEAST_RATE)
                self._http.receive_data(await reader.read(CHUNK))
            elif isinstance(event, h11.Response):
                began, at = event, asyncio.get_running_loop().time()
            elif isinstance(event, h11.Data):
                content += event.data
                if len(content) > self._most:
                    raise AnswerTooLong(f"the leader sent more than {self._most} bytes")
            elif isinstance(event, h11.EndOfMessage) and began is not None:
                headers = {name.decode(): value.decode("latin-1") for name, value in began.headers}
                return HttpAnswer(began.status_code, headers, bytes(content))
            else:
                raise h11.RemoteProtocolError("not an answer")  # an end, or an interim response

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
