"""Stopped after any message and woken in another process, a role says the same bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harness
from tessera import wire
from tessera.crypto.keys import unseal
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.errors import CryptoError, WrongSnapshot
from tessera.ids import SERVER, ClientId
from tessera.protocols.secagg import transcript
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.messages import (
    BOX_BYTES,
    ForwardedShares,
    NextStage,
    RowGroups,
    SurvivorList,
    TableGroups,
)
from tessera.protocols.secagg.params import GraphKind, Threat
from tessera.protocols.secagg.server import SecAggServerSetup, Server
from tessera.protocols.secagg.session import neighbourhood
from tessera.protocols.secagg.states import Finished, Reveal
from tessera.simulation.faults import Drop
from tessera.wire.index_set import client_array

KINDS = [
    {"threat": Threat.SEMI_HONEST},
    {"threat": Threat.ACTIVE, "corrupt": 2},
    {"graph": GraphKind.SPARSE, "degree": 4},
]


def seen_by_party(ran: harness.Ran) -> dict:
    return {
        party: [(s.direction, s.other, s.kind, s.data) for s in seen]
        for party, seen in ran.views.by_party.items()
    }


@given(st.sampled_from(KINDS), st.integers(0, 999), st.sampled_from(["collect", "unmask", "share"]))
@settings(max_examples=15)
def test_reloading_every_role_after_every_message_changes_no_byte(kind, seed, phase):
    params = harness.params(
        7, harness.dense_stage(Ring(20)), harness.row_stage(Ring(70), dense=2), **kind
    )
    cohort = harness.Cohort.of(params, seed=seed)
    faults = [Drop(cohort.clients[seed % 7], phase)]
    straight = harness.run(cohort, faults)
    reloaded = harness.run(cohort, faults, reload=True)
    assert len(straight.sums) == 2
    assert seen_by_party(straight) == seen_by_party(reloaded)
    for a, b in zip(straight.sums, reloaded.sums, strict=True):
        assert (a.dense == b.dense).all()
        assert (a.survivors == b.survivors).all()


def test_a_snapshot_is_the_same_bytes_after_a_round_trip():
    cohort = harness.Cohort.of(harness.params(4, harness.row_stage(dense=3)))
    seen = set()

    def check(simulator):
        server = simulator.server
        again = harness.woken(server, cohort.server_setup())
        assert (again.snapshot(), again.messages) == (server.snapshot(), server.messages)
        seen.add(server.phase)
        for name, member in simulator.clients.items():
            again = harness.woken(member.client, cohort.setup(name))
            assert (again.snapshot(), again.messages) == (member.snapshot(), member.messages)
            seen.add(member.phase)

    simulator = harness.simulator(cohort, between_messages=check)
    simulator.run()
    assert {"advertise", "share", "reveal", "collect", "unmask", "done"} <= seen
    assert {"Advertised", "AwaitingShares", "AwaitingGroups", "AwaitingSurvivors"} <= seen


def xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))


def test_one_snapshot_and_two_rosters_give_unrelated_shares_and_boxes():
    """No polynomial and no box key serves twice, though the client's root is the same."""
    cohort = harness.Cohort.of(harness.params(5))
    joined = {c: cohort.join(c) for c in cohort.clients}
    server = cohort.server()
    for c, (_, out) in joined.items():
        server.receive(c, out[0].data)
    me, holder = cohort.clients[0], cohort.clients[3]
    true = wire.decode(server.close_phase()[0].data)
    # The same holders and keys: nothing else would tell the two apart.
    other = replace(true, graph_seed=bytes(32))
    client = joined[me][0].client

    shares, boxes, plain = [], [], []
    for roster in (true, other):
        woken = harness.woken(client, cohort.setup(me))
        sent = wire.decode(woken.receive(SERVER, wire.encode(roster))[0].data)
        own = woken.state.own[0]
        shares.append((own.mask_key, own.self_mask))
        boxes.append(sent.boxes[holder][0])
        receiver = joined[holder][0].client.state.session
        context = transcript.roster_context(cohort.params, roster)
        key = receiver.channel().agree(
            true.members[0].channel_key, Label.CHANNEL, context, me, holder
        )
        nonce, associated = transcript.box_nonce_and_data(context, 0, me, holder)
        plain.append(unseal(key, sent.boxes[holder][0], nonce=nonce, associated=associated))
        foreign = boxes[0] if roster is other else bytes(len(boxes[0]))
        with pytest.raises(CryptoError):
            unseal(key, foreign, nonce=nonce, associated=associated)
    assert shares[0][0] != shares[1][0]
    assert shares[0][1] != shares[1][1]
    assert plain[0] != plain[1]
    # Under one key and nonce the difference of two boxes would be that of their texts.
    assert xor(boxes[0], boxes[1])[: len(plain[0])] != xor(plain[0], plain[1])


