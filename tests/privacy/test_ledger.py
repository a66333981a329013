"""Every release is charged before it happens, and the total composes as the answers do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.privacy.dp import accounting
from tessera.privacy.dp.events import (
    THE_COUNTS,
    THE_METRICS,
    THE_SETUP_SUM,
    THE_SHARING,
    THE_SUMS,
    THE_UNION,
    Bounds,
    ExactRelease,
    IndexAnswers,
    NoisySum,
    seen,
    views,
)
from tessera.privacy.dp.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.ledger import BudgetExceeded, Ledger, Limit
from tessera.privacy.dp.mechanism import FixedSizeNoise, GaussianNoise, Mechanism, NoAccount, Unseen
from tessera.privacy.index.exposure import epsilon_after, epsilon_longitudinal, epsilon_per_round
from tessera.privacy.index.response import LEVELS, IndexPrivacy

CPP2, CPP4 = LEVELS["cpp2"], LEVELS["cpp4"]


def answers(
    round_id: int, period: int = 0, privacy: IndexPrivacy = CPP2, federation: str = "f"
) -> IndexAnswers:
    return IndexAnswers(
        federation=federation, period=period, round_id=RoundId(round_id), privacy=privacy
    )


def union(round_id: int) -> ExactRelease:
    return ExactRelease(federation="f", round_id=RoundId(round_id), what="the union")


def charged(*events, budget: float = math.inf) -> Ledger:
    ledger = Ledger(budget=budget)
    for event in events:
        ledger.spend(event, reason=f"round {event.round_id}")
    return ledger


def epsilon(*events) -> float:
    return charged(*events).guarantee().epsilon


def test_an_empty_ledger_has_spent_nothing() -> None:
    assert Ledger().guarantee().epsilon == 0.0


def test_a_period_costs_the_one_time_level_at_first_and_never_more_than_its_permanents() -> None:
    assert epsilon(answers(1)) == pytest.approx(epsilon_per_round(CPP2))
    assert epsilon(answers(1), answers(2)) == pytest.approx(epsilon_after(CPP2, 2))
    many = epsilon(*(answers(r) for r in range(50)))
    assert many == pytest.approx(epsilon_longitudinal(CPP2))
    assert many < 50 * epsilon_per_round(CPP2)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["f", "g"])), max_size=12))
def test_periods_and_federations_add_up(where: list[tuple[int, str]]) -> None:
    events = [answers(r, period, federation=f) for r, (period, f) in enumerate(where)]
    expected = sum(epsilon_after(CPP2, where.count(place)) for place in set(where))
    assert epsilon(*events) == pytest.approx(expected)


def test_the_union_makes_the_number_conditional_and_the_unconditional_one_infinite() -> None:
    ledger = charged(union(1), answers(1))
    given = ledger.guarantee()
    assert given.scope == "per index, given the union"
    assert (given.unit, given.trust) == (Unit.INDEX, Trust.LOCAL)
    assert given.epsilon == pytest.approx(epsilon_per_round(CPP2))
    assert ledger.guarantee(conditional=False).epsilon == math.inf
    assert charged(answers(1)).guarantee(conditional=False).epsilon == given.epsilon


def test_every_exact_release_is_named_in_the_condition() -> None:
    counts = ExactRelease(federation="f", round_id=RoundId(1), what="counts per row")
    assert charged(union(1), counts, union(2)).guarantee().condition == (
        "given the union, counts per row"
    )


def test_what_would_pass_the_budget_is_refused_and_not_recorded() -> None:
    ledger = charged(answers(1), budget=3.0)
    for round_id in range(2, 30):
        ledger.spend(answers(round_id), reason="the period's cap is 2.71")
    before = ledger.entries
    with pytest.raises(BudgetExceeded, match=r"round 30.* 4\.7.* budget of 3") as refused:
        ledger.spend(answers(30, period=1), reason="round 30")
    assert refused.value.hint is not None
    assert ledger.entries == before
    ledger.spend(answers(31, period=1, privacy=LEVELS["cpp5"]), reason="costs nothing")


def test_an_infinite_level_fits_no_finite_budget() -> None:
    with pytest.raises(BudgetExceeded, match="inf"):
        charged(answers(1, privacy=LEVELS["cpp1"]), budget=100.0)
    assert epsilon(answers(1, privacy=LEVELS["cpp1"])) == math.inf


def test_a_round_is_charged_once_and_a_period_has_one_set_of_probabilities() -> None:
    ledger = charged(answers(1))
    with pytest.raises(MisuseError, match="charged already"):
        ledger.spend(answers(1, period=2), reason="again")
    with pytest.raises(MisuseError, match="frozen"):
        ledger.spend(answers(2, privacy=CPP4), reason="other terms")
    ledger.spend(answers(1, federation="g"), reason="another federation's round 1")


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(MisuseError, match="str"):
        Ledger().spend("gaussian noise", reason="nobody knows how it composes")  # type: ignore[arg-type]


def test_a_ledger_made_again_from_its_entries_is_the_same() -> None:
    ledger = charged(union(1), answers(1), answers(2, period=1))
    again = Ledger(entries=ledger.entries)
    assert again.guarantee() == ledger.guarantee()
    assert again.entries == ledger.entries
    # spent is spent, even under a budget that would have refused it
    assert Ledger(budget=0.1, entries=ledger.entries).guarantee() == ledger.guarantee()


@pytest.mark.parametrize("budget", [-1.0, math.nan])
def test_a_budget_is_a_level(budget: float) -> None:
    with pytest.raises(ConfigError, match="budget"):
        Ledger(budget=budget)


# --- noise: one unit, one adjacency, one observer -------------------------------------------------

ADD = Adjacency.ADD_OR_REMOVE
NOISE = GaussianNoise.poisson(2.0, 0.05)


def noisy(
    round_id: int,
    mechanism: Mechanism = NOISE,
    *,
    unit: Unit = Unit.ITEM,
    adjacency: Adjacency = ADD,
    trust: Trust = Trust.LOCAL,
    observers: Iterable[Observer] = Observer,
    what: str = "the noisy update",
    times: int = 1,
    clients: int = 1,
) -> NoisySum:
    return NoisySum(
        federation="f",
        round_id=RoundId(round_id),
        what=what,
        unit=unit,
        adjacency=adjacency,
        trust=trust,
        seen=seen(views(mechanism, observers)),
        times=times,
        clients=clients,
    )


def level(ledger: Ledger, unit: Unit, against: Observer = Observer.LEADER) -> float:
    return ledger.guarantee(unit=unit, against=against, delta=1e-5).epsilon


def account(*parts: tuple[Mechanism, int], adjacency: Adjacency = ADD) -> float:
    return accounting.epsilon(parts, adjacency=adjacency, delta=1e-5)


def test_rounds_of_noise_compose_by_their_privacy_loss() -> None:
    ledger = charged(noisy(1, times=10), noisy(2, times=10), noisy(3, GaussianNoise(9.0)))
    found = ledger.guarantee(unit=Unit.ITEM, against=Observer.READERS, delta=1e-5)
    assert found.epsilon == account((NOISE, 20), (GaussianNoise(9.0), 1))
    assert (found.delta, found.against, found.trust) == (1e-5, Observer.READERS, Trust.LOCAL)
    assert found.adjacency is ADD


def test_each_observer_has_an_account_of_its_own() -> None:
    """A cohort drawn by the leader's coins amplifies for readers and not for the leader."""
    event = NoisySum(
        federation="f",
        round_id=RoundId(1),
        what="the noisy sum",
        unit=Unit.USER,
        adjacency=Adjacency.ZERO_OUT,
        trust=Trust.SHARES,
        seen=seen(
            {
                Observer.READERS: NOISE,
                Observer.LEADER: GaussianNoise(2.0),
                Observer.HELPER: Unseen(),
            }
        ),
    )
    ledger = charged(event)
    assert level(ledger, Unit.USER, Observer.READERS) == account((NOISE, 1))
    assert level(ledger, Unit.USER, Observer.LEADER) == account((GaussianNoise(2.0), 1))
    assert level(ledger, Unit.USER, Observer.HELPER) == 0.0
    # not named: sees the sum itself
    assert level(ledger, Unit.USER, Observer.CLIENTS) == math.inf


