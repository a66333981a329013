"""Naming attacks: posteriors against brute force, calibration, and the rates of known settings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import MisuseError
from tessera.privacy.index.exposure import TAOBAO, Holders, epsilon_after
from tessera.privacy.index.identification_forecast import Setting, simulate, transcripts, within
from tessera.privacy.index.posterior import (
    SURE,
    best_guesses,
    chance_of_guess,
    log_ratio_table,
    pack,
    posterior,
    rate,
    size_prior,
    unpack,
)
from tessera.privacy.index.response import LEVELS, IndexPrivacy, Perturbation

ONE_STAGE = IndexPrivacy(p1=5 / 8, p2=3 / 8, p3=1.0, p4=0.0)  # CPP4's p5 and p6
ONE_HOLDER = Holders.of({1: 1.0})
COHORT = Setting(privacy=LEVELS["cpp4"], cohort=30, rounds=12, holders=TAOBAO)


def brute_force(
    active: np.ndarray,
    positive: np.ndarray,
    known: np.ndarray,
    ratio: np.ndarray,
    prior: np.ndarray,
    period: np.ndarray,
    perturbation: Perturbation,
) -> np.ndarray | None:
    """Every holder set, and within it every choice of who offers the row in which period.

    active (clients, rounds), ratio (clients, periods): P(answers | offered) / P(answers | not).
    """
    clients, periods = ratio.shape
    keep, add = perturbation.keep, perturbation.add
    total, found = 0.0, np.zeros(clients)
    for size in range(min(clients, len(prior) - 1) + 1):
        for members in itertools.combinations(range(clients), size):
            weight = prior[size] / math.comb(clients, size)
            for u in set(range(clients)) - set(members):
                weight *= math.prod(add * ratio[u] + 1.0 - add)
            for t in range(periods):
                rounds = (period == t) & known
                ways = 0.0
                for offers in itertools.product((True, False), repeat=size):
                    trains = [u for u, o in zip(members, offers, strict=True) if o]
                    seen = active[trains].any(axis=0) if trains else np.zeros(len(period), bool)
                    if (seen == positive)[rounds].all():
                        ways += math.prod(
                            keep * ratio[u, t] if o else 1.0 - keep
                            for u, o in zip(members, offers, strict=True)
                        )
                weight *= ways
            total += weight
            found[list(members)] += weight
    return found / total if total > 0.0 else None


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "clients": st.integers(2, 6),
        "rounds": st.integers(1, 7),
        "periods": st.integers(1, 3),
        "keep": st.sampled_from([1.0, 0.8, 0.5]),
        "add": st.sampled_from([0.0, 0.1]),
        "unknown": st.sampled_from([0.0, 0.3]),
        "density": st.sampled_from([0.2, 0.5, 1.0]),
        "spread": st.sampled_from([0.0, 1.0, 6.0]),
        "truthful": st.booleans(),
    }
)


@settings(max_examples=400)
@given(CASES)
def test_the_posterior_is_that_of_all_holder_sets(case: dict) -> None:
    rng = np.random.default_rng(case["seed"])
    clients, rounds, periods = case["clients"], case["rounds"], case["periods"]
    active = rng.random((clients, rounds)) < case["density"]
    period = np.sort(rng.integers(0, periods, rounds))
    known = rng.random(rounds) >= case["unknown"]
    log_lr = case["spread"] * rng.standard_normal((clients, periods))
    prior = rng.dirichlet(np.ones(5))
    prior[rng.integers(5)] = 0.0
    perturbation = Perturbation(keep=case["keep"], add=case["add"])
    if case["truthful"]:
        holders = rng.choice(clients, min(clients, int(rng.integers(1, 4))), replace=False)
        offers = rng.random((len(holders), periods)) < case["keep"]
        positive = (active[holders] & offers[:, period]).any(axis=0)
    else:
        positive = rng.random(rounds) < 0.5
    expected = brute_force(active, positive, known, np.exp(log_lr), prior, period, perturbation)
    plain = case["keep"] == 1.0 and case["add"] == 0.0
    found = posterior(
        pack(active[None]),
        pack(positive[None]),
        log_lr[None].sum(axis=2) if plain else log_lr[None],
        prior,
        known=pack(known[None]),
        periods=pack(period == np.arange(periods)[:, None]),
        perturbation=None if plain else perturbation,
    )
    assert found.exact[0] == (expected is not None)
    if expected is not None:
        np.testing.assert_allclose(found.holds[0], expected, rtol=1e-9, atol=1e-12)


def test_a_row_whose_every_client_is_excluded_has_no_holder() -> None:
    active, positive = np.ones((2, 1), dtype=bool), np.zeros(1, dtype=bool)
    prior = np.array([0.5, 0.25, 0.25])
    found = posterior(pack(active[None]), pack(positive[None]), np.zeros((1, 2)), prior)
    assert found.exact[0] and found.holds[0].tolist() == [0.0, 0.0]


def test_what_was_not_seen_excludes_nobody_and_asks_for_nobody() -> None:
    active, positive = np.eye(3, dtype=bool), np.array([True, False, False])
    seen = posterior(pack(active[None]), pack(positive[None]), np.zeros((1, 3)), np.array([0, 1]))
    assert seen.holds[0].tolist() == [1.0, 0.0, 0.0]
    known = np.array([False, True, False])
    found = posterior(
        pack(active[None]),
        pack(positive[None]),
        np.zeros((1, 3)),
        np.array([0, 1]),
        known=pack(known[None]),
    )
    assert found.holds[0].tolist() == [0.5, 0.0, 0.5]


def test_clients_with_one_trace_share_what_is_known() -> None:
    active = np.ones((1, 6, 200), dtype=bool)
    found = posterior(pack(active), pack(active[:, 0]), np.zeros((1, 6)), np.array([0, 0, 1.0]))
    assert found.exact.all()
    np.testing.assert_allclose(found.holds, 2 / 6)


def test_a_row_that_nobody_can_hold_is_not_called_exact() -> None:
    active, positive = np.zeros((1, 3, 2), dtype=bool), np.ones((1, 2), dtype=bool)
    found = posterior(pack(active), pack(positive), np.zeros((1, 3)), np.array([0, 0.5, 0.5]))
    assert not found.exact[0]


def test_evidence_that_does_not_fit_together_is_refused() -> None:
    active, positive = pack(np.ones((1, 3, 2), bool)), pack(np.ones((1, 2), bool))
    with pytest.raises(MisuseError, match="traces"):
        posterior(active, positive, np.zeros((1, 4)), np.array([0, 1]))
    with pytest.raises(MisuseError, match="by period"):
        kept = Perturbation(keep=0.5, add=0.0)
        posterior(active, positive, np.zeros((1, 3)), np.array([0, 1]), perturbation=kept)
    with pytest.raises(MisuseError, match="12 rounds of 30 out of 20"):
        replace(COHORT, population=20)


@pytest.mark.parametrize("rounds", [0, 1, 63, 64, 65, 130])
def test_packed_rounds_come_back(rounds: int) -> None:
    bits = np.random.default_rng(rounds).random((2, 3, rounds)) < 0.5
    words = pack(bits)
    assert words.shape == (2, 3, max(1, -(-rounds // 64)))
    assert (unpack(words, rounds) == bits).all()


@pytest.mark.parametrize("name", ["cpp1", "cpp2", "cpp3", "cpp4", "cpp5"])
def test_ratios_of_answers_stay_within_the_level_and_reach_it(name: str) -> None:
    table = log_ratio_table(LEVELS[name], 20)
    for k in (1, 2, 7, 20):
        level = min(epsilon_after(LEVELS[name], k), SURE)
        assert np.abs(table[k, : k + 1]).max() == pytest.approx(level)
    assert np.isfinite(table).all()
    # one round, by hand: yes and no after either permanent answer
    privacy = LEVELS["cpp3"]
    once = log_ratio_table(privacy, 1)
    assert once[1, 1] == pytest.approx(math.log(privacy.p5 / privacy.p6))
    assert once[1, 0] == pytest.approx(math.log((1 - privacy.p5) / (1 - privacy.p6)))


@pytest.mark.parametrize(
    "setting",
    [
        replace(COHORT, rounds=3),
        COHORT,
        replace(COHORT, privacy=LEVELS["cpp2"], rounds=8, dropout=0.2, min_group=2),
        replace(COHORT, population=60, rounds=6),
        replace(COHORT, rounds=4, period_rounds=2),
        replace(COHORT, rounds=6, perturbation=Perturbation(keep=0.8, add=0.05)),
        replace(COHORT, rounds=6, period_rounds=3, perturbation=Perturbation(keep=0.8, add=0.05)),
        replace(COHORT, rounds=6, holders=Holders.of({1: 0.2, 4: 0.5, 6: 0.3})),
        replace(COHORT, group=10, rounds=5, dropout=0.05, privacy=LEVELS["cpp5"]),
    ],
    ids=["few", "many", "dropouts", "random", "periods", "kept", "kept twice", "popular", "group"],
)
def test_a_posterior_is_right_as_often_as_it_says(setting: Setting) -> None:
    """In each bin of posteriors the share of true holders is within 4 standard errors."""
    prior = size_prior(setting.looked_for)
    found = [(t.posterior(prior), t.truth) for t in transcripts(setting, rows=500, seed=5)]
    exact = np.concatenate([p.exact for p, _ in found])
    assert exact.mean() > 0.98
    holds = np.concatenate([p.holds for p, _ in found])[exact]
    truth = np.concatenate([t for _, t in found])[exact]
    edges = [0.0, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0 + 1e-9]
    for low, high in itertools.pairwise(edges):
        inside = (holds >= low) & (holds < high)
        if inside.sum() < 50:
            continue
        said, right = holds[inside].mean(), truth[inside].mean()
        error = math.sqrt((holds[inside] * (1.0 - holds[inside])).sum()) / inside.sum()
        assert abs(right - said) <= 4.0 * error + 1e-6, (low, high, said, right)


def test_more_rounds_name_more() -> None:
    named = [simulate(replace(COHORT, rounds=k), rows=200).identified_share for k in (2, 4, 8, 16)]
    assert named == sorted(named)
    assert named[0] < 0.3 and named[-1] > 0.8


def test_a_guess_is_as_good_as_chance_where_all_leave_one_trace() -> None:
    group = replace(COHORT, group=10, privacy=LEVELS["cpp5"], rounds=40, holders=ONE_HOLDER)
    found = simulate(group, rows=2000)
    assert found.identified == 0
    assert found.best_guess == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 2000))


def test_random_cohorts_name_everybody_even_where_all_name_the_whole_union() -> None:
    drawn = replace(COHORT, privacy=LEVELS["cpp5"], population=120, holders=ONE_HOLDER)
    assert simulate(replace(drawn, rounds=4), rows=200).identified_share < 0.1
    assert simulate(replace(drawn, rounds=44), rows=200).identified_share > 0.9


def test_dropouts_name_holders_where_all_name_the_whole_union() -> None:
    whole = replace(COHORT, privacy=LEVELS["cpp5"], rounds=40, holders=ONE_HOLDER)
    assert simulate(whole, rows=200).identified == 0
    assert simulate(replace(whole, dropout=0.1), rows=200).identified_share > 0.8


def test_belief_propagation_guesses_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = simulate(COHORT, rows=400)
    monkeypatch.setattr("tessera.privacy.index.posterior.MOST_STATES", 0)
    monkeypatch.setattr("tessera.privacy.index.posterior.MOST_CLASSES", 0)
    prior = size_prior(TAOBAO)
    assert not any(t.posterior(prior).exact.any() for t in transcripts(COHORT, rows=20))
    approximate = simulate(COHORT, rows=400)
    assert abs(approximate.best_guess - exact.best_guess) < 0.05
    assert approximate.identified_precision > 0.9


def test_the_chance_of_a_guess_is_the_mean_over_the_draws_among_equals() -> None:
    rng = np.random.default_rng(7)
    holds = rng.choice([0.0, 0.2, 0.2, 0.9], size=(30, 6))
    truth = rng.random((30, 6)) < 0.4
    taken = np.zeros(holds.shape)
    for seed in range(2_000):
        found = best_guesses(holds, truth, np.random.default_rng(seed))
        taken[found.rows, found.clients] += 1 / 2_000
    for client in range(6):
        chances = chance_of_guess(holds, truth.sum(axis=1), client)
        assert np.abs(chances - taken[:, client]).max() < 0.06  # five deviations
    equal = np.full((1, 10), 0.1)
    assert chance_of_guess(equal, np.array([1]), 3).tolist() == [0.1]


def test_best_guesses_are_as_many_as_holders_and_ties_go_by_lot() -> None:
    truth = np.array([[True, True, False, False], [False, True, False, False]])
    holds = np.array([[0.9, 0.2, 0.1, 0.8], [0.25, 0.25, 0.25, 0.25 + 1e-13]])
    right = [
        best_guesses(holds, truth, np.random.default_rng(seed)).right.tolist()
        for seed in range(200)
    ]
    assert all(r[:2] == [True, False] for r in right)
    assert 25 <= sum(r[2] for r in right) <= 75  # a quarter of 200


def test_rates_count_pairs() -> None:
    truth = np.array([[True, False], [True, True]])
    holds = np.array([[0.95, 0.05], [0.95, 0.5]])
    found = rate(holds, truth, np.random.default_rng(0))
    assert (found.pairs, found.right, found.identified, found.identified_right) == (3, 3, 2, 2)
    assert found.identified_share == pytest.approx(2 / 3)
    assert found.identified_precision == found.best_guess == found.most_confident == 1.0
    nobody = rate(np.zeros((0, 2)), np.zeros((0, 2), bool), np.random.default_rng(0))
    assert nobody.best_guess == nobody.identified_share == nobody.most_confident == 0.0


def test_holders_within_a_part_of_the_clients() -> None:
    found = dict(within(Holders.of({2: 1.0}), 10, 20).by_row)
    one, two = 2 * 10 * 10 / (20 * 19), 10 * 9 / (20 * 19)
    assert found == pytest.approx({1: one / (one + two), 2: two / (one + two)})
    assert within(TAOBAO, 30, 30) == TAOBAO


def test_the_same_seed_gives_the_same_rates() -> None:
    assert simulate(COHORT, rows=50, seed=3) == simulate(COHORT, rows=50, seed=3)
    assert simulate(COHORT, rows=50, seed=3) != simulate(COHORT, rows=50, seed=4)


# Known figures of an attack that thinks of one holder only: 40 rows of each client, any of a table
# of TABLE rows, so that most rows have one holder; 12 rounds of a cohort of 30. The table's size
# is not given with the figures; this one fits them all. Perturbed sets keep 90 % and add 1 %.
TABLE = 18_000


def uniform(clients: int) -> Holders:
    p = 40 / TABLE
    ways = {h: math.comb(clients, h) * p**h * (1 - p) ** (clients - h) for h in range(1, 9)}
    return Holders.of({h: w / sum(ways.values()) for h, w in ways.items()})


@pytest.mark.parametrize(
    ("setting", "named", "right"),
    [
        (replace(COHORT, holders=uniform(30)), 0.90, 0.99),
        (replace(COHORT, holders=uniform(30), privacy=LEVELS["cpp3"]), 0.79, 0.98),
        (replace(COHORT, holders=uniform(30), privacy=LEVELS["cpp2"]), 0.62, 0.98),
        (replace(COHORT, holders=uniform(120), population=120, rounds=60, union=False), 0.76, 0.99),
        (
            replace(COHORT, holders=uniform(30), perturbation=Perturbation(keep=0.9, add=0.01)),
            0.92,
            0.99,
        ),
        (replace(COHORT, holders=uniform(30), privacy=ONE_STAGE), 0.0, 0.0),
        (replace(COHORT, holders=uniform(30), privacy=ONE_STAGE, period_rounds=1), 0.94, 0.99),
    ],
    ids=["cpp4", "cpp3", "cpp2", "random cohorts", "perturbed", "one stage", "new periods"],
)
def test_known_rates(setting: Setting, named: float, right: float) -> None:
    found = offered = precise = 0
    for part in transcripts(setting, rows=800, seed=1):
        seen = part.posterior(size_prior(ONE_HOLDER))
        names = (seen.holds > 0.9) & seen.exact[:, None]
        found, precise = found + int(names.sum()), precise + int((names & part.truth).sum())
        offered += int(part.offered.sum())
    assert precise / offered == pytest.approx(named, abs=0.05)
    assert precise >= right * found


def test_weighing_several_holders_names_more_and_is_right_more_often() -> None:
    setting = replace(COHORT, holders=TAOBAO)
    alone = [(t.posterior(size_prior(ONE_HOLDER)), t.truth) for t in transcripts(setting, rows=500)]
    named = np.concatenate([(p.holds > 0.9) & p.exact[:, None] for p, _ in alone])
    truth = np.concatenate([t for _, t in alone])
    found = simulate(setting, rows=500)
    assert found.identified_share > (named & truth).sum() / truth.sum()
    assert found.identified_precision > 0.99


def test_classes_and_dynamic_programming_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of at most three are summed by classes, larger ones by states: the same numbers."""
    settings_ = [
        replace(COHORT, rounds=5, dropout=0.1),
        replace(COHORT, rounds=8, privacy=LEVELS["cpp2"], population=40),
        replace(COHORT, rounds=3, privacy=LEVELS["cpp5"], population=40),
    ]
    prior = size_prior(TAOBAO)
    parts = [t for s in settings_ for t in transcripts(s, rows=60)]
    by_classes = [t.posterior(prior) for t in parts]
    monkeypatch.setattr("tessera.privacy.index.posterior.MOST_CLASSES", 0)
    for part, found in zip(parts, by_classes, strict=True):
        other = part.posterior(prior)
        both = found.exact & other.exact
        assert both.mean() > 0.9
        np.testing.assert_allclose(found.holds[both], other.holds[both], rtol=1e-8, atol=1e-12)
