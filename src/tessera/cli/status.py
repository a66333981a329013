"""`tessera status`: where a deployment is, from a running leader or from a party's state."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.format import AsJson
from tessera.errors import ConfigError
from tessera.services.journal import state_of


def status(
    where: Annotated[
        str, typer.Argument(metavar="URL|DIR", help="A leader's address, or a folder of state.")
    ],
    ca: Annotated[
        Path | None, typer.Option(help="The authority of its certificate (a party's ca.pem).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Round, phase, who is missing, deadline, last rounds, restarts, disk."""
    found = asked(where, ca) if where.startswith(("http://", "https://")) else state_of(Path(where))
    if as_json:
        typer.echo(json.dumps(found))
        return
    rounds = found.pop("rounds", [])
    lines = {name: str(value) for name, value in found.items() if value not in (None, "")}
    for each in rounds:
        detail = each.get("reason") or f"{each.get('survivors')} survivors"
        lines[f"round {each['round']}"] = f"{each['outcome']}: {detail}"
    width = max(map(len, lines), default=0)
    for name, text in lines.items():
        typer.echo(f"{name:{width}}  {text}")


def asked(url: str, ca: Path | None) -> dict[str, Any]:
    """What a running leader says."""
    import httpx

    trust: ssl.SSLContext | bool = True
    if ca is not None:
        trust = ssl.create_default_context(cafile=str(ca))
    try:
        answer = httpx.get(f"{url.rstrip('/')}/status", timeout=10.0, verify=trust, trust_env=False)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(
            f"{url}: {error}", hint="is a leader there? --ca names its authority"
        ) from error
    return found
