"""Rows come back as the servers hold them, bit for bit, whoever drops out on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import two_servers
from tessera import wire
from tessera.crypto.cuckoo import Placement, SimpleTable
from tessera.crypto.keys import SealingKey, seal_to
from tessera.errors import MisuseError, PeerError, ServerFault
from tessera.ids import HELPER, SERVER
from tessera.protocols.two_server.messages import (
    AnswersDue,
    HelperAnswer,
    Purpose,
    Query,
    QueryAnswers,
    SealedAnswer,
)
from tessera.protocols.two_server.params import Read
from tessera.protocols.two_server.read.client import RetrievalClient


def wishes(network: two_servers.Network, per_client: int = 2) -> dict:
    """A few rows for every client and table."""
    return {
        c: {
            t.table: t.named(np.arange(i, i + per_client))
            for t in network.params.tables
            if t.reads_points
        }
        for i, c in enumerate(network.clients)
    }


def begun(*tables, meddle=None, helper=two_servers.RetrievalHelper, **more) -> two_servers.Network:
    network = two_servers.Network.of(two_servers.params(*tables, **more))
    network.reading(network.handshake(), helper=helper)
    network.meddle = meddle
    return network


def assert_exact(network: two_servers.Network, client, wanted) -> None:
    fetched = network.fetched(client)
    assert fetched is not None and fetched.dense == network.model.dense
    assert fetched.tables.keys() == {t.table for t in network.params.read}
    for spec in network.params.read:
        part = fetched.tables[spec.table]
        due = spec.named(np.arange(spec.rows)) if spec.reads_whole else wanted[spec.table]
        assert part.ids.dtype == np.uint64 and (part.ids == due).all()
        assert (part.rows == network.model.tables[spec.table][spec.index(due)]).all()


@st.composite
def tables(draw, name: int):
    rows = draw(st.integers(1, 60))
    whole = rows < 3 or draw(st.integers(0, 4)) == 0
    max_rows = draw(st.integers(1, min(rows, 7)) | st.just(rows))
    narrow = None
    if draw(st.booleans()):
        some = draw(st.sets(st.integers(0, 2**64 - 1), min_size=rows, max_size=rows))
        narrow = np.array(sorted(some), dtype=np.uint64)
    return two_servers.table(
        rows,
        max_rows,
        name=name,
        ids=narrow,
        row_bytes=draw(st.integers(1, 40)),
        words=0,
        read=Read.WHOLE if whole else draw(st.sampled_from([Read.CHECKED, Read.POINTS])),
        stash=0 if whole else draw(st.integers(0, 2)),
    )


@settings(max_examples=40)
@given(data=st.data())
def test_every_client_gets_its_rows_to_the_bit(data):
    some = [data.draw(tables(name)) for name in range(data.draw(st.integers(1, 2)))]
    network = begun(*some, clients=2, dense_bytes=data.draw(st.integers(0, 9)))
    wanted = {}
    for c in network.clients:
        wanted[c] = {}
        for spec in some:
            if spec.reads_points:
                count = data.draw(st.sampled_from([0, 1, spec.max_rows]))
                rows = data.draw(st.permutations(range(spec.rows)))[:count]
                wanted[c][spec.table] = spec.named(np.array(sorted(rows), dtype=np.int64))
    network.read(wanted)
    assert not network.left and not network.refused
    for c in network.clients:
        assert_exact(network, c, wanted[c])


def test_floats_come_back_as_they_are():
    """Whatever their bits mean: rows are never added, only selected."""
    values = np.array([[0.0, -0.0], [np.nan, np.inf], [1e-45, 3.3], [2.0, -1.5]], dtype=np.float32)
    network = begun(two_servers.table(4, 2, row_bytes=8, words=0))
    network.model.tables[0][:] = values.view(np.uint8)
    network = two_servers.Network(network.params, network.model, network.clients)
    network.reading(network.handshake())
    network.read({c: {0: two_servers.ids(1, 2)} for c in network.clients})
    got = network.fetched(network.clients[0]).tables[0].rows
    assert got.tobytes() == values[1:3].tobytes()


def test_messages_have_one_length_whatever_is_asked_for():
    lengths = set()
    for rows in ([], [0], [3, 4, 5], [39]):
        network = begun(two_servers.table(40, 3))
        network.read({c: {0: two_servers.ids(*rows)} for c in network.clients})
        lengths.add(
            tuple(
                len(network.sent(k)[0])
                for k in ("Query", "Forwarded", "HelperAnswer", "QueryAnswers")
            )
        )
    assert len(lengths) == 1


def test_a_row_without_a_bin_is_missing_and_nobody_else_can_tell(monkeypatch):
    network = begun(two_servers.table(40, 3))
    usual = len(network.roles[network.clients[1]].submit({0: two_servers.ids(1, 2, 3)})[0].data)
    real = SimpleTable.place

    def crowded(self, rows):
        placed = real(self, rows[1:])
        holder = np.where(placed.holder >= 0, placed.holder + 1, -1)
        return Placement(np.concatenate([[-1], placed.bins]), placed.points, holder)

    monkeypatch.setattr(SimpleTable, "place", crowded)
    network.read({network.clients[0]: {0: two_servers.ids(1, 2, 3)}})
    assert len(network.sent("Query")[0]) == usual
    part = network.fetched(network.clients[0]).tables[0]
    assert part.ids.tolist() == [2, 3]
    assert (part.rows == network.model.tables[0][[2, 3]]).all()


# -- whoever drops out


def test_a_message_that_is_lost_costs_its_client_alone():
    """Every message of the round in turn does not arrive."""
    whole = begun(two_servers.table())
    start = len(whole.log)
    whole.read(wishes(whole))
    for lost in range(len(whole.log) - start):
        seen = -1

        def meddle(source, message, lost=lost):
            nonlocal seen
            seen += 1
            return [] if seen == lost else [message.data]

        network = begun(two_servers.table(), meddle=meddle)
        wanted = wishes(network)
        network.read(wanted)
        if network.roles[SERVER].phase != "done":
            network.close()  # the helper's word does not come
        assert network.roles[SERVER].phase == "done" and not network.left and not network.refused
        served = [c for c in network.clients if network.fetched(c)]
        kind = network.log[start + lost][1].kind
        assert len(served) == (0 if kind == "AnswersDue" else len(network.clients) - 1)
        for c in served:
            assert_exact(network, c, wanted[c])


def test_a_message_that_comes_twice_changes_nothing():
    network = begun(
        two_servers.table(), meddle=lambda source, message: [message.data, message.data]
    )
    wanted = wishes(network)
    network.read(wanted)
    for c in network.clients:
        assert_exact(network, c, wanted[c])
    assert not network.left
    assert len(set(network.sent("HelperAnswer"))) == len(network.clients), "no box is sealed twice"


def test_nobody_asks_and_nothing_happens():
    network = begun()
    network.read({})
    assert network.roles[SERVER].phase == "done" and not network.sent("AnswersDue")
    with pytest.raises(MisuseError, match="no phase to close"):
        network.roles[SERVER].close_phase()


@pytest.mark.parametrize("when", ["Invited", "Prepared", "AwaitingAnswers", "Finished"])
def test_a_client_goes_on_from_its_snapshot(when):
    network = begun()
    c = network.clients[0]

    def reload():
        assert network.roles[c].phase == when
        network.roles[c] = network.woken(c)
        assert network.roles[c].phase == when

    if when == "Invited":
        network.roles[c] = RetrievalClient(network.client_setup(c))
        reload()
        network.roles[c].receive(SERVER, network.sent("SignedHeader")[0])
    if when == "Prepared":
        reload()
    out = network.roles[c].submit({0: two_servers.ids(4, 9)})
    if when == "AwaitingAnswers":
        reload()
        assert network.roles[c].resend() == out, "the very bytes: a box is never sealed again"
    network.carry(c, out)
    network.close()
    assert_exact(network, c, {0: two_servers.ids(4, 9)})
    if when == "Finished":
        reload()
        assert_exact(network, c, {0: two_servers.ids(4, 9)})
        assert network.roles[c].receive(SERVER, network.sent("QueryAnswers")[0]) == []
        with pytest.raises(ServerFault, match="not due"):
            other = replace(wire.decode(network.sent("SignedHeader")[0]), leader=bytes(64))
            network.roles[c].receive(SERVER, wire.encode(other))


# -- what is refused


def test_a_caller_asks_for_what_the_round_has():
    network = begun()
    client = network.roles[network.clients[0]]
    for wanted in (
        {},
        {1: two_servers.ids(1)},
        {0: two_servers.ids(40)},
        {0: two_servers.ids(2, 1)},
        {0: two_servers.ids(1, 1)},
        {0: two_servers.ids(1, 2, 3, 4)},
        {0: np.array([1])},
    ):
        with pytest.raises(MisuseError):
            client.submit(wanted)
    assert client.is_ready
    client.submit({0: two_servers.ids()})
    with pytest.raises(MisuseError, match="AwaitingAnswers"):
        client.submit({0: two_servers.ids()})


def queries(network: two_servers.Network, client) -> Query:
    return wire.decode(network.roles[client].submit({0: two_servers.ids(1)})[0].data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q: replace(q, round_id=13), "of another round"),
        (lambda q: replace(q, sender=4), "another client's name"),
        (lambda q: replace(q, public=()), "keys for 0 tables"),
        (lambda q: replace(q, public=(q.public[0][:-1],)), "invalid keys"),
        (lambda q: replace(q, public=(q.public[0] + b"\0",)), "invalid keys"),
        (lambda q: replace(q, public=(bytes(len(q.public[0])),)), "invalid keys"),
        (lambda q: replace(q, seeds=()), "0 seeds"),
        (lambda q: AnswersDue(round_id=12, queries={}), "invalid message"),
    ],
)
def test_a_bad_query_costs_its_client_and_changes_nothing(change, says):
    network = begun()
    c = network.clients[0]
    query = queries(network, c)
    with pytest.raises(PeerError, match=says) as caught:
        network.roles[SERVER].receive(c, wire.encode(change(query)))
    assert caught.value.peer == c
    assert network.roles[SERVER].expected == set(network.clients)
    assert network.roles[SERVER].receive(c, wire.encode(query)), "its true query still counts"
    assert network.roles[SERVER].receive(c, wire.encode(query)) == []  # a repetition
    with pytest.raises(PeerError, match="not due"):
        network.roles[SERVER].receive(c, wire.encode(replace(query, report_id=bytes(32))))
    with pytest.raises(PeerError, match="not in this cohort"):
        network.roles[SERVER].receive(2, wire.encode(query))


def test_whom_the_helper_refuses_gets_no_answer_and_the_others_do():
    bad = None

    def meddle(source, message):
        nonlocal bad
        if message.kind == "Forwarded" and bad is None:
            bad = source
            decoded = wire.decode(message.data)
            return [wire.encode(replace(decoded, box=bytes(len(decoded.box))))]
        return [message.data]

    network = begun(meddle=meddle)
    wanted = wishes(network)
    network.read(wanted)
    first, *others = network.clients
    assert [e.peer for e in network.refused] == [first]
    assert network.roles[SERVER].refused == {first} and network.fetched(first) is None
    assert network.roles[SERVER].phase == "done"
    for c in others:
        assert_exact(network, c, wanted[c])


def lied(kind: str, change):
    def meddle(source, message):
        if message.kind != kind:
            return [message.data]
        return [wire.encode(change(wire.decode(message.data)))]

    return meddle


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: replace(m, report_id=bytes(32)), "another query"),
        (lambda m: replace(m, round_id=13), "another query"),
        (lambda m: replace(m, box=m.box[:-1]), "cannot be unsealed"),
        (lambda m: replace(m, box=bytes(len(m.box))), "cannot be unsealed"),
        (lambda m: replace(m, tables=m.tables[:1]), "for 1 tables"),
        (lambda m: replace(m, tables=(m.tables[0][:-1], m.tables[1])), "bytes, not"),
        (lambda m: replace(m, tables=(m.tables[0], m.tables[1] + b"x")), "bytes for table 9"),
        (lambda m: replace(m, tables=(m.tables[0], bytes(6))), "another table 9"),
        (lambda m: replace(m, dense=b"xxxxx"), "another dense part"),
    ],
)
def test_a_bad_answer_makes_a_client_leave_whatever_its_rows(change, says):
    for rows in (two_servers.ids(), two_servers.ids(3, 5)):
        network = begun(
            two_servers.table(),
            two_servers.small_table(words=0),
            dense_bytes=5,
            meddle=lied("QueryAnswers", change),
        )
        network.read({c: {0: rows} for c in network.clients})
        assert network.left.keys() == set(network.clients)
        assert says in network.left[network.clients[0]].reason
        assert network.fetched(network.clients[0]) is None


def test_an_answer_for_one_client_is_no_answer_for_another():
    network = begun()
    first, second, _ = network.clients
    boxes = {}

    def swapped(source, message):
        if message.kind != "HelperAnswer":
            return [message.data]
        decoded = wire.decode(message.data)
        boxes[decoded.client] = decoded.box
        other = boxes.get(first, decoded.box) if decoded.client == second else decoded.box
        return [wire.encode(replace(decoded, box=other))]

    network.meddle = swapped
    network.read(wishes(network))
    assert network.left.keys() == {second} and "cannot be unsealed" in network.left[second].reason


@pytest.mark.parametrize("signed", [False, True])
def test_an_answer_that_the_helper_did_not_give_is_no_answer(signed):
    """Even from somebody who knows the one-time key: the helper's signature is inside."""
    network = begun()
    victim = network.clients[0]

    def forged(source, message):
        decoded = wire.decode(message.data)
        if message.kind != "HelperAnswer" or decoded.client != victim:
            return [message.data]
        asked = network.roles[victim].state.query
        context = network.roles[victim]._report_context(asked.header, asked.report_id)
        key = two_servers.keys()[1 if signed else 0]  # the helper's own, for no tables at all
        answer = SealedAnswer(
            tables=(), signature=key.sign(context.answer_statement(asked.digest, ()))
        )
        public = SealingKey.from_secret(asked.answer_key).public
        box = seal_to(public, wire.encode(answer), context.answer_info(asked.digest))
        return [wire.encode(replace(decoded, box=box))]

    network.meddle = forged
    network.read(wishes(network))
    assert network.left.keys() == {victim} and network.fetched(victim) is None
    assert ("other tables" if signed else "did not sign") in network.left[victim].reason


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("Forwarded", lambda m: replace(m, round_id=13), "another round"),
        ("Forwarded", lambda m: replace(m, purpose=Purpose.WRITE), "for writing"),
        ("AnswersDue", lambda m: HelperAnswer(round_id=12, client=1, box=b""), "invalid message"),
    ],
)
def test_a_bad_word_of_the_leader_makes_the_helper_leave(kind, change, says):
    network = begun(meddle=lied(kind, change))
    network.read(wishes(network))
    assert says in network.left[HELPER].reason
    assert not network.sent("HelperAnswer")
    with pytest.raises(ServerFault, match=says):  # for good, and for the same reason
        network.roles[HELPER].receive(SERVER, b"")


