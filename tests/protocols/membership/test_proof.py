"""A client's proof of its group: what it accepts, and the name under which it refuses the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import groups
from groups import AUTHORITY, HELPER_KEY, Registry, check, leaf, leaves, signing_key
from recording import checksummed
from tessera import wire
from tessera.errors import (
    ConfigError,
    ExpiredLeaf,
    ForkedSnapshot,
    GroupFault,
    ServerFault,
    SkippedSnapshot,
    SmallSnapshot,
    TwoGroups,
    WireError,
    WrongBeacon,
    WrongMember,
    WrongSignature,
)
from tessera.ids import ClientId
from tessera.protocols.membership.beacon import _statement
from tessera.protocols.membership.draw import proof_of, void_before
from tessera.protocols.membership.proof import GroupProof, OwnPlace, Pinned, SnapshotLink
from tessera.protocols.membership.snapshot import next_snapshot


@pytest.fixture(scope="module")
def registry() -> Registry:
    made = Registry()
    made.draw(leaves(range(50)))
    return made


@pytest.fixture(scope="module")
def later() -> tuple[Registry, int]:
    """A client that is left over, then in a void snapshot, and has its group in the third."""
    made = Registry(seed=b"later")
    made.draw(leaves(range(52)))
    waiting = int(made.draws[1].left_over[0].client)
    made.draw(leaves(range(60, 110)), void=True)
    made.draw(leaves(range(110, 163)))
    assert made.draws[3].group_of(ClientId(waiting)) is not None
    return made, waiting


def changed_link(proof: GroupProof, at: int, **changes: object) -> GroupProof:
    history = list(proof.history)
    history[at] = replace(history[at], **changes)
    return replace(proof, history=tuple(history))


# -- what is accepted


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.binary(min_size=1, max_size=4))
def test_everybody_is_in_one_group_and_accepts_it(size: int, more: int, seed: bytes) -> None:
    registry = Registry(size=size, seed=seed)
    draw = registry.draw(leaves(range(10 * size + more)))
    found: dict[int, list[int]] = {}
    for client in range(10 * size + more):
        if draw.group_of(ClientId(client)) is not None:
            checked = check(registry.proof(client), registry.pinned(), client)
            assert client in checked.group.members and checked.group.size == size
            assert checked.group == draw.group(checked.group.number, groups.PLAN)
            assert checked.void == 0 and not checked.on_the_operators_word
            found.setdefault(checked.group.number, []).append(client)
    assert sorted(map(len, found.values())) == [size] * draw.groups
    assert len(draw.left_over) == (10 * size + more) % size


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=5),
    st.binary(min_size=1, max_size=4),
)
def test_everybody_finds_its_group_over_any_snapshots(
    size: int, snapshots: list[tuple[int, bool]], seed: bytes
) -> None:
    """Newcomers and void ones in any order: each client's own count of peers and of void
    snapshots is the leader's."""
    registry, clients = Registry(size=size, seed=seed), 0
    for newcomers, void in snapshots:
        registry.draw(leaves(range(clients, clients + newcomers)), void=void)
        clients += newcomers
    void_of, found = void_before(registry.draws), set[int]()
    for at, draw in enumerate(registry.draws[1:], 1):
        for client in map(int, draw.members):
            proof = proof_of(registry.draws[: at + 1], ClientId(client))
            pinned = registry.pinned(anchor=proof.history[0].snapshot.number, small=True)
            checked = check(proof, pinned, client)
            number = draw.group_of(ClientId(client))
            assert number is not None and checked.group == draw.group(number, groups.PLAN)
            assert checked.void == void_of[ClientId(client)] <= len(registry.draws) - 2
            assert client not in found, "two groups"
            found.add(client)
    waiting = {int(leaf.client) for leaf in registry.draws[-1].left_over}
    assert found | waiting == set(range(clients)) and not found & waiting


def test_a_proof_travels_and_comes_back(registry: Registry) -> None:
    proof = registry.proof(3)
    assert wire.decode(wire.encode(proof), expect=[GroupProof]) == proof


def test_members_of_one_group_begin_one_chain(registry: Registry) -> None:
    first = check(registry.proof(3), registry.pinned(), 3).group
    others = {
        check(registry.proof(int(m)), registry.pinned(), int(m)).group.digest for m in first.members
    }
    assert others == {first.digest}


