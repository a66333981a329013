"""From a setting to events: whose coins are secret to whom, and who sees only sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.privacy.dp import accounting
from tessera.privacy.dp.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.ledger import BudgetExceeded, Ledger
from tessera.privacy.dp.mechanism import FixedSizeNoise, GaussianNoise, Mechanism
from tessera.privacy.dp.noise_setting import (
    Coins,
    Drawn,
    NoiseSetting,
    Sampling,
    Visibility,
    holders_over_noise,
)

ADD, ZERO = Adjacency.ADD_OR_REMOVE, Adjacency.ZERO_OUT
PLAIN = Visibility(one_by_one=frozenset({Observer.LEADER}), roster=False)
LEADER, CLIENTS, READERS = Observer.LEADER, Observer.CLIENTS, Observer.READERS


def setting(unit: Unit = Unit.ITEM, noise: float = 1.0, **changes: Any) -> NoiseSetting:
    if changes.get("rate", 1.0) < 1.0:
        changes.setdefault("sampling", Sampling.POISSON)
    return NoiseSetting(unit=unit, noise=noise, **changes)


def level(chosen: NoiseSetting, against: Observer, rounds: int = 10) -> float:
    ledger = chosen.ledger(rounds)
    return ledger.guarantee(unit=chosen.unit, against=against, delta=1e-5).epsilon


def account(mechanism: Mechanism, times: int = 10, adjacency: Adjacency = ADD) -> float:
    return accounting.epsilon([(mechanism, times)], adjacency=adjacency, delta=1e-5)


def test_a_clients_own_coins_are_secret_to_everybody() -> None:
    drawn = setting(rate=0.1, steps=3)
    for observer in drawn.sight.observers:
        assert level(drawn, observer) == account(GaussianNoise.poisson(1.0, 0.1), 30)


def test_public_coins_amplify_nothing() -> None:
    public = setting(rate=0.1, coins=Coins.PUBLIC)
    for observer in public.sight.observers:
        assert level(public, observer) == account(GaussianNoise(1.0))


@pytest.mark.parametrize("roster", [True, False])
def test_the_leaders_coins_count_for_those_who_are_not_shown_the_roster(roster: bool) -> None:
    cohort = setting(Unit.USER, rate=0.1, coins=Coins.LEADER, sight=Visibility(roster=roster))
    whole = account(GaussianNoise(1.0), adjacency=ZERO)
    drawn = account(GaussianNoise.poisson(1.0, 0.1), adjacency=ZERO)
    assert level(cohort, LEADER) == whole
    assert level(cohort, READERS) == drawn
    assert level(cohort, CLIENTS) == (whole if roster else drawn)


def test_a_trusted_server_has_no_number_against_it_and_others_have() -> None:
    trusted = setting(Unit.USER, trust=Trust.SERVER, coins=Coins.LEADER)
    assert level(trusted, LEADER) == math.inf
    assert level(trusted, CLIENTS) == account(GaussianNoise(1.0), adjacency=ZERO)
    assert trusted.protected() == (CLIENTS, READERS)


def test_batches_of_fixed_size_are_replaced_and_not_lost() -> None:
    fixed = setting(rate=0.1, sampling=Sampling.FIXED_SIZE)
    assert fixed.adjacency is Adjacency.REPLACE
    assert level(fixed, LEADER) == account(FixedSizeNoise(1.0, 0.1), adjacency=Adjacency.REPLACE)


def test_drawing_records_costs_a_person_more_than_drawing_subjects() -> None:
    subjects = setting(Unit.SUBJECT, rate=0.01)
    records = replace(subjects, drawn=Drawn.RECORDS, records=16, cap=2)
    assert level(subjects, LEADER) == account(GaussianNoise.poisson(1.0, 0.01))
    assert level(records, LEADER) == account(GaussianNoise.records(1.0, 0.01, of=16, cap=2))
    found = records.ledger(1).guarantee(unit=Unit.SUBJECT, delta=1e-5)
    assert "if a person has at most 16 records at a client" in found.assumption
    assert "if one client holds all records of a person" in found.assumption


@pytest.mark.parametrize(("clients", "spent"), [(2, 5.4), (3, 6.6), (10, 12.5)])
def test_every_client_of_a_person_is_composed(clients: int, spent: float) -> None:
    person = setting(Unit.SUBJECT, 0.735, rate=0.01, clients=clients)
    assert level(person, LEADER, rounds=1000) == pytest.approx(spent, abs=0.05)
    # several local steps: the sum is no sum of steps from one model
    steps = replace(person, steps=10, sources=100)
    assert level(steps, LEADER, rounds=100) == pytest.approx(spent, abs=0.05)


@pytest.mark.parametrize(("clients", "spent"), [(2, 8.5), (3, 13.3), (10, 57.6)])
def test_a_servers_noise_for_one_client_meets_all_clients_of_a_person(
    clients: int, spent: float
) -> None:
    person = setting(
        Unit.SUBJECT, 0.735, rate=0.01, clients=clients, trust=Trust.SERVER, coins=Coins.CLIENT
    )
    assert level(person, READERS, rounds=1000) == pytest.approx(spent, abs=0.06)


def test_the_noise_of_others_counts_only_for_those_who_see_nothing_but_sums() -> None:
    person = setting(Unit.SUBJECT, 0.735, rate=0.01, clients=2, sources=8, sight=PLAIN)
    summed = GaussianNoise.clients(0.735 * math.sqrt(8), 0.01, of=2)
    assert level(person, READERS, rounds=1000) == account(summed, 1000)
    assert level(person, LEADER, rounds=1000) == pytest.approx(5.4, abs=0.05)
    found = person.ledger(1).guarantee(unit=Unit.SUBJECT, against=READERS, delta=1e-5)
    assert found.assumption == "if at most 2 clients hold a person"


def test_exact_releases_are_the_condition() -> None:
    given = setting(sight=Visibility(exact=("the union",)))
    assert given.ledger(1).guarantee(unit=Unit.ITEM, delta=1e-5).condition == "given the union"


def test_noise_and_rounds_are_found_for_the_worst_protected_observer() -> None:
    cohort = setting(Unit.USER, rate=0.1, coins=Coins.LEADER, trust=Trust.SERVER)
    noise = cohort.least_noise(epsilon=2.0, delta=1e-5, rounds=20)
    found = replace(cohort, noise=noise)
    assert 1.99 < level(found, CLIENTS, rounds=20) <= 2.0
    assert level(found, READERS, rounds=20) < 1.0
    assert 20 <= found.rounds(epsilon=2.0, delta=1e-5) <= 21


def test_a_ledger_with_these_limits_ends_before_the_round_that_would_pass_them() -> None:
    cohort = setting(Unit.USER, 3.0, rate=0.1, coins=Coins.LEADER)
    lasts = cohort.rounds(epsilon=2.0, delta=1e-5)
    ledger = Ledger(limits=cohort.limits(epsilon=2.0, delta=1e-5), bounds=cohort.bounds)

    def take_part(number: int) -> None:
        for event in cohort.events(federation="f", round_id=RoundId(number)):
            ledger.spend(event, reason=f"round {number}")

    for number in range(lasts):
        take_part(number)
    with pytest.raises(BudgetExceeded, match=f"round {lasts}"):
        take_part(lasts)
    assert ledger.guarantee(unit=Unit.USER, delta=1e-5) == (
        cohort.ledger(lasts).guarantee(unit=Unit.USER, delta=1e-5)
    )


def test_what_a_row_needs_to_rise_over_its_noise() -> None:
    server = setting(Unit.USER, 2.0, trust=Trust.SERVER, coins=Coins.LEADER)
    assert holders_over_noise(server, rows=25, width=4, cohort=100) == pytest.approx(20.0)
    local = setting(Unit.USER, 2.0, coins=Coins.LEADER)
    assert holders_over_noise(local, rows=25, width=4, cohort=100) == pytest.approx(200.0)
    with pytest.raises(ConfigError, match="rows"):
        holders_over_noise(local, rows=0, width=4, cohort=100)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit": Unit.INDEX}, "per index"),
        ({"steps": 0}, "steps"),
        ({"clients": 0}, "clients"),
        ({"records": -1}, "records"),
        ({"noise": 0.0}, "noise"),
        ({"rate": 0.0}, "rate 0"),
        ({"rate": 0.5, "sampling": Sampling.NONE}, "rate of 0.5"),
        ({"sampling": Sampling.POISSON}, "rate of 1"),
        ({"trust": Trust.SERVER, "steps": 2}, "protects none"),
        ({"unit": Unit.USER, "rate": 0.5}, "draws itself"),
        ({"unit": Unit.SUBJECT, "drawn": Drawn.RECORDS, "rate": 0.5}, "without a bound"),
        (
            {
                "unit": Unit.SUBJECT,
                "drawn": Drawn.RECORDS,
                "records": 3,
                "rate": 0.5,
                "sampling": Sampling.FIXED_SIZE,
            },
            "fixed size",
        ),
    ],
)
def test_settings_that_claim_nothing_are_refused_with_a_hint(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        setting(**changes)
    assert refused.value.hint is not None
