"""What is refused by name, at both ends: a member has left for good, a server is as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera import wire
from tessera.errors import ConfigError, MisuseError, PeerError, RoundIsOver, ServerFault
from tessera.ids import SERVER, ClientId
from tessera.protocols.epochs.messages import Assignment, DeliveryCertificate
from tessera.protocols.machine import Left, Outbound
from waiting_group import Waiting, fixed_group, header, signing_key

# -- at a member


def second_epoch() -> tuple[Waiting, ClientId, Assignment]:
    """A group with one epoch behind it, and what its first member is answered in the second."""
    run = Waiting()
    run.join()
    run.epoch(header(1))
    run.fix(header(2))
    client = run.group.members[0]
    return run, client, wire.decode(run.ask(client)[0].data)


def certified(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[..., Assignment]:
    def changed(run: Waiting, message: Assignment) -> Assignment:
        entries = change(message.certificate.entries)
        return replace(message, certificate=DeliveryCertificate(entries=entries))

    return changed


def forged(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    """One member's next key is the server's."""
    return (*entries[:3], replace(entries[3], mask_key=b"\x09" + bytes(31)))


def same_key(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    """Two members of the server's choosing sign one key."""
    *first, last = entries
    shared = replace(last, mask_key=entries[2].mask_key)
    return (*first, shared.signed(fixed_group(), signing_key(last.sender)))


