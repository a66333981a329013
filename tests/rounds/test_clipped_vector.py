"""One clipped vector of integers: no input passes the bound, and rounding is right on average."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tessera.crypto.secret import Secret
from tessera.errors import ConfigError
from tessera.learning.tables.submodel import ModelUpdate, TableUpdate
from tessera.plan.noisy_vector import NoisyVector
from tessera.rounds import clipped_vector as module
from tessera.rounds.clipped_vector import clipped_vector

COINS = Secret(bytes(32))
VECTOR = NoisyVector(
    words=7 + 5 * 4 + 1, clients=10, clip=0.5, top=20, noise=1.0, sources=4, most_sources=10
)
WILD = st.floats(width=32, allow_nan=True, allow_infinity=True)


def update(dense: np.ndarray, values: np.ndarray, weight: int = 3) -> ModelUpdate:
    counts = np.arange(len(values))
    return ModelUpdate(dense, weight, {"t": TableUpdate(values, counts)})


def integers(vector: NoisyVector, given: ModelUpdate, coins: Secret = COINS):
    trained = {"t": np.arange(len(given.tables["t"].values), dtype=np.uint64)}
    return clipped_vector(vector, given, trained, {"t": 3}, 100, coins)


@given(
    arrays.arrays(np.float32, 7, elements=WILD),
    arrays.arrays(np.float32, (5, 3), elements=WILD),
    st.sampled_from([0.0, 1e-3, 10.0]),
    st.sampled_from([1, 3, 20, 1000]),
)
def test_no_input_gives_a_rounded_vector_over_the_bound(dense, values, counts, top) -> None:
    vector = replace(VECTOR, counts=counts, top=top)
    found = integers(vector, update(dense, values))
    assert found.square <= vector.bound**2
    if not (np.isfinite(dense).all() and np.isfinite(values).all()):
        assert found.square == 0


def test_what_is_rounded_too_long_is_rounded_again_and_cut_in_the_end(monkeypatch) -> None:
    """With coins that always round up, 28 values just above 0 are longer than the bound."""
    vector = replace(VECTOR, top=2)
    given = update(np.full(7, 1e-3), np.full((5, 3), 1e-3))
    tried: list[int] = []
    real = module.Stream.of

    def counting(secret, label, *context):
        tried.append(context[-1])
        return real(secret, label, *context)

    monkeypatch.setattr(module.Stream, "of", counting)
    monkeypatch.setattr(module, "uniform", lambda _, __, n: np.full(n, 2**32 - 1, np.uint64))
    assert integers(vector, given).square == 0  # cut towards zero
    assert max(tried) == module.ATTEMPTS - 1


def test_rounding_is_right_on_average_and_zeros_stay() -> None:
    """Means of 2,000 roundings within 5 standard errors (6e-7 by chance, for each of 22)."""
    values = np.linspace(-0.03, 0.03, 15).reshape(5, 3)
    given = update(np.linspace(0.0, 0.05, 7), values)
    many = [integers(VECTOR, given, Secret(i.to_bytes(32))) for i in range(2000)]
    dense = np.mean([each.dense[:-1] for each in many], axis=0)
    rows = np.mean([each.tables["t"][:, :-1] for each in many], axis=0)
    for found, due in ((dense, given.dense * 40), (rows, values * 40)):
        assert np.abs(found - due).max() < 5 * 0.5 / math.sqrt(2000)
    assert not any(each.dense[0] for each in many)


def test_a_long_update_is_cut_as_a_whole() -> None:
    given = update(np.full(7, 3.0), np.full((5, 3), -2.0))
    found = integers(replace(VECTOR, top=2**14), given)
    assert found.cut
    ratio = found.dense[0] / found.tables["t"][1, 0]
    assert ratio == pytest.approx(-1.5, rel=1e-3)
    assert math.sqrt(found.square) == pytest.approx(2**14, rel=1e-3)


def test_counts_have_their_public_scale_and_weigh() -> None:
    vector = replace(VECTOR, counts=0.01, top=10_000)
    found = integers(vector, update(np.full(7, 1e-3), np.full((5, 3), 1e-3), weight=3))
    assert found.dense[-1] == 3 * 200  # 0.01 of a clip of 0.5 is 200 of 10,000
    assert found.tables["t"][:, -1].tolist() == [0, 200, 400, 600, 800]
    assert found.tables["t"][4, 0] == pytest.approx(4 * 20, abs=1)
    without = integers(replace(vector, counts=0.0), update(np.zeros(7), np.full((5, 3), 1e-3)))
    assert not without.tables["t"][:, -1].any() and without.dense[-1] == 0
    assert without.tables["t"][4, 0] == pytest.approx(20, abs=1)


def test_the_ring_has_room_for_everybody_and_the_noise() -> None:
    wide = replace(VECTOR, noise=100.0, top=1000)
    deviation = wide.deviation * math.sqrt(10)
    assert wide.deviation == pytest.approx(100.0 * wide.bound / 2.0)
    # The normal tail at tail / deviation, over all words, is below 2^-40.
    assert wide.words * math.erfc(wide.tail / deviation / math.sqrt(2.0)) < 2.0**-40
    assert wide.ring.order >= 2 * wide.largest > 2 * (10 * 1000 + wide.tail)


def test_noise_that_does_not_fit_or_has_no_account_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit the ring"):
        replace(VECTOR, noise=1e18)
    with pytest.raises(ConfigError, match="too narrow"):
        replace(VECTOR, noise=0.01)
