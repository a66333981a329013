"""Services over HTTP: the leader listens; clients and the helper dial it, post and poll.

    GET  /v1/standing?after=R&received=N  its next round behind R; acknowledges N messages of R
    GET  /v1/messages?round=R&after=N     its message N + 1, waited for; acknowledges up to N
    POST /v1/messages?round=R&number=N    its own message N, the bytes as the body
    GET  /healthz, /status                for operators

Every request under /v1 is signed by its sender, with the time and a nonce (`requests.py`). Outside
loopback the leader speaks TLS only.
"""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec
from typing import Final

from tessera.errors import ConfigError

NEEDED: Final = ("fastapi", "uvicorn", "httpx")
ROUND, NUMBER = "Tessera-Round", "Tessera-Number"
"""The headers with a message's round, and its number on the link."""

for _name in NEEDED:
    if find_spec(_name) is None:
        raise ConfigError(
            f"services over HTTP need {_name}, which is not installed",
            hint="pip install tessera[http]",
        )


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    try:
        return ipaddress.ip_address(
            "127.0.0.1" if host == "localhost" else host.strip("[]")
        ).is_loopback
    except ValueError:
        return False
