"""The encoding: what it says it is, what it refuses, and that refusing costs nothing."""

from __future__ import annotations

import hashlib
import json
import math
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import harness
import recording
import vectors
from tessera import wire
from tessera.crypto.entropy import RootedEntropy
from tessera.crypto.group import group_from_name
from tessera.crypto.secret import Secret
from tessera.errors import (
    ConfigError,
    Malformed,
    MisuseError,
    Oversized,
    TrailingBytes,
    Truncated,
    UnknownTag,
    UnknownVersion,
    WireError,
)
from tessera.ids import HELPER, SERVER, ClientId
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.epochs.messages import MAX_VECTOR_BYTES, EpochHeader
from tessera.protocols.machine import REASON, Left
from tessera.protocols.membership.snapshot import MAX_SNAPSHOTS, ClientSnapshot
from tessera.protocols.secagg.messages import MaskedInput, NextStage, SurvivorList
from tessera.protocols.secagg.params import GraphKind, RowSumSpec, SecAggParams, StageSpec
from tessera.protocols.secagg.phases import InputSum
from tessera.protocols.two_server.messages import Forwarded, Purpose
from tessera.rounds.root import RootCodec
from tessera.wire.index_set import IndexSet, JoinedSets, SetsByKey
from tessera.wire.stored import PARTY, ClientSet, Kept, Marks

NAMED = (UnknownVersion, UnknownTag, Truncated, Oversized, TrailingBytes, Malformed)
FULL = 1 << 64
HUGE = (1 << 14, 1 << 20, 1 << 28, (1 << 28) + 1, 1 << 32, 1 << 36, 1 << 40, 1 << 63, FULL - 1)

# Decoding may take this many bytes of memory for each byte received, and a little to stand on: a
# set of indices has four bits of an index at least, and eight bytes of it in memory. Dictionaries
# in messages have an entry per client; stored states are our own.
PER_BYTE = 16
PER_BYTE_OF_STATES = 80
TO_STAND_ON = 128 << 10


def varint(value: int) -> bytes:
    out = bytearray()
    wire.VARINT.write(out, value)
    return bytes(out)


def read(codec: wire.Codec, data: bytes) -> Any:
    """One value that takes up all of `data`."""
    source = wire.Reader(data)
    value = codec.read(source)
    assert not source.left
    return value


def written(codec: wire.Codec, value: Any) -> bytes:
    out = bytearray()
    codec.write(out, value)
    return bytes(out)


def same(a: Any, b: Any) -> bool:
    """Equality that looks into records and arrays, types included."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, bytes) and isinstance(b, bytes):
        return a == b  # a part comes back where bytes were given
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, RootedEntropy):
        return a.root.reveal() == b.root.reveal()
    if is_dataclass(a) and type(a) in wire._LAYOUTS:
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# -- real messages and states, and what can become of them on the way


@lru_cache
def corpus() -> dict[str, list[bytes]]:
    """Up to a dozen encodings of every record that stands alone, from real rounds."""
    found: dict[str, set[bytes]] = defaultdict(set)
    for kept in recording.rounds():
        for _, _, _, data in kept.messages:
            found[type(wire.decode(data)).__name__].add(data)
        for data in kept.stored():
            if recording.stands_alone(wire.kind_of(data)):
                found[type(wire.decode(data)).__name__].add(data)
    for data in recording.round_messages():
        if recording.stands_alone(wire.kind_of(data)):
            found[type(wire.decode(data)).__name__].add(data)
    return {kind: sorted(some)[:12] for kind, some in sorted(found.items())}


def numbers_in(data: bytes) -> list[tuple[int, int]]:
    """Where a valid message holds its counts, lengths and other numbers of variable length."""
    places: list[tuple[int, int]] = []
    real = wire.VarUnsigned.read

    def noted(codec: wire.VarUnsigned, source: wire.Reader) -> int:
        start = source.position
        value = real(codec, source)
        places.append((start, source.position))
        return value

    wire.VarUnsigned.read = noted  # type: ignore[method-assign]
    try:
        wire.decode(data)
    finally:
        wire.VarUnsigned.read = real  # type: ignore[method-assign]
    return places


class Mutator:
    """Messages as a bad line, a bad peer or a bad disk would deliver them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.kinds = list(corpus().values())
        self.places = {data: numbers_in(data) for some in self.kinds for data in some}

    def below(self, bound: int) -> int:
        return int(self.rng.integers(bound))

    def valid(self) -> bytes:
        some = self.kinds[self.below(len(self.kinds))]
        return some[self.below(len(some))]

    def message(self) -> bytes:
        """One message: mostly mutated inside a frame that is in order, so that parsers see it."""
        data = self.valid()
        moves = (self.flip, self.cut, self.extend, self.splice, self.renumber, self.overwrite)
        choice = self.below(20)
        if choice == 0:
            return self.rng.bytes(self.below(200))
        if choice == 1:
            body = data[:3] + self.rng.bytes(self.below(400))
        elif choice == 2:
            body = self.flip(data)[: -wire.CHECKSUM_BYTES]
            return body + data[-wire.CHECKSUM_BYTES :]
        else:
            body = moves[self.below(len(moves))](data)[: -wire.CHECKSUM_BYTES]
            if self.below(8) and len(body) >= 3:
                body = data[:3] + body[3:]
        return recording.checksummed(body)

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(1 + self.below(3)):
            changed[self.below(len(changed))] ^= 1 << self.below(8)
        return bytes(changed)

    def overwrite(self, data: bytes) -> bytes:
        at, size = self.below(len(data)), 1 + self.below(8)
        fill = (b"\x00", b"\xff", b"\x80", self.rng.bytes(1))[self.below(4)]
        return data[:at] + fill * size + data[at + size :] + bytes(wire.CHECKSUM_BYTES)

    def cut(self, data: bytes) -> bytes:
        at = self.below(len(data))
        if self.below(2):
            return data[:at]
        return data[:at] + data[at + 1 + self.below(9) :]

    def extend(self, data: bytes) -> bytes:
        at = self.below(len(data)) if self.below(2) else len(data) - wire.CHECKSUM_BYTES
        return data[:at] + self.rng.bytes(1 + self.below(9)) + data[at:]

    def splice(self, data: bytes) -> bytes:
        other = self.valid()
        return data[: self.below(len(data))] + other[self.below(len(other)) :]

    def renumber(self, data: bytes) -> bytes:
        places = self.places[data]
        if not places:
            return self.flip(data)
        start, end = places[self.below(len(places))]
        value = HUGE[self.below(len(HUGE))] if self.below(2) else self.below(300)
        return data[:start] + varint(value) + data[end:]


