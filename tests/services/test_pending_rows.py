"""A round that did not count did not happen at home, and who fails sends zeros.

In simulation over a task with local rows; in services over real journals, with kills.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rounds.population import plan as lab_plan
from runs import toy
from services.service_lab import Killed, Lab
from services.test_offered_rows import SCRIPT, Deployed, shop
from tessera import tasks, wire
from tessera.crypto.entropy import ScriptedEntropy, SystemEntropy
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.local import Sequential
from tessera.privacy.index.period import MemoryPeriods
from tessera.protocols.machine import RoundOutcome, RoundOver
from tessera.rounds.client import AwaitingModel, TrainedModel
from tessera.rounds.events import RoundFinished
from tessera.rounds.messages import Download
from tessera.rounds.party import LocalState, Word
from tessera.runs.client_training import Trainer
from tessera.runs.training import Training, complete
from tessera.services.client import ClientService, TrainingResult
from tessera.services.journal import Journal
from tessera.services.journal_stores import JournalRows, own_secret, save_local
from tessera.services.link import LinkStanding, Numbered, name_of
from tessera.simulation.epochs import EpochFederation
from tessera.simulation.faults import Drop

COHORT_WIDE = 'level = "cpp5"'
IN_GROUPS = 'level = "groups"\n[groups]\nsize = 4\nsmall = true'
DONE = RoundOver.of(RoundId(0), RoundOutcome.DONE)
IN_THREES = {"privacy": {"level": "groups"}, "groups": {"size": 3}}
USERS = np.arange(toy.USERS, dtype=np.uint64)


def training(scheme: str, **more) -> Training:
    task = toy.task()
    plan = complete(toy.plan(scheme, **more), task)
    return Training(task, plan, entropy=ScriptedEntropy(b"pending"), trainer=Trainer.SEQUENTIAL)


def kind(message: Numbered) -> type | None:
    return wire.kind_of(message.data)


def rows(run: Training) -> np.ndarray:
    return run.local["users"].values(USERS)


# --- in simulation --------------------------------------------------------------------------------


@pytest.mark.parametrize("crypto", ["every", "none"])
def test_local_rows_move_in_epochs_that_open_and_in_no_other(crypto: str) -> None:
    run = training("secure-submodel", **IN_THREES, simulation={"crypto": crypto})
    late, away = ClientId(0), [False]
    run.federation._faults = lambda round_id, cohort: (
        [Drop(late, "collect")] if away[0] and late in cohort else []
    )
    group = run.federation.epochs.group_of(late)
    while group.at.union is None:
        list(run.federation.round())
    others, before = [int(c) for c in group.group.members if c != late], rows(run)
    away[0] = True
    for _ in range(40):
        if not group.begun:
            before = rows(run)
        if group.due != {late}:
            list(run.federation.round())
    assert group.due == {late}
    assert (rows(run)[others] == before[others]).all(), "an epoch that waits has moved its rows"
    assert all(run.clients[ClientId(c)].local.unsettled is not None for c in others)
    away[0] = False
    while late not in run.federation.survivors:
        *_, ended = run.federation.round()
        assert isinstance(ended, RoundFinished)
    assert (rows(run)[others] != before[others]).any(axis=1).all()
    assert all(run.clients[ClientId(c)].local.unsettled is None for c in others)


def test_first_rows_follow_from_the_clients_secret_and_not_from_the_seed() -> None:
    """Another seed: the same rows. Another entropy: others. Both look like the module's."""
    task, plan = toy.task(), toy.plan("submodel")
    plan = complete(plan, task)

    def first(entropy: bytes, seed: int) -> np.ndarray:
        return rows(Training(task, replace(plan, seed=seed), entropy=ScriptedEntropy(entropy)))

    here = first(b"one", 3)
    assert (here != first(b"two", 3)).all()
    begins = task.build(3).users.weight.detach().numpy()
    assert (here != begins).all()
    assert 0.5 < here.std() / begins.std() < 2.0


def test_who_raises_sends_zeros_and_nobody_else_is_affected(monkeypatch) -> None:
    trains = Sequential._train

    victim = -1

    def raising(self, job, round_id):
        nonlocal victim
        victim = job.client if victim < 0 else victim
        if job.client == victim:
            raise ValueError("of the data")
        return trains(self, job, round_id)

    monkeypatch.setattr(Sequential, "_train", raising)
    run = training("secure-submodel", **IN_THREES)
    before = rows(run)
    *_, ended = run.federation.round()
    assert isinstance(ended, RoundFinished) and ended.groups_aborted == 0
    assert ended.broken == {"training raised ValueError": 1} and ended.not_finite == 1
    assert (rows(run)[victim] == before[victim]).all()


