"""Every release is charged before it happens, and the total composes as the answers do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.privacy.exposure import epsilon_after, epsilon_longitudinal, epsilon_per_round
from tessera.privacy.guarantee import Trust, Unit
from tessera.privacy.ledger import BudgetExceeded, ExactRelease, IndexAnswers, Ledger
from tessera.privacy.response import LEVELS, IndexPrivacy

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


def test_a_periods_own_share_can_be_read() -> None:
    ledger = charged(answers(1), answers(2, period=1, privacy=CPP4))
    assert ledger.spent_in("f", 1) == pytest.approx(epsilon_per_round(CPP4))
    assert ledger.spent_in("f", 9) == 0.0


@pytest.mark.parametrize("budget", [-1.0, math.nan])
def test_a_budget_is_a_level(budget: float) -> None:
    with pytest.raises(ConfigError, match="budget"):
        Ledger(budget=budget)
