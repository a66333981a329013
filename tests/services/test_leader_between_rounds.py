"""A leader that tells one thing in one round and another in the next: what it gains, and what not.

Within a round masks follow from the model and the lists that each client was shown
(`tests/rounds/test_one_model.py`). Between rounds a client of one server remembers nothing that it
could compare: the first test is an attack that succeeds, as docs/threat-model.md says.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rounds.population import DENSE, contribution, plan
from services.service_lab import Lab
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import HELPER, ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel
from tessera.plan import DPPlan, Trust, TwoServerPlan
from tessera.protocols.machine import RoundOutcome
from tessera.rounds.messages import RoundResult
from tessera.services.client import TrainingResult
from tessera.services.link import LinkStanding

VICTIM = ClientId(3)


def own_update(client: ClientId, model: np.ndarray) -> np.ndarray:
    """What a client trains on its data, which are the same in every round, from this model."""
    return np.full(DENSE, 0.05 + np.cos(int(client)) / 8) - 0.4 * (model - int(client) / 50)


def lab_of_learners(folder: Path, **more: Any) -> Lab:
    lab = Lab(plan("secure-fedavg", cohort=5, security={"dropout": 0.3}, **more), folder)
    for client in lab.cohort:

        def train(
            _: RoundId, sub: Submodel, __: Secret, client: ClientId = client
        ) -> TrainingResult:
            return TrainingResult(ModelUpdate(own_update(client, sub.dense), 1, sub_tables(sub)))

        lab.parties[client]._train = train
    return lab


def sub_tables(sub: Submodel) -> dict[str, Any]:
    return {
        name: contribution(ClientId(0), name, ids, 3 if name == "goods" else 2)
        for name, ids in sub.trained.items()
    }


def one_round(lab: Lab, among: Iterable[ClientId]) -> RoundResult:
    """The next round as these clients' messages let it end; what the leader learns."""
    opened: list[RoundResult] = []
    leader, tell = lab.leader, lab.leader._outcome_of

    def learnt(hand: Any) -> Any:
        opened.append(hand.role.result)
        return tell(hand)

    leader._outcome_of = learnt  # type: ignore[method-assign]
    chosen = list(among)
    leader.open_round()
    while not leader.is_over:
        moved = [lab._exchange(client) for client in chosen]
        if not any(moved):
            leader.close_overdue()
    for client in chosen:
        lab._exchange(client)
    leader._outcome_of = tell  # type: ignore[method-assign]
    (result,) = opened
    return result


def difference(lab: Lab, *, same_model: bool) -> tuple[np.ndarray, np.ndarray]:
    """(Sum with everybody less the sum without the victim, the victim's update)."""
    shown = lab.leader.model.dense.copy()
    whole = one_round(lab, lab.cohort)
    if same_model:
        lab.leader.course.model = lab.first_model()
    without = one_round(lab, [c for c in lab.cohort if c != VICTIM])
    assert VICTIM in whole.survivors and VICTIM not in without.survivors
    sums = [np.asarray(r.dense) * r.weight for r in (whole, without)]
    return sums[0] - sums[1], own_update(VICTIM, shown)


def test_a_leader_that_shows_a_model_twice_reads_the_update_of_whom_it_leaves_out(
    tmp_path: Path,
) -> None:
    lab = lab_of_learners(tmp_path / "lab")
    found, update = difference(lab, same_model=True)
    np.testing.assert_allclose(found, update, atol=1e-3)
    lab.close()


def test_with_the_model_that_follows_the_difference_is_not_one_clients(tmp_path: Path) -> None:
    lab = lab_of_learners(tmp_path / "lab")
    found, update = difference(lab, same_model=False)
    assert np.abs(found - update).min() > 1e-2
    lab.close()


def test_noise_in_shares_is_in_the_difference_of_two_rounds_twice(tmp_path: Path) -> None:
    noise = DPPlan(unit="user", trust=Trust("shares"), noise=2.0, clip=0.5, epsilon=50.0)
    lab = lab_of_learners(tmp_path / "lab", dp=noise)
    found, update = difference(lab, same_model=True)
    assert np.abs(found - update).max() > 0.1
    assert len(lab.parties[ClientId(0)].local.ledger.entries) >= 2, "and both are charged"
    lab.close()


def test_a_helper_does_not_go_on_with_a_model_that_was_shown_before(tmp_path: Path) -> None:
    lab = Lab(
        plan("two-server", cohort=4, two_server=TwoServerPlan(domain="whole")), tmp_path / "l"
    )
    lab.run(1)
    lab.leader.course.model = lab.first_model()
    lab.leader.open_round()
    for _ in range(4):
        for party in (HELPER, *lab.cohort):
            if not lab.leader.is_over:
                lab._exchange(party)
    assert "another model" in lab.parties[HELPER].left
    assert '"event": "RoundFinished"' not in lab.leader.outcome(RoundId(1))
    lab.close()


@pytest.mark.parametrize("claimed", [RoundOutcome.ABORTED, RoundOutcome.LEFT_OUT])
def test_what_a_leader_says_of_an_end_opens_no_round_again_and_takes_no_charge_back(
    tmp_path: Path, claimed: RoundOutcome
) -> None:
    """It tells one client that the round has failed, and the others that it is done."""
    lab = Lab(plan("secure-fedavg", cohort=5, security={"dropout": 0.3}), tmp_path / "lab")
    lab.leader.open_round()
    for client in lab.cohort:
        lab._exchange(client)
    victim = lab.parties[VICTIM]
    charged = list(victim.local.ledger.entries)
    victim.over(claimed, "so says the leader")
    assert victim.is_over
    with pytest.raises(MisuseError, match="comes after round"):
        victim.begin(LinkStanding(RoundId(0), sent=0, received=0, acknowledged=0))
    assert list(victim.local.ledger.entries) == charged
    lab.kill(VICTIM)
    lab.start(VICTIM)
    assert lab.parties[VICTIM].is_over, "and after a restart, too"
    assert len(lab.parties[VICTIM].local.ledger.entries) == len(charged)
    lab.close()