def small_order(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    *first, last = entries
    return (
        *first,
        replace(last, mask_key=bytes(32)).signed(fixed_group(), signing_key(last.sender)),
    )


def of_the_keys(run: Waiting, message: Assignment) -> Assignment:
    """What all have deposited, in the place of the certificate of epoch 1."""
    other = Waiting()
    other.join()
    other.fix(header(1))
    first = wire.decode(other.ask(run.group.members[0])[0].data)
    return replace(message, certificate=first.certificate)


def of_another_chain(run: Waiting, message: Assignment) -> Assignment:
    other = Waiting()
    other.join()
    other.epoch(header(1, inputs={"base": b"x" * 32}))
    other.fix(header(2))
    answer = wire.decode(other.ask(run.group.members[0])[0].data)
    return replace(message, certificate=answer.certificate)


def of_another_group(run: Waiting, message: Assignment) -> Assignment:
    other = Waiting(fixed_group(number=3))
    other.join()
    other.epoch(header(1))
    other.fix(header(2))
    answer = wire.decode(other.ask(run.group.members[0])[0].data)
    return replace(message, certificate=answer.certificate)


def skipped(run: Waiting, message: Assignment) -> Assignment:
    return replace(message, header=header(3))


def shown(run: Waiting, message: Assignment) -> Assignment:
    """Somebody else's delivery as this member's own."""
    return replace(message, own=message.certificate.entries[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (certified(lambda entries: entries[:3]), "3 signatures, 4 are needed"),
        (certified(lambda entries: ()), "0 signatures"),
        (certified(lambda entries: (*entries[:3], entries[2])), "foreign or doubled"),
        (certified(lambda entries: entries[::-1]), "another order"),
        (
            certified(lambda entries: (*entries[:3], replace(entries[3], sender=ClientId(999)))),
            "foreign or doubled",
        ),
        (certified(forged), "invalid signature"),
        (certified(same_key), "the same twice"),
        (certified(small_order), "invalid mask key"),
        (of_the_keys, "another epoch or chain"),
        (of_another_chain, "another epoch or chain"),
        (of_another_group, "another epoch or chain"),
        (skipped, "assigned epoch 3 of period 1 after epoch 1"),
        (lambda run, message: replace(message, header=header(2, period=3)), "of period 3 after"),
        (shown, "not this member's"),
    ],
)
def test_a_member_leaves_over_an_assignment_that_does_not_follow(
    change: Callable[..., Assignment], reason: str
) -> None:
    run, client, message = second_epoch()
    member = run.members[client]
    with pytest.raises(ServerFault, match=reason):
        member.receive(SERVER, wire.encode(change(run, message)))
    assert isinstance(member.state, Left) and not member.messages
    with pytest.raises(ServerFault):  # for good: the right one comes too late
        member.receive(SERVER, wire.encode(message))
    with pytest.raises(MisuseError):
        member.fetch(99)


def test_a_member_with_stored_bytes_refuses_another_base_for_the_same_epoch() -> None:
    run, client, message = second_epoch()
    member = run.members[client]
    member.receive(SERVER, wire.encode(message))
    run.compute(client)
    other = replace(message, visit=99, header=header(2, inputs={"base": b"x" * 32}))
    with pytest.raises(ServerFault, match="changed epoch 2 after it was delivered"):
        member.receive(SERVER, wire.encode(other))


def test_a_member_without_stored_bytes_takes_another_base_and_not_another_certificate() -> None:
    run, client, message = second_epoch()
    member = run.members[client]
    member.receive(SERVER, wire.encode(message))
    first = member.state.link.digest
    other = replace(message, visit=98, header=header(2, inputs={"base": b"x" * 32}))
    assert member.receive(SERVER, wire.encode(other)) == []
    assert member.state.link.digest != first and member.due == other.header
    last = message.certificate.entries[3]
    signed = replace(last, vector=b"v" * 32).signed(run.group, signing_key(last.sender))
    entries = (*message.certificate.entries[:3], signed)
    two = replace(message, visit=99, certificate=DeliveryCertificate(entries=entries))
    with pytest.raises(ServerFault, match="two certificates of epoch 1"):
        member.receive(SERVER, wire.encode(two))


def test_a_member_knows_its_own_signatures() -> None:
    """Its key was used elsewhere: a signature of its own that is not the one it stored."""
    run, client, message = second_epoch()
    member = run.members[client]
    before = member.snapshot(), dict(member.messages)
    mine, *rest = message.certificate.entries
    other = replace(mine, mask_key=b"\x09" + bytes(31)).signed(run.group, signing_key(client))
    certificate = DeliveryCertificate(entries=(other, *rest))
    with pytest.raises(ServerFault, match="another delivery of epoch 1"):
        member.receive(SERVER, wire.encode(replace(message, certificate=certificate)))
    member = run.members[client] = type(member).wake(*before, run.setups[client])
    member.receive(SERVER, wire.encode(message))
    run.compute(client)
    own = member.state.delivery.message.statement
    other = replace(own, vector=b"v" * 32).signed(run.group, signing_key(client))
    with pytest.raises(ServerFault, match="another delivery of epoch 2"):
        member.receive(SERVER, wire.encode(replace(message, visit=99, own=other)))


@pytest.mark.parametrize("other", [header(3), header(1), header(2, period=2)])
def test_an_epoch_that_was_assigned_is_not_left_for_another(other: Any) -> None:
    run, client, message = second_epoch()
    member = run.members[client]
    member.receive(SERVER, wire.encode(message))
    with pytest.raises(ServerFault, match="epoch 2 of period 1 is due"):
        member.receive(SERVER, wire.encode(replace(message, header=other)))


@pytest.mark.parametrize("kind", ["before", "within", "far behind"])
def test_a_member_that_was_set_back_is_out_for_good(kind: str) -> None:
    """It was restored to an earlier snapshot, and the server is honest."""
    run = Waiting()
    run.join()
    client, *others = run.group.members
    old = {0: run.stored[client]}
    for epoch in (1, 2):
        run.fix(header(epoch))
        run.fetch(client)
        old[epoch] = run.stored[client]  # assigned, and nothing computed
        run.say(client, run.compute(client))
        for other in others[: 3 if epoch == 1 else 2]:
            run.visit(other)
    run.stored[client] = old[{"before": 1, "within": 2, "far behind": 0}[kind]]
    run.kill(client)
    with pytest.raises(ServerFault, match="set back"):
        run.fetch(client)
    assert isinstance(run.members[client].state, Left)


def test_a_leader_restored_to_an_earlier_epoch_is_refused() -> None:
    run = Waiting()
    run.join()
    run.fix(header(1))
    for client in run.group.members[1:]:
        run.visit(client)
    old = run.stored[SERVER]
    first = run.group.members[0]
    run.visit(first)
    run.fix(header(2))
    for client in run.group.members:
        run.visit(client)
    run.stored[SERVER] = old
    run.kill(SERVER)
    with pytest.raises(ServerFault, match="assigned epoch 1 of period 1 after epoch 2"):
        run.fetch(first)
    assert run.server.opened is None  # and nothing is opened twice


def test_a_leader_restored_within_an_epoch_gets_the_same_bytes_again() -> None:
    run = Waiting()
    run.join()
    run.fix(header(1))
    old = run.stored[SERVER]
    client = run.group.members[0]
    run.visit(client)
    sent = run.members[client].resend()
    run.stored[SERVER] = old
    run.kill(SERVER)
    run.say(client, sent)  # before anybody has fetched
    assert client not in run.server.expected
    run.stored[SERVER] = old
    run.kill(SERVER)
    assert run.fetch(client) == sent


def test_a_member_whose_deadline_has_passed_keeps_no_key() -> None:
    run = Waiting()
    run.join()
    run.fix(header(1))
    client = run.group.members[0]
    run.fetch(client)
    member = run.members[client]
    root = member.state.root.reveal()
    member.withdraw("its deadline has passed")
    assert member.phase == "Over" and root not in member.snapshot() and not member.resend()
    (answer,) = run.say(client, Waiting.fetching(client))
    with pytest.raises(RoundIsOver):
        member.receive(SERVER, answer.data)


def test_a_member_leaves_when_what_came_beside_an_assignment_is_wrong() -> None:
    run, client, message = second_epoch()
    member = run.members[client]
    member.receive(SERVER, wire.encode(message))
    with pytest.raises(ServerFault, match="another base"):
        raise member.leave("sent another base than the header names")
    assert isinstance(member.state, Left)


def test_a_member_needs_its_own_leaf_and_key() -> None:
    group = fixed_group()
    setup = Waiting(group).setups[group.members[0]]
    with pytest.raises(ConfigError, match="not in group"):
        replace(setup, party=ClientId(999))
    with pytest.raises(ConfigError, match="another signing key"):
        replace(setup, key=signing_key(999))


@pytest.mark.parametrize(
    "changed", [{"epoch": 0}, {"period": 0}, {"length": 0}, {"length": 1 << 40}]
)
def test_a_header_that_cannot_be_is_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        replace(header(1), **changed)


# -- at the server


def collecting() -> tuple[Waiting, ClientId, Outbound]:
    """A group in its first epoch, and a delivery that was not sent yet."""
    run = Waiting()
    run.join()
    run.fix(header(1))
    run.visit(run.group.members[1])
    client = run.group.members[0]
    run.fetch(client)
    return run, client, run.compute(client)[0]


def signed_again(run: Waiting, client: ClientId, message: Any, **changed: Any) -> Any:
    """A member that lies: other values, under its own signature."""
    statement = replace(message.statement, **changed)
    return replace(message, statement=statement.signed(run.group, signing_key(client)))


def of_other_words(run: Waiting, client: ClientId, message: Any, vector: bytes) -> Any:
    made = wire.HashedBytes(vector)
    return replace(signed_again(run, client, message, vector=made.digest), vector=made)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run, c, m: signed_again(run, c, m, link=b"x" * 32), "another epoch or chain"),
        (lambda run, c, m: signed_again(run, c, m, epoch=2), "another epoch or chain"),
        (lambda run, c, m: signed_again(run, c, m, vector=b"x" * 32), "signed other bytes"),
        (lambda run, c, m: signed_again(run, c, m, mask_key=bytes(32)), "invalid mask key"),
        (
            lambda run, c, m: signed_again(
                run, c, m, mask_key=run.server.state.delivered[run.group.members[1]].mask_key
            ),
            "another member's",
        ),
        (
            lambda run, c, m: replace(m, statement=replace(m.statement, mask_key=b"x" * 32)),
            "invalid signature",
        ),
        (
            lambda run, c, m: replace(m, statement=replace(m.statement, signature=bytes(64))),
            "invalid signature",
        ),
        (
            lambda run, c, m: replace(
                m, statement=replace(m.statement, sender=run.group.members[2])
            ),
            "another client's name",
        ),
        (lambda run, c, m: of_other_words(run, c, m, m.vector[:-4]), "the wrong number"),
        (lambda run, c, m: of_other_words(run, c, m, m.vector + bytes(4)), "the wrong number"),
    ],
)
def test_a_delivery_that_is_wrong_is_refused_and_changes_nothing(
    change: Callable[..., Any], reason: str
) -> None:
    run, client, sent = collecting()
    before = run.server.snapshot()
    wrong = wire.encode(change(run, client, wire.decode(sent.data)))
    with pytest.raises(PeerError, match=reason):
        run.server.receive(client, wrong)
    assert run.server.snapshot() == before
    run.say(client, [sent])
    assert client not in run.server.expected


