"""Requests to a leader, without a client of ours: over a socket, or straight into its app."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tessera.services.http.connection import HttpAnswer


def send(
    method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> HttpAnswer:
    """One request over a connection of its own. `OSError` if nobody answers."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    line = http.client.HTTPConnection(parts.netloc, timeout=10)
    try:
        line.request(method, target, body=body or None, headers=dict(headers or {}))
        found = line.getresponse()
        about = {name.lower(): value for name, value in found.getheaders()}
        return HttpAnswer(found.status, about, found.read())
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        line.close()


def content(answer: HttpAnswer) -> Any:
    return json.loads(answer.body)


class MemoryConnection:
    """A connection to an app in this process; `targets` are what was asked for."""

    def __init__(self, app: Any, targets: list[str] | None = None) -> None:
        self._app, self._targets = app, [] if targets is None else targets

    async def ask(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
    ) -> HttpAnswer:
        self._targets.append(target)
        path, _, query = target.partition("?")
        about = {"host": "leader", "content-length": str(len(body)), **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(n.lower().encode(), v.encode("latin-1")) for n, v in about.items()],
            "server": ("leader", 80),
            "client": ("127.0.0.1", 1),
        }
        to_come = [{"type": "http.request", "body": body, "more_body": False}]
        began: dict[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return to_come.pop() if to_come else {"type": "http.disconnect"}

        async def take(message: dict[str, Any]) -> None:
            began.update(message) if "status" in message else parts.append(message["body"])

        await self._app(scope, receive, take)
        found = {name.decode(): value.decode("latin-1") for name, value in began["headers"]}
        return HttpAnswer(began["status"], found, b"".join(parts))
