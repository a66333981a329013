"""The randomised answers have the rates of Algorithm 2, and never change when they must not.

Statistical tests use a fixed script of randomness, so they always give the same verdict; the bound
is five standard deviations, which a correct implementation passes but for one seed in a million.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.privacy.index.response import (
    LEAST,
    LEVELS,
    IndexPrivacy,
    Perturbation,
    as_rows,
    below,
    contained,
    fresh_words,
    keyed_words,
    must_be_sorted,
    threshold,
)

KEY = Secret(bytes(range(32)))


def assert_rate(hits: int, trials: int, probability: float) -> None:
    spread = math.sqrt(trials * probability * (1 - probability))
    assert abs(hits - trials * probability) <= 5 * spread


def rows(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint64)


# ---------------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("name", ["p1", "p2", "p3", "p4"])
@pytest.mark.parametrize("value", [-0.1, 1.0001, math.nan, math.inf])
def test_what_is_no_probability_is_refused_by_name_and_value(name: str, value: float) -> None:
    chosen = {"p1": 0.5, "p2": 0.5, "p3": 0.5, "p4": 0.5} | {name: value}
    with pytest.raises(ConfigError, match=f"{name} = {value}") as refused:
        IndexPrivacy(**chosen)
    assert refused.value.hint is not None


@pytest.mark.parametrize("value", [LEAST / 2, 1 - LEAST / 2, 1e-300])
def test_a_probability_that_its_threshold_would_round_away_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="too close"):
        IndexPrivacy(p1=0.5, p2=value, p3=1.0, p4=0.0)


def test_probabilities_that_never_reveal_a_real_row_are_refused() -> None:
    with pytest.raises(ConfigError, match="p5 = 0"):
        IndexPrivacy(p1=0.0, p2=0.5, p3=1.0, p4=0.0)
    with pytest.raises(ConfigError, match="p5 = 0"):
        IndexPrivacy(p1=1.0, p2=0.5, p3=0.0, p4=0.7)


def test_levels_are_known_by_name() -> None:
    assert IndexPrivacy.named("CPP2") == IndexPrivacy(p1=15 / 16, p2=1 / 16, p3=15 / 16, p4=1 / 16)
    assert list(LEVELS) == ["cpp1", "cpp2", "cpp3", "cpp4", "cpp5"]


@pytest.mark.parametrize("name", ["cpp0", "cpp6", "strong", ""])
def test_an_undefined_level_is_refused_and_the_hint_lists_the_defined(name: str) -> None:
    with pytest.raises(ConfigError, match="no level") as refused:
        IndexPrivacy.named(name)
    assert "cpp5" in str(refused.value.hint)


def test_keeping_nothing_of_the_real_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep"):
        Perturbation(keep=0.0, add=0.1)
    with pytest.raises(ConfigError, match="add = 2"):
        Perturbation(keep=0.5, add=2.0)


# ------------------------------------------------------------------------------------ comparisons


def test_thresholds_run_from_never_to_always() -> None:
    assert threshold(0.0) == 0
    assert threshold(1.0) == 1 << 64
    assert threshold(15 / 16) == 15 << 60
    ends = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert not below(ends, 0.0).any()
    assert below(ends, 1.0).all()
    assert list(below(ends, 0.5)) == [True, False]


@given(st.floats(LEAST, 1 - LEAST))
def test_a_threshold_is_its_probability_to_a_part_in_four_billion(p: float) -> None:
    assert abs(Fraction(threshold(p), 1 << 64) / Fraction(p) - 1) <= LEAST


def test_the_word_next_to_a_threshold_falls_on_the_right_side() -> None:
    limit = threshold(0.3)
    words = np.array([limit - 1, limit], dtype=np.uint64)
    assert list(below(words, 0.3)) == [True, False]


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=20), st.data())
def test_a_rows_word_does_not_depend_on_which_others_are_asked(ids: list[int], data) -> None:
    asked = np.array(ids, dtype=np.uint64)
    chosen = data.draw(st.lists(st.sampled_from(range(len(ids))))) if ids else []
    whole = keyed_words(KEY, "test", ("f", 1, 2), asked)
    assert np.array_equal(keyed_words(KEY, "test", ("f", 1, 2), asked[chosen]), whole[chosen])


def test_keyed_words_are_those_of_the_cipher() -> None:
    """A second opinion: one AES call per row, and the first eight bytes little-endian."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = KEY.derive("test", "f", 1, size=16).reveal()
    for row in (0, 1, 2**63, 2**64 - 1):
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        block = cipher.update(row.to_bytes(8, "little") + bytes(8))
        assert int(keyed_words(KEY, "test", ("f", 1), rows(row))[0]) == int.from_bytes(
            block[:8], "little"
        )


@pytest.mark.parametrize("context", [("g", 1, 2), ("f", 2, 2), ("f", 1, 3)])
def test_federation_period_and_table_each_change_every_word(context) -> None:
    asked = np.arange(1000, dtype=np.uint64)
    same = keyed_words(KEY, "test", ("f", 1, 2), asked) == keyed_words(KEY, "test", context, asked)
    assert not same.any()


@pytest.mark.parametrize("p", [1 / 16, 0.25, 0.5, 0.9375, 0.001])
def test_keyed_and_fresh_words_have_the_rate_they_are_compared_with(p: float) -> None:
    n = 200_000
    keyed = keyed_words(KEY, "test", ("rate",), np.arange(n, dtype=np.uint64))
    assert_rate(int(below(keyed, p).sum()), n, p)
    assert_rate(int(below(fresh_words(Secret(bytes(16)), n), p).sum()), n, p)


def test_no_rows_give_no_words() -> None:
    assert keyed_words(KEY, "test", (), rows()).size == 0
    assert fresh_words(Secret(bytes(16)), 0).size == 0


# -------------------------------------------------------------------------------------------- rows


def test_rows_are_sorted_unique_and_read_only() -> None:
    found = as_rows([7, 3, 7, 2**64 - 1], what="table 0")
    assert found.tolist() == [3, 7, 2**64 - 1]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([-1], "-1 is out of range"),
        (np.array([5, -2]), "-2 is out of range"),
        ([2**64], "is out of range"),
        ([0.5], "integers"),
        (np.array([0.5]), "float64"),
        (np.array([[1]]), "2 dimensions"),
        ([10], "id 10 is outside"),
    ],
)
def test_ids_that_are_not_rows_of_the_table_are_refused(values, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        as_rows(values, what="table 3", size=10)
    assert "table 3" in str(refused.value)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_contained_is_membership(asked: set[int], members: set[int]) -> None:
    a, m = as_rows(sorted(asked), what="a"), as_rows(sorted(members), what="m")
    assert contained(a, m).tolist() == [row in members for row in sorted(asked)]


@pytest.mark.parametrize("asked", [rows(3, 3), rows(4, 3), np.array([1, 2])])
def test_a_row_cannot_be_asked_about_twice(asked) -> None:
    with pytest.raises(MisuseError):
        must_be_sorted(asked)
