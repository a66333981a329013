"""A leader that breaks the rules: each attack is caught, and works where its rule is switched off.

The leader here sees everything a leader sees and computes what it likes. What it may not do is see
into sealed boxes or forge signatures.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import two_servers
from rounds.shops import one_table, shop
from tessera import wire
from tessera.crypto import dpf
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import SealingKey, seal_to
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError, MisuseError, PeerError, ServerFault
from tessera.ids import HELPER, SERVER, ClientId
from tessera.learning.tables.submodel import ModelUpdate as RoundUpdate
from tessera.learning.tables.submodel import TableUpdate
from tessera.learning.tables.table import LazyTable
from tessera.plan import TwoServerPlan
from tessera.protocols.two_server import reports as envelope
from tessera.protocols.two_server.collector import MemoryReplayGuard, ReportInbox
from tessera.protocols.two_server.messages import (
    Closing,
    Forwarded,
    HelperAnswer,
    HelperBox,
    IncludedList,
    Purpose,
    Query,
    SealedAnswer,
    SumShare,
)
from tessera.protocols.two_server.read.server import Answerer
from tessera.protocols.two_server.reports import Reported, layouts_of
from tessera.protocols.two_server.write import helper as helper_side
from tessera.protocols.two_server.write import sums
from tessera.protocols.two_server.write.client import RowUpdate as WrittenRows
from tessera.protocols.two_server.write.client import Update
from tessera.protocols.two_server.write.helper import ListFixed, WriteHelper
from tessera.protocols.two_server.write.leader import AwaitingShare, CollectingReports, WriteLeader
from tessera.rounds import encode
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.simulation.subcohort import TrainingOutcome
from tessera.simulation.views import Views

ATTACKER = SealingKey.from_secret(ScriptedEntropy(b"attacker").secret("key"))
TOP = 1 << 31


def small_update(network: two_servers.Network, row: int) -> Update:
    """One row of small words: two values and a count of one."""
    words = network.params.group.from_ints([5, 7, 1]).reshape(1, 3)
    return Update(None, {0: WrittenRows(two_servers.ids(row), words)})


def writing(*, verify: bool = True, **more) -> two_servers.Network:
    network = two_servers.Network.of(two_servers.params(clients=3, verify=verify))
    network.writing(network.handshake(), **more)
    return network


# -- a shifted correction word


class ShiftingLeader(WriteLeader):
    """Adds 2^31 to the count in the last correction of one bin, in the helper's copy alone."""

    victim: ClientId
    bin: int

    def receive(self, sender, data):
        out = super().receive(sender, data)
        if sender != self.victim:
            return out
        decoded: Forwarded = wire.decode(out[0].data)
        shifted = self.shifted(decoded.public[0])
        context = self._report_context(sender, decoded.report_id)
        held = self.state.held[sender]
        digest = context.report_digest((shifted,), decoded.box)
        self.state.held[sender] = replace(held, digest=digest)
        return [two_servers.Outbound.of(HELPER, replace(decoded, public=(shifted,)))]

    def shifted(self, public: bytes) -> bytes:
        forest = layouts_of(self.params, self.header).writing[0].forest
        end = forest.public_bytes
        head, finals = public[: end - forest.finals_bytes], public[end - forest.finals_bytes : end]
        words = np.frombuffer(finals, "<u4").reshape(forest.trees.count, 3).copy()
        words[forest.tree[self.bin], 2] ^= TOP
        return b"".join((head, words.tobytes(), public[end:]))

    def own_control_bits(self, held) -> np.ndarray:
        """Rows where the leader's own control bit is set in that bin: where a shift would show."""
        layout = layouts_of(self.params, self.header).writing[0]
        report = held.report.message
        context = self._report_context(self.victim, report.report_id)
        shares = []
        for public in (report.public[0], self.shifted(report.public[0])):
            keys = dpf.ServerKeys.of(
                dpf.PublicKeys.from_bytes(layout.forest, public[: layout.forest.public_bytes]),
                Secret(report.seeds[0]),
                party=0,
                report_id=context.table_id(0),
            )
            shares.append(layout.rows(dpf.evaluate(layout.forest, [keys]), 0))
        return (shares[0] != shares[1]).any(axis=1)


