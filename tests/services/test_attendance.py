"""Rounds of a training as deployed clients keep them: in their journals, whoever is killed when."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rounds.population import plan
from services.service_lab import Lab
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER, ClientId, RoundId
from tessera.plan import CohortsPlan, Plan
from tessera.rounds.attendance import Attendance
from tessera.rounds.cohorts import Cohorts, cohorts_of
from tessera.rounds.schedule import Schedule
from tessera.services.bundle import pack_synthetic
from tessera.services.client import ClientService
from tessera.services.deployment import open_clients, open_leader, synthetic_maker
from tessera.services.journal import Journal
from tessera.services.keyring import Keyring, make_keys
from tessera.services.leader import LeaderService
from tessera.services.link import Link, name_of

CLIENTS, COHORT, ROUNDS = 8, 4, 6
SCHEMES = ["submodel", "two-server"]


def planned(scheme: str, rounds: int = ROUNDS, **section: object) -> Plan:
    return plan(
        scheme,
        cohort=COHORT,
        cohorts=CohortsPlan(**({"drawn": "schedule", "separation": 2} | section)),
        security={"dropout": 0.5},
        simulation={"rounds": rounds},
    )


class Waiting(Lab):
    """With a clock: what nobody answers is closed."""

    def _turn(self, rounds: int) -> bool | None:
        moved = super()._turn(rounds)
        if moved is False and not self.leader.is_over:
            self.leader.close_overdue()
            return True
        return moved

    def attendance(self, client: ClientId) -> Attendance:
        found: Attendance = self.parties[client].local.attendance[self.plan.federation]
        return found


def survivors(lab: Lab) -> list[int]:
    import json

    return [json.loads(text).get("survivors", 0) for text in lab.facts()["rounds"]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everybody_is_in_its_own_rounds(tmp_path: Path, scheme: str) -> None:
    lab = Waiting(planned(scheme), tmp_path / "lab", clients=CLIENTS)
    lab.run(ROUNDS)
    assert survivors(lab) == [COHORT] * ROUNDS
    assert lab.schedule is not None
    for client in lab.cohort:
        place = lab.schedule.place_of(client)
        assert place is not None
        kept = lab.attendance(client)
        assert (kept.count, kept.last) == (3, 4 + place.first)
    with pytest.raises(ConfigError, match="has had its 6 rounds"):
        lab.leader.open_round()


def liar(
    monkeypatch: pytest.MonkeyPatch, asks: Callable[[list[ClientId], int], list[ClientId]]
) -> None:
    honest = Cohorts.sample
    monkeypatch.setattr(Cohorts, "sample", lambda self, r: asks(honest(self, r), int(r)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_client_invited_early_refuses_and_the_round_goes_on_without_it(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Waiting(planned(scheme), tmp_path / "lab", clients=CLIENTS)
    assert lab.schedule is not None
    early = lab.schedule.of_round(0)[0]

    def asks(cohort: list[ClientId], number: int) -> list[ClientId]:
        return sorted([*cohort[1:], early]) if number == 1 else cohort

    liar(monkeypatch, asks)
    lab.run(1)
    before, charged = lab.attendance(early), len(lab.parties[early].local.ledger.entries)
    lab.run(2)
    assert "no place" in lab.parties[early].left
    assert lab.attendance(early) == before
    assert len(lab.parties[early].local.ledger.entries) == charged
    lab.run(ROUNDS)
    assert survivors(lab) == [4, 3, 4, 4, 4, 4]
    assert lab.attendance(early).count == 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_client_that_lost_its_journal_waits_a_pass_and_has_used_its_places(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the leader does not say that the client has been there: with one that does, it is
    out for good, as its charges are lost, too (`test_old_copies.py`)."""
    monkeypatch.setattr(Link, "must_be_no_old_copy", lambda *_: None)
    lab = Waiting(planned(scheme, rounds_per_client=3), tmp_path / "lab", clients=CLIENTS)
    lab.run(2)
    assert lab.schedule is not None
    lost = lab.schedule.of_round(0)[0]
    lab.kill(lost)
    shutil.rmtree(lab.folder / name_of(lost))
    lab.start(lost)
    lab.run(3)
    assert "has lost what it remembered" in lab.parties[lost].left
    lab.kill(lost)
    lab.start(lost)  # what it has refused is durable, too
    training = lab.attendance(lab.schedule.of_round(1)[0]).training
    assert lab.attendance(lost) == Attendance(training=training, last=2, count=2)
    lab.run(ROUNDS)
    assert survivors(lab) == [4, 4, 3, 4, 4, 4]
    assert lab.attendance(lost) == Attendance(training=training, last=4, count=3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_whoever_is_killed_when_a_round_counts_once(tmp_path: Path, scheme: str) -> None:
    settings = planned(scheme, rounds=2)
    whole = Waiting(settings, tmp_path / "whole", clients=CLIENTS)
    whole.run(2)
    facts = whole.facts()
    kept = {c: whole.attendance(c) for c in whole.cohort}
    assert whole.schedule is not None
    victim = whole.schedule.of_round(1)[0]
    moments = whole.moments[victim]
    assert moments > 6
    for at in range(moments):
        lab = Waiting(settings, tmp_path / f"at {at}", clients=CLIENTS)
        lab.kill_at[victim, at] = True
        lab.run(2)
        assert not lab.kill_at
        assert {c: lab.attendance(c) for c in lab.cohort} == kept
        assert lab.facts() == facts
        lab.close()


def test_a_count_is_on_disk_before_the_first_message_leaves(tmp_path: Path) -> None:
    lab = Waiting(planned("two-server"), tmp_path / "lab", clients=CLIENTS)
    lab.leader.open_round()
    assert lab.schedule is not None
    client = lab.schedule.of_round(0)[0]
    lab._exchange(client)
    lab.kill(client)
    lab.start(client)
    assert lab.attendance(client).count == 1


def test_another_schedule_is_refused_on_resuming(tmp_path: Path) -> None:
    lab = Waiting(planned("submodel"), tmp_path / "lab", clients=CLIENTS)
    lab.run(1)
    lab.schedule = Schedule.drawn(lab.cohort, COHORT, Secret(b"another order of clients, 32 byt"))
    lab.kill(SERVER)
    journal = Journal.open(
        lab.folder / name_of(SERVER),
        owner=name_of(SERVER),
        plan=lab.plan.digest,
        erase=lab.plan.dp is not None,
    )
    with pytest.raises(ConfigError, match="another schedule") as refused:
        LeaderService(
            journal,
            lab.plan,
            lab.cohort,
            first_model=lab.first_model,
            party=lab_party(lab),
            schedule=lab.schedule,
        )
    assert refused.value.hint
    journal.close()


def lab_party(lab: Lab):
    from tessera.rounds.party import ServerParty

    return ServerParty(entropy=lab.entropy())


def test_the_helper_begins_no_round_after_the_last(tmp_path: Path) -> None:
    """Whatever a leader asks of it: there is no noise sized for such a round."""
    lab = Waiting(planned("two-server", rounds=2), tmp_path / "lab", clients=CLIENTS)
    lab.run(2)
    lab.leader.course.plan = lab.plan.with_simulation(rounds=9)  # a leader that goes on
    lab.leader.open_round()
    for party in list(lab.parties):
        if party != SERVER:
            lab._exchange(party)
    assert lab.parties[HELPER].left or lab.parties[HELPER].role.phase == "Left"
    assert all(lab.parties[c].left for c in lab.cohort if lab.parties[c].round_id == RoundId(2))


# --- as deployed, from keys and bundle ------------------------------------------------------------


def test_the_order_is_signed_in_the_directory_and_a_lost_journal_is_known(tmp_path: Path) -> None:
    """Leader and clients have one schedule; a client is registered once in its life."""
    entropy, settings = ScriptedEntropy(b"keys"), planned("two-server")
    bundle = pack_synthetic(settings, CLIENTS, 5)
    everybody = [ClientId(c) for c in range(CLIENTS)]
    keys = tmp_path / "keys"
    make_keys(keys, bundle.digest, settings.federation, everybody, entropy, ["127.0.0.1"])
    leader = open_leader(bundle, keys / "leader", tmp_path / "leader", entropy)
    assert isinstance(leader, LeaderService)
    schedule = leader.course.cohorts.schedule
    assert schedule is not None
    leader.journal.close()
    own = cohorts_of(settings).scheduled(everybody)
    assert own is not None and own.digest != schedule.digest, "it does not follow from the seed"
    rings = [Keyring.read(keys / f"client-{c}", c, bundle.digest) for c in everybody]

    def opened(state: str) -> list[ClientService]:
        made = open_clients(bundle, rings, tmp_path / state, entropy, synthetic_maker(bundle))
        made[0].journal.close()
        return [each for each in made if isinstance(each, ClientService)]

    for state in ("clients", "clients"):  # once more over the same journal
        for client in opened(state):
            assert client.local.place == schedule.place_of(client.client)
            found = client.local.attendance[settings.federation]
            assert (found.last, found.count) == (-1, 0)
    for client in opened("another journal"):
        assert not client.local.attendance, "what it knew is lost, and it knows that"
