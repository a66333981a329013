"""How a round begins: one seed that neither server chose, one model that both hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import two_servers
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import MisuseError, PeerError, RoundAborted, ServerFault
from tessera.ids import HELPER, SERVER
from tessera.protocols.two_server.collector import MemoryReplayGuard
from tessera.protocols.two_server.handshake import (
    HelperHandshakeSetup,
    LeaderHandshake,
    LeaderHandshakeSetup,
    ServedModel,
    check_header,
)
from tessera.protocols.two_server.messages import (
    HandshakeConsent,
    HandshakeNonce,
    HandshakeOffer,
    HandshakeReveal,
    SignedHeader,
)


def after_handshake(**more) -> two_servers.Network:
    network = two_servers.Network.of(two_servers.params(dense_bytes=5), **more)
    network.handshake()
    return network


def changed(kind: type, **change):
    """The carrier changes a message of this kind."""

    def meddle(source, message):
        if message.kind != kind.__name__:
            return [message.data]
        return [wire.encode(replace(wire.decode(message.data), **change))]

    return meddle


def test_both_servers_sign_one_header_and_every_client_hears_it():
    network = after_handshake()
    assert not network.left and not network.refused
    assert network.roles[SERVER].phase == network.roles[HELPER].phase == "done"
    assert network.roles[SERVER].signed_header.message.header == network.roles[HELPER].header
    decoded = {m.to: wire.decode(m.data) for _, m in network.log if m.kind == "SignedHeader"}
    assert decoded.keys() == set(network.clients)
    for signed in decoded.values():
        header = check_header(network.params, signed)
        assert header.tables.keys() == {0} and len(header.seed) == 32


def test_either_servers_nonce_changes_the_seed():
    first = after_handshake().roles[HELPER].header
    for name in ("leader_nonce", "helper_nonce", "context"):
        assert replace(first, **{name: bytes(32)}).seed != first.seed


def test_the_leader_is_bound_to_its_nonce_before_it_hears_the_helpers():
    """Free to choose afterwards it would try nonces until a seed suits it."""
    network = two_servers.Network.of(
        two_servers.params(), meddle=changed(HandshakeReveal, nonce=bytes(32))
    )
    assert network.handshake() is None
    assert "does not match its commitment" in network.left[HELPER].reason
    assert network.sent("HandshakeNonce") and not network.sent("SignedHeader")
    offer = wire.decode(network.sent("HandshakeOffer")[0])
    assert offer.commitment not in (bytes(32), network.roles[SERVER].state.header.leader_nonce)


def test_a_leader_that_holds_another_row_gets_no_signature():
    other = two_servers.model(two_servers.params(dense_bytes=5))
    other.tables[0][7, 2] ^= 1
    network = two_servers.Network.of(two_servers.params(dense_bytes=5), helper_model=other)
    assert network.handshake() is None
    assert "another model" in network.left[HELPER].reason
    assert not network.sent("HandshakeNonce") and not network.sent("SignedHeader")


def test_a_dense_part_that_differs_is_noticed_too():
    settings = two_servers.params(dense_bytes=5)
    other = ServedModel(two_servers.model(settings).tables, b"other")
    network = two_servers.Network.of(settings, helper_model=other)
    assert network.handshake() is None and "another model" in network.left[HELPER].reason


def test_a_rounds_number_is_opened_once_and_they_only_grow():
    replay_guard = MemoryReplayGuard()
    assert after_handshake(replay_guard=replay_guard).roles[HELPER].header
    again = after_handshake(replay_guard=replay_guard)
    assert "was started before" in again.left[HELPER].reason
    earlier = two_servers.Network.of(two_servers.params(round_id=11), replay_guard=replay_guard)
    assert earlier.handshake() is None
    later = two_servers.Network.of(two_servers.params(round_id=13), replay_guard=replay_guard)
    assert later.handshake()


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        (HandshakeOffer, {"context": bytes(32)}, "other parameters"),
        (HandshakeOffer, {"round_id": 13}, "another round"),
        (HandshakeOffer, {"tables": {}}, "another model"),
        (HandshakeReveal, {"signature": bytes(64)}, "did not sign"),
        (HandshakeReveal, {"round_id": 13}, "another round"),
    ],
)
def test_a_bad_word_of_the_leader_ends_the_round_at_the_helper(kind, change, says):
    network = two_servers.Network.of(two_servers.params(), meddle=changed(kind, **change))
    assert network.handshake() is None
    assert says in network.left[HELPER].reason
    with pytest.raises(ServerFault, match=says):  # for good, and for the same reason
        network.roles[HELPER].receive(SERVER, network.sent("HandshakeOffer")[0])


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        (HandshakeNonce, {"round_id": 13}, "another round"),
        (HandshakeConsent, {"signature": bytes(64)}, "another header"),
    ],
)
def test_a_bad_word_of_the_helper_opens_nothing(kind, change, says):
    network = two_servers.Network.of(two_servers.params(), meddle=changed(kind, **change))
    assert network.handshake() is None
    assert [error.peer for error in network.refused] == [HELPER]
    assert says in network.refused[0].reason
    with pytest.raises(RoundAborted):
        network.roles[SERVER].close_phase()
    assert network.roles[SERVER].phase == "aborted"


def test_a_message_that_comes_twice_gets_the_same_answer():
    network = two_servers.Network.of(
        two_servers.params(),
        meddle=lambda source, m: [m.data] * (2 if source == SERVER else 1),
    )
    assert network.handshake() and not network.left
    assert (
        len(set(network.sent("HandshakeNonce"))) == len(set(network.sent("HandshakeConsent"))) == 1
    )


def test_messages_out_of_turn_are_refused():
    network = after_handshake()
    for kind in ("HandshakeNonce", "HandshakeConsent"):
        data = network.sent(kind)[0]
        assert network.roles[SERVER].receive(HELPER, data) == []  # a repetition
        name = "nonce" if kind == "HandshakeNonce" else "signature"
        other = replace(wire.decode(data), **{name: bytes(len(getattr(wire.decode(data), name)))})
        with pytest.raises(PeerError, match="not due"):
            network.roles[SERVER].receive(HELPER, wire.encode(other))
    with pytest.raises(PeerError, match="invalid message"):
        network.roles[SERVER].receive(HELPER, b"no message")
    with pytest.raises(PeerError, match="client 1"):
        network.roles[SERVER].receive(network.clients[0], network.sent("HandshakeNonce")[0])
    other = replace(wire.decode(network.sent("HandshakeOffer")[0]), commitment=bytes(32))
    with pytest.raises(ServerFault, match="not due"):
        network.roles[HELPER].receive(SERVER, wire.encode(other))
    with pytest.raises(ServerFault, match="invalid message"):
        network.roles[HELPER].receive(SERVER, b"")
    assert network.roles[HELPER].header is not None  # it has signed, and that stays


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"leader": bytes(64)}, "did not sign the header it sent"),
        ({"helper": bytes(64)}, "the helper did not sign"),
        ({"header": {"round_id": 13}}, "other parameters"),
        ({"header": {"context": bytes(32)}}, "other parameters"),
        ({"header": {"tables": {}}}, "digest of every table"),
        ({"header": {"tables": {0: bytes(32)}}}, "did not sign"),
        ({"header": {"dense": bytes(32)}}, "did not sign"),
        ({"header": {"helper_nonce": bytes(32)}}, "did not sign"),
    ],
)
def test_a_client_asks_nothing_before_both_have_signed(change, says):
    network = after_handshake()
    good: SignedHeader = wire.decode(network.sent("SignedHeader")[0])
    inner = change.get("header")
    bad = replace(good, header=replace(good.header, **inner)) if inner else replace(good, **change)
    network.admit(two_servers.RetrievalClient)
    client = two_servers.RetrievalClient(network.client_setup(network.clients[0]))
    with pytest.raises(ServerFault, match=says):
        client.receive(SERVER, wire.encode(bad))
    assert client.phase == "Left" and not client.is_ready
    with pytest.raises(ServerFault):
        client.receive(SERVER, wire.encode(good))
    with pytest.raises(MisuseError):
        client.submit({0: two_servers.ids(1)})


def test_if_the_same_server_signed_twice_a_client_would_notice():
    network = after_handshake()
    good: SignedHeader = wire.decode(network.sent("SignedHeader")[0])
    with pytest.raises(ServerFault):
        check_header(network.params, replace(good, helper=good.leader))


def test_round_numbers_grow_at_a_client():
    network = after_handshake()
    with pytest.raises(ServerFault, match="after round 12"):
        two_servers.RetrievalClient(network.client_setup(network.clients[0]), last_round=12)


def test_a_server_needs_the_pinned_key_and_the_rounds_tables():
    settings = two_servers.params()
    leader_key, helper_key, _ = two_servers.keys()
    entropy, held = ScriptedEntropy(b""), two_servers.model(settings)
    with pytest.raises(MisuseError, match="pinned"):
        LeaderHandshakeSetup(params=settings, invited=[], key=helper_key)
    with pytest.raises(MisuseError, match="pinned"):
        HelperHandshakeSetup(
            params=settings, model=held, key=leader_key, replay_guard=MemoryReplayGuard()
        )
    pinned = LeaderHandshakeSetup(params=settings, invited=[], key=leader_key)
    for bad in (
        ServedModel({}, b""),
        ServedModel({0: held.tables[0][:5]}, b""),
        ServedModel({0: held.tables[0].astype(np.int32)}, b""),
        ServedModel(held.tables, b"more"),
    ):
        with pytest.raises(MisuseError):
            LeaderHandshake(pinned, bad, entropy=entropy)
