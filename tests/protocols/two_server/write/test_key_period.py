"""Keys that last: hints in later rounds, one for each epoch, over the list of the first round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import two_servers
from tessera import wire
from tessera.crypto.dpf import HEADER_BYTES
from tessera.crypto.field import Field
from tessera.crypto.kernel.points import BLOCK
from tessera.crypto.ring import Ring
from tessera.errors import MisuseError, ServerFault
from tessera.ids import HELPER, SERVER, RoundId
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.key_period import KeyPeriod, MemoryStore, OwnKeys
from tessera.protocols.two_server.messages import WriteReport
from tessera.protocols.two_server.params import Absent
from tessera.protocols.two_server.reports import layouts_of
from tessera.services.journal import Journal
from tessera.services.journal_stores import JournalKeys

FIRST = RoundId(10)
TABLES = (
    two_servers.table(300, 6),
    two_servers.table(40, 3, name=1, words=1),
    two_servers.small_table(2),
)


def first_round(*, rounds: int = 5, clients: int = 4, group=None, **more) -> two_servers.Network:
    params = two_servers.params(
        *TABLES,
        clients=clients,
        group=group,
        dense=3,
        round_id=FIRST,
        key_rounds=rounds,
        **more,
    )
    return two_servers.Network.of(params)


def rows_of(network: two_servers.Network) -> dict:
    """Everybody's rows, the same in all rounds."""
    rng = np.random.default_rng(3)
    return {
        c: {
            t.table: t.named(np.sort(rng.choice(t.rows, t.max_rows, replace=False)))
            for t in network.params.written
        }
        for c in network.clients
    }


def written(network: two_servers.Network, who=None, *, close: bool = True) -> dict:
    """Other words in every round. Who is not there does not write."""
    if SERVER not in network.roles:
        network.writing(network.handshake())
    rows, seed = rows_of(network), 1000 * int(network.params.round_id)
    given_ = {}
    for c in network.clients if who is None else who:
        given_[c] = two_servers.update(network.params, rows[c], seed + c)
        network.carry(c, network.roles[c].submit(given_[c]))
    if close:
        network.close()
    return given_


def assert_exact(network: two_servers.Network, given_: dict) -> None:
    due = two_servers.plain_sum(network.params, given_.values())
    for role in (SERVER, HELPER):
        total = network.roles[role].total
        assert [int(c) for c in total.survivors] == sorted(given_)
        assert two_servers.opened(network.params, total) == due


@pytest.mark.parametrize("group", [Ring(32), Ring(22), Ring(128), Field(61)], ids=lambda g: g.name)
@pytest.mark.parametrize("verify", [True, False])
def test_sums_of_all_rounds_of_a_period_are_exact(group, verify):
    network = first_round(group=group, verify=verify)
    for epoch in range(5):
        assert_exact(network, written(network))
        header = network.roles[SERVER].header
        assert (header.period, header.epoch) == (FIRST, epoch)
        assert bool(network.sent("CheckCoin")) is (verify and not epoch), "states are checked once"
        network = network.later()
    assert_exact(network, written(network))
    assert network.roles[SERVER].header.period == FIRST + 5, "everybody makes new keys"


@settings(max_examples=20)
@given(data=st.data())
def test_rows_of_an_update_are_those_with_keys_and_others_wait(data):
    network = first_round(clients=2)
    keys = rows_of(network)
    written(network)
    for _ in range(data.draw(st.integers(1, 3))):
        network = network.later()
        network.writing(network.handshake())
        due = {}
        for i, c in enumerate(network.clients):
            wanted = {}
            for t in network.params.written:
                rows = data.draw(st.sets(st.integers(0, t.rows - 1), max_size=t.max_rows))
                own = data.draw(st.sets(st.sampled_from(keys[c][t.table].tolist())))
                rows = sorted({*own, *rows})[: t.max_rows]
                wanted[t.table] = np.array(rows, dtype=np.uint64)
            full = two_servers.update(network.params, wanted, i)
            tables = {}
            for t in network.params.written:
                part = full.tables[t.table]
                kept = np.isin(part.ids, keys[c][t.table]) | (not t.writes_points)
                tables[t.table] = replace(part, ids=part.ids[kept], words=part.words[kept])
            due[c] = replace(full, tables=tables)
            network.carry(c, network.roles[c].submit(full))
        network.close()
        assert_exact(network, due)


