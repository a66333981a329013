"""A client's long-term identity: what signatures in the active setting are verified against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import SigningKey
from tessera.crypto.prg import Label
from tessera.ids import ClientId


@dataclass(frozen=True, slots=True)
class Identity:
    """A client's long-term signing key, and the directory of everybody's public keys."""

    key: SigningKey = field(repr=False)
    directory: Mapping[ClientId, bytes] = field(repr=False)


def identities(
    clients: Iterable[ClientId], entropy: Entropy, federation: str
) -> dict[ClientId, Identity]:
    """A signing key for each client, and the directory that an authority would certify."""
    keys = {
        client: SigningKey.from_secret(entropy.secret(Label.IDENTITY, federation, int(client)))
        for client in clients
    }
    directory = {client: key.public for client, key in keys.items()}
    return {client: Identity(key, directory) for client, key in keys.items()}
