"""Masks are addressed, uniform in their group, and cancel; a slow oracle reads the same stream."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.crypto import kernel, prg
from tessera.crypto.field import EXPONENTS, Field
from tessera.crypto.group import Group
from tessera.crypto.prg import Label, Stream
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError

GROUPS = st.integers(8, 128).map(Ring) | st.sampled_from(EXPONENTS).map(Field)
SECRET = Secret(bytes(range(32)))
ERROR_RATE = 1e-6  # how often a chi-square test here would fail for a fresh, honest seed


def stream(number: int) -> Stream:
    return Stream.of(SECRET, Label.PAIR_MASK, number)


def word_at(group: Group, source: Stream, block: int, lane: int, attempt: int = 0) -> int:
    """The mask at word `lane` counted from a block, one AES call at a time."""
    block, lane = block + lane * group.word_bytes // 16, lane % (16 // group.word_bytes)
    drawn = source.redraw(attempt) if attempt else source
    cipher = Cipher(AES128(drawn.key), ECB()).encryptor()
    content = cipher.update(drawn.nonce + block.to_bytes(8, "big"))
    raw = content[lane * group.word_bytes : (lane + 1) * group.word_bytes]
    value = int.from_bytes(raw, "little") % 2**group.bits
    if value >= group.order:
        return word_at(group, source, block, lane, attempt + 1)
    return value


def row_block(group: Group, position: int, width: int) -> int:
    return position * -(-width * group.word_bytes // 16)


def test_a_stream_is_24_derived_bytes() -> None:
    material = SECRET.derive(Label.PAIR_MASK, 1, "x", size=24).reveal()
    assert Stream.of(SECRET, Label.PAIR_MASK, 1, "x") == Stream(material[:16], material[16:])


def test_a_stream_does_not_print_its_key() -> None:
    shown = repr(Stream(b"k" * 16, b"n" * 8))
    assert "kk" not in shown and "nn" not in shown


def test_labels_contexts_and_redraws_part_streams() -> None:
    base = Stream.of(SECRET, Label.PAIR_MASK, 1)
    others = [
        Stream.of(SECRET, Label.SELF_MASK, 1),
        Stream.of(SECRET, Label.PAIR_MASK, 2),
        *(base.redraw(attempt) for attempt in (1, 2, 3)),
    ]
    assert len({base, *others}) == 6
    assert len({s.key for s in (base, *others)}) == 6


@pytest.mark.parametrize(("key", "nonce"), [(15, 8), (17, 8), (32, 8), (16, 7), (16, 16)])
def test_a_stream_of_another_size_is_refused(key: int, nonce: int) -> None:
    with pytest.raises(MisuseError, match="16 bytes of key"):
        Stream(bytes(key), bytes(nonce))


def test_masks_are_the_same_in_every_version() -> None:
    """Two clients of different versions must cancel: change these only with the wire version."""
    source = Stream.of(Secret(bytes(range(32))), Label.PAIR_MASK, 0, 1)
    ring, field, wide = Ring(22), Field(7), Ring(100)
    assert ring.to_ints(prg.uniform(ring, source, 4)) == [4153723, 914935, 2091649, 759762]
    # words 30 and 32 of this stream are all ones, so these are redrawn ones
    assert field.to_ints(prg.uniform(field, source, 3, start=30)) == [103, 94, 12]
    rows = prg.uniform_rows(wide, source, np.array([5], dtype=np.uint64), 2)
    assert wide.to_ints(rows) == [
        198347087804415104311522325213,
        1097725107953296902476355944057,
    ]


@given(GROUPS, st.integers(0, 200) | st.integers(0, 2**60), st.integers(0, 40))
def test_a_mask_word_is_what_the_oracle_reads_there(group: Group, start: int, count: int) -> None:
    lanes = 16 // group.word_bytes
    expected = [
        word_at(group, stream(1), i // lanes, i % lanes) for i in range(start, start + count)
    ]
    words = prg.uniform(group, stream(1), count, start=start)
    assert group.contains(words)
    assert group.to_ints(words) == expected


@pytest.mark.parametrize(
    "group", [Ring(22), Ring(64), Ring(90), Field(7), Field(13), Field(61)], ids=str
)
def test_any_slice_is_a_slice_of_the_whole(group: Group) -> None:
    whole = prg.uniform(group, stream(2), 3000)
    for start in (0, 1, 2, 3, 7, 15, 16, 17, 129, 1000, 2999, 3000):
        assert np.array_equal(
            prg.uniform(group, stream(2), 3000 - start, start=start), whole[start:]
        )


@given(
    GROUPS,
    st.integers(0, 60),
    st.lists(st.sampled_from([1, -1]), max_size=12),
    st.integers(0, 100),
)
def test_a_sum_of_masks_is_the_sum_of_the_vectors(
    group: Group, count: int, signs: list[int], start: int
) -> None:
    streams = [stream(k) for k in range(len(signs))]
    acc = group.from_ints(range(count))
    expected = list(range(count))
    for source, sign in zip(streams, signs, strict=True):
        mask = group.to_ints(prg.uniform(group, source, count, start=start))
        expected = [(e + sign * m) % group.order for e, m in zip(expected, mask, strict=True)]
    prg.accumulate(group, acc, streams, signs, start=start)
    assert group.to_ints(acc) == [e % group.order for e in expected]


@pytest.mark.parametrize(("sign", "word"), [(1, -1), (-1, 0), (-1, 1)])
def test_a_field_sum_of_the_largest_words_does_not_overflow(
    sign: int, word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reductions are put off while 64 bits hold the sum; uniform words would hardly reach that."""
    field = Field(61)
    monkeypatch.setattr(prg, "uniform", lambda group, *_, **__: field.from_ints([word]))
    for count in range(1, 40):
        acc = field.from_ints([-1])
        prg.accumulate(field, acc, [stream(1)] * count, [sign] * count)
        assert field.to_ints(acc) == [(-1 + sign * word * count) % field.order]