def shifting_round(row: int, others: int) -> tuple[two_servers.Network, list[int]]:
    """The attack on the bin that the victim's row is in; the rows at which the leader ends up."""
    network = two_servers.Network.of(two_servers.params(clients=3))
    header = network.handshake()
    network.writing(header, leader=ShiftingLeader)
    leader: ShiftingLeader = network.roles[SERVER]
    leader.victim = network.clients[0]
    layout = layouts_of(network.params, header).writing[0]
    leader.bin = int(layout.table.place(np.array([row])).bins[0])
    kept = {}
    close = leader.close_phase

    def closing():
        kept.update(leader.state.held)
        return close()

    leader.close_phase = closing
    network.write(
        {c: small_update(network, row if c == leader.victim else others) for c in network.clients}
    )
    if network.total is None or leader.victim not in network.total.survivors:
        return network, []
    counts = np.zeros(network.params.tables[0].rows, dtype=np.uint32)
    part = network.total.tables[0]
    counts[part.rows.astype(int)] = part.words[:, 2]
    theirs = counts >= TOP  # the helper's control bits, which the opened sum shows
    return network, np.flatnonzero(theirs != leader.own_control_bits(kept[leader.victim])).tolist()


def test_a_shifted_correction_word_is_refused_by_the_helper():
    network, found = shifting_round(row=17, others=4)
    assert found == []
    victim = network.clients[0]
    assert [(e.peer, e.reason) for e in network.refused] == [
        (victim, "sent a public part that does not match its box")
    ]
    assert victim not in network.total.survivors, "the round goes on without that client"
    assert two_servers.opened(network.params, network.total)[1] == {(0, 4): [10, 14, 2]}


def test_if_the_helper_did_not_check_the_public_part_the_leader_would_read_every_row(monkeypatch):
    monkeypatch.setattr(ReportInbox, "_is_public_part", lambda self, box, context, message: True)
    rows = [0, 3, 11, 17, 26, 39]
    assert [shifting_round(row, others=4)[1] for row in rows] == [[row] for row in rows]


# -- a substituted answer key


class RelayingHelper(two_servers.RetrievalHelper):
    """The rule switched off: the answer goes to a key that the leader names."""

    def _answer_key(self, held):
        return ATTACKER.public


def rows_the_leader_opens(network: two_servers.Network, client: ClientId) -> list[int]:
    """Both halves of every bin, and which row of the table each is; CryptoError: no second half."""
    query: Query = next(q for q in map(wire.decode, network.sent("Query")) if q.sender == client)
    header = wire.decode(network.sent("SignedHeader")[0]).header
    context = envelope.ReportContext(
        params=network.params,
        header=header,
        purpose=Purpose.RETRIEVE,
        client=client,
        report_id=query.report_id,
    )
    answer: HelperAnswer = next(
        a for a in map(wire.decode, network.sent("HelperAnswer")) if a.client == client
    )
    digest = context.report_digest(query.public, query.box)
    inside: SealedAnswer = wire.decode(ATTACKER.unseal(answer.box, context.answer_info(digest)))
    own = Answerer(network.reading_leader(header), 0).answer(
        [Reported(context, query.public, query.seeds)]
    )[0]
    both = np.frombuffer(own[0], np.uint8) ^ np.frombuffer(inside.tables[0], np.uint8)
    bins, width = network.params.tables[0].bins, network.params.tables[0].row_bytes
    rows = both[: bins * width].reshape(bins, width)  # what checks them comes after
    same = (rows[:, None] == network.model.tables[0][None]).all(axis=2)
    return [int(np.flatnonzero(one)[0]) for one in same if one.any()]


def test_the_helpers_answer_opens_for_its_client_alone():
    network = two_servers.Network.of(two_servers.params())
    network.reading(network.handshake())
    network.read({c: {0: two_servers.ids(3, 8, 21)} for c in network.clients})
    assert network.fetched(network.clients[0]).tables[0].ids.tolist() == [3, 8, 21]
    with pytest.raises(CryptoError):
        rows_the_leader_opens(network, network.clients[0])


def test_if_the_leader_named_the_answer_key_it_would_read_the_rows():
    network = two_servers.Network.of(two_servers.params())
    network.reading(network.handshake(), helper=RelayingHelper)
    network.read({network.clients[0]: {0: two_servers.ids(3, 8, 21)}})
    assert set(rows_the_leader_opens(network, network.clients[0])) >= {3, 8, 21}


