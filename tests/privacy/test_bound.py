"""The bound B: its formula, its edges, and that it bounds a brute-force posterior."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import MisuseError
from tessera.privacy.index.bound import CONDITIONS, Promise, holder_bound, in_words
from tessera.privacy.index.exposure import TAOBAO, Holders
from tessera.privacy.index.posterior import pack, posterior


@pytest.mark.parametrize(
    ("holders", "alike", "level", "expected"),
    [
        (1, 10, 0.0, 0.1),
        (3, 10, 0.0, 0.3),
        (1, 2, math.log(2.0), 4 / 5),
        (2, 6, 0.5, 2 * math.e / (2 * math.e + 4)),
    ],
)
def test_the_formula(holders: int, alike: int, level: float, expected: float) -> None:
    assert holder_bound(holders=holders, alike=alike, level=level) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("holders", "alike", "level"),
    [(1, 1, 0.0), (3, 2, 0.0), (1, 0, 0.0), (1, 100, math.inf), (5, 5, math.inf), (1, 10, 1e6)],
)
def test_nothing_is_promised_where_nobody_is_alike_or_answers_prove(
    holders: int, alike: int, level: float
) -> None:
    assert holder_bound(holders=holders, alike=alike, level=level) == 1.0


@given(st.integers(1, 20), st.integers(0, 200), st.floats(0.0, 20.0))
def test_it_is_a_probability_and_grows_with_holders_and_level(
    holders: int, alike: int, level: float
) -> None:
    bound = holder_bound(holders=holders, alike=alike, level=level)
    assert min(1.0, holders / max(alike, 1)) <= bound + 1e-12 <= 1.0 + 1e-12
    assert holder_bound(holders=holders + 1, alike=alike, level=level) >= bound
    assert holder_bound(holders=holders, alike=alike, level=level + 0.1) >= bound
    assert holder_bound(holders=holders, alike=alike + 1, level=level) <= bound


def test_what_is_no_bound_is_refused() -> None:
    for wrong in ({"holders": 0, "alike": 3}, {"holders": 1, "alike": 3, "level": -0.1}):
        with pytest.raises(MisuseError):
            holder_bound(**wrong)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="level"):
        holder_bound(holders=1, alike=3, level=math.nan)
    with pytest.raises(MisuseError, match="counts"):
        Promise(corrupt=-1)


def test_without_a_group_a_holder_is_named() -> None:
    assert Promise().bound() == 1.0
    assert Promise(corrupt=3).mean(TAOBAO) == pytest.approx(1.0)


def test_corrupt_and_curious_clients_are_not_alike() -> None:
    promise = Promise(group=10, corrupt=2)
    assert promise.bound() == pytest.approx(1 / 8)
    assert promise.bound(curious_clients=1) == pytest.approx(1 / 7)
    assert promise.bound(holders=8) == promise.bound(holders=9) == 1.0
    assert Promise(group=3, corrupt=5).bound() == 1.0


def test_the_mean_is_over_pairs_and_the_largest_over_rows() -> None:
    promise, holders = Promise(group=10), Holders.of({1: 0.5, 3: 0.5})
    assert promise.mean(holders) == pytest.approx(0.25 * 0.1 + 0.75 * 0.3)
    assert promise.largest(holders) == pytest.approx(0.3)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 6),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_posterior_of_clients_alike_exceeds_it(
    seed: int, alike: int, size: int, level: float
) -> None:
    """One trace for all, answers within the level: the exact posterior stays below B, and meets it.

    Two more clients have traces of their own; they do not help the observer.
    """
    rng = np.random.default_rng(seed)
    size = min(size, alike)
    rounds, strangers = 6, 2
    active = np.vstack(
        [np.tile(rng.random(rounds) < 0.7, (alike, 1)), rng.random((strangers, rounds)) < 0.5]
    )
    log_lr = np.concatenate([rng.uniform(-level, level, alike), np.zeros(strangers)])
    holders = rng.choice(alike, size, replace=False)
    prior = np.zeros(size + 1)
    prior[size] = 1.0
    found = posterior(
        pack(active[None]), pack(active[holders].any(axis=0)[None]), log_lr[None], prior
    )
    bound = holder_bound(holders=size, alike=alike, level=level)
    assert found.holds[0].max() <= bound + 1e-9 or found.holds[0].argmax() >= alike
    worst = np.where(np.isin(np.arange(alike), holders), level, -level)
    tight = posterior(
        pack(active[None, :alike]), pack(active[holders].any(axis=0)[None]), worst[None], prior
    )
    assert tight.holds[0].max() <= bound + 1e-9
    if size == 1:
        assert tight.holds[0].max() == pytest.approx(bound)


def test_the_argument_by_exchange_on_all_sets() -> None:
    """Sums over all sets of h out of g: u's share is at most B for the worst answers."""
    for g, h in itertools.product(range(2, 7), range(1, 5)):
        if h >= g:
            continue
        level = 0.7
        ratio = np.exp(np.where(np.arange(g) == 0, level, -level))
        weights = {s: math.prod(ratio[list(s)]) for s in itertools.combinations(range(g), h)}
        share = sum(w for s, w in weights.items() if 0 in s) / sum(weights.values())
        assert share <= holder_bound(holders=h, alike=g, level=level) + 1e-12


def test_a_bound_is_never_told_without_its_conditions() -> None:
    assert in_words(0.1).startswith("a row's holder is identified with at most 10% probability (")
    assert CONDITIONS in in_words(1 / 3)
    assert in_words(1.0) == "a row's holder can be identified (B = 100%)"
    assert Promise(group=10).in_words() == in_words(0.1)
    assert "active between two periods" in Promise(group=10, periods=True).in_words()
    for supposed in ("one holder", "honest", "known row", "no second group", "operator's word"):
        assert supposed in CONDITIONS


def test_members_that_work_with_the_server_make_the_group_smaller() -> None:
    found = Promise(group=10, corrupt=1).with_corrupt()
    assert found == {c: pytest.approx(1 / (10 - c)) for c in (0, 1, 2, 5)}
    assert Promise(group=5).with_corrupt()[5] == 1.0  # nobody is left to hide among
    said = Promise(group=10).corrupt_in_words()
    assert said == "With 0, 2, 5 members that work with the server B is 10%, 12.5%, 20%."
