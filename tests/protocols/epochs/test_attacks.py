"""A lying server before shipped members: each rule on, and what the lie gives with the rule off.

The server here is a script that speaks encoded messages. It adds up whatever it is sent; words are
below 16, so that a sum over four members is below 64, and masks that do not cancel are seen.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ServerFault
from tessera.ids import SERVER, ClientId
from tessera.protocols.epochs import member, messages
from tessera.protocols.epochs.member import GroupMember
from tessera.protocols.epochs.messages import (
    Assignment,
    Delivered,
    Delivery,
    DeliveryCertificate,
    Deposit,
    EpochHeader,
    link,
)
from waiting_group import Waiting, header, total_of, words_of

LENGTH = 2_000
BOUND = 64


class Liar:
    """A server that assigns what it likes and adds up what it gets."""

    def __init__(self) -> None:
        self.run = Waiting()
        self.group = self.run.group
        self.members: dict[ClientId, GroupMember] = {}
        said: dict[ClientId, Delivered] = {}
        for client, setup in self.run.setups.items():
            self.members[client], (out,) = GroupMember.join(setup, entropy=self.run.entropy)
            deposit: Deposit = wire.decode(out.data)
            said[client] = deposit.statement
        self.keys = self.certificate(said)
        self.visits = 0

    def certificate(self, said: dict[ClientId, Delivered]) -> DeliveryCertificate:
        return DeliveryCertificate(entries=tuple(said[c] for c in self.group.members))

    def assign(
        self, client: ClientId, at: EpochHeader, keys: DeliveryCertificate | None = None
    ) -> Delivery:
        self.visits += 1
        given = Assignment(visit=self.visits, header=at, certificate=keys or self.keys, own=None)
        role = self.members[client]
        assert role.receive(SERVER, wire.encode(given)) == []
        (out,) = role.deliver(words_of(client, at), entropy=self.run.entropy)
        delivery: Delivery = wire.decode(out.data)
        return delivery

    def epoch(self, headers: dict[ClientId, EpochHeader]) -> list[int]:
        """Everybody's vectors added up, under whatever each was told."""
        at = next(iter(headers.values()))
        total, said = at.ring.zeros(at.length), {}
        for client, told in headers.items():
            delivery = self.assign(client, told)
            at.ring.add_packed(total, delivery.vector)
            said[client] = delivery.statement
        self.keys = self.certificate(said)
        return at.ring.to_ints(total)

    def told(self, most: EpochHeader, other: EpochHeader) -> dict[ClientId, EpochHeader]:
        """One thing to all but the last member."""
        *many, victim = self.group.members
        return {**dict.fromkeys(many, most), victim: other}


def in_bounds(total: list[int]) -> float:
    return float(np.mean(np.array(total) < BOUND))


def long(epoch: int, **inputs: bytes) -> EpochHeader:
    found = {"base": b"a" * 32, "counts": b"c" * 32, **inputs}
    return header(epoch, length=LENGTH, inputs=found)


@pytest.mark.parametrize("name", ["base", "counts", "another"])
def test_members_that_were_sent_different_inputs_do_not_cancel(name: str) -> None:
    liar = Liar()
    total = liar.epoch(liar.told(long(1), long(1, **{name: b"x" * 32})))
    assert in_bounds(total) < 0.01


def test_with_inputs_in_no_digest_the_sum_over_two_bases_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "received", lambda header: [])
    liar = Liar()
    total = liar.epoch(liar.told(long(1), long(1, base=b"x" * 32)))
    assert total == total_of(liar.group, long(1))


def test_a_member_that_was_led_astray_once_is_not_led_back() -> None:
    """Two bases in one epoch, nothing opens; in the next the same for all, as if it were new."""
    liar = Liar()
    liar.epoch(liar.told(long(1), long(1, base=b"x" * 32)))
    with pytest.raises(ServerFault, match="another epoch or chain"):
        liar.epoch(dict.fromkeys(liar.group.members, long(2)))


@pytest.mark.parametrize("bound", [True, False], ids=["on", "off"])
def test_a_chain_keeps_those_apart_whose_past_differs(
    monkeypatch: pytest.MonkeyPatch, bound: bool
) -> None:
    """Were certificates not checked, masks still would not cancel; without a chain they would."""
    monkeypatch.setattr(DeliveryCertificate, "fault", lambda *given: "")
    if not bound:
        monkeypatch.setattr(
            member, "link", lambda previous, group, header, keys: link(b"", group, header, keys)
        )
    liar = Liar()
    liar.epoch(liar.told(long(1), long(1, base=b"x" * 32)))
    total = liar.epoch(dict.fromkeys(liar.group.members, long(2)))
    if bound:
        assert in_bounds(total) < 0.01
    else:
        assert total == total_of(liar.group, long(2))


