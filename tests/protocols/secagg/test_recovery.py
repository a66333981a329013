"""Bad shares: with a threshold of good ones the sum still opens, and the authors are named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
from tessera.crypto import shamir
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.field import Field
from tessera.errors import PeerError, RoundAborted
from tessera.ids import ClientId
from tessera.protocols.secagg import unmask
from tessera.protocols.secagg.unmask import RecoveryTask, recover
from tessera.wire.stored import Kept

HOLDERS = [ClientId(c) for c in range(10, 20)]
LIMBS = Field(17)


def task(
    owner: int, threshold: int, spoilt: dict[ClientId, bytes], *, holders: int = 10
) -> RecoveryTask:
    secret = ScriptedEntropy(b"recovery").secret("secret", owner)
    coefficients = ScriptedEntropy(b"recovery").secret("coefficients", owner)
    names = [ClientId(10 + i) for i in range(holders)]
    points = {c: i for i, c in enumerate(names, start=1)}
    [shares] = shamir.split(
        [secret], threshold=threshold, points=list(points.values()), coefficients=coefficients
    )
    given = {**dict(zip(names, shares, strict=True)), **spoilt}
    return RecoveryTask(ClientId(owner), points, given, lambda found: found == secret)


def noise(liars: Iterable[int], seed: int = 0) -> dict[ClientId, bytes]:
    """Shares that have nothing to do with the right ones."""
    rng = np.random.default_rng(seed)
    return {
        ClientId(c): LIMBS.pack(rng.integers(0, LIMBS.order, 16, dtype=np.uint32)) for c in liars
    }


def off_by_the_same(one: RecoveryTask, liars: Iterable[int]) -> dict[ClientId, bytes]:
    """Liars that agree to add one polynomial's values to all limbs of their shares: the worst."""
    found = {}
    for c in map(ClientId, liars):
        point = one.points[c]
        limbs = LIMBS.unpack(one.shares[c], 16).astype(np.int64)
        found[c] = LIMBS.pack(((limbs + point * point + 7) % LIMBS.order).astype(np.uint32))
    return found


def test_good_shares_give_every_secret():
    found = recover([task(o, 6, {}) for o in range(5)], threshold=6)
    assert sorted(found.secrets) == list(range(5))
    assert not found.bad_holders
    assert not found.bad_owners


@pytest.mark.parametrize("liars", [[10], [15], [10, 11], [12, 13, 14]])
def test_holders_that_give_wrong_shares_are_named_and_worked_around(liars):
    other = task(99, 6, {}).shares
    spoilt = {ClientId(c): other[c] for c in liars}
    found = recover([task(o, 6, spoilt) for o in range(3)], threshold=6)
    assert sorted(found.secrets) == [0, 1, 2]
    assert found.bad_holders == set(liars)
    assert not found.bad_owners


@pytest.mark.parametrize(
    "liars",
    [[10, 60], [10 + 6 * i for i in range(16)], [10 + i for i in range(16)], [*range(94, 110)]],
    ids=["first and middle", "every sixth", "the first sixteen", "the last sixteen"],
)
@pytest.mark.parametrize("agreed", [False, True])
def test_as_many_liars_as_half_of_the_spare_shares_are_found_wherever_they_are(liars, agreed):
    """100 holders, threshold 67: (100 - 67) // 2 = 16."""
    right = task(0, 67, {}, holders=100)
    spoilt = off_by_the_same(right, liars) if agreed else noise(liars)
    found = recover([task(0, 67, spoilt, holders=100)], threshold=67)
    assert sorted(found.secrets) == [0]
    assert not found.bad_owners
    if min(liars) >= 10 + 67:
        assert not found.bad_holders, "beyond the threshold nobody looks"
    else:
        assert found.bad_holders == set(liars)