def test_the_corpus_has_every_record_there_is():
    assert set(corpus()) == {kind.__name__ for kind in ALONE}


def test_real_messages_and_states_come_back_byte_for_byte():
    for data in (data for some in corpus().values() for data in some):
        value = wire.decode(data)
        assert wire.encode(value) == data
        assert same(wire.decode(data), value)


def fuzz(seed: int, count: int) -> Counter[str]:
    """Decode mutated messages; anything but a `WireError` or a canonical record is a failure."""
    mutator, outcomes = Mutator(seed), Counter[str]()
    for _ in range(count):
        data = mutator.message()
        try:
            value = wire.decode(data)
        except WireError as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["decoded"] += 1
            assert wire.encode(value) == data, f"two encodings of one {type(value).__name__}"
    return outcomes


@pytest.mark.parametrize("seed", range(10))
def test_10_000_mutated_messages_are_refused_by_name_or_are_canonical(seed):
    outcomes = fuzz(seed, 10_000)
    assert set(outcomes) == {"decoded", *(error.__name__ for error in NAMED)}
    assert outcomes["decoded"] > 1000, "the mutations never get past the checks"


# -- memory


def peak_of(call: Callable[[], Any]) -> int:
    """The most memory that this call held at any time, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def attempt(data: bytes) -> None:
    try:
        wire.decode(data)
    except WireError:
        return


def assert_frugal(data: bytes, per_byte: int = PER_BYTE) -> None:
    peak = peak_of(lambda: attempt(data))
    assert peak <= per_byte * len(data) + TO_STAND_ON, f"{peak} bytes for a message of {len(data)}"


def test_every_length_in_every_record_can_lie_without_costing_memory():
    for some in corpus().values():
        for start, end in numbers_in(some[0]):
            for claim in HUGE:
                lie = some[0][:start] + varint(claim)
                assert_frugal(recording.checksummed(lie))
                assert_frugal(recording.checksummed(lie + some[0][end : -wire.CHECKSUM_BYTES]))


def test_mutated_messages_do_not_cost_more_than_their_length_explains():
    mutator = Mutator(77)
    for _ in range(2_000):
        assert_frugal(mutator.message())


@pytest.mark.parametrize("spread", [1, 2, 3, 4, 5, 8, 100, 10**6])
def test_a_long_set_of_indices_costs_little_more_than_itself(spread):
    rows = np.arange(0, 50_000 * spread, spread, dtype=np.uint64)
    data = wire.encode(SurvivorList(round_id=1, stage=0, survivors=rows))
    assert_frugal(data)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 255, 256, 257, 2048, 2049, 5000])
@pytest.mark.parametrize("spread", [1, 2, 3, 5, 1000])
def test_padding_of_a_dense_set_is_zeros_of_one_length(count, spread):
    rows = np.arange(0, count * spread, spread, dtype=np.uint64)
    out = bytearray()
    IndexSet(1 << 28).write(out, rows)
    assert len(out) >= count / 2
    assert np.array_equal(read(IndexSet(1 << 28), bytes(out)), rows)
    if spread == 1 and count > 8:  # a bitmap of one bit each, and zeros after it
        with pytest.raises(Malformed, match="padding"):
            read(IndexSet(1 << 28), bytes(out[:-1]) + b"\x01")
        with pytest.raises(Truncated):
            read(IndexSet(1 << 28), bytes(out[:-1]))


def inflated(value: Any) -> Iterator[Any]:
    """A record with each of its sets, dictionaries, tuples and byte strings made long in turn."""
    for item in fields(value):
        old = getattr(value, item.name)
        match old:
            case np.ndarray() if old.dtype == np.uint64 and old.ndim == 1:
                longer = [np.arange(30_000, dtype=np.uint64)]
            case Mapping() if old and all(isinstance(key, int) for key in old):
                first = next(iter(old.values()))
                filled = np.arange(30_000, dtype=np.uint64)
                longer = [{ClientId(i): first for i in range(many)} for many in (900, 9_000)]
                if isinstance(first, np.ndarray) and first.dtype == np.uint64:
                    longer.append({next(iter(old)): filled})
                    longer.append({ClientId(i): filled[: 900 - i] for i in range(900)})
                    longer.append({ClientId(i): filled[i : i + 1] for i in range(30_000)})
                    longer.append({ClientId(i): filled[i : i + 2] for i in range(9_000)})
            case tuple() if old:
                longer = [old[:1] * 900]
                if is_dataclass(old[0]):
                    longer += [(inner,) for inner in inflated(old[0])]
            case bytes():
                longer = [bytes(100_000)]
            case _:
                continue
        yield from (replace(value, **{item.name: new}) for new in longer)


def test_every_kind_of_message_costs_at_most_sixteen_times_its_length():
    """Whichever of its parts is long; what the encoding refuses cannot be sent either."""
    tried = set()
    for kind, some in corpus().items():
        value = wire.decode(some[0])
        if type(value).__module__.rpartition(".")[2] != "messages":
            continue  # a state, which its owner stores
        for data in some:
            assert_frugal(data)
        for large in inflated(value):
            try:
                data = wire.encode(large)
            except (MisuseError, AttributeError, TypeError):
                continue
            assert_frugal(data)
            tried.add(kind)
    assert {"UnionOpened", "SurvivorList", "Roster", "RowGroups", "RevealedShares"} <= tried


def test_an_array_of_a_state_is_copied_once():
    zeros = np.zeros(1 << 17, dtype=np.uint64)
    data = wire.encode(InputSum(dense=zeros, tables={}, answers={}))
    assert peak_of(lambda: wire.decode(data)) < 1.1 * zeros.nbytes
    state = wire.decode(data)
    state.dense[0] = 1  # a sum is added to, and not in the bytes it was read from
    assert state.dense.flags.aligned and wire.decode(data).dense[0] == 0


def test_many_small_items_cost_what_many_small_items_cost():
    answers = {ClientId(i): True for i in range(20_000)}
    none = np.zeros(0, dtype=np.uint8)
    data = wire.encode(InputSum(dense=none, tables={}, answers=answers))
    assert_frugal(data, PER_BYTE_OF_STATES)


def array_claim(*shape: int, kind: int = 0) -> bytes:
    return bytes([kind, len(shape)]) + b"".join(map(varint, shape))


@pytest.mark.parametrize(
    "shape",
    [
        (0, 1 << 63),
        (0, FULL - 1),
        (FULL - 1, 0),
        (FULL - 1,) * 3,
        (0, 1 << 36, 1 << 36),
        (1 << 32, 1 << 32, 0),
        (1 << 36, 2),
    ],
)
def test_an_array_of_impossible_shape_is_oversized_even_if_it_is_empty(shape):
    for kind in range(4):
        with pytest.raises(Oversized):
            read(wire.Words(1 << 36), array_claim(*shape, kind=kind))


@pytest.mark.parametrize("shape", [(1 << 30,), (1 << 16, 1 << 16), (3, 1, 2)])
def test_an_array_without_its_bytes_is_truncated(shape):
    def claim() -> None:
        with pytest.raises(Truncated):
            read(wire.Words(1 << 36), array_claim(*shape))

    assert peak_of(claim) < TO_STAND_ON


@pytest.mark.parametrize("head", [b"\x04\x01\x00", b"\xff\x01\x00", b"\x00\x04" + 4 * b"\x01"])
def test_an_array_of_unknown_type_or_dimension_is_malformed(head):
    with pytest.raises(Malformed):
        read(wire.Words(1 << 10), head + bytes(8))


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("top", [0, 1, 1 << 14, 1 << 33, FULL - 1])
def test_a_few_bytes_cannot_claim_a_large_set_of_indices(count, top):
    def claim() -> None:
        with pytest.raises((Oversized, Malformed, Truncated)):
            read(IndexSet(1 << 28), varint(count) + varint(top) + bytes(16))

    assert peak_of(claim) < TO_STAND_ON


def test_more_marks_than_the_set_states_are_not_turned_into_indices():
    count, bits = 40_000, 1 << 17  # three times as many marks as stated
    claim = varint(count) + varint(bits - 1) + b"\xff" * (bits // 8)
    claim += bytes(count // 2 - bits // 8)  # up to four bits of each

    def refuse() -> None:
        with pytest.raises(Malformed, match="length it states"):
            read(IndexSet(1 << 28), claim)

    assert peak_of(refuse) < 2 * bits


@dataclass(frozen=True, slots=True)
class Nothing:
    """A record that takes no bytes."""


EMPTY = wire.Sequence(wire.Nested(Nothing), 1 << 40)


@pytest.mark.parametrize(
    ("codec", "before"),
    [
        (EMPTY, b""),
        (wire.Sequence(wire.Exactly(0), 1 << 40), b""),
        (wire.ByKey(wire.Exactly(0), wire.Nested(Nothing), 1 << 40), b""),
        (wire.Sequence(EMPTY, 1 << 40), varint(1)),
        (wire.Maybe(EMPTY), b"\x01"),
    ],
)
def test_items_that_take_no_bytes_cannot_be_asked_for_by_the_million(codec, before):
    def claim() -> None:
        with pytest.raises(Truncated):
            read(codec, before + varint(1 << 20))

    assert peak_of(claim) < TO_STAND_ON


def test_a_sequence_of_items_that_take_no_bytes_is_not_written_either():
    with pytest.raises(MisuseError, match="no bytes"):
        written(wire.Sequence(wire.Nested(Nothing), 10), (Nothing(), Nothing()))


def test_a_dictionary_counts_keys_and_values_before_it_reads_them():
    codec = wire.ByKey(wire.U32, wire.U32, 1 << 20)
    with pytest.raises(Truncated, match="3 items are due and 23 bytes are left"):
        read(codec, varint(3) + bytes(23))


def test_a_message_over_the_cap_is_refused_before_it_is_looked_at():
    long = MaskedInput(round_id=1, stage=0, sender=ClientId(1), dense=bytes(1 << 20), tables=())
    data = wire.encode(long)

    def refuse() -> None:
        with pytest.raises(Oversized):
            wire.decode(data, cap=len(data) - 1)

    assert peak_of(refuse) < TO_STAND_ON
    assert same(wire.decode(data, cap=len(data)), long)


def test_no_record_contains_itself_so_that_depth_is_bounded():
    def inside(codec: wire.Codec) -> Iterator[type[Any]]:
        if isinstance(codec, wire.Nested):
            yield codec.kind
        elif isinstance(codec, wire.OneOf):
            yield from codec.kinds
        else:
            if isinstance(codec, wire.ByKey):
                yield from inside(codec.key)
            if hasattr(codec, "inner"):
                yield from inside(codec.inner)

    def descend(kind: type[Any], above: tuple[type[Any], ...]) -> None:
        assert kind not in above
        for _, codec in wire.layout(kind):
            for deeper in inside(codec):
                descend(deeper, (*above, kind))

    for kind in wire.records().values():
        descend(kind, ())


# -- the frame


def example() -> bytes:
    return wire.encode(NextStage(round_id=12, stage=1))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_not_read(version):
    with pytest.raises(UnknownVersion, match=f"version {version}"):
        wire.decode(recording.checksummed(bytes([version]) + example()[1:-8]))


def test_a_tag_nobody_has_is_unknown():
    with pytest.raises(UnknownTag, match="0xffff"):
        wire.decode(recording.checksummed(b"\x01\xff\xff" + example()[3:-8]))


def test_a_tag_that_is_not_due_here_is_unknown():
    with pytest.raises(UnknownTag):
        wire.decode(example(), expect=[SurvivorList])
    assert wire.decode(example(), expect=iter([SurvivorList, NextStage])).stage == 1


def test_every_shorter_message_is_truncated():
    for some in corpus().values():
        body = min(some, key=len)[: -wire.CHECKSUM_BYTES]
        for size in range(len(body)):
            with pytest.raises(Truncated):
                wire.decode(recording.checksummed(body[:size]))
    for size in range(wire.HEADER.size + wire.CHECKSUM_BYTES):
        with pytest.raises(Truncated):
            wire.decode(bytes(size))


def test_every_longer_message_has_trailing_bytes():
    for some in corpus().values():
        with pytest.raises(TrailingBytes, match="1 bytes follow"):
            wire.decode(recording.checksummed(some[0][: -wire.CHECKSUM_BYTES] + b"\x00"))


def test_any_single_changed_bit_is_noticed():
    for some in corpus().values():
        data = min(some, key=len)
        for at in range(0, len(data), 1 + len(data) // 64):
            for bit in range(8):
                changed = bytearray(data)
                changed[at] ^= 1 << bit
                with pytest.raises(WireError):
                    wire.decode(bytes(changed))


def test_a_view_of_a_larger_buffer_is_read_like_bytes():
    buffer = bytearray(b"before" + example() + b"after")
    value = wire.decode(memoryview(buffer)[6:-5])
    buffer[:] = bytes(len(buffer))
    assert value == NextStage(round_id=12, stage=1)


def test_refusals_do_not_repeat_what_was_received():
    sign = "SENTINEL"
    spec = StageSpec(name=sign, group=group_from_name("z2^32"), dense=3, max_value=7)
    params = harness.params(4, spec, federation=sign, plan_hash=sign.encode() * 4)
    data = wire.encode(params)
    sentinels = (sign, sign.encode().hex(), repr(sign.encode()))
    refusals = 0
    for at in range(len(data) - wire.CHECKSUM_BYTES):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            body = bytearray(data[: -wire.CHECKSUM_BYTES])
            body[at] = value
            try:
                wire.decode(recording.checksummed(body))
            except WireError as error:
                refusals += 1
                assert not any(text in str(error) for text in sentinels)
                assert error.__cause__ is None
    assert refusals > 100


# -- the registry


def test_every_tag_belongs_to_one_record():
    known = wire.records()
    assert len(set(known.values())) == len(known)
    assert all(wire.tag_of(kind) == tag and tag < 1 << 16 for tag, kind in known.items())


def test_a_tag_cannot_be_given_twice():
    with pytest.raises(MisuseError, match="0x010c is taken"):
        wire.record(tag=wire.tag_of(NextStage))(Nothing)
    assert wire.records()[wire.tag_of(NextStage)] is NextStage


def test_a_record_without_a_tag_does_not_travel():
    with pytest.raises(MisuseError, match="Nothing has no tag"):
        wire.encode(Nothing())


def test_a_field_without_a_codec_is_found_when_the_layout_is_read():
    @dataclass(frozen=True, slots=True)
    class Vague:
        known: Annotated[int, wire.U8]
        unknown: list

    with pytest.raises(MisuseError, match="Vague: no codec"):
        wire._codec_of(Vague, list)


# -- structure: any record that can be made comes back


def index_sets(max_size: int = 40) -> st.SearchStrategy[np.ndarray]:
    """Sorted sets over all of 64 bits: scattered, clustered and without gaps."""
    edges = st.sampled_from([0, 1, 2, 63, 64, 255, 1 << 32, (1 << 63) - 1, 1 << 63, FULL - 1])
    anywhere = st.integers(0, FULL - 1) | edges
    scattered = st.sets(anywhere, max_size=max_size)
    near = st.builds(
        lambda base, steps: {min(base + step, FULL - 1) for step in steps},
        anywhere,
        st.sets(st.integers(0, 200), max_size=max_size),
    )
    runs = st.builds(
        lambda start, size: set(range(start, min(start + size, FULL))),
        anywhere | st.just(0) | st.just(FULL - 5),
        st.integers(0, max_size),
    )
    return (scattered | near | runs).map(lambda some: np.array(sorted(some), dtype=np.uint64))


def consistent(kind: type[Any], **chosen: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A record that checks its fields against each other: some of them chosen, the rest free."""
    drawn = {name: values(codec) for name, codec in wire.layout(kind)} | chosen

    def made(fields: dict[str, Any]) -> Any:
        try:
            return kind(**fields)
        except ConfigError:
            return None

    return st.fixed_dictionaries(drawn).map(made).filter(lambda value: value is not None)


