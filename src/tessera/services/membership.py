"""Who is in a group with whom, in folders of keys: written by `tessera keys`, checked by clients.

    authority/    snapshot-N, signed; beacon.key, the chain whose value is revealed last
    leader/       drawn-N: the snapshot with both values of the beacon; beacon.key, the other chain
    client-N/     group-proof: its own leaf and its peers', with paths, and the snapshots before

A client's folder has no other client's key. What it pins is not in the proof: the authority's key,
and the digest of snapshot 0 in the directory that the authority has signed for it.

With `tessera keys` one operator holds both chains, and could have drawn groups as it likes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import SigningKey
from tessera.errors import ConfigError, MisuseError, WireError
from tessera.ids import ClientId
from tessera.plan import Plan
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.membership.beacon import BeaconParty, fresh_chain
from tessera.protocols.membership.draw import Draw
from tessera.protocols.membership.proof import (
    CheckedGroup,
    GroupProof,
    Pinned,
    SnapshotLink,
    verify,
)
from tessera.protocols.membership.snapshot import PARTIES, first_snapshot, next_snapshot
from tessera.runs.folder import write_owner_only
from tessera.services.journal import GROUP, Journal

T = TypeVar("T")

PROOF: Final = "group-proof"
BEACON: Final = "beacon.key"
SNAPSHOT: Final = "snapshot-{}"
DRAWN: Final = "drawn-{}"
CHAIN: Final = 1024
"""Snapshots that a federation has values for."""


def leaves_of(federation: str, keys: Mapping[ClientId, bytes]) -> tuple[Leaf, ...]:
    """Clients as a snapshot numbers them: by their ids."""
    return tuple(
        Leaf(federation=federation, client=client, key=key, serial=0)
        for client, key in sorted(keys.items())
    )


# --- whoever runs `tessera keys` ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beacon:
    """Both parties of a beacon in one hand: the leader reveals first, the authority last."""

    parties: tuple[BeaconParty, ...]

    @property
    def anchor(self) -> bytes:
        """The digest of the latest snapshot, which newcomers are told."""
        return self.parties[-1].latest.digest

    @classmethod
    def fresh(
        cls, federation: str, leader: SigningKey, authority: SigningKey, entropy: Entropy
    ) -> Beacon:
        """New chains, and snapshot 0, which commits to both."""
        chains = [fresh_chain(federation, party, CHAIN, entropy) for party in range(PARTIES)]
        first = first_snapshot(federation, [chain.commitment for chain in chains], authority)
        return cls(
            tuple(
                BeaconParty(
                    party=party,
                    chain=chains[party],
                    key=key,
                    authority=authority.public,
                    first_key=leader.public,
                    latest=first,
                )
                for party, key in enumerate((leader, authority))
            )
        )


def write_groups(
    authority: Path,
    leader: Path,
    clients: Mapping[ClientId, Path],
    keys: Mapping[ClientId, bytes],
    size: int,
    beacon: Beacon,
) -> None:
    """Draw the groups of snapshot 1 and write what these folders have of them.

    A snapshot is in the authority's folder before a value is revealed for it.
    """
    first, last = beacon.parties
    empty, signer = last.latest, last.key
    for party, folder in ((first, leader), (last, authority)):
        write_owner_only(folder / BEACON, party.chain.last.reveal())
    leaves = leaves_of(empty.federation, keys)
    snapshot = next_snapshot(empty, leaves, signer)
    for each in (empty, snapshot):
        write_owner_only(authority / SNAPSHOT.format(each.number), wire.encode(each))
    _, value = first.reveal(snapshot, leaves)
    _, other = last.reveal(snapshot, leaves, value)
    before = Draw(snapshot=empty, leaves=(), size=size)
    drawn = Draw(snapshot=snapshot, leaves=leaves, size=size, reveals=(value, other))
    for draw in (before, drawn):
        link = SnapshotLink(snapshot=draw.snapshot, reveals=draw.reveals)
        write_owner_only(leader / DRAWN.format(draw.snapshot.number), wire.encode(link))
    for client, folder in clients.items():
        if drawn.group_of(client) is not None:
            write_owner_only(folder / PROOF, wire.encode(drawn.proof(client, [before])))


# --- the leader -----------------------------------------------------------------------------------


def read_draws(folder: Path, keys: Mapping[ClientId, bytes], size: int) -> list[Draw]:
    """The snapshots from 0 on, as the leader's folder has them."""
    draws: list[Draw] = []
    while (path := folder / DRAWN.format(len(draws))).exists():
        link = _read(path, SnapshotLink)
        snapshot = link.snapshot
        leaves = leaves_of(snapshot.federation, keys) if snapshot.leaves else ()
        try:
            draws.append(Draw(snapshot=snapshot, leaves=leaves, size=size, reveals=link.reveals))
        except MisuseError as error:
            raise ConfigError(
                f"{path}: {error} than those of the directory", hint="take both from one folder"
            ) from error
    if not draws:
        raise ConfigError(
            f"{folder}: keys without groups, and the plan has fixed groups",
            hint="`tessera keys` draws them",
        )
    return draws


def groups_of(draws: Sequence[Draw], plan: Plan) -> list[FixedGroup]:
    """All groups that were drawn, in the order of their numbers."""
    digest = plan.lasting_digest
    return [draw.group(k, digest) for draw in draws if not draw.void for k in range(draw.groups)]


# --- a client -------------------------------------------------------------------------------------


def checked_group(
    folder: Path, pinned: Pinned, client: ClientId, key: bytes, joined: FixedGroup | None
) -> CheckedGroup:
    """This client's group, or a `GroupFault` that says what is wrong with its proof."""
    path = folder / PROOF
    if not path.exists():
        raise ConfigError(
            f"{folder}: client {client} was left over when groups of {pinned.size} were drawn",
            hint="it takes part from the next snapshot on",
        )
    proof = _read(path, GroupProof)
    return verify(proof, pinned, client, key, now=int(time.time()), joined=joined)


def joined_group(journal: Journal, party: str) -> FixedGroup | None:
    """The group that this client has joined; None before it has."""
    stored = journal.fact(party, GROUP)
    if stored is None:
        return None
    found: FixedGroup = wire.decode(stored, expect=[FixedGroup])
    return found


def join_group(journal: Journal, party: str, group: FixedGroup) -> None:
    """On disk before anything is sent to it, and for good."""
    with journal.step():
        journal.set_fact(party, GROUP, wire.encode(group))


def _read(path: Path, kind: type[T]) -> T:
    try:
        found: T = wire.decode(path.read_bytes(), expect=[kind])
    except WireError as error:
        raise ConfigError(
            f"{path}: not what `tessera keys` wrote: {error}",
            hint="take the folder as it was made",
        ) from error
    return found
