"""Faults at every message boundary: whose fault it is decides what happens next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harness
from tessera import wire
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, PeerError, ServerFault
from tessera.ids import SERVER, ClientId, RoundId, StageId
from tessera.protocols.machine import Left, Outbound
from tessera.protocols.secagg import messages, transcript
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.params import Threat
from tessera.protocols.secagg.server import SecAggServerSetup, Server
from tessera.protocols.secagg.session import Session, advert_of
from tessera.protocols.secagg.states import AwaitingGroups, Reveal
from tessera.simulation.faults import Corrupt, Delay, Drop, Duplicate, Lie, Reorder, Replay
from tessera.wire.stored import Kept

UP = ["advertise", "share", "reveal", "collect", "consistency", "unmask"]
DOWN = ["Roster", "ForwardedShares", "RowGroups", "SurvivorList", "ConsistencyProof"]


def active_rows(seed: int = 0, clients: int = 7) -> harness.Cohort:
    """A round in which every kind of message is sent."""
    params = harness.params(
        clients, harness.row_stage(Ring(20), dense=5), threat=Threat.ACTIVE, corrupt=0
    )
    return harness.Cohort.of(params, seed=seed)


# --- bytes changed on the way ---------------------------------------------------------------------


@given(st.sampled_from(UP), st.integers(0, 10**6), st.integers(1, 255), st.integers(0, 6))
@settings(max_examples=60)
def test_a_message_changed_in_one_place_is_refused_and_costs_its_sender_its_place(
    phase, offset, flip, who
):
    cohort = active_rows()
    victim = cohort.clients[who]
    ran = harness.run(cohort, [Corrupt(victim, phase, offset=offset, flip=flip)])
    assert [e.peer for e in ran.outcome.refused[:1]] == [victim]
    assert ran.outcome.aborted is None
    harness.assert_sums_are_exact(ran)
    late = phase in ("consistency", "unmask")
    assert (victim in ran.survivors()) == late


@given(st.sampled_from(DOWN), st.integers(0, 10**6), st.integers(1, 255), st.integers(0, 6))
@settings(max_examples=60)
def test_a_server_message_changed_in_one_place_makes_that_client_leave(kind, offset, flip, who):
    cohort = active_rows()
    victim = cohort.clients[who]
    ran = harness.run(cohort, [Corrupt(victim, kind=kind, offset=offset, flip=flip)])
    assert list(ran.outcome.left) == [victim]
    assert isinstance(ran.clients[victim].client.state, Left)
    assert ran.outcome.aborted is None
    harness.assert_sums_are_exact(ran)


# --- lost, late, twice, again ---------------------------------------------------------------------


@pytest.mark.parametrize("phase", UP)
def test_a_duplicate_is_refused_and_the_first_one_counts(phase):
    cohort = active_rows()
    ran = harness.run(cohort, [Duplicate(cohort.clients[2], phase)])
    assert ran.outcome.aborted is None
    assert ran.survivors() == cohort.clients
    harness.assert_sums_are_exact(ran)
    assert all("second" in e.reason or "not due" in e.reason for e in ran.outcome.refused)


@pytest.mark.parametrize("kind", DOWN)
def test_the_servers_very_bytes_again_are_ignored(kind):
    cohort = active_rows()
    ran = harness.run(cohort, [Duplicate(cohort.clients[2], kind=kind)])
    assert not ran.outcome.left
    assert ran.survivors() == cohort.clients
    harness.assert_sums_are_exact(ran)


@pytest.mark.parametrize("phase", UP)
def test_a_late_answer_is_a_dropout(phase):
    cohort = active_rows()
    late = cohort.clients[1]
    ran = harness.run(cohort, [Delay(late, phase, seconds=11.0)])
    assert ran.outcome.aborted is None
    harness.assert_sums_are_exact(ran)
    assert (late in ran.survivors()) == (phase in ("consistency", "unmask"))


@pytest.mark.parametrize("phase", UP)
def test_order_does_not_matter(phase):
    cohort = active_rows()
    ran = harness.run(cohort, [Reorder(phase, seed=4)])
    straight = harness.run(cohort)
    assert not ran.outcome.refused
    assert (ran.sums[0].dense == straight.sums[0].dense).all()
    harness.assert_sums_are_exact(ran)


@pytest.mark.parametrize(
    ("phase", "of"), [(b, a) for i, b in enumerate(UP) for a in UP[:i]], ids=lambda x: x
)
def test_an_earlier_message_replayed_is_a_repetition_and_no_answer(phase, of):
    cohort = active_rows()
    liar = cohort.clients[4]
    ran = harness.run(cohort, [Replay(liar, phase, of=of)])
    assert not ran.outcome.refused
    assert ran.outcome.aborted is None
    assert (liar in ran.survivors()) == (phase in ("consistency", "unmask"))
    harness.assert_sums_are_exact(ran)


# --- messages from clients that are wrong though well formed --------------------------------------


def server_in(phase: str, cohort: harness.Cohort):
    """A server waiting in this phase, with what everybody is about to say."""
    captured = {}

    class Stop(Exception):
        pass

    def watch(simulator):
        if simulator.server.phase == phase and not captured:
            waiting = [(c, d) for _, _, c, down, _, d in sorted(simulator._queue) if not down]
            if len(waiting) + len(getattr(simulator.server.state, "answers", {})) == len(
                cohort.clients
            ):
                captured["answers"] = dict(waiting)
                captured["server"] = simulator.server
                raise Stop

    simulator = harness.simulator(cohort, between_messages=watch)
    with pytest.raises(Stop):
        simulator.run()
    return captured["server"], captured["answers"]


def changed(data: bytes, **fields) -> bytes:
    return wire.encode(replace(wire.decode(data), **fields))


def refusal(server, sender: int, data: bytes) -> PeerError:
    before = server.snapshot()
    with pytest.raises(PeerError) as caught:
        server.receive(ClientId(sender), data)
    assert server.snapshot() == before, "a refusal leaves the state unchanged"
    assert caught.value.peer == sender
    assert "round 12" in str(caught.value)
    assert server.phase in str(caught.value)
    return caught.value


@pytest.mark.parametrize("phase", ["share", "reveal", "collect", "consistency", "unmask"])
def test_the_server_refuses_strangers_second_messages_and_other_rounds(phase):
    cohort = active_rows()
    server, answers = server_in(phase, cohort)
    sender, data = next(iter(answers.items()))
    assert "not in this cohort" in refusal(server, 999, data).reason
    other = next(c for c in answers if c != sender)
    assert "another client's name" in refusal(server, other, data).reason
    wrong_round = changed(data, round_id=RoundId(13))
    assert "another round" in refusal(server, sender, wrong_round).reason
    if phase != "share":
        assert "another stage" in refusal(server, sender, changed(data, stage=1)).reason
    assert "invalid message" in refusal(server, sender, data[:-1]).reason
    server.receive(sender, data)
    before = server.snapshot()
    assert server.receive(sender, data) == [] and server.snapshot() == before
    others = ({"boxes": {}}, {"quorum": 99}, {"dense": b""}, {"groups": bytes(32)})
    last = next((f for f in others if hasattr(wire.decode(data), next(iter(f)))), {"row_keys": {}})
    if phase == "unmask":
        last = {"self_masks": {}}
    assert "second" in refusal(server, sender, changed(data, **last)).reason


def test_a_vector_of_the_wrong_length_or_group_is_refused():
    cohort = active_rows()
    server, answers = server_in("collect", cohort)
    sender, data = next(iter(answers.items()))
    message = wire.decode(data)
    shorter = changed(data, dense=message.dense[:-1])
    assert "bytes for 5 words" in refusal(server, sender, shorter).reason
    padded = bytearray(message.dense)
    padded[-1] |= 0x80  # 5 words of 20 bits leave 4 bits of padding
    assert "not in z2^20" in refusal(server, sender, changed(data, dense=bytes(padded))).reason
    assert "bytes for" in refusal(server, sender, changed(data, tables=(b"",))).reason
    assert "other tables" in refusal(server, sender, changed(data, tables=())).reason
    server.receive(sender, data)


def test_a_share_for_somebody_else_is_refused():
    cohort = active_rows()
    server, answers = server_in("share", cohort)
    sender, data = next(iter(answers.items()))
    boxes = dict(wire.decode(data).boxes)
    moved = dict(boxes)
    moved[ClientId(500)] = moved.pop(cohort.clients[-1])
    assert "others than its holders" in refusal(server, sender, changed(data, boxes=moved)).reason
    fewer = dict.fromkeys(boxes, ())
    assert "other stages" in refusal(server, sender, changed(data, boxes=fewer)).reason


def test_a_share_of_the_wrong_kind_is_refused():
    cohort = active_rows()
    server, answers = server_in("unmask", cohort)
    sender, data = next(iter(answers.items()))
    message = wire.decode(data)
    assert not message.mask_keys
    both = changed(data, mask_keys=dict(message.self_masks))
    assert "has not dropped out" in refusal(server, sender, both).reason
    stranger = changed(data, self_masks={**message.self_masks, ClientId(77): bytes(34)})
    assert "not a survivor it holds" in refusal(server, sender, stranger).reason


def test_bad_signatures_are_refused():
    cohort = active_rows()
    joined = {c: cohort.join(c) for c in cohort.clients}
    server = cohort.server()
    first = cohort.clients[0]
    advert = joined[first][1][0].data
    forged = changed(advert, channel_key=bytes(range(1, 33)))
    assert "bad signature" in refusal(server, first, forged).reason
    assert "other parameters" in refusal(server, first, changed(advert, context=bytes(32))).reason
    server, answers = server_in("consistency", cohort)
    sender, data = next(iter(answers.items()))
    other_view = changed(data, groups=bytes(32))
    assert "another statement" in refusal(server, sender, other_view).reason


def test_keys_that_are_none_are_refused_before_anybody_uses_them():
    cohort = harness.Cohort.of(harness.params(4))
    first = cohort.clients[0]
    advert = cohort.join(first)[1][0].data
    [keys] = wire.decode(advert).stages
    server = cohort.server()
    for key in (bytes(32), b"\x01" + bytes(31), b"\xff" * 32):
        wrong_channel = changed(advert, channel_key=key)
        assert "an invalid public key" in refusal(server, first, wrong_channel).reason
        wrong_mask = changed(advert, stages=(replace(keys, mask_key=key),))
        assert "an invalid public key" in refusal(server, first, wrong_mask).reason
    server.receive(first, advert)


def test_nothing_of_a_strangers_message_is_read():
    server = harness.Cohort.of(harness.params(4)).server()
    assert "not in this cohort" in refusal(server, 999, b"no message at all").reason


def two_stages_between(rows):
    """A server with its first sum open, that opens the second with this many rows."""
    params = harness.params(4, harness.dense_stage(), harness.row_stage(tables=(0, 7)))
    cohort = harness.Cohort.of(params, universe=9)
    opened = []

    class Opening(Server):
        def close_phase(self):
            out = super().close_phase()
            if self.phase != "between":
                return out
            opened.append((self.snapshot(), self.messages))
            return [*out, *self.begin_stage(rows=rows)]

    cohort.server = lambda: Opening(cohort.server_setup(), entropy=harness.ScriptedEntropy(b""))
    return cohort, opened


def test_a_row_beyond_the_stages_tables_is_refused():
    cohort, _ = two_stages_between({7: 9})
    server, answers = server_in("reveal", cohort)
    server = harness.woken(server, cohort.server_setup())  # the bound is stored, too
    sender, data = next(iter(answers.items()))
    first, second = wire.decode(data).tables
    last, beyond = (np.array([row], dtype=np.uint64) for row in (8, 9))
    far = changed(data, tables=(first, replace(second, rows=beyond)))
    assert "beyond table 7's 9" in refusal(server, sender, far).reason
    unbounded = replace(first, rows=beyond)
    server.receive(sender, changed(data, tables=(unbounded, replace(second, rows=last))))


def test_a_stage_is_opened_with_its_own_tables_and_a_digest():
    cohort, opened = two_stages_between(None)
    assert harness.run(cohort).outcome.aborted is None
    server = Server.wake(*opened[0], cohort.server_setup())
    for rows in ({1: 5}, {0: -1}, {7: 2**40 + 1}):
        with pytest.raises(MisuseError, match="stage 1"):
            server.begin_stage(rows=rows)
    with pytest.raises(MisuseError, match="31 bytes"):
        server.begin_stage(bytes(31))
    assert server.snapshot() == opened[0][0]
    assert server.begin_stage(bytes(32), {0: 0, 7: 2**40})


def test_an_active_server_does_not_wake_without_the_directory():
    cohort = active_rows()
    with pytest.raises(MisuseError, match="directory"):
        harness.woken(cohort.server(), SecAggServerSetup(cohort.params, cohort.clients))


def test_a_quorum_below_the_plans_is_refused():
    server, answers = server_in("reveal", active_rows())
    sender, data = next(iter(answers.items()))
    assert "quorum of 1" in refusal(server, sender, changed(data, quorum=1)).reason
    assert "quorum of 99" in refusal(server, sender, changed(data, quorum=99)).reason
    assert "other tables" in refusal(server, sender, changed(data, tables=())).reason


def test_a_box_that_does_not_open_costs_a_share_and_not_the_round():
    cohort = active_rows()
    liar, victim = cohort.clients[0], cohort.clients[3]
    complaints, asked = [], []

    def spoil(simulator):
        answers = getattr(simulator.server.state, "answers", {})
        if simulator.server.phase == "share" and liar in answers:
            boxes = dict(answers[liar].message.boxes)
            boxes[victim] = tuple(bytes(len(b)) for b in boxes[victim])
            answers[liar] = Kept.of(replace(answers[liar].message, boxes=boxes))
        for member in simulator.clients.values():
            if isinstance(member.client.state, AwaitingGroups) and member not in asked:
                asked.append(member)
                complaints.extend(member.client.state.at.holding.complaints)

    simulator = harness.simulator(cohort, between_messages=spoil)
    outcome = simulator.run()
    assert outcome.aborted is None
    assert complaints == [liar]
    total = harness.plain_dense(cohort, 0, cohort.clients)
    assert Ring(20).to_ints(simulator.server.sums[0].dense) == total


# --- a server that lies ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Roster", "ForwardedShares", "SurvivorList"])
def test_a_list_without_somebody_is_refused_by_the_whole_cohort_or_by_the_client(kind):
    cohort = active_rows()
    told, without = cohort.clients[2], cohort.clients[5]
    ran = harness.run(cohort, [Lie(told, kind, without=without)])
    # The client signs or shares for a world of its own; nobody else's answers fit it.
    assert told not in ran.survivors() or told in ran.outcome.left or ran.outcome.refused
    harness.assert_sums_are_exact(ran)
    harness.assert_nobody_gave_both_shares(ran)


def test_a_survivor_list_that_would_give_both_shares_is_never_answered_twice():
    cohort = harness.Cohort.of(harness.params(6))
    told, without = cohort.clients[1], cohort.clients[4]
    ran = harness.run(cohort, [Lie(told, "SurvivorList", without=without, again=True)])
    assert isinstance(ran.outcome.left[told], ServerFault)
    assert "not due" in str(ran.outcome.left[told])
    harness.assert_nobody_gave_both_shares(ran)
    harness.assert_sums_are_exact(ran)


def test_with_an_active_server_two_lists_open_nothing():
    """Half of the clients are told another list: neither half can gather a threshold."""
    cohort = active_rows()
    without = cohort.clients[6]
    ran = harness.run(cohort, [Lie(c, "SurvivorList", without=without) for c in cohort.clients[:3]])
    assert ran.outcome.aborted is not None
    assert ran.outcome.aborted.phase == "consistency"
    assert ran.sums == ()
    kinds = {s.kind for s in ran.views.by_party["server"]}
    assert "RevealedShares" not in kinds


def fault_of(member, data: bytes) -> ServerFault:
    with pytest.raises(ServerFault) as caught:
        member.receive(SERVER, data)
    assert isinstance(member.client.state, Left)
    with pytest.raises(ServerFault):
        member.receive(SERVER, data)  # for good
    return caught.value


def client_in(kind: str, cohort: harness.Cohort) -> tuple:
    """The last client, to which this message is on its way, and the message."""
    captured = {}

    class Stop(Exception):
        pass

    def watch(simulator):
        for _, _, c, down, k, d in simulator._queue:
            if down and k == kind and c == cohort.clients[-1]:
                captured["at"] = (simulator.clients[c], d)
                raise Stop

    simulator = harness.simulator(cohort, between_messages=watch)
    with pytest.raises(Stop):
        simulator.run()
    return captured["at"]


def test_a_forged_roster_is_refused():
    cohort = active_rows()

    def refused(change) -> str:
        member, data = client_in("Roster", cohort)
        roster = wire.decode(data)
        return fault_of(member, wire.encode(change(roster))).reason

    def with_member(roster, i, **fields):
        members = list(roster.members)
        members[i] = replace(members[i], **fields)
        return replace(roster, members=tuple(members))

    assert "forged" in refused(lambda r: with_member(r, 3, channel_key=bytes(range(32))))
    assert "own keys" in refused(lambda r: with_member(r, 6, nonce=bytes(32)))
    assert "own keys" in refused(lambda r: replace(r, members=r.members[:-1]))
    assert "roster of 4" in refused(lambda r: replace(r, members=r.members[-4:]))
    assert "ascending" in refused(lambda r: replace(r, members=r.members[::-1]))
    assert "of round 13" in refused(lambda r: replace(r, round_id=RoundId(13)))
    assert "other stages" in refused(lambda r: with_member(r, 2, stages=()))
    assert "invalid public key of client 7" in refused(
        lambda r: with_member(r, 2, channel_key=bytes(32))
    )
    assert "invalid public key of client 10" in refused(
        lambda r: with_member(
            r, 3, stages=(replace(r.members[3].stages[0], mask_key=b"\xff" * 32),)
        )
    )


def test_forwarded_shares_must_be_exactly_those_that_are_due():
    cohort = active_rows()

    def refused(change) -> str:
        member, data = client_in("ForwardedShares", cohort)
        return fault_of(member, wire.encode(change(wire.decode(data)))).reason

    def without_box(m):
        return replace(m, boxes=dict(list(m.boxes.items())[1:]))

    assert "exactly the boxes" in refused(without_box)
    assert "not in the roster" in refused(lambda m: replace(m, sharers=m.sharers[:-1]))
    few = np.array(cohort.clients[-3:], dtype=np.uint64)
    assert "3 sharers" in refused(lambda m: replace(m, sharers=few))
    assert "of round 3" in refused(lambda m: replace(m, round_id=RoundId(3)))


def test_groups_below_quorum_or_with_strangers_are_refused():
    cohort = active_rows()

    def refused(change) -> str:
        member, data = client_in("RowGroups", cohort)
        message = wire.decode(data)
        table = change(message.tables[0])
        return fault_of(member, wire.encode(replace(message, tables=(table,)))).reason

    everybody_gone = refused(lambda t: replace(t, shared={}))
    assert "below this client's quorum of 4" in everybody_gone
    stranger = {ClientId(999): np.zeros(1, dtype=np.uint64)}
    assert "does not take part" in refused(lambda t: replace(t, shared={**t.shared, **stranger}))
    far = np.array([10**6], dtype=np.uint64)
    assert "did not reveal" in refused(lambda t: replace(t, included=far))
    peer = cohort.clients[1]
    assert "of a row that is not included" in refused(
        lambda t: replace(t, shared={**t.shared, peer: far})
    )


def test_survivor_lists_are_checked():
    cohort = active_rows()

    def refused(survivors) -> str:
        member, data = client_in("SurvivorList", cohort)
        array = np.array(sorted(survivors), dtype=np.uint64)
        return fault_of(member, changed(data, survivors=array)).reason

    assert "did not take part" in refused([*cohort.clients, 500])
    assert "left this client's input out" in refused(cohort.clients[:-1])
    assert "sum of 4" in refused(cohort.clients[-4:])


def test_a_proof_needs_a_threshold_of_true_signatures():
    cohort = active_rows()

    def refused(change) -> str:
        member, data = client_in("ConsistencyProof", cohort)
        message = wire.decode(data)
        return fault_of(member, changed(data, endorsements=change(message.endorsements))).reason

    few = refused(lambda e: dict(list(e.items())[:4]))
    assert "4 signatures only" in few
    swapped = refused(lambda e: dict(zip(e, list(e.values())[::-1], strict=True)))
    assert "forged" in swapped
    assert "not a survivor" in refused(lambda e: {**e, ClientId(99): next(iter(e.values()))})


def test_a_proof_signed_over_another_union_model_or_roster_is_refused():
    """What is signed covers them: a client that was sent others has proof of nothing."""
    cohort = active_rows()

    def refused(change) -> str:
        member, data = client_in("ConsistencyProof", cohort)
        client = member.client
        client.state = change(client.state)
        return fault_of(member, data).reason

    def other_union(state):
        return replace(state, agreed=transcript.agreed_digest(bytes(31) + b"\1"))

    def other_model(state):
        return replace(state, agreed=transcript.agreed_digest(common=bytes(31) + b"\1"))

    def other_roster(state):
        first, *rest = state.at.roster.members
        members = (replace(first, nonce=bytes(len(first.nonce))), *rest)
        listed = Kept.of(replace(state.at.roster, members=members))
        holding = replace(state.at.holding, listed=listed)
        return replace(state, at=replace(state.at, holding=holding))

    assert "forged" in refused(other_union)
    assert "forged" in refused(other_model)
    assert "forged" in refused(other_roster)
    member, data = client_in("ConsistencyProof", cohort)
    member.receive(SERVER, data)  # as it was sent it is taken


def test_every_stage_has_secrets_of_its_own():
    """One self-mask seed for two stages: who drops out in the second is opened in the first."""
    params = harness.params(4, harness.dense_stage(), harness.dense_stage())
    session = Session(params=params, me=ClientId(1), root=Secret(bytes(range(32))))
    for secret_of in (session.self_seed, session.mask_key):
        assert secret_of(StageId(0)).reveal() != secret_of(StageId(1)).reveal()
    first, second = advert_of(session, None).stages
    assert first.commitment != second.commitment and first.mask_key != second.mask_key
    ran = harness.run(harness.Cohort.of(params))
    shares = [s for s in ran.views.by_party["server"] if s.kind == "RevealedShares"]
    by_stage = {0: set(), 1: set()}
    for seen in shares:
        message = wire.decode(seen.data)
        by_stage[int(message.stage)].update(bytes(v) for v in message.self_masks.values())
    assert by_stage[0] and by_stage[1] and not by_stage[0] & by_stage[1]


def test_a_round_number_that_does_not_grow_is_refused():
    cohort = harness.Cohort.of(harness.params(4))
    with pytest.raises(ServerFault, match="after round 12"):
        Client.join(
            cohort.setup(ClientId(1)),
            entropy=harness.ScriptedEntropy(b""),
            last_round=RoundId(12),
        )


# --- our own caller -------------------------------------------------------------------------------


def ready_client(params):
    cohort = harness.Cohort.of(params)
    member, data = client_in("ForwardedShares", cohort)
    member.client.receive(SERVER, data)
    return member.client


def test_a_callers_mistakes_are_misuse_and_change_nothing():
    client = ready_client(harness.params(4, harness.dense_stage(Ring(8), 3, max_value=60)))
    before = client.snapshot()
    good = np.zeros(3, dtype=np.uint8)
    for bad in [
        Input(dense=np.zeros(4, dtype=np.uint8)),
        Input(dense=np.zeros(3, dtype=np.uint16)),
        Input(dense=None),
        Input(dense=np.array([61, 0, 0], dtype=np.uint8)),
        Input(dense=good, tables={0: np.zeros((1, 1), dtype=np.uint8)}),
        Input(dense=good, context=bytes(33)),
        Reveal(tables={}),
    ]:
        with pytest.raises(MisuseError):
            client.submit(bad)
        assert client.snapshot() == before
    assert client.submit(Input(dense=good))
    with pytest.raises(MisuseError, match="not due"):
        client.submit(Input(dense=good))


def test_rows_are_revealed_before_they_are_sent():
    client = ready_client(harness.params(4, harness.row_stage()))
    with pytest.raises(MisuseError, match="revealed before"):
        client.submit(Input(tables={0: np.zeros((0, 3), dtype=np.uint32)}))
    with pytest.raises(MisuseError, match="quorum of 1"):
        client.submit(Reveal(tables={0: np.zeros(0, dtype=np.uint64)}, quorum=1))
    with pytest.raises(MisuseError, match="other tables"):
        client.submit(Reveal(tables={1: np.zeros(0, dtype=np.uint64)}))


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((1, 1), dtype=np.uint64),
        np.array([1.0, 2.0]),
        np.array([True]),
        [1, 2],
        np.array([2, 1], dtype=np.uint64),
        np.array([1, 1], dtype=np.uint64),
        np.array([-1, 4]),
        np.array([2**40], dtype=np.uint64),
    ],
    ids=str,
)
def test_rows_that_are_no_set_of_positions_are_misuse_and_change_nothing(rows):
    client = ready_client(harness.params(4, harness.row_stage()))
    before = client.snapshot()
    with pytest.raises(MisuseError, match=r"rows? "):
        client.submit(Reveal(tables={0: rows}))
    assert client.snapshot() == before


def test_a_wish_that_no_round_can_grant_is_misuse_and_changes_nothing():
    client = ready_client(harness.params(4, harness.row_stage()))
    before = client.snapshot()
    none = np.zeros(0, dtype=np.uint64)
    with pytest.raises(MisuseError, match="quorum of 5"):
        client.submit(Reveal(tables={0: none}, quorum=5))
    with pytest.raises(MisuseError, match="context of 0 bytes"):
        client.submit(Reveal(tables={0: none}, context=b""))
    assert client.snapshot() == before
    assert client.submit(Reveal(tables={0: np.array([0, 3])}, quorum=4))


def test_what_cannot_be_encoded_leaves_the_state_as_it_was(monkeypatch):
    client = ready_client(harness.params(4))
    before = client.snapshot()

    def unsendable(to, message):
        raise MisuseError("does not fit")

    given = Input(dense=np.zeros(7, dtype=np.uint32))
    with monkeypatch.context() as patched:
        patched.setattr(Outbound, "of", unsendable)
        with pytest.raises(MisuseError, match="does not fit"):
            client.submit(given)
    assert client.snapshot() == before
    assert client.submit(given)


def test_every_message_kind_is_covered_here():
    kinds = {k.__name__ for k in messages.FROM_SERVER}
    assert kinds == {*DOWN, "NextStage"}
    assert len(messages.FROM_CLIENT) == len(UP)
    assert Drop(ClientId(1), "share").stage == 0
