"""Bad shares: with a threshold of good ones the sum still opens, and the authors are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

import harness
from tessera.crypto import shamir
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import PeerError, RoundAborted
from tessera.ids import ClientId
from tessera.protocols.secagg.recovery import Wanted, recover

HOLDERS = [ClientId(c) for c in range(10, 20)]
POINTS = {c: i for i, c in enumerate(HOLDERS, start=1)}


def wanted(owner: int, threshold: int, spoilt: dict[ClientId, bytes]) -> Wanted:
    secret = ScriptedEntropy(b"recovery").secret("secret", owner)
    coefficients = ScriptedEntropy(b"recovery").secret("coefficients", owner)
    [shares] = shamir.split(
        [secret], threshold=threshold, points=range(1, 11), coefficients=coefficients
    )
    given = {**dict(zip(HOLDERS, shares, strict=True)), **spoilt}
    return Wanted(ClientId(owner), POINTS, given, lambda found: found == secret)


def test_good_shares_give_every_secret():
    found = recover([wanted(o, 6, {}) for o in range(5)], threshold=6)
    assert sorted(found.secrets) == list(range(5))
    assert not found.bad_holders
    assert not found.bad_owners


@pytest.mark.parametrize("liars", [[10], [15], [10, 11], [12, 13, 14]])
def test_holders_that_give_wrong_shares_are_named_and_worked_around(liars):
    other = wanted(99, 6, {}).shares
    spoilt = {ClientId(c): other[c] for c in liars}
    found = recover([wanted(o, 6, spoilt) for o in range(3)], threshold=6)
    assert sorted(found.secrets) == [0, 1, 2]
    assert found.bad_holders == set(liars)
    assert not found.bad_owners


def test_shares_beyond_the_threshold_are_not_even_looked_at():
    found = recover([wanted(0, 6, {HOLDERS[-1]: b"\xff" * 34})], threshold=6)
    assert 0 in found.secrets
    assert not found.bad_holders


def test_garbage_that_is_no_share_at_all_is_named_too():
    found = recover([wanted(0, 6, {HOLDERS[0]: b"\xff" * 34})], threshold=6)
    assert found.bad_holders == {HOLDERS[0]}
    assert 0 in found.secrets


def test_an_owner_that_shared_another_secret_is_named():
    one = wanted(0, 6, {})
    lying = replace(one, is_right=lambda secret: False)
    found = recover([lying, wanted(1, 6, {})], threshold=6)
    assert found.bad_owners == {0}
    assert not found.bad_holders
    assert sorted(found.secrets) == [1]


def spoiling(cohort: harness.Cohort, holder: ClientId, kind: str):
    """For `between_messages`: this holder's shares of one kind are not what it was given."""

    def spoil(simulator) -> None:
        server = simulator.server
        if server.phase == "unmask" and holder in server._phase.answers:
            message = server._phase.answers[holder]
            wrong = {c: bytes(34) for c in getattr(message, kind)}
            server._phase.answers[holder] = replace(message, **{kind: wrong})

    return spoil


@pytest.mark.parametrize("kind", ["self_masks", "mask_keys"])
def test_in_a_round_the_sum_opens_and_the_liar_is_named(kind):
    cohort = harness.Cohort.of(harness.params(9))
    liar, gone = cohort.clients[0], cohort.clients[5]
    joined = {c: cohort.join(c) for c in cohort.clients}
    simulator = harness.Simulator(
        cohort.server(),
        {c: member for c, (member, _) in joined.items()},
        {c: out for c, (_, out) in joined.items()},
        faults=harness.drops([gone], "collect"),
        between_messages=spoiling(cohort, liar, kind),
    )
    outcome = simulator.run()
    assert outcome.aborted is None
    [complaint] = simulator.server.complaints
    assert isinstance(complaint, PeerError)
    assert complaint.peer == liar
    assert "wrong share" in complaint.reason
    survivors = [c for c in cohort.clients if c != gone]
    group = cohort.params.stages[0].group
    total = harness.plain_dense(cohort, 0, survivors)
    assert group.to_ints(simulator.server.sums[0].dense) == total


def test_an_owner_that_committed_to_another_seed_ends_the_round_named():
    cohort = harness.Cohort.of(harness.params(6))
    liar = cohort.clients[2]
    server = cohort.server()
    joined = {c: cohort.join(c) for c in cohort.clients}

    def spoil(simulator) -> None:
        roster = simulator.server._roster
        if simulator.server.phase == "unmask" and roster is not None:
            # As if it had advertised this from the start: only the server looks at commitments.
            members = tuple(
                replace(m, stages=tuple(replace(s, commitment=bytes(32)) for s in m.stages))
                if m.client == liar
                else m
                for m in roster.members
            )
            simulator.server._roster = replace(roster, members=members)

    simulator = harness.Simulator(
        server,
        {c: member for c, (member, _) in joined.items()},
        {c: out for c, (_, out) in joined.items()},
        between_messages=spoil,
    )
    outcome = simulator.run()
    assert isinstance(outcome.aborted, RoundAborted)
    assert [c.peer for c in server.complaints] == [liar]
    assert "wrongly" in server.complaints[0].reason
    assert server.sums == ()
