"""A fixed group: what cannot be one, and what its digest binds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera import wire
from tessera.errors import ConfigError, Malformed
from tessera.ids import ClientId
from tessera.protocols.epochs.group import FixedGroup, Leaf


def leaf(client: int, **changed: object) -> Leaf:
    made = Leaf(federation="f", client=ClientId(client), key=bytes([client]) * 32, serial=client)
    return replace(made, **changed)


GROUP = FixedGroup(
    federation="f",
    plan=b"p" * 32,
    number=3,
    snapshot=2,
    snapshot_digest=b"s" * 32,
    values=(b"1" * 32, b"2" * 32),
    beacon=b"b" * 32,
    leaves=(leaf(9), leaf(1), leaf(4)),
)


def test_members_are_in_the_order_of_the_leaves() -> None:
    assert GROUP.members == (9, 1, 4) and GROUP.size == 3
    assert GROUP.key_of(ClientId(4)) == bytes([4]) * 32
    with pytest.raises(KeyError):
        GROUP.key_of(ClientId(5))


def test_a_group_travels_and_comes_back() -> None:
    assert wire.decode(wire.encode(GROUP)) == GROUP


@pytest.mark.parametrize(
    "leaves",
    [
        (leaf(1),),
        (leaf(1), leaf(1, key=b"k" * 32)),
        (leaf(1), leaf(2, key=leaf(1).key)),
        (leaf(1), leaf(2, federation="g")),
    ],
    ids=["alone", "twice", "one key for two", "another federation"],
)
def test_what_is_no_group_is_refused(leaves: tuple[Leaf, ...]) -> None:
    with pytest.raises(ConfigError):
        replace(GROUP, leaves=leaves)


def test_what_is_no_group_does_not_decode() -> None:
    same = wire.encode(GROUP).replace(bytes([4]) * 32, bytes([9]) * 32)
    with pytest.raises(Malformed):
        wire.decode(same)


@pytest.mark.parametrize(
    "changed",
    [
        {"plan": b"q" * 32},
        {"number": 4},
        {"snapshot": 3},
        {"snapshot_digest": b"t" * 32},
        {"values": (b"2" * 32, b"1" * 32)},
        {"beacon": b"c" * 32},
        {"leaves": (leaf(1), leaf(9), leaf(4))},
        {"leaves": (leaf(9), leaf(1), leaf(4, serial=5))},
        {"leaves": (leaf(9), leaf(1), leaf(4, expiry=5))},
        {"leaves": (leaf(9), leaf(1))},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_the_digest_binds_every_field(changed: dict[str, object]) -> None:
    assert replace(GROUP, **changed).digest != GROUP.digest


def test_the_digest_binds_the_federation() -> None:
    leaves = tuple(replace(each, federation="g") for each in GROUP.leaves)
    assert replace(GROUP, federation="g", leaves=leaves).digest != GROUP.digest
