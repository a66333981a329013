"""Quantisation: right on average, exact at zero, and never out of room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto.prg import Stream
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.learning.compression import Quantizer, signed

COINS = Stream(bytes(16), bytes(8))


def quantizer(levels: int = 2**15, clip: float = 1.0, max_count: int = 100) -> Quantizer:
    return Quantizer(levels=levels, clip=clip, max_count=max_count)


@given(
    st.integers(3, 2**16),
    st.floats(1e-3, 1e3),
    st.lists(st.floats(-2e3, 2e3), min_size=1, max_size=20),
    st.integers(1, 200),
)
def test_a_value_moves_by_less_than_a_step_and_the_clip(levels, clip, values, cohort):
    q = quantizer(levels, clip)
    ring = q.ring(cohort)
    array = np.array(values)
    back = q.decode(q.encode(array, ring, COINS), ring)
    step = clip / q.top
    assert (np.abs(back - np.clip(array, -clip, clip)) < step * (1 + 1e-9)).all()


def test_zero_is_exactly_zero_whatever_the_coins():
    q = quantizer()
    for i in range(20):
        words = q.encode(np.zeros(50), q.ring(10), Stream(bytes([i] * 16), bytes(8)))
        assert not words.any()


def test_rounding_is_right_on_average():
    """20,000 roundings: the mean lies within 5 standard errors of the value (one in 10^6 fails)."""
    q = quantizer(levels=5, clip=1.0)
    ring = q.ring(10)
    for value in (-0.9, -0.3, 0.1, 0.5, 0.77):
        back = q.decode(q.encode(np.full(20_000, value), ring, COINS), ring)
        assert abs(back.mean() - value) < 5 * 0.25 / np.sqrt(20_000)


@given(st.integers(2, 1000), st.integers(3, 2**20), st.integers(1, 2**20))
def test_a_whole_cohort_at_its_extremes_fits_the_ring(cohort, levels, max_count):
    q = quantizer(levels, 1.0, max_count)
    ring = q.ring(cohort)
    for word in (q.top, -q.top, max_count):
        total = ring.from_ints([word * cohort])
        assert int(signed(total, ring)[0]) == word * cohort
    if ring.bits > 8:
        narrow = Ring(ring.bits - 1)
        largest = max(q.top, max_count)
        assert int(signed(narrow.from_ints([largest * cohort]), narrow)[0]) != largest * cohort


def test_the_papers_levels_at_a_hundred_clients_take_22_bits():
    assert quantizer(2**15).ring(100).bits == 22


def test_counts_are_cut_and_never_negative():
    q = quantizer(max_count=7)
    ring = q.ring(4)
    assert ring.to_ints(q.encode_counts(np.array([0, 3, 9]), ring)) == [0, 3, 7]
    with pytest.raises(MisuseError):
        q.encode_counts(np.array([-1]), ring)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_quantised(bad):
    q = quantizer()
    with pytest.raises(MisuseError, match="finite"):
        q.encode(np.array([0.0, bad]), q.ring(2), COINS)


@pytest.mark.parametrize(
    "bad", [{"levels": 2}, {"clip": 0.0}, {"clip": float("inf")}, {"max_count": 0}]
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ConfigError):
        quantizer(**bad)
