"""Fixed groups that wait, between services: kills, members that stay away, and bad people.

The model is the simulator's to the bit for the order in which clients came.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from services.group_lab import NOW, GroupLab, grouped
from tessera import wire
from tessera.crypto.entropy import SystemEntropy
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import TablePart
from tessera.protocols.epochs.messages import Delivery, Fetch
from tessera.protocols.machine import RoundOutcome, RoundOver
from tessera.rounds.epochs.group import EpochWork
from tessera.services import group_leader
from tessera.services.group_client import AHEAD_SINCE, LONGEST_AHEAD, GroupClientService
from tessera.services.group_leader import NOT_COME
from tessera.services.journal import Journal, JournalFailed, Moment, state_of
from tessera.services.journal_stores import JournalRows

CLIENTS, SIZE = 8, 4


@pytest.fixture
def folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as made:
        yield Path(made)


@contextmanager
def lab(folder: Path, *, clients: int = CLIENTS, **more) -> Iterator[GroupLab]:
    entropy = more.pop("entropy", None)
    made = GroupLab(grouped(clients, SIZE, **more), folder / "lab", clients, entropy=entropy)
    try:
        yield made
    finally:
        made.close()


def first_of(run: GroupLab, group: int = 0) -> list[ClientId]:
    return list(run.groups[group].members)


# --- the order in which clients come --------------------------------------------------------------


def test_epochs_are_those_of_the_simulator_in_the_same_order(folder: Path) -> None:
    with lab(folder) as run:
        run.run(4, away=0.3)
        merged = run.updates()
        assert len(merged) >= 4
        assert {each.closed - each.opened for each in merged} > {0}, "some waited"
        assert run.leader.model.digest.hex() == run.replayed()
        assert run.leader.model.digest != run.first_model().digest


def test_a_whole_model_has_no_union_and_the_same_epochs(folder: Path) -> None:
    with lab(folder, scheme="secure-fedavg") as run:
        run.run(3, away=0.3)
        assert {each.kind.value for each in run.order()} == {"update"}
        assert run.leader.model.digest.hex() == run.replayed()


def test_a_new_period_has_a_union_of_its_own(folder: Path) -> None:
    with lab(folder, clients=SIZE, groups={"period": 2}) as run:
        run.run(4)
        kinds = [each.kind.value for each in run.order()]
        assert kinds[:6] == ["union", "update", "update", "union", "update", "update"]
        assert run.leader.model.digest.hex() == run.replayed()


def test_a_round_ends_when_a_cohort_has_delivered_and_a_group_is_full(folder: Path) -> None:
    with lab(folder, cohort=6) as run:
        run.ready()
        first, second = (list(group.members) for group in run.groups)
        for client in (*second[:3], *first[:2]):
            run.visit(client, once=True)
        assert run.leader.next_round == 0 and run.leader.delivered == 5
        run.visit(second[3], once=True)
        assert run.leader.next_round == 1, "six updates have come, and a group is full"
        assert [each.part for each in run.updates()] == [1]


def test_who_comes_back_to_a_full_group_ends_the_round(folder: Path) -> None:
    """Nobody waits for a deadline: its group goes on with its next epoch at once."""
    with lab(folder, cohort=8) as run:
        run.ready()
        first, *rest = first_of(run)
        for client in (first, *rest):
            run.visit(client, once=True)
        assert run.leader.next_round == 0 and run.leader.full == [0]
        run.visit(first, once=True)
        assert run.leader.next_round == 1 and run.leader.open[0].missing == SIZE - 1
        assert run.leader.model.digest.hex() == run.replayed()


def test_a_fresh_group_waits_while_a_cohort_is_missing(folder: Path) -> None:
    with lab(folder, cohort=3) as run:
        run.ready()
        first, second = (list(group.members) for group in run.groups)
        run.visit(first[0], once=True)
        assert run.leader.outstanding == 3
        question = run.client(second[0]).fetch()
        assert run.leader.take(second[0], question, last=False).waits
        run.leader.news.clear()
        run.visit(first[1], once=True)
        assert set(second) <= run.leader.news, "there is room now, and whoever waits is woken"
        assert not run.leader.take(second[0], question, last=False).waits


def test_a_group_whose_member_does_not_come_is_retired(folder: Path) -> None:
    with lab(folder, groups={"longest_wait": 3}) as run:
        first, second = (list(group.members) for group in run.groups)
        for _ in range(3):
            for client in (*first, *second):
                run.visit(client)
        run.visit(first[0])
        for _ in range(12):
            for client in (*first[:3], *second):
                run.visit(client)
        assert set(run.leader.retired.values()) == {NOT_COME}
        run.visit(first[3])
        assert run.client(first[3]).retired == NOT_COME
        rounds = run.leader.next_round
        run.restart(SERVER)
        for client in (*second, second[0]):
            run.visit(client)
        assert run.leader.next_round > rounds, "the others go on"
        assert run.leader.model.digest.hex() == run.replayed()


def test_vectors_that_wait_are_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one role in memory the same comes out."""
    monkeypatch.setattr(group_leader, "CACHED", 1)
    with lab(folder, clients=12) as run:
        run.run(4, away=0.3)
        assert len(run.leader._cached) == 1
        assert run.leader.model.digest.hex() == run.replayed()


