"""A small federation whose groups can be checked: keys, snapshots, values and proofs for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import SigningKey
from tessera.crypto.secret import Secret
from tessera.ids import ClientId
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.membership.beacon import BeaconParty, BeaconValue, fresh_chain
from tessera.protocols.membership.draw import Draw
from tessera.protocols.membership.proof import CheckedGroup, GroupProof, Pinned, verify
from tessera.protocols.membership.snapshot import (
    ClientSnapshot,
    Newcomers,
    first_snapshot,
    next_snapshot,
)

FEDERATION = "f"
PLAN = b"p" * 32
NOW = 1_800_000_000


def signing_key(name: str) -> SigningKey:
    return SigningKey.from_secret(Secret(hashlib.sha256(name.encode()).digest()))


AUTHORITY, HELPER_KEY = signing_key("authority"), signing_key("helper")


def leaf(client: int, *, expiry: int = 0, serial: int = 0) -> Leaf:
    key = hashlib.sha256(b"client %d" % client).digest()
    return Leaf(
        federation=FEDERATION, client=ClientId(client), key=key, serial=serial, expiry=expiry
    )


def leaves(clients: Iterable[int]) -> tuple[Leaf, ...]:
    return tuple(leaf(client) for client in clients)


@dataclass
class Registry:
    """Whoever runs the snapshots, and both parties of the beacon; `draws` begins with snapshot 0.

    The helper is the first party and the authority, which also signs the snapshots, the second.
    """

    size: int = 5
    seed: bytes = b"groups"
    draws: list[Draw] = field(default_factory=list)

    def __post_init__(self) -> None:
        entropy = ScriptedEntropy(self.seed)
        chains = [fresh_chain(FEDERATION, party, 64, entropy) for party in range(2)]
        first = first_snapshot(FEDERATION, [chain.commitment for chain in chains], AUTHORITY)
        self.draws.append(Draw(snapshot=first, leaves=(), size=self.size))
        self.parties = [
            BeaconParty(
                party=party,
                chain=chains[party],
                key=key,
                authority=AUTHORITY.public,
                first_key=HELPER_KEY.public,
                latest=first,
            )
            for party, key in enumerate((HELPER_KEY, AUTHORITY))
        ]

    def snapshot(self, clients: tuple[Leaf, ...]) -> ClientSnapshot:
        return next_snapshot(self.draws[-1].snapshot, clients, AUTHORITY)

    def reveals(
        self, snapshot: ClientSnapshot, clients: tuple[Leaf, ...]
    ) -> tuple[BeaconValue, ...]:
        self.parties[0], first = self.parties[0].reveal(snapshot, clients)
        self.parties[1], second = self.parties[1].reveal(snapshot, clients, first)
        return first, second

    def draw(self, newcomers: Iterable[Leaf], *, void: bool = False) -> Draw:
        """The next snapshot: those who wait, and newcomers; without the last value if void."""
        clients = (*self.draws[-1].left_over, *newcomers)
        snapshot = self.snapshot(clients)
        reveals = self.reveals(snapshot, clients)[: 1 if void else 2]
        made = Draw(snapshot=snapshot, leaves=clients, size=self.size, reveals=reveals)
        self.draws.append(made)
        return made

    def pinned(self, *, anchor: int = 0, small: bool = False, one_operator: bool = False) -> Pinned:
        return Pinned(
            federation=FEDERATION,
            plan=PLAN,
            size=self.size,
            authority=AUTHORITY.public,
            parties=(HELPER_KEY.public, AUTHORITY.public),
            anchor=self.draws[anchor].snapshot.digest,
            anchor_number=anchor,
            small=small,
            one_operator=one_operator,
        )

    def proof(self, client: int, *, anchor: int = 0) -> GroupProof:
        *before, last = self.draws[anchor:]
        return last.proof(ClientId(client), before)


def check(
    proof: GroupProof,
    pinned: Pinned,
    client: int,
    *,
    now: int = NOW,
    joined: FixedGroup | None = None,
) -> CheckedGroup:
    return verify(proof, pinned, ClientId(client), leaf(client).key, now=now, joined=joined)


def records() -> list[bytes]:
    """Every record of a proof, encoded."""
    registry = Registry()
    registry.draw(leaves(range(53)))
    waiting = int(registry.draws[-1].left_over[0].client)
    registry.draw(leaves(range(53, 110)))
    while registry.draws[-1].group_of(ClientId(waiting)) is None:
        registry.draw(leaves(range(200 * len(registry.draws), 200 * len(registry.draws) + 57)))
    proof = registry.proof(waiting)
    link = proof.history[1]
    kinds = (proof, link, link.snapshot, link.reveals[0], link.left_over, proof.members[0])
    group = check(proof, registry.pinned(), waiting).group
    kinds = (*kinds, Newcomers(leaves=leaves(range(200, 203))))
    return [wire.encode(each) for each in (*kinds, group, group.leaves[0])]
