"""Attacks of whoever puts sybils beside a victim: each works with one rule off, and not with it.

Groups are of ten, and nine sybils or nearly so are the aim. What a page would print is in the
assertions: how many of the nine others are sybils, and after how many tries.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from groups import AUTHORITY, PLAN, Registry, check, leaf, leaves
from tessera.crypto.merkle import MerkleTree
from tessera.crypto.shuffle import Shuffle
from tessera.errors import (
    ForkedSnapshot,
    SkippedSnapshot,
    TwoGroups,
    WrongBeacon,
    WrongMember,
    WrongSignature,
)
from tessera.ids import ClientId
from tessera.protocols.membership import beacon as beacons
from tessera.protocols.membership import proof as proofs
from tessera.protocols.membership.beacon import BeaconParty, beacon
from tessera.protocols.membership.draw import Draw

SIZE, CLIENTS, VICTIM = 10, 100, 0


def sybils_beside(members: tuple[ClientId, ...], honest: int) -> int:
    """Clients from `honest` on are sybils."""
    return sum(int(member) >= honest for member in members)


# -- a group of the server's choosing


def chosen(registry: Registry) -> proofs.GroupProof:
    """The victim's proof with nine sybils for its members, each with a valid path."""
    draw, proof = registry.draws[1], registry.proof(VICTIM)
    own = next(at for at, m in enumerate(proof.members) if m.leaf.client == VICTIM)
    sybils = iter(range(CLIENTS - SIZE + 1, CLIENTS))
    return replace(
        proof,
        members=tuple(
            member if at == own else draw._placed(next(sybils))
            for at, member in enumerate(proof.members)
        ),
    )


def test_a_group_of_the_servers_choosing_is_refused() -> None:
    registry = Registry(size=SIZE)
    registry.draw(leaves(range(CLIENTS)))
    with pytest.raises(WrongMember, match="whose turn it is"):
        check(chosen(registry), registry.pinned(), VICTIM)


def test_with_paths_alone_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule off: any leaf of the snapshot will do, whatever number the permutation gives."""
    registry = Registry(size=SIZE)
    registry.draw(leaves(range(CLIENTS)))
    on = proofs._check_place
    numbers = {each.client: at for at, each in enumerate(registry.draws[1].leaves)}
    monkeypatch.setattr(
        proofs, "_check_place", lambda m, number, snapshot: on(m, numbers[m.leaf.client], snapshot)
    )
    members = check(chosen(registry), registry.pinned(), VICTIM).group.members
    assert sybils_beside(members, CLIENTS - SIZE + 1) == 9


# -- a beacon that can be tried out


def tries(values: list[bytes], honest: int, *, aim: int) -> tuple[int, int]:
    """(values tried, sybils beside the victim): stops at the aim, or else the best of all."""
    best = 0
    for number, key in enumerate(values, 1):
        shuffle = Shuffle(key, CLIENTS)
        first = int(shuffle.inverse([VICTIM])[0]) // SIZE * SIZE
        others = shuffle.forward(range(first, first + SIZE)).tolist()
        best = max(best, sum(other >= honest for other in others))
        if best >= aim:
            return number, best
    return len(values), best


def nonce_signatures(count: int) -> list[bytes]:
    """A stand-in for Ed25519 signatures over one message: each nonce gives another valid one."""
    return [hashlib.sha256(b"nonce %d" % nonce).digest() for nonce in range(count)]


def test_a_signer_who_tries_nonces_chooses_the_group() -> None:
    """The rule off: the beacon is a signature's hash. Half of all clients are sybils."""
    count, best = tries(nonce_signatures(400), 50, aim=8)
    print(f"signature beacon: {best} of 9 sybils after {count} tries")
    assert best >= 8 and 1 < count <= 200


def test_with_committed_values_there_is_one_try() -> None:
    """Whatever the authority signs for this snapshot, one value passes the client's check."""
    registry = Registry(size=SIZE)
    draw = registry.draw(leaves(range(CLIENTS)))
    proof, accepted = registry.proof(VICTIM), set()
    first, second = proof.history[1].reveals
    for value in [second.value, *nonce_signatures(50)]:
        signature = AUTHORITY.sign(beacons._statement(1, draw.snapshot, value))
        other = replace(second, value=value, signature=signature)
        link = replace(proof.history[1], reveals=(first, other))
        try:
            check(replace(proof, history=(proof.history[0], link)), registry.pinned(), VICTIM)
        except WrongBeacon:
            continue
        accepted.add(beacon((first.value, value), draw.snapshot.digest))
    assert accepted == {draw.beacon}
    assert tries(list(accepted), 50, aim=8) == (1, sybils_beside(groups_of(draw), 50))