def stage_specs() -> st.SearchStrategy[StageSpec]:
    widths = st.integers(1, 1 << 32)
    tables = st.dictionaries(values(wire.U16), widths, max_size=3).map(
        lambda wide: tuple(RowSumSpec(table=t, width=wide[t]) for t in sorted(wide))
    )
    bounds = st.none() | st.integers(0, 2)
    return consistent(StageSpec, dense=st.integers(0, 1 << 20), tables=tables, max_value=bounds)


def all_params() -> st.SearchStrategy[SecAggParams]:
    return consistent(
        SecAggParams,
        cohort=st.integers(12, 50),
        stages=st.lists(stage_specs(), min_size=1, max_size=3).map(tuple),
        graph=st.just(GraphKind.COMPLETE),
        corrupt=st.integers(0, 1),
        dropout=st.floats(0, 1, exclude_max=True).map(lambda x: x + 0.0),
        threshold=st.just(0),
        degree=st.just(0),
        min_group=st.sampled_from([0, 12]),
    )


def keys(count: int) -> st.SearchStrategy[tuple[bytes, ...]]:
    return st.tuples(*[values(wire.KEY)] * count)


def fixed_groups() -> st.SearchStrategy[FixedGroup]:
    @st.composite
    def build(draw: st.DrawFn) -> FixedGroup:
        federation = draw(values(wire.TEXT))
        distinct = st.lists(
            instances(Leaf),
            min_size=2,
            max_size=3,
            unique_by=(lambda leaf: leaf.client, lambda leaf: leaf.key),
        )
        return FixedGroup(
            federation=federation,
            plan=draw(values(wire.KEY)),
            number=draw(values(wire.U32)),
            snapshot=draw(values(wire.U64)),
            snapshot_digest=draw(values(wire.KEY)),
            values=draw(keys(2)),
            beacon=draw(values(wire.KEY)),
            leaves=tuple(replace(leaf, federation=federation) for leaf in draw(distinct)),
        )

    return build()