@pytest.mark.parametrize("group", [Ring(22), Ring(128), Field(31), Field(61)], ids=str)
def test_what_one_adds_and_the_other_subtracts_cancels(group: Group) -> None:
    streams = [stream(k) for k in range(20)]
    acc = group.from_ints(range(20_000))  # several chunks of a field vector
    prg.accumulate(group, acc, streams, [1] * 20)
    assert not np.array_equal(acc, group.from_ints(range(20_000)))
    prg.accumulate(group, acc, streams, [-1] * 20)
    assert np.array_equal(acc, group.from_ints(range(20_000)))


@given(
    GROUPS,
    st.lists(st.integers(0, 300) | st.integers(0, 2**55), max_size=6),
    st.integers(1, 20),
)
def test_a_row_depends_on_its_own_position_only(
    group: Group, positions: list[int], width: int
) -> None:
    rows = prg.uniform_rows(group, stream(3), np.array(positions, dtype=np.uint64), width)
    assert rows.shape == (len(positions), width, *group.limbs)
    expected = [
        word_at(group, stream(3), row_block(group, position, width), column)
        for position in positions
        for column in range(width)
    ]
    assert group.to_ints(rows) == expected


@given(GROUPS, st.integers(1, 20), st.integers(0, 2**32))
def test_rows_are_added_where_the_index_says(group: Group, width: int, seed: int) -> None:
    rng = random.Random(seed)
    signs = [rng.choice([1, -1]) for _ in range(4)]
    streams = [stream(k) for k in range(4)]
    index = [np.array(rng.sample(range(9), rng.randrange(9)), dtype=np.int64) for _ in range(4)]
    positions = [
        np.array([rng.randrange(2**50) for _ in chosen], dtype=np.uint64) for chosen in index
    ]
    acc = group.from_ints(np.arange(9 * width).reshape(9, width))
    expected = acc.copy()
    for source, sign, chosen, numbers in zip(streams, signs, index, positions, strict=True):
        rows = prg.uniform_rows(group, source, numbers, width)
        for at, row in zip(chosen, rows, strict=True):
            expected[at] = (group.add if sign > 0 else group.sub)(expected[at], row)
    prg.accumulate_rows(group, acc, streams, signs, index, positions)
    assert np.array_equal(acc, expected)


@pytest.mark.parametrize("exponent", [7, 13])
def test_field_masks_are_uniform(exponent: int) -> None:
    field = Field(exponent)
    masks = prg.uniform(field, stream(4), 400 * field.order)
    counts = np.bincount(masks, minlength=field.order)
    assert counts.size == field.order
    assert stats.chisquare(counts).pvalue > ERROR_RATE


