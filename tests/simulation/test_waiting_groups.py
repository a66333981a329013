"""Groups that wait: whoever is there delivers, a group opens when all have, exactly once each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rounds.population import DENSE, derived, federation, members, plan, specs, trainer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.errors import ConfigError, MisuseError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.table import LazyTable
from tessera.plan import SimulationPlan
from tessera.protocols.epochs.messages import EpochKind
from tessera.rounds.epochs.client import EpochClient, EpochClientSetup
from tessera.rounds.epochs.group import MemoryVectors
from tessera.rounds.epochs.server import EpochServer, EpochServerSetup
from tessera.simulation.epochs import EpochFederation
from tessera.simulation.faults import Drop
from tessera.simulation.subcohort import one_by_one

SIZE = 4


def grouped(cohort: int = 8, **more):
    return plan(cohort=cohort, groups={"size": SIZE, **more.pop("groups", {})}, **more)


def waiting(
    clients: int = 8,
    *,
    cohort: int = 8,
    absent=None,
    trained=None,
    crypto="none",
    views=None,
    **more,
):
    """`absent`: {round: clients}. `trained` counts every client's trainings."""
    participants = members(clients)

    def counting(client):
        train = trainer(client)

        def one(submodel):
            if trained is not None:
                trained[client] += 1
            return train(submodel)

        return one

    def faults(round_id, there):
        return [Drop(c, "collect") for c in there if c in (absent or {}).get(int(round_id), ())]

    return EpochFederation(
        grouped(cohort, simulation=SimulationPlan(crypto=crypto, crypto_every=2), **more),
        participants,
        trainer=one_by_one({client: counting(client) for client in participants}),
        dense=np.zeros(DENSE, dtype=np.float32),
        tables={name: LazyTable(spec) for name, spec in specs().items()},
        derived=derived(),
        entropy=ScriptedEntropy(b"population"),
        faults=faults,
        views=views,
    )


def groups_of(fed):
    """All of them, met or not."""
    return [fed.epochs.group(at) for at in range(len(fed.epochs.members))]


def ended(fed):
    return list(fed.round())[-1]


def model_of(fed):
    every = {n: np.arange(t.size, dtype=np.uint64) for n, t in fed.tables.items()}
    return [fed.dense, *(t.values(every[n]) for n, t in fed.tables.items())]


def test_with_nobody_missing_a_round_is_that_of_groups_that_meet():
    """The same sums but for the coins of rounding: both merge the same two groups of four."""
    fed, together = waiting(), federation(grouped(), clients=8)
    end, other = ended(fed), list(together.round())[-1]
    assert (end.survivors, end.groups_opened, end.delivered, end.waited) == (8, 2, 8, (0, 0))
    assert end.weight == other.weight and end.rows_opened == other.rows_opened
    for mine, theirs in zip(model_of(fed), model_of(together), strict=True):
        assert np.abs(theirs).max() > 0.01
        np.testing.assert_allclose(mine, theirs, atol=2e-3)


def test_a_group_waits_for_its_last_member_and_loses_nothing():
    trained: Counter[ClientId] = Counter()
    late = ClientId(0)
    fed = waiting(absent={1: [late], 2: [late]}, trained=trained)
    assert ended(fed).groups_opened == 2
    before = model_of(fed)
    first = ended(fed)
    group = fed.epochs.group_of(late)
    assert (first.survivors, first.delivered, first.groups_opened) == (SIZE, 7, 1)
    assert group.due == {late} and group.begun
    base = group.at.open
    second = ended(fed)  # the other group goes on; of this one only the late member is invited
    assert second.cohort == 5 and second.survivors == SIZE and group.at.open is base
    third = ended(fed)
    assert third.survivors == 8 and sorted(third.waited) == [0, 2]
    assert trained[late] == 2 and all(trained[c] == 2 for c in group.group.members)
    assert not np.array_equal(before[0], fed.dense)


def test_an_old_sum_counts_less():
    fresh, old = waiting(4, cohort=4), waiting(4, cohort=4, absent={0: (), 1: [ClientId(2)]})
    for fed in (fresh, old):
        ended(fed)
    steps = []
    for fed in (fresh, old):
        before = fed.dense.copy()
        while not ended(fed).groups_opened:
            pass
        steps.append(fed.dense - before)
    np.testing.assert_allclose(steps[1], steps[0] / np.sqrt(2), atol=1e-3)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.0, 0.5))
