"""The formulas, against the papers' Table 3, enumeration of every outcome, and simulation.

Enumerations must agree to rounding. Simulations have fixed seeds and a bound of five standard
errors, which a correct formula passes but for about one seed in a million.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera.errors import ConfigError
from tessera.privacy.index.exposure import (
    TAOBAO,
    Cohort,
    Holders,
    choose,
    counted,
    epsilon_after,
    epsilon_longitudinal,
    epsilon_per_round,
    event_1,
    event_2,
    expected_bytes,
    expected_rows,
    hypergeometric,
    late_dropout,
    quorum_lost,
    quorum_missed,
)
from tessera.privacy.index.response import LEVELS, IndexPrivacy

PAPER = Cohort(clients=100, holders=TAOBAO)
UNEVEN = IndexPrivacy(p1=0.9, p2=0.2, p3=0.7, p4=0.05)
probabilities = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.01, 0.99))


@st.composite
def privacies(draw: st.DrawFn) -> IndexPrivacy:
    p1, p2, p3, p4 = (draw(probabilities) for _ in range(4))
    assume(p1 * p3 + (1 - p1) * p4 > 0)
    return IndexPrivacy(p1=p1, p2=p2, p3=p3, p4=p4)


# ------------------------------------------------------------------------------------------ Table 3

TABLE_3 = {
    # p5, p6, epsilon_1, epsilon_infinity, p7, p8 as printed (Niu et al. 2020)
    "cpp1": ("100.0", "0.0", "inf", "inf", "86.7", "0.0"),
    "cpp2": ("88.3", "11.7", "2.02", "2.71", "0.0", "10.3"),
    "cpp3": ("78.1", "21.9", "1.27", "1.95", "0.0", "19.5"),
    "cpp4": ("62.5", "37.5", "0.51", "1.10", "0.0", "34.2"),
    "cpp5": ("100.0", "100.0", "0.00", "0.00", "0.0", "0.0"),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_table_3_to_its_printed_digits(name: str) -> None:
    privacy = LEVELS[name]
    ours = (
        f"{100 * privacy.p5:.1f}",
        f"{100 * privacy.p6:.1f}",
        f"{epsilon_per_round(privacy):.2f}",
        f"{epsilon_longitudinal(privacy):.2f}",
        f"{100 * event_1(privacy, PAPER):.1f}",
        f"{100 * event_2(privacy, PAPER):.1f}",
    )
    assert ours == TABLE_3[name]


def test_the_mean_number_of_holders_does_not_give_the_papers_table() -> None:
    """Appendix A checks the table with n1 = 1.17; p7 at CPP1 would then be 0 and not 86.7 %."""
    p5 = LEVELS["cpp2"].p5
    assert round(100 * (1 - p5) ** 1.17, 1) == 8.1
    assert round(100 * event_2(LEVELS["cpp2"], PAPER), 1) == 10.3


# ------------------------------------------------------------------------------------------- levels


def sequence_probability(privacy: IndexPrivacy, real: bool, seen: tuple[bool, ...]) -> float:
    p = privacy.p1 if real else privacy.p2
    given_yes = math.prod(privacy.p3 if s else 1 - privacy.p3 for s in seen)
    given_no = math.prod(privacy.p4 if s else 1 - privacy.p4 for s in seen)
    return p * given_yes + (1 - p) * given_no


@given(privacies(), st.integers(1, 5))
def test_the_level_after_k_rounds_is_the_worst_over_all_sequences(
    privacy: IndexPrivacy, rounds: int
) -> None:
    worst = 0.0
    for seen in itertools.product((True, False), repeat=rounds):
        a = sequence_probability(privacy, True, seen)
        b = sequence_probability(privacy, False, seen)
        if a or b:
            worst = max(worst, abs(math.log(a / b)) if a and b else math.inf)
    assert epsilon_after(privacy, rounds) == pytest.approx(worst, abs=1e-9)


@given(privacies())
def test_one_round_is_the_one_time_level_and_no_number_passes_the_longitudinal(
    privacy: IndexPrivacy,
) -> None:
    levels = [epsilon_after(privacy, k) for k in (1, 2, 3, 10, 100, 10_000)]
    assert levels[0] == pytest.approx(epsilon_per_round(privacy), abs=1e-9)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(levels))  # Theorem 5.4
    assert levels[-1] <= epsilon_longitudinal(privacy)


def test_many_rounds_reach_the_longitudinal_level_unless_they_say_nothing() -> None:
    assert epsilon_after(UNEVEN, 500) == pytest.approx(epsilon_longitudinal(UNEVEN))
    mute = IndexPrivacy(p1=0.9, p2=0.2, p3=0.4, p4=0.4)
    assert epsilon_after(mute, 500) == epsilon_per_round(mute) == 0.0
    assert epsilon_longitudinal(mute) > 2.0  # Lemma 5.2 is a bound, and here a loose one
    assert epsilon_after(UNEVEN, 0) == 0.0


def test_answers_that_only_one_input_can_give_have_no_finite_level() -> None:
    sure = IndexPrivacy(p1=1.0, p2=0.5, p3=1.0, p4=0.0)  # a no proves that the row is not real
    assert epsilon_per_round(sure) == epsilon_longitudinal(sure) == math.inf
    assert epsilon_after(sure, 3) == math.inf
    # a third of p4 = 0.1 keeps one round finite; rounding in p5 must not make it so, nor infinite
    rounded = IndexPrivacy(p1=1.0, p2=0.5, p3=1.0, p4=0.1)
    assert rounded.p5 == 1.0
    assert epsilon_per_round(rounded) == math.inf


def test_levels_far_beyond_what_exp_can_hold_stay_finite() -> None:
    privacy = IndexPrivacy(p1=0.5, p2=0.0, p3=0.9, p4=0.1)
    assert epsilon_after(privacy, 1000) == pytest.approx(1000 * math.log(9) + math.log(0.5))


@given(privacies())
def test_a_single_permanent_answer_at_p5_and_p6_is_never_worse_over_time(
    privacy: IndexPrivacy,
) -> None:
    """Both stages folded into one: the same one-round figures at a lower longitudinal level."""
    assume(all(1e-6 < p < 1 - 1e-6 or p in (0.0, 1.0) for p in (privacy.p5, privacy.p6)))
    folded = IndexPrivacy(p1=privacy.p5, p2=privacy.p6, p3=1.0, p4=0.0)
    assert epsilon_per_round(folded) == pytest.approx(epsilon_per_round(privacy), abs=1e-9)
    assert event_2(folded, PAPER) == pytest.approx(event_2(privacy, PAPER), abs=1e-12)
    assert epsilon_longitudinal(folded) <= epsilon_longitudinal(privacy) + 1e-9


# ------------------------------------------------------------------------------------------- events

STATES = ("silent", "stays", "drops")


def every_outcome(
    privacy: IndexPrivacy, cohort: Cohort
) -> Iterator[tuple[float, list[str], list[bool], set[int]]]:
    """(probability, each client's state, who holds the row, who colludes), all of them."""
    n = cohort.clients
    crowds = list(itertools.combinations(range(n), cohort.colluders))
    for count, share in cohort.holders.by_row:
        holds = [i < count for i in range(n)]
        for crowd in crowds:
            for states in itertools.product(STATES, repeat=n):
                p = share / len(crowds)
                for state, held in zip(states, holds, strict=True):
                    reveal = privacy.p5 if held else privacy.p6
                    p *= {
                        "silent": 1 - reveal,
                        "stays": reveal * (1 - cohort.dropout),
                        "drops": reveal * cohort.dropout,
                    }[state]
                yield p, list(states), holds, set(crowd)


@pytest.mark.parametrize("privacy", [UNEVEN, LEVELS["cpp2"], LEVELS["cpp1"], LEVELS["cpp5"]])
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"min_group": 2},
        {"min_group": 3, "dropout": 0.3},
        {"colluders": 1},
        {"colluders": 2, "dropout": 0.2},
        {"colluders": 1, "min_group": 3, "dropout": 0.2},
        {"colluders": 3, "min_group": 2},
    ],
)
def test_events_agree_with_enumeration(privacy: IndexPrivacy, setting) -> None:
    holders = Holders.of({1: 0.5, 2: 0.3, 4: 0.2})
    cohort = Cohort(clients=4, holders=holders, **setting)
    first = second = 0.0
    for p, states, holds, crowd in every_outcome(privacy, cohort):
        honest = [i for i in range(4) if i not in crowd]
        group = [i for i in honest if states[i] != "silent"]
        if len(group) + len(crowd) < cohort.min_group:  # colluders join every group
            continue
        sum_of = [i for i in group if states[i] == "stays"]
        first += p * (len(sum_of) == 1 and holds[sum_of[0]])
        second += p * (bool(sum_of) and not any(holds[i] for i in sum_of))
    assert event_1(privacy, cohort) == pytest.approx(first, abs=1e-12)
    assert event_2(privacy, cohort) == pytest.approx(second, abs=1e-12)