def test_a_draw_without_rejection_would_not_pass() -> None:
    """The test above has the power it needs: folding all ones onto zero is seen at once."""
    field = Field(7)
    raw = prg.uniform(Ring(8), stream(4), 400 * field.order) & np.uint8(field.order)
    folded = np.where(raw == field.order, np.uint8(0), raw)
    counts = np.bincount(folded, minlength=field.order)
    assert stats.chisquare(counts).pvalue < ERROR_RATE


def test_redrawn_words_are_uniform_too() -> None:
    field = Field(7)
    count = 128 * 127 * 40
    raw = prg.uniform(Ring(8), stream(5), count) & np.uint8(field.order)
    redrawn = prg.uniform(field, stream(5), count)[raw == field.order]
    assert redrawn.size > 4000
    counts = np.bincount(redrawn, minlength=field.order)
    assert stats.chisquare(counts).pvalue > ERROR_RATE


def test_a_sum_of_another_shape_type_or_layout_is_refused() -> None:
    ring = Ring(22)
    streams, signs = [stream(1)], [1]
    for acc in (
        ring.zeros((2, 2)),
        ring.zeros(8)[::2],
        Ring(61).zeros(4),
        np.full(4, 2**22, dtype=np.uint32),
    ):
        with pytest.raises(MisuseError):
            prg.accumulate(ring, acc, streams, signs)
    for matrix in (ring.zeros(4), ring.zeros((4, 4)).T, ring.zeros((4, 4))[:, :2]):
        with pytest.raises(MisuseError):
            none = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.uint64)]
            prg.accumulate_rows(ring, matrix, streams, signs, *none)


@pytest.mark.parametrize("group", [Ring(22), Field(31)], ids=str)
def test_arguments_that_do_not_fit_together_are_refused(group: Group) -> None:
    streams = [stream(1), stream(2)]
    acc, before = group.zeros((5, 3)), group.zeros((5, 3))

    def rows(index: list[int], positions: list[int], signs: list[int]) -> None:
        chosen = np.array(index, dtype=np.int64)
        numbers = np.array(positions, dtype=np.uint64)
        prg.accumulate_rows(group, acc, streams[:1], signs, [chosen], [numbers])

    for index, positions, signs in (
        ([1, 1], [2, 3], [1]),  # a row twice
        ([3, 0, 3], [1, 2, 3], [1]),
        ([5], [1], [1]),  # outside
        ([-1], [1], [1]),
        ([1], [1, 2], [1]),  # lengths
        ([1], [1], [1, 1]),
        ([1], [1], [2]),  # signs
        ([1], [1], [0]),
    ):
        with pytest.raises(MisuseError):
            rows(index, positions, signs)
    with pytest.raises(MisuseError):
        prg.accumulate(group, group.zeros(4), streams, [1])
    with pytest.raises(MisuseError):
        prg.accumulate(group, group.zeros(4), streams, [1, 2])
    with pytest.raises(MisuseError):
        prg.uniform(group, stream(1), -1)
    with pytest.raises(MisuseError):
        prg.uniform(group, stream(1), 1, start=-1)
    assert np.array_equal(acc, before), "refused before anything was added"


def test_positions_over_the_counter_are_refused_not_wrapped() -> None:
    """A counter that wrapped would mask two rows with the same words."""
    ring = Ring(32)
    last = (2**64 - 1) // 5  # 18 words are 5 blocks; row `last` would end beyond 2^64 blocks
    prg.uniform_rows(ring, stream(1), np.array([last - 1], dtype=np.uint64), 18)
    with pytest.raises(MisuseError, match="64-bit counter"):
        prg.uniform_rows(ring, stream(1), np.array([last + 1], dtype=np.uint64), 18)
    prg.uniform(ring, stream(1), 4, start=4 * (2**64 - 1))
    with pytest.raises(MisuseError, match="64 bits"):
        prg.uniform(ring, stream(1), 5, start=4 * (2**64 - 1))


def test_every_backend_gives_the_same_masks() -> None:
    for group in (Ring(22), Ring(100), Field(7), Field(61)):
        results = []
        for name in kernel.available():
            with kernel.use(name):
                acc = group.from_ints(range(5000))
                prg.accumulate(group, acc, [stream(1), stream(2)], [1, -1], start=3)
                results.append(group.pack(acc))
        assert len(set(results)) == 1
