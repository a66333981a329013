"""Snapshots in a chain, and parties that reveal one value for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

import groups
from groups import AUTHORITY, FEDERATION, Registry, leaf, leaves
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.merkle import MerkleTree
from tessera.errors import (
    ConfigError,
    ForkedSnapshot,
    MisuseError,
    SkippedSnapshot,
    TwoGroups,
    WrongBeacon,
    WrongMember,
    WrongSignature,
)
from tessera.protocols.membership.beacon import beacon, chain_context, fresh_chain
from tessera.protocols.membership.draw import Draw
from tessera.protocols.membership.snapshot import ClientSnapshot, first_snapshot, next_snapshot

CLIENTS = leaves(range(6))


def test_snapshot_zero_is_empty_and_holds_both_commitments() -> None:
    registry = Registry()
    first = registry.draws[0].snapshot
    assert (first.number, first.leaves) == (0, 0)
    assert first.commitments == tuple(party.chain.commitment for party in registry.parties)
    with pytest.raises(MisuseError, match="no value belongs to snapshot 0"):
        registry.parties[0].reveal(first, ())


@pytest.mark.parametrize(
    "changed",
    [
        {"federation": "g"},
        {"number": 2},
        {"predecessor": bytes(32)},
        {"root": bytes(32)},
        {"leaves": 7},
        {"commitments": (bytes(32), bytes(32))},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_the_digest_binds_every_field_but_the_signature(changed: dict[str, object]) -> None:
    snapshot = Registry().snapshot(CLIENTS)
    assert replace(snapshot, **changed).digest != snapshot.digest
    assert replace(snapshot, signature=bytes(64)).digest == snapshot.digest
    with pytest.raises(WrongSignature):
        replace(snapshot, **changed).check_signature(FEDERATION, AUTHORITY.public)


def test_the_beacon_depends_on_both_values_and_the_snapshot() -> None:
    made = {beacon((a, b), c) for a in (b"0", b"1") for b in (b"0", b"1") for c in (b"0", b"1")}
    assert len(made) == 8


def test_chains_of_two_parties_and_federations_are_apart() -> None:
    assert len({chain_context(f, party) for f in ("f", "g") for party in (0, 1)}) == 4
    with pytest.raises(ConfigError, match="party 2 of a beacon with 2"):
        fresh_chain(FEDERATION, 2, 4, ScriptedEntropy(b""))


def test_a_party_answers_the_same_snapshot_alike_and_no_other_one() -> None:
    registry = Registry()
    snapshot = registry.snapshot(CLIENTS)
    party, sent = registry.parties[0].reveal(snapshot, CLIENTS)
    again, same = party.reveal(snapshot, CLIENTS)
    assert (again, same) == (party, sent)
    others = leaves(range(1, 7))
    with pytest.raises(ForkedSnapshot, match="snapshot 1: does not follow"):
        party.reveal(registry.snapshot(others), others)
    # From what it has stored it goes on after a restart; stored too late it would not know.
    woken = replace(registry.parties[0], latest=party.latest)
    with pytest.raises(ForkedSnapshot):
        woken.reveal(registry.snapshot(others), others)


def test_a_party_reveals_for_the_next_snapshot_only() -> None:
    registry = Registry()
    first = registry.snapshot(CLIENTS)
    second = next_snapshot(first, CLIENTS, AUTHORITY)
    party = registry.parties[0]
    with pytest.raises(SkippedSnapshot, match="snapshot 2: came after snapshot 0"):
        party.reveal(second, CLIENTS)
    after, sent = party.follow(first).reveal(second, CLIENTS)
    assert after.latest == second and sent.number == 2
    forged = next_snapshot(first, CLIENTS, groups.signing_key("stranger"))
    with pytest.raises(WrongSignature):
        party.follow(first).reveal(forged, CLIENTS)


def test_the_last_party_waits_for_the_first() -> None:
    registry = Registry()
    snapshot = registry.snapshot(CLIENTS)
    _, last = registry.parties
    with pytest.raises(WrongBeacon, match="the first party has not revealed"):
        last.reveal(snapshot, CLIENTS)
    _, first = registry.parties[0].reveal(snapshot, CLIENTS)
    with pytest.raises(WrongSignature):
        last.reveal(snapshot, CLIENTS, replace(first, value=bytes(32)))
    assert last.reveal(snapshot, CLIENTS, first)[1].party == 1


def signed_anyway(registry: Registry, clients: tuple[groups.Leaf, ...]) -> ClientSnapshot:
    """A snapshot that `next_snapshot` would not make."""
    root = MerkleTree([each.digest for each in clients]).root
    made = registry.snapshot(leaves(range(900, 900 + len(clients))))
    return replace(made, root=root).signed(AUTHORITY)


@pytest.mark.parametrize(
    "doubled",
    [leaf(3), leaf(3, serial=9), replace(leaf(3), client=77)],
    ids=["leaf", "client", "key"],
)
def test_a_client_that_is_twice_in_a_snapshot_gets_no_value(doubled: groups.Leaf) -> None:
    registry = Registry()
    clients = (*CLIENTS, doubled)
    with pytest.raises(ConfigError, match="is in it twice"):
        registry.snapshot(clients)
    snapshot = signed_anyway(registry, clients)
    with pytest.raises(TwoGroups, match="twice"):
        registry.parties[0].reveal(snapshot, clients)
    with pytest.raises(WrongMember, match="other leaves than those shown"):
        registry.parties[0].reveal(snapshot, leaves(range(7)))


def test_commitments_do_not_change() -> None:
    registry = Registry()
    snapshot = registry.snapshot(CLIENTS)
    other = replace(snapshot, commitments=(bytes(32), snapshot.commitments[1])).signed(AUTHORITY)
    with pytest.raises(WrongBeacon, match="other commitments"):
        registry.parties[1].reveal(other, CLIENTS)
    with pytest.raises(MisuseError, match="commits to another hash chain"):
        replace(registry.parties[0], chain=registry.parties[1].chain)


def test_a_chain_that_has_ended_reveals_nothing() -> None:
    chains = [fresh_chain(FEDERATION, party, 1, ScriptedEntropy(b"")) for party in range(2)]
    first = first_snapshot(FEDERATION, [chain.commitment for chain in chains], AUTHORITY)
    party = replace(Registry().parties[0], latest=first, chain=chains[0])
    one = next_snapshot(first, CLIENTS, AUTHORITY)
    party, _ = party.reveal(one, CLIENTS)
    with pytest.raises(MisuseError, match="value 2 of a hash chain with 1"):
        party.reveal(next_snapshot(one, CLIENTS, AUTHORITY), CLIENTS)


def test_a_void_draw_has_no_groups_and_everybody_waits() -> None:
    registry = Registry(size=2)
    draw = registry.draw(CLIENTS, void=True)
    assert draw.void and draw.left_over == CLIENTS
    with pytest.raises(MisuseError, match="a value is missing"):
        draw.group(0, groups.PLAN)
    again = registry.draw(())
    assert again.leaves == CLIENTS and again.groups == 3
    with pytest.raises(MisuseError, match="is of other leaves"):
        Draw(snapshot=again.snapshot, leaves=CLIENTS[1:], size=2)
    with pytest.raises(MisuseError, match="group 3 of 3"):
        again.group(3, groups.PLAN)


def test_what_cannot_be_a_snapshot_is_refused() -> None:
    snapshot = Registry().snapshot(CLIENTS)
    with pytest.raises(ConfigError, match="2 commitments, not 1"):
        replace(snapshot, commitments=(bytes(32),))
    with pytest.raises(ConfigError, match="there are 65536 at most"):
        replace(snapshot, number=65537)
    with pytest.raises(ConfigError, match="a client of another federation"):
        Registry().snapshot((replace(leaf(1), federation="g"),))