def snapshots() -> st.SearchStrategy[ClientSnapshot]:
    return st.builds(
        ClientSnapshot,
        federation=values(wire.TEXT),
        number=st.integers(0, MAX_SNAPSHOTS),
        predecessor=values(wire.KEY),
        root=values(wire.KEY),
        leaves=values(wire.U32),
        commitments=keys(2),
        signature=values(wire.SIGNATURE),
    )


def epoch_headers() -> st.SearchStrategy[EpochHeader]:
    fields = {name: values(codec) for name, codec in wire.layout(EpochHeader)}
    fields["period"], fields["epoch"] = st.integers(1, 2**32 - 1), st.integers(1, FULL - 1)
    fields["length"] = st.integers(1, 300) | st.just(8 * MAX_VECTOR_BYTES // 128)
    return st.builds(EpochHeader, **fields)


CONSTRAINED = {
    EpochHeader: epoch_headers,
    SecAggParams: all_params,
    StageSpec: stage_specs,
    FixedGroup: fixed_groups,
    ClientSnapshot: snapshots,
}
"""Records whose fields cannot be chosen one by one."""

GROUPS = ("z2^8", "z2^22", "z2^64", "z2^65", "z2^128", "f2^31-1", "f2^61-1")


def values(codec: wire.Codec) -> st.SearchStrategy[Any]:
    """What a codec can write, read off the codec itself."""
    match codec:
        case wire.Unsigned():
            top = (1 << 8 * codec.least) - 1
            return st.integers(0, top) | st.sampled_from([0, top])
        case wire.VarUnsigned():
            return st.integers(0, FULL - 1) | st.integers(0, 300) | st.just(FULL - 1)
        case wire.Real():
            return st.floats(allow_nan=False, allow_infinity=False).map(lambda x: x + 0.0)
        case wire.Flag():
            return st.booleans()
        case wire.Exactly():
            return st.binary(min_size=codec.least, max_size=codec.least)
        case wire.UpTo():
            return st.binary(max_size=min(codec.cap, 140))
        case wire.Converted() if codec is wire.SECRET:
            return st.binary(min_size=32, max_size=32).map(Secret)
        case wire.Converted() if codec is wire.TEXT:
            return st.text(max_size=40)
        case wire.Converted() if codec is wire.GROUP:
            return st.sampled_from(GROUPS).map(group_from_name)
        case wire.Converted() if codec is REASON:
            return st.text(max_size=40)
        case wire.Converted() if codec is PARTY:
            return st.integers(0, (1 << 32) - 1) | st.sampled_from([SERVER, HELPER])
        case RootCodec():
            return st.binary(min_size=32, max_size=32).map(lambda raw: RootedEntropy(Secret(raw)))
        case Marks():
            return st.frozensets(st.binary(min_size=16, max_size=16), max_size=3)
        case ClientSet():
            return index_sets(12).map(lambda some: frozenset(some.tolist()))
        case wire.Converted() if isinstance(codec.back, type) and issubclass(codec.back, Enum):
            return st.sampled_from(codec.back)
        case wire.Maybe():
            return st.none() | values(codec.inner)
        case wire.ByKey():
            return st.dictionaries(values(codec.key), values(codec.inner), max_size=3)
        case wire.Sequence():
            return st.lists(values(codec.inner), max_size=min(codec.cap, 3)).map(tuple)
        case IndexSet():
            return index_sets(12)
        case wire.Words():
            shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
            return st.sampled_from(codec.KINDS).flatmap(lambda kind: hnp.arrays(kind, shapes))
        case wire.Nested():
            return instances(codec.kind)
        case wire.OneOf():
            return st.one_of(*map(instances, codec.kinds))
    raise AssertionError(f"no strategy for {type(codec).__name__}")


def instances(kind: type[Any]) -> st.SearchStrategy[Any]:
    if kind in CONSTRAINED:
        return CONSTRAINED[kind]()
    return st.deferred(
        lambda: st.builds(kind, **{name: values(codec) for name, codec in wire.layout(kind)})
    )


ALONE = [kind for kind in wire.records().values() if recording.stands_alone(kind)]
"""The other records name messages that are stored beside them (`test_stored.py`)."""


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_every_record_comes_back_as_it_was(kind, data):
    value = data.draw(instances(kind))
    encoded = wire.encode(value)
    decoded = wire.decode(encoded, expect=[kind])
    assert same(decoded, value)
    assert wire.encode(decoded) == encoded
    assert wire.digest(decoded) == wire.digest_of(encoded) == wire.framed(value)[1]
    if not wire.Nested(kind).has_parts:
        assert wire.digest(decoded) == hashlib.sha256(encoded).digest()


def carried(*public: bytes, box: bytes = b"box") -> Forwarded:
    return Forwarded(
        purpose=Purpose.WRITE,
        round_id=1,
        sender=2,
        report_id=bytes(32),
        public=public,
        box=box,
    )


@given(data=st.data(), joined=st.binary(max_size=40))
def test_a_digest_names_the_bytes_of_parts_and_where_one_ends(data, joined):
    """Of all ways to cut the same bytes into two parts and a box no two have the same digest."""
    cuts = [sorted(data.draw(st.tuples(*[st.integers(0, len(joined))] * 2))) for _ in range(2)]
    one, two = (carried(joined[:a], joined[a:b], box=joined[b:]) for a, b in cuts)
    assert (wire.digest(one) == wire.digest(two)) == (cuts[0] == cuts[1])
    assert wire.digest(one) == hashlib.sha256(flattened(one)).digest()


def flattened(message: Forwarded) -> bytes:
    """What is hashed of a report that is carried, its checksum included."""
    frame = b"\x01\x11\x04\x05write" + (1).to_bytes(8, "little") + (2).to_bytes(4, "little")
    frame += bytes(32) + varint(len(message.public))
    for part in message.public:
        frame += varint(len(part)) + hashlib.sha256(part).digest()
    frame += varint(len(message.box)) + message.box
    return frame + hashlib.sha256(frame).digest()[:8]


def test_a_message_that_is_read_again_copies_none_of_its_parts():
    long = bytes(range(256)) * 4000
    kept = Kept.of(carried(long, long[::-1]))
    kept.forget_decoded()
    tracemalloc.start()
    again = kept.message
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(long) / 8
    assert tuple(map(bytes, again.public)) == (long, long[::-1])
    assert wire.framed(again) == (kept.data, kept.digest)


def test_a_part_is_hashed_once_from_its_arrival_until_it_is_passed_on(monkeypatch):
    """One pass gives the checksum, the digest and what is signed; a part that goes on in another
    message, with another box, is not looked at again, and nor is a message that is kept."""
    long = bytes(100_000)
    data, digest = wire.framed(carried(long, long))
    seen = []
    sha256 = hashlib.sha256

    class Counting:
        def __init__(self, some=b""):
            self.running = sha256(some)
            seen.append(len(some))

        def update(self, some):
            self.running.update(some)
            seen.append(len(some))

        def digest(self):
            return self.running.digest()

    monkeypatch.setattr(hashlib, "sha256", Counting)
    message, found = wire.opened(data)
    assert found == digest
    assert 2 * len(long) < sum(seen) < 2 * len(long) + 200
    seen.clear()
    wire.framed(carried(*message.public, box=b"another"))
    assert [wire.part_digest(part) for part in message.public] == [sha256(long).digest()] * 2
    assert sum(seen) < 200
    seen.clear()
    kept = Kept(data, digest)
    assert kept.message.public == message.public
    assert not seen


@given(rows=index_sets())
@settings(max_examples=300)
def test_a_set_of_indices_comes_back_and_is_as_small_as_promised(rows):
    codec = IndexSet(1 << 20)
    data = written(codec, rows)
    assert same(read(codec, data), rows)
    if len(rows):
        top = int(rows[-1])
        stated = len(varint(len(rows))) + len(varint(top))
        promised = len(rows) * max(4, math.log2((top + 1) / len(rows)) + 2)
        assert 8 * (len(data) - stated) <= promised + 2 * 8  # two parts, each in whole bytes


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [0],
        [FULL - 1],
        [0, FULL - 1],
        range(1000),
        range(FULL - 9, FULL),
        range(0, 1 << 20, 1 << 10),
        [1 << k for k in range(64)],
    ],
    ids=["none", "zero", "last", "ends", "dense", "last nine", "even", "powers"],
)
def test_sets_at_the_edges_come_back(rows):
    rows = np.array(list(rows), dtype=np.uint64)
    codec = IndexSet(1 << 20)
    assert same(read(codec, written(codec, rows)), rows)


