"""A first carrier over HTTP: one round between processes of one machine.

It shows that the roles need no simulator. It has no TLS, no authentication and no durable storage,
so it accepts loopback addresses only. The leader takes raw message
bytes, keeps a mailbox per client, and its clock closes phases; clients post and poll.

    POST /rounds/{id}/messages?client=C          one message from a client, its bytes as the body
    GET  /rounds/{id}/messages?client=C&after=N  the client's message N + 1, waited for
    GET  /rounds/{id}/status                     where the round is, as JSON
"""

from __future__ import annotations

import ipaddress
import sys
from importlib.util import find_spec
from typing import Final

from tessera.crypto.entropy import Entropy, ScriptedEntropy, SystemEntropy
from tessera.errors import ConfigError, TesseraError

NEEDED: Final = ("fastapi", "uvicorn", "httpx")

NUMBER: Final = "Tessera-Message"
"""The header with a message's number in its mailbox, from 1."""

for _name in NEEDED:
    if find_spec(_name) is None:
        raise ConfigError(
            f"rounds over HTTP need {_name}, which is not installed",
            hint="pip install tessera[http]",
        )


def loopback(host: str) -> str:
    """The address to use for `host`; a ConfigError unless it stays on this machine."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise ConfigError(
            f"{host!r} is not a loopback address, and this carrier has neither TLS nor "
            "authentication",
            hint="use 127.0.0.1; a round between machines needs a real service",
        )
    return str(address)


def entropy_of(script: str | None) -> Entropy:
    """The system's generator, or scripted entropy that anybody can recompute, with a warning."""
    if script is None:
        return SystemEntropy()
    print("warning: insecure test entropy: every secret of this process is known", file=sys.stderr)
    return ScriptedEntropy(script.encode())


def report_error(error: TesseraError) -> int:
    """An error line, a hint where there is one, and the exit status."""
    print(f"error: {error}", file=sys.stderr)
    if error.hint is not None:
        print(f"hint: {error.hint}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1
