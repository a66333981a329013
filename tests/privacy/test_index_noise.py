"""The account of noise per index: whole vectors, what is exact beside it, and the user's number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.privacy.dp import accounting
from tessera.privacy.dp.events import (
    THE_COUNTS,
    THE_METRICS,
    THE_ROWS,
    THE_SUMS,
    THE_UNION,
    THE_WRITTEN_ROWS,
    ExactRelease,
    IndexAnswers,
)
from tessera.privacy.dp.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.dp.mechanism import GaussianNoise, NoAccount, PureLevel
from tessera.privacy.dp.noise_setting import (
    MARKS_MOVE,
    NoiseSetting,
    Sampling,
    SummedVector,
    Visibility,
    row_moves,
)
from tessera.privacy.index.exposure import epsilon_after
from tessera.privacy.index.response import LEVELS, IndexPrivacy
from tessera.services.journal_stores import event_of, event_text

DELTA = 1e-5
VECTOR = SummedVector(words=1000, bound=30_000.0, honest="if somebody is")
READERS = Observer.READERS


def setting(**changes: object) -> NoiseSetting:
    values: dict[str, object] = {
        "unit": Unit.INDEX,
        "noise": 2.0,
        "trust": Trust.SHARES,
        "vector": VECTOR,
        "sources": 4,
        "row_moves": 0.5,
    }
    return NoiseSetting(**(values | changes))  # type: ignore[arg-type]


CENTRAL = setting(trust=Trust.SERVER, vector=None, sources=1)


def number(of: NoiseSetting, unit: Unit = Unit.INDEX, rounds: int = 10) -> float:
    return of.ledger(rounds).guarantee(unit=unit, against=READERS, delta=DELTA).epsilon


def test_a_row_moves_two_clipped_gradients_of_each_of_its_examples() -> None:
    assert row_moves(4, 0.05) == pytest.approx(0.4)
    assert row_moves(4, 0.5, clip=2.0) == pytest.approx(2.0)
    expected = accounting.epsilon(
        [(GaussianNoise(4.0), 10)], adjacency=Adjacency.ADD_OR_REMOVE, delta=DELTA
    )
    assert number(CENTRAL) == expected  # noise 2 over half a clip


@settings(max_examples=25, deadline=None)
@given(moves=st.floats(0.01, 2.0), noise=st.floats(1.0, 20.0), rounds=st.integers(1, 50))
def test_a_row_never_costs_more_than_a_client_that_is_replaced(
    moves: float, noise: float, rounds: int
) -> None:
    """Two clipped vectors; and it is less than the user's number, zeros, only below one clip."""
    one = setting(row_moves=moves, noise=noise)
    user = number(one, Unit.USER, rounds)
    replaced = number(setting(row_moves=2.0, noise=noise), rounds=rounds)
    index = number(one, rounds=rounds)
    assert index <= replaced
    assert (index < user) is (moves < 1.0) or index == pytest.approx(user, rel=1e-6)
    assert user == pytest.approx(number(setting(row_moves=1.0, noise=noise), rounds=rounds))
    beside = one.ledger(rounds).guarantee(unit=Unit.INDEX, against=READERS, delta=DELTA)
    assert beside.per_user == user and f"per user {user:.4g}" in beside.scope
    assert ("no more" in beside.scope) is (user <= index)


def test_the_users_number_is_that_of_a_plan_per_user() -> None:
    for one in (setting(), CENTRAL):
        same = replace(one, unit=Unit.USER, row_moves=0.0)
        assert number(one, Unit.USER) == number(same, Unit.USER)


def test_clients_that_clip_examples_alone_have_no_number_per_user() -> None:
    local = setting(trust=Trust.LOCAL, vector=None, sources=1, clipped=False, steps=3)
    found = local.ledger(2).guarantee(unit=Unit.INDEX, against=READERS, delta=DELTA)
    assert math.isfinite(found.epsilon) and found.per_user == math.inf
    assert "no number per user" in found.scope
    with pytest.raises(NoAccount, match="does not bound how many examples"):
        number(local, Unit.USER)


@pytest.mark.parametrize("what", [THE_UNION, THE_SUMS, THE_COUNTS, THE_ROWS, THE_WRITTEN_ROWS])
def test_what_shows_which_rows_there_are_leaves_no_number(what: str) -> None:
    exact = setting(sight=Visibility(exact=(what,)))
    assert number(exact) == math.inf
    assert math.isfinite(number(exact, Unit.USER))  # "given the union", as it was