@given(st.dictionaries(st.integers(0, 99), index_sets(), max_size=5), st.data())
def test_a_dictionary_of_sets_comes_back_and_sends_no_set_twice(sets, data):
    if sets:
        again = data.draw(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(sorted(sets)))))
        sets = sets | {key: sets[of].copy() for key, of in again}
    codec = SetsByKey(wire.U32, 200, 1 << 20)
    sent = written(codec, sets)
    back = read(codec, sent)
    assert back.keys() == sets.keys()
    assert all(same(back[key], sets[key]) for key in sets)
    distinct = {rows.tobytes(): rows for rows in sets.values()}
    bodies = sum(len(written(IndexSet(1 << 20), rows)) for rows in distinct.values())
    assert len(sent) == len(varint(len(sets))) + 5 * len(sets) + bodies
    shared = {key: distinct[rows.tobytes()] for key, rows in sets.items()}
    assert written(codec, shared) == sent  # the same array, or an equal one
    assert sent == written_one_by_one(sets)
    number = {rows: s for s, rows in enumerate(distinct)}
    joined = JoinedSets(
        np.array(sorted(sets), dtype=np.uint64),
        np.array([number[sets[key].tobytes()] for key in sorted(sets)], dtype=np.int64),
        np.concatenate([np.zeros(0, dtype=np.uint64), *distinct.values()]),
        np.cumsum([0, *map(len, distinct.values())]),
    )
    assert written(codec, joined) == sent
    assert all(same(joined[key], rows) for key, rows in sets.items())


