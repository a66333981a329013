"""Batches of people and of records: whose coins, how many of whom; and the paper's, as printed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.errors import ConfigError
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.noise_setting import Drawn
from tessera.privacy.dp.subjects import (
    Printed,
    PrintedNoise,
    SubjectSampler,
    fixed_size_batch,
    largest_group,
    printed_mean,
)

PEOPLE = st.lists(st.integers(0, 6), max_size=40)


def people(found: list[int]) -> np.ndarray:
    return np.array(found, dtype=np.int64)


@given(PEOPLE, st.floats(0.05, 1.0), st.integers(0, 4), st.integers(0, 2**32))
def test_whoever_is_drawn_is_there_with_all_records_or_the_cap(
    who: list[int], rate: float, cap: int, seed: int
) -> None:
    subjects = people(who)
    batch = SubjectSampler(subjects, rate=rate, cap=cap).draw(np.random.default_rng(seed).random)
    assert len(set(batch.places.tolist())) == len(batch.places)
    for group in range(batch.size):
        mine = batch.places[batch.groups == group]
        (person,) = set(subjects[mine].tolist())
        has = who.count(person)
        assert len(mine) == (min(has, cap) if cap else has)
    drawn = [subjects[batch.places[batch.groups == g][0]] for g in range(batch.size)]
    assert len(set(drawn)) == len(drawn)  # a person is one group


@given(PEOPLE, st.floats(0.05, 1.0), st.integers(1, 4), st.integers(0, 2**32))
def test_records_are_cut_to_the_cap_and_each_is_its_own_group(
    who: list[int], rate: float, cap: int, seed: int
) -> None:
    subjects = people(who)
    sampler = SubjectSampler(subjects, rate=rate, cap=cap, drawn=Drawn.RECORDS)
    coins = np.random.default_rng(seed).random
    batch = sampler.draw(coins)
    assert batch.groups.tolist() == list(range(len(batch.places)))
    # Not refilled: what is left is what the coins gave, cut person by person.
    order = np.argsort(subjects, kind="stable")
    hit = order[np.random.default_rng(seed).random(len(subjects)) < rate]
    expected = {person: min(cap, int((subjects[hit] == person).sum())) for person in set(who)}
    found = {person: int((subjects[batch.places] == person).sum()) for person in set(who)}
    assert found == expected and set(batch.places) <= set(hit)


def test_a_person_is_drawn_at_the_plans_rate_whatever_it_has() -> None:
    """Three people with 1, 10 and 100 records over 6,000 batches; error rate 1e-4 for all three,
    both ways of drawing: exact binomial tests at 1e-4 / 6 each."""
    subjects = np.repeat([0, 1, 2], [1, 10, 100])
    rng = np.random.default_rng(7)
    for drawn, chances in (
        (Drawn.SUBJECTS, [0.05] * 3),
        (Drawn.RECORDS, [1 - 0.95**own for own in (1, 10, 100)]),
    ):
        sampler = SubjectSampler(subjects, rate=0.05, cap=2, drawn=drawn)
        hits = np.zeros(3, np.int64)
        for _ in range(6_000):
            hits[np.unique(subjects[sampler.draw(rng.random).places])] += 1
        for hit, chance in zip(hits, chances, strict=True):
            assert stats.binomtest(int(hit), 6_000, chance).pvalue > 1e-4 / 6


def test_the_number_of_a_persons_records_in_a_batch_is_the_mixture_of_the_account() -> None:
    """Chi-square over 6,000 batches, error rate 1e-4."""
    subjects, rng = np.zeros(10, np.int64), np.random.default_rng(3)
    sampler = SubjectSampler(subjects, rate=0.1, cap=2, drawn=Drawn.RECORDS)
    seen = np.bincount([len(sampler.draw(rng.random).places) for _ in range(6_000)], minlength=3)
    shifts = sampler.mechanism(1.0, records=10).shifts
    assert [shift for shift, _ in shifts] == [0, 1, 2]
    assert stats.chisquare(seen, [6_000 * p for _, p in shifts]).pvalue > 1e-4
    drawing = SubjectSampler(subjects, rate=0.1, cap=2)
    assert drawing.mechanism(1.0) == GaussianNoise.poisson(1.0, 0.1)


def test_every_record_of_a_cut_person_is_as_likely_to_stay() -> None:
    """Chi-square over 6,000 batches, error rate 1e-4."""
    rng, sampler = np.random.default_rng(5), SubjectSampler(np.zeros(5, np.int64), rate=1.0, cap=2)
    hits = np.bincount(np.concatenate([sampler.draw(rng.random).places for _ in range(6_000)]))
    assert hits.sum() == 12_000
    # Two of five without replacement: the variance of a count is 3/4 of the multinomial's.
    assert stats.chi2.sf(((hits - 2_400) ** 2 / 2_400).sum() / 0.75, 4) > 1e-4


@pytest.mark.parametrize(("cap", "drawn"), [(-1, Drawn.SUBJECTS), (0, Drawn.RECORDS)])
def test_a_cap_that_is_none_is_refused(cap: int, drawn: Drawn) -> None:
    with pytest.raises(ConfigError, match="records of a person in a batch"):
        SubjectSampler(np.zeros(3, np.int64), rate=0.1, cap=cap, drawn=drawn)


def test_nobody_is_an_empty_batch() -> None:
    none = np.zeros(0, np.int64)
    for drawn in Drawn:
        batch = SubjectSampler(none, rate=0.5, cap=1, drawn=drawn).draw(np.zeros)
        assert batch.size == 0 and len(batch.places) == 0


# --- as printed -----------------------------------------------------------------------------------


def test_the_papers_noise_depends_on_the_batch_and_is_b_times_apart() -> None:
    """Standard deviations from 40,000 values are within 2.5 % (7 standard errors)."""
    noise = PrintedNoise(epsilon=4.0, delta=1e-5, rate=0.01, steps=1_000)
    assert noise.sigma(1) == pytest.approx(0.735, abs=5e-4)
    rng, clip, size = np.random.default_rng(1), 0.5, 40_000
    for subjects, most in (([0, 1, 2, 3], 1), ([0, 1, 0, 3], 2)):
        total = np.zeros(size)
        total[0] = 4e6  # four gradients of 1e6, far from the noise
        assert largest_group(np.array(subjects)) == most
        spread = {}
        for which in (Printed.CENTRAL, Printed.LOCAL):
            found = printed_mean(
                which,
                total,
                batch=4,
                most=largest_group(np.array(subjects)),
                clip=clip,
                noise=noise,
                normal=rng.standard_normal,
            )
            assert found[0] == pytest.approx(1e6, abs=50)
            spread[which] = found[1:].std()
        assert spread[Printed.CENTRAL] == pytest.approx(noise.sigma(most) * clip, rel=0.025)
        assert spread[Printed.LOCAL] == pytest.approx(noise.sigma(most) * clip / 4, rel=0.025)


def test_the_papers_batches_have_a_fixed_size_and_no_example_twice() -> None:
    uniform = np.random.default_rng(2).random
    for _ in range(50):
        batch = fixed_size_batch(9, 4, uniform)
        assert len(set(batch.tolist())) == 4 and batch.max() < 9
    assert sorted(fixed_size_batch(3, 4, uniform)) == [0, 1, 2]
    # Few of many are drawn by rejection: every pair is as likely (chi-square, error rate 1e-4).
    drawn = [fixed_size_batch(9, 2, uniform) for _ in range(7_200)]
    pairs = np.bincount([9 * a + b for a, b in drawn], minlength=81).reshape(9, 9)
    assert not pairs.diagonal().any()
    assert stats.chisquare(pairs[~np.eye(9, dtype=bool)]).pvalue > 1e-4


def test_what_needs_single_gradients_at_the_server_is_refused_where_they_are_hidden() -> None:
    with pytest.raises(ConfigError, match="CentralSubDP needs every client's gradient"):
        Printed.CENTRAL.check_scheme(hides=True)
    Printed.CENTRAL.check_scheme(hides=False)
    Printed.LOCAL.check_scheme(hides=True)
