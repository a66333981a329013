"""What a client holds about its group, and how it checks it: nobody's word but the signatures'.

A client that hands in its key is told the latest snapshot there is, its `anchor`, and is in every
snapshot from the next one on until it has a group. So for each snapshot after its anchor the proof
shows one of three things: that a value is missing (void, counted: one more draw), that the client
was left over in it, or the client's group. Otherwise whoever knew a group that it disliked could
enter the client anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from tessera import wire
from tessera.crypto import merkle
from tessera.crypto.shuffle import Shuffle
from tessera.errors import (
    ConfigError,
    ExpiredLeaf,
    ForkedSnapshot,
    SkippedSnapshot,
    SmallSnapshot,
    TwoGroups,
    WrongBeacon,
    WrongMember,
)
from tessera.ids import ClientId
from tessera.protocols.epochs.group import MAX_GROUP, FixedGroup, Leaf
from tessera.protocols.membership.beacon import BeaconValue, beacon, check_reveal
from tessera.protocols.membership.snapshot import (
    MAX_SNAPSHOTS,
    PARTIES,
    ClientSnapshot,
    check_next,
)

LEAST_GROUPS: Final = 10
"""Groups of newcomers in a snapshot: in one of g clients, g - 1 sybils would choose the group."""


@wire.record(tag=0x0803)
@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLeaf:
    """A leaf and its path; the number is what the client computes."""

    leaf: Leaf
    path: Annotated[merkle.Path, wire.Sequence(wire.KEY, merkle.MAX_PATH)] = field(repr=False)


@wire.record(tag=0x0804)
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlace:
    """A client's own number in a snapshot, with its leaf."""

    number: Annotated[int, wire.U32]
    placed: PlacedLeaf


@wire.record(tag=0x0805)
@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLink:
    """A snapshot on the way from the client's anchor to its group.

    `reveals` are those of both parties in order, or fewer: then the snapshot is void. `left_over`
    is the client's place in one that was drawn and in which it was left over.
    """

    snapshot: ClientSnapshot
    reveals: Annotated[
        tuple[BeaconValue, ...], wire.Sequence(wire.Nested(BeaconValue), PARTIES)
    ] = ()
    left_over: Annotated[OwnPlace | None, wire.Maybe(wire.Nested(OwnPlace))] = None

    @property
    def void(self) -> bool:
        return len(self.reveals) < PARTIES


@wire.record(tag=0x0806)
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProof:
    """A client's group: snapshots from its anchor on, its number in the last, and all members.

    `members` are in the order of the permutation. Public, as everything in it is.
    """

    history: Annotated[
        tuple[SnapshotLink, ...], wire.Sequence(wire.Nested(SnapshotLink), MAX_SNAPSHOTS)
    ]
    number: Annotated[int, wire.U32]
    members: Annotated[
        tuple[PlacedLeaf, ...], wire.Sequence(wire.Nested(PlacedLeaf), MAX_GROUP)
    ] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What a client has from its plan and from the day it handed in its key; never from a proof.

    `anchor` is the digest of snapshot `anchor_number`, the latest at that time. `one_operator`:
    one operator holds both values of the beacon, or could.
    """

    federation: str
    plan: bytes = field(repr=False)
    size: int
    authority: bytes = field(repr=False)
    parties: tuple[bytes, ...] = field(repr=False)
    anchor: bytes = field(repr=False)
    anchor_number: int = 0
    small: bool = False
    one_operator: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.size <= MAX_GROUP:
            raise ConfigError(f"groups of {self.size}: 2 to {MAX_GROUP} are supported")
        if len(self.parties) != PARTIES:
            raise ConfigError(f"a beacon has {PARTIES} parties, not {len(self.parties)}")
        if len(set(self.parties)) < PARTIES and not self.one_operator:
            raise ConfigError("one key for both values of the beacon: one operator holds both")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroup:
    """A group that follows from what was signed; `void` snapshots came before it, each one more
    draw for whoever withheld a value. `reasons` say what has to be believed."""

    group: FixedGroup
    void: int
    reasons: tuple[str, ...]

    @property
    def on_the_operators_word(self) -> bool:
        return bool(self.reasons)


def groups_in(snapshot: ClientSnapshot, size: int) -> int:
    """How many groups of this size a snapshot gives; the rest is left over."""
    return snapshot.leaves // size


def left_over(snapshot: ClientSnapshot, size: int, *, void: bool) -> int:
    """How many clients of a snapshot are no newcomers in the next one.

    After a void snapshot all of its clients are drawn again together, so that there none are.
    """
    return 0 if void else snapshot.leaves % size


def verify(
    proof: GroupProof,
    pinned: Pinned,
    client: ClientId,
    key: bytes,
    *,
    now: int,
    joined: FixedGroup | None = None,
) -> CheckedGroup:
    """The group of `client`, whose public key is `key`, or a `GroupFault` that says what is wrong.

    `now` is in seconds since 1970. `joined` is the group that this client has already, if any: it
    has one in its life.
    """
    drawn = _check_history(proof.history, pinned, client, key)
    last = proof.history[-1]
    snapshot, at = last.snapshot, last.snapshot.number
    reasons = _reasons(proof.history, pinned)
    shuffle = Shuffle(drawn[at].key, snapshot.leaves)
    place = _place(shuffle, proof.number, snapshot)
    group = place // pinned.size
    if group >= groups_in(snapshot, pinned.size):
        raise WrongMember("leaves this client over: it has no group yet", snapshot=at)
    first = group * pinned.size
    # Computed here and compared with the paths: a path alone would prove membership only.
    numbers = shuffle.forward(range(first, first + pinned.size)).tolist()
    if len(proof.members) != pinned.size:
        raise WrongMember(f"{len(proof.members)} members, {pinned.size} are due", snapshot=at)
    for number, member in zip(numbers, proof.members, strict=True):
        _check_place(member, number, snapshot)
    _check_own(proof.members[place - first].leaf, client, key, at)
    leaves = tuple(member.leaf for member in proof.members)
    _check_leaves(leaves, pinned, now, at)
    found = FixedGroup(
        federation=pinned.federation,
        plan=pinned.plan,
        number=group,
        snapshot=at,
        snapshot_digest=snapshot.digest,
        values=drawn[at].values,
        beacon=drawn[at].key,
        leaves=leaves,
    )
    if joined is not None and joined.digest != found.digest:
        raise TwoGroups(f"client {client} has a group of snapshot {joined.snapshot}", snapshot=at)
    between = proof.history[1:-1]
    return CheckedGroup(group=found, void=sum(link.void for link in between), reasons=reasons)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A snapshot's values and its beacon."""

    values: tuple[bytes, ...]
    key: bytes


