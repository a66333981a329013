"""States that are put back to an earlier copy, and what is left on disk when a round has ended."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("h11")

from rounds.population import plan
from services.service_lab import Lab, outgoing, standing_of
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.plan import DPPlan, Trust, TwoServerPlan
from tessera.services.journal import state_of
from tessera.services.link import OldCopy, name_of


def test_a_restored_client_leaves_the_round_and_the_others_go_on(tmp_path: Path) -> None:
    """Its folder is copied before its answer, and put back afterwards."""
    lab = Lab(plan("submodel", cohort=5), tmp_path / "lab")
    client, folder = ClientId(2), tmp_path / "lab" / "client 2"
    lab.kill(client)
    shutil.copytree(folder, tmp_path / "backup")
    lab.start(client)
    lab.leader.open_round()
    lab._exchange(client)
    lab.kill(client)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    lab.start(client)
    standing = standing_of(lab.leader, client)
    assert standing is not None and standing.received > 0
    with pytest.raises(OldCopy, match="old copy"):
        lab.parties[client].begin(standing)
    assert "old copy" in lab.parties[client].left
    for other in [*lab.cohort, *lab.cohort]:
        if other != client:
            lab._exchange(other)
    lab.leader.close_overdue()
    assert '"survivors": 4' in lab.leader.outcome(RoundId(0))
    says_nothing_any_more(lab, client)


@pytest.mark.parametrize("whose", [ClientId(2), HELPER])
def test_a_state_that_is_put_back_to_an_earlier_round_says_nothing_any_more(
    tmp_path: Path, whose: Party
) -> None:
    """The leader remembers in which round it last heard it, and says so."""
    lab = Lab(
        plan("two-server", cohort=4, two_server=TwoServerPlan(domain="whole")), tmp_path / "lab"
    )
    lab.run(1)
    folder = tmp_path / "lab" / name_of(whose)
    lab.kill(whose)
    shutil.copytree(folder, tmp_path / "backup")
    lab.start(whose)
    lab.run(2)
    lab.kill(whose)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    lab.start(whose)
    assert lab.parties[whose].round_id == RoundId(0), "as it was then"
    for _ in range(2):
        says_nothing_any_more(lab, whose)


def says_nothing_any_more(lab: Lab, party: Party) -> None:
    """In the next round, started again or not."""
    lab.leader.stop("to the next one")
    lab.leader.open_round()
    standing = standing_of(lab.leader, party)
    assert standing is not None
    with pytest.raises(OldCopy, match="old copy"):
        lab.parties[party].begin(standing)
    assert outgoing(lab.parties[party]) is None and lab.parties[party].is_over
    lab.kill(party)
    assert "old copy" in state_of(lab.folder / name_of(party))["trouble"]
    lab.start(party)
    assert outgoing(lab.parties[party]) is None and lab.parties[party].is_over


def test_a_helper_keeps_no_report_beyond_its_round(tmp_path: Path) -> None:
    """Sealed to a key that lies beside them: with the leader's half they would tell everything."""
    lab = Lab(
        plan("two-server", cohort=4, two_server=TwoServerPlan(domain="whole")), tmp_path / "lab"
    )
    lab.run(1)
    lab.parties[HELPER].journal.fold()
    held = [
        body
        for (_, sender, receiver, _), body in lab.tap.bodies.items()
        if (sender, receiver) == (SERVER, HELPER) and len(body) > 200
    ]
    assert len(held) >= 2 * lab.plan.cohort, "a query and a report of each client"
    disk = b"".join(each.read_bytes() for each in (tmp_path / "lab" / HELPER).iterdir())
    assert not any(body[at : at + 40] in disk for body in held for at in (60, len(body) // 2))
    lab.kill(HELPER)
    lab.start(HELPER)
    lab.run(2)


@pytest.mark.parametrize("noisy", [True, False])
def test_a_leader_that_draws_noise_empties_its_log_when_a_round_ends(
    tmp_path: Path, noisy: bool
) -> None:
    """Whoever takes its disk later, and has the helper's share, would take the noise off."""
    noise = DPPlan(unit="user", trust=Trust.EACH, noise=2.0, clip=0.5, epsilon=50.0)
    lab = Lab(plan("two-server", cohort=3, dp=noise if noisy else None), tmp_path / "lab")
    emptied: list[bool] = []
    fold = lab.leader.journal.fold
    lab.leader.journal.fold = lambda: emptied.append(fold() is None)  # type: ignore[method-assign]
    lab.run(2)
    assert len(emptied) == (2 if noisy else 0)


def test_a_leader_that_is_an_old_copy_aborts_its_round(tmp_path: Path) -> None:
    lab = Lab(plan("secure-fedavg", cohort=4), tmp_path / "lab")
    lab.leader.open_round()
    lab.leader.handle([], {ClientId(1): (RoundId(0), 7)})
    assert not lab.leader.is_over, "one client says so: it may lie"
    lab.leader.handle([], {ClientId(2): (RoundId(0), 7)})
    assert "old copy" in lab.leader.outcome(RoundId(0))
    assert lab.leader.is_over
