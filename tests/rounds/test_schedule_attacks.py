"""A leader that chooses cohorts as it likes: what clients refuse, and what it could do otherwise.

Each check is switched off once, to see that the attack is one.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rounds.population import federation, plan
from tessera.crypto.correlated import BandedInverse
from tessera.errors import RoundRefused
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import Submodel
from tessera.plan import CohortsPlan, Plan
from tessera.privacy.dp.correlation import Correlation
from tessera.rounds import party
from tessera.rounds.attendance import Attendance, Place, attended
from tessera.rounds.cohorts import Cohorts
from tessera.simulation.federation import Federation

ROUNDS, MOST, APART, CLIENTS, COHORT = 12, 3, 4, 16, 4
VICTIM = ClientId(5)
INVERSE = BandedInverse((-(1 << 23), -(1 << 21)))  # 1, -1/2, -1/8


def planned() -> Plan:
    section = CohortsPlan(drawn="schedule", rounds_per_client=MOST, separation=APART)
    return plan(
        "submodel",
        cohort=COHORT,
        cohorts=section,
        security={"dropout": 0.5},
        simulation={"rounds": ROUNDS},
    )


def attacked(monkeypatch: pytest.MonkeyPatch, asked: set[int], place: Place) -> list[int]:
    """The rounds in which the victim has trained, if a leader invites it in these, too.

    `place` is what the victim was told of the schedule.
    """
    fed: Federation = federation(planned(), clients=CLIENTS)
    fed.participants[VICTIM].local.place = place
    honest, train = Cohorts.sample, fed._trainer
    there: list[int] = []

    def sample(self: Cohorts, round_id: RoundId) -> list[ClientId]:
        others = [c for c in honest(self, round_id) if c != VICTIM]
        return sorted([*others[: COHORT - 1], VICTIM]) if int(round_id) in asked else others

    def trained(round_id: RoundId, submodels: dict[ClientId, Submodel]):
        if VICTIM in submodels:
            there.append(int(round_id))
        return train(round_id, submodels)

    monkeypatch.setattr(Cohorts, "sample", sample)
    fed._trainer = trained
    list(fed.run(ROUNDS))
    return there


def moved(rounds: list[int]) -> float:
    """|C d| of a client that sends the same vector of length 1 in these rounds."""
    c = Correlation(INVERSE, planned().participation).coefficients
    columns = [np.concatenate([np.zeros(r), c[: ROUNDS - r]]) for r in rounds]
    return float(np.linalg.norm(np.sum(columns, axis=0))) if rounds else 0.0


def careless(**loose: int) -> Callable[..., Attendance]:
    """A client whose check of this is looser than the plan."""

    def attends(settings, servers, round_id, stored, place):
        section = replace(settings.cohorts, **loose)
        try:
            return attended(settings, servers, round_id, stored, place)
        except RoundRefused:
            bound = section.bound(ROUNDS)
            early = int(round_id) - stored.last < bound.separation
            if early or stored.count >= bound.most:
                raise
            return replace(stored, last=int(round_id), count=stored.count + 1)

    return attends


EARLY = {0, APART - 1, 2 * (APART - 1), 3 * (APART - 1)}


@pytest.mark.parametrize(
    ("asked", "place", "loose"),
    [
        (EARLY, Place(first=0, rounds=APART - 1), {"separation": APART - 1}),
        (
            set(range(0, ROUNDS, 2)),
            Place(first=0, rounds=2),
            {"separation": 2, "rounds_per_client": MOST + 1},
        ),
    ],
)
def test_no_leader_moves_the_sum_by_more_than_the_claim(
    asked: set[int], place: Place, loose: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Correlation(INVERSE, planned().participation).sensitivity
    kept = attacked(monkeypatch, asked, place)
    assert 0 < moved(kept) <= claim
    monkeypatch.undo()
    monkeypatch.setattr(party, "attended", careless(**loose))
    broken = attacked(monkeypatch, asked, place)
    assert moved(broken) > claim, (broken, kept)


def test_one_participation_more_than_is_sized_for_breaks_the_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Independent noise: every round of a client adds to its square."""
    section = CohortsPlan(drawn="seed", rounds_per_client=2)
    settings = replace(planned(), cohorts=section)
    monkeypatch.setattr("rounds.test_schedule_attacks.planned", lambda: settings)
    claim = Correlation(BandedInverse(), settings.participation).sensitivity
    assert claim == pytest.approx(2**0.5)
    kept = attacked(monkeypatch, set(range(ROUNDS)), None)  # type: ignore[arg-type]
    assert len(kept) == 2

    def one_more(settings, servers, round_id, stored, place):
        if stored.count == 2:
            return replace(stored, last=int(round_id), count=3)
        return attended(settings, servers, round_id, stored, place)

    monkeypatch.setattr(party, "attended", one_more)
    assert len(attacked(monkeypatch, set(range(ROUNDS)), None)) ** 0.5 > claim  # type: ignore[arg-type]