def test_a_server_trusted_with_the_sum_has_no_number_against_it() -> None:
    ledger = charged(
        noisy(
            1,
            unit=Unit.USER,
            adjacency=Adjacency.ZERO_OUT,
            trust=Trust.SERVER,
            observers=[Observer.CLIENTS, Observer.READERS],
        )
    )
    assert level(ledger, Unit.USER, Observer.LEADER) == math.inf
    found = ledger.guarantee(unit=Unit.USER, against=Observer.READERS, delta=1e-5)
    assert found.finite
    assert found.trust is Trust.SERVER


@pytest.mark.parametrize(
    "what", [THE_UNION, THE_SUMS, THE_COUNTS, THE_SETUP_SUM, THE_METRICS, THE_SHARING]
)
def test_noise_is_given_what_is_released_exactly(what: str) -> None:
    release = ExactRelease(federation="f", round_id=RoundId(1), what=what)
    ledger = charged(release, noisy(1))
    found = ledger.guarantee(unit=Unit.ITEM, delta=1e-5)
    assert found.condition == f"given {what}"
    assert found.epsilon == account((NOISE, 1))
    assert ledger.guarantee(unit=Unit.ITEM, delta=1e-5, conditional=False).epsilon == math.inf


def test_what_an_observer_does_not_see_is_no_condition_of_its_number() -> None:
    release = ExactRelease(
        federation="f", round_id=RoundId(1), what="metrics", against=frozenset({Observer.LEADER})
    )
    ledger = charged(release, noisy(1))
    readers = ledger.guarantee(
        unit=Unit.ITEM, against=Observer.READERS, delta=1e-5, conditional=False
    )
    assert readers.finite
    assert not readers.condition


