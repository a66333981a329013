"""A party's connection to a leader that may be gone, slow, or not a leader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import pytest

pytest.importorskip("h11")

from tessera.services.http import connection
from tessera.services.http.connection import AnswerTooLong, HttpAnswer, LeaderConnection, NoAnswer

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK: Final = b"HTTP/1.1 200 OK\r\nTessera-First: 7\r\nContent-Length: 3\r\n\r\nabc"


async def request(reader: asyncio.StreamReader) -> bytes:
    """One request as it came."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (
        int(each.split(b":")[1])
        for each in head.split(b"\r\n")
        if each.lower().startswith(b"content-length")
    )
    return head + await reader.readexactly(length)


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """The port of a server; its connections are closed in the end, whatever the handler did."""
    lines: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(writer)
        with contextlib.suppress(OSError, EOFError):
            await handler(reader, writer)

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        for line in lines:
            line.transport.abort()
        await asyncio.sleep(0.01)


async def asked(handler: Handler, times: int = 1, **limits: float) -> list[HttpAnswer | Exception]:
    """What becomes of so many requests on one line."""
    patience, most = limits.get("patience", 20.0), int(limits.get("most", 1 << 20))
    found: list[HttpAnswer | Exception] = []
    async with serving(handler) as port:
        line = LeaderConnection(f"http://127.0.0.1:{port}/at/", None, patience=patience, most=most)
        for at in range(times):
            try:
                found.append(await line.ask("POST", "/v1?x=1", {"Name": "value"}, b"%d" % at))
            except (NoAnswer, AnswerTooLong) as error:
                found.append(error)
        line.close()
    return found


def test_requests_share_a_connection_and_carry_target_headers_and_body() -> None:
    seen: list[list[bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append([])
        for _ in range(3):
            seen[-1].append(await request(reader))
            writer.write(OK)
        writer.close()

    found = asyncio.run(asked(handler, 3))
    assert [each for each in found if isinstance(each, Exception)] == []
    answer = found[2]
    assert isinstance(answer, HttpAnswer)
    assert (answer.status, answer.body, answer.headers["tessera-first"]) == (200, b"abc", "7")
    ((first, _, third),) = seen
    assert first.startswith(b"POST /at/v1?x=1 HTTP/1.1\r\n") and b"value\r\n" in first
    assert first.endswith(b"\r\n\r\n0") and third.endswith(b"\r\n\r\n2")


def test_a_connection_that_was_closed_in_between_is_made_again() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)
        writer.close()

    async def slowly() -> list[HttpAnswer | Exception]:
        async with serving(handler) as port:
            line = LeaderConnection(f"http://127.0.0.1:{port}", None, patience=20.0, most=100)
            found: list[HttpAnswer | Exception] = []
            for _ in range(3):
                found.append(await line.ask("GET", "/", {}))
                await asyncio.sleep(0.05)  # the end of the connection is noticed
            line.close()
            return found

    assert all(isinstance(each, HttpAnswer) for each in asyncio.run(slowly()))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 3,
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 100_000,
    ],
)
def test_after_what_is_no_answer_the_next_request_has_a_new_connection(
    answer: bytes,
) -> None:
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await request(reader)
        writer.write(OK if connections == 2 else answer)
        writer.close()

    first, second = asyncio.run(asked(handler, 2))
    assert isinstance(first, NoAnswer)
    assert isinstance(second, HttpAnswer) and second.body == b"abc"


def test_nobody_there_is_no_answer() -> None:
    async def ask() -> None:
        await LeaderConnection("http://127.0.0.1:9", None, patience=20.0, most=100).ask(
            "GET", "/", {}
        )

    with pytest.raises(NoAnswer):
        asyncio.run(ask())


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_beyond_its_cap_is_not_read_to_its_end(chunked: bool) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        about = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 1000000000"
        writer.write(b"HTTP/1.1 200 OK\r\n" + about + b"\r\n\r\n")
        while True:
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n" if chunked else b"x" * 1024)
            await writer.drain()

    (found,) = asyncio.run(asked(handler, most=10_000))
    assert isinstance(found, AnswerTooLong)


@pytest.mark.parametrize("opening", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"])
def test_a_byte_now_and_then_does_not_keep_a_request_open(
    monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    monkeypatch.setattr(connection, "LEAST_RATE", 1e9)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(opening)
        while True:
            writer.write(b"H" if opening else b"")
            await asyncio.sleep(0.02)
            await writer.drain()

    started = time.monotonic()
    (found,) = asyncio.run(asked(handler, patience=0.3))
    assert isinstance(found, NoAnswer)
    assert time.monotonic() - started < 15, "1,000 bytes would take 20 seconds"