def test_pair_keys_are_bound_to_the_roster_too():
    cohort = harness.Cohort.of(harness.params(4))
    inputs = []
    for seed in (b"one", b"two"):
        server = cohort.server()
        server.state = replace(server.state, graph_seed=seed.ljust(32))
        simulator = harness.simulator(cohort, server=server, views=(views := harness.Views()))
        assert simulator.run().aborted is None
        inputs.append(next(s.data for s in views.by_party[1] if s.kind == "MaskedInput"))
    assert inputs[0] != inputs[1]


def test_a_finished_client_has_forgotten_its_secrets():
    cohort = harness.Cohort.of(harness.params(4))
    ran = harness.run(cohort)
    for client in cohort.clients:
        state = ran.clients[client].client.state
        assert isinstance(state, Finished)
        assert len(ran.clients[client].snapshot()) < 400, "marks, and no share of anybody"
        assert not ran.clients[client].messages


def test_a_client_snapshot_is_not_taken_for_a_servers():
    cohort = harness.Cohort.of(harness.params(4))
    member, _ = cohort.join(1)
    with pytest.raises(WrongSnapshot, match="another role"):
        Server.wake(member.snapshot(), {}, cohort.server_setup())


def test_a_states_repr_shows_no_secret():
    cohort = harness.Cohort.of(harness.params(4, harness.row_stage(dense=3)))
    secrets = []

    def check(simulator):
        for member in simulator.clients.values():
            state = member.client.state
            session = getattr(state, "session", None) or getattr(
                getattr(state, "at", None), "session", None
            )
            if session is not None:
                root = session.root.reveal()
                secrets.append(root)
                text = repr(state)
                assert root.hex() not in text
                assert repr(root)[2:-1] not in text

    harness.simulator(cohort, between_messages=check).run()
    assert secrets
    assert wire.records()


@pytest.mark.parametrize("graph", list(GraphKind), ids=lambda graph: graph.value)
def test_a_clients_snapshot_is_small_in_a_cohort_of_a_thousand(graph):
    """Beside the messages that it names, which are stored once, in the bytes they came in.

    The peers' boxes are made up: what cannot be unsealed costs a share, and no byte of the state.
    """
    stages = (harness.dense_stage(), harness.row_stage(dense=2))
    params = harness.params(1000, *stages, graph=graph, strict_quorum=True)
    clients = sorted({ClientId(c) for c in np.random.default_rng(1).integers(0, 1 << 32, 1000)})
    me, rows = clients[500], np.arange(0, 3000, 10, dtype=np.uint64)
    entropy = harness.ScriptedEntropy(b"a thousand")
    server = Server(SecAggServerSetup(params, clients), entropy=entropy)
    client = None
    for c in clients:
        joined, (advert,) = Client.join(SecAggClientSetup(params, c), entropy=entropy)
        client = joined if c == me else client
        server.receive(c, advert.data)
    sizes = {}

    def note() -> None:
        woken = harness.woken(client, SecAggClientSetup(params, me))
        assert woken.snapshot() == client.snapshot()
        sizes[client.phase] = max(len(client.snapshot()), sizes.get(client.phase, 0))

    note()
    roster = next(out.data for out in server.close_phase() if out.to == me)
    client.receive(SERVER, roster)
    note()
    hood = neighbourhood(params, wire.decode(roster))
    boxes = {c: (bytes(BOX_BYTES),) * 2 for c in clients if c != me and hood.holds(me, c)}
    everybody = client_array(clients)
    client.receive(
        SERVER, wire.encode(ForwardedShares(round_id=12, sharers=everybody, boxes=boxes))
    )
    for stage in (0, 1):
        note()
        if stage:
            client.submit(Reveal(tables={0: rows}))
            note()
            every = np.arange(len(rows), dtype=np.uint64)
            group = TableGroups(
                table=0, included=every, shared={c: every for c in hood.holders(me)[:50] if c != me}
            )
            client.receive(SERVER, wire.encode(RowGroups(round_id=12, stage=1, tables=(group,))))
            note()
        words = {0: np.zeros((len(rows), 3), dtype=np.uint32)} if stage else {}
        client.submit(Input(dense=np.zeros(params.stages[stage].dense, np.uint32), tables=words))
        note()
        client.receive(
            SERVER, wire.encode(SurvivorList(round_id=12, stage=stage, survivors=everybody))
        )
        note()
        if not stage:
            client.receive(SERVER, wire.encode(NextStage(round_id=12, stage=1)))
    assert sizes.keys() >= {"Advertised", "AwaitingShares", "Ready", "Grouped", "Resting"}
    assert max(sizes.values()) <= 5_000, sizes
