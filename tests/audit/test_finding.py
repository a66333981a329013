"""Intervals, verdicts, and what a finding looks like as JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.audit.finding import (
    LEVEL,
    ClusteredTrials,
    Finding,
    FindingUnit,
    Verdict,
    corrected,
    wilson,
)


@given(st.integers(1, 10_000), st.data())
def test_wilsons_interval_is_scipys(trials: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, trials))
    expected = stats.binomtest(hits, trials).proportion_ci(0.99, method="wilson")
    assert wilson(hits / trials, trials) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0.0, None), (1.0, None, 1.0)])
def test_an_interval_reaches_the_end_exactly(
    rate: float, low: float | None, high: float | None
) -> None:
    found = wilson(rate, 50)
    assert low is None or found[0] == low
    assert high is None or found[1] == high


def test_trials_that_go_together_count_for_less() -> None:
    together, apart = ClusteredTrials(), ClusteredTrials()
    for cluster in range(40):
        together.add(cluster, 10 * (cluster % 2), 10)
        apart.add(cluster, 5, 10)
    assert together.rate == apart.rate == 0.5
    assert together.design_effect == pytest.approx(10 * 40 / 39)
    assert apart.design_effect == 1.0
    assert together.interval()[0] < apart.interval()[0]


def finding(**changes: object) -> Finding:
    values = {"measured": 0.5, "low": 0.4, "high": 0.6, "claimed": 0.5, "trials": 10}
    return Finding(name="an attack", meaning="", **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claimed", "verdict", "agrees"),
    [
        (0.3, Verdict.BROKEN, False),
        (0.4, Verdict.HOLDS, True),
        (0.9, Verdict.HOLDS, False),
        (1.0, Verdict.UNCLAIMED, False),
    ],
)
def test_a_claim_is_broken_only_by_more_than_it_allows(
    claimed: float, verdict: Verdict, agrees: bool
) -> None:
    found = finding(claimed=claimed)
    assert (found.verdict, found.agrees) == (verdict, agrees)


def test_one_success_breaks_a_claim_of_never() -> None:
    trials = ClusteredTrials()
    trials.add(0, 1, 1_000_000)
    assert trials.finding("x", claimed=0.0, meaning="").verdict is Verdict.BROKEN


def test_without_a_trial_nothing_holds() -> None:
    assert ClusteredTrials().finding("x", claimed=0.0, meaning="").verdict is Verdict.UNTESTED


def test_json_has_neither_infinities_nor_nan() -> None:
    found = finding(measured=math.nan, high=math.inf, unit=FindingUnit.EPSILON).as_json()
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text)["measured"] is None
    assert json.loads(text)["high"] == "inf"


def test_an_honest_report_is_called_broken_once_in_a_hundred_times() -> None:
    """Fifteen claims that are met exactly; one in seven reports without the correction."""
    rng = np.random.default_rng(2)
    broken = alone = 0
    for _ in range(1000):
        found = []
        for hits in rng.binomial(400, 0.3, size=15):
            trials = ClusteredTrials()
            trials.add(0, int(hits), 400)
            found.append(trials.finding("x", claimed=0.3, meaning=""))
        found.append(ClusteredTrials().finding("untested", claimed=0.5, meaning=""))
        alone += any(f.verdict is Verdict.BROKEN for f in found)
        report = corrected(found)
        assert report[0].level == pytest.approx(1.0 - (1.0 - LEVEL) / 15)
        broken += any(f.verdict is Verdict.BROKEN for f in report)
    assert broken <= 15 < 50 < alone
