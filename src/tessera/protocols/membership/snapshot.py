"""Snapshots: who is put into groups together, signed one after the other.

Snapshot 0 is empty and holds the commitments of both parties of the beacon; snapshot n is drawn
with their values n. A snapshot without both values is void: its clients are in the next one again,
with another number, another digest and the next values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from tessera import wire
from tessera.crypto.hash_chain import MAX_LENGTH
from tessera.crypto.keys import SIGNATURE_BYTES, SigningKey, verify
from tessera.crypto.merkle import MerkleTree
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import (
    ConfigError,
    ForkedSnapshot,
    SkippedSnapshot,
    TwoGroups,
    WrongBeacon,
    WrongMember,
    WrongSignature,
)
from tessera.protocols.epochs.group import Leaf

PARTIES: Final = 2
"""Parties of a beacon. The second one reveals last: in a deployment the authority."""

MAX_SNAPSHOTS: Final = MAX_LENGTH
MAX_NEWCOMERS: Final = 1 << 24
_NOTHING: Final = bytes(32)  # what snapshot 0 has for its predecessor


@wire.record(tag=0x0801)
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSnapshot:
    """A public record, signed by the federation's key. `leaves` is how many there are."""

    federation: Annotated[str, wire.TEXT]
    number: Annotated[int, wire.U64]
    predecessor: Annotated[bytes, wire.KEY] = field(repr=False)
    root: Annotated[bytes, wire.KEY] = field(repr=False)
    leaves: Annotated[int, wire.U32]
    commitments: Annotated[tuple[bytes, ...], wire.Sequence(wire.KEY, PARTIES)] = field(repr=False)
    signature: Annotated[bytes, wire.SIGNATURE] = field(repr=False, default=bytes(SIGNATURE_BYTES))

    def __post_init__(self) -> None:
        if len(self.commitments) != PARTIES:
            raise ConfigError(f"a snapshot has {PARTIES} commitments, not {len(self.commitments)}")
        if not 0 <= self.number <= MAX_SNAPSHOTS:
            raise ConfigError(f"snapshot {self.number}: there are {MAX_SNAPSHOTS} at most")

    @property
    def statement(self) -> bytes:
        """What is signed: everything but the signature."""
        return encode_context(
            Label.SNAPSHOT,
            self.federation,
            self.number,
            self.predecessor,
            self.root,
            self.leaves,
            *self.commitments,
        )

    @property
    def digest(self) -> bytes:
        """Without the signature, of which its signer could make many."""
        return hashlib.sha256(self.statement).digest()

    def signed(self, key: SigningKey) -> ClientSnapshot:
        return replace(self, signature=key.sign(self.statement))

    def check_signature(self, federation: str, key: bytes) -> None:
        if self.federation != federation or not verify(key, self.signature, self.statement):
            raise WrongSignature(
                "is not signed with the key of this federation", snapshot=self.number
            )


@wire.record(tag=0x0807)
@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomers:
    """Who is in a snapshot for the first time; before them stand those left over (`draw.py`).

    What a snapshot's signer stores before it signs: after a restart it signs the same one.
    """

    leaves: Annotated[tuple[Leaf, ...], wire.Sequence(wire.Nested(Leaf), MAX_NEWCOMERS)]


def first_snapshot(
    federation: str, commitments: Sequence[bytes], key: SigningKey
) -> ClientSnapshot:
    """Snapshot 0: no clients, and what both parties of the beacon commit to."""
    return ClientSnapshot(
        federation=federation,
        number=0,
        predecessor=_NOTHING,
        root=MerkleTree(()).root,
        leaves=0,
        commitments=tuple(commitments),
    ).signed(key)


def next_snapshot(
    previous: ClientSnapshot, leaves: Sequence[Leaf], key: SigningKey
) -> ClientSnapshot:
    """The snapshot of these clients, in this order. Store it before any value is asked for."""
    number = previous.number + 1
    if any(leaf.federation != previous.federation for leaf in leaves):
        raise ConfigError(f"snapshot {number}: a client of another federation")
    if (twice := _twice(leaves)) is not None:
        raise ConfigError(f"snapshot {number}: {twice}")
    return ClientSnapshot(
        federation=previous.federation,
        number=number,
        predecessor=previous.digest,
        root=MerkleTree([leaf.digest for leaf in leaves]).root,
        leaves=len(leaves),
        commitments=previous.commitments,
    ).signed(key)


def check_next(previous: ClientSnapshot, snapshot: ClientSnapshot, key: bytes) -> None:
    """Refuse what is not signed, or is not the one snapshot that follows `previous`."""
    number = snapshot.number
    snapshot.check_signature(previous.federation, key)
    if number > previous.number + 1:
        raise SkippedSnapshot(f"came after snapshot {previous.number}", snapshot=number)
    if number <= previous.number or snapshot.predecessor != previous.digest:
        raise ForkedSnapshot(
            f"does not follow from the snapshot {previous.number} that is known", snapshot=number
        )
    if snapshot.commitments != previous.commitments:
        raise WrongBeacon("has other commitments than those before it", snapshot=number)


def check_leaves(snapshot: ClientSnapshot, leaves: Sequence[Leaf]) -> None:
    """Refuse leaves that are not this snapshot's, and a client or a key that has two of them.

    Each party of the beacon does this before it reveals. *Whoever has a client twice in a snapshot
    shows it the better one of two groups, and no path of the client's says so.*
    """
    if MerkleTree([leaf.digest for leaf in leaves]).root != snapshot.root:
        raise WrongMember("is of other leaves than those shown", snapshot=snapshot.number)
    if (twice := _twice(leaves)) is not None:
        raise TwoGroups(twice, snapshot=snapshot.number)


def _twice(leaves: Sequence[Leaf]) -> str | None:
    for what, count in (
        ("client", len({leaf.client for leaf in leaves})),
        ("key", len({leaf.key for leaf in leaves})),
    ):
        if count < len(leaves):
            return f"a {what} is in it twice, and would have two groups"
    return None