def _check_history(
    history: Sequence[SnapshotLink], pinned: Pinned, client: ClientId, key: bytes
) -> dict[int, _Drawn]:
    """Beacons by number; the anchor first, one snapshot after the other, the last one drawn."""
    if len(history) < 2:
        raise SkippedSnapshot("the proof ends before it", snapshot=pinned.anchor_number + 1)
    anchor = history[0].snapshot
    if (anchor.number, anchor.digest) != (pinned.anchor_number, pinned.anchor):
        raise ForkedSnapshot("is not the one that this client was told", snapshot=anchor.number)
    anchor.check_signature(pinned.federation, pinned.authority)
    known: list[tuple[int, bytes] | None] = [None] * PARTIES
    drawn: dict[int, _Drawn] = {}
    for previous, link in zip((None, *history), history, strict=False):
        snapshot = link.snapshot
        if previous is not None:
            check_next(previous.snapshot, snapshot, pinned.authority)
        for party, reveal in enumerate(link.reveals):
            check_reveal(
                reveal, snapshot, party=party, key=pinned.parties[party], since=known[party]
            )
            known[party] = (snapshot.number, reveal.value)
        if not link.void:
            values = tuple(reveal.value for reveal in link.reveals)
            drawn[snapshot.number] = _Drawn(values, beacon(values, snapshot.digest))
    for link in history[1:-1]:
        if not link.void:
            _check_left_over(link, drawn[link.snapshot.number], pinned.size, client, key)
    if history[-1].void:
        raise WrongBeacon("a value is missing: it is void", snapshot=history[-1].snapshot.number)
    return drawn


def _check_left_over(
    link: SnapshotLink, drawn: _Drawn, size: int, client: ClientId, key: bytes
) -> None:
    own, snapshot = link.left_over, link.snapshot
    if own is None:
        raise SkippedSnapshot(
            f"was drawn, and nothing shows that client {client} was left over in it",
            snapshot=snapshot.number,
        )
    place = _place(Shuffle(drawn.key, max(1, snapshot.leaves)), own.number, snapshot)
    if place < size * groups_in(snapshot, size):
        raise TwoGroups(f"has a group for client {client}", snapshot=snapshot.number)
    _check_place(own.placed, own.number, snapshot)
    _check_own(own.placed.leaf, client, key, snapshot.number)


def _place(shuffle: Shuffle, number: int, snapshot: ClientSnapshot) -> int:
    if number >= snapshot.leaves:
        raise WrongMember(f"has no leaf {number}", snapshot=snapshot.number)
    return int(shuffle.inverse([number])[0])


def _check_place(member: PlacedLeaf, number: int, snapshot: ClientSnapshot) -> None:
    leaf = member.leaf.digest
    if not merkle.is_leaf(snapshot.root, leaf, number, snapshot.leaves, member.path):
        raise WrongMember(
            f"client {member.leaf.client} is not its leaf {number}, whose turn it is",
            snapshot=snapshot.number,
        )


def _check_own(leaf: Leaf, client: ClientId, key: bytes, at: int) -> None:
    if (leaf.client, leaf.key) != (client, key):
        raise WrongMember(f"the place of client {client} has another client or key", snapshot=at)


def _check_leaves(leaves: Sequence[Leaf], pinned: Pinned, now: int, at: int) -> None:
    for leaf in leaves:
        if leaf.federation != pinned.federation:
            raise WrongMember(f"client {leaf.client} is of another federation", snapshot=at)
        if leaf.expiry and leaf.expiry <= now:
            raise ExpiredLeaf(f"the certificate of client {leaf.client} has expired", snapshot=at)
    for each in ({leaf.client for leaf in leaves}, {leaf.key for leaf in leaves}):
        if len(each) < len(leaves):
            raise TwoGroups("a client or a key is twice in one group", snapshot=at)


def _reasons(history: Sequence[SnapshotLink], pinned: Pinned) -> tuple[str, ...]:
    """Why the group is on the operator's word, if it is; too small a snapshot may be refused."""
    before, last = history[-2], history[-1]
    newcomers = last.snapshot.leaves - left_over(before.snapshot, pinned.size, void=before.void)
    reasons = []
    if newcomers < LEAST_GROUPS * pinned.size:
        fewer = f"{newcomers} newcomers, fewer than {LEAST_GROUPS} groups of {pinned.size}"
        if not pinned.small:
            raise SmallSnapshot(f"has {fewer}", snapshot=last.snapshot.number)
        reasons.append(f"a snapshot of {fewer}")
    if pinned.one_operator:
        reasons.append("one operator holds both values of the beacon")
    return tuple(reasons)