# --- kills ----------------------------------------------------------------------------------------


def test_whoever_is_killed_at_any_step_goes_on(folder: Path) -> None:
    """Before a commit and between commit and sending, one after the other."""
    with lab(folder, clients=SIZE) as calm:
        calm.run(2)
        points = [(party, at) for party, count in calm.moments.items() for at in range(count)]
        expected = calm.leader.model.digest
    rng = np.random.default_rng(7)
    for which in rng.choice(len(points), 24, replace=False):
        with lab(folder, clients=SIZE) as run:
            run.kill_at.add(points[which])
            run.run(2)
            assert not run.kill_at, "somebody was killed"
            assert run.leader.model.digest == expected, points[which]


def test_everybody_is_killed_again_and_again(folder: Path) -> None:
    """With real entropy: what was drawn is in the journal, and no epoch has two contents."""
    for entropy in (None, SystemEntropy):
        with lab(folder, entropy=entropy) as run:
            for party in list(run.parties):
                run.kill_at.update((party, at) for at in range(1, 400, 5))
            run.run(4, away=0.3)
            assert run.sent
            if entropy is None:
                assert run.leader.model.digest.hex() == run.replayed()


def test_own_rows_are_kept_with_the_certificate_and_once(folder: Path) -> None:
    """A client counts its trainings in a row of its own; it is killed at every third step."""

    class HomeLab(GroupLab):
        def _made(self, party, journal):
            made = super()._made(party, journal)
            if isinstance(party, str):
                return made
            home, make, train = JournalRows(journal, made.name), made._make_local, made._train

            def trained(round_id, submodel, coins):
                found = home.of("own", 1).values
                value = np.full((1, 1), 1.0 + (found[0, 0] if len(found) else 0.0), np.float32)
                part = TablePart(np.zeros(1, np.uint64), value)
                return replace(train(round_id, submodel, coins), local={"own": part})

            def local(periods, ledger):
                found = make(periods, ledger)
                found.rows = home
                return found

            made._make_local, made._train = local, trained
            made.load()
            return made

    run = HomeLab(grouped(SIZE, SIZE), folder / "lab", SIZE)
    for party in run.clients:
        run.kill_at.update((party, at) for at in range(0, 200, 3))
    while run.leader.next_round < 5:
        for client in run.clients:
            run.visit(client, once=True)
            one = run.client(client)
            home = JournalRows(one.journal, one.name)
            kept = home.of("own", 1).values
            counted = float(kept[0, 0]) if len(kept) else 0.0
            updates = max(0, one.role.delivered - 1)  # its first epoch is a union
            assert counted + (home.pending is not None) == updates
    assert counted >= 4
    run.close()