@pytest.mark.parametrize("privacy", [UNEVEN, LEVELS["cpp1"], LEVELS["cpp5"]])
@pytest.mark.parametrize(("min_group", "dropout"), [(1, 0.3), (2, 0.0), (2, 0.3), (4, 0.5)])
def test_quorums_agree_with_enumeration(privacy, min_group: int, dropout: float) -> None:
    holders = Holders.of({1: 0.5, 2: 0.3, 4: 0.2})
    cohort = Cohort(clients=4, holders=holders, min_group=min_group, dropout=dropout)
    missed = lost = 0.0
    for p, states, _, _ in every_outcome(privacy, cohort):
        before = sum(state != "silent" for state in states)
        after = sum(state == "stays" for state in states)
        missed += p * (before < min_group)
        lost += p * (before >= min_group > after)
    assert quorum_missed(privacy, cohort) == pytest.approx(missed, abs=1e-12)
    assert quorum_lost(privacy, cohort) == pytest.approx(lost, abs=1e-12)


def test_quorum_misses_at_the_papers_size() -> None:
    two, five = (Cohort(clients=100, holders=TAOBAO, min_group=q, dropout=0.2) for q in (2, 5))
    assert quorum_missed(LEVELS["cpp1"], two) == pytest.approx(0.867)
    assert 1e-4 < quorum_lost(LEVELS["cpp2"], two) < 3e-4
    assert 1e-2 < quorum_lost(LEVELS["cpp2"], five) < 3e-2