def with_own_keys(
    liar: Liar, victim: ClientId
) -> tuple[DeliveryCertificate, dict[ClientId, AgreementKey]]:
    """Mask keys of the server's in the place of everybody's but the victim's."""
    draws = ScriptedEntropy(b"liar")
    own = {
        c: AgreementKey.from_secret(draws.secret(Label.EPOCH_MASK_KEY, c))
        for c in liar.group.members
        if c != victim
    }
    entries = tuple(
        e if e.sender == victim else replace(e, mask_key=own[e.sender].public)
        for e in liar.keys.entries
    )
    return DeliveryCertificate(entries=entries), own


def test_a_certificate_with_the_servers_keys_is_refused() -> None:
    liar = Liar()
    victim = liar.group.members[0]
    keys, _ = with_own_keys(liar, victim)
    with pytest.raises(ServerFault, match="invalid signature"):
        liar.assign(victim, long(1), keys)


def test_without_signatures_over_mask_keys_the_server_reads_a_vector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Delivered, "is_signed", lambda self, group: True)
    monkeypatch.setattr(GroupMember, "_check_memory", lambda self, message: None)
    liar = Liar()
    victim, at = liar.group.members[0], long(1)
    public = liar.keys.entries[0].mask_key
    keys, own = with_own_keys(liar, victim)
    delivery = liar.assign(victim, at, keys)
    total = at.ring.unpack(delivery.vector, LENGTH)
    bound = link(liar.group.digest, liar.group, at, wire.digest(keys))
    for peer, key in own.items():  # what the other end of each pair would add
        two = replace(
            liar.group,
            leaves=tuple(x for x in liar.group.leaves if x.client in (victim, peer)),
        )
        pair = tuple(public if x.client == victim else key.public for x in two.leaves)
        with monkeypatch.context() as patched:
            patched.setattr(messages, "mask_key", lambda root, key=key: key)
            zeros = at.ring.zeros(LENGTH)
            total = at.ring.add(
                total, messages.masked(zeros, bound, two, peer, Secret(bytes(32)), pair)
            )
    assert at.ring.to_ints(total) == at.ring.to_ints(words_of(victim, at))


@pytest.mark.parametrize("remembered", [True, False], ids=["on", "off"])
def test_a_member_set_back_within_an_epoch_does_not_send_twice(
    monkeypatch: pytest.MonkeyPatch, remembered: bool
) -> None:
    """Trained again under the same masks, the difference of both vectors is that of the words."""
    run = Waiting()
    run.join()
    at = long(1)
    run.fix(at)
    client = run.group.members[0]
    run.fetch(client)
    old = run.stored[client]
    (first,) = run.compute(client)
    run.say(client, [first])
    run.stored[client] = old
    run.kill(client)
    if remembered:
        with pytest.raises(ServerFault, match="set back"):
            run.fetch(client)
        return
    monkeypatch.setattr(GroupMember, "_check_memory", lambda self, message: None)
    run.fetch(client)
    again = words_of(client, at)
    again[7] += 1  # by float order alone
    (second,) = run.members[client].deliver(again, entropy=run.entropy)
    both = [at.ring.unpack(wire.decode(o.data).vector, LENGTH) for o in (first, second)]
    assert np.flatnonzero(at.ring.sub(both[1], both[0])).tolist() == [7]


def test_a_lying_leader_that_hides_the_delivery_is_not_recognised() -> None:
    """What the threat model says: against it a member set back within an epoch sends twice."""
    liar = Liar()
    client, at = liar.group.members[0], long(1)
    role = liar.members[client]
    snapshot, messages = role.snapshot(), dict(role.messages)
    first = liar.assign(client, at)
    liar.members[client] = GroupMember.wake(snapshot, messages, liar.run.setups[client])
    second = liar.assign(client, at)
    assert second.vector == first.vector  # the same words; other ones would show


def test_an_epoch_is_not_skipped_for_one_member() -> None:
    """All others are in epoch 2 when the one comes that never saw the certificate of epoch 1."""
    run = Waiting()
    run.join()
    run.epoch(header(1))
    run.fix(header(2))
    victim = run.group.members[0]
    answer: Assignment = wire.decode(run.ask(victim)[0].data)
    with pytest.raises(ServerFault, match="assigned epoch 3 of period 1 after epoch 1"):
        run.members[victim].receive(SERVER, wire.encode(replace(answer, header=header(3))))


def test_a_period_begins_for_all_or_for_nobody() -> None:
    """Another period, and so another h_e: what is told to nine does not cancel with the tenth."""
    liar = Liar()
    liar.epoch(dict.fromkeys(liar.group.members, long(1)))
    border = replace(long(2), period=2)
    assert in_bounds(liar.epoch(liar.told(border, long(2)))) < 0.01
