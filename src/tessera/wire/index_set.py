"""Codecs of row and client sets: sorted 64-bit indices, compressed, with one encoding per set."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.errors import Malformed, MisuseError, Oversized
from tessera.ids import ClientId
from tessera.wire import VARINT, ByKey, Codec, Reader

Octets = npt.NDArray[np.uint8]

LEAST_BITS: Final = 4
"""Bits that an index takes at least: read, it takes 64, and a message is to cost no more than 16
times its length. Zeros fill a set up that would take less."""
CHUNK: Final = 512
"""Bytes of marks, or indices, that are unpacked at a time."""
_NONE: Final = memoryview(b"")


class _Parts(NamedTuple):
    """A set as it came: how many indices, the last one, how they are laid out, marks, low bits."""

    length: int
    top: int
    bitmap: bool
    low: int
    marks: memoryview
    lows: memoryview


_NOTHING: Final = _Parts(0, 0, False, 0, _NONE, _NONE)


class IndexSet(Codec):
    """A sorted set of 64-bit indices, in about log2(range / count) + 2 bits each.

    Elias-Fano: the low bits of every index side by side, then the high bits in unary. A set that
    fills most of its range travels as a bitmap instead. Which one, how many low bits and how many
    bytes of padding (`LEAST_BITS`) follow from the count and the largest index, so that a set has
    one encoding.
    """

    least = 1

    def __init__(self, cap: int) -> None:
        self.cap = cap

    @staticmethod
    def _layout(count: int, top: int) -> tuple[bool, int, int]:
        """(as a bitmap?, low bits per index, bits of the bitmap or of the unary part)."""
        low = max(0, (top // count).bit_length() - 1)
        unary = (top >> low) + count
        if top + 1 <= count * low + unary:
            return True, 0, top + 1
        return False, low, unary

    def write(self, out: bytearray, value: npt.NDArray[np.uint64]) -> None:
        if len(value) > self.cap:
            raise MisuseError(f"{len(value)} indices where the cap is {self.cap}")
        VARINT.write(out, len(value))
        if not len(value):
            return
        indices = np.asarray(value, dtype=np.uint64)
        if (indices[1:] <= indices[:-1]).any():
            raise MisuseError("a set of indices is not sorted")
        top = int(indices[-1])
        VARINT.write(out, top)
        bitmap, low, bits = self._layout(len(indices), top)
        if low:
            octets = indices.astype("<u8").view(np.uint8).reshape(-1, 8)
            lows = np.unpackbits(octets, axis=1, count=low, bitorder="little")
            out += np.packbits(lows, bitorder="little").tobytes()
        marks = np.zeros(bits, dtype=np.uint8)
        if bitmap:
            marks[indices] = 1
        else:
            marks[(indices >> np.uint64(low)) + np.arange(len(indices), dtype=np.uint64)] = 1
        out += np.packbits(marks, bitorder="little").tobytes()
        out += bytes(self._padding(len(indices), low, bits))

    def read(self, source: Reader) -> npt.NDArray[np.uint64]:
        begin = source.position
        found = np.empty(self.measure(source), dtype=np.uint64)
        source.position = begin
        self.fill(source, found)
        return found

    def measure(self, source: Reader) -> int:
        """Step over a set. Its marks are counted, so that whoever makes room for as many indices
        as it states has been sent the bytes for them."""
        parts = self._parts(source)
        if int.from_bytes(parts.marks, "little").bit_count() != parts.length:
            raise Malformed("a set of indices does not have the length it states")
        return parts.length

    def fill(self, source: Reader, indices: npt.NDArray[np.uint64]) -> None:
        """Read a set that was measured, into an array of the length that it has."""
        parts = self._parts(source)
        if not parts.length:
            return
        self._find_marks(np.frombuffer(parts.marks, dtype=np.uint8), indices)
        if not parts.bitmap:
            self._add_low_bits(indices, np.frombuffer(parts.lows, dtype=np.uint8), parts.low)
            if (indices[1:] <= indices[:-1]).any():
                raise Malformed("a set of indices is not sorted")
        if int(indices[-1]) != parts.top:
            raise Malformed("a set of indices does not end where it says")

    def _parts(self, source: Reader) -> _Parts:
        count = VARINT.read(source)
        if count > self.cap:
            raise Oversized(f"{count} indices where the cap is {self.cap}")
        if not count:
            return _NOTHING
        top = VARINT.read(source)
        if top < count - 1:
            raise Malformed("more indices than their range holds")
        bitmap, low, bits = self._layout(count, top)
        lows = self._bytes(source, count * low) if low else _NONE
        marks = self._bytes(source, bits)
        padding = self._padding(count, low, bits)
        if padding and any(source.take(padding)):
            raise Malformed("padding bytes are set")
        return _Parts(count, top, bitmap, low, marks, lows)

    @staticmethod
    def _padding(count: int, low: int, bits: int) -> int:
        """Zero bytes at the end of a set whose indices took less than `LEAST_BITS` each."""
        used = (count * low + 7) // 8 + (bits + 7) // 8
        return max(0, (LEAST_BITS * count + 7) // 8 - used)

    @staticmethod
    def _find_marks(marks: Octets, found: npt.NDArray[np.uint64]) -> None:
        """Where the marks are, some at a time: nothing is allocated beside them."""
        at = 0
        for start in range(0, len(marks), CHUNK):
            here = np.flatnonzero(np.unpackbits(marks[start : start + CHUNK], bitorder="little"))
            found[at : at + len(here)] = here
            found[at : at + len(here)] += np.uint64(8 * start)
            at += len(here)

    @staticmethod
    def _add_low_bits(high: npt.NDArray[np.uint64], lows: Octets, low: int) -> None:
        """Turn positions of the unary part into indices, in place."""
        for start in range(0, len(high), CHUNK):
            part = high[start : start + CHUNK]
            part -= np.arange(start, start + len(part), dtype=np.uint64)
            part <<= np.uint64(low)
            if not low:
                continue
            raw = lows[start * low // 8 : -(-(start + len(part)) * low // 8)]
            bits = np.unpackbits(raw, count=len(part) * low, bitorder="little")
            octets = np.packbits(bits.reshape(len(part), low), axis=1, bitorder="little")
            padded = np.zeros((len(part), 8), dtype=np.uint8)
            padded[:, : octets.shape[1]] = octets
            part |= padded.view("<u8").reshape(len(part))

    @staticmethod
    def _bytes(source: Reader, bits: int) -> memoryview:
        """So many bits, in whole bytes of which the last is filled up with zeros."""
        raw = source.take((bits + 7) // 8)
        if bits % 8 and raw[-1] >> bits % 8:
            raise Malformed("padding bits are set")
        return raw


class _Sets(ValuesView[npt.NDArray[np.uint64]]):
    """The sets in the order of their keys, none of which is searched for."""

    def __init__(self, joined: JoinedSets) -> None:
        super().__init__(joined)
        self._joined = joined

    def __iter__(self) -> Iterator[npt.NDArray[np.uint64]]:
        return map(self._joined.numbered, self._joined.numbers.tolist())


class _KeyedSets(ItemsView[Any, npt.NDArray[np.uint64]]):
    """Keys and their sets, likewise."""

    def __init__(self, joined: JoinedSets) -> None:
        super().__init__(joined)
        self._joined = joined

    def __iter__(self) -> Iterator[tuple[Any, npt.NDArray[np.uint64]]]:
        return zip(self._joined, _Sets(self._joined), strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedSets(Mapping[Any, npt.NDArray[np.uint64]]):
    """Index sets by key, one after the other in one array: they are encoded in one pass, and a
    thousand sets of one row take little more than a thousand rows.

    Set s is indices[bounds[s]:bounds[s + 1]]. Keys are numbers in ascending order, and `numbers`
    says which set each of them has; several keys may have the same.
    """

    keyed: npt.NDArray[np.uint64]
    numbers: npt.NDArray[np.int64]
    indices: npt.NDArray[np.uint64] = field(repr=False)
    bounds: npt.NDArray[np.int64] = field(repr=False)

    @classmethod
    def of(cls, by_key: Mapping[Any, npt.NDArray[np.uint64]]) -> JoinedSets:
        """The same sets; arrays that are one object become one set."""
        if isinstance(by_key, JoinedSets):
            return by_key
        arrays = {id(each): each for each in by_key.values()}
        number = {name: s for s, name in enumerate(arrays)}
        parts = [np.asarray(each, dtype=np.uint64) for each in arrays.values()]
        bounds = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=bounds[1:])
        keys = sorted(by_key)
        return cls(
            np.array(keys, dtype=np.uint64),
            np.array([number[id(by_key[key])] for key in keys], dtype=np.int64),
            np.concatenate([np.zeros(0, dtype=np.uint64), *parts]),
            bounds,
        )

    def __getitem__(self, key: Any) -> npt.NDArray[np.uint64]:
        at = int(np.searchsorted(self.keyed, key))
        if at == len(self.keyed) or self.keyed[at] != key:
            raise KeyError(key)
        return self.numbered(int(self.numbers[at]))

    def __iter__(self) -> Iterator[Any]:
        return map(int, self.keyed)

    def __len__(self) -> int:
        return len(self.keyed)

    def values(self) -> ValuesView[npt.NDArray[np.uint64]]:
        return _Sets(self)

    def items(self) -> ItemsView[Any, npt.NDArray[np.uint64]]:
        return _KeyedSets(self)

    def numbered(self, number: int) -> npt.NDArray[np.uint64]:
        """The set of this number."""
        return self.indices[self.bounds[number] : self.bounds[number + 1]]

    def encoded(self) -> list[bytes]:
        """Every set as `IndexSet` writes it."""
        codes, ends = kernel.active().encode_sets(self.indices, self.bounds, least_bits=LEAST_BITS)
        joined, cuts = codes.tobytes(), ends.tolist()
        return [joined[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]


class SetsByKey(ByKey):
    """A dictionary of index sets of which many are the same: each is written where it first occurs.

    With a key comes the number of its set; a number that is the next one brings the set along. A
    set that has a number already is not brought again, so that a dictionary has one encoding. All
    sets are measured first and then read into one array: memory stays in proportion to what was
    sent, however short they are.
    """

    def __init__(self, key: Codec, cap: int, longest: int) -> None:
        self.sets, self.longest = IndexSet(longest), longest
        super().__init__(key, self.sets, cap)

    def write(self, out: bytearray, value: Mapping[Any, Any]) -> None:  # type: ignore[override]
        self.write_count(out, len(value))
        joined = JoinedSets.of(value)
        if (longest := int(np.diff(joined.bounds).max(initial=0))) > self.longest:
            raise MisuseError(f"{longest} indices where the cap is {self.longest}")
        codes = joined.encoded()
        numbers: dict[bytes, int] = {}
        pieces: list[bytes] = []
        following, known = 0, [-1] * len(codes)  # the number that each set is sent under
        for key, place in zip(joined.keyed.tolist(), joined.numbers.tolist(), strict=True):
            number, code = known[place], b""
            if number < 0:
                number = known[place] = numbers.setdefault(codes[place], following)
                if number == following:
                    code, following = codes[place], following + 1
            pieces += (_written(self.key, key), _written(VARINT, number), code)
        out += b"".join(pieces)

    def read(self, source: Reader) -> JoinedSets:  # type: ignore[override]
        keys, numbers, bounds, starts = array("Q"), array("q"), array("q", [0]), array("q")
        digests, last = bytearray(), -1
        for _ in range(self.read_count(source)):
            key = self.key.read(source)
            if not last < key:
                raise Malformed("keys are not in ascending order")
            number = VARINT.read(source)
            if number > len(starts):
                raise Malformed("a set of indices is referred to before it was sent")
            if number == len(starts):
                begin = source.position
                bounds.append(bounds[-1] + self.sets.measure(source))
                starts.append(begin)
                digests += hashlib.sha256(source.data[begin : source.position]).digest()[:16]
            keys.append(key)
            numbers.append(number)
            last = key
        if _repeats(digests):
            raise Malformed("a set of indices was sent twice")
        indices, end = np.empty(bounds[-1], dtype=np.uint64), source.position
        for number, begin in enumerate(starts):
            source.position = begin
            self.sets.fill(source, indices[bounds[number] : bounds[number + 1]])
        source.position = end
        return JoinedSets(
            np.frombuffer(keys, dtype=np.uint64),
            np.frombuffer(numbers, dtype=np.int64),
            indices,
            np.frombuffer(bounds, dtype=np.int64),
        )


@lru_cache(maxsize=4096)  # clients of a cohort and numbers of their sets come in every message
def _written(codec: Codec, number: int) -> bytes:
    encoded = bytearray()
    codec.write(encoded, number)
    return bytes(encoded)


def _repeats(digests: bytearray) -> bool:
    """Whether two of these digests, of 16 bytes each, are the same."""
    halves = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2).T
    first, second = (half[np.lexsort(halves)] for half in halves)
    return bool(((first[1:] == first[:-1]) & (second[1:] == second[:-1])).any())


def client_array(clients: Iterable[ClientId]) -> npt.NDArray[np.uint64]:
    """Clients as they travel: a sorted array."""
    return np.array(sorted(clients), dtype=np.uint64)


def client_set(array: npt.NDArray[np.uint64]) -> frozenset[ClientId]:
    return frozenset(map(ClientId, array.tolist()))