def test_hints_of_an_epoch_take_last_corrections_and_nothing_else():
    network = first_round()
    written(network)
    header = network.roles[SERVER].header
    forests = layouts_of(network.params, header).writing
    full: WriteReport = wire.decode(network.sent("WriteReport")[0])
    steps = [
        keys[HEADER_BYTES : HEADER_BYTES + BLOCK * forests[t].forest.trees.total_steps]
        for t, keys in zip(forests, full.public, strict=True)
    ]
    network = network.later()
    written(network)
    hint: WriteReport = wire.decode(network.sent("WriteReport")[0])
    assert [len(part) for part in hint.public] == [f.forest.finals_bytes for f in forests.values()]
    assert hint.seeds == () and hint.report_id != full.report_id and hint.dense != full.dense
    assert hint.box != full.box and len(hint.dense) == len(full.dense)
    stored = network.stores.leader.latest().clients[full.sender]
    for part, own, layout in zip(steps, stored.public, forests.values(), strict=True):
        kept = own[HEADER_BYTES : HEADER_BYTES + BLOCK * layout.forest.trees.total_steps]
        assert kept == part


def test_a_hint_for_goods_of_the_papers_size_is_below_a_third_of_keys():
    params = two_servers.params(two_servers.table(143_534, 301, words=19), group=Ring(22))
    network = two_servers.Network.of(params)
    forest = layouts_of(params, network.handshake()).writing[0].forest
    assert forest.finals_bytes < 0.3 * forest.public_bytes


# Who is missing.


def test_a_round_without_somebody_of_the_first_list_does_not_open():
    network = first_round()
    written(network)
    network = network.later()
    written(network, network.clients[1:])
    assert network.aborted is not None and "keys last" in network.aborted.reason
    assert not network.sent("Closing") and network.total is None
    network = network.later()
    assert_exact(network, written(network))
    assert network.roles[SERVER].header.epoch == 2, "the epoch of the aborted round is burnt"


def test_a_helper_does_not_release_over_fewer_either():
    network = first_round()
    written(network)
    network = network.later()
    network.writing(network.handshake())
    network.roles[SERVER]._check_list = lambda *_: None  # a leader that does not mind
    written(network, network.clients[1:])
    assert "without 1 clients of the period" in network.left[HELPER].reason
    assert network.total is None and not network.sent("SumShare")


def test_where_it_is_allowed_the_rows_of_whoever_is_missing_show():
    network = first_round(absent=Absent.ALLOW)
    rows = rows_of(network)
    before = written(network)
    assert_exact(network, before)
    there = set(network.total.tables[0].rows.tolist())
    network = network.later()
    gone, *others = network.clients
    assert_exact(network, written(network, others))
    shown = there - set(network.total.tables[0].rows.tolist())
    assert shown and shown <= set(rows[gone][0].tolist())


def test_whoever_was_not_on_the_first_list_waits_for_the_next_period():
    network = first_round()
    late, *others = network.clients
    written(network, others)
    network = network.later()
    network.writing(network.handshake())
    assert late not in {m.to for _, m in network.log if m.kind == "SignedHeader"}
    header = network.sent("SignedHeader")[0]
    network.arrive(SERVER, late, header)
    with pytest.raises(ServerFault, match="has not made"):
        network.roles[late].submit(None)
    assert_exact(network, written(network, others))
    network = network.later(4)
    assert_exact(network, written(network))


def test_a_first_round_that_opened_nothing_makes_no_keys_last():
    network = first_round(min_cohort=3)
    written(network, network.clients[:2])
    assert network.aborted is not None
    network = network.later()
    assert_exact(network, written(network))
    assert network.roles[SERVER].header.epoch == 0
    network = network.later()
    assert_exact(network, written(network))
    assert network.roles[SERVER].header.epoch == 1


def test_if_the_list_was_lost_on_its_way_new_keys_are_made():
    """The leader has stored its keys by then, the helper has not, and the helper says so."""
    network = first_round()
    network.meddle = lambda s, m: [] if m.kind == "IncludedList" else [m.data]
    written(network)
    assert network.stores.leader.latest() is not None and network.stores.helper.latest() is None
    network = network.later()
    assert_exact(network, written(network))
    assert network.roles[SERVER].header.epoch == 0


def test_if_the_share_was_lost_the_period_goes_on():
    network = first_round()
    network.meddle = lambda s, m: [] if m.kind == "SumShare" else [m.data]
    written(network)
    assert network.total is None
    network = network.later()
    assert_exact(network, written(network))
    assert network.roles[SERVER].header.epoch == 1


# One hint for each epoch.


