"""Sums of a group that waits are exact, whoever comes when and whatever is killed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import prg
from tessera.crypto.field import Field
from tessera.crypto.group import Group
from tessera.crypto.ring import Ring
from tessera.errors import MisuseError
from tessera.ids import SERVER, ClientId
from tessera.protocols.epochs.member import AwaitingCertificate
from tessera.protocols.epochs.messages import EpochKind
from waiting_group import Waiting, fixed_group, header, total_of, words_of

RINGS = (Ring(8), Ring(22), Ring(64), Ring(100), Field(31), Field(61))


@given(st.data())
def test_a_sum_is_exact_for_every_order_of_arrival(data: st.DataObject) -> None:
    run = Waiting(fixed_group(data.draw(st.integers(2, 6))))
    run.join(*data.draw(st.permutations(run.group.members)))
    for epoch in (1, 2, 3):
        ring: Group = data.draw(st.sampled_from(RINGS))
        at = header(epoch, ring=ring, length=data.draw(st.integers(1, 9)))
        run.epoch(at, data.draw(st.permutations(run.group.members)))
        assert run.sum() == total_of(run.group, at)


def test_nothing_opens_before_the_last_member_has_delivered() -> None:
    run = Waiting()
    run.join()
    at = header(1, length=500)
    run.fix(at)
    plain = at.ring.zeros(at.length)
    *early, last = run.group.members
    for client in early:
        run.visit(client)
        plain = at.ring.add(plain, words_of(client, at))
        assert run.server.opened is None and run.server.expected
        partial = at.ring.sub(run.server.state.total, plain)
        assert np.count_nonzero(partial) == 500  # the masks with whoever is missing
    run.visit(last)
    assert run.sum() == total_of(run.group, at)


def test_kinds_lengths_and_periods_change_from_epoch_to_epoch() -> None:
    run = Waiting()
    run.join()
    for at in (
        header(1, ring=Field(61), length=12),
        header(2, length=7),
        header(3, kind=EpochKind.UNION, period=2, length=9),
        header(4, period=2),
    ):
        run.epoch(at)
        assert run.sum() == total_of(run.group, at)


def test_the_masks_of_ten_are_made_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = prg.accumulate

    def counted(group, acc, streams, signs, **more):
        calls.append(len(streams))
        real(group, acc, streams, signs, **more)

    monkeypatch.setattr(prg, "accumulate", counted)
    run = Waiting(fixed_group(10))
    run.join()
    run.epoch(at := header(1, length=100_000))
    assert run.sum() == total_of(run.group, at)
    assert calls == [9] * 10  # one call for all words and all peers


# -- kills


def script(seed: int) -> None:
    """Some epochs of one group: members come by chance, and everybody is killed by chance.

    A kill between storing and sending loses what was to be sent; one before storing loses what was
    computed. Messages come twice. Whoever was killed goes on from what it stored.
    """
    rng = np.random.default_rng(seed)
    run = Waiting(fixed_group(int(rng.integers(2, 6))), seed=seed)
    members = list(run.group.members)

    def often(probability: float) -> bool:
        return bool(rng.random() < probability)

    def some() -> ClientId:
        return members[int(rng.integers(len(members)))]

    run.join()
    for epoch in range(1, 4):
        at = header(epoch, ring=RINGS[int(rng.integers(len(RINGS)))], length=4)
        if often(0.3):
            run.fix(header(epoch, length=3, inputs={"base": b"x" * 32}))  # and nobody fetches it
        run.fix(at)
        sent: dict[ClientId, set[bytes]] = {client: set() for client in members}
        for _ in range(400):
            if run.server.opened is not None:
                break
            client = some()
            if often(0.1):
                run.kill(SERVER)
            out = run.fetch(client)
            if often(0.2):
                run.kill(client)  # it has stored the assignment, and trained nothing
            if run.members[client].due is not None:
                before = dict(run.stored)
                out = run.compute(client)
                if often(0.2):  # killed before it had stored: nothing was sent
                    run.stored = before
                    run.kill(client)
                    continue
            if often(0.2):  # killed after it had stored, before it sent
                run.kill(client)
                continue
            sent[client] |= {message.data for message in out}
            run.say(client, out)
            if often(0.3):
                run.say(client, run.members[client].resend())
        assert run.server.opened is not None, "the group never came to an end"
        assert run.sum() == total_of(run.group, at)
        assert all(len(each) <= 1 for each in sent.values()), "a second vector of one epoch"
        assert {m.delivered for m in run.members.values()} == {epoch}
        run.kill(SERVER)
        assert run.sum() == total_of(run.group, at)


@pytest.mark.parametrize("block", range(10))
def test_sums_are_exact_with_kills_at_both_ends_in_200_scripts(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        script(seed)


# -- what is stored, and when it goes


def test_a_retry_sends_the_stored_bytes_and_nothing_is_computed_again() -> None:
    run = Waiting()
    run.join()
    run.fix(header(1))
    client = run.group.members[0]
    run.fetch(client)
    out = run.compute(client)
    run.kill(client)
    assert run.members[client].resend() == out
    assert run.fetch(client) == out  # the server has none: the same bytes
    run.say(client, out)
    (answer,) = run.ask(client)
    assert answer.kind == "ComeBack"
    with pytest.raises(MisuseError):
        run.members[client].deliver(words_of(client, header(1)), entropy=run.entropy)


def test_root_and_key_go_with_the_delivery_and_the_bytes_with_the_certificate() -> None:
    run = Waiting()
    run.join()
    client = run.group.members[1]
    for epoch in (1, 2):
        run.fix(header(epoch))
        run.fetch(client)
        member = run.members[client]
        root, coins = member.state.root.reveal(), member.coins.root.reveal()
        assert (member.delivered, member.settled) == (epoch - 1, epoch - 1)
        assert not member.messages  # the bytes of the epoch before are gone
        run.compute(client)
        snapshot, messages = run.stored[client]
        assert all(root not in each for each in (snapshot, *messages.values()))
        assert coins not in snapshot and len(messages) == 1
        assert isinstance(member.state, AwaitingCertificate)
        assert (member.delivered, member.settled) == (epoch, epoch - 1)
        for other in run.group.members:
            run.visit(other)


def test_the_coins_of_an_epoch_are_the_same_when_it_is_assigned_again() -> None:
    run = Waiting()
    run.join()
    run.fix(header(1))
    client = run.group.members[0]
    run.fetch(client)
    first = run.members[client].coins.root
    run.kill(client)
    run.fetch(client)
    assert run.members[client].coins.root == first
    for each in run.group.members:
        run.visit(each)
    run.fix(header(2))
    run.fetch(client)
    assert run.members[client].coins.root != first


def test_an_epoch_that_nobody_fetched_is_replaced_and_one_that_was_fetched_is_not() -> None:
    run = Waiting()
    run.join()
    run.fix(header(1))
    run.fix(other := header(1, inputs={"base": b"x" * 32}))
    run.ask(run.group.members[0])
    with pytest.raises(MisuseError):
        run.fix(header(1))
    for client in run.group.members:
        run.visit(client)
    assert run.sum() == total_of(run.group, other)


@pytest.mark.parametrize(
    "wrong", [header(1), header(3), header(2, period=3)], ids=["again", "skipped", "period"]
)
def test_the_server_fixes_the_next_epoch_only(wrong) -> None:
    run = Waiting()
    with pytest.raises(MisuseError):
        run.server.fix(header(1))  # keys are missing
    run.join()
    with pytest.raises(MisuseError):
        run.server.fix(header(2))
    run.epoch(header(1))
    with pytest.raises(MisuseError):
        run.server.fix(wrong)


def test_words_that_do_not_fit_leave_the_member_as_it_was() -> None:
    run = Waiting()
    run.join()
    run.fix(header(1))
    client = run.group.members[0]
    run.fetch(client)
    before = run.members[client].snapshot()
    for wrong in (np.zeros(4, np.uint32), np.zeros(5, np.uint64), np.zeros((5, 1), np.uint32)):
        with pytest.raises(MisuseError):
            run.members[client].deliver(wrong, entropy=run.entropy)
    assert run.members[client].snapshot() == before