def test_other_exact_releases_are_a_condition() -> None:
    found = setting(sight=Visibility(exact=(THE_METRICS,))).ledger(2)
    index = found.guarantee(unit=Unit.INDEX, against=READERS, delta=DELTA)
    assert math.isfinite(index.epsilon) and index.condition == f"given {THE_METRICS}"


def answered(rounds: int, privacy: IndexPrivacy, periods: int = 1) -> Ledger:
    ledger = setting().ledger(3)
    for at in range(rounds):
        event = IndexAnswers(
            federation="f", period=at % periods, round_id=RoundId(at), privacy=privacy
        )
        ledger.spend(event, reason="answers", planned=math.inf)
    return ledger


ONCE = IndexPrivacy(p1=0.75, p2=0.25, p3=1.0, p4=0.0)


def test_answers_that_never_change_are_composed_in() -> None:
    ledger = answered(4, ONCE)
    found = ledger.guarantee(unit=Unit.INDEX, against=Observer.LEADER, delta=DELTA)
    noise = setting().parts(Observer.LEADER, 3)
    level = PureLevel(epsilon_after(ONCE, 4))
    expected = accounting.epsilon(
        [*noise, (level, 1)], adjacency=Adjacency.ADD_OR_REMOVE, delta=DELTA
    )
    assert found.epsilon == expected > number(setting(), rounds=3)


@pytest.mark.parametrize(("privacy", "periods"), [(LEVELS["cpp2"], 1), (ONCE, 2)])
def test_answers_that_are_drawn_again_leave_no_number(privacy: IndexPrivacy, periods: int) -> None:
    ledger = answered(4, privacy, periods)
    found = ledger.guarantee(unit=Unit.INDEX, against=Observer.LEADER, delta=DELTA)
    assert found.epsilon == math.inf


def test_without_a_delta_the_number_is_of_the_answers_alone() -> None:
    found = setting().ledger(3).guarantee(unit=Unit.INDEX)
    assert found.epsilon == 0.0 and found.delta == 0.0 and "noisy sums" in found.condition


def test_marks_of_rows_move_by_less_than_two_lengths() -> None:
    """Popularity once, with all its noise; a row may take others with it out of the marks."""
    selected = replace(CENTRAL, selection=3.0)
    (marks,) = selected.selection_events()
    mechanism = marks.view(READERS)
    assert isinstance(mechanism, GaussianNoise)
    assert mechanism.noise == pytest.approx(2.0 * 3.0 / MARKS_MOVE)
    assert marks.unit is Unit.INDEX and marks.of_client == pytest.approx(1.0 / MARKS_MOVE)
    assert number(selected) > number(CENTRAL)


def test_noise_on_a_rows_own_words_is_no_claim_about_an_index() -> None:
    (event,) = setting().events()
    with pytest.raises(MisuseError, match="moves other rows and the dense part"):
        replace(event, of_client=0.0)


def test_an_index_event_is_stored_and_read_back() -> None:
    for one in (setting(), setting(vector=None, trust=Trust.LOCAL, clipped=False, sources=1)):
        for event in one.events():
            assert event_of(event_text(event)) == event


def test_what_has_no_account_is_refused() -> None:
    with pytest.raises(ConfigError, match="no account per index"):
        setting(row_moves=0.0)
    with pytest.raises(ConfigError, match="no account per user"):
        setting(unit=Unit.USER)
    with pytest.raises(ConfigError, match="drawn have no account"):
        setting(rate=0.5, sampling=Sampling.POISSON)
    with pytest.raises(ConfigError, match="0 examples per row"):
        row_moves(0, 1.0)


def test_exact_releases_against_others_do_not_count() -> None:
    ledger = setting().ledger(2)
    before = ledger.guarantee(unit=Unit.INDEX, against=READERS, delta=DELTA).epsilon
    release = ExactRelease(
        federation="f",
        round_id=RoundId(0),
        what=THE_UNION,
        against=frozenset({Observer.LEADER}),
    )
    ledger.spend(release, reason="union")
    assert ledger.guarantee(unit=Unit.INDEX, against=READERS, delta=DELTA).epsilon == before
    found = ledger.guarantee(unit=Unit.INDEX, against=Observer.LEADER, delta=DELTA)
    assert found.epsilon == math.inf