def test_a_client_killed_between_store_and_send_sends_what_it_stored():
    network = first_round()
    written(network)
    for _ in range(2):
        network = network.later()
        network.writing(network.handshake())
        victim = network.clients[0]
        before = network.woken(victim)
        update = two_servers.update(network.params, rows_of(network)[victim], 1)
        lost = network.roles[victim].submit(update)  # and never sent
        network.roles[victim] = before
        another = two_servers.update(network.params, rows_of(network)[victim], 2)
        again = before.submit(another)
        assert [m.data for m in again] == [m.data for m in lost]
        with pytest.raises(MisuseError):
            before.submit(another)
        network.carry(victim, again)
        given_ = {victim: update, **written(network, network.clients[1:])}
        assert_exact(network, given_)


def test_a_client_killed_in_the_first_round_sends_the_keys_that_it_stored():
    network = first_round()
    network.writing(network.handshake())
    victim = network.clients[0]
    before = network.woken(victim)
    lost = network.roles[victim].submit(None)
    network.roles[victim] = before
    update = two_servers.update(network.params, rows_of(network)[victim], 2)
    assert [m.data for m in before.submit(update)] == [m.data for m in lost]


def test_a_second_hint_for_an_epoch_is_refused_at_both_servers():
    network = first_round()
    written(network)
    network = network.later()
    network.writing(network.handshake())
    victim = network.clients[0]
    store = network.stores.clients[victim]
    network.stores.clients[victim] = copied = MemoryStore()  # as a client that forgets would
    copied.keep(store.latest())
    forgetful = network.woken(victim)
    first = network.roles[victim].submit(None)
    second = forgetful.submit(two_servers.update(network.params, rows_of(network)[victim], 9))
    assert first[0].data != second[0].data
    given_ = {victim: None, **written(network, network.clients[1:], close=False)}
    network.carry(victim, first)
    network.carry(victim, second)
    assert [e.peer for e in network.refused] == [victim]
    report = wire.decode(second[0].data)
    forwarded = wire.decode(network.sent("Forwarded")[0])
    network.arrive(
        SERVER,
        HELPER,
        wire.encode(
            replace(
                forwarded,
                sender=victim,
                report_id=report.report_id,
                public=report.public,
                box=report.box,
            )
        ),
    )
    assert [e.peer for e in network.refused] == [victim] * 2
    network.close()
    assert_exact(network, given_)


def test_a_hint_of_another_epoch_or_period_is_refused_and_leaves_its_client_out():
    network = first_round(absent=Absent.ALLOW)
    written(network)
    network = network.later()
    written(network)
    old: WriteReport = wire.decode(network.sent("WriteReport")[0])
    network = network.later()
    network.writing(network.handshake())
    moved = replace(old, round_id=network.params.round_id)
    network.carry(old.sender, [two_servers.Outbound.of(SERVER, moved)])
    given_ = written(network, [c for c in network.clients if c != old.sender])
    assert {e.peer for e in network.refused} == {old.sender}
    assert_exact(network, given_)


def test_a_hint_after_a_failed_check_has_no_keys():
    network = first_round(absent=Absent.ALLOW)
    network.writing(network.handshake())
    bad = network.clients[0]
    real = reports.seal_box

    def sealed(context, public, **more):
        public[0] = public[0][:-1] + bytes([public[0][-1] ^ 1])
        return real(context, public, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "seal_box", sealed)
        cheat = network.roles[bad].submit(None)
    network.carry(bad, cheat)
    assert_exact(network, written(network, network.clients[1:]))
    network = network.later()
    network.writing(network.handshake())
    network.arrive(SERVER, bad, network.sent("SignedHeader")[0])
    hint = network.roles[bad].submit(None)
    network.carry(bad, hint)
    assert [(e.peer, e.reason) for e in network.refused] == [
        (bad, "sent a hint, and has no keys in this period")
    ]
    report = wire.decode(hint[0].data)
    given_ = written(network, network.clients[1:], close=False)
    forwarded = wire.decode(network.sent("Forwarded")[0])
    more = {"report_id": report.report_id, "public": report.public, "box": report.box}
    network.arrive(SERVER, HELPER, wire.encode(replace(forwarded, sender=bad, **more)))
    assert [e.peer for e in network.refused] == [bad, bad]
    network.close()
    assert_exact(network, given_)


