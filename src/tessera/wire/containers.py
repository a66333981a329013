"""Codecs of several values, or of none: sequences, dictionaries, arrays.

A count is compared with its cap and with the bytes that are really there before anything is
allocated for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from math import prod
from operator import ge
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import Malformed, MisuseError, Oversized, Truncated
from tessera.wire.cursor import Reader
from tessera.wire.fields import FLAG, VARINT, Codec, Exactly, Unsigned


class Maybe(Codec):
    """A value, or None."""

    least = 1

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.has_parts = inner.has_parts

    def write(self, out: bytearray, value: Any) -> None:
        FLAG.write(out, value is not None)
        if value is not None:
            self.inner.write(out, value)

    def read(self, source: Reader) -> Any:
        return self.inner.read(source) if FLAG.read(source) else None

    def references(self, value: Any) -> Iterator[Any]:
        return iter(()) if value is None else self.inner.references(value)


class Sequence(Codec):
    """A tuple of at most `cap` values."""

    least = 1

    def __init__(self, inner: Codec, cap: int) -> None:
        self.inner, self.cap = inner, cap

    @property
    def has_parts(self) -> bool:  # type: ignore[override]
        return self.inner.has_parts

    def write(self, out: bytearray, value: tuple[Any, ...]) -> None:
        self.write_count(out, len(value))
        self.inner.write_all(out, value)

    def read(self, source: Reader) -> tuple[Any, ...]:
        return self.inner.read_all(source, self.read_count(source))

    def references(self, value: Any) -> Iterator[Any]:
        for item in value:
            yield from self.inner.references(item)

    @property
    def item(self) -> int:
        """The fewest bytes an item takes. Items of none are not allowed: a count could ask for
        memory that no bytes pay for."""
        return self.inner.least

    def write_count(self, out: bytearray, count: int) -> None:
        if count > self.cap:
            raise MisuseError(f"{count} items where the cap is {self.cap}")
        if count and not self.item:
            raise MisuseError("a sequence of items that take no bytes")
        VARINT.write(out, count)

    def read_count(self, source: Reader) -> int:
        count = VARINT.read(source)
        if count > self.cap:
            raise Oversized(f"{count} items where the cap is {self.cap}")
        if count * max(self.item, 1) > source.left:
            raise Truncated(f"{count} items are due and {source.left} bytes are left")
        return count


_COUNTS: Final = [bytes([count]) for count in range(0x80)]
"""Short counts as they are written."""


class ByKey(Sequence):
    """A dictionary, as pairs in ascending order of their keys."""

    def __init__(self, key: Codec, value: Codec, cap: int) -> None:
        super().__init__(value, cap)
        self.key = key

    @property
    def item(self) -> int:
        return self.key.least + self.inner.least

    def write(self, out: bytearray, value: Mapping[Any, Any]) -> None:  # type: ignore[override]
        self.write_count(out, len(value))
        if self._has_lists:
            self._write_lists(out, value)
            return
        for key in sorted(value):
            self.key.write(out, key)
            self.inner.write(out, value[key])

    def read(self, source: Reader) -> dict[Any, Any]:  # type: ignore[override]
        if isinstance(self.key, Unsigned) and isinstance(self.inner, Exactly):
            return self._read_fixed(source, self.key.least)
        if self._has_lists:
            begin, lists = source.position, self._read_lists(source)
            if lists is not None:
                return lists
            source.position = begin  # something is wrong with them: say what
        found: dict[Any, Any] = {}
        last = None
        for _ in range(self.read_count(source)):
            key = self.key.read(source)
            if last is not None and not last < key:
                raise Malformed("keys are not in ascending order")
            found[key] = self.inner.read(source)
            last = key
        return found

    def _read_fixed(self, source: Reader, key_bytes: int) -> dict[int, bytes]:
        """Pairs that all have the same length: a secure sum has one for every two clients."""
        found: dict[int, bytes] = {}
        last, pair = -1, self.item
        joined = bytes(source.take(pair * self.read_count(source)))
        for begin in range(0, len(joined), pair):
            middle = begin + key_bytes
            key = int.from_bytes(joined[begin:middle], "little")
            if not last < key:
                raise Malformed("keys are not in ascending order")
            found[key] = joined[middle : begin + pair]
            last = key
        return found

    @property
    def _has_lists(self) -> bool:
        """Whether values are short lists of pieces of one length: boxes for every two clients."""
        short = type(self.inner) is Sequence and self.inner.cap < 0x80
        return short and isinstance(self.key, Unsigned) and type(self.inner.inner) is Exactly  # type: ignore[attr-defined]

    def _write_lists(self, out: bytearray, value: Mapping[int, tuple[bytes, ...]]) -> None:
        lists: Any = self.inner
        width, size, cap = self.key.least, lists.inner.least, lists.cap
        keys = sorted(value)
        found = [value[key] for key in keys]
        alike = not keys or (0 <= keys[0] and keys[-1] < 1 << 8 * width)
        if (
            not alike
            or max(map(len, found), default=0) > cap
            or {*map(len, chain(*found))} - {size}
        ):
            for key, pieces in zip(keys, found, strict=True):  # one of these raises
                self.key.write(out, key)
                lists.write(out, pieces)
        for key, pieces in zip(keys, found, strict=True):
            out += int(key).to_bytes(width, "little") + _COUNTS[len(pieces)] + b"".join(pieces)

    def _read_lists(self, source: Reader) -> dict[int, tuple[bytes, ...]] | None:
        """Lists that are all of one length, as is usual; None where they are not, or are wrong."""
        lists: Any = self.inner
        width, size, cap = self.key.least, lists.inner.least, lists.cap
        count = self.read_count(source)
        if not count:
            return {}
        pieces = source.data[source.position + width]
        each = width + 1 + pieces * size
        if pieces > cap or count * each > source.left:
            return None
        joined = bytes(source.data[source.position : source.position + count * each])
        if joined[width::each] != _COUNTS[pieces] * count:
            return None
        keys = [
            int.from_bytes(joined[i : i + width], "little") for i in range(0, len(joined), each)
        ]
        if any(map(ge, keys, keys[1:])):
            return None
        columns = [
            [joined[i : i + size] for i in range(begin, len(joined), each)]
            for begin in range(width + 1, each, size)
        ]
        source.position += len(joined)
        return dict(zip(keys, zip(*columns, strict=True) if pieces else repeat(()), strict=False))

    def references(self, value: Any) -> Iterator[Any]:
        return super().references(value.values())


class Words(Codec):
    """An array of group words with its shape: for stored states, where speed beats size."""

    least = 2

    KINDS: Final = tuple(np.dtype(kind) for kind in ("<u1", "<u2", "<u4", "<u8"))
    DIMENSIONS: Final = 3

    def __init__(self, cap: int) -> None:
        self.cap = cap

    def write(self, out: bytearray, value: npt.NDArray[Any]) -> None:
        if self._extent(value.shape, value.itemsize) > self.cap:
            raise MisuseError(f"an array of shape {value.shape} where the cap is {self.cap} bytes")
        if value.dtype not in self.KINDS or value.ndim > self.DIMENSIONS:
            raise MisuseError(f"an array of {value.dtype}, shape {value.shape}, does not travel")
        out.append(self.KINDS.index(value.dtype))
        out.append(value.ndim)
        for size in value.shape:
            VARINT.write(out, size)
        out += np.ascontiguousarray(value).tobytes()

    def read(self, source: Reader) -> npt.NDArray[Any]:
        kind, dimensions = source.take(2)
        if kind >= len(self.KINDS) or dimensions > self.DIMENSIONS:
            raise Malformed("an array of unknown kind")
        shape = tuple(VARINT.read(source) for _ in range(dimensions))
        dtype = self.KINDS[kind]
        if (extent := self._extent(shape, dtype.itemsize)) > self.cap:
            raise Oversized(f"an array of {extent} bytes where the cap is {self.cap}")
        raw = source.take(0 if 0 in shape else extent)
        # Copied: a state's arrays are written to, and received bytes are not ours to change.
        return np.frombuffer(raw, dtype=dtype).reshape(shape).copy()

    @staticmethod
    def _extent(shape: tuple[int, ...], itemsize: int) -> int:
        """The bytes of an array, with 1 in place of 0: an empty array's other sizes count too,
        since numpy refuses to multiply them beyond its own range."""
        return itemsize * prod(max(length, 1) for length in shape)
