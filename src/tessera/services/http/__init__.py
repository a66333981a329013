"""Services over HTTP: the leader listens; clients and the helper dial it, post and poll.

    GET  /v1/standing?after=R&received=N           its next round behind R
    POST /v1/messages?round=R&received=N&first=M   its messages from M on, none or several; answered
                                                   with the leader's behind N, waited for
    GET  /healthz, /readyz                         whether it is alive, and leads rounds
    GET  /metrics, /status                         for operators, with their token

Both acknowledge the leader's N messages of R, and the answer says how many of the sender's are on
the leader's disk: one request in each stage of a round, and none that only acknowledges.

Every request under /v1 is signed by its sender, with the time and a nonce (`requests.py`). Outside
loopback the leader speaks TLS only.
"""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec
from typing import Final

from tessera.errors import ConfigError, install

NEEDED: Final = ("starlette", "uvicorn", "h11", "prometheus_client")
FIRST, RECEIVED, REFUSED = "tessera-first", "tessera-received", "tessera-refused"
"""Headers of an answer: the number of its first message, how many of the sender's messages are on
the leader's disk, and why the last of them does not count."""
WAIT = "tessera-wait"
"""Header of a request: for how many seconds its sender waits for an answer."""

for _name in NEEDED:
    if find_spec(_name) is None:
        raise ConfigError(
            f"services over HTTP need {_name}, which is not installed",
            hint=install("http"),
        )


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    try:
        return ipaddress.ip_address(
            "127.0.0.1" if host == "localhost" else host.strip("[]")
        ).is_loopback
    except ValueError:
        return False
