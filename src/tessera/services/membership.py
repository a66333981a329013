"""Who is in a group with whom, in folders of keys: written by `tessera keys`, checked by clients.

    authority/    beacon.key: the chain whose value is revealed last
                  newcomers-N, snapshot-N (signed), drawn-N: the snapshot with what was revealed
    leader/       beacon.key: the other chain; value-N: what it has revealed
                  newcomers-N, snapshot-N, drawn-N: what it was shown
    client-N/     group-proof: its own leaf and its peers', with paths, and the snapshots before

Each file is written once, and whole. Who is new in a snapshot is decided with `newcomers-N`, before
a value is revealed, and what comes of it with the authority's `drawn-N`: groups, or a void
snapshot. All else follows, so that a call that was killed is gone on with to the same bytes, and no
number is drawn twice. The leader's `drawn-N` comes last.

A client's folder has no other client's key. What it pins is not in the proof: the authority's key,
and the digest of the latest snapshot before its own, in the directory that the authority has signed
for it.

With `tessera keys` one operator holds both chains, and could have drawn groups as it likes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.hash_chain import VALUE_BYTES, HashChain
from tessera.crypto.keys import SigningKey
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, WireError
from tessera.ids import ClientId
from tessera.plan import Plan
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.membership.beacon import (
    BeaconParty,
    BeaconValue,
    chain_context,
    fresh_chain,
)
from tessera.protocols.membership.draw import Draw, proof_of
from tessera.protocols.membership.proof import (
    CheckedGroup,
    GroupProof,
    Pinned,
    SnapshotLink,
    verify,
)
from tessera.protocols.membership.snapshot import (
    PARTIES,
    ClientSnapshot,
    Newcomers,
    first_snapshot,
    next_snapshot,
)
from tessera.runs.folder import write_owner_only
from tessera.services.journal import GROUP, VOID_BEFORE, Journal

T = TypeVar("T")

PROOF: Final = "group-proof"
BEACON: Final = "beacon.key"
NEWCOMERS: Final = "newcomers-{}"
SNAPSHOT: Final = "snapshot-{}"
VALUE: Final = "value-{}"
DRAWN: Final = "drawn-{}"
CHAIN: Final = 1024
"""Snapshots that a federation has values for."""


def leaves_of(federation: str, keys: Mapping[ClientId, bytes]) -> tuple[Leaf, ...]:
    """Clients as a snapshot numbers them: by their ids."""
    return tuple(
        Leaf(federation=federation, client=client, key=key, serial=0)
        for client, key in sorted(keys.items())
    )


def write_once(path: Path, content: bytes) -> None:
    """A file that never changes, whole and on disk when this returns; with other content than it
    has already it is refused."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        write_owner_only(draft, content)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # by another process, just now
        finally:
            draft.unlink()
        _sync(path.parent)
    if path.read_bytes() != content:
        raise ConfigError(
            f"{path}: was written before, with other content, and is left as it is",
            hint="one `tessera keys` at a time, in the folder as it was made",
        )


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# --- whoever runs `tessera keys` ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """All snapshots of a federation, and both parties of its beacon in one hand: the leader reveals
    first, the authority last."""

    authority: Path
    leader: Path
    keys: tuple[SigningKey, SigningKey] = field(repr=False)
    """The leader's and the authority's."""
    size: int

    def begin(self, federation: str, entropy: Entropy) -> None:
        """New chains, and snapshot 0, which commits to both."""
        chains = [fresh_chain(federation, party, CHAIN, entropy) for party in range(PARTIES)]
        empty = first_snapshot(federation, [chain.commitment for chain in chains], self.keys[-1])
        for folder, chain in zip((self.leader, self.authority), chains, strict=True):
            write_once(folder / BEACON, chain.last.reveal())
            self._store(folder, empty, Newcomers(leaves=()))
            write_once(folder / DRAWN.format(0), wire.encode(SnapshotLink(snapshot=empty)))

    @property
    def draws(self) -> list[Draw]:
        """What is decided, from snapshot 0 on."""
        return read_draws(self.authority, self.size)

    @property
    def pending(self) -> Newcomers | None:
        """Who is new in a snapshot that was begun and that the leader does not have yet."""
        number = 0
        while (self.leader / DRAWN.format(number)).exists():
            number += 1
        return self._newcomers(number)

    def _newcomers(self, number: int) -> Newcomers | None:
        path = self.authority / NEWCOMERS.format(number)
        return _read(path, Newcomers) if path.exists() else None

    def admit(self, newcomers: Sequence[Leaf]) -> None:
        """Who is new in the next snapshot: from here on it is these and no others."""
        number = len(self.draws)
        if number > CHAIN:
            raise ConfigError(
                f"snapshot {number}: both chains of the beacon end with {CHAIN}",
                hint="newcomers begin a federation of their own",
            )
        path = self.authority / NEWCOMERS.format(number)
        write_once(path, wire.encode(Newcomers(leaves=tuple(newcomers))))

    def draw(self) -> Draw:
        """Groups of the snapshot that was begun; if it is void already it stays so."""
        draws = self.draws
        number = len(draws)
        if (newcomers := self._newcomers(number)) is not None:  # or it is decided
            snapshot, leaves = self._signed(draws, newcomers)
            after, first = self._party(0).reveal(snapshot, leaves)
            self._store(self.leader, after.latest, newcomers)
            write_once(self.leader / VALUE.format(number), wire.encode(first))
            _, last = self._party(1).reveal(snapshot, leaves, first)
            link = SnapshotLink(snapshot=snapshot, reveals=(first, last))
            write_once(self.authority / DRAWN.format(number), wire.encode(link))
        return self.draws[-1]

    def void(self) -> Draw:
        """Give up the snapshot that was begun: a value is missing, for good, and all will see."""
        draws = self.draws
        number = len(draws)
        if (newcomers := self._newcomers(number)) is None:
            if draws[-1].void and self.pending is not None:
                return draws[-1]  # it is, and not everybody knows
            raise ConfigError(
                "no snapshot waits for a value of the beacon",
                hint="--void gives up one that a call with --add has begun and not ended",
            )
        snapshot, _ = self._signed(draws, newcomers)
        path = self.leader / VALUE.format(number)
        reveals = (_read(path, BeaconValue),) if path.exists() else ()
        link = SnapshotLink(snapshot=snapshot, reveals=reveals)
        write_once(self.authority / DRAWN.format(number), wire.encode(link))
        return self.draws[-1]

    def publish(self, folder_of: Callable[[ClientId], Path]) -> None:
        """Proofs for whoever has a group of the last snapshot; then the leader has it, too."""
        draws = self.draws
        last = draws[-1]
        for client in last.members:
            folder = folder_of(client)
            folder.mkdir(mode=0o700, exist_ok=True)  # it may have been handed over already
            write_once(folder / PROOF, wire.encode(proof_of(draws, client)))
        number = last.snapshot.number
        newcomers = self._newcomers(number)
        assert newcomers is not None
        self._store(self.leader, last.snapshot, newcomers)
        link = SnapshotLink(snapshot=last.snapshot, reveals=last.reveals)
        write_once(self.leader / DRAWN.format(number), wire.encode(link))

    def _signed(
        self, draws: Sequence[Draw], newcomers: Newcomers
    ) -> tuple[ClientSnapshot, tuple[Leaf, ...]]:
        """The snapshot of those who wait and of newcomers, on the authority's disk."""
        leaves = (*draws[-1].left_over, *newcomers.leaves)
        snapshot = next_snapshot(draws[-1].snapshot, leaves, self.keys[-1])
        self._store(self.authority, snapshot, newcomers)
        return snapshot, leaves

    @staticmethod
    def _store(folder: Path, snapshot: ClientSnapshot, newcomers: Newcomers) -> None:
        write_once(folder / NEWCOMERS.format(snapshot.number), wire.encode(newcomers))
        write_once(folder / SNAPSHOT.format(snapshot.number), wire.encode(snapshot))

    def _party(self, party: int) -> BeaconParty:
        """As its folder has it."""
        folder, number = (self.leader, self.authority)[party], 0
        while (folder / SNAPSHOT.format(number + 1)).exists():
            number += 1
        latest, path = _read(folder / SNAPSHOT.format(number), ClientSnapshot), folder / BEACON
        secret = path.read_bytes() if path.exists() else b""
        if len(secret) != VALUE_BYTES:
            waiting = self.draws[-1].snapshot.number + 1
            raise ConfigError(
                f"snapshot {waiting} waits for a value of the beacon: there is no chain in {path}",
                hint="put the file back and run the same command again; or --void gives this "
                "snapshot up, which all clients will see",
            )
        return BeaconParty(
            party=party,
            chain=HashChain(Secret(secret), CHAIN, chain_context(latest.federation, party)),
            key=self.keys[party],
            authority=self.keys[-1].public,
            first_key=self.keys[0].public,
            latest=latest,
        )