def test_a_word_of_the_helper_that_is_not_due_is_refused():
    network = begun()
    network.read(wishes(network))
    answer = network.sent("HelperAnswer")[0]
    assert network.roles[SERVER].receive(HELPER, answer) == []  # a repetition
    other = wire.encode(replace(wire.decode(answer), box=b""))
    for data in (other, b"", network.sent("Query")[0]):
        with pytest.raises(PeerError, match="helper"):
            network.roles[SERVER].receive(HELPER, data)


def test_the_leader_answers_with_its_half_alone():
    """Without the helper's half what comes over the leader's connection is no row."""
    network = begun(two_servers.table(40, 1, row_bytes=32))
    network.read({c: {0: two_servers.ids(7)} for c in network.clients})
    answers: QueryAnswers = wire.decode(network.sent("QueryAnswers")[0])
    half = np.frombuffer(answers.tables[0], np.uint8).reshape(-1, 32)
    assert not (half[:, None] == network.model.tables[0][None]).all(axis=2).any()


def test_a_query_that_comes_after_the_answers_is_refused_and_the_answers_stay():
    network = begun()
    late = network.clients[2]
    kept = []

    def meddle(source, message):
        if message.kind == "Forwarded" and wire.decode(message.data).sender == late:
            kept.append(message.data)
            return []
        return [message.data]

    network.meddle = meddle
    network.read(wishes(network))
    due = network.sent("AnswersDue")[0]
    answers = [m.data for m in network.roles[HELPER].receive(SERVER, due)]
    with pytest.raises(PeerError, match="after the answers were due") as refused:
        network.roles[HELPER].receive(SERVER, kept[0])
    assert refused.value.peer == late
    assert [m.data for m in network.roles[HELPER].receive(SERVER, due)] == answers
    with pytest.raises(ServerFault, match="AnswersDue, which is not due"):
        network.roles[HELPER].receive(SERVER, wire.encode(AnswersDue(round_id=12, queries={})))
    # It has done its part: a lie takes nothing back.
    assert [m.data for m in network.roles[HELPER].receive(SERVER, due)] == answers


def test_what_a_client_asks_for_does_not_print():
    network = begun()
    asked = network.roles[network.clients[0]]
    asked.submit(wishes(network)[network.clients[0]])
    assert "array" not in repr(asked.state) and "AwaitingAnswers" in repr(asked.state)