def test_a_second_vector_of_one_epoch_is_refused_and_the_same_is_not() -> None:
    run, client, sent = collecting()
    message = wire.decode(sent.data)
    run.say(client, [sent])
    other = wire.encode(of_other_words(run, client, message, bytes(len(message.vector))))
    for _ in range(2):
        before = run.server.snapshot()
        assert run.server.receive(client, sent.data) == []
        with pytest.raises(PeerError, match="second key or vector"):
            run.server.receive(client, other)
        assert run.server.snapshot() == before
        for each in run.group.members:  # and once more when the sum is opened
            run.visit(each)
    run.fix(header(2))
    assert run.server.receive(client, sent.data) == []  # late, and known
    with pytest.raises(PeerError):
        run.server.receive(client, other)


def test_strangers_and_second_deposits_are_refused() -> None:
    run = Waiting()
    first = run.group.members[0]
    run.join(first)
    deposit = run.members[first].resend()[0].data
    assert run.server.receive(first, deposit) == []
    other = Waiting(seed=1)
    other.join(first)
    with pytest.raises(PeerError, match="second key"):
        run.server.receive(first, other.members[first].resend()[0].data)
    with pytest.raises(PeerError, match="not in this cohort"):
        run.server.receive(ClientId(999), deposit)
    with pytest.raises(PeerError, match="another client's name"):
        run.server.receive(run.group.members[1], deposit)
    foreign = Waiting(fixed_group(number=3))
    foreign.join(run.group.members[1])
    with pytest.raises(PeerError, match="another epoch or chain"):
        run.server.receive(
            run.group.members[1], foreign.members[run.group.members[1]].resend()[0].data
        )


def test_a_member_is_told_when_to_come_back_and_not_who_is_missing() -> None:
    told = []
    for missing in (2, 3):
        run = Waiting()
        run.join()
        run.fix(header(1))
        for client in run.group.members:
            if client != run.group.members[missing]:
                run.visit(client)
        told.append(
            run.server.receive(
                run.group.members[0], Waiting.fetching(run.group.members[0], delivered=1)[0].data
            )[0]
        )
    assert told[0] == told[1] and told[0].kind == "ComeBack"


def test_a_retired_group_keeps_nothing_and_tells_everybody() -> None:
    run, client, sent = collecting()
    out = run.server.retire("a member has left")
    assert {message.to for message in out} == set(run.group.members)
    assert run.server.phase == "Over" and len(run.server.snapshot()) < 1000
    assert run.server.opened is None and not run.server.expected
    with pytest.raises(RoundIsOver, match="a member has left"):
        run.server.receive(client, sent.data)
    with pytest.raises(MisuseError):
        run.server.fix(header(2))
    member = run.members[client]
    assert member.receive(SERVER, out[0].data) == [] and member.phase == "Over"
    assert not member.messages