# --- the leader -----------------------------------------------------------------------------------


def read_draws(folder: Path, size: int) -> list[Draw]:
    """The snapshots from 0 on, as a party's folder has them."""
    draws: list[Draw] = []
    while (path := folder / DRAWN.format(len(draws))).exists():
        link = _read(path, SnapshotLink)
        newcomers = _read(folder / NEWCOMERS.format(len(draws)), Newcomers)
        leaves = (*(draws[-1].left_over if draws else ()), *newcomers.leaves)
        try:
            draw = Draw(snapshot=link.snapshot, leaves=leaves, size=size, reveals=link.reveals)
        except MisuseError as error:
            raise ConfigError(f"{path}: {error}", hint="take the folder as it was made") from error
        draws.append(draw)
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


def join_group(journal: Journal, party: str, found: CheckedGroup) -> None:
    """On disk before anything is sent to it, and for good."""
    with journal.step():
        journal.set_fact(party, GROUP, wire.encode(found.group))
        journal.set_fact(party, VOID_BEFORE, str(found.void).encode())


def _read(path: Path, kind: type[T]) -> T:
    try:
        found: T = wire.decode(path.read_bytes(), expect=[kind])
    except (WireError, FileNotFoundError) as error:
        raise ConfigError(
            f"{path}: not what `tessera keys` wrote: {error}",
            hint="take the folder as it was made",
        ) from error
    return found
