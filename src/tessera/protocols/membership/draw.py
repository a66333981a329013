"""All groups of a snapshot, for whoever numbers the clients and hands out the proofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tessera.crypto.merkle import MerkleTree
from tessera.crypto.shuffle import Points, Shuffle
from tessera.errors import MisuseError
from tessera.ids import ClientId
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.membership.beacon import BeaconValue, beacon
from tessera.protocols.membership.proof import (
    GroupProof,
    OwnPlace,
    PlacedLeaf,
    SnapshotLink,
    groups_in,
)
from tessera.protocols.membership.snapshot import PARTIES, ClientSnapshot


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A snapshot with its leaves in order and what was revealed for it: public, but long."""

    snapshot: ClientSnapshot
    leaves: tuple[Leaf, ...] = field(repr=False)
    size: int
    reveals: tuple[BeaconValue, ...] = ()

    def __post_init__(self) -> None:
        if self._tree.root != self.snapshot.root or self._tree.size != self.snapshot.leaves:
            raise MisuseError(f"snapshot {self.snapshot.number} is of other leaves")

    @property
    def void(self) -> bool:
        """Whether a value is missing, so that there are no groups (yet)."""
        return len(self.reveals) < PARTIES

    @cached_property
    def values(self) -> tuple[bytes, ...]:
        if self.void:
            raise MisuseError(f"snapshot {self.snapshot.number} has no groups: a value is missing")
        return tuple(reveal.value for reveal in self.reveals)

    @cached_property
    def beacon(self) -> bytes:
        return beacon(self.values, self.snapshot.digest)

    @property
    def groups(self) -> int:
        return groups_in(self.snapshot, self.size)

    @property
    def left_over(self) -> tuple[Leaf, ...]:
        """Those who wait for the next snapshot: all of them after a void one."""
        if self.void:
            return self.leaves
        return tuple(self.leaves[at] for at in self._order[self.groups * self.size :])

    def group(self, number: int, plan: bytes) -> FixedGroup:
        return FixedGroup(
            federation=self.snapshot.federation,
            plan=plan,
            number=number,
            snapshot=self.snapshot.number,
            snapshot_digest=self.snapshot.digest,
            values=self.values,
            beacon=self.beacon,
            leaves=tuple(self.leaves[at] for at in self._members(number)),
        )

    def group_of(self, client: ClientId) -> int | None:
        """The number of a client's group; None if it is left over."""
        group = self._place(client) // self.size
        return group if group < self.groups else None

    def proof(self, client: ClientId, before: Sequence[Draw]) -> GroupProof:
        """What this client's folder holds; `before` are the snapshots from its anchor on."""
        group = self.group_of(client)
        if group is None:
            raise MisuseError(f"client {client} is left over in snapshot {self.snapshot.number}")
        anchor, *between = before
        return GroupProof(
            history=(
                SnapshotLink(snapshot=anchor.snapshot, reveals=anchor.reveals),
                *(draw._waited(client) for draw in between),
                SnapshotLink(snapshot=self.snapshot, reveals=self.reveals),
            ),
            number=self._numbers[client],
            members=tuple(self._placed(at) for at in self._members(group)),
        )

    def _waited(self, client: ClientId) -> SnapshotLink:
        own = None
        if not self.void and client in self._numbers and self.group_of(client) is None:
            number = self._numbers[client]
            own = OwnPlace(number=number, placed=self._placed(number))
        return SnapshotLink(snapshot=self.snapshot, reveals=self.reveals, left_over=own)

    def _placed(self, number: int) -> PlacedLeaf:
        return PlacedLeaf(leaf=self.leaves[number], path=self._tree.path(number))

    def _members(self, group: int) -> list[int]:
        if not 0 <= group < self.groups:
            raise MisuseError(f"group {group} of {self.groups}")
        found: list[int] = self._order[group * self.size : (group + 1) * self.size].tolist()
        return found

    def _place(self, client: ClientId) -> int:
        return int(self._places[self._numbers[client]])

    @cached_property
    def members(self) -> tuple[ClientId, ...]:
        """Everybody that has a group of this draw."""
        if self.void:
            return ()
        grouped = self._order[: self.groups * self.size].tolist()
        return tuple(self.leaves[at].client for at in grouped)

    @cached_property
    def _tree(self) -> MerkleTree:
        return MerkleTree([leaf.digest for leaf in self.leaves])

    @cached_property
    def _numbers(self) -> dict[ClientId, int]:
        return {leaf.client: at for at, leaf in enumerate(self.leaves)}

    @cached_property
    def _order(self) -> Points:
        """Leaf numbers in the order of the permutation: every g in a row are a group."""
        count = len(self.leaves)
        return Shuffle(self.beacon, max(1, count)).forward(np.arange(count))

    @cached_property
    def _places(self) -> Points:
        places = np.empty_like(self._order)
        places[self._order] = np.arange(len(self.leaves))
        return places


def proof_of(draws: Sequence[Draw], client: ClientId) -> GroupProof:
    """The proof of a client's group in the last of all draws, from the client's anchor on."""
    first = next(at for at, draw in enumerate(draws) if client in draw._numbers)
    return draws[-1].proof(client, draws[first - 1 : -1])


def void_before(draws: Sequence[Draw]) -> dict[ClientId, int]:
    """For everybody that has a group: void snapshots that it was in before, each one more draw."""
    earlier: dict[ClientId, int] = {}  # void snapshots before a client's first one
    found: dict[ClientId, int] = {}
    void = 0
    for draw in draws:
        for leaf in draw.leaves:
            earlier.setdefault(leaf.client, void)
        for client in draw.members:
            found[client] = void - earlier[client]
        void += draw.void
    return found