@pytest.mark.campaign
def test_twenty_clients_of_which_a_third_is_off_and_twenty_kills(folder: Path) -> None:
    rng = np.random.default_rng(20)
    with lab(folder, clients=20, cohort=8) as run:
        everybody = [SERVER, *run.clients]
        while len(run.kill_at) < 20:
            who = everybody[int(rng.integers(len(everybody)))] if rng.random() < 0.5 else SERVER
            run.kill_at.add((who, int(rng.integers(400 if who == SERVER else 40))))
        epochs = 0
        while epochs < 10:
            run.run(run.leader.next_round + 5, seed=int(rng.integers(1 << 30)), away=1 / 3)
            merged = [each.part for each in run.updates()]
            epochs = min(merged.count(at) for at in range(len(run.groups)))
        assert not run.kill_at, f"{len(run.kill_at)} kills did not happen"
        assert run.leader.model.digest.hex() == run.replayed()


# --- what is kept, and when it leaves -------------------------------------------------------------


def test_the_root_of_an_epoch_is_erased_when_its_bytes_are_stored(folder: Path) -> None:
    """Mask key and coins follow from it; the bytes themselves go with their certificate."""
    with lab(folder) as run:
        first, *others = trained_up_to(run, 1)
        client = run.client(first)
        client.take(assigned(run, first))
        root = client.role.state.member.state.root.reveal()
        assert root in on_disk(client)
        client.train()
        (sent,) = client.outgoing
        assert root not in on_disk(client), "it is in the log while nobody takes the bytes"
        assert sent[100:400] in on_disk(client)
        run.ask(first, sent)
        client.sent()
        for other in others:
            run.visit(other, once=True)
        client.take(assigned(run, first))
        client.journal.fold()
        assert sent[100:400] not in on_disk(client)


def test_a_group_that_is_retired_without_a_reason_is_retired(folder: Path) -> None:
    with lab(folder) as run:
        first, *_ = trained_up_to(run, 1)
        client = run.client(first)
        number = RoundId(client.group.group.number)
        client.take(wire.encode(RoundOver.of(number, RoundOutcome.ABORTED, "")))
        assert client.retired and not client.outgoing and client.pending is None


def test_the_root_of_a_union_is_erased_before_the_union_leaves(folder: Path) -> None:
    with lab(folder) as run:
        members = first_of(run)
        for member in members:
            run.visit(member, once=True)
        client = run.client(members[0])
        root = client.role.state.member.state.root.reveal()
        assert root in on_disk(client)
        client.take(assigned(run, members[0]))
        assert client.outgoing and root not in on_disk(client)


def on_disk(client: GroupClientService) -> bytes:
    path = client.journal.path
    return b"".join(each.read_bytes() for each in path.parent.glob(f"{path.name}*"))


def test_what_is_sent_leaves_at_a_fixed_delay_after_the_download(folder: Path) -> None:
    with lab(folder, groups={"delay": 60.0}) as run:
        first, *_ = trained_up_to(run, 1)
        client = run.client(first)
        client.take(assigned(run, first))
        before = client.leaves_in
        assert 50.0 < before <= 60.0
        client.train()
        assert client.leaves_in <= before
        run.restart(first)
        assert 50.0 < run.client(first).leaves_in <= before, "a restart makes it no earlier"


def test_the_state_of_a_leader_says_how_many_groups_are_retired_and_why(folder: Path) -> None:
    with lab(folder) as run:
        run.ready()
        assert state_of(run.folder / SERVER)["retired"] is None
        with run.leader.journal.step():
            run.leader.retire(0, NOT_COME)
        shown = state_of(run.folder / SERVER)
        assert (shown["retired"], shown["retired_for"]) == (1, f"{NOT_COME} (1)")


