"""Bytes as they are written and read, and the codecs of values. A value has one encoding."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from itertools import chain, repeat
from math import prod
from operator import ge
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import group_from_name
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, Malformed, MisuseError, Oversized, Truncated

# --- bytes being written and read -----------------------------------------------------------------
#
# Long bytes that several parties look at are *parts* (`HashedBytes`). Wherever a frame is hashed,
# the SHA-256 of a part stands in place of its bytes, so that one pass over them gives the
# checksum, the digest by which a role recognises the message, and what is signed about the part;
# and whoever passes a part on in another message does not hash it again.


CHECKSUM_BYTES: Final = 8


class HashedBytes(bytes):
    """Bytes of a message that are hashed once, whoever asks for their digest."""

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self).digest()


def part_digest(data: bytes) -> bytes:
    """SHA-256 of these bytes; of a `HashedBytes` it may be known."""
    return data.digest if isinstance(data, HashedBytes) else hashlib.sha256(data).digest()


class Span(NamedTuple):
    """A part, and where in a frame it lies."""

    begin: int
    end: int
    part: bytes


class Writer(bytearray):
    """A frame that is being written, without the parts in it, which are joined to it at the end."""

    def __init__(self, begin: bytes) -> None:
        super().__init__(begin)
        self.parts: list[tuple[int, bytes]] = []  # each before this byte of the rest

    def joined(self) -> tuple[bytes, bytes]:
        """(The frame with its checksum, its digest)."""
        rest, last = memoryview(bytes(self)), 0
        pieces: list[bytes | memoryview] = []
        hashed: list[bytes | memoryview] = []
        for at, part in self.parts:
            pieces += [rest[last:at], part]
            hashed += [rest[last:at], part_digest(part)]
            last = at
        digest, checksum = hashes([*hashed, rest[last:]])
        return b"".join([*pieces, rest[last:], checksum]), digest


class Reader:
    """A cursor over received bytes that refuses to run past their end.

    `context` is what a stored state refers to and does not contain (`wire/stored.py`); `spans`
    are the parts that were read, unless nothing is to be hashed (`known`).
    """

    __slots__ = ("context", "data", "known", "position", "size", "spans")

    def __init__(
        self, data: bytes | memoryview, context: Any = None, *, known: bool = False
    ) -> None:
        self.data = memoryview(data)
        self.known = known
        self.size = len(self.data)
        self.position = 0
        self.context = context
        self.spans: list[Span] = []

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, size: int) -> memoryview:
        begin = self.position
        if size > self.size - begin:
            raise Truncated(f"{size} bytes are due and {self.left} are left")
        self.position = end = begin + size
        return self.data[begin:end]

    def hashed(self) -> Iterator[bytes | memoryview]:
        """What is hashed of it: the bytes in order, with the digests of parts in their place."""
        at = 0
        for begin, end, part in self.spans:
            yield self.data[at:begin]
            yield part_digest(part)
            at = end
        yield self.data[at:]

    def take_byte(self) -> int:
        if self.position == self.size:
            raise Truncated("1 bytes are due and 0 are left")
        self.position += 1
        return self.data[self.position - 1]


def hashes(pieces: Iterable[bytes | memoryview]) -> tuple[bytes, bytes]:
    """(The digest of a record, the checksum that it ends with), of a frame as yet without it."""
    running = hashlib.sha256()
    for piece in pieces:
        running.update(piece)
    checksum = running.digest()[:CHECKSUM_BYTES]
    running.update(checksum)
    return running.digest(), checksum


# --- codecs of single values ----------------------------------------------------------------------


class Codec:
    """How one type of field is written and read. `least` is the fewest bytes a value takes."""

    least: int = 0
    has_parts: bool = False

    def write(self, out: bytearray, value: Any) -> None:
        raise MisuseError(f"{type(self).__name__} does not write")

    def read(self, source: Reader) -> Any:
        raise MisuseError(f"{type(self).__name__} does not read")

    def write_all(self, out: bytearray, values: tuple[Any, ...]) -> None:
        for value in values:
            self.write(out, value)

    def read_all(self, source: Reader, count: int) -> tuple[Any, ...]:
        return tuple(self.read(source) for _ in range(count))

    def references(self, value: Any) -> Iterator[Any]:
        """The messages that are written as their digest within this value."""
        return iter(())


class Unsigned(Codec):
    """An unsigned integer of a fixed number of bytes."""

    def __init__(self, size: int) -> None:
        self.least = size

    def write(self, out: bytearray, value: int) -> None:
        if not 0 <= value < 1 << 8 * self.least:
            raise MisuseError(f"a number does not fit {self.least} bytes")
        out += int(value).to_bytes(self.least, "little")

    def read(self, source: Reader) -> int:
        return int.from_bytes(source.take(self.least), "little")


class VarUnsigned(Codec):
    """An unsigned integer below 2^64, seven bits a byte, in its shortest form only."""

    least = 1

    def write(self, out: bytearray, value: int) -> None:
        if not 0 <= value < 1 << 64:
            raise MisuseError("a number does not fit 64 bits")
        value = int(value)
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)

    def read(self, source: Reader) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = source.take_byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if (byte == 0 and shift) or value >= 1 << 64:
                    raise Malformed("a number is not in its shortest form, or over 64 bits")
                return value
        raise Malformed("a number is over 64 bits")


class Real(Codec):
    """A finite IEEE double; minus zero is refused, since it equals zero and is other bytes."""

    least = 8

    def write(self, out: bytearray, value: float) -> None:
        if not np.isfinite(value):
            raise MisuseError("a real number is not finite")
        out += struct.pack("<d", value + 0.0)

    def read(self, source: Reader) -> float:
        raw = bytes(source.take(8))
        value = float(struct.unpack("<d", raw)[0])
        if not np.isfinite(value) or struct.pack("<d", value + 0.0) != raw:
            raise Malformed("a real number is not finite, or minus zero")
        return value


class Flag(Codec):
    """True or false."""

    least = 1

    def write(self, out: bytearray, value: bool) -> None:
        out.append(bool(value))

    def read(self, source: Reader) -> bool:
        byte = source.take(1)[0]
        if byte > 1:
            raise Malformed("a flag is neither 0 nor 1")
        return bool(byte)


class Exactly(Codec):
    """Bytes of a length that both sides know."""

    def __init__(self, size: int) -> None:
        self.least = size

    def write(self, out: bytearray, value: bytes) -> None:
        if len(value) != self.least:
            raise MisuseError(f"{len(value)} bytes where {self.least} are due")
        out += value

    def read(self, source: Reader) -> bytes:
        return bytes(source.take(self.least))

    def write_all(self, out: bytearray, values: tuple[bytes, ...]) -> None:
        for value in values:
            if len(value) != self.least:
                raise MisuseError(f"{len(value)} bytes where {self.least} are due")
        out += b"".join(values)

    def read_all(self, source: Reader, count: int) -> tuple[bytes, ...]:
        size = self.least
        joined = bytes(source.take(count * size))
        return tuple([joined[i : i + size] for i in range(0, count * size, size)])


class UpTo(Codec):
    """Bytes of any length up to a cap."""

    least = 1

    def __init__(self, cap: int) -> None:
        self.cap = cap

    def write(self, out: bytearray, value: bytes | memoryview) -> None:
        self.write_size(out, len(value))
        out += value

    def write_size(self, out: bytearray, size: int) -> None:
        if size > self.cap:
            raise MisuseError(f"{size} bytes where the cap is {self.cap}")
        VARINT.write(out, size)

    def read(self, source: Reader) -> bytes:
        return bytes(source.take(self.read_size(source)))

    def read_size(self, source: Reader) -> int:
        size = VARINT.read(source)
        if size > self.cap:
            raise Oversized(f"{size} bytes where the cap is {self.cap}")
        return size


class PartUpTo(UpTo):
    """Bytes of any length up to a cap that are hashed apart from the rest of their message."""

    has_parts = True

    def write(self, out: bytearray, value: bytes) -> None:  # type: ignore[override]
        if not isinstance(out, Writer):
            super().write(out, value)
            return
        self.write_size(out, len(value))
        out.parts.append((len(out), value))

    def read(self, source: Reader) -> Any:
        """`HashedBytes`; of a message that is read again only a view, which copies nothing."""
        size = self.read_size(source)
        if source.known:
            return source.take(size)
        part = HashedBytes(source.take(size))
        source.spans.append(Span(source.position - size, source.position, part))
        return part


class Converted(Codec):
    """A type that travels as another one."""

    def __init__(
        self, inner: Codec, there: Callable[[Any], Any], back: Callable[[Any], Any]
    ) -> None:
        self.inner, self.there, self.back = inner, there, back
        self.least, self.has_parts = inner.least, inner.has_parts

    def write(self, out: bytearray, value: Any) -> None:
        self.inner.write(out, self.there(value))

    def read(self, source: Reader) -> Any:
        raw = self.inner.read(source)
        try:
            value = self.back(raw)
        except (ValueError, ConfigError) as error:  # UnicodeDecodeError is a ValueError
            raise Malformed(f"a field does not decode ({type(error).__name__})") from None
        if self.there(value) != raw:
            raise Malformed("a field is not in its canonical form")
        return value


U8: Final = Unsigned(1)
U16: Final = Unsigned(2)
U32: Final = Unsigned(4)
U64: Final = Unsigned(8)
TAG: Final = U16
VARINT: Final = VarUnsigned()
F64: Final = Real()
FLAG: Final = Flag()
KEY: Final = Exactly(32)
SIGNATURE: Final = Exactly(64)
SECRET: Final = Converted(Exactly(32), Secret.reveal, Secret)
TEXT: Final = Converted(UpTo(1024), lambda text: text.encode(), lambda raw: raw.decode())
GROUP: Final = Converted(TEXT, lambda group: group.name, group_from_name)


def choice(kind: type[Enum]) -> Codec:
    """An enum whose values are text."""
    return Converted(TEXT, lambda member: member.value, kind)


# --- codecs of several values ---------------------------------------------------------------------
#
# Sequences, dictionaries, arrays, and a value that may be missing.
#
# A count is compared with its cap and with the bytes that are really there before anything is
# allocated for it.


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