def groups_of(draw: Draw) -> tuple[ClientId, ...]:
    number = draw.group_of(ClientId(VICTIM))
    assert number is not None
    return draw.group(number, PLAN).members


def test_another_signature_on_the_snapshot_is_the_same_snapshot() -> None:
    """Nonces of the snapshot's own signature give no draws either: its digest is without it."""
    registry = Registry(size=SIZE)
    snapshot = registry.draw(leaves(range(CLIENTS))).snapshot
    assert replace(snapshot, signature=bytes(64)).digest == snapshot.digest
    with pytest.raises(WrongSignature):
        replace(snapshot, signature=bytes(64)).check_signature("f", AUTHORITY.public)


# -- a client that is there more than once


def doubled(registry: Registry, times: int) -> Draw:
    """A snapshot with the victim's leaf in many places, each with its own serial, drawn anyway."""
    clients = (*(leaf(VICTIM, serial=n) for n in range(times)), *leaves(range(1, CLIENTS)))
    made = registry.snapshot(leaves(range(1000, 1000 + len(clients))))
    root = MerkleTree([each.digest for each in clients]).root
    snapshot = replace(made, root=root).signed(AUTHORITY)
    reveals = registry.reveals(snapshot, clients)
    return Draw(snapshot=snapshot, leaves=clients, size=SIZE, reveals=reveals)


def test_a_party_of_the_beacon_refuses_a_client_that_is_in_twice() -> None:
    with pytest.raises(TwoGroups, match="a client is in it twice"):
        doubled(Registry(size=SIZE), 2)


def test_without_that_check_the_best_of_many_groups_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule off: the victim accepts each of its groups, so the server picks one."""
    monkeypatch.setattr(beacons, "check_leaves", lambda snapshot, clients: None)
    registry, once = Registry(size=SIZE), Registry(size=SIZE)
    draw = doubled(registry, 30)
    shown = []
    for number in range(30):
        shuffle = Shuffle(draw.beacon, len(draw.leaves))
        group = int(shuffle.inverse([number])[0]) // SIZE
        if group >= draw.groups:
            continue
        members = draw._members(group)
        if [m < 30 for m in members].count(True) > 1:
            continue  # twice in one group, which the client sees
        history = (
            proofs.SnapshotLink(snapshot=registry.draws[0].snapshot),
            proofs.SnapshotLink(snapshot=draw.snapshot, reveals=draw.reveals),
        )
        proof = proofs.GroupProof(
            history=history, number=number, members=tuple(map(draw._placed, members))
        )
        shown.append(sybils_beside(check(proof, registry.pinned(), VICTIM).group.members, 40))
    honest = sybils_beside(groups_of(once.draw(leaves(range(CLIENTS)))), 40)
    print(f"{len(shown)} groups to choose from, {max(shown)} of 9 sybils; once in it: {honest}")
    assert len(shown) > 1 and max(shown) > min(shown)


# -- a client that is entered anew


def entered_anew() -> tuple[Registry, proofs.GroupProof]:
    """Snapshot 1 was drawn with the victim; it is shown its group of snapshot 2 only."""
    registry = Registry(size=SIZE)
    registry.draw(leaves(range(CLIENTS)))
    registry.draw(leaves([VICTIM, *range(CLIENTS, 2 * CLIENTS - 1)]))
    return registry, registry.proof(VICTIM)


def test_a_draw_that_was_not_shown_is_refused() -> None:
    registry, proof = entered_anew()
    with pytest.raises(SkippedSnapshot, match="nothing shows that client 0 was left over"):
        check(proof, registry.pinned(), VICTIM)


def test_without_that_check_it_is_a_draw_that_nobody_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proofs, "_check_left_over", lambda *given: None)
    registry, proof = entered_anew()
    assert check(proof, registry.pinned(), VICTIM).void == 0


def test_said_to_be_void_it_is_counted() -> None:
    registry, proof = entered_anew()
    hidden = replace(proof.history[1], reveals=())
    history = (proof.history[0], hidden, proof.history[2])
    assert check(replace(proof, history=history), registry.pinned(), VICTIM).void == 1


# -- two snapshots of one number


def test_a_party_that_forgets_gives_two_draws() -> None:
    """The rule off: a party woken with the state from before it revealed answers a second
    snapshot of the same number, so whoever holds the other chain picks the better order."""
    registry = Registry(size=SIZE)
    before: BeaconParty = registry.parties[0]
    clients, turned = leaves(range(CLIENTS)), leaves(range(CLIENTS))[::-1]
    after, first = before.reveal(registry.snapshot(clients), clients)
    _, second = before.reveal(registry.snapshot(turned), turned)
    assert first.value == second.value and first.snapshot != second.snapshot
    with pytest.raises(ForkedSnapshot):
        after.reveal(registry.snapshot(turned), turned)