def test_if_everybody_fails_it_is_nobodys_data(monkeypatch) -> None:
    def raising(self, job, round_id):
        raise ValueError("of the module")

    monkeypatch.setattr(Sequential, "_train", raising)
    with pytest.raises(ConfigError, match="for each of 6 clients: of the module"):
        list(training("submodel").federation.round())


# --- in services ----------------------------------------------------------------------------------


class HomeLab(Lab):
    """Clients with one row of their own, which counts the rounds that have counted."""

    def _made(self, party, journal):
        made = super()._made(party, journal)
        if not isinstance(made, ClientService):
            return made
        home, train, make = JournalRows(journal, made.name), made._train, made._make_local

        def trained(round_id: RoundId, submodel: Submodel, coins: Secret) -> TrainingResult:
            found = home.of("own", 1).values
            value = found[0, 0] if len(found) else 0.0
            part = TablePart(np.zeros(1, np.uint64), np.full((1, 1), value + 1.0, np.float32))
            return replace(train(round_id, submodel, coins), local={"own": part})

        made._train = trained
        made._make_local = lambda periods, ledger: with_rows(make(periods, ledger), home)
        made.load()
        return made

    def counted(self, client: int) -> float:
        party = self.parties[ClientId(client)]
        found = JournalRows(party.journal, party.name).of("own", 1).values
        return float(found[0, 0]) if len(found) else 0.0


def with_rows(local: LocalState, home: JournalRows) -> LocalState:
    local.rows = home
    return local


def test_a_client_that_is_killed_keeps_what_counted_once(tmp_path: Path) -> None:
    lab = HomeLab(lab_plan("secure-submodel", cohort=4), tmp_path / "lab")
    for at in range(0, 40, 3):
        lab.kill_at[ClientId(1), at] = True
    lab.run(4)
    assert [lab.counted(c) for c in range(4)] == [4.0] * 4
    lab.close()


@pytest.mark.parametrize("counted", [True, False])
def test_an_outcome_that_was_missed_is_heard_before_the_next_round(
    tmp_path: Path, counted: bool
) -> None:
    """The client sends its update, and is off until the next round begins."""
    lab = HomeLab(lab_plan("submodel", cohort=3, security={"dropout": 0.4}), tmp_path / "lab")
    away, leader = ClientId(2), lab.leader
    leader.open_round()
    others = [c for c in lab.cohort if c != away]
    lab._exchange(away)
    client = lab.parties[away]
    if client.pending is not None:
        client.train()
    for _ in range(6):
        for c in others:
            lab._exchange(c)
    if counted:
        while not leader.is_over:
            lab._exchange(away)
            for c in others:
                lab._exchange(c)
    else:
        leader.stop("a test")
    client = lab.parties[away]
    standing = LinkStanding(RoundId(1), 0, 0, 0, counted=leader.links[away].counted)
    assert (leader.links[away].counted == 0) is counted
    if client.local.unsettled is not None:  # it has not heard of the end yet
        assert lab.counted(2) == 0.0
        client.begin(standing)
    assert client.local.unsettled is None
    assert lab.counted(2) == float(counted)
    lab.close()


def test_what_was_never_sent_has_not_counted_whatever_the_leader_says(tmp_path: Path) -> None:
    """A leader sends the model alone, and ends the round for this client: its training is done, and
    its update is waiting for the groups of its rows. Own rows that were kept would drift apart."""
    lab = HomeLab(lab_plan("secure-submodel", cohort=4), tmp_path / "lab")
    lab.leader.open_round()
    client = lab.parties[ClientId(0)]
    while client.role is None or not isinstance(client.role.state, AwaitingModel):
        for c in lab.cohort:
            lab._exchange(c)
    (download,) = (
        each.data for each in lab.leader.links[ClientId(0)].on_its_way if kind(each) is Download
    )
    for data, said in ((download, "trained"), (wire.encode(DONE), "over")):
        client.take([Numbered(client.link.received + 1, data)])
        if said == "trained":
            client.train()
            assert isinstance(client.role.state, TrainedModel) and client.local.unsettled == 0
    assert client.local.unsettled is None and lab.counted(0) == 0.0
    client.begin(LinkStanding(RoundId(1), 0, 0, 0, counted=0))
    assert lab.counted(0) == 0.0
    lab.close()