def test_a_quorum_of_two_more_than_the_colluders_leaves_event_1_to_dropouts() -> None:
    safe = Cohort(clients=50, holders=TAOBAO, colluders=5, min_group=7)
    unsafe = Cohort(clients=50, holders=TAOBAO, colluders=5, min_group=6)
    assert event_1(LEVELS["cpp2"], safe) == 0.0
    assert event_1(LEVELS["cpp2"], unsafe) > 0.0


def test_colluders_help_the_server() -> None:
    found = [
        event_1(LEVELS["cpp2"], Cohort(clients=100, holders=TAOBAO, colluders=c))
        for c in (0, 10, 50, 90)
    ]
    assert found == sorted(found)
    assert found[-1] > 100 * found[0]


@given(st.integers(0, 60), st.floats(0, 1), st.floats(0, 1))
def test_counted_is_the_binomial_expansion(trials: int, a: float, b: float) -> None:
    no, yes = a * (1 - b), b
    weights = counted(trials, no, yes)
    assert weights.shape == (trials + 1,)
    assert float(weights.sum()) == pytest.approx((no + yes) ** trials, abs=1e-9)


def test_hypergeometric_counts_hands_of_cards() -> None:
    found = dict(hypergeometric(6, 2, 3))
    assert found == pytest.approx({0: 4 / 20, 1: 12 / 20, 2: 4 / 20})
    assert dict(hypergeometric(3, 3, 2)) == {2: 1.0}


# -------------------------------------------------------------------------------- rows and dropouts


def test_expected_rows_are_those_of_the_paper_for_disjoint_sets() -> None:
    """Section 5.2: s p5 + (n-1) s p6, exact when every row has one holder."""
    lonely = Cohort(clients=100, holders=Holders.of({1: 1.0}))
    found = expected_rows(UNEVEN, lonely, real=300)
    assert found.union == 100 * 300
    assert found.revealed == pytest.approx(300 * UNEVEN.p5 + 99 * 300 * UNEVEN.p6)
    assert found.succinct == pytest.approx(300 * UNEVEN.p5)
    assert found.permanent == pytest.approx(300 * UNEVEN.p1 + 99 * 300 * UNEVEN.p2)


