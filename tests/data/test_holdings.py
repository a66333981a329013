"""Synthetic holdings have the papers' numbers, and their clients are the same in any table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papers.sfsl_holdings import Market, holders
from tessera.errors import ConfigError


@pytest.fixture(scope="module")
def papers():
    market = Market()
    return market, [market.client(number) for number in range(400)]


def test_the_union_of_a_hundred_has_the_papers_shares_of_holders(papers):
    _, clients = papers
    cohorts = [holders(clients[start : start + 100]) for start in range(0, 400, 100)]
    one, two = (np.mean([cohort[count] for cohort in cohorts]) for count in (1, 2))
    # Niu et al. 2020: 86.7 %, 11.0 % and 2.3 %; four cohorts of 26,000 rows spread by 0.2 points.
    assert one == pytest.approx(0.867, abs=0.005)
    assert two == pytest.approx(0.110, abs=0.005)
    assert 1 - one - two == pytest.approx(0.023, abs=0.003)


def test_a_client_has_the_papers_goods_and_categories(papers):
    market, clients = papers
    assert {len(items) for items in clients} == {301}
    categories = [len(set(market.category_of(items).tolist())) for items in clients]
    assert np.mean(categories) == pytest.approx(117, abs=2)
    assert max(int(market.category_of(items).max()) for items in clients) < 4_815


@given(
    st.integers(1, 2**39),
    st.integers(2, 2_000),
    st.integers(0, 50),
    st.floats(0.0, 0.95),
    st.data(),
)
@settings(deadline=None)
def test_goods_are_distinct_ascending_and_in_the_table(room, stocked, seed, skew, data):
    market = Market(
        rows=stocked + room,
        stocked=stocked,
        per_client=data.draw(st.integers(1, stocked // 2)),
        skew=skew,
        seed=seed,
    )
    items = market.client(3)
    assert len(items) == market.per_client
    assert (items[1:] > items[:-1]).all()
    assert int(items[-1]) < market.rows
    assert (items == market.client(3)).all()


@given(st.integers(1, 3_000), st.integers(0, 9))
def test_no_two_ranks_lie_in_one_place(stock, seed):
    market = (
        Market(rows=7 * stock + 5, stocked=stock, per_client=1, seed=seed) if stock > 1 else None
    )
    if market is not None:
        ids = market.id_of(np.arange(stock, dtype=np.uint64))
        assert len(set(ids.tolist())) == stock


def test_a_larger_table_holds_the_same_goods_in_the_same_categories():
    small = Market(per_client=50)
    large = Market(rows=2_000_000_000, stocked=small.rows, per_client=50)
    few, many = ([m.client(number) for number in range(40)] for m in (small, large))
    assert holders(few) == holders(many)
    assert int(max(items.max() for items in many)) > small.rows
    for one, other in zip(few, many, strict=True):
        assert (small.category_of(one) == large.category_of(other)).all()


def test_holders_are_counted_row_by_row():
    sets = [np.array(rows, dtype=np.uint64) for rows in ([1, 2, 3], [2, 3], [3, 9])]
    assert holders(sets) == {1: 0.5, 2: 0.25, 3: 0.25}
    assert holders([]) == {}


@pytest.mark.parametrize(
    "bad",
    [
        {"rows": 0},
        {"rows": 10, "stocked": 11, "per_client": 1},
        {"per_client": 0},
        {"rows": 100, "per_client": 51},
        {"categories": 0},
        {"skew": 1.0},
        {"category_skew": -0.1},
    ],
)
def test_a_market_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match="holdings: "):
        Market(**bad)
