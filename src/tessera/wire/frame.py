"""A frame: version (1 byte), tag (2), body, checksum (8). Integers are little-endian.

The checksum is a truncated SHA-256: it detects accidental changes and does not protect against an
attacker, which is what signatures, sealed boxes and the transport are for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any, Final

from tessera.errors import (
    Malformed,
    Oversized,
    TrailingBytes,
    Truncated,
    UnknownTag,
    UnknownVersion,
    WireError,
)
from tessera.wire.cursor import CHECKSUM_BYTES, Reader, Writer, hashes
from tessera.wire.kinds import Nested, kind_with, layout, tag_of

VERSION: Final = 1
HEADER: Final = struct.Struct("<BH")
DEFAULT_CAP: Final = 1 << 28
"""No message is longer than this many bytes unless the caller says so."""


def encode(value: Any) -> bytes:
    """One record as bytes."""
    return framed(value)[0]


def framed(value: Any) -> tuple[bytes, bytes]:
    """(One record as bytes, its digest)."""
    out = Writer(HEADER.pack(VERSION, tag_of(type(value))))
    Nested(type(value)).write(out, value)
    return out.joined()


def decode(
    data: bytes | memoryview,
    *,
    expect: Iterable[type[Any]] | None = None,
    cap: int = DEFAULT_CAP,
) -> Any:
    """The record in these bytes, or a `WireError` that says what is wrong with them.

    `expect` limits which kinds are acceptable here; `cap` is checked before anything is read.
    """
    return opened(data, expect=expect, cap=cap)[0]


def opened(
    data: bytes | memoryview,
    *,
    expect: Iterable[type[Any]] | None = None,
    cap: int = DEFAULT_CAP,
) -> tuple[Any, bytes]:
    """(The record in these bytes, its digest), hashed once; see `decode`."""
    value, source = _read(data, expect, cap)
    digest, checksum = hashes(source.hashed())
    if checksum != memoryview(data)[-CHECKSUM_BYTES:]:
        raise Malformed("the checksum does not match: the bytes were changed on the way")
    return value, digest


def decode_known(data: bytes | memoryview) -> Any:
    """The record in bytes whose digest was compared, and with it the checksum: no hashing."""
    return _read(data, None, DEFAULT_CAP, known=True)[0]


def digest_of(data: bytes | memoryview) -> bytes:
    """The digest of the record in these bytes: SHA-256, with those of its parts in their place."""
    kind = kind_of(data)
    if kind is None or not Nested(kind).has_parts:
        return hashlib.sha256(data).digest()
    return opened(data)[1]


def unsigned_digest(data: bytes, signature: int) -> bytes:
    """The digest of the record in these bytes with zeros for its last field, of so many bytes.

    For kinds without parts whose last field is a signature: what is signed, not encoded again.
    """
    return hashes([data[: -CHECKSUM_BYTES - signature], bytes(signature)])[0]


def _read(
    data: bytes | memoryview, expect: Iterable[type[Any]] | None, cap: int, *, known: bool = False
) -> tuple[Any, Reader]:
    if len(data) > cap:
        raise Oversized(f"a message of {len(data)} bytes where the cap is {cap}")
    if len(data) < HEADER.size + CHECKSUM_BYTES:
        raise Truncated(f"a message of {len(data)} bytes is shorter than its frame")
    view = memoryview(data)
    version, tag = HEADER.unpack_from(view)
    if version != VERSION:
        raise UnknownVersion(f"version {version}; this build reads version {VERSION}")
    kind = kind_with(tag)
    if kind is None or (expect is not None and kind not in tuple(expect)):
        raise UnknownTag(f"tag {tag:#06x} is unknown, or not due here")
    source = Reader(view[:-CHECKSUM_BYTES], known=known)
    source.take(HEADER.size)
    value = Nested(kind).read(source)
    if source.left:
        raise TrailingBytes(f"{source.left} bytes follow a complete {kind.__name__}")
    return value, source


def kind_of(data: bytes | memoryview) -> type[Any] | None:
    """The kind of record these bytes claim to be, from their header alone; None if unknown."""
    if len(data) < HEADER.size:
        return None
    return kind_with(HEADER.unpack_from(data)[1])


def head_of(kind: type[Any]) -> bytes:
    """A frame's first bytes: they say the kind, and there is nothing after them to decode."""
    return HEADER.pack(VERSION, tag_of(kind))


def first_field(data: bytes | memoryview) -> Any:
    """The first field of the record that these bytes claim to be, unchecked, or None.

    For whoever passes a message on to the role that will `decode` it.
    """
    kind = kind_of(data)
    if kind is None:
        return None
    _, codec = layout(kind)[0]
    try:
        return codec.read(Reader(memoryview(data)[HEADER.size :]))
    except WireError:
        return None


def digest(value: Any) -> bytes:
    """Of a record, by its encoding: what signatures and comparisons are about."""
    return framed(value)[1]