def test_a_box_of_the_leaders_own_making_is_refused():
    """It can seal anything to the helper, and cannot sign for a client."""
    network = two_servers.Network.of(two_servers.params())
    header = network.handshake()
    network.reading(header)
    victim = network.clients[0]

    def meddle(source, message):
        if message.kind != "Forwarded":
            return [message.data]
        decoded: Forwarded = wire.decode(message.data)
        context = envelope.ReportContext(
            params=network.params,
            header=header,
            purpose=Purpose.RETRIEVE,
            client=victim,
            report_id=decoded.report_id,
        )
        own = envelope.seal_box(
            context,
            decoded.public,
            seeds=[Secret(bytes(dpf.SEED_BYTES))],
            dense_seed=None,
            answer_key=ATTACKER.public,
            key=two_servers.keys()[0],
        )
        return [wire.encode(replace(decoded, box=own))]

    network.meddle = meddle
    network.read({victim: {0: two_servers.ids(3)}})
    assert network.refused[0].reason == "sent a box with a bad signature"
    assert network.fetched(victim) is None


# -- one report in two sums


class ForgetfulOfReports(MemoryReplayGuard):
    """A rule switched off: a report counts once."""

    def accept(self, report_id):
        return True


class Forgetful(ForgetfulOfReports):
    """The other one, too: a round has one list."""

    def release(self, round_id, reports):
        return True


def two_sums(replay_guard: MemoryReplayGuard) -> tuple[two_servers.Network, list[SumShare]]:
    """A leader that has its round, and then the helper as it was before any report came.

    A machine put back to an earlier disk, say. The leader offers it the same reports, one fewer.
    """
    network = two_servers.Network.of(two_servers.params(clients=3), replay_guard=replay_guard)
    header = network.handshake()
    network.writing(header)
    early = network.woken(HELPER)
    network.write({c: small_update(network, 5 + i) for i, c in enumerate(network.clients)})
    shares = [wire.decode(network.sent("SumShare")[0])]
    network.roles[HELPER] = early
    leader = WriteLeader(network.writing_leader(header))
    network.roles[SERVER] = leader
    for data in network.sent("WriteReport")[1:]:
        network.carry(SERVER, leader.receive(wire.decode(data).sender, data))
    network.close()
    shares += [wire.decode(data) for data in network.sent("SumShare")[1:]]
    return network, shares


def test_a_report_that_was_seen_is_never_added_up_again():
    network, shares = two_sums(MemoryReplayGuard())
    assert len(shares) == 1
    assert {e.reason for e in network.refused} == {"sent a report id that was used before"}
    assert network.aborted is not None and network.total is None


def test_a_helper_that_forgot_report_ids_still_knows_its_one_list():
    network, shares = two_sums(ForgetfulOfReports())
    assert len(shares) == 1 and network.total is None
    assert network.left[HELPER].reason == "requested a second sum in one round"


def test_if_the_helper_forgot_report_ids_two_sums_would_give_one_clients_rows():
    network, shares = two_sums(Forgetful())
    assert len(shares) == 2
    first = {(0, 5): [5, 7, 1], (0, 6): [5, 7, 1], (0, 7): [5, 7, 1]}
    second = two_servers.opened(network.params, network.total)[1]
    assert {at: words for at, words in first.items() if at not in second} == {(0, 5): [5, 7, 1]}


def test_a_report_does_not_move_to_another_round():
    network = writing()
    reports = {
        c: network.roles[c].submit(small_update(network, 5))[0].data for c in network.clients
    }
    later = two_servers.Network.of(
        two_servers.params(clients=3, round_id=13), replay_guard=network.replay_guard
    )
    later.writing(later.handshake())
    for c, data in reports.items():
        moved = replace(wire.decode(data), round_id=13)
        later.carry(c, [two_servers.Outbound.of(SERVER, moved)])
    later.close()
    assert later.total is None and not later.sent("SumShare")
    reasons = {e.reason.split(":")[0] for e in later.refused}
    assert reasons <= {"sent a box that cannot be unsealed", "sent invalid keys"}


# -- lists


class ListingLeader(WriteLeader):
    """Signs and sends whatever list it likes."""

    def list_of(self, reports) -> bytes:
        signature = self.setup.key.sign(sums.list_statement(self.header, reports))
        decoded = IncludedList(round_id=self.params.round_id, reports=reports, signature=signature)
        return wire.encode(decoded)

    def share(self, held, message: SumShare):
        """The sum over these reports, from the helper's share for them."""
        dense = sums.leader_dense(self.params, (h.report.message.dense for h in held.values()))
        ours = sums.share_of(self.params, self._row_shares(held).tables, dense)
        return sums.added(self.params, ours, message, held)


