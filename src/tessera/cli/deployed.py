"""What the commands of a deployment share: options, entropy, and where parties keep things."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera.crypto.entropy import Entropy, ScriptedEntropy, SystemEntropy
from tessera.errors import ConfigError
from tessera.services.http import is_loopback

BundleFile = Annotated[Path, typer.Argument(metavar="BUNDLE", help="What `tessera pack` wrote.")]
Keys = Annotated[Path, typer.Option(help="The party's folder of keys.")]
State = Annotated[Path, typer.Option(help="The party's folder of state; one process at a time.")]
TestEntropy = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Derive every secret from TEXT. Loopback only, for tests."),
]
PlainHttp = Annotated[
    bool, typer.Option("--plain-http", help="Without TLS; on loopback addresses only.")
]


def entropy_of(script: str | None, host: str) -> Entropy:
    """The system's generator, or scripted entropy on loopback, with a warning."""
    if script is None:
        return SystemEntropy()
    if not is_loopback(host):
        raise ConfigError(
            "--insecure-test-entropy outside loopback: anybody could recompute every secret",
            hint="leave it out",
        )
    typer.echo("warning: insecure test entropy: every secret of this process is known", err=True)
    return ScriptedEntropy(script.encode())
