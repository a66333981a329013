"""`tessera serve`: the leader of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.deployed import BundleFile, Keys, PlainHttp, State, TestEntropy, entropy_of
from tessera.ids import SERVER
from tessera.runs.logs import JsonLog
from tessera.services.bundle import Bundle
from tessera.services.deployment import open_leader
from tessera.services.http.serving import Address, lead
from tessera.services.keyring import TLS, TLS_KEY, Keyring


def serve(
    bundle: BundleFile,
    keys: Keys,
    state: State,
    rounds: Annotated[
        int | None, typer.Option(help="End after so many rounds in all (default: never).")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8400,
    plain_http: PlainHttp = False,
    insecure_test_entropy: TestEntropy = None,
) -> int:
    """Lead rounds: clients and the helper dial this address."""
    packed = Bundle.read(bundle)
    certificate = (None, None) if plain_http else (keys / TLS, keys / TLS_KEY)
    address = Address(host, port, *certificate)
    entropy = entropy_of(insecure_test_entropy, host)
    keyring = Keyring.read(keys, SERVER, packed.digest)

    def listening(url: str) -> None:
        typer.echo(json.dumps({"listening": url, "bundle": packed.digest.hex()}))

    return lead(
        lambda: open_leader(packed, keys, Path(state), entropy),
        packed,
        keyring.directory,
        address,
        rounds=rounds,
        log=JsonLog("leader"),
        on_listening=listening,
    )
