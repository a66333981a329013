"""Codecs of single values: numbers, bytes and text. A value has one encoding."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final

import numpy as np

from tessera.crypto.group import group_from_name
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, Malformed, MisuseError, Oversized
from tessera.wire.cursor import HashedBytes, Reader, Span, Writer


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