def written_one_by_one(sets) -> bytes:
    """A dictionary of sets by the encoder of single sets."""
    out, numbers = bytearray(varint(len(sets))), {}
    for key in sorted(sets):
        body, following = bytes(written(IndexSet(1 << 20), sets[key])), len(numbers)
        out += key.to_bytes(4, "little") + varint(numbers.setdefault(body, following))
        if numbers[body] == following:
            out += body
    return bytes(out)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("01 07000000 01", "before it was sent"),
        ("02 07000000 00 010001 08000000 02", "before it was sent"),
        ("02 07000000 00 010001 08000000 01 010001", "sent twice"),
        ("02 08000000 00 010001 07000000 00", "ascending"),
    ],
    ids=["no set yet", "a number left out", "a set again", "keys descend"],
)
def test_a_dictionary_of_sets_has_one_encoding(data, reason):
    with pytest.raises(WireError, match=reason):
        read(SetsByKey(wire.U32, 9, 9), bytes.fromhex(data))


def test_a_set_that_fills_its_range_takes_four_bits_each():
    assert len(written(IndexSet(1 << 20), np.arange(80_000, dtype=np.uint64))) == 40_000 + 6


@given(st.binary(max_size=24))
@settings(max_examples=500)
def test_no_two_byte_strings_are_the_same_set_of_indices(data):
    codec, source = IndexSet(64), wire.Reader(data)
    try:
        rows = codec.read(source)
    except WireError:
        return
    assert written(codec, rows) == data[: source.position]