def test_the_same_group_again_is_accepted(registry: Registry) -> None:
    group = check(registry.proof(3), registry.pinned(), 3).group
    assert check(registry.proof(3), registry.pinned(), 3, joined=group).group == group


def test_who_waited_is_drawn_later_and_void_snapshots_are_counted(
    later: tuple[Registry, int],
) -> None:
    registry, waiting = later
    assert check(registry.proof(waiting), registry.pinned(), waiting).void == 1
    newcomer = next(c for c in range(110, 163) if registry.draws[3].group_of(ClientId(c)))
    proof = registry.proof(newcomer, anchor=2)
    assert len(proof.history) == 2
    assert check(proof, registry.pinned(anchor=2), newcomer).void == 0


def test_a_small_snapshot_is_on_the_operators_word() -> None:
    registry = Registry()
    registry.draw(leaves(range(49)))
    client = int(registry.draws[1].group(0, groups.PLAN).members[0])
    with pytest.raises(SmallSnapshot, match="49 newcomers, fewer than 10 groups of 5"):
        check(registry.proof(client), registry.pinned(), client)
    checked = check(registry.proof(client), registry.pinned(small=True), client)
    assert checked.on_the_operators_word and "49 newcomers" in checked.reasons[0]


def test_those_left_over_are_no_newcomers() -> None:
    registry = Registry()
    registry.draw(leaves(range(53)))
    registry.draw(leaves(range(60, 109)))  # 3 who wait, 49 newcomers
    client = int(registry.draws[2].group(0, groups.PLAN).members[0])
    anchor = 1 if client >= 60 else 0
    with pytest.raises(SmallSnapshot, match="snapshot 2: has 49 newcomers"):
        check(registry.proof(client, anchor=anchor), registry.pinned(anchor=anchor), client)


def test_one_operator_for_both_values_is_on_its_word(registry: Registry) -> None:
    checked = check(registry.proof(3), registry.pinned(one_operator=True), 3)
    assert checked.reasons == ("one operator holds both values of the beacon",)
    pinned = registry.pinned()
    with pytest.raises(ConfigError, match="one operator holds both"):
        replace(pinned, parties=(AUTHORITY.public, AUTHORITY.public))


# -- what is refused, by name