def careless(monkeypatch) -> None:
    """The rules switched off: any list, and any number of them."""
    real = WriteHelper._on_list

    def again_and_again(self, phase, message):
        _, out = real(self, phase, message)
        return phase, out

    monkeypatch.setattr(WriteHelper, "_check_list", lambda self, phase, message: None)
    monkeypatch.setattr(MemoryReplayGuard, "release", lambda self, round_id, reports: True)
    monkeypatch.setitem(helper_side.STEPS, (ListFixed, IncludedList), again_and_again)


def listed(network: two_servers.Network) -> ListingLeader:
    """Up to the point where the leader is to sign the list."""
    network.meddle = lambda s, m: [] if m.kind == "IncludedList" else [m.data]
    network.write({c: small_update(network, 5 + i) for i, c in enumerate(network.clients)})
    return network.roles[SERVER]


def test_a_second_list_gets_no_second_share():
    network = writing(leader=ListingLeader)
    leader = listed(network)
    assert isinstance(leader.state, AwaitingShare)
    held = dict(leader.state.held)
    every = {c: h.digest for c, h in held.items()}
    fewer = {c: every[c] for c in network.clients[1:]}
    helper = network.roles[HELPER]
    assert len(helper.receive(SERVER, leader.list_of(every))) == 1
    with pytest.raises(ServerFault, match="IncludedList, which is not due"):
        helper.receive(SERVER, leader.list_of(fewer))
    assert helper.phase == "left"


def test_a_first_list_that_leaves_somebody_out_gets_no_share():
    network = writing(leader=ListingLeader)
    leader = listed(network)
    fewer = {c: leader.state.held[c].digest for c in network.clients[1:]}
    with pytest.raises(ServerFault, match="differs from what both hold"):
        network.roles[HELPER].receive(SERVER, leader.list_of(fewer))


def test_if_the_helper_took_two_lists_their_difference_would_be_one_clients_rows(monkeypatch):
    careless(monkeypatch)
    network = writing(leader=ListingLeader)
    leader = listed(network)
    held = dict(leader.state.held)
    opened = []
    for chosen in (held, {c: held[c] for c in network.clients[1:]}):
        decoded = leader.list_of({c: h.digest for c, h in chosen.items()})
        [out] = network.roles[HELPER].receive(SERVER, decoded)
        opened.append(leader.share(chosen, wire.decode(out.data)))
    every, fewer = (two_servers.opened(network.params, total)[1] for total in opened)
    assert {at: w for at, w in every.items() if at not in fewer} == {(0, 5): [5, 7, 1]}


def alone(network: two_servers.Network) -> ListingLeader:
    """The leader passes on one client's report only, and closes."""
    victim = network.clients[0]
    network.carry(victim, network.roles[victim].submit(small_update(network, 5)))
    leader: ListingLeader = network.roles[SERVER]
    assert isinstance(leader.state, CollectingReports)
    reports = {victim: leader.state.held[victim].digest}
    network.roles[HELPER].receive(SERVER, wire.encode(Closing(round_id=12, reports=reports)))
    return leader


def test_a_list_of_one_gets_no_share():
    network = writing(leader=ListingLeader, verify=False)
    leader = alone(network)
    held = leader.state.held
    with pytest.raises(ServerFault, match="a sum over 1 reports"):
        network.roles[HELPER].receive(
            SERVER, leader.list_of({c: h.digest for c, h in held.items()})
        )
    assert network.roles[HELPER].phase == "left"


def test_if_the_helper_took_a_list_of_one_that_clients_rows_would_be_open(monkeypatch):
    careless(monkeypatch)
    network = writing(leader=ListingLeader, verify=False)
    leader = alone(network)
    held = dict(leader.state.held)
    [out] = network.roles[HELPER].receive(
        SERVER, leader.list_of({c: h.digest for c, h in held.items()})
    )
    total = leader.share(held, wire.decode(out.data))
    assert two_servers.opened(network.params, total)[1] == {(0, 5): [5, 7, 1]}


