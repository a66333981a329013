"""`tessera keys`: a folder of keys for every party of a deployment, and a signed directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.deployed import BundleFile, TestEntropy, entropy_of
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.services.bundle import Bundle
from tessera.services.keyring import make_keys


def keys(
    bundle: BundleFile,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("keys"),
    clients: Annotated[
        int | None, typer.Option(help="How many, from 0 (default: as many as were packed).")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address of leader or helper, for certificates; repeatable."),
    ] = None,
    insecure_test_entropy: TestEntropy = None,
) -> None:
    """Make signing keys, the helper's box key, TLS certificates and a signed directory."""
    packed = Bundle.read(bundle)
    hosts = host or ["127.0.0.1", "localhost"]
    count = packed.clients if clients is None else clients
    if count < packed.plan.cohort:
        raise ConfigError(
            f"--clients {count}: a cohort has {packed.plan.cohort}", hint="make keys for more"
        )
    entropy = entropy_of(insecure_test_entropy, hosts[0])
    make_keys(
        out, packed.digest, packed.plan.federation, map(ClientId, range(count)), entropy, hosts
    )
    typer.echo(f"{out}: keys of leader, helper and {count} clients; keep {out}/authority away")