def test_every_member_trains_once_in_every_opened_epoch(seed, share):
    trained: Counter[ClientId] = Counter()
    rng = np.random.default_rng(seed)
    absent = {r: [ClientId(c) for c in range(14) if rng.random() < share] for r in range(12)}
    fed = waiting(14, absent=absent, trained=trained)  # three groups, and two that have none
    ends = [ended(fed) for _ in range(12)]
    assert all(end.survivors == SIZE * end.groups_opened for end in ends)
    assert all(end.cohort <= 8 and end.delivered <= end.cohort for end in ends)
    assert sum(end.delivered for end in ends) == sum(trained.values())
    opened = 0
    for group in groups_of(fed):
        opened += group.at.updates
        for member in group.group.members:
            late = member in group.due or not group.begun
            assert trained[member] == group.at.updates + (not late)
            # What a group that waits has not opened is pending at home, and nothing else is.
            local = fed.participants[member].local
            assert local.unsettled is None or not late
    assert opened == sum(end.groups_opened for end in ends)


def test_a_group_with_three_sums_out_of_bounds_is_retired_and_the_others_go_on(monkeypatch):
    fed = waiting()
    assert ended(fed).groups_opened == 2
    bad = fed.epochs.groups[0]
    add, ring = MemoryVectors.add, bad.plan.ring
    liar, half = bad.group.members[0], np.uint64(1 << (ring.bits - 1))

    def lies(self, member, words):
        if member == liar:
            words = ring.add(words, np.full_like(words, half))
        add(self, member, words)

    monkeypatch.setattr(MemoryVectors, "add", lies)
    for number in range(3):
        dense = fed.dense.copy()
        end = ended(fed)
        assert (end.groups_aborted, end.groups_opened) == (1, 1)
        assert end.groups_retired == (number == 2) and not np.array_equal(dense, fed.dense)
    assert bad.at.retired and not bad.due and bad.vectors.sum is None
    end = ended(fed)
    assert (end.survivors, end.cohort, end.groups_retired) == (SIZE, SIZE, 1)
    with pytest.raises(MisuseError, match="retired"):
        bad.opened(fed.model, RoundId(9))


def test_a_new_period_begins_with_a_union_after_its_updates():
    fed = waiting(4, cohort=4, groups={"period": 2})
    (group,) = groups_of(fed)
    kinds = []
    for _ in range(5):
        kinds.append((group.at.period, group.next_kind, group.at.updates))
        assert ended(fed).groups_opened == 1
    assert [period for period, _, _ in kinds] == [1, 1, 2, 2, 3]
    assert [kind is EpochKind.UNION for _, kind, _ in kinds] == [True, False, True, False, True]
    assert group.at.number == 3 + 5  # unions and updates, one chain


def test_a_union_that_does_not_decode_is_asked_for_again_under_another_salt(monkeypatch):
    fed = waiting(4, cohort=4)
    (group,) = groups_of(fed)
    decode = type(group.plan.union_encoding(RoundId(1))).decode
    failing = iter([True, True, False])

    def some(self, total):
        found = decode(self, total)
        return replace(found, residual=1) if next(failing) else found

    monkeypatch.setattr(type(group.plan.union_encoding(RoundId(1))), "decode", some)
    first, second = ended(fed), ended(fed)
    assert [end.union_residual for end in (first, second)] == [1, 1]
    assert first.cohort == second.cohort == 0 and group.at.failures == 2
    assert ended(fed).groups_opened == 1 and group.at.failures == 0


def test_sums_under_masks_are_those_in_memory():
    """The same epochs by the roles of a client and a server: header for header, word for word."""
    fed = waiting(4, cohort=4)
    (memory,) = groups_of(fed)
    entropy = ScriptedEntropy(b"population")
    signers = identities(memory.group.members, entropy, fed.plan.federation)
    server = EpochServer(EpochServerSetup(plan=fed.plan, group=memory.group))
    roles, apart = {}, members(4)
    for client in memory.group.members:
        setup = EpochClientSetup(
            plan=fed.plan,
            group=memory.group,
            party=client,
            key=signers[client].key,
            local=apart[client].local,
            entropy=entropy,
        )
        roles[client], out = EpochClient.join(setup)
        server.receive(client, out[0].data)
    results = []
    for visit in range(3):
        mine = memory.opened(fed.model, RoundId(0))
        server.open_next(fed.model, RoundId(0))
        for client, role in roles.items():
            (answer,) = server.receive(client, role.fetch(visit)[0].data)
            out, one = role.receive(SERVER, answer.data), fed._visit(client, RoundId(0))
            if mine.header.kind is EpochKind.UNION:
                one.offer_rows()
            else:
                assert role.due == mine.header
                assert role.coins == fed.coins(RoundId(0), client)
                out = role.supply(trainer(client)(role.pending))
                one.deliver(trainer(client)(one.fetch()))
            assert not server.full
            server.receive(client, out[0].data)
        noise = entropy.secret("noise of a server")
        results.append([each.take(fed.model, noise) for each in (memory, server)])
    assert results[0] == [None, None]
    for here, there in results[1:]:
        np.testing.assert_array_equal(here.dense, there.dense)
        assert here.weight == there.weight > 0
        for name, part in here.tables.items():
            np.testing.assert_array_equal(part.mean, there.tables[name].mean)