@given(rows=index_sets(), data=st.data())
@settings(max_examples=500)
def test_a_set_with_a_changed_bit_is_refused_or_is_another_set(rows, data):
    codec = IndexSet(1 << 20)
    changed = bytearray(written(codec, rows))
    bit = data.draw(st.integers(0, 8 * len(changed) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    source = wire.Reader(bytes(changed))
    try:
        found = codec.read(source)
    except WireError:
        return
    assert (found[1:] > found[:-1]).all()
    assert written(codec, found) == changed[: source.position]


@given(st.integers(0, FULL - 1) | st.integers(0, 1 << 15))
def test_a_number_comes_back_in_the_fewest_bytes(value):
    data = varint(value)
    assert read(wire.VARINT, data) == value
    assert len(data) == max(1, -(-value.bit_length() // 7))


@given(st.integers(0, FULL - 1), st.integers(1, 9))
def test_a_number_has_no_longer_form(value, padding):
    data = varint(value)
    longer = data[:-1] + bytes([data[-1] | 0x80]) + b"\x80" * (padding - 1) + b"\x00"
    with pytest.raises(Malformed):
        read(wire.VARINT, longer)


@pytest.mark.parametrize(
    "data", [b"\xff" * 9 + b"\x02", b"\xff" * 10, b"\x80" * 9 + b"\x02", b"\xff" * 100]
)
def test_a_number_over_64_bits_is_malformed(data):
    with pytest.raises(Malformed):
        read(wire.VARINT, data)


@given(st.binary(min_size=8, max_size=8))
def test_a_real_number_is_refused_or_canonical(data):
    try:
        value = read(wire.F64, data)
    except Malformed:
        return
    assert math.isfinite(value) and written(wire.F64, value) == data


def test_a_converted_value_has_one_spelling_whatever_its_type_accepts():
    even = wire.Converted(wire.U8, int, lambda raw: raw & ~1)
    assert read(even, b"\x04") == 4
    with pytest.raises(Malformed, match="canonical"):
        read(even, b"\x05")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_would_be_refused_is_not_written(value):
    with pytest.raises(MisuseError):
        written(wire.F64, value)


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (wire.U8, 256),
        (wire.U32, -1),
        (wire.VARINT, FULL),
        (wire.VARINT, -1),
        (wire.KEY, bytes(31)),
        (wire.UpTo(3), bytes(4)),
        (wire.TEXT, "x" * 1025),
        (wire.Sequence(wire.U8, 2), (1, 2, 3)),
        (wire.ByKey(wire.U8, wire.U8, 1), {1: 1, 2: 2}),
        (IndexSet(2), np.arange(3, dtype=np.uint64)),
        (IndexSet(9), np.array([2, 1], dtype=np.uint64)),
        (IndexSet(9), np.array([1, 1], dtype=np.uint64)),
        (wire.Words(7), np.zeros(1, dtype=np.uint64)),
        (wire.Words(64), np.zeros(1, dtype=np.int64)),
        (wire.Words(64), np.zeros((1, 1, 1, 1), dtype=np.uint8)),
        (wire.Words(64), np.zeros((0, 65), dtype=np.uint8)),
        (wire.Nested(NextStage), Nothing()),
        (wire.OneOf(NextStage), Left(reason="lied")),
    ],
)
def test_a_value_that_does_not_fit_is_our_own_mistake(codec, value):
    with pytest.raises(MisuseError):
        written(codec, value)


# -- known answers


def plain(value: Any) -> Any:
    """A record as JSON has it: bytes in hexadecimal, sets as lists, keys as text."""
    match value:
        case bytes():
            return value.hex()
        case Secret():
            return value.reveal().hex()
        case np.ndarray():
            return [int(word) for word in value]
        case Enum():
            return value.value
        case dict():
            return {str(key): plain(inner) for key, inner in value.items()}
        case tuple():
            return [plain(inner) for inner in value]
        case None | bool() | int() | float() | str():
            return value
    if type(value) in wire._LAYOUTS:
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return value.name  # a group


@pytest.mark.parametrize("vector", vectors.load("wire.json", "good"), ids=attrgetter("name"))
def test_a_known_message_reads_as_it_should(vector):
    value = wire.decode(vector.data)
    assert type(value).__name__ == vector.record
    assert plain(value) == vector.fields
    assert wire.encode(value) == vector.data


@pytest.mark.parametrize("vector", vectors.load("wire.json", "bad"), ids=attrgetter("name"))
def test_a_known_bad_message_is_refused_for_its_own_reason(vector):
    with vectors.expectation(vector) as caught:
        wire.decode(vector.data)
    assert type(caught.value).__name__ == vector.expect


def test_the_known_answers_have_every_named_refusal():
    refused = {vector.expect for vector in vectors.load("wire.json", "bad")}
    assert refused == {error.__name__ for error in NAMED}
    document = json.loads((vectors.HERE / "wire.json").read_text())
    good = {entry["data"] for entry in document["vectors"] if entry["kind"] == "good"}
    assert all(e["like"] in good for e in document["vectors"] if e["kind"] == "bad")


def test_the_first_field_is_read_from_what_claims_to_be_a_record():
    told = Forwarded(
        purpose=Purpose.RETRIEVE,
        round_id=1,
        sender=2,
        report_id=bytes(32),
        public=(b"keys",),
        box=b"box",
    )
    data = wire.encode(told)
    assert wire.first_field(data) is Purpose.RETRIEVE
    assert wire.first_field(data[: len(data) // 4]) is Purpose.RETRIEVE  # the rest is not looked at
    for other in (b"", b"\x01", data[:3], data[:3] + b"\x05strange", b"\x01\xff\xff" + data[3:]):
        assert wire.first_field(other) is None


# --- short lists by key are read in one pass ------------------------------------------------------

LISTS = wire.ByKey(wire.U32, wire.Sequence(wire.Exactly(3), 4), 8)


class OneByOne(wire.Sequence):
    """The same lists, which are read one by one: another class has no short way."""


SLOW = wire.ByKey(wire.U32, OneByOne(wire.Exactly(3), 4), 8)


def read_by(codec, raw: bytes):
    source = wire.Reader(raw)
    try:
        return codec.read(source), source.position
    except WireError as error:
        return type(error), str(error)


@given(
    st.dictionaries(
        st.integers(0, 2**32 - 1),
        st.lists(st.binary(min_size=3, max_size=3), max_size=4),
        max_size=8,
    )
)
def test_lists_by_key_are_the_same_in_one_pass(found):
    value = {key: tuple(pieces) for key, pieces in found.items()}
    fast, slow = bytearray(), bytearray()
    LISTS.write(fast, value)
    SLOW.write(slow, value)
    assert fast == slow
    raw = bytes(fast) + b"rest"
    assert read_by(LISTS, raw) == read_by(SLOW, raw) == (value, len(fast))


@given(st.binary(max_size=60), st.data())
def test_what_is_wrong_with_lists_by_key_is_said_the_same(raw, data):
    good = bytearray()
    LISTS.write(good, {1: (b"abc",), 7: (b"def", b"ghi"), 900: ()})
    at = data.draw(st.integers(0, len(good) - 1))
    for each in (raw, bytes(good[:at]), bytes(good[:at] + raw[:1] + good[at + 1 :])):
        assert read_by(LISTS, each) == read_by(SLOW, each)


@pytest.mark.parametrize(
    "value",
    [{1: (b"ab",)}, {1: (b"ab", b"abcd")}, {-1: ()}, {1 << 32: ()}, {1: (b"abc",) * 5}],
    ids=str,
)
def test_lists_that_are_none_are_not_written(value):
    for codec in (LISTS, SLOW):
        with pytest.raises(MisuseError):
            codec.write(bytearray(), value)
