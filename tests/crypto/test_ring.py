"""A ring is Z_2^b, with Python's integers as second opinion; a word takes b bits on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import kernel
from tessera.crypto.field import Field
from tessera.crypto.group import Group, group_from_name
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError

RINGS = st.integers(8, 128).map(Ring)


@st.composite
def rings_with_pairs(draw: st.DrawFn) -> tuple[Ring, list[int], list[int]]:
    ring = draw(RINGS)
    edges = st.sampled_from([0, 1, ring.order - 1, ring.order // 2])
    value = st.integers(0, ring.order - 1) | edges
    pairs = draw(st.lists(st.tuples(value, value), max_size=20))
    return ring, [a for a, _ in pairs], [b for _, b in pairs]


@given(rings_with_pairs())
def test_arithmetic_is_that_of_integers_modulo_the_order(
    case: tuple[Ring, list[int], list[int]],
) -> None:
    ring, a, b = case
    x, y = ring.from_ints(a), ring.from_ints(b)
    assert ring.to_ints(ring.add(x, y)) == [(p + q) % ring.order for p, q in zip(a, b, strict=True)]
    assert ring.to_ints(ring.sub(x, y)) == [(p - q) % ring.order for p, q in zip(a, b, strict=True)]
    assert ring.to_ints(ring.neg(x)) == [-p % ring.order for p in a]
    assert ring.to_ints(x) == a, "the operands are left alone"

    acc = x.copy()
    ring.iadd(acc, y)
    assert np.array_equal(acc, ring.add(x, y))


@given(RINGS, st.lists(st.integers(-(2**130), 2**130), max_size=20))
def test_integers_of_any_sign_and_size_are_reduced(ring: Ring, values: list[int]) -> None:
    words = ring.from_ints(values)
    assert ring.contains(words)
    assert ring.to_ints(words) == [v % ring.order for v in values]


@given(RINGS, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6))
def test_an_integer_array_keeps_its_shape(ring: Ring, values: list[int]) -> None:
    words = ring.from_ints(np.array(values, dtype=np.int64).reshape(2, 3))
    assert words.shape == (2, 3, *ring.limbs)
    assert ring.to_ints(words) == [v % ring.order for v in values]
    assert ring.zeros((2, 3)).shape == words.shape


@pytest.mark.parametrize("bits", range(8, 129))
@pytest.mark.parametrize("backend", kernel.available())
def test_packed_words_are_one_little_endian_bit_stream(bits: int, backend: str) -> None:
    ring = Ring(bits)
    random = np.random.default_rng(bits)
    for count in (0, 1, 2, 7, 63, 64, 65, 200):
        values = [int.from_bytes(random.bytes(16), "little") % ring.order for _ in range(count)]
        stream = sum(v << (i * bits) for i, v in enumerate(values))
        expected = stream.to_bytes((count * bits + 7) // 8, "little")
        with kernel.use(backend):
            assert ring.pack(ring.from_ints(values)) == expected
            words = ring.unpack(expected, count)
        assert words.shape == (count, *ring.limbs)
        assert words.dtype == ring.dtype
        assert ring.to_ints(words) == values


@pytest.mark.parametrize("backend", kernel.available())
@pytest.mark.parametrize("bits", [11, 22, 61, 90])
def test_a_vector_of_several_passes_survives_the_wire(bits: int, backend: str) -> None:
    ring = Ring(bits)
    raw = np.random.default_rng(1).integers(0, 2**63, size=150_001, dtype=np.int64)
    words = ring.from_ints(raw)
    with kernel.use(backend):
        data = ring.pack(words)
        assert len(data) == -(-words.shape[0] * bits // 8)
        assert np.array_equal(ring.unpack(memoryview(data), words.shape[0]), words)


@pytest.mark.parametrize("group", [Ring(13), Ring(32), Ring(100), Field(61)], ids=str)
def test_any_other_length_is_refused(group: Group) -> None:
    data = group.pack(group.from_ints(range(5)))
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match="bytes, not"):
            group.unpack(wrong, 5)
    with pytest.raises(ValueError, match="bytes, not"):
        group.unpack(data, -5)


@pytest.mark.parametrize("group", [Ring(13), Ring(101), Field(61)], ids=str)
def test_padding_that_is_not_zero_is_refused(group: Group) -> None:
    data = group.pack(group.from_ints(range(5)))
    for bit in range(5 * group.bits % 8, 8):
        wrong = data[:-1] + bytes([data[-1] | 1 << bit])
        with pytest.raises(ValueError, match="padding"):
            group.unpack(wrong, 5)


def test_words_that_are_not_reduced_are_neither_contained_nor_packed() -> None:
    for ring, words in (
        (Ring(22), np.array([2**22], dtype=np.uint32)),
        (Ring(70), np.array([[0, 2**6]], dtype=np.uint64)),
    ):
        assert not ring.contains(words)
        with pytest.raises(MisuseError, match="not reduced"):
            ring.pack(words)


def test_words_of_another_type_are_refused() -> None:
    ring, other = Ring(22), Ring(61).from_ints([1, 2])
    assert not ring.contains(other)
    assert not Ring(100).contains(np.zeros((4, 3), dtype=np.uint64))
    for operation in (ring.add, ring.sub, ring.iadd):
        with pytest.raises(MisuseError, match="uint64"):
            operation(ring.zeros(2), other)


@pytest.mark.parametrize("bits", [-1, 0, 7, 129])
def test_rings_outside_8_to_128_bits_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="8 to 128"):
        Ring(bits)


def test_a_group_is_found_by_its_name() -> None:
    rings = [Ring(bits) for bits in range(8, 129)]
    fields = [Field(exponent) for exponent in (7, 13, 17, 19, 31, 61)]
    for group in (*rings, *fields):
        assert group_from_name(group.name) == group
    assert group_from_name("z2^22") == Ring(22)
    assert len({Ring(22), group_from_name("z2^22"), Ring(23)}) == 2, "groups are dictionary keys"


@pytest.mark.parametrize(
    "name", ["", "z2^", "z2^7", "z2^022", "Z2^22", "z2^22 ", "f2^61", "f2^62-1"]
)
def test_an_unknown_group_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError):
        group_from_name(name)
