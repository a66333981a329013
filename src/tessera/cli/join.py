"""`tessera join`: one client of a deployment, or many over one state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from tessera.cli.deployed import BundleFile, State, TestEntropy, entropy_of
from tessera.cli.format import DataFolder
from tessera.crypto.entropy import Entropy
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.runs.logs import JsonLog
from tessera.services.bundle import Bundle
from tessera.services.deployment import Account, ClientMaker, open_clients, synthetic_maker
from tessera.services.http.dialer import dial
from tessera.services.keyring import Keyring, folder_of
from tessera.services.offered_rows import OneGroup


def join(
    bundle: BundleFile,
    leader: Annotated[str, typer.Argument(metavar="URL", help="The leader's address.")],
    keys: Annotated[
        Path, typer.Option(help="The client's folder of keys; with --clients the one above it.")
    ],
    state: State,
    client: Annotated[int | None, typer.Option(help="Which client this is.")] = None,
    clients: Annotated[
        str | None, typer.Option(metavar="A-B", help="Host these clients over one state.")
    ] = None,
    data: DataFolder = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where this account keeps which rows met which group, for all federations "
            "(default: $XDG_STATE_HOME/tessera).",
        ),
    ] = None,
    accept_identification: Annotated[
        bool,
        typer.Option(
            "--accept-identification",
            help="Offer rows that have met another group: whose they are can then be found, B = 1.",
        ),
    ] = False,
    insecure_test_entropy: TestEntropy = None,
) -> int:
    """Take part in rounds: as one client of the bundle's task, or a synthetic one."""
    packed = Bundle.read(bundle)
    entropy = entropy_of(insecure_test_entropy, urlsplit(leader).hostname or "")
    if (client is None) == (clients is None):
        raise ConfigError("one of --client and --clients says who joins", hint="--client 3")
    if client is not None:
        keyrings = [Keyring.read(keys, ClientId(client), packed.digest)]
    else:
        keyrings = [
            Keyring.read(keys / folder_of(each), each, packed.digest)
            for each in several(clients or "")
        ]
    services = open_clients(
        packed,
        keyrings,
        Path(state),
        entropy,
        maker(packed, data, entropy),
        Account(home, accept_identification),
    )
    for service in services:
        periods = service.local.periods
        if isinstance(periods, OneGroup) and periods.price:
            typer.echo(f"warning: {periods.price}", err=True)
    with services[0].journal:
        party = f"client {client}" if client is not None else f"clients {clients}"
        members = list(zip(services, keyrings, strict=True))
        return dial(leader, members, packed.plan.service, JsonLog(party))


def maker(bundle: Bundle, data: Path | None, entropy: Entropy) -> ClientMaker:
    """Who the clients are, and what they train on."""
    if bundle.synthetic is not None:
        return synthetic_maker(bundle)
    from tessera.services.task_clients import task_maker

    return task_maker(bundle, data, entropy)


def several(text: str) -> list[ClientId]:
    """`0-999`, both included."""
    first, dash, last = text.partition("-")
    if not dash or not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
        raise ConfigError(f"--clients {text!r}", hint="write them as 0-999")
    return [ClientId(c) for c in range(int(first), int(last) + 1)]