@pytest.mark.parametrize("cut", [0, 1, -1])
def test_hints_of_another_length_cost_their_client(cut):
    network = first_round(absent=Absent.ALLOW)
    written(network)
    network = network.later()
    network.writing(network.handshake())
    bad = network.clients[0]
    report: WriteReport = wire.decode(network.roles[bad].submit(None)[0].data)
    parts = {0: b"", 1: report.public[0] + b"\0", -1: report.public[0][:-1]}
    changed = replace(report, public=(parts[cut], *report.public[1:]))
    network.carry(bad, [two_servers.Outbound.of(SERVER, changed)])
    assert network.refused[0].peer == bad and "invalid keys" in network.refused[0].reason
    full = replace(report, seeds=(bytes(24),) * 2)
    network.carry(bad, [two_servers.Outbound.of(SERVER, full)])
    assert "2 seeds" in network.refused[1].reason


def test_a_client_refuses_headers_of_other_keys():
    network = first_round()
    written(network)
    later = network.later(2)
    later.writing(later.handshake())
    client = later.clients[0]
    store = later.stores.clients[client]
    header = later.roles[client].signed_header.message.header
    own = store.latest()
    for stored, says in (
        (None, "has not made"),
        (replace(own, seed=bytes(32)), "has not made"),
        (replace(own, plan_hash=b"\1" * 32), "has not made"),
        (replace(own, epoch=header.epoch + 1), "that is past"),
    ):
        later.stores.clients[client] = MemoryStore()
        if stored is not None:
            later.stores.clients[client].keep(stored)
        woken = later.woken(client)
        with pytest.raises(ServerFault, match=says):
            woken.submit(None)


# Replays and restored helpers.


def test_a_helper_restored_from_any_earlier_snapshot_opens_nothing_twice():
    """In every epoch, from every snapshot of it: another list gets no share."""
    network = first_round(absent=Absent.ALLOW)
    for _ in range(3):
        network.writing(network.handshake())
        earlier = []
        real = network.arrive

        def arrive(source, to, data, real=real, network=network, earlier=earlier):
            if to == HELPER:
                earlier.append(network.woken(HELPER))
            return real(source, to, data)

        network.arrive = arrive
        assert_exact(network, written(network))
        network.arrive = real
        header, shares = network.roles[SERVER].header, set(network.sent("SumShare"))
        for helper in earlier:
            network.roles[HELPER] = helper
            setup = network.writing_leader(header)
            if header.epoch == 0:
                setup = replace(setup, key_store=MemoryStore())
            network.roles[SERVER] = leader = two_servers.WriteLeader(setup)
            for data in network.sent("WriteReport")[: len(network.clients) - 1]:
                network.carry(SERVER, leader.receive(wire.decode(data).sender, data))
            network.close()
            assert set(network.sent("SumShare")) == shares, "no other share"
        network = network.later()


def test_a_round_number_is_used_once_and_with_it_its_epoch():
    network = first_round()
    written(network)
    second = network.later()
    written(second)
    again = network.later()
    assert again.handshake() is None
    assert "started before" in again.left[HELPER].reason


# Stores.


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path, owner="somebody", plan=b"a plan") as opened, opened.step():
        yield opened


@pytest.mark.parametrize("make", ["memory", "journal"])
def test_a_store_keeps_the_latest_and_takes_nothing_back(make, journal: Journal):
    store = MemoryStore() if make == "memory" else JournalKeys(journal, "server", KeyPeriod)
    assert store.latest() is None
    network = first_round()
    written(network)
    first = network.stores.leader.latest()
    store.keep(first)
    store.keep(first)
    assert wire.encode(store.latest()) == wire.encode(first)
    for record in (replace(first, seed=bytes(32)), replace(first, period=RoundId(FIRST - 1))):
        with pytest.raises(MisuseError, match="epochs rise"):
            store.keep(record)
    later = replace(first, period=RoundId(FIRST + 5), seed=bytes(32), clients={})
    store.keep(later)
    assert store.latest().period == FIRST + 5
    if make == "journal":
        assert JournalKeys(journal, "server", KeyPeriod).latest() == later
        assert JournalKeys(journal, "helper", KeyPeriod).latest() is None


def test_a_clients_store_has_one_hint_for_each_epoch(journal: Journal):
    network = first_round()
    written(network)
    own: OwnKeys = network.stores.clients[network.clients[0]].latest()
    store = JournalKeys(journal, "client 0", OwnKeys)
    store.keep(own)
    with pytest.raises(MisuseError, match="one hint for each epoch"):
        store.keep(replace(own, sent=b"another"))
    store.keep(replace(own, epoch=2, sent=b"later"))
    with pytest.raises(MisuseError):
        store.keep(replace(own, epoch=1, sent=b"earlier"))


def test_keys_that_last_need_stores():
    network = first_round()
    network.stores.leader = None
    written(network, close=False)
    with pytest.raises(MisuseError, match="need a store"):
        network.close()