def test_exclusions_cannot_be_used_to_subtract():
    """A report that reached the helper is on the list, whatever the leader would like."""
    network = writing(leader=ListingLeader)
    for i, c in enumerate(network.clients):
        network.carry(c, network.roles[c].submit(small_update(network, 5 + i)))
    held = network.roles[SERVER].state.held
    fewer = {c: held[c].digest for c in network.clients[1:]}
    with pytest.raises(ServerFault, match="left out a report"):
        network.roles[HELPER].receive(SERVER, wire.encode(Closing(round_id=12, reports=fewer)))
    assert network.roles[HELPER].phase == "left" and not network.sent("SumShare")


def test_a_report_cannot_be_listed_under_two_names():
    network = writing()
    victim, other, _ = network.clients
    network.carry(victim, network.roles[victim].submit(small_update(network, 5)))
    decoded: Forwarded = wire.decode(network.sent("Forwarded")[0])
    with pytest.raises(PeerError, match="cannot be unsealed"):
        network.roles[HELPER].receive(SERVER, wire.encode(replace(decoded, sender=other)))
    box: HelperBox = envelope.unseal_box(
        network.roles[HELPER].inbox.report_context(victim, decoded.report_id),
        decoded.box,
        two_servers.keys()[2],
    )
    assert box.sender == victim
    context = network.roles[HELPER].inbox.report_context(ClientId(7), decoded.report_id)
    moved = seal_to(two_servers.servers().box, wire.encode(box), context.box_info)
    with pytest.raises(PeerError, match="another round, client or report"):
        network.roles[HELPER].receive(
            SERVER, wire.encode(replace(decoded, sender=ClientId(7), box=moved))
        )


# -- a row that makes its readers fail


SPOILED = 34
READERS = {1: [1, 31], 4: [4, SPOILED], 7: [7, 37]}


def test_a_leader_that_spoils_a_row_gets_no_query():
    settings = two_servers.params(two_servers.table(row_bytes=8), clients=3)
    values = np.arange(80, dtype=np.float32).view(np.uint8).reshape(40, 8)
    honest = two_servers.ServedModel({0: values.copy()})
    values[SPOILED] = 0xFF
    clients = [ClientId(c) for c in READERS]
    network = two_servers.Network(
        settings, two_servers.ServedModel({0: values}), clients, helper_model=honest
    )
    assert network.handshake() is None
    assert "another model" in network.left[HELPER].reason
    assert not network.sent("SignedHeader") and not network.sent("Query")


class SpoiledTable(LazyTable):
    """One row is NaN for whoever reads it."""

    def values(self, ids):
        found = super().values(ids).copy()
        found[ids == SPOILED] = np.nan
        return found


def reporters(monkeypatch) -> list[ClientId]:
    """Who reports in a round in which one row is NaN, at both servers.

    Everybody moves its rows by a tenth of what they are, as weight decay would. A client on which
    something is raised is a process that has died: nothing more is heard of it.
    """
    settings = one_table("two-server", 40, cohort=3, two_server=TwoServerPlan(min_cohort=2))
    fed = shop(settings, READERS, views=(views := Views()))
    fed.model.tables = {"goods": SpoiledTable(fed.tables["goods"].spec)}
    supply = TwoServerClientRound.supply

    def train(_, submodels):
        outcome = TrainingOutcome()
        for client, sub in submodels.items():
            own = sub.trained["goods"]
            moved = -0.1 * sub.tables["goods"].of(own).astype(float)
            assert np.isfinite(moved).all() == (SPOILED not in READERS[client])
            update = TableUpdate(moved, np.ones(len(own), int))
            outcome.updates[client] = RoundUpdate(
                np.zeros(settings.model.dense), 1, {"goods": update}
            )
        return outcome

    def or_die(self, update):
        try:
            return supply(self, update)
        except MisuseError:
            return []

    fed._trainer = train
    monkeypatch.setattr(TwoServerClientRound, "supply", or_die)
    list(fed.run(1))
    reports = [
        e for e in views.by_party[SERVER] if (e.direction, e.kind) == ("received", "WriteReport")
    ]
    assert len({len(e.data) for e in reports}) == 1
    return sorted(e.other for e in reports)


def test_a_client_that_failed_reports_like_everybody_else(monkeypatch):
    """Even where the spoiled row got past the digests."""
    assert reporters(monkeypatch) == list(READERS)


def test_if_clients_did_not_send_zeros_the_leader_would_see_who_holds_the_row(monkeypatch):
    monkeypatch.setattr(encode, "flaw", lambda plan, update, trained: "")
    assert set(READERS) - set(reporters(monkeypatch)) == {4}
