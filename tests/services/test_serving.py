"""Listening sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

pytest.importorskip("uvicorn")

from tessera.errors import ConfigError
from tessera.services.http.serving import Address


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_answer_in_two_parts_does_not_wait_for_an_acknowledgement(host: str) -> None:
    """Nagle's algorithm is off on accepted connections: it cost 40 ms in every stage."""

    async def accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def connected(_: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
            sock = line.get_extra_info("socket")
            found.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            line.close()

        try:
            listening = Address(host, 0).bound()
        except ConfigError as error:  # a machine without IPv6
            pytest.skip(str(error))
        async with await asyncio.start_server(connected, sock=listening):
            _, line = await asyncio.open_connection(host, listening.getsockname()[1])
            value = await asyncio.wait_for(found, 10)
            line.close()
        return value

    assert asyncio.run(accepted())
