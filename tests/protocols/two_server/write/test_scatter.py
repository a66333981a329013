"""The opened sum is the plain sum of the same integers, over the same clients at both servers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import two_servers
from tessera import wire
from tessera.crypto.cuckoo import Placement, SimpleTable
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, PeerError, RoundAborted, ServerFault
from tessera.ids import HELPER, SERVER
from tessera.protocols.machine import Left
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.messages import (
    CheckSums,
    Closing,
    Exclusions,
    Forwarded,
    IncludedList,
    OpenedSum,
    Purpose,
    WriteReport,
)
from tessera.protocols.two_server.params import Write
from tessera.protocols.two_server.reports import SingleWorker, layouts_of
from tessera.protocols.two_server.write import helper as helper_side
from tessera.protocols.two_server.write.client import RowUpdate, Update
from tessera.protocols.two_server.write.helper import (
    CoinTossed,
    HoldingReports,
    ListFixed,
    SumReceived,
    WriteHelper,
)

TREES = two_servers.table().trees
GROUPS = (Ring(17), Ring(20), Ring(32), Ring(64), Ring(100), Ring(128), Field(61))


def begun(*tables, meddle=None, **more) -> two_servers.Network:
    network = two_servers.Network.of(two_servers.params(*tables, **more))
    network.writing(network.handshake())
    network.meddle = meddle
    return network


def some_rows(network: two_servers.Network) -> dict:
    """Two rows of every table for every client; neighbours share one."""
    return {
        c: {
            t.table: t.named(np.unique(np.arange(i, i + 2) % t.rows))[: t.max_rows]
            for t in network.params.written
        }
        for i, c in enumerate(network.clients)
    }


def updates(network: two_servers.Network) -> dict:
    return {
        c: two_servers.update(network.params, rows, c) for c, rows in some_rows(network).items()
    }


def assert_exact(network: two_servers.Network, given: dict, included, at=(SERVER, HELPER)) -> None:
    due = two_servers.plain_sum(network.params, (given[c] for c in included))
    for role in at:
        total = network.roles[role].total
        assert [int(c) for c in total.survivors] == sorted(included)
        assert two_servers.opened(network.params, total) == due


@st.composite
def tables(draw, name: int):
    rows = draw(st.integers(1, 50))
    dense = rows < 3 or draw(st.integers(0, 3)) == 0
    narrow = None
    if draw(st.booleans()):
        some = draw(st.sets(st.integers(0, 2**64 - 1), min_size=rows, max_size=rows))
        narrow = np.array(sorted(some), dtype=np.uint64)
    return two_servers.table(
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
    network = begun(*some, group=data.draw(st.sampled_from(GROUPS)), dense=dense, clients=3)
    if not some:
        network = two_servers.Network.of(replace(network.params, tables=()))
        network.writing(network.handshake())
    given_ = {}
    for i, c in enumerate(network.clients):
        wanted = {}
        for spec in network.params.tables:
            count = data.draw(st.sampled_from([0, 1, spec.max_rows]))
            rows = data.draw(st.permutations(range(spec.rows)))[:count]
            wanted[spec.table] = spec.named(np.array(sorted(rows), dtype=np.int64))
        given_[c] = two_servers.update(network.params, wanted, i)
    if data.draw(st.integers(0, 3)) == 0:
        given_[network.clients[1]] = None
    network.write(given_)
    assert not network.left and not network.refused
    assert_exact(network, given_, network.clients)


def test_plain_shares_of_several_tables_do_not_run_into_each_other():
    some = (
        two_servers.small_table(2, name=1, words=4),
        two_servers.table(30, 3, name=2),
        two_servers.small_table(5, name=3, words=2),
        two_servers.small_table(1, name=4),
    )
    for dense in (0, 3):
        network = begun(*some, dense=dense)
        given_ = updates(network)
        network.write(given_)
        assert_exact(network, given_, network.clients)


def test_a_failure_is_sent_as_zeros_and_looks_like_any_other_report():
    network = begun(two_servers.table(), two_servers.small_table(), dense=4)
    given_ = updates(network)
    failed = network.clients[1]
    given_[failed] = None
    network.write(given_)
    assert len({len(data) for data in network.sent("WriteReport")}) == 1
    assert len({len(data) for data in network.sent("Forwarded")}) == 1
    assert failed in network.total.survivors
    assert_exact(network, given_, network.clients)


def test_reports_have_one_length_whatever_is_written():
    lengths = set()
    for rows in ([], [0], [3, 4, 5], [39]):
        network = begun(two_servers.table(40, 3))
        out = network.roles[network.clients[0]].submit(
            two_servers.update(network.params, {0: two_servers.ids(*rows)}, 1)
        )
        lengths.add(len(out[0].data))
    assert len(lengths) == 1


class ManyWorkers(SingleWorker):
    """Parts of the work in another order than they were given."""

    count = 3

    def run(self, calls):
        super().run(calls[::-1])


def test_hands_share_the_work_and_the_sum_stays():
    network = begun(two_servers.table(60, 6))
    for role in (SERVER, HELPER):
        network.roles[role]._workers = ManyWorkers()
    given_ = {
        c: two_servers.update(network.params, {0: two_servers.ids(1, 5, 59)}, c)
        for c in network.clients
    }
    network.write(given_)
    assert_exact(network, given_, network.clients)


# -- whoever drops out


def test_a_client_that_drops_counts_exactly_or_not_at_all_and_the_same_at_both():
    """Every message of the round in turn does not arrive."""
    whole = begun(two_servers.table(), two_servers.small_table(), dense=2)
    start = len(whole.log)
    whole.write(updates(whole))
    kinds = [m.kind for _, m in whole.log[start:]]
    for lost, kind in enumerate(kinds):
        seen = -1

        def meddle(source, message, lost=lost):
            nonlocal seen
            seen += 1
            return [] if seen == lost else [message.data]

        network = begun(two_servers.table(), two_servers.small_table(), dense=2, meddle=meddle)
        given_ = updates(network)
        network.write(given_)
        if network.roles[SERVER].phase not in ("done", "aborted"):
            network.close()  # the helper's word does not come
        assert not network.left and not network.refused
        if kind in ("WriteReport", "Forwarded"):
            gone = network.clients[lost // 2]
            assert_exact(network, given_, [c for c in network.clients if c != gone])
            assert network.roles[SERVER].excluded.keys() == (
                {gone} if kind == "Forwarded" else set()
            )
        elif kind == "OpenedSum":
            assert_exact(network, given_, network.clients, at=[SERVER])
            assert network.roles[HELPER].phase == "open"
        else:
            assert network.aborted and network.total is None and network.roles[HELPER].total is None


def test_a_message_that_comes_twice_changes_nothing():
    network = begun(two_servers.table(), meddle=lambda source, message: [message.data] * 2)
    given_ = updates(network)
    network.write(given_)
    assert_exact(network, given_, network.clients)
    shares = network.sent("SumShare")
    assert len(set(shares)) == 1, "asked again the helper says the same bytes"


def test_a_row_without_a_bin_is_not_written_and_nobody_else_can_tell(monkeypatch):
    network = begun(two_servers.table(40, 3))
    real = SimpleTable.place

    def crowded(self, rows):
        placed = real(self, rows[1:])
        holder = np.where(placed.holder >= 0, placed.holder + 1, -1)
        return Placement(np.concatenate([[-1], placed.bins]), placed.points, holder)

    given_ = {
        c: two_servers.update(network.params, {0: two_servers.ids(1, 2, 3)}, c)
        for c in network.clients
    }
    first, *others = network.clients
    with monkeypatch.context() as crowd:
        crowd.setattr(SimpleTable, "place", crowded)
        network.carry(first, network.roles[first].submit(given_[first]))
    network.write({c: given_[c] for c in others})
    assert len({len(data) for data in network.sent("WriteReport")}) == 1
    rows = given_[first].tables[0]
    given_[first] = Update(None, {0: RowUpdate(rows.ids[1:], rows.words[1:])})
    assert_exact(network, given_, network.clients)


def test_too_few_reports_open_nothing():
    network = begun(clients=5, min_cohort=4)
    given_ = dict(list(updates(network).items())[:3])
    network.write(given_)
    assert (network.aborted.answered, network.aborted.needed) == (3, 4)
    assert network.roles[SERVER].phase == "aborted"
    assert not network.sent("Closing") and not network.sent("SumShare")
    with pytest.raises(MisuseError, match="no phase to close"):
        network.roles[SERVER].close_phase()


def test_too_few_after_the_helpers_exclusions_open_nothing():
    spoiled = []

    def meddle(source, message):
        if message.kind == "Forwarded" and len(spoiled) < 2:
            spoiled.append(message)
            return [wire.encode(replace(wire.decode(message.data), box=b"nothing"))]
        return [message.data]

    network = begun(clients=5, min_cohort=4, meddle=meddle)
    network.write(updates(network))
    assert len(network.refused) == 2
    assert (network.aborted.phase, network.aborted.answered) == ("exclude", 3)
    assert not network.sent("IncludedList") and not network.sent("SumShare")


def test_whom_the_helper_refuses_is_left_out_at_both():
    network = begun(clients=4)
    bad = network.clients[2]

    def meddle(source, message):
        decoded = wire.decode(message.data)
        if message.kind == "Forwarded" and decoded.sender == bad:
            return [wire.encode(replace(decoded, report_id=bytes(32)))]
        return [message.data]

    network.meddle = meddle
    given_ = updates(network)
    network.write(given_)
    assert [e.peer for e in network.refused] == [bad]
    assert network.roles[SERVER].excluded == {bad: "sent a box that cannot be unsealed"}
    assert_exact(network, given_, [c for c in network.clients if c != bad])


# -- stored and resumed


class Sleepy(two_servers.Network):
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
        if role is None:
            return
        woken = self.woken(name)
        assert woken.phase == role.phase and woken.snapshot() == role.snapshot()
        self.roles[name] = woken


# -- lost and repeated


BETWEEN = (
    "WriteReport",
    "Forwarded",
    "Closing",
    "CheckCoin",
    "CheckSums",
    "Exclusions",
    "IncludedList",
    "SumShare",
    "OpenedSum",
)
"""What either server hears in a round, in order."""
OF_THE_HELPER = ("CheckCoin", "Exclusions", "SumShare")


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
    network = Repeating.of(
        two_servers.params(two_servers.table(), two_servers.small_table(), dense=2)
    )
    network.earlier, network.later = earlier, later
    network.writing(network.handshake())
    given_ = updates(network)
    network.write(given_)
    assert not network.left and network.aborted is None
    assert {e.peer for e in network.refused} <= set(network.clients), "a report that comes late"
    assert_exact(network, given_, network.clients)
    assert network.roles[SERVER].phase == network.roles[HELPER].phase == "done"
    for kind in BETWEEN[2:]:
        assert len(set(network.sent(kind))) == 1, "what is said again is said in the same bytes"


@pytest.mark.parametrize(
    ("lost", "asked"),
    [(kind, HELPER if kind in OF_THE_HELPER else SERVER) for kind in BETWEEN[2:]]
    + [
        ("CheckCoin", SERVER),
        ("CheckSums", HELPER),
        ("Exclusions", SERVER),
        ("SumShare", SERVER),
        ("OpenedSum", HELPER),
    ],
)
def test_a_message_that_was_lost_is_said_again_and_the_round_goes_on(lost, asked):
    """Whoever said it says it again; or whoever waits for it says what it is the answer to.

    Restarted in between, and with no other bytes.
    """
    network = Sleepy.of(two_servers.params(two_servers.table(), two_servers.small_table(), dense=2))
    network.writing(network.handshake())
    network.meddle = lambda source, message: [] if message.kind == lost else [message.data]
    given_ = updates(network)
    network.write(given_)
    [first] = network.sent(lost)
    network.meddle = None
    network.reload(asked)
    network.carry(asked, network.roles[asked].resend())
    assert network.sent(lost) == [first, first]
    assert not network.left and not network.refused
    assert_exact(network, given_, network.clients)


def test_a_helper_that_has_not_heard_the_sum_says_its_share_again_and_hears_it():
    """The leader is done by then, and waits for nothing."""
    network = begun(
        two_servers.table(), dense=2, meddle=lambda s, m: [] if m.kind == "OpenedSum" else [m.data]
    )
    given_ = updates(network)
    network.write(given_)
    assert (network.roles[SERVER].phase, network.roles[HELPER].phase) == ("done", "open")
    network.meddle = None
    [share] = network.sent("SumShare")
    network.carry(HELPER, [two_servers.Outbound(SERVER, "SumShare", share)])
    assert_exact(network, given_, network.clients)
    for other in (
        replace(wire.decode(share), signature=bytes(64)),
        Exclusions(round_id=12, reasons={1: "late"}),
    ):
        with pytest.raises(PeerError, match="not due"):
            network.roles[SERVER].receive(HELPER, wire.encode(other))


def test_before_and_after_the_round_nobody_has_anything_to_say_again():
    network = begun()
    for role in (SERVER, HELPER):
        assert network.roles[role].resend() == []
    network.write(updates(network))
    assert network.roles[HELPER].resend() == []
    aborted = begun()
    aborted.write({})
    assert aborted.roles[SERVER].resend() == []


SECONDS = {
    "Closing": ("not due", lambda m: replace(m, reports=m.reports | {2: bytes(32)})),
    "CheckSums": ("not due", lambda m: replace(m, sums=dict.fromkeys(m.sums, bytes(32)))),
    "IncludedList": ("not due", lambda m: replace(m, signature=bytes(64))),
    "OpenedSum": ("not due", lambda m: replace(m, signature=bytes(64))),
}


@pytest.mark.parametrize(
    ("phase", "silent", "kind"),
    [
        (phase, silent, kind)
        for phase, silent, heard in (
            ("check", "CheckSums", ["Closing"]),
            ("exclude", "IncludedList", ["Closing", "CheckSums"]),
            ("open", "OpenedSum", ["Closing", "CheckSums", "IncludedList"]),
            ("done", "", SECONDS),
        )
        for kind in heard
    ],
)
def test_other_bytes_in_a_place_that_is_taken_are_a_fault(phase, silent, kind):
    network = begun(meddle=lambda s, m: [] if m.kind == silent else [m.data])
    given_ = updates(network)
    network.write(given_)
    helper = network.roles[HELPER]
    assert helper.phase == phase
    said = network.sent(kind)
    says, change = SECONDS[kind]
    with pytest.raises(ServerFault, match=says):
        helper.receive(SERVER, wire.encode(change(wire.decode(said[0]))))
    if phase != "done":
        assert helper.phase == "left" and helper.total is None
        return
    assert_exact(
        network, given_, network.clients
    )  # it had heard the sum, and a fault takes nothing back
    for data in (b"no message", wire.encode(replace(wire.decode(said[0]), round_id=13))):
        with pytest.raises(ServerFault):
            helper.receive(SERVER, data)
    assert_exact(network, given_, network.clients)


@pytest.mark.parametrize("group", [Ring(32), Ring(128), Field(61)], ids=lambda g: g.name)
def test_everybody_can_sleep_between_any_two_messages(group):
    network = Sleepy.of(
        two_servers.params(two_servers.table(), two_servers.small_table(), dense=3, group=group)
    )
    network.writing(network.handshake())
    given_ = updates(network)
    network.write(given_)
    assert not network.left and not network.refused
    assert_exact(network, given_, network.clients)


def test_a_client_resends_the_bytes_it_has_sent_and_never_others():
    network = begun()
    client = network.roles[network.clients[0]]
    assert client.resend() == []
    out = client.submit(None)
    woken = network.woken(client.me)
    assert woken.resend() == out
    with pytest.raises(MisuseError, match="Sent"):
        woken.submit(None)


def test_a_helper_that_wakes_after_its_release_says_the_same_share_and_no_other():
    network = begun(meddle=lambda s, m: [] if m.kind in ("SumShare", "OpenedSum") else [m.data])
    network.write(updates(network))
    [share] = network.sent("SumShare")
    network.roles[HELPER] = woken = network.woken(HELPER)
    [listed] = network.sent("IncludedList")
    assert [m.data for m in woken.receive(SERVER, listed)] == [share]
    shorter = wire.decode(listed)
    shorter = replace(shorter, reports=dict(list(shorter.reports.items())[:2]))
    with pytest.raises(ServerFault, match="not due"):
        woken.receive(SERVER, wire.encode(shorter))
    again = network.woken(HELPER)
    with pytest.raises(ServerFault):
        again.receive(SERVER, listed)


# -- what is refused


def test_a_caller_writes_what_the_round_has():
    network = begun(two_servers.table(), dense=2)
    client = network.roles[network.clients[0]]
    group = network.params.group
    row, dense = group.zeros((1, 3)), group.zeros(2)
    one = RowUpdate(two_servers.ids(1), row)
    for bad in (
        Update(dense, {}),
        Update(None, {0: one}),
        Update(group.zeros(3), {0: one}),
        Update(dense.astype(np.uint64), {0: one}),
        Update(dense, {0: RowUpdate(two_servers.ids(1), group.zeros((1, 2)))}),
        Update(dense, {0: RowUpdate(two_servers.ids(1, 2), row)}),
        Update(dense, {0: RowUpdate(two_servers.ids(40), row)}),
        Update(dense, {0: RowUpdate(two_servers.ids(2, 1), group.zeros((2, 3)))}),
        Update(dense, {0: RowUpdate(two_servers.ids(1, 2, 3, 4), group.zeros((4, 3)))}),
        Update(dense, {0: one, 1: one}),
    ):
        with pytest.raises(MisuseError):
            client.submit(bad)
    assert client.is_ready
    client.submit(Update(dense, {0: one}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: replace(r, round_id=13), "of another round"),
        (lambda r: replace(r, sender=4), "another client's name"),
        (lambda r: replace(r, public=()), "keys for 0 tables"),
        (lambda r: replace(r, public=r.public * 2), "keys for 2 tables"),
        (lambda r: replace(r, public=(r.public[0][:-1],)), "invalid keys"),
        (lambda r: replace(r, public=(r.public[0] + b"\0",)), "invalid keys"),
        (lambda r: replace(r, public=(bytes(16) + r.public[0][16:],)), "another domain, depth"),
        (lambda r: _with_last_words(r, b"\xff" * 8), "invalid keys"),
        (lambda r: replace(r, public=(r.public[0][: -32 * TREES],)), "invalid keys: corrections"),
        (lambda r: replace(r, seeds=()), "0 seeds"),
        (lambda r: replace(r, dense=r.dense[:-1]), "plain share"),
        (lambda r: replace(r, dense=b"\xff" * len(r.dense)), "plain share"),
        (lambda r: Exclusions(round_id=12, reasons={}), "invalid message"),
    ],
)
def test_a_bad_report_costs_its_client_and_changes_nothing(change, says):
    network = begun(two_servers.table(), dense=3, group=Field(61))
    leader, c = network.roles[SERVER], network.clients[0]
    report: WriteReport = wire.decode(network.roles[c].submit(None)[0].data)
    before = leader.snapshot()
    with pytest.raises(PeerError, match=says) as caught:
        leader.receive(c, wire.encode(change(report)))
    assert caught.value.peer == c and leader.snapshot() == before
    assert leader.receive(c, wire.encode(report)), "its true report still counts"
    assert leader.receive(c, wire.encode(report)) == []  # a repetition
    with pytest.raises(PeerError, match="not due"):
        leader.receive(c, wire.encode(replace(report, report_id=bytes(32))))
    with pytest.raises(PeerError, match="not in this cohort"):
        leader.receive(2, wire.encode(report))


def stray_bits(public: bytes) -> bytes:
    """Keys with a bit set that means nothing; a server that summed them would stop."""
    return public[:-1] + bytes([public[-1] | 0x80])


def test_bits_astray_are_seen_by_either_server_when_a_report_comes():
    network = begun(two_servers.table(words=1), group=Ring(17))
    layout = layouts_of(network.params, network.roles[SERVER].header).writing[0]
    assert layout.forest.trees.count * layout.forest.values.per_leaf * 17 % 8
    bad, *others = network.clients
    client = network.roles[bad]
    given_ = updates(network)
    real = reports.seal_box

    def sealed(context, public, **more):
        keys = layout.forest.public_bytes  # signed by the client itself: nobody changed it
        public[0] = stray_bits(public[0][:keys]) + public[0][keys:]
        return real(context, public, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "seal_box", sealed)
        report = client.submit(given_[bad])
    with pytest.raises(PeerError, match="padding"):
        network.roles[SERVER].receive(bad, report[0].data)
    decoded: WriteReport = wire.decode(report[0].data)
    forwarded = Forwarded(
        purpose=Purpose.WRITE,
        round_id=decoded.round_id,
        sender=bad,
        report_id=decoded.report_id,
        public=decoded.public,
        box=decoded.box,
    )
    with pytest.raises(PeerError, match="padding"):
        network.roles[HELPER].receive(SERVER, wire.encode(forwarded))
    network.write({c: given_[c] for c in others})
    assert_exact(network, given_, others)


def other_layouts() -> dict[str, two_servers.TwoServerParams]:
    """Rounds whose keys are of another depth, count, value type or domain."""
    return {
        "depth": two_servers.params(two_servers.table(400)),
        "count": two_servers.params(two_servers.table(40, 6)),
        "width": two_servers.params(two_servers.table(words=4)),
        "type": two_servers.params(group=Ring(33)),
        "domain": two_servers.params(two_servers.table(41)),
    }


@pytest.mark.parametrize("name", other_layouts())
def test_keys_of_another_shape_are_refused_by_either_server(name):
    stranger = two_servers.Network.of(other_layouts()[name])
    stranger.writing(stranger.handshake())
    c = stranger.clients[0]
    odd: WriteReport = wire.decode(stranger.roles[c].submit(None)[0].data)
    network = begun()
    report: WriteReport = wire.decode(network.roles[c].submit(None)[0].data)
    with pytest.raises(PeerError, match="invalid keys"):
        network.roles[SERVER].receive(c, wire.encode(replace(report, public=odd.public)))
    context = network.roles[c]._report_context(network.roles[SERVER].header, report.report_id)
    box = reports.seal_box(
        context,
        odd.public,
        seeds=[Secret(seed) for seed in odd.seeds],
        dense_seed=None,
        answer_key=None,
        key=network.identity(c).key,
    )
    forwarded = Forwarded(
        purpose=Purpose.WRITE,
        round_id=network.params.round_id,
        sender=c,
        report_id=report.report_id,
        public=odd.public,
        box=box,
    )
    with pytest.raises(PeerError, match="invalid keys"):
        network.roles[HELPER].receive(SERVER, wire.encode(forwarded))
    assert c in network.roles[HELPER].inbox.excluded


def _with_last_words(report: WriteReport, words: bytes) -> WriteReport:
    """Other bytes at the end of its keys, which the corrections of tags follow."""
    keys, tags = report.public[0][: -32 * TREES], report.public[0][-32 * TREES :]
    return replace(report, public=(keys[: -len(words)] + words + tags,))


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
        ("Closing", lambda m: Exclusions(round_id=12, reasons={}), "invalid message"),
        ("Closing", lambda m: replace(m, reports={}), "left out a report"),
        (
            "Closing",
            lambda m: replace(m, reports=m.reports | {1: bytes(32)}),
            "left out a report",
        ),
        ("CheckSums", lambda m: replace(m, sums={}), "sums of other reports"),
        ("CheckSums", lambda m: replace(m, sums=m.sums | {2: bytes(32)}), "sums of other reports"),
        ("IncludedList", lambda m: replace(m, signature=bytes(64)), "did not sign the list"),
        ("IncludedList", lambda m: replace(m, reports={}), "differs from what both hold"),
        (
            "IncludedList",
            lambda m: replace(m, reports=m.reports | {2: bytes(32)}),
            "differs from what both hold",
        ),
        ("IncludedList", lambda m: replace(m, reports=dict.fromkeys(m.reports, bytes(32))), "list"),
        ("Closing", lambda m: IncludedList(**_plain(m), signature=bytes(64)), "not due"),
    ],
)
def test_a_bad_word_of_the_leader_ends_the_round_without_a_release(kind, change, says):
    network = begun(meddle=changed(kind, change))
    network.write(updates(network))
    assert says in network.left[HELPER].reason
    assert network.roles[HELPER].phase == "left" and not network.sent("SumShare")
    for data in (*network.sent("Closing"), *network.sent("IncludedList")):
        with pytest.raises(ServerFault):
            network.roles[HELPER].receive(SERVER, data)
    assert network.total is None


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
    network = begun(meddle=changed("OpenedSum", change))
    network.write(updates(network))
    assert says in network.left[HELPER].reason and network.roles[HELPER].total is None


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("CheckCoin", lambda m: replace(m, round_id=13), "another round"),
        ("CheckCoin", lambda m: Exclusions(round_id=12, reasons={}), "not due"),
        ("Exclusions", lambda m: replace(m, reasons={2: "who?"}), "not on the list"),
        ("Exclusions", lambda m: replace(m, round_id=13), "another round"),
        ("SumShare", lambda m: replace(m, signature=bytes(64)), "signed another share"),
        ("SumShare", lambda m: replace(m, tables=(bytes(len(m.tables[0])),)), "signed another"),
        ("SumShare", lambda m: Exclusions(round_id=12, reasons={1: "late"}), "not due"),
    ],
)
def test_a_bad_word_of_the_helper_opens_nothing(kind, change, says):
    network = begun(meddle=changed(kind, change))
    network.write(updates(network))
    assert [e.peer for e in network.refused] == [HELPER] and says in network.refused[0].reason
    assert network.total is None
    with pytest.raises(RoundAborted):
        network.roles[SERVER].close_phase()
    assert network.roles[SERVER].phase == "aborted"


def test_a_message_before_its_time_makes_the_helper_leave():
    """Every phase of the helper and every kind of message it knows. What has had its time may come
    again; what is to come may not come before."""
    network = begun()
    phases = {}
    real = network.arrive

    def arrive(source, to, data):
        if to == HELPER:
            helper = network.roles[HELPER]
            phases.setdefault(type(helper.state), network.woken(HELPER))
        return real(source, to, data)

    network.arrive = arrive
    network.write(updates(network))
    phases[SumReceived] = network.woken(HELPER)
    assert phases.keys() == set(WriteHelper.STATES) - {Left}
    messages = {m.kind: m.data for _, m in network.log if m.to == HELPER}
    early = {
        (HoldingReports, CheckSums),
        (HoldingReports, IncludedList),
        (HoldingReports, OpenedSum),
        (CoinTossed, IncludedList),
        (CoinTossed, OpenedSum),
        (ListFixed, OpenedSum),
    }
    for phase, kind in early:
        assert (phase, kind) not in helper_side.STEPS
        network.roles[HELPER] = phases[phase]
        for _ in range(2):  # and what came before it is refused after it
            woken = network.roles[HELPER] = network.woken(HELPER)
            with pytest.raises(ServerFault, match="not due"):
                woken.receive(SERVER, messages[kind.__name__])
            assert woken.phase == "left"


def test_a_report_after_closing_is_late():
    network = begun(meddle=lambda s, m: [] if m.kind == "IncludedList" else [m.data])
    first, *others = network.clients
    late = network.roles[first].submit(None)
    network.write(dict.fromkeys(others))
    assert network.roles[HELPER].phase == "exclude"
    with pytest.raises(PeerError, match="not due"):
        network.roles[SERVER].receive(first, late[0].data)
    report: WriteReport = wire.decode(late[0].data)
    other = replace(wire.decode(network.sent("Forwarded")[0]), sender=first, box=report.box)
    with pytest.raises(PeerError, match="after collection had closed"):
        network.roles[HELPER].receive(SERVER, wire.encode(other))
    assert network.roles[HELPER].phase == "exclude"
