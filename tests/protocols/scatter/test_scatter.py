"""The opened sum is the plain sum of the same integers, over the same clients at both servers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pairs
from tessera.crypto.cuckoo import Placement, SimpleTable
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, PeerError, RoundAborted, ServerFault
from tessera.ids import HELPER, SERVER
from tessera.protocols import wire
from tessera.protocols.pair import envelope
from tessera.protocols.pair.hands import OneHand
from tessera.protocols.pair.layouts import layouts_of
from tessera.protocols.pair.messages import Forwarded, Purpose
from tessera.protocols.pair.params import Write
from tessera.protocols.scatter import helper as helper_side
from tessera.protocols.scatter.client import Client, RowUpdate, Update
from tessera.protocols.scatter.helper import (
    Helper,
    HelperLeft,
    HoldingReports,
    ListFixed,
    SumHeard,
)
from tessera.protocols.scatter.leader import Leader
from tessera.protocols.scatter.messages import (
    Closing,
    Exclusions,
    IncludedList,
    OpenedSum,
    Report,
)

GROUPS = (Ring(17), Ring(20), Ring(32), Ring(64), Ring(100), Ring(128), Field(61))


def begun(*tables, meddle=None, **more) -> pairs.Pair:
    pair = pairs.Pair.of(pairs.params(*tables, **more))
    pair.writing(pair.open())
    pair.meddle = meddle
    return pair


def some_rows(pair: pairs.Pair) -> dict:
    """Two rows of every table for every client; neighbours share one."""
    return {
        c: {
            t.table: t.named(np.unique(np.arange(i, i + 2) % t.rows))[: t.max_rows]
            for t in pair.params.written
        }
        for i, c in enumerate(pair.clients)
    }


def updates(pair: pairs.Pair) -> dict:
    return {c: pairs.update(pair.params, rows, c) for c, rows in some_rows(pair).items()}


def assert_exact(pair: pairs.Pair, given: dict, included, at=(SERVER, HELPER)) -> None:
    due = pairs.plain_sum(pair.params, (given[c] for c in included))
    for role in at:
        total = pair.roles[role].total
        assert [int(c) for c in total.survivors] == sorted(included)
        assert pairs.opened(pair.params, total) == due


@st.composite
def tables(draw, name: int):
    rows = draw(st.integers(1, 50))
    dense = rows < 3 or draw(st.integers(0, 3)) == 0
    narrow = None
    if draw(st.booleans()):
        some = draw(st.sets(st.integers(0, 2**64 - 1), min_size=rows, max_size=rows))
        narrow = np.array(sorted(some), dtype=np.uint64)
    return pairs.table(
        rows,
        draw(st.integers(1, min(rows, 6)) | st.just(rows)),
        name=name,
        ids=narrow,
        row_bytes=0,
        words=draw(st.integers(1, 9)),
        write=Write.DENSE if dense else Write.POINTS,
        stash=0 if dense else draw(st.integers(0, 2)),
    )


@settings(max_examples=50)
@given(data=st.data())
def test_the_opened_sum_is_the_plain_sum(data):
    some = [data.draw(tables(name)) for name in range(data.draw(st.integers(0, 2)))]
    dense = data.draw(st.integers(0 if some else 1, 20))
    pair = begun(*some, group=data.draw(st.sampled_from(GROUPS)), dense=dense, clients=3)
    if not some:
        pair = pairs.Pair.of(replace(pair.params, tables=()))
        pair.writing(pair.open())
    given_ = {}
    for i, c in enumerate(pair.clients):
        wanted = {}
        for spec in pair.params.tables:
            count = data.draw(st.sampled_from([0, 1, spec.max_rows]))
            rows = data.draw(st.permutations(range(spec.rows)))[:count]
            wanted[spec.table] = spec.named(np.array(sorted(rows), dtype=np.int64))
        given_[c] = pairs.update(pair.params, wanted, i)
    if data.draw(st.integers(0, 3)) == 0:
        given_[pair.clients[1]] = None
    pair.write(given_)
    assert not pair.left and not pair.refused
    assert_exact(pair, given_, pair.clients)


def test_plain_shares_of_several_tables_do_not_run_into_each_other():
    some = (
        pairs.small_table(2, name=1, words=4),
        pairs.table(30, 3, name=2),
        pairs.small_table(5, name=3, words=2),
        pairs.small_table(1, name=4),
    )
    for dense in (0, 3):
        pair = begun(*some, dense=dense)
        given_ = updates(pair)
        pair.write(given_)
        assert_exact(pair, given_, pair.clients)


def test_a_failure_is_sent_as_zeros_and_looks_like_any_other_report():
    pair = begun(pairs.table(), pairs.small_table(), dense=4)
    given_ = updates(pair)
    failed = pair.clients[1]
    given_[failed] = None
    pair.write(given_)
    assert len({len(data) for data in pair.said("Report")}) == 1
    assert len({len(data) for data in pair.said("Forwarded")}) == 1
    assert failed in pair.total.survivors
    assert_exact(pair, given_, pair.clients)


def test_reports_have_one_length_whatever_is_written():
    lengths = set()
    for rows in ([], [0], [3, 4, 5], [39]):
        pair = begun(pairs.table(40, 3))
        out = pair.roles[pair.clients[0]].submit(
            pairs.update(pair.params, {0: pairs.ids(*rows)}, 1)
        )
        lengths.add(len(out[0].data))
    assert len(lengths) == 1


class ManyHands(OneHand):
    """Parts of the work in another order than they were given."""

    count = 3

    def run(self, calls):
        super().run(calls[::-1])


def test_hands_share_the_work_and_the_sum_stays():
    pair = begun(pairs.table(60, 6))
    for role in (SERVER, HELPER):
        pair.roles[role]._hands = ManyHands()
    given_ = {c: pairs.update(pair.params, {0: pairs.ids(1, 5, 59)}, c) for c in pair.clients}
    pair.write(given_)
    assert_exact(pair, given_, pair.clients)


# -- whoever drops out


def test_a_client_that_drops_counts_exactly_or_not_at_all_and_the_same_at_both():
    """Every message of the round in turn does not arrive."""
    whole = begun(pairs.table(), pairs.small_table(), dense=2)
    start = len(whole.log)
    whole.write(updates(whole))
    kinds = [m.kind for _, m in whole.log[start:]]
    for lost, kind in enumerate(kinds):
        seen = -1

        def meddle(source, message, lost=lost):
            nonlocal seen
            seen += 1
            return [] if seen == lost else [message.data]

        pair = begun(pairs.table(), pairs.small_table(), dense=2, meddle=meddle)
        given_ = updates(pair)
        pair.write(given_)
        if pair.roles[SERVER].phase not in ("done", "aborted"):
            pair.close()  # the helper's word does not come
        assert not pair.left and not pair.refused
        if kind in ("Report", "Forwarded"):
            gone = pair.clients[lost // 2]
            assert_exact(pair, given_, [c for c in pair.clients if c != gone])
            assert pair.roles[SERVER].excluded.keys() == ({gone} if kind == "Forwarded" else set())
        elif kind == "OpenedSum":
            assert_exact(pair, given_, pair.clients, at=[SERVER])
            assert pair.roles[HELPER].phase == "open"
        else:
            assert pair.aborted and pair.total is None and pair.roles[HELPER].total is None


def test_a_message_that_comes_twice_changes_nothing():
    pair = begun(pairs.table(), meddle=lambda source, message: [message.data] * 2)
    given_ = updates(pair)
    pair.write(given_)
    assert_exact(pair, given_, pair.clients)
    shares = pair.said("SumShare")
    assert len(set(shares)) == 1, "asked again the helper says the same bytes"


def test_a_row_without_a_bin_is_not_written_and_nobody_else_can_tell(monkeypatch):
    pair = begun(pairs.table(40, 3))
    real = SimpleTable.place

    def crowded(self, rows):
        placed = real(self, rows[1:])
        holder = np.where(placed.holder >= 0, placed.holder + 1, -1)
        return Placement(np.concatenate([[-1], placed.bins]), placed.points, holder)

    given_ = {c: pairs.update(pair.params, {0: pairs.ids(1, 2, 3)}, c) for c in pair.clients}
    first, *others = pair.clients
    with monkeypatch.context() as crowd:
        crowd.setattr(SimpleTable, "place", crowded)
        pair.carry(first, pair.roles[first].submit(given_[first]))
    pair.write({c: given_[c] for c in others})
    assert len({len(data) for data in pair.said("Report")}) == 1
    rows = given_[first].tables[0]
    given_[first] = Update(None, {0: RowUpdate(rows.ids[1:], rows.words[1:])})
    assert_exact(pair, given_, pair.clients)


def test_too_few_reports_open_nothing():
    pair = begun(clients=5, min_cohort=4)
    given_ = dict(list(updates(pair).items())[:3])
    pair.write(given_)
    assert (pair.aborted.answered, pair.aborted.needed) == (3, 4)
    assert pair.roles[SERVER].phase == "aborted"
    assert not pair.said("Closing") and not pair.said("SumShare")
    with pytest.raises(MisuseError, match="no phase is open"):
        pair.roles[SERVER].close_phase()


def test_too_few_after_the_helpers_exclusions_open_nothing():
    spoiled = []

    def meddle(source, message):
        if message.kind == "Forwarded" and len(spoiled) < 2:
            spoiled.append(message)
            return [wire.encode(replace(wire.decode(message.data), box=b"nothing"))]
        return [message.data]

    pair = begun(clients=5, min_cohort=4, meddle=meddle)
    pair.write(updates(pair))
    assert len(pair.refused) == 2
    assert (pair.aborted.phase, pair.aborted.answered) == ("exclude", 3)
    assert not pair.said("IncludedList") and not pair.said("SumShare")


def test_whom_the_helper_refuses_is_left_out_at_both():
    pair = begun(clients=4)
    bad = pair.clients[2]

    def meddle(source, message):
        told = wire.decode(message.data)
        if message.kind == "Forwarded" and told.sender == bad:
            return [wire.encode(replace(told, report_id=bytes(32)))]
        return [message.data]

    pair.meddle = meddle
    given_ = updates(pair)
    pair.write(given_)
    assert [e.peer for e in pair.refused] == [bad]
    assert pair.roles[SERVER].excluded == {bad: "sent a box that does not open"}
    assert_exact(pair, given_, [c for c in pair.clients if c != bad])


# -- stored and resumed


class Sleepy(pairs.Pair):
    """Everybody is stored and woken again after every message."""

    def arrive(self, source, to, data):
        out = super().arrive(source, to, data)
        self.reload(to)
        return out

    def close(self):
        super().close()
        self.reload(SERVER)

    def reload(self, name):
        role = self.roles.get(name)
        if isinstance(role, Leader):
            woken = Leader.restore(role.snapshot(), self.params, self.clients, key=pairs.keys()[0])
        elif isinstance(role, Helper):
            woken = Helper.restore(role.snapshot(), self.params, **self.helper_keys)
        elif isinstance(role, Client):
            more = {"entropy": self.entropy, "identity": self.identity(name)}
            woken = Client.restore(role.snapshot(), self.params, name, **more)
        else:
            return
        assert woken.phase == role.phase and woken.snapshot() == role.snapshot()
        self.roles[name] = woken


# -- lost and repeated


BETWEEN = ("Report", "Forwarded", "Closing", "Exclusions", "IncludedList", "SumShare", "OpenedSum")
"""What either server hears in a round, in order."""


class Repeating(Sleepy):
    """Once a message of one kind has come, all of an earlier kind come a second time."""

    earlier: str
    later: str
    armed: bool = True

    def arrive(self, source, to, data):
        out = super().arrive(source, to, data)
        if self.armed and wire.kind_of(data).__name__ == self.later:
            again = [(sender, m) for sender, m in self.log if m.kind == self.earlier]
            self.armed = False
            for sender, message in again:
                self.carry(message.to, super().arrive(sender, message.to, message.data))
            self.armed = True
        return out


@pytest.mark.parametrize(
    ("earlier", "later"),
    [(first, then) for at, then in enumerate(BETWEEN) for first in BETWEEN[: at + 1]],
)
def test_an_earlier_message_once_more_after_a_later_one_changes_nothing(earlier, later):
    """Also across a restart, which everybody has after every message."""
    pair = Repeating.of(pairs.params(pairs.table(), pairs.small_table(), dense=2))
    pair.earlier, pair.later = earlier, later
    pair.writing(pair.open())
    given_ = updates(pair)
    pair.write(given_)
    assert not pair.left and pair.aborted is None
    assert {e.peer for e in pair.refused} <= set(pair.clients), "a report that comes late"
    assert_exact(pair, given_, pair.clients)
    assert pair.roles[SERVER].phase == pair.roles[HELPER].phase == "done"
    for kind in BETWEEN[2:]:
        assert len(set(pair.said(kind))) == 1, "what is said again is said in the same bytes"


@pytest.mark.parametrize(
    ("lost", "asked"),
    [(kind, HELPER if kind in ("Exclusions", "SumShare") else SERVER) for kind in BETWEEN[2:]]
    + [("Exclusions", SERVER), ("SumShare", SERVER), ("OpenedSum", HELPER)],
)
def test_a_message_that_was_lost_is_said_again_and_the_round_goes_on(lost, asked):
    """Whoever said it says it again; or whoever waits for it says what it is the answer to.

    Restarted in between, and with no other bytes.
    """
    pair = Sleepy.of(pairs.params(pairs.table(), pairs.small_table(), dense=2))
    pair.writing(pair.open())
    pair.meddle = lambda source, message: [] if message.kind == lost else [message.data]
    given_ = updates(pair)
    pair.write(given_)
    [first] = pair.said(lost)
    pair.meddle = None
    pair.reload(asked)
    pair.carry(asked, pair.roles[asked].resend())
    assert pair.said(lost) == [first, first]
    assert not pair.left and not pair.refused
    assert_exact(pair, given_, pair.clients)


def test_a_helper_that_has_not_heard_the_sum_says_its_share_again_and_hears_it():
    """The leader is done by then, and waits for nothing."""
    pair = begun(
        pairs.table(), dense=2, meddle=lambda s, m: [] if m.kind == "OpenedSum" else [m.data]
    )
    given_ = updates(pair)
    pair.write(given_)
    assert (pair.roles[SERVER].phase, pair.roles[HELPER].phase) == ("done", "open")
    pair.meddle = None
    [share] = pair.said("SumShare")
    pair.carry(HELPER, [pairs.Outbound(SERVER, "SumShare", share)])
    assert_exact(pair, given_, pair.clients)
    for other in (
        replace(wire.decode(share), signature=bytes(64)),
        Exclusions(round_id=12, reasons={1: "late"}),
    ):
        with pytest.raises(PeerError, match="not due"):
            pair.roles[SERVER].receive(HELPER, wire.encode(other))


def test_before_and_after_the_round_nobody_has_anything_to_say_again():
    pair = begun()
    for role in (SERVER, HELPER):
        assert pair.roles[role].resend() == []
    pair.write(updates(pair))
    assert pair.roles[HELPER].resend() == []
    aborted = begun()
    aborted.write({})
    assert aborted.roles[SERVER].resend() == []


SECONDS = {
    "Closing": ("twice", lambda m: replace(m, reports=m.reports | {2: bytes(32)})),
    "IncludedList": ("a second list", lambda m: replace(m, signature=bytes(64))),
    "OpenedSum": ("a second sum", lambda m: replace(m, signature=bytes(64))),
}


@pytest.mark.parametrize(
    ("phase", "silent", "kind"),
    [
        (phase, silent, kind)
        for phase, silent, heard in (
            ("exclude", "IncludedList", ["Closing"]),
            ("open", "OpenedSum", ["Closing", "IncludedList"]),
            ("done", "", SECONDS),
        )
        for kind in heard
    ],
)
def test_other_bytes_in_a_place_that_is_taken_are_a_fault(phase, silent, kind):
    pair = begun(meddle=lambda s, m: [] if m.kind == silent else [m.data])
    given_ = updates(pair)
    pair.write(given_)
    helper = pair.roles[HELPER]
    assert helper.phase == phase
    said = pair.said(kind)
    says, change = SECONDS[kind]
    with pytest.raises(ServerFault, match=says):
        helper.receive(wire.encode(change(wire.decode(said[0]))))
    if phase != "done":
        assert helper.phase == "left" and helper.total is None
        return
    assert_exact(pair, given_, pair.clients)  # it had heard the sum, and a fault takes nothing back
    for data in (b"no message", wire.encode(replace(wire.decode(said[0]), round_id=13))):
        with pytest.raises(ServerFault):
            helper.receive(data)
    assert_exact(pair, given_, pair.clients)


@pytest.mark.parametrize("group", [Ring(32), Ring(128), Field(61)], ids=lambda g: g.name)
def test_everybody_can_sleep_between_any_two_messages(group):
    pair = Sleepy.of(pairs.params(pairs.table(), pairs.small_table(), dense=3, group=group))
    pair.writing(pair.open())
    given_ = updates(pair)
    pair.write(given_)
    assert not pair.left and not pair.refused
    assert_exact(pair, given_, pair.clients)


def test_a_client_resends_the_bytes_it_has_sent_and_never_others():
    pair = begun()
    client = pair.roles[pair.clients[0]]
    assert client.resend() == []
    out = client.submit(None)
    woken = Client.restore(
        client.snapshot(),
        pair.params,
        client.me,
        entropy=pair.entropy,
        identity=pair.identity(client.me),
    )
    assert woken.resend() == out
    with pytest.raises(MisuseError, match="Sent"):
        woken.submit(None)


def test_a_helper_that_wakes_after_its_release_says_the_same_share_and_no_other():
    pair = begun(meddle=lambda s, m: [] if m.kind in ("SumShare", "OpenedSum") else [m.data])
    pair.write(updates(pair))
    [share] = pair.said("SumShare")
    woken = Helper.restore(pair.roles[HELPER].snapshot(), pair.params, **pair.helper_keys)
    [listed] = pair.said("IncludedList")
    assert [m.data for m in woken.receive(listed)] == [share]
    shorter = wire.decode(listed)
    shorter = replace(shorter, reports=dict(list(shorter.reports.items())[:2]))
    with pytest.raises(ServerFault, match="a second list"):
        woken.receive(wire.encode(shorter))
    again = Helper.restore(woken.snapshot(), pair.params, **pair.helper_keys)
    with pytest.raises(ServerFault):
        again.receive(listed)


# -- what is refused


def test_a_caller_writes_what_the_round_has():
    pair = begun(pairs.table(), dense=2)
    client = pair.roles[pair.clients[0]]
    group = pair.params.group
    row, dense = group.zeros((1, 3)), group.zeros(2)
    one = RowUpdate(pairs.ids(1), row)
    for bad in (
        Update(dense, {}),
        Update(None, {0: one}),
        Update(group.zeros(3), {0: one}),
        Update(dense.astype(np.uint64), {0: one}),
        Update(dense, {0: RowUpdate(pairs.ids(1), group.zeros((1, 2)))}),
        Update(dense, {0: RowUpdate(pairs.ids(1, 2), row)}),
        Update(dense, {0: RowUpdate(pairs.ids(40), row)}),
        Update(dense, {0: RowUpdate(pairs.ids(2, 1), group.zeros((2, 3)))}),
        Update(dense, {0: RowUpdate(pairs.ids(1, 2, 3, 4), group.zeros((4, 3)))}),
        Update(dense, {0: one, 1: one}),
    ):
        with pytest.raises(MisuseError):
            client.submit(bad)
    assert client.is_ready
    client.submit(Update(dense, {0: one}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: replace(r, round_id=13), "another client or round"),
        (lambda r: replace(r, sender=4), "another client or round"),
        (lambda r: replace(r, public=()), "keys for 0 tables"),
        (lambda r: replace(r, public=r.public * 2), "keys for 2 tables"),
        (lambda r: replace(r, public=(r.public[0][:-1],)), "keys that are none"),
        (lambda r: replace(r, public=(r.public[0] + b"\0",)), "keys that are none"),
        (lambda r: replace(r, public=(bytes(16) + r.public[0][16:],)), "another domain, depth"),
        (lambda r: replace(r, public=(r.public[0][:-8] + b"\xff" * 8,)), "keys that are none"),
        (lambda r: replace(r, seeds=()), "0 seeds"),
        (lambda r: replace(r, dense=r.dense[:-1]), "plain share"),
        (lambda r: replace(r, dense=b"\xff" * len(r.dense)), "plain share"),
        (lambda r: Exclusions(round_id=12, reasons={}), "no message"),
    ],
)
def test_a_bad_report_costs_its_client_and_changes_nothing(change, says):
    pair = begun(pairs.table(), dense=3, group=Field(61))
    leader, c = pair.roles[SERVER], pair.clients[0]
    report: Report = wire.decode(pair.roles[c].submit(None)[0].data)
    before = leader.snapshot()
    with pytest.raises(PeerError, match=says) as caught:
        leader.receive(c, wire.encode(change(report)))
    assert caught.value.peer == c and leader.snapshot() == before
    assert leader.receive(c, wire.encode(report)), "its true report still counts"
    with pytest.raises(PeerError, match="not due"):
        leader.receive(c, wire.encode(report))
    with pytest.raises(PeerError, match="not in this cohort"):
        leader.receive(2, wire.encode(report))


def stray_bits(public: bytes) -> bytes:
    """Keys with a bit set that means nothing; a server that summed them would stop."""
    return public[:-1] + bytes([public[-1] | 0x80])


def test_bits_astray_are_seen_by_either_server_when_a_report_comes():
    pair = begun(pairs.table(words=1), group=Ring(17))
    layout = layouts_of(pair.params, pair.roles[SERVER].header).writing[0]
    assert layout.forest.trees.count * layout.forest.values.per_leaf * 17 % 8
    bad, *others = pair.clients
    client = pair.roles[bad]
    given_ = updates(pair)
    real = envelope.sealed

    def sealed(subject, public, **more):
        public[0] = stray_bits(public[0])  # signed by the client itself: nobody changed it
        return real(subject, public, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "sealed", sealed)
        report = client.submit(given_[bad])
    with pytest.raises(PeerError, match="padding"):
        pair.roles[SERVER].receive(bad, report[0].data)
    told: Report = wire.decode(report[0].data)
    forwarded = Forwarded(
        purpose=Purpose.WRITE,
        round_id=told.round_id,
        sender=bad,
        report_id=told.report_id,
        public=told.public,
        box=told.box,
    )
    with pytest.raises(PeerError, match="padding"):
        pair.roles[HELPER].receive(wire.encode(forwarded))
    pair.write({c: given_[c] for c in others})
    assert_exact(pair, given_, others)


def other_layouts() -> dict[str, pairs.PairParams]:
    """Rounds whose keys are of another depth, count, value type or domain."""
    return {
        "depth": pairs.params(pairs.table(400)),
        "count": pairs.params(pairs.table(40, 6)),
        "width": pairs.params(pairs.table(words=4)),
        "type": pairs.params(group=Ring(33)),
        "domain": pairs.params(pairs.table(41)),
    }


@pytest.mark.parametrize("name", other_layouts())
def test_keys_of_another_shape_are_refused_by_either_server(name):
    stranger = pairs.Pair.of(other_layouts()[name])
    stranger.writing(stranger.open())
    c = stranger.clients[0]
    odd: Report = wire.decode(stranger.roles[c].submit(None)[0].data)
    pair = begun()
    report: Report = wire.decode(pair.roles[c].submit(None)[0].data)
    with pytest.raises(PeerError, match="keys that are none"):
        pair.roles[SERVER].receive(c, wire.encode(replace(report, public=odd.public)))
    subject = pair.roles[c]._subject(pair.roles[SERVER].header, report.report_id)
    box = envelope.sealed(
        subject,
        odd.public,
        seeds=[Secret(seed) for seed in odd.seeds],
        dense_seed=None,
        answer_key=None,
        key=pair.identity(c).key,
    )
    forwarded = Forwarded(
        purpose=Purpose.WRITE,
        round_id=pair.params.round_id,
        sender=c,
        report_id=report.report_id,
        public=odd.public,
        box=box,
    )
    with pytest.raises(PeerError, match="keys that are none"):
        pair.roles[HELPER].receive(wire.encode(forwarded))
    assert c in pair.roles[HELPER].intake.excluded


def changed(kind: str, change):
    def meddle(source, message):
        if message.kind != kind:
            return [message.data]
        return [wire.encode(change(wire.decode(message.data)))]

    return meddle


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("Forwarded", lambda m: replace(m, purpose=Purpose.RETRIEVE), "for reading"),
        ("Closing", lambda m: replace(m, round_id=13), "another round"),
        ("Closing", lambda m: Exclusions(round_id=12, reasons={}), "no message"),
        ("Closing", lambda m: replace(m, reports={}), "leaves out a report"),
        (
            "Closing",
            lambda m: replace(m, reports=m.reports | {1: bytes(32)}),
            "leaves out a report",
        ),
        ("IncludedList", lambda m: replace(m, signature=bytes(64)), "did not sign the list"),
        ("IncludedList", lambda m: replace(m, reports={}), "another list"),
        (
            "IncludedList",
            lambda m: replace(m, reports=m.reports | {2: bytes(32)}),
            "another list",
        ),
        ("IncludedList", lambda m: replace(m, reports=dict.fromkeys(m.reports, bytes(32))), "list"),
        ("Closing", lambda m: IncludedList(**_plain(m), signature=bytes(64)), "not due"),
    ],
)
def test_a_bad_word_of_the_leader_ends_the_round_without_a_release(kind, change, says):
    pair = begun(meddle=changed(kind, change))
    pair.write(updates(pair))
    assert says in pair.left[HELPER].reason
    assert pair.roles[HELPER].phase == "left" and not pair.said("SumShare")
    for data in (*pair.said("Closing"), *pair.said("IncludedList")):
        with pytest.raises(ServerFault):
            pair.roles[HELPER].receive(data)
    assert pair.total is None


def _plain(closing: Closing) -> dict:
    return {"round_id": closing.round_id, "reports": closing.reports}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: replace(m, signature=bytes(64)), "did not sign the sum"),
        (lambda m: replace(m, dense=m.dense + b"\0"), "did not sign the sum"),
    ],
)
def test_a_sum_that_the_leader_did_not_sign_is_no_sum(change, says):
    pair = begun(meddle=changed("OpenedSum", change))
    pair.write(updates(pair))
    assert says in pair.left[HELPER].reason and pair.roles[HELPER].total is None


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("Exclusions", lambda m: replace(m, reasons={2: "who?"}), "not on the list"),
        ("Exclusions", lambda m: replace(m, round_id=13), "another round"),
        ("SumShare", lambda m: replace(m, signature=bytes(64)), "signed another share"),
        ("SumShare", lambda m: replace(m, tables=(bytes(len(m.tables[0])),)), "signed another"),
        ("SumShare", lambda m: Exclusions(round_id=12, reasons={1: "late"}), "not due"),
    ],
)
def test_a_bad_word_of_the_helper_opens_nothing(kind, change, says):
    pair = begun(meddle=changed(kind, change))
    pair.write(updates(pair))
    assert [e.peer for e in pair.refused] == [HELPER] and says in pair.refused[0].reason
    assert pair.total is None
    with pytest.raises(RoundAborted):
        pair.roles[SERVER].close_phase()
    assert pair.roles[SERVER].phase == "aborted"


def test_a_message_before_its_time_makes_the_helper_leave():
    """Every phase of the helper and every kind of message it knows. What has had its time may come
    again; what is to come may not come before."""
    pair = begun()
    phases = {}
    real = pair.arrive

    def arrive(source, to, data):
        if to == HELPER:
            helper = pair.roles[HELPER]
            phases.setdefault(type(helper._phase), helper.snapshot())
        return real(source, to, data)

    pair.arrive = arrive
    pair.write(updates(pair))
    phases[SumHeard] = pair.roles[HELPER].snapshot()
    phases[HelperLeft] = wire.encode(
        replace(wire.decode(phases[SumHeard]), phase=HelperLeft(reason="left"))
    )
    assert phases.keys() == set(helper_side.PHASE_NAMES)
    messages = {m.kind: m.data for _, m in pair.log if m.to == HELPER}
    early = {(HoldingReports, IncludedList), (HoldingReports, OpenedSum), (ListFixed, OpenedSum)}
    left = {(HelperLeft, kind) for kind in helper_side.FROM_LEADER}
    every = {(phase, kind) for phase in phases for kind in helper_side.FROM_LEADER}
    assert every - helper_side.STEPS.keys() == early | left
    for phase, kind in early | left:
        woken = Helper.restore(phases[phase], pair.params, **pair.helper_keys)
        with pytest.raises(ServerFault, match="not due"):
            woken.receive(messages[kind.__name__])
        assert woken.phase == "left"


def test_a_report_after_closing_is_late():
    pair = begun(meddle=lambda s, m: [] if m.kind == "IncludedList" else [m.data])
    first, *others = pair.clients
    late = pair.roles[first].submit(None)
    pair.write(dict.fromkeys(others))
    assert pair.roles[HELPER].phase == "exclude"
    with pytest.raises(PeerError, match="not due"):
        pair.roles[SERVER].receive(first, late[0].data)
    report: Report = wire.decode(late[0].data)
    other = replace(wire.decode(pair.said("Forwarded")[0]), sender=first, box=report.box)
    with pytest.raises(PeerError, match="after collection had closed"):
        pair.roles[HELPER].receive(wire.encode(other))
    assert pair.roles[HELPER].phase == "exclude"
