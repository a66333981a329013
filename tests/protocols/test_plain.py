"""Plain sums: the same outcome as secure ones, and the same manners towards bad messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import harness
from tessera import wire
from tessera.crypto.ring import Ring
from tessera.errors import MisuseError, PeerError, RoundAborted, ServerFault
from tessera.ids import SERVER, ClientId, RoundId
from tessera.protocols.plain import (
    PlainClient,
    PlainClientSetup,
    PlainServer,
    PlainServerSetup,
    SparsePlainInput,
)
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.states import Reveal

STAGE = harness.row_stage(Ring(20), width=2, dense=3, tables=(0, 4))


def contributed(client: int) -> tuple[Reveal, Input]:
    rng = np.random.default_rng(client)
    rows = {t: np.sort(rng.choice(30, 6, replace=False)).astype(np.uint64) for t in (0, 4)}
    words = {t: harness.random_words(Ring(20), (6, 2), rng) for t in rows}
    return Reveal(tables=rows), Input(dense=harness.random_words(Ring(20), (3,), rng), tables=words)


def test_the_sum_is_the_plain_sum_over_the_survivors():
    server = PlainServer(
        PlainServerSetup(STAGE, RoundId(1), [ClientId(c) for c in range(4)], needed=3)
    )
    inputs = {}
    for c in range(4):
        client = PlainClient(PlainClientSetup(STAGE, RoundId(1), ClientId(c)))
        wish, given = contributed(c)
        assert client.awaits_rows
        [named] = client.submit(wish)
        server.receive(ClientId(c), named.data)
        assert client.included[0].tolist() == wish.tables[0].tolist()
        inputs[c] = (client, wish, given)
    assert server.close_phase() == []
    for c in (0, 1, 3):
        client, _, given = inputs[c]
        [sent] = client.submit(given)
        server.receive(ClientId(c), sent.data)
        assert client.wants is None
    assert server.expected == {2}
    server.close_phase()
    [total] = server.sums
    assert total.survivors.tolist() == [0, 1, 3]
    ring = Ring(20)
    expected: dict[int, np.ndarray] = {}
    for c in (0, 1, 3):
        _, wish, given = inputs[c]
        for row, words in zip(wish.tables[4].tolist(), given.tables[4], strict=True):
            expected[row] = (expected.get(row, 0) + words.astype(np.int64)) % ring.order
    assert total.tables[4].rows.tolist() == sorted(expected)
    for row, words in zip(total.tables[4].rows.tolist(), total.tables[4].words, strict=True):
        assert words.tolist() == expected[row].tolist()
    dense = sum(inputs[c][2].dense.astype(np.int64) for c in (0, 1, 3)) % ring.order
    assert total.dense.tolist() == dense.tolist()


def test_bad_messages_are_refused_and_change_nothing():
    server = PlainServer(PlainServerSetup(STAGE, RoundId(1), [ClientId(0), ClientId(1)], needed=1))
    client = PlainClient(PlainClientSetup(STAGE, RoundId(1), ClientId(0)))
    wish, given = contributed(0)
    data = client.submit(wish)[0].data

    def refused(sender: int, message: bytes) -> str:
        before = server.expected
        with pytest.raises(PeerError) as caught:
            server.receive(ClientId(sender), message)
        assert server.expected == before
        return caught.value.reason

    assert "not in this cohort" in refused(9, data)
    assert "another client" in refused(1, data)
    assert "invalid message" in refused(0, data[:-2])
    fewer = wire.encode(replace(wire.decode(data), tables=()))
    assert "other tables" in refused(0, fewer)
    server.receive(ClientId(0), data)
    assert server.receive(ClientId(0), data) == []  # a repetition
    other = replace(wire.decode(data).tables[0], rows=np.array([1], dtype=np.uint64))
    assert "not due" in refused(0, wire.encode(replace(wire.decode(data), tables=(other,))))
    server.close_phase()
    sent = client.submit(given)[0].data
    short = wire.encode(replace(wire.decode(sent), dense=b"\x00"))
    assert "wrong number" in refused(0, short)
    assert "other tables" in refused(0, wire.encode(replace(wire.decode(sent), tables=())))
    server.receive(ClientId(0), sent)
    assert server.receive(ClientId(0), sent) == []
    assert "not due" in refused(0, short)


def sparse(stage, client: int) -> PlainClient:
    return PlainClient(PlainClientSetup(stage, RoundId(1), ClientId(client), sparse=True))


def test_words_that_are_mostly_zeros_travel_with_their_places():
    """Whichever is shorter, and the sum is the same."""
    stage, ring = harness.dense_stage(Ring(20), 400), Ring(20)
    rng = np.random.default_rng(5)
    server = PlainServer(
        PlainServerSetup(stage, RoundId(1), [ClientId(c) for c in range(4)], needed=4)
    )
    total, lengths = np.zeros(400, dtype=np.int64), []
    for c, some in enumerate((0, 3, 200, 400)):
        dense = ring.zeros(400)
        at = np.sort(rng.choice(400, some, replace=False))
        dense[at] = rng.integers(1, ring.order, some)
        [sent] = sparse(stage, c).submit(Input(dense=dense))
        assert isinstance(wire.decode(sent.data), SparsePlainInput) == (some < 300)
        lengths.append(len(sent.data))
        server.receive(ClientId(c), sent.data)
        total += dense.astype(np.int64)
    server.close_phase()
    assert np.array_equal(server.sums[0].dense, total % ring.order)
    assert lengths[0] < lengths[1] < 60 < lengths[2] < lengths[3]


def test_places_that_a_stage_does_not_have_are_refused():
    stage = harness.dense_stage(Ring(20), 40)
    server = PlainServer(PlainServerSetup(stage, RoundId(1), [ClientId(0)], needed=1))
    dense = Ring(20).zeros(40)
    dense[39] = 5
    [sent] = sparse(stage, 0).submit(Input(dense=dense))
    message = wire.decode(sent.data)
    outside = replace(message, places=np.array([40], dtype=np.uint64))
    more = replace(message, places=np.array([3, 39], dtype=np.uint64))
    for wrong, reason in ((outside, "places"), (more, "wrong number")):
        with pytest.raises(PeerError, match=reason):
            server.receive(ClientId(0), wire.encode(wrong))
    server.receive(ClientId(0), sent.data)


def test_too_few_answers_open_nothing():
    server = PlainServer(PlainServerSetup(STAGE, RoundId(1), [ClientId(0), ClientId(1)], needed=1))
    with pytest.raises(RoundAborted, match="0 answered, 1 are needed"):
        server.close_phase()
    assert server.phase == "aborted"
    assert server.sums == ()


def test_a_plain_client_knows_no_server_messages_and_no_second_input():
    client = PlainClient(PlainClientSetup(harness.dense_stage(Ring(8), 2), RoundId(1), ClientId(0)))
    fooled = PlainClient(PlainClientSetup(harness.dense_stage(Ring(8), 2), RoundId(1), ClientId(0)))
    with pytest.raises(ServerFault):
        fooled.receive(SERVER, b"")
    assert fooled.phase == "Left" and fooled.wants is None
    client.submit(Input(dense=np.zeros(2, dtype=np.uint8)))
    with pytest.raises(MisuseError):
        client.submit(Input(dense=np.zeros(2, dtype=np.uint8)))
