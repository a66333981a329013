"""A fixed group: the same few clients for life, by the leaves of the snapshot they come from.

Both records are public. How a client checks that a group is the one that the beacon gives is in
`protocols/membership/`; here a group is a value that everybody in it has alike, and its digest is
where its hash chain begins.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Final

from tessera import wire
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId

MAX_GROUP: Final = 256
"""The most members: each verifies a signature of, and agrees on a key with, every other one."""


@wire.record(tag=0x0701)
@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One client in a snapshot: the certificate of the key that its messages are checked with."""

    federation: Annotated[str, wire.TEXT]
    client: Annotated[ClientId, wire.U32]
    key: Annotated[bytes, wire.KEY] = field(repr=False)
    """Ed25519."""
    serial: Annotated[int, wire.U64]
    expiry: Annotated[int, wire.U64] = 0
    """Seconds since 1970; 0: it does not expire."""

    @property
    def digest(self) -> bytes:
        """Of its encoding: what the snapshot's tree has in this leaf's place."""
        return wire.digest(self)


@wire.record(tag=0x0702)
@dataclass(frozen=True, kw_only=True)
class FixedGroup:
    """One fixed group; everybody in it has the same record.

    `plan` is the digest of what may not change in the group's life. `values` are what the two
    parties of the beacon revealed for this snapshot, and `beacon` is the digest of both with the
    snapshot's. `leaves` are in the order of the permutation.
    """

    federation: Annotated[str, wire.TEXT]
    plan: Annotated[bytes, wire.KEY] = field(repr=False)
    number: Annotated[int, wire.U32]
    """Of the group within its snapshot, from 0."""
    snapshot: Annotated[int, wire.U64]
    snapshot_digest: Annotated[bytes, wire.KEY] = field(repr=False)
    values: Annotated[tuple[bytes, ...], wire.Sequence(wire.KEY, 2)] = field(repr=False)
    beacon: Annotated[bytes, wire.KEY] = field(repr=False)
    leaves: Annotated[tuple[Leaf, ...], wire.Sequence(wire.Nested(Leaf), MAX_GROUP)]

    def __post_init__(self) -> None:
        leaves = self.leaves
        if not 2 <= len(leaves) <= MAX_GROUP:
            raise ConfigError(
                f"group {self.number}: {len(leaves)} members; 2 to {MAX_GROUP} are supported, "
                "and a group of one would send its vector without a mask"
            )
        if len(set(self.members)) < len(leaves) or len({leaf.key for leaf in leaves}) < len(leaves):
            raise ConfigError(f"group {self.number}: a client or a key is in it twice")
        if any(leaf.federation != self.federation for leaf in leaves):
            raise ConfigError(f"group {self.number}: a leaf of another federation")
        if len(self.values) != 2:
            raise ConfigError(f"group {self.number}: the beacon has {len(self.values)} values of 2")

    @property
    def size(self) -> int:
        return len(self.leaves)

    @cached_property
    def members(self) -> tuple[ClientId, ...]:
        """In the order of the leaves."""
        return tuple(leaf.client for leaf in self.leaves)

    def key_of(self, client: ClientId) -> bytes:
        """The key that a member's signatures are checked with; KeyError for anybody else."""
        return {leaf.client: leaf.key for leaf in self.leaves}[client]

    @cached_property
    def digest(self) -> bytes:
        """h_0, the beginning of the group's chain."""
        named = encode_context(
            Label.GROUP_CHAIN,
            self.federation,
            self.plan,
            self.number,
            self.snapshot,
            self.snapshot_digest,
            *self.values,
            self.beacon,
            *(leaf.digest for leaf in self.leaves),
        )
        return hashlib.sha256(named).digest()


class OfGroup:
    """Of a set-up record: the group whose member or server it sets up."""

    group: FixedGroup

    @property
    def round_id(self) -> RoundId:
        """The group's number, which stands where roles of one round have the round's."""
        return RoundId(self.group.number)

    @property
    def context(self) -> bytes:
        return self.group.digest
