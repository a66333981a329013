"""Strict quorum: a row opens over a quorum of survivors, or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harness
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, PeerError
from tessera.ids import ClientId
from tessera.protocols.secagg.mask_streams import (
    hold_back_keys,
    hold_back_masks,
    hold_back_tweak,
    unpacked_keys,
)
from tessera.protocols.secagg.messages import RevealedShares
from tessera.protocols.secagg.params import Threat
from tessera.protocols.secagg.server import Server
from tessera.simulation.faults import Drop


def strict(clients: int = 7, bits: int = 20, **more) -> harness.Cohort:
    stage = harness.row_stage(Ring(bits), width=3, dense=2, tables=(0, 2))
    quorums = more.pop("quorums", None)
    seed = more.pop("seed", 0)
    params = harness.params(clients, stage, strict_quorum=True, **more)
    return harness.Cohort.of(params, seed=seed, quorums=quorums)


def assert_rows_are_strict(ran: harness.Ran, silent: set[ClientId]) -> None:
    """Exactly the rows whose surviving members all answered and all still have their quorum."""
    cohort, [total] = ran.cohort, ran.sums
    survivors = set(ran.survivors())
    present = set(ran.server.sums[0].tables[0].members)
    for table in (0, 2):
        groups = harness.plain_groups(cohort, 0, table, present)
        sums = harness.plain_rows(cohort, 0, table, present, survivors)
        expected = {}
        for row, members in groups.items():
            left = members & survivors
            quorums = [cohort.inputs[c][0].quorum or cohort.params.quorum for c in left]
            if left and not left & silent and all(q <= len(left) for q in quorums):
                expected[row] = sums[row]
        group = cohort.params.stages[0].group
        assert harness.opened_rows(total, group, table) == expected
        assert total.tables[table].lost == len(groups) - len(expected)
        assert total.tables[table].shrunk == 0


@given(st.integers(0, 99), st.sampled_from([8, 20, 33, 100]), st.data())
@settings(max_examples=25)
def test_a_row_opens_over_a_quorum_of_survivors_or_not_at_all(seed, bits, data):
    n = data.draw(st.integers(5, 9))
    quorums = {ClientId(3 * i + 1): data.draw(st.integers(2, 4)) for i in range(n)}
    threat = data.draw(st.sampled_from(Threat))
    cohort = strict(n, bits, seed=seed, quorums=quorums, threat=threat)
    most = n - cohort.params.min_survivors
    gone = data.draw(st.permutations(cohort.clients))[:most]
    drops = [Drop(c, data.draw(st.sampled_from(["collect", "unmask"]))) for c in gone]
    ran = harness.run(cohort, drops)
    assert ran.outcome.aborted is None
    assert not ran.outcome.refused
    assert not ran.outcome.left
    assert_rows_are_strict(ran, {d.client for d in drops if d.phase == "unmask"})
    assert Ring(bits).to_ints(ran.sums[0].dense) == harness.plain_dense(cohort, 0, ran.survivors())


def lonely(strict_quorum: bool) -> tuple[harness.Cohort, ClientId, ClientId]:
    """Two clients share a row; one of them drops after masking."""
    stage = harness.row_stage(Ring(20), width=2)
    params = harness.params(7, stage, strict_quorum=strict_quorum)
    cohort = harness.Cohort.of(params)
    stays, drops = cohort.clients[0], cohort.clients[1]
    for client in cohort.clients:
        rows = np.array([5] if client in (stays, drops) else [], dtype=np.uint64)
        words = Ring(20).from_ints([7 * client + 1, 1] * len(rows)).reshape(len(rows), 2)
        part = harness.RowInput(rows=rows, words=words)
        cohort.inputs[client] = [harness.Contribution(tables={0: part})]
    return cohort, stays, drops


def test_a_group_shrunk_to_one_opens_without_the_rule_and_not_with_it():
    cohort, stays, drops = lonely(strict_quorum=False)
    ran = harness.run(cohort, [Drop(drops, "collect")])
    assert harness.opened_rows(ran.sums[0], Ring(20), 0) == {5: [7 * stays + 1, 1]}
    assert ran.sums[0].tables[0].shrunk == 1

    cohort, stays, drops = lonely(strict_quorum=True)
    ran = harness.run(cohort, [Drop(drops, "collect")])
    assert harness.opened_rows(ran.sums[0], Ring(20), 0) == {}
    assert ran.sums[0].tables[0].lost == 1
    shares = [
        wire.decode(s.data, expect=[RevealedShares])
        for s in ran.views.by_party["server"]
        if s.kind == "RevealedShares" and s.direction == "received"
    ]
    assert all(m.row_keys == {0: b""} for m in shares), "nobody gave a key for that row"


def test_reloading_changes_no_byte_with_a_strict_quorum_either():
    cohort = strict(6, threat=Threat.ACTIVE)
    faults = [Drop(cohort.clients[2], "collect")]
    straight, reloaded = harness.run(cohort, faults), harness.run(cohort, faults, reload=True)
    for party, seen in straight.views.by_party.items():
        assert seen == reloaded.views.by_party[party]


@pytest.mark.parametrize("change", ["short", "absent", "extra"])
def test_row_keys_of_the_wrong_number_are_refused(change):
    cohort = strict(6)
    refused = []

    original = Server.receive

    def receive(self, sender, data):
        if self.phase == "unmask" and sender == cohort.clients[0]:
            message = wire.decode(data)
            keys = dict(message.row_keys)
            if change == "short":
                keys[0] = keys[0][:-1]
            elif change == "absent":
                keys = {}
            else:
                keys[9] = b""
            data = wire.encode(replace(message, row_keys=keys))
            try:
                return original(self, sender, data)
            except PeerError as error:
                refused.append(error)
                raise
        return original(self, sender, data)

    server = cohort.server()
    server.receive = receive.__get__(server)
    simulator = harness.simulator(cohort, server=server)
    outcome = simulator.run()
    assert [e.peer for e in refused] == [cohort.clients[0]]
    assert "row keys" in refused[0].reason
    assert outcome.aborted is None


def test_keys_of_some_rows_say_nothing_of_the_others():
    """A row's key is a function of its own position only, and unlike all others'."""
    secret = Secret(bytes(range(16)))
    rows = np.array([0, 1, 7, 2**39], dtype=np.uint64)
    keys = hold_back_keys(secret, rows)
    assert (hold_back_keys(secret, rows[2:3]) == keys[2]).all()
    assert len({bytes(k) for k in keys}) == 4
    assert unpacked_keys(keys.tobytes(), 4).tolist() == keys.tolist()
    assert unpacked_keys(keys.tobytes()[:-1], 4) is None


@pytest.mark.parametrize("bits", [8, 13, 32, 64, 65, 128])
def test_masks_differ_by_row_client_stage_and_table_and_fill_the_group(bits):
    group = Ring(bits)
    keys = hold_back_keys(
        ScriptedEntropy(b"x").secret("k", size=16), np.arange(64, dtype=np.uint64)
    )
    one = hold_back_masks(group, keys, hold_back_tweak(bytes(32), 1, 0, 0), 19)
    assert one.shape == (64, 19, *group.limbs)
    assert group.contains(one)
    for other in [(2, 0, 0), (1, 1, 0), (1, 0, 1)]:
        two = hold_back_masks(group, keys, hold_back_tweak(bytes(32), *other), 19)
        pairs = zip(group.to_ints(one), group.to_ints(two), strict=True)
        assert np.mean([a != b for a, b in pairs]) > 0.9
    values = group.to_ints(one)
    assert len(set(values)) > 0.9 * min(len(values), 2**bits)
    assert max(values) > group.order * 0.9


def test_a_strict_quorum_needs_a_ring():
    with pytest.raises(ConfigError, match="ring"):
        harness.params(5, harness.row_stage(Field(61)), strict_quorum=True)