def test_a_round_does_not_begin_before_the_last_one_is_settled() -> None:
    class Home:
        pending = RoundId(3)

        def offer(self, round_id, rows):
            raise AssertionError

        def settle(self, *, counted):
            self.pending = None

    local = LocalState(real={}, periods=MemoryPeriods(), rows=Home())
    with pytest.raises(MisuseError, match="round 3 has counted"):
        local.must_be_settled()
    local.settle(RoundId(2), counted=True, by=Word.SERVER)
    assert local.unsettled == 3, "another round's outcome says nothing about this one"
    local.settle(RoundId(3), counted=False, by=Word.SERVER)
    local.must_be_settled()


def test_a_state_without_its_secret_is_refused(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, owner="client 1", plan=b"p" * 32)
    local = LocalState(real={}, periods=MemoryPeriods(), last_round=RoundId(4))
    with journal.step():
        save_local(journal, "client 1", local)
    with pytest.raises(ConfigError, match="its secret is not in") as refused:
        own_secret(journal, "client 1", SystemEntropy(), "f", 1)
    assert refused.value.hint
    journal.close()


def test_the_secret_is_on_disk_before_it_is_used(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, owner="client 1", plan=b"p" * 32)

    def killed(_) -> None:
        raise Killed(SERVER)

    journal.watch = killed
    with pytest.raises(Killed):
        own_secret(journal, name_of(ClientId(1)), SystemEntropy(), "f", 1)
    journal.close()


@pytest.mark.parametrize("privacy", [COHORT_WIDE, IN_GROUPS])
def test_a_deployed_client_that_raises_ends_its_round_as_in_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, privacy: str
) -> None:
    """Zeros in its place, everybody in the sum, the simulator's model to the bit; why it failed is
    in its own state and on no link, and it trains again in the next round."""
    trains, rounds = Sequential._train, 3

    def raising(self, job, round_id):
        if job.client == 2 and round_id == 1:
            raise ZeroDivisionError("of the data")
        return trains(self, job, round_id)

    monkeypatch.setattr(Sequential, "_train", raising)
    with Deployed(tmp_path / "lab", shop(tmp_path / "shop.csv"), privacy=privacy) as lab:
        lab.run(2)
        broken = {c: lab.parties[c].local.broken for c in lab.cohort}
        assert broken[ClientId(2)] == "round 1: training raised ZeroDivisionError"
        assert not any(why for c, why in broken.items() if c != ClientId(2))
        events = [row for (row,) in lab.leader.journal.database.execute("SELECT data FROM event")]
        assert len(events) == 2 and all('"survivors": 8' in row for row in events)
        assert not any("ZeroDivision" in row for row in events)
        lab.run(rounds)
        assert not lab.parties[ClientId(2)].local.broken
        plan = lab.bundle.plan
        task = tasks.load(plan.task.name, **plan.task.options)
        deployed = lab.leader.model.digest
        if plan.grouped:  # with the groups that were drawn
            drawn = lab.leader.groups
            formed = property(lambda _: [group.members for group in drawn])
            monkeypatch.setattr(EpochFederation, "_formed", formed)
            monkeypatch.setattr(EpochFederation, "_fixed_group", lambda _, at, members: drawn[at])
    entropy = ScriptedEntropy(SCRIPT)
    run = Training(task, plan, entropy=entropy, trainer=Trainer.SEQUENTIAL)
    assert len([e for e in run.run(rounds) if isinstance(e, RoundFinished)]) == rounds
    assert run.federation.model.digest == deployed


def test_own_rows_of_examples_that_are_gone_do_not_end_a_client(tmp_path: Path) -> None:
    """Its data have changed between two starts; a member that left for that would be seen."""
    with Deployed(tmp_path / "lab", shop(tmp_path / "shop.csv"), privacy=COHORT_WIDE) as lab:
        lab.run(1)
        client = lab.parties[ClientId(2)]
        (name, width), *_ = client.journal.database.execute(
            "SELECT name, length(data) / 4 FROM local_row WHERE party = ?", (client.name,)
        ).fetchall()
        gone = TablePart(np.array([10**6], np.uint64), np.zeros((1, width), np.float32))
        home = JournalRows(client.journal, client.name)
        with client.journal.step():
            home.offer(RoundId(0), {name: gone})
            home.settle(counted=True)
        lab.run(2)
        assert not client.local.broken and len(home.of(name, width).ids) > 1