def test_different_adjacencies_do_not_compose() -> None:
    fixed = FixedSizeNoise(2.0, 0.05)
    ledger = charged(
        noisy(1), noisy(2, fixed, adjacency=Adjacency.REPLACE, what="a batch of fixed size")
    )
    with pytest.raises(NoAccount, match=r"noisy update \(add or remove\).*fixed size \(replace\)"):
        level(ledger, Unit.ITEM)


def test_noise_has_no_number_without_a_delta() -> None:
    with pytest.raises(ConfigError, match="delta"):
        charged(noisy(1)).guarantee(unit=Unit.ITEM)


# --- upwards, by a stated rule --------------------------------------------------------------------


def test_answers_count_once_per_row_that_a_larger_unit_can_change() -> None:
    bounds = Bounds(rows_per_example=3, rows_per_client=40, clients_per_subject=2)
    ledger = Ledger(bounds=bounds)
    ledger.spend(answers(1), reason="round 1")
    one = epsilon_per_round(CPP2)
    assert level(ledger, Unit.ITEM) == pytest.approx(3 * one)
    assert level(ledger, Unit.USER) == pytest.approx(40 * one)
    assert level(ledger, Unit.SUBJECT) == pytest.approx(80 * one)
    assert level(ledger, Unit.USER, Observer.READERS) == 0.0  # who do not see the answers
    ledger.spend(noisy(1, unit=Unit.USER, adjacency=Adjacency.ZERO_OUT), reason="round 1")
    both = account((NOISE, 1)) + 40 * one
    assert level(ledger, Unit.USER) == pytest.approx(both)


def test_a_replaced_unit_changes_twice_as_many_rows() -> None:
    ledger = Ledger(bounds=Bounds(rows_per_client=40))
    ledger.spend(answers(1), reason="round 1")
    fixed = FixedSizeNoise(2.0, 0.05)
    ledger.spend(noisy(1, fixed, unit=Unit.USER, adjacency=Adjacency.REPLACE), reason="round 1")
    noise = account((fixed, 1), adjacency=Adjacency.REPLACE)
    assert level(ledger, Unit.USER) == pytest.approx(noise + 80 * epsilon_per_round(CPP2))


def test_a_persons_records_are_drawn_each_by_its_own_coin_at_every_client() -> None:
    ledger = Ledger(bounds=Bounds(records_per_subject=10, clients_per_subject=3))
    ledger.spend(noisy(1, times=5), reason="round 1")
    person = ledger.guarantee(unit=Unit.SUBJECT, delta=1e-5)
    assert person.epsilon == account((GaussianNoise.records(2.0, 0.05, of=10, cap=10), 15))
    assert person.assumption == "if at most 3 clients hold a person"
    assert level(ledger, Unit.ITEM) < person.epsilon


def test_records_under_one_noise_add_up_over_all_clients() -> None:
    bounds = Bounds(records_per_subject=5, clients_per_subject=2)
    together = GaussianNoise.records(2.0, 0.05, of=10, cap=10)
    for change in ({"trust": Trust.SERVER}, {"summed": True}):
        ledger = Ledger(bounds=bounds)
        ledger.spend(replace(noisy(1, times=5), **change), reason="round 1")  # type: ignore[arg-type]
        assert level(ledger, Unit.SUBJECT) == account((together, 5))


@pytest.mark.parametrize(
    ("trust", "parts"),
    [
        (Trust.LOCAL, (GaussianNoise(2.0, ((2, 1.0),)), 3)),
        (Trust.SERVER, (GaussianNoise(2.0, ((6, 1.0),)), 1)),
    ],
)
def test_a_persons_clients_each_move_by_two_clips(
    trust: Trust, parts: tuple[Mechanism, int]
) -> None:
    """Each under its own noise, or all of them under one: a signal adds up linearly."""
    ledger = Ledger(bounds=Bounds(clients_per_subject=3))
    ledger.spend(
        noisy(1, unit=Unit.USER, adjacency=Adjacency.ZERO_OUT, trust=trust), reason="round 1"
    )
    assert level(ledger, Unit.SUBJECT) == account(parts)