def test_a_restart_within_the_delay_does_not_say_whether_training_had_ended(folder: Path) -> None:
    """Killed before or after it stored its bytes: the same question, answer, times and deadline,
    and what was stored is sent as it was."""
    seen = []
    for ended in (False, True):
        with lab(folder / str(ended), groups={"delay": 60.0}) as run:
            first, *_ = trained_up_to(run, 1)
            run.client(first).take(assigned(run, first))
            stored = b""
            if ended:
                run.client(first).train()
                (stored,) = run.client(first).outgoing
            run.now = NOW + 10_000  # how long training took is not compared here
            run.restart(first)
            client = run.client(first)
            asked = wire.decode(client.fetch(), expect=[Fetch])
            expires, answer = client.expires_in, run.leader.take(first, client.fetch()).message
            client.take(answer)
            leaves = client.leaves_in
            assert (client.pending is None) is ended
            if not ended:
                client.train()
            assert stored in (b"", *client.outgoing)
            run.now = NOW + 20_000
            run.ask(first, client.outgoing[0])
            client.sent()
            later = wire.decode(client.fetch(), expect=[Fetch])
            found = (asked.delivered, wire.kind_of(answer), len(answer), leaves, expires)
            seen.append((*found, later.delivered, client.expires_in))
    assert seen[0] == seen[1]
    epoch, kind, _, leaves, _, later, _ = seen[0]
    assert (epoch, later, kind) == (2, 3, EpochWork) and 50.0 < leaves <= 60.0


def test_a_delivery_whose_receipt_was_lost_is_not_sent_again(folder: Path) -> None:
    with lab(folder) as run:
        first, *_ = trained_up_to(run, 1)
        run.client(first).take(assigned(run, first))
        run.client(first).train()
        run.ask(first, run.client(first).outgoing[0])
        run.restart(first)
        client = run.client(first)
        client.take(run.ask(first, client.fetch()))
        assert not client.left and not client.outgoing and client.pending is None
        assert wire.decode(client.fetch(), expect=[Fetch]).delivered == 3


def test_a_client_whose_clock_is_slow_waits_for_a_day_and_then_leaves(folder: Path) -> None:
    with lab(folder) as run:
        members = first_of(run)
        for client in members:
            run.visit(client, once=True)
        slow, never = members[:2]
        for client in (slow, never):
            run.client(client)._clock = lambda: NOW - 3_000.0
            run.visit(client)
            one = run.client(client)
            assert not one.left and not one.outgoing and 2_600.0 < one.ahead < 3_000.0
            assert one.role.phase == "Deposited", "nothing was taken"
        run.client(slow)._clock = run.clock
        run.visit(slow, once=True)
        assert (slow, 1) in run.sent and run.client(slow).ahead == 0.0
        one = run.client(never)
        one.journal.set_fact(one.name, AHEAD_SINCE, str(NOW - 3_001.0 - LONGEST_AHEAD).encode())
        run.visit(never)
        assert "has not passed by this client's clock" in one.left and (never, 1) not in run.sent


def test_the_state_of_a_client_says_what_an_operator_needs(folder: Path) -> None:
    with lab(folder) as run:
        first, *_ = trained_up_to(run, 1)
        shown = state_of(run.folder / SERVER)
        assert shown["open"] == 1 and shown["missing"] == 0
        assert shown["membership"] == "groups on the operator's word"
        run.client(first).decline("no budget is left")
        assert state_of(run.folder / f"client {first}")["trouble"] == "no budget is left"


# --- bad people and bad disks ---------------------------------------------------------------------


def trained_up_to(run: GroupLab, updates: int) -> list[ClientId]:
    """The first group, with so many updates delivered by all."""
    run.ready()
    members = first_of(run)
    while run.client(members[-1]).role.delivered < updates + 1:
        for client in members:
            run.visit(client, once=True)
    return members


def assigned(run: GroupLab, client: ClientId) -> bytes:
    """What the leader answers a client to whom an update is due."""
    question = run.client(client).fetch()
    answer = run.leader.take(client, question).message
    assert wire.kind_of(answer) is EpochWork
    return answer


