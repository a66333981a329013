"""The union before two servers is summed in the active setting, and what that prevents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rounds.shops import Roles, two_server_plan
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.errors import ConfigError, RoundAborted, ServerFault
from tessera.ids import SERVER, ClientId, RoundId
from tessera.plan import Plan
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.messages import Roster
from tessera.protocols.secagg.params import GraphKind, SecAggParams, Threat
from tessera.protocols.secagg.server import SecAggServerSetup, Server
from tessera.rounds.two_server.client import TwoServerClientRound

NARROW = {"domain": "union"}
ROUND = RoundId(0)


def summed_semi_honest(monkeypatch) -> None:
    """The rule off: the stage runs as `[security] threat` says."""
    always = Plan.union_sum

    def union_sum(plan: Plan, round_id: RoundId) -> SecAggParams:
        return replace(always(plan, round_id), threat=plan.security.threat)

    monkeypatch.setattr(Plan, "union_sum", union_sum)


def set_read(roles: Roles, victim: ClientId, client: TwoServerClientRound) -> np.ndarray:
    """A leader that plays all peers of one client, with zeros, and opens the sum over them.

    It has signing keys for the peers' names, but not those in the client's directory.
    """
    params, entropy = roles.settings.union_sum(ROUND), ScriptedEntropy(b"a leader that lies")
    forged = identities(roles.signers, entropy, roles.settings.federation)
    known = dict(forged[victim].directory) | {victim: roles.signers[victim].key.public}
    forged = {c: replace(one, directory=known) for c, one in forged.items()}
    (stage,) = params.stages
    server = Server(
        SecAggServerSetup(params, roles.signers, identity=forged[victim]), entropy=entropy
    )
    peers, sent = {}, {victim: client.start()}
    for c in set(roles.signers) - {victim}:
        peers[c], sent[c] = Client.join(
            SecAggClientSetup(params, c, identity=forged[c]), entropy=entropy
        )
    while not server.sums:
        for c, out in sent.items():
            for message in out:
                assert message.to == SERVER
                server.receive(c, message.data)
        sent = {c: [] for c in sent}
        for message in server.close_phase():
            to = message.to
            sent[to] += (client if to == victim else peers[to]).receive(SERVER, message.data)
            if to != victim and peers[to].wants is not None:
                sent[to] += peers[to].submit(Input(dense=stage.group.zeros(stage.dense)))
    return roles.settings.union_encoding(ROUND).decode(server.sums[0].dense).ids


def test_a_leader_that_plays_all_peers_of_a_client_reads_its_set_unless_keys_are_signed(
    monkeypatch,
):
    settings = two_server_plan(NARROW, privacy={"decoys": 0.0})
    for victim in map(ClientId, range(settings.cohort)):
        roles = Roles(settings)
        client = roles.client(victim)
        with pytest.raises(ServerFault, match="forged"):
            set_read(roles, victim, client)
        assert client.phase == "Left"
    summed_semi_honest(monkeypatch)
    for victim in map(ClientId, range(settings.cohort)):
        roles = Roles(settings)
        assert set_read(roles, victim, roles.client(victim)).tolist() == [1, 5]


@pytest.mark.parametrize("threat", ["semi-honest", "active"])
def test_the_stage_is_active_whole_whatever_the_plan_says(threat):
    settings = two_server_plan(NARROW, security={"threat": threat})
    params = settings.union_sum(ROUND)
    assert params.threat is Threat.ACTIVE and params.graph is GraphKind.COMPLETE
    assert params.topology.threshold == 6  # of 8; twice that is above 8 and any corrupt below 3
    assert not two_server_plan({"domain": "whole"}).narrows


def test_keys_that_nobody_signed_make_a_client_leave():
    roles = Roles(two_server_plan(NARROW))
    clients = {c: roles.client(c) for c in roles.signers}
    server = roles.leader()
    for c, client in clients.items():
        for message in client.start():
            server.receive(c, message.data)
    data = next(m.data for m in server.close_phase() if m.to == ClientId(0))
    roster = wire.decode(data, expect=[Roster])
    bare = replace(roster, members=tuple(replace(m, signature=b"") for m in roster.members))
    with pytest.raises(ServerFault):
        clients[ClientId(0)].receive(SERVER, wire.encode(bare))
    assert clients[ClientId(0)].phase == "Left"
    assert clients[ClientId(1)].receive(SERVER, data), "signed keys are taken"


def test_a_union_is_not_opened_without_the_consistency_round():
    """Fewer signatures under the list of survivors than the threshold: nothing is unmasked."""
    roles = Roles(two_server_plan(NARROW))
    clients = {c: roles.client(c) for c in roles.signers}
    leader, seen = roles.leader(), []
    sent = {c: client.start() for c, client in clients.items()}
    with pytest.raises(RoundAborted):
        while leader.phase != "unmask":
            seen.append(leader.phase)
            for c, out in sent.items():
                for message in out[: len(out) if leader.phase != "consistency" or c < 5 else 0]:
                    leader.receive(c, message.data)
            sent = {c: [] for c in clients}
            for message in leader.close_phase():
                sent[message.to] += clients[message.to].receive(SERVER, message.data)
    assert seen[-1] == "consistency" and not leader.sums


@pytest.mark.parametrize(
    ("security", "reason"),
    [
        ({"graph": "sparse"}, "sparse"),
        ({"threshold": 5, "corrupt": 2}, "twice"),
        ({"corrupt": 3}, "less than a third"),
    ],
)
def test_what_the_active_setting_cannot_do_is_refused_with_the_plan(security, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        two_server_plan(NARROW, security=security)
    assert "row_limit" in caught.value.hint
    assert not two_server_plan({"domain": "whole"}, security=security).narrows
