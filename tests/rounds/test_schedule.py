"""A schedule: one place for everybody, in the same order in every pass."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rounds.shops import one_table
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.plan import CohortsPlan, Plan
from tessera.plan.places import drawn_by_seed, most_by_seed
from tessera.privacy.dp.participation import Participation
from tessera.rounds.attendance import Place
from tessera.rounds.cohorts import Cohorts
from tessera.rounds.schedule import Schedule

ENTROPY = ScriptedEntropy(b"a")


def clients(count: int) -> list[ClientId]:
    return [ClientId(3 * c + 1) for c in range(count)]


def planned(cohort: int = 5, rounds: int = 12, **cohorts: object) -> Plan:
    section = CohortsPlan(drawn="schedule", **cohorts)
    plan = one_table("fedavg", 40, cohort=cohort, cohorts=section, security={"dropout": 0.4})
    return plan.with_simulation(rounds=rounds)


@given(
    count=st.integers(1, 90), cohort=st.integers(1, 12), seed=st.binary(min_size=32, max_size=32)
)
def test_everybody_has_one_place_in_a_pass_and_rounds_are_alike(
    count: int, cohort: int, seed: bytes
) -> None:
    schedule = Schedule.drawn(clients(count), cohort, Secret(seed))
    passed = [schedule.of_round(r) for r in range(schedule.rounds)]
    assert sorted(c for each in passed for c in each) == clients(count)
    sizes = [len(each) for each in passed]
    assert max(sizes) <= cohort and max(sizes) - min(sizes) <= 1 and min(sizes) == schedule.fewest
    assert [schedule.of_round(r + 7 * schedule.rounds) for r in range(schedule.rounds)] == passed
    assert schedule.rounds == -(-count // cohort)


def test_places_that_do_not_divide_evenly_make_one_round_more() -> None:
    schedule = Schedule.drawn(clients(6040), 100, Secret(bytes(32)))
    sizes = [len(schedule.of_round(r)) for r in range(schedule.rounds)]
    assert sorted(sizes) == [99] * 60 + [100]


def test_rounds_of_a_client_are_a_pass_apart() -> None:
    drawing = Cohorts(planned(rounds=20), clients(23), ENTROPY)
    rounds = [drawing.sample(RoundId(r)) for r in range(20)]
    for client in clients(23):
        there = [r for r, cohort in enumerate(rounds) if client in cohort]
        assert len(there) == 4 and {b - a for a, b in pairwise(there)} == {5}
        assert drawing.places()[client] == Place(first=there[0], rounds=5)


def test_the_order_follows_from_seed_and_federation_in_a_simulation() -> None:
    def order(plan: Plan) -> list[int]:
        schedule = Cohorts(plan, clients(40), ENTROPY).schedule
        assert schedule is not None
        return schedule.places.tolist()

    plan = planned()
    assert order(plan) == order(plan)
    assert order(replace(plan, seed=plan.seed + 1)) != order(plan)
    assert order(replace(plan, federation="another")) != order(plan)
    places = order(plan)
    assert places != sorted(places)


@given(st.lists(st.tuples(st.integers(0, 59), st.booleans()), max_size=40))
def test_nobody_changes_places_whoever_comes_and_goes(changes: list[tuple[int, bool]]) -> None:
    schedule = Schedule.drawn(clients(23), 5, Secret(bytes(32)))
    there = {int(c) for c in clients(23)}
    for who, comes in changes:
        before = schedule
        there = there | {who} if comes else there - {who}
        schedule = before.among([ClientId(c) for c in there])
        assert schedule.rounds == before.rounds and len(schedule.places) == len(before.places)
        for client in there:
            at = before.place_of(ClientId(client))
            assert at is None or schedule.place_of(ClientId(client)) == at
        placed = schedule.places[schedule.places >= 0]
        assert len(set(placed.tolist())) == len(placed) == min(len(there), len(schedule.places))
        assert set(placed.tolist()) <= there


def test_newcomers_take_free_places_and_leavers_leave_them() -> None:
    drawing = Cohorts(planned(cohort=5), clients(13), ENTROPY)
    assert drawing.schedule is not None and drawing.schedule.fewest == 4
    drawing.admit([ClientId(0), ClientId(2), ClientId(5)])  # two places are free
    assert drawing.schedule is not None and drawing.schedule.clients == 15
    assert drawing.schedule.place_of(ClientId(5)) is None


@pytest.mark.parametrize(
    ("section", "count", "rounds", "said", "hint"),
    [
        ({"separation": 4}, 15, 12, "a pass of 3 rounds", "separation = 3"),
        ({"rounds_per_client": 2}, 15, 12, "nobody may be in the others", "rounds = 6"),
    ],
)
def test_what_clients_and_cohorts_cannot_keep_is_refused(
    section: dict[str, int], count: int, rounds: int, said: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Cohorts(planned(rounds=rounds, **section), clients(count), ENTROPY)
    assert hint in refused.value.hint


def test_a_population_that_shrinks_below_the_schedule_is_refused() -> None:
    plan = planned(rounds=3)
    schedule = Cohorts(plan, clients(15), ENTROPY).schedule
    assert schedule is not None and plan.least_survivors == 3
    gone = set(schedule.of_round(1)[:3])
    left = [c for c in clients(15) if c not in gone]
    with pytest.raises(ConfigError, match="2 clients of 5, and needs 3") as refused:
        Cohorts(plan, left, ENTROPY, schedule=schedule)
    assert "another training" in refused.value.hint


@pytest.mark.parametrize(
    ("section", "rounds", "said"),
    [
        ({"rounds_per_client": 13}, 12, "room for 12"),
        ({"rounds_per_client": 4, "separation": 5}, 12, "room for 3"),
    ],
)
def test_more_participations_than_rounds_are_refused(
    section: dict[str, int], rounds: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        planned(rounds=rounds, **section)
    assert refused.value.hint


def test_what_a_plan_says_of_participation() -> None:
    def bound(**section: object) -> Participation:
        return planned(rounds=61, **section).participation

    assert bound() == Participation(rounds=61, most=61, separation=1)
    assert bound(separation=61) == Participation(rounds=61, most=1, separation=61)
    assert bound(separation=20) == Participation(rounds=61, most=4, separation=20)
    given = bound(rounds_per_client=3, separation=20)
    assert given == Participation(rounds=61, most=3, separation=20)


def test_what_the_seed_gives_anybody_is_counted() -> None:
    plan = one_table("fedavg", 40, cohort=7, seed=5).with_simulation(rounds=30)
    drawing = Cohorts(plan, clients(40), ENTROPY)
    seen = [c for r in range(30) for c in drawing.sample(RoundId(r))]
    assert most_by_seed(plan, 40) == max(np.unique(seen, return_counts=True)[1]) < 30
    assert len(drawn_by_seed(plan, 3, 40)) == 7
