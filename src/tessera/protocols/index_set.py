"""Codecs of row and client sets: sorted 64-bit indices, compressed, with one encoding per set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.errors import Malformed, MisuseError, Oversized
from tessera.ids import ClientId
from tessera.protocols.wire import VARINT, ByKey, Codec, Reader


class IndexSet(Codec):
    """A sorted set of 64-bit indices, in about log2(range / count) + 2 bits each.

    Elias-Fano: the low bits of every index side by side, then the high bits in unary. A set that
    fills most of its range travels as a bitmap instead. Which one, and how many low bits, follows
    from the count and the largest index, so that a set has one encoding.
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

    def read(self, source: Reader) -> npt.NDArray[np.uint64]:
        count = VARINT.read(source)
        if count > self.cap:
            raise Oversized(f"{count} indices where the cap is {self.cap}")
        if not count:
            return np.zeros(0, dtype=np.uint64)
        top = VARINT.read(source)
        if top < count - 1:
            raise Malformed("more indices than their range holds")
        bitmap, low, bits = self._layout(count, top)
        lows = self._bits(source, count * low).reshape(count, low)
        marks = self._bits(source, bits)
        if np.count_nonzero(marks) != count:  # before 8 bytes are spent on each of them
            raise Malformed("a set of indices does not have the length it states")
        # Positions are never negative: the same bits as unsigned, without another copy.
        indices = np.flatnonzero(marks).astype(np.int64, copy=False).view(np.uint64)
        if not bitmap:
            octets = np.packbits(lows, axis=1, bitorder="little")
            padded = np.zeros((count, 8), dtype=np.uint8)
            padded[:, : octets.shape[1]] = octets
            indices -= np.arange(count, dtype=np.uint64)
            indices <<= np.uint64(low)
            indices |= padded.view("<u8").reshape(count)
            if (indices[1:] <= indices[:-1]).any():
                raise Malformed("a set of indices is not sorted")
        if int(indices[-1]) != top:
            raise Malformed("a set of indices does not end where it says")
        return indices

    @staticmethod
    def _bits(source: Reader, count: int) -> npt.NDArray[np.uint8]:
        raw = np.frombuffer(source.take((count + 7) // 8), dtype=np.uint8)
        bits = np.unpackbits(raw, bitorder="little")
        if bits[count:].any():
            raise Malformed("padding bits are set")
        return bits[:count]


class SetsByKey(ByKey):
    """A dictionary of index sets of which many are the same: each is written where it first occurs.

    With a key comes the number of its set; a number that is the next one brings the set along. A
    set that has a number already is not brought again, so that a dictionary has one encoding. Equal
    sets are read as one array, and memory stays in proportion to what was sent.
    """

    def __init__(self, key: Codec, cap: int, longest: int) -> None:
        super().__init__(key, IndexSet(longest), cap)

    def write(self, out: bytearray, value: Mapping[Any, Any]) -> None:  # type: ignore[override]
        self.write_count(out, len(value))
        numbers: dict[bytes, int] = {}
        same: dict[int, int] = {}  # by identity: whoever made the sets may have shared arrays
        for key in sorted(value):
            self.key.write(out, key)
            indices = value[key]
            if id(indices) in same:
                VARINT.write(out, same[id(indices)])
                continue
            body = bytearray()
            self.inner.write(body, indices)
            encoded = bytes(body)
            same[id(indices)] = number = numbers.get(encoded, len(numbers))
            VARINT.write(out, number)
            if number == len(numbers):
                numbers[encoded] = number
                out += encoded

    def read(self, source: Reader) -> dict[Any, Any]:  # type: ignore[override]
        found: dict[Any, Any] = {}
        sets: list[npt.NDArray[np.uint64]] = []
        seen: set[bytes] = set()
        last = None
        for _ in range(self.read_count(source)):
            key = self.key.read(source)
            if last is not None and not last < key:
                raise Malformed("keys are not in ascending order")
            number = VARINT.read(source)
            if number > len(sets):
                raise Malformed("a set of indices is referred to before it was sent")
            if number == len(sets):
                begin = source.position
                sets.append(self.inner.read(source))
                encoded = bytes(source.data[begin : source.position])
                if encoded in seen:
                    raise Malformed("a set of indices was sent twice")
                seen.add(encoded)
            found[key] = sets[number]
            last = key
        return found


def client_array(clients: Iterable[ClientId]) -> npt.NDArray[np.uint64]:
    """Clients as they travel: a sorted array."""
    return np.array(sorted(clients), dtype=np.uint64)


def client_set(array: npt.NDArray[np.uint64]) -> frozenset[ClientId]:
    return frozenset(map(ClientId, array.tolist()))
