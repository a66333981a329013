"""Figures about drawn groups: closed forms, a second opinion, and a count over real draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.crypto.shuffle import Shuffle
from tessera.errors import MisuseError
from tessera.privacy.index.groups import LEAVING, DrawnGroups

TENS = DrawnGroups(size=10)


@pytest.mark.parametrize(
    ("corrupt", "mean", "weak"), [(0.0, 0.1, 0.0), (0.2, 0.125, 0.0196), (0.3, 0.143, 0.0988)]
)
def test_tens(corrupt: float, mean: float, weak: float) -> None:
    assert TENS.mean_bound(corrupt) == pytest.approx(mean, abs=5e-4)
    assert TENS.weak_share(corrupt) == pytest.approx(weak, abs=5e-5)


@given(st.integers(2, 60), st.floats(0.0, 0.95))
def test_closed_forms(size: int, corrupt: float) -> None:
    groups, honest = DrawnGroups(size=size), 1.0 - corrupt
    expected = (1.0 - corrupt**size) / (size * honest)  # E 1 / (1 + Binomial(g - 1, 1 - f))
    assert groups.mean_bound(corrupt) == pytest.approx(expected)
    fewest = size - 5  # B >= .2: five honest members or fewer
    assert groups.weak_share(corrupt) == pytest.approx(
        stats.binom.sf(fewest - 1, size - 1, corrupt), abs=1e-12
    )


def test_draws_of_the_permutation_give_these_figures() -> None:
    corrupt, bounds = np.arange(20_000) < 6_000, []
    for key in range(3):
        order = Shuffle(bytes([key]) * 32, corrupt.size).forward(np.arange(corrupt.size))
        honest = (~corrupt[order]).reshape(-1, 10).sum(axis=1)
        bounds += [1.0 / count for count in honest for _ in range(count)]
    assert np.mean(bounds) == pytest.approx(TENS.mean_bound(0.3), abs=0.002)
    assert np.mean(np.array(bounds) >= 0.2) == pytest.approx(TENS.weak_share(0.3), abs=0.01)


def test_each_void_snapshot_is_one_more_draw() -> None:
    assert DrawnGroups(size=10, void=2).weak_share(0.2) == pytest.approx(3 * TENS.weak_share(0.2))
    assert DrawnGroups(size=10, void=100).weak_share(0.3) == 1.0
    assert "after 2 void snapshots" in DrawnGroups(size=10, void=2).in_words(0.2)
    words = DrawnGroups(size=5, void=1).in_words(0.2)
    assert words.endswith("0.2 or more for 100% of clients, after 1 void snapshot")
    assert TENS.in_words(0.2).endswith("B is 0.125 on average, and 0.2 or more for 2% of clients")


def test_groups_alive_after_a_year() -> None:
    assert [round(100 * TENS.alive(leaving)) for leaving in LEAVING] == [30, 9, 0]
    assert TENS.alive(0.02, months=0) == TENS.alive(0.0) == 1.0


def test_what_is_no_share_is_refused() -> None:
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(MisuseError, match="share corrupt"):
            TENS.mean_bound(share)
        with pytest.raises(MisuseError, match="share leaving"):
            TENS.alive(share)
    for wrong in ({"size": 1}, {"size": 5, "void": -1}):
        with pytest.raises(MisuseError):
            DrawnGroups(**wrong)