@given(st.integers(2, 30), st.data())
def test_up_to_half_of_the_spare_number_is_always_worked_around(holders, data):
    threshold = data.draw(st.integers(1, holders))
    count = data.draw(st.integers(0, (holders - threshold) // 2))
    liars = data.draw(st.permutations(range(10, 10 + holders)))[:count]
    right = task(0, threshold, {}, holders=holders)
    spoilt = {**off_by_the_same(right, liars), **noise(liars[::2])}
    found = recover([task(0, threshold, spoilt, holders=holders)], threshold=threshold)
    assert sorted(found.secrets) == [0]
    assert found.bad_holders <= set(liars)


def test_one_more_liar_that_agrees_with_the_others_hides_the_secret_and_the_owner_is_named():
    liars = [10 + 5 * i for i in range(17)]
    right = task(0, 67, {}, holders=100)
    spoilt = off_by_the_same(right, liars)
    found = recover([task(0, 67, spoilt, holders=100)], threshold=67)
    assert not found.secrets
    assert found.bad_owners == {0}
    assert not found.bad_holders, "nobody is accused without proof that the rest fits"
    # Liars that do not agree are found nearly to the last spare share.
    noisy = recover([task(0, 67, noise(range(20, 51)), holders=100)], threshold=67)
    assert noisy.bad_holders == set(range(20, 51))
    assert sorted(noisy.secrets) == [0]


def test_with_one_spare_share_a_liar_is_found_by_leaving_out_each_in_turn():
    found = recover([task(0, 9, noise([13]))], threshold=9)
    assert sorted(found.secrets) == [0]
    assert found.bad_holders == {13}


def test_a_holder_found_out_once_is_left_out_first(monkeypatch):
    decoded = []
    original = unmask.error_locator

    def counted(*args, **more):
        decoded.append(1)
        return original(*args, **more)

    monkeypatch.setattr(unmask, "error_locator", counted)
    found = recover([task(o, 6, noise([11, 12], seed=o)) for o in range(20)], threshold=6)
    assert sorted(found.secrets) == list(range(20))
    assert found.bad_holders == {11, 12}
    assert len(decoded) == 1


def test_too_few_shares_are_no_secret():
    one = task(0, 6, {})
    few = replace(one, shares=dict(list(one.shares.items())[:5]))
    assert recover([few], threshold=6).bad_owners == {0}


def test_shares_beyond_the_threshold_are_not_even_looked_at():
    found = recover([task(0, 6, {HOLDERS[-1]: b"\xff" * 34})], threshold=6)
    assert 0 in found.secrets
    assert not found.bad_holders


def test_garbage_that_is_no_share_at_all_is_named_too():
    found = recover([task(0, 6, {HOLDERS[0]: b"\xff" * 34})], threshold=6)
    assert found.bad_holders == {HOLDERS[0]}
    assert 0 in found.secrets


def test_an_owner_that_shared_another_secret_is_named():
    one = task(0, 6, {})
    lying = replace(one, is_right=lambda secret: False)
    found = recover([lying, task(1, 6, {})], threshold=6)
    assert found.bad_owners == {0}
    assert not found.bad_holders
    assert sorted(found.secrets) == [1]


def spoiling(cohort: harness.Cohort, holder: ClientId, kind: str):
    """For `between_messages`: this holder's shares of one kind are not what it was given."""

    def spoil(simulator) -> None:
        server = simulator.server
        if server.phase == "unmask" and holder in server.state.answers:
            message = server.state.answers[holder].message
            wrong = {c: bytes(34) for c in getattr(message, kind)}
            server.state.answers[holder] = Kept.of(replace(message, **{kind: wrong}))

    return spoil


@pytest.mark.parametrize("kind", ["self_masks", "mask_keys"])
def test_in_a_round_the_sum_opens_and_the_liar_is_named(kind):
    cohort = harness.Cohort.of(harness.params(9))
    liar, gone = cohort.clients[0], cohort.clients[5]
    simulator = harness.simulator(
        cohort,
        faults=harness.drops([gone], "collect"),
        between_messages=spoiling(cohort, liar, kind),
    )
    outcome = simulator.run()
    assert outcome.aborted is None
    [complaint] = simulator.server.complaints
    assert isinstance(complaint, PeerError)
    assert complaint.peer == liar
    assert complaint.reason == "gave a wrong share, or was given one"
    survivors = [c for c in cohort.clients if c != gone]
    group = cohort.params.stages[0].group
    total = harness.plain_dense(cohort, 0, survivors)
    assert group.to_ints(simulator.server.sums[0].dense) == total


def test_an_owner_that_committed_to_another_seed_ends_the_round_named():
    cohort = harness.Cohort.of(harness.params(6))
    liar = cohort.clients[2]
    server = cohort.server()

    def spoil(simulator) -> None:
        state = simulator.server.state
        if simulator.server.phase == "unmask":
            roster = state.at.listed.message
            # As if it had advertised this from the start: only the server looks at commitments.
            members = tuple(
                replace(m, stages=tuple(replace(s, commitment=bytes(32)) for s in m.stages))
                if m.client == liar
                else m
                for m in roster.members
            )
            listed = Kept.of(replace(roster, members=members))
            simulator.server.state = replace(state, at=replace(state.at, listed=listed))

    simulator = harness.simulator(cohort, server=server, between_messages=spoil)
    outcome = simulator.run()
    assert isinstance(outcome.aborted, RoundAborted)
    assert [c.peer for c in server.complaints] == [liar]
    assert "wrongly, or too many" in server.complaints[0].reason
    assert server.sums == ()


def sealing_garbage(owner: ClientId, to: list[ClientId]):
    """For `between_messages`: this owner's boxes for some holders do not open."""

    def spoil(simulator) -> None:
        answers = getattr(simulator.server.state, "answers", {})
        if simulator.server.phase == "share" and owner in answers:
            boxes = dict(answers[owner].message.boxes)
            boxes |= {c: tuple(bytes(len(b)) for b in boxes[c]) for c in to}
            answers[owner] = Kept.of(replace(answers[owner].message, boxes=boxes))

    return spoil


def test_an_owner_whose_boxes_did_not_open_is_named_before_the_round_ends():
    cohort = harness.Cohort.of(harness.params(6))
    owner, *others = cohort.clients
    server = cohort.server()
    simulator = harness.simulator(
        cohort, server=server, between_messages=sealing_garbage(owner, others[:2])
    )
    outcome = simulator.run()
    assert isinstance(outcome.aborted, RoundAborted)
    assert (outcome.aborted.answered, outcome.aborted.needed) == (4, 5)
    assert [(c.peer, c.reason) for c in server.complaints] == [
        (owner, "left 4 holders with a share, 5 are needed")
    ]


def test_nobody_is_named_where_too_few_answered():
    cohort = harness.Cohort.of(harness.params(6))
    ran = harness.run(cohort, harness.drops(cohort.clients[:2], "unmask"))
    assert isinstance(ran.outcome.aborted, RoundAborted)
    assert not ran.server.complaints