def test_a_second_vector_with_other_bytes_is_refused(folder: Path) -> None:
    with lab(folder) as run:
        first, *_ = trained_up_to(run, 1)
        client = run.client(first)
        client.take(assigned(run, first))
        client.train()
        (sent,) = client.outgoing
        run.ask(first, sent)
        before = run.leader._role(0).snapshot()
        message = wire.decode(sent, expect=[Delivery])
        vector = wire.HashedBytes(bytes(len(message.vector)))
        statement = replace(message.statement, vector=vector.digest)
        signed = statement.signed(run.groups[0], run.signers[first].key)
        other = replace(message, statement=signed, vector=vector)
        answer = run.leader.take(first, wire.encode(other))
        assert "second key or vector" in answer.refused
        assert run.leader._role(0).snapshot() == before
        assert not run.leader.take(first, sent).refused, "the same bytes again change nothing"


def test_a_base_that_changes_after_the_delivery_is_left_for_good(folder: Path) -> None:
    """The leader lost the epoch that it had fixed, and fixes another one."""
    with lab(folder) as run:
        first, *_ = trained_up_to(run, 1)
        run.kill(SERVER)
        shutil.copytree(run.folder / SERVER, run.folder / "before")
        run.start(SERVER)
        run.visit(first, once=True)
        run.kill(SERVER)
        shutil.rmtree(run.folder / SERVER)
        shutil.move(run.folder / "before", run.folder / SERVER)
        run.start(SERVER)
        for client in first_of(run, 1):
            run.visit(client, once=True)  # another round than last time: another base
        run.visit(first_of(run, 1)[0], once=True)
        run.visit(first)
        assert "changed epoch" in run.client(first).left
        run.restart(first)
        assert "changed epoch" in run.client(first).left, "for good"


def test_a_leader_restored_to_an_earlier_epoch_is_left(folder: Path) -> None:
    with lab(folder) as run:
        members = trained_up_to(run, 1)
        run.kill(SERVER)
        shutil.copytree(run.folder / SERVER, run.folder / "before")
        run.start(SERVER)
        for _ in range(2):
            for client in members:
                run.visit(client, once=True)
        run.kill(SERVER)
        shutil.rmtree(run.folder / SERVER)
        shutil.move(run.folder / "before", run.folder / SERVER)
        run.start(SERVER)
        for client in members:
            run.visit(client)
        assert all("assigned epoch" in run.client(c).left for c in members)


def test_a_client_that_was_set_back_is_out(folder: Path) -> None:
    with lab(folder) as run:
        first, *_ = trained_up_to(run, 1)
        run.kill(first)
        here = run.folder / f"client {first}"
        shutil.copytree(here, run.folder / "before")
        run.start(first)
        run.visit(first)
        run.kill(first)
        shutil.rmtree(here)
        shutil.move(run.folder / "before", here)
        run.start(first)
        run.visit(first)
        assert "state was set back" in run.client(first).left


def test_nothing_is_sent_from_a_full_disk(folder: Path) -> None:
    """Neither by a client nor by the leader; with room again both go on."""
    with lab(folder) as run:
        first, *_ = trained_up_to(run, 1)
        client = run.client(first)
        client.take(assigned(run, first))
        with full(client.journal), pytest.raises(JournalFailed, match="is the disk full"):
            client.train()
        client.load()
        assert not client.outgoing and client.pending is None, "it asks first"
        client.take(assigned(run, first))
        client.train()
        (sent,) = client.outgoing
        with full(run.leader.journal), pytest.raises(JournalFailed):
            run.leader.take(first, sent)
        run.leader.load()
        missing = run.leader.open[0].missing
        run.ask(first, sent)
        assert run.leader.open[0].missing == missing - 1


@contextmanager
def full(journal: Journal) -> Iterator[None]:
    """No step comes to disk."""

    def fails(moment: Moment) -> None:
        if moment is Moment.BEFORE_COMMIT:
            raise sqlite3.OperationalError("database or disk is full")

    before, journal.watch = journal.watch, fails
    try:
        yield
    finally:
        journal.watch = before


def test_a_strangers_message_and_another_members_name(folder: Path) -> None:
    with lab(folder) as run:
        first, second, *_ = trained_up_to(run, 1)
        question = run.client(first).fetch()
        assert "another client's name" in run.leader.take(second, question).refused
        assert "invalid message" in run.leader.take(second, b"something").refused
        assert not run.leader.takes_part(ClientId(99))