def test_expected_bytes_count_values_counts_and_a_set_between_empty_and_full() -> None:
    rows = expected_rows(LEVELS["cpp5"], PAPER, real=100)
    found = expected_bytes(rows, width=18, down_bits=16, up_bits=24, count_bits=8)
    assert found.indices == 0.0  # the whole union: nothing to say
    assert found.download == pytest.approx(rows.union * 36)
    assert found.upload == pytest.approx(rows.union * (54 + 1))
    assert found.total == pytest.approx(found.download + found.upload)
    half = IndexPrivacy(p1=0.5, p2=0.5, p3=1.0, p4=0.0)
    rows = expected_rows(half, PAPER, real=100)
    assert expected_bytes(rows, width=18).indices == pytest.approx(rows.union / 8)  # a bitmap


@pytest.mark.parametrize("privacy", [LEVELS["cpp2"], LEVELS["cpp5"], UNEVEN])
@pytest.mark.parametrize("decoys", [0.0, 0.2])
def test_late_dropouts_and_rows_agree_with_simulation(privacy: IndexPrivacy, decoys: float) -> None:
    n, gone, held, catalogue = 20, 3, 6000, 20_000
    holders = Holders.of({1: 0.6, 2: 0.25, 5: 0.15})
    real = held * holders.mean / n
    cohort = Cohort(clients=n, holders=holders)
    claim = late_dropout(privacy, cohort, real=real, gone=gone, decoys=decoys, catalogue=catalogue)
    rows = expected_rows(privacy, cohort, real=real, decoys=decoys, catalogue=catalogue)

    generator = np.random.default_rng(11)
    seen = []
    for _ in range(12):
        owns = np.zeros((catalogue, n), dtype=bool)
        counts = generator.choice(
            [k for k, _ in holders.by_row], size=held, p=[p for _, p in holders.by_row]
        )
        ranks = generator.random((held, n)).argsort(axis=1).argsort(axis=1)
        owns[:held] = ranks < counts[:, None]
        fakes = np.zeros_like(owns)
        for client in range(n):
            chosen = generator.choice(catalogue, size=round(decoys * real), replace=False)
            fakes[chosen, client] = True
        union = (owns | fakes).any(axis=1)
        permanent = generator.random(owns.shape) < np.where(owns, privacy.p1, privacy.p2)
        said = generator.random(owns.shape) < np.where(permanent, privacy.p3, privacy.p4)
        permanent &= union[:, None]
        said &= union[:, None]
        present = np.arange(n) >= gone
        positive = (said & owns & present).any(axis=1)
        empty = union & ~positive
        mine = owns[:, 0]
        seen.append(
            [
                (empty & mine).sum() / mine.sum(),
                empty.sum(),
                (empty & mine).sum() / empty.sum(),
                said[:, 5].sum(),
                permanent[:, 5].sum(),
                (said & owns)[:, 5].sum(),
            ]
        )
    mean = np.mean(seen, axis=0)
    # the last term is for the ratio of expectations, which is not the expected ratio
    error = 5 * np.std(seen, axis=0) / math.sqrt(len(seen)) + 2e-3 * mean
    expected = [
        claim.exposed,
        claim.empty,
        claim.confidence,
        rows.revealed,
        rows.permanent,
        rows.succinct,
    ]
    assert np.all(np.abs(mean - expected) <= error), (mean, expected, error)


def test_without_decoys_a_lone_late_dropout_is_certain_even_at_the_strongest_level() -> None:
    bare = late_dropout(LEVELS["cpp5"], PAPER, real=301)
    covered = late_dropout(LEVELS["cpp5"], PAPER, real=301, decoys=0.1)
    assert bare.exposed == pytest.approx(0.75)
    assert bare.confidence == pytest.approx(1.0)
    assert covered.exposed == bare.exposed
    assert covered.confidence < 0.08


# ------------------------------------------------------------------------------------------ inverse