def scattered(seed: int, rounds: int = 12, clients: int = 14):
    rng = np.random.default_rng(seed)
    return {r: [ClientId(c) for c in range(clients) if rng.random() < 0.3] for r in range(rounds)}


def test_a_round_is_secure_if_all_groups_that_it_merged_were_masked():
    fed, seen = waiting(14, crypto="sampled"), set()  # messages of groups 0 and 2 are real
    for _ in range(8):
        event = ended(fed)
        merged = {fed.epochs.group_of(client).group.number for client in fed.epochs.counted}
        assert event.measured and event.secure == (merged <= {0, 2})
        seen.add((event.measured, event.secure))
    assert seen == {(True, True), (True, False)}


@pytest.mark.parametrize("crypto", ["every", "sampled"])
def test_a_round_with_real_messages_gives_the_same_model_to_the_bit(crypto):
    """One group of two is carried when sampled; whose messages are real changes nothing."""
    ideal, real = (
        waiting(14, absent=scattered(3), crypto=each, groups={"period": 2})
        for each in ("none", crypto)
    )
    for _ in range(12):
        one, other = ended(ideal), ended(real)
        assert (one.survivors, one.waited, one.rows_opened) == (
            other.survivors,
            other.waited,
            other.rows_opened,
        )
    assert ideal.epochs.groups[0].at.number > 4
    for mine, theirs in zip(model_of(ideal), model_of(real), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert one.bytes_up == {} and not one.measured


def test_bytes_are_those_of_one_fetch_and_one_delivery():
    fed = waiting(4, cohort=4, crypto="every")
    first, second = ended(fed), ended(fed)

    def parts(sent):
        return {name for name, count in sent.items() if count}

    assert parts(first.bytes_up) == {"keys", "union", "rows down", "update"}
    assert parts(second.bytes_up) == {"rows down", "update"} and second.bytes_up["union"] == 0.0
    assert parts(second.bytes_down) == {"rows down"}
    assert second.bytes_down["rows down"] < first.bytes_down["rows down"]  # the union came once
    assert second.measured and second.secure
    assert parts(second.server_seconds) == {"rows down", "update"}


@pytest.mark.parametrize("crypto", ["none", "every"])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_goes_on_from_what_it_stored(crypto, stop):
    """Vectors that wait are in the checkpoint, and so is what was charged and frozen."""
    absent = scattered(5)
    whole = waiting(14, absent=absent, crypto=crypto, groups={"period": 2})
    ends = [ended(whole) for _ in range(10)]
    first = waiting(14, absent=absent, crypto=crypto, groups={"period": 2})
    for _ in range(stop):
        ended(first)
    stored = first.at_rest()
    second = waiting(14, absent=absent, crypto=crypto, groups={"period": 2})
    second.model.restore(first.model.dense_parts)
    for name, table in second.tables.items():
        ids = first.tables[name].touched_ids
        table.put(ids, first.tables[name].values(ids), np.ones(len(ids), np.int64))
    second.go_on_at(stop, stored)
    assert second.at_rest() == stored
    for at in range(stop, 10):
        assert ended(second).waited == ends[at].waited
    for mine, theirs in zip(model_of(whole), model_of(second), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for client, participant in whole.participants.items():
        spent = second.participants[client].local.ledger
        assert spent.guarantee() == participant.local.ledger.guarantee()
        assert len(spent.entries) == len(participant.local.ledger.entries)


def test_a_group_that_waits_too_long_is_retired():
    late = ClientId(0)
    absent = {r: [late] for r in range(1, 20)}
    fed = waiting(absent=absent, groups={"longest_wait": 3})
    ends = [ended(fed) for _ in range(9)]
    assert [end.groups_retired for end in ends] == [0] * 4 + [1] * 5
    group = fed.epochs.group_of(late)
    assert "has not come" in group.at.retired and all(end.groups_opened == 1 for end in ends[1:])


def test_all_groups_have_their_turns():
    """Also those whose union is still to come: none is met again before others are met at all."""
    fed = waiting(40, cohort=8)
    for _ in range(25):
        ended(fed)
    updates = [group.at.updates for group in groups_of(fed)]
    assert sum(updates) == 25 * 2 and min(updates) >= 1 and max(updates) <= 12


@pytest.mark.parametrize("stored", [b"", b"junk", "another round"])
def test_a_checkpoint_that_is_not_this_runs_is_refused(stored):
    fed = waiting()
    ended(fed)
    fed = waiting()
    fed.go_on_at(2, waiting().at_rest() if stored == "another round" else stored)
    assert fed.next_round == 2  # a model can be read without it
    with pytest.raises(ConfigError) as refused:
        ended(fed)
    assert refused.value.hint
