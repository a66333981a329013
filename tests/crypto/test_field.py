"""A field is F_p for a Mersenne prime p; Python's integers are the second opinion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto.field import EXPONENTS, Field
from tessera.errors import ConfigError, MisuseError

FIELDS = st.sampled_from(EXPONENTS).map(Field)


@st.composite
def fields_with_pairs(draw: st.DrawFn) -> tuple[Field, list[int], list[int]]:
    field = draw(FIELDS)
    p = field.order
    value = st.integers(0, p - 1) | st.sampled_from([0, 1, p - 1, p // 2, p // 2 + 1])
    pairs = draw(st.lists(st.tuples(value, value), min_size=1, max_size=20))
    return field, [a for a, _ in pairs], [b for _, b in pairs]


@given(fields_with_pairs())
def test_arithmetic_is_that_of_integers_modulo_p(case: tuple[Field, list[int], list[int]]) -> None:
    field, a, b = case
    p = field.order
    x, y = field.from_ints(a), field.from_ints(b)
    assert field.to_ints(field.add(x, y)) == [(u + v) % p for u, v in zip(a, b, strict=True)]
    assert field.to_ints(field.sub(x, y)) == [(u - v) % p for u, v in zip(a, b, strict=True)]
    assert field.to_ints(field.mul(x, y)) == [(u * v) % p for u, v in zip(a, b, strict=True)]
    assert field.to_ints(field.neg(x)) == [-u % p for u in a]

    acc = x.copy()
    field.iadd(acc, y)
    assert np.array_equal(acc, field.add(x, y))


@given(fields_with_pairs(), st.integers(-(2**70), 2**70))
def test_powers_and_inverses_are_those_of_integers(
    case: tuple[Field, list[int], list[int]], exponent: int
) -> None:
    field, a, _ = case
    units = [u or 1 for u in a]
    x = field.from_ints(units)
    assert field.to_ints(field.inv(x)) == [pow(u, -1, field.order) for u in units]
    assert field.to_ints(field.pow(x, exponent)) == [pow(u, exponent, field.order) for u in units]


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_zero_has_no_inverse(exponent: int) -> None:
    field = Field(exponent)
    with pytest.raises(ZeroDivisionError):
        field.inv(field.from_ints([1, 0]))
    with pytest.raises(ZeroDivisionError):
        field.pow(field.from_ints([0]), -1)
    assert field.to_ints(field.pow(field.from_ints([0, 3]), 0)) == [1, 1]


@given(FIELDS, st.lists(st.integers(0, 2**64 - 1) | st.just(2**64 - 1), min_size=1, max_size=20))
def test_fold_reduces_any_64_bit_value(field: Field, values: list[int]) -> None:
    folded = field.fold(np.array(values, dtype=np.uint64))
    assert folded.tolist() == [v % field.order for v in values]


@given(FIELDS)
def test_the_headroom_is_the_most_that_64_bits_hold(field: Field) -> None:
    assert field.headroom * field.order < 2**64 <= (field.headroom + 1) * field.order


@given(FIELDS, st.lists(st.integers(-(2**70), 2**70), max_size=20))
def test_integers_of_any_sign_and_size_are_reduced(field: Field, values: list[int]) -> None:
    words = field.from_ints(values)
    assert field.contains(words)
    assert field.to_ints(words) == [v % field.order for v in values]


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_an_integer_array_keeps_its_shape(exponent: int, dtype: type) -> None:
    field, info = Field(exponent), np.iinfo(dtype)
    values = np.array([[info.min, info.max], [0, 1]], dtype=dtype)
    words = field.from_ints(values)
    assert words.shape == (2, 2)
    assert field.to_ints(words) == [int(v) % field.order for v in values.ravel()]


@given(fields_with_pairs())
def test_packed_words_come_back(case: tuple[Field, list[int], list[int]]) -> None:
    field, a, _ = case
    words = field.from_ints(a)
    data = field.pack(words)
    assert len(data) == -(-len(a) * field.exponent // 8)
    assert np.array_equal(field.unpack(data, len(a)), words)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_order_itself_is_no_element(exponent: int) -> None:
    field = Field(exponent)
    words = np.array([0, field.order], dtype=field.dtype)
    assert not field.contains(words)
    with pytest.raises(MisuseError, match="not reduced"):
        field.pack(words)
    packed = (field.order << exponent).to_bytes(-(-2 * exponent // 8), "little")
    with pytest.raises(ValueError, match="equals the order"):
        field.unpack(packed, 2)


def test_words_of_another_type_are_refused() -> None:
    field, other = Field(31), Field(61).from_ints([1])
    for operation in (field.add, field.sub, field.mul, field.iadd):
        with pytest.raises(MisuseError, match="uint64"):
            operation(field.zeros(1), other)


@pytest.mark.parametrize("exponent", [0, 2, 8, 11, 60, 89])
def test_other_exponents_are_refused(exponent: int) -> None:
    with pytest.raises(ConfigError, match="exponents"):
        Field(exponent)