def refused(
    kind: type[GroupFault], proof: GroupProof, pinned: Pinned, client: int, says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        check(proof, pinned, client)
    assert type(caught.value) is kind and isinstance(caught.value, ServerFault)


def test_members_of_another_group_are_refused(registry: Registry) -> None:
    """Valid paths, each of them, and a whole group that the beacon gave: to others."""
    pinned, proof = registry.pinned(), registry.proof(3)
    draw = registry.draws[1]
    group = draw.group_of(ClientId(3))
    stranger = next(c for c in range(50) if draw.group_of(ClientId(c)) != group)
    other = registry.proof(stranger)
    refused(WrongMember, replace(proof, members=other.members), pinned, 3, "whose turn it is")
    refused(WrongMember, other, pinned, 3, "another client or key")
    at = proof.members.index(next(m for m in proof.members if m.leaf.client != 3))
    for put in (other.members[0], proof.members[at - 1]):
        members = list(proof.members)
        members[at] = put
        refused(WrongMember, replace(proof, members=tuple(members)), pinned, 3, "whose turn it is")


def test_every_other_number_of_ones_own_is_refused(registry: Registry) -> None:
    proof = registry.proof(3)
    for number in range(51):
        if number != proof.number:
            with pytest.raises(WrongMember):
                check(replace(proof, number=number), registry.pinned(), 3)


def test_too_few_and_too_many_members_are_refused(registry: Registry) -> None:
    proof = registry.proof(3)
    for members in (proof.members[:-1], (*proof.members, proof.members[0])):
        refused(WrongMember, replace(proof, members=members), registry.pinned(), 3, "5 are due")
    path = proof.members[2].path
    for other in (path[:-1], (*path, bytes(32)), (bytes(32), *path[1:])):
        members = list(proof.members)
        members[2] = replace(members[2], path=other)
        refused(
            WrongMember, replace(proof, members=tuple(members)), registry.pinned(), 3, "its leaf"
        )


def test_a_client_with_ones_id_and_another_key_is_not_oneself(registry: Registry) -> None:
    with pytest.raises(WrongMember, match="another client or key"):
        groups.verify(
            registry.proof(3), registry.pinned(), ClientId(3), leaf(4).key, now=groups.NOW
        )


def test_somebody_left_over_has_no_group(later: tuple[Registry, int]) -> None:
    registry, waiting = later
    draw = registry.draws[1]
    number = [int(each.client) for each in draw.leaves].index(waiting)
    somebody = int(draw.group(0, groups.PLAN).members[0])
    proof = draw.proof(ClientId(somebody), registry.draws[:1])
    refused(WrongMember, replace(proof, number=number), registry.pinned(), waiting, "no group yet")


def test_another_beacon_is_refused(registry: Registry) -> None:
    proof, pinned = registry.proof(3), registry.pinned()
    first, second = proof.history[1].reveals
    value = replace(first, value=bytes(32))
    refused(WrongSignature, changed_link(proof, 1, reveals=(value, second)), pinned, 3, "party 0")
    refused(WrongBeacon, changed_link(proof, 1, reveals=(second, first)), pinned, 3, "another")
    refused(WrongBeacon, changed_link(proof, 1, reveals=(first, first)), pinned, 3, "another party")
    for reveals in ((), (first,)):
        refused(WrongBeacon, changed_link(proof, 1, reveals=reveals), pinned, 3, "it is void")


def test_a_signed_value_that_was_not_committed_to_is_refused(registry: Registry) -> None:
    other = Registry(seed=b"other secrets")
    snapshot = registry.draws[1].snapshot
    forged = replace(
        other.parties[0],
        latest=replace(
            snapshot, commitments=(other.parties[0].chain.commitment, snapshot.commitments[1])
        ),
    )
    _, reveal = forged.reveal(forged.latest, registry.draws[1].leaves)
    proof = registry.proof(3)
    signed = replace(
        reveal,
        snapshot=snapshot.digest,
        signature=HELPER_KEY.sign(_statement(0, snapshot, reveal.value)),
    )
    second = proof.history[1].reveals[1]
    refused(
        WrongBeacon,
        changed_link(proof, 1, reveals=(signed, second)),
        registry.pinned(),
        3,
        "has not committed",
    )


def test_values_of_another_number_are_refused(later: tuple[Registry, int]) -> None:
    registry, waiting = later
    proof = registry.proof(waiting)
    old = proof.history[1].reveals
    refused(WrongBeacon, changed_link(proof, 3, reveals=old), registry.pinned(), waiting, "another")


def test_what_is_not_signed_with_the_pinned_keys_is_refused(registry: Registry) -> None:
    proof, pinned = registry.proof(3), registry.pinned()
    stranger = signing_key("stranger")
    forged = proof.history[1].snapshot.signed(stranger)
    refused(WrongSignature, changed_link(proof, 1, snapshot=forged), pinned, 3, "not signed")
    other = replace(pinned, authority=stranger.public)
    refused(WrongSignature, proof, other, 3, "snapshot 0: is not signed")
    for party in range(2):
        parties = list(pinned.parties)
        parties[party] = stranger.public
        refused(WrongSignature, proof, replace(pinned, parties=tuple(parties)), 3, f"party {party}")


def test_a_forked_history_is_refused(registry: Registry) -> None:
    """A second snapshot 1, signed by the authority, with the values of the first one."""
    proof, pinned = registry.proof(3), registry.pinned()
    clients = leaves([*range(49), 70])
    fork = next_snapshot(registry.draws[0].snapshot, clients, AUTHORITY)
    refused(WrongBeacon, changed_link(proof, 1, snapshot=fork), pinned, 3, "another snapshot")
    other = Registry(seed=b"other")
    other.draw(leaves(range(50)))
    refused(ForkedSnapshot, other.proof(3), pinned, 3, "is not the one that this client was told")
    mixed = changed_link(proof, 0, snapshot=other.draws[0].snapshot)
    refused(ForkedSnapshot, mixed, other.pinned(), 3, "does not follow from the snapshot 0")


def test_a_history_with_a_gap_is_refused(later: tuple[Registry, int]) -> None:
    registry, waiting = later
    proof, pinned = registry.proof(waiting), registry.pinned()
    for gap in (1, 2):
        history = proof.history[:gap] + proof.history[gap + 1 :]
        refused(SkippedSnapshot, replace(proof, history=history), pinned, waiting, "came after")
    doubled = (*proof.history[:2], *proof.history[1:])
    refused(ForkedSnapshot, replace(proof, history=doubled), pinned, waiting, "does not follow")
    for short in ((), proof.history[:1]):
        refused(SkippedSnapshot, replace(proof, history=short), pinned, waiting, "ends before")


def test_a_snapshot_that_was_drawn_without_oneself_is_refused(later: tuple[Registry, int]) -> None:
    """Entered anew after a group that somebody disliked: it would be a draw that nobody counts."""
    registry, _ = later
    newcomer = next(c for c in range(110, 163) if registry.draws[3].group_of(ClientId(c)))
    proof = registry.draws[3].proof(ClientId(newcomer), registry.draws[:3])
    refused(SkippedSnapshot, proof, registry.pinned(), newcomer, "nothing shows that client")


def test_one_group_was_given_and_another_is_shown(later: tuple[Registry, int]) -> None:
    registry, _ = later
    draw = registry.draws[1]
    placed = int(draw.group(0, groups.PLAN).members[0])
    shown = next(c for c in range(110, 163) if registry.draws[3].group_of(ClientId(c)))
    number = [int(each.client) for each in draw.leaves].index(placed)
    own = OwnPlace(number=number, placed=draw._placed(number))
    proof = changed_link(
        registry.draws[3].proof(ClientId(shown), registry.draws[:3]), 1, left_over=own
    )
    refused(TwoGroups, proof, registry.pinned(), placed, "snapshot 1: has a group for client")


def test_the_place_of_somebody_else_who_was_left_over_does_not_do(
    later: tuple[Registry, int],
) -> None:
    registry, waiting = later
    proof = registry.proof(waiting)
    other = registry.draws[1].left_over[1]
    number = registry.draws[1].leaves.index(other)
    own = OwnPlace(number=number, placed=registry.draws[1]._placed(number))
    refused(
        WrongMember,
        changed_link(proof, 1, left_over=own),
        registry.pinned(),
        waiting,
        "another client or key",
    )
    wrong = OwnPlace(number=number, placed=proof.history[1].left_over.placed)
    refused(
        WrongMember, changed_link(proof, 1, left_over=wrong), registry.pinned(), waiting, "its leaf"
    )


def test_a_second_group_is_refused(registry: Registry) -> None:
    other = Registry(seed=b"second federation")
    other.draw(leaves(range(50)))
    group = check(other.proof(3), other.pinned(), 3).group
    with pytest.raises(TwoGroups, match="client 3 has a group of snapshot 1"):
        check(registry.proof(3), registry.pinned(), 3, joined=group)


def test_an_expired_member_is_refused() -> None:
    registry = Registry()
    registry.draw(leaf(client, expiry=groups.NOW + client) for client in range(1, 51))
    members = registry.draws[1].group(0, groups.PLAN).members
    client = int(members[0])
    soonest = groups.NOW + int(min(members))
    pinned = registry.pinned()
    assert check(registry.proof(client), pinned, client, now=soonest - 1)
    with pytest.raises(ExpiredLeaf, match=f"client {min(members)} has expired"):
        check(registry.proof(client), pinned, client, now=soonest)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_other_bytes_are_accepted(registry: Registry, data: st.DataObject) -> None:
    good = wire.encode(registry.proof(3))
    at = data.draw(st.integers(3, len(good) - 9))
    flipped = bytearray(good)
    flipped[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((GroupFault, WireError)):
        proof = wire.decode(checksummed(flipped[:-8]), expect=[GroupProof])
        check(proof, registry.pinned(), 3)


def test_what_is_pinned_makes_sense(registry: Registry) -> None:
    pinned = registry.pinned()
    for size in (1, 257):
        with pytest.raises(ConfigError, match=f"groups of {size}"):
            replace(pinned, size=size)
    with pytest.raises(ConfigError, match="2 parties, not 1"):
        replace(pinned, parties=pinned.parties[:1])
    assert SnapshotLink(snapshot=registry.draws[0].snapshot).void
