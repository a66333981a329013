"""A client's long-term identity: what signatures in the active setting are verified against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera.crypto.keys import SigningKey
from tessera.ids import ClientId


@dataclass(frozen=True, slots=True)
class Identity:
    """A client's long-term signing key, and the directory of everybody's public keys."""

    key: SigningKey = field(repr=False)
    directory: Mapping[ClientId, bytes] = field(repr=False)