def test_clients_of_a_subject_are_composed_and_named() -> None:
    ledger = charged(noisy(1, unit=Unit.SUBJECT, times=4, clients=3))
    person = ledger.guarantee(unit=Unit.SUBJECT, delta=1e-5)
    assert person.epsilon == account((NOISE, 12))
    assert person.assumption == "if at most 3 clients hold a person"
    summed = charged(replace(noisy(1, unit=Unit.SUBJECT, times=4, clients=3), summed=True))
    found = summed.guarantee(unit=Unit.SUBJECT, delta=1e-5)
    assert found.epsilon == account((NOISE, 4))  # the three are in the mechanism
    assert found.assumption == person.assumption
    alone = charged(noisy(1, unit=Unit.SUBJECT)).guarantee(unit=Unit.SUBJECT, delta=1e-5)
    assert alone.assumption == "if one client holds all records of a person"


@pytest.mark.parametrize("unit", [Unit.ITEM, Unit.USER, Unit.SUBJECT])
def test_a_bound_that_is_not_stated_is_refused_by_name(unit: Unit) -> None:
    with pytest.raises(NoAccount, match=rf"randomised answers per {unit.value}: rows_per_"):
        level(charged(answers(1)), unit)


@pytest.mark.parametrize(
    ("event", "wanted"),
    [(Unit.USER, Unit.ITEM), (Unit.SUBJECT, Unit.ITEM), (Unit.SUBJECT, Unit.USER)],
)
def test_no_rule_leads_downwards_or_across(event: Unit, wanted: Unit) -> None:
    ledger = charged(noisy(1, unit=event, adjacency=ADD))
    with pytest.raises(NoAccount, match=f"per {wanted.value}.*about one {event.value}"):
        level(ledger, wanted)
    refused = list(
        ledger.guarantees(delta=1e-5, units=[wanted, event], observers=[Observer.LEADER])
    )
    assert isinstance(refused[0], NoAccount)
    assert not isinstance(refused[1], NoAccount)


def test_the_number_per_index_stays_that_of_the_answers_given_noisy_sums_too() -> None:
    ledger = charged(union(1), answers(1), noisy(1))
    found = ledger.guarantee()
    assert found.epsilon == epsilon_per_round(CPP2)
    assert found.condition == "given the union, the noisy update"


# --- limits ---------------------------------------------------------------------------------------


def test_a_release_that_would_pass_a_limit_is_refused_and_not_recorded() -> None:
    allowed = accounting.rounds_within([(NOISE, 1)], adjacency=ADD, epsilon=0.5, delta=1e-5)
    limit = Limit(epsilon=0.5, delta=1e-5, unit=Unit.ITEM, against=Observer.LEADER)
    ledger = Ledger(limits=[limit])
    for round_id in range(allowed):
        ledger.spend(noisy(round_id), reason=f"round {round_id}")
    before = ledger.entries
    with pytest.raises(BudgetExceeded, match=r"per item against leader.* budget of 0\.5"):
        ledger.spend(noisy(allowed), reason="one more")
    assert ledger.entries == before
    assert level(ledger, Unit.ITEM) <= 0.5


def test_a_limit_on_what_has_no_account_refuses_it() -> None:
    limit = Limit(epsilon=9.0, delta=1e-5, unit=Unit.SUBJECT, against=Observer.LEADER)
    ledger = Ledger(limits=[limit])
    with pytest.raises(NoAccount, match="records_per_subject"):
        ledger.spend(noisy(1), reason="round 1")
    assert ledger.entries == ()
    with pytest.raises(ConfigError, match="budget"):
        Limit(epsilon=math.nan, delta=1e-5, unit=Unit.ITEM, against=Observer.LEADER)


def test_noise_is_drawn_and_charged_once_per_round() -> None:
    ledger = charged(noisy(1))
    with pytest.raises(MisuseError, match="charged already"):
        ledger.spend(noisy(1, GaussianNoise(3.0)), reason="again")
    ledger.spend(noisy(1, what="noisy counts"), reason="something else of that round")


@pytest.mark.parametrize("change", [{"unit": Unit.INDEX}, {"clients": 2}, {"times": 0}])
def test_events_that_say_nothing_are_refused(change: dict[str, object]) -> None:
    with pytest.raises((MisuseError, ConfigError)):
        noisy(1, **change)  # type: ignore[arg-type]


def test_an_observer_has_one_view_of_an_event() -> None:
    with pytest.raises(MisuseError, match="twice"):
        NoisySum(
            federation="f",
            round_id=RoundId(1),
            what="the noisy sum",
            unit=Unit.ITEM,
            adjacency=ADD,
            trust=Trust.LOCAL,
            seen=((Observer.LEADER, NOISE), (Observer.LEADER, Unseen())),
        )