@given(
    st.floats(0.0, 8.0),
    st.floats(0.0, 1.0),
    st.one_of(st.none(), st.floats(0.5, 120.0)),
    st.sampled_from([0.0, 0.1]),
)
def test_chosen_probabilities_keep_the_level_and_the_traffic(
    epsilon: float, part: float, factor: float | None, decoys: float
) -> None:
    once = epsilon * part
    assume(epsilon > 1e-3 and (once > 1e-3 or once == 0.0))
    found = choose(
        epsilon=epsilon,
        epsilon_one_round=once,
        max_rows_factor=factor,
        cohort=PAPER,
        decoys=decoys,
    )
    assert epsilon_longitudinal(found) <= epsilon + 1e-6
    assert epsilon_per_round(found) <= once + 1e-6
    if factor is not None:
        rows = expected_rows(found, PAPER, real=1.0, decoys=decoys)
        assert rows.revealed <= factor * (1 + 1e-6)


@given(st.floats(0.1, 5.0), st.floats(1.0, 80.0), st.floats(0.01, 1), st.floats(0, 1))
def test_no_other_pair_of_that_level_and_traffic_reveals_more_real_rows(
    epsilon: float, factor: float, weight: float, part: float
) -> None:
    found = choose(epsilon=epsilon, max_rows_factor=factor, cohort=PAPER)
    # any pair of that level lies between (0, 0), (1, 1) and the corner
    corner = 1 / (1 + math.exp(-epsilon))
    a, b = weight * part, weight * (1 - part)
    p5, p6 = a * corner + b, a * (1 - corner) + b
    assert epsilon_per_round(IndexPrivacy(p1=p5, p2=p6, p3=1.0, p4=0.0)) <= epsilon + 1e-6
    traffic = p5 + p6 * (PAPER.clients / TAOBAO.mean - 1)
    assert p5 * min(1.0, factor / traffic) <= found.p5 + 1e-9


def test_the_papers_levels_come_back_from_their_epsilons() -> None:
    for name in ("cpp2", "cpp3", "cpp4"):
        level = LEVELS[name]
        found = choose(
            epsilon=epsilon_longitudinal(level),
            epsilon_one_round=epsilon_per_round(level),
            cohort=PAPER,
        )
        assert (found.p1, found.p2, found.p3, found.p4) == pytest.approx(
            (level.p1, level.p2, level.p3, level.p4)
        )


def test_the_ends_of_the_scale() -> None:
    assert choose(epsilon=math.inf, cohort=PAPER) == LEVELS["cpp1"]
    assert choose(epsilon=math.inf, max_rows_factor=20.0, cohort=PAPER) == LEVELS["cpp1"]
    assert choose(epsilon=0.0, max_rows_factor=1000.0, cohort=PAPER) == LEVELS["cpp5"]


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: Holders.of({1: 0.5, 2: 0.3}), "sum to 0.8"),
        (lambda: Holders.of({0: 0.5, 2: 0.5}), "0=0.5"),
        (lambda: Holders.of({1: -0.5, 2: 1.5}), "1=-0.5"),
        (lambda: Holders.of({1: math.nan}), "nan"),
        (lambda: Holders.of({}), "sum to 0"),
        (lambda: Cohort(clients=1, holders=Holders.of({1: 1.0})), "clients = 1"),
        (lambda: Cohort(clients=2, holders=TAOBAO), "3 holders among 2"),
        (lambda: Cohort(clients=5, holders=TAOBAO, colluders=5), "colluders = 5"),
        (lambda: Cohort(clients=5, holders=TAOBAO, dropout=1.0), "dropout = 1.0"),
        (lambda: Cohort(clients=5, holders=TAOBAO, min_group=0), "min_group = 0"),
        (lambda: expected_rows(UNEVEN, PAPER, real=0), "rows = 0"),
        (lambda: expected_rows(UNEVEN, PAPER, real=10, decoys=-1), "decoys = -1"),
        (lambda: expected_rows(UNEVEN, PAPER, real=300, catalogue=100), "catalogue = 100"),
        (lambda: late_dropout(UNEVEN, PAPER, real=10, gone=100), "gone = 100"),
        (lambda: choose(epsilon=-1.0, cohort=PAPER), "epsilon = -1"),
        (lambda: choose(epsilon=1.0, epsilon_one_round=2.0, cohort=PAPER), "above 1.0"),
        (lambda: choose(epsilon=1.0, max_rows_factor=0.0, cohort=PAPER), "factor = 0.0"),
        (lambda: expected_bytes(expected_rows(UNEVEN, PAPER, real=9), width=0), "width = 0"),
    ],
)
def test_bad_input_is_refused_with_its_value_and_a_way_out(call, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        call()
    assert refused.value.hint is not None
