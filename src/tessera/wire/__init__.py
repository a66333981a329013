"""Messages and stored states <-> bytes: one versioned binary encoding, with a cap on every length.

A record is a frozen dataclass whose fields are annotated with a codec; the class is its own
specification, and the order of its fields is the order on the wire::

    @record(tag=0x0105)
    @dataclass(frozen=True, slots=True, kw_only=True)
    class MaskedVector:
        round_id: Annotated[RoundId, U64]
        sender: Annotated[ClientId, U32]

The encoding is canonical: what `decode` accepts, `encode` gives back byte for byte. A length is
compared with its cap and with the bytes that are really there before anything is allocated for it.
There is no pickle, and nothing in the bytes names a Python class.

A record as bytes of its own is a frame: version (1 byte), tag (2), body, checksum (8), in
little-endian. The checksum is a truncated SHA-256: it detects accidental changes and does not
protect against an attacker, which is what signatures, sealed boxes and the transport are for.

codecs.py     bytes that are being written or read, and codecs of values
index_set.py  sets of row positions and of clients
stored.py     states of roles, and the messages that they name
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

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
from tessera.wire.codecs import (
    CHECKSUM_BYTES,
    F64,
    FLAG,
    GROUP,
    KEY,
    SECRET,
    SIGNATURE,
    TAG,
    TEXT,
    U8,
    U16,
    U32,
    U64,
    VARINT,
    ByKey,
    Codec,
    Converted,
    Exactly,
    Flag,
    HashedBytes,
    Maybe,
    PartUpTo,
    Reader,
    Real,
    Sequence,
    Unsigned,
    UpTo,
    VarUnsigned,
    Words,
    Writer,
    choice,
    hashes,
    part_digest,
)

__all__ = [
    "CHECKSUM_BYTES",
    "DEFAULT_CAP",
    "F64",
    "FLAG",
    "GROUP",
    "HEADER",
    "KEY",
    "SECRET",
    "SIGNATURE",
    "TAG",
    "TEXT",
    "U8",
    "U16",
    "U32",
    "U64",
    "VARINT",
    "ByKey",
    "Codec",
    "Converted",
    "Exactly",
    "Flag",
    "HashedBytes",
    "Maybe",
    "Nested",
    "OneOf",
    "PartUpTo",
    "Reader",
    "Real",
    "Sequence",
    "Unsigned",
    "UpTo",
    "VarUnsigned",
    "Words",
    "choice",
    "decode",
    "decode_known",
    "digest",
    "digest_of",
    "encode",
    "first_field",
    "framed",
    "head_of",
    "kind_of",
    "layout",
    "opened",
    "part_digest",
    "record",
    "records",
    "tag_of",
    "unsigned_digest",
]

# --- kinds of records -----------------------------------------------------------------------------
#
# Each has its tag, and its fields in wire order, read from the annotations.
#
# A record inside another is written without a frame: its fields alone (`Nested`), or its tag
# before them where it may be of several kinds (`OneOf`).


R = TypeVar("R")

_KINDS: Final[dict[int, type[Any]]] = {}
_TAGS: Final[dict[type[Any], int]] = {}
_LAYOUTS: Final[dict[type[Any], tuple[tuple[str, Codec], ...]]] = {}
_LEASTS: Final[dict[type[Any], int]] = {}
_WITH_PARTS: Final[dict[type[Any], bool]] = {}


def record(tag: int) -> Callable[[type[R]], type[R]]:
    """Give a frozen dataclass its tag, under which it can travel or be stored on its own."""

    def register(kind: type[R]) -> type[R]:
        if not is_dataclass(kind) or tag in _KINDS:
            raise MisuseError(f"{kind.__name__}: not a dataclass, or tag {tag:#06x} is taken")
        _KINDS[tag] = kind
        _TAGS[kind] = tag
        return kind

    return register


def records() -> Mapping[int, type[Any]]:
    """Every record that can stand on its own, by tag."""
    return dict(_KINDS)


def kind_with(tag: int) -> type[Any] | None:
    """The kind of record that has this tag, if there is one."""
    return _KINDS.get(tag)


def tag_of(kind: type[Any]) -> int:
    """The tag under which records of this kind travel."""
    if kind not in _TAGS:
        raise MisuseError(f"{kind.__name__} has no tag")
    return _TAGS[kind]


def layout(kind: type[Any]) -> tuple[tuple[str, Codec], ...]:
    """The fields of a record in wire order, each with its codec; read from the annotations once."""
    if kind not in _LAYOUTS:
        hints = get_type_hints(kind, include_extras=True)
        _LAYOUTS[kind] = tuple((f.name, _codec_of(kind, hints[f.name])) for f in fields(kind))
    return _LAYOUTS[kind]


def _codec_of(kind: type[Any], hint: Any) -> Codec:
    if get_origin(hint) is Annotated:
        for extra in get_args(hint)[1:]:
            if isinstance(extra, Codec):
                return extra
    if isinstance(hint, type) and is_dataclass(hint):
        return Nested(hint)
    raise MisuseError(f"{kind.__name__}: no codec for a field of type {hint}")


def _least(kind: type[Any]) -> int:
    if kind not in _LEASTS:
        _LEASTS[kind] = sum(codec.least for _, codec in layout(kind))
    return _LEASTS[kind]


def _has_parts(kind: type[Any]) -> bool:
    if kind not in _WITH_PARTS:
        _WITH_PARTS[kind] = any(codec.has_parts for _, codec in layout(kind))
    return _WITH_PARTS[kind]


class Nested(Codec):
    """A record inside another, without a frame of its own."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind

    @property
    def least(self) -> int:  # type: ignore[override]
        return _least(self.kind)

    @property
    def has_parts(self) -> bool:  # type: ignore[override]
        return _has_parts(self.kind)

    def write(self, out: bytearray, value: Any) -> None:
        if type(value) is not self.kind:
            raise MisuseError(f"{type(value).__name__} where {self.kind.__name__} is due")
        for name, codec in layout(self.kind):
            codec.write(out, getattr(value, name))

    def read(self, source: Reader) -> Any:
        values = {name: codec.read(source) for name, codec in layout(self.kind)}
        try:
            return self.kind(**values)
        except ConfigError:  # its text quotes values, and what was received is not repeated
            raise Malformed(f"a {self.kind.__name__} of values that cannot be together") from None

    def references(self, value: Any) -> Iterator[Any]:
        for name, codec in layout(self.kind):
            yield from codec.references(getattr(value, name))


class OneOf(Codec):
    """A record that may be of several kinds, each known by its tag."""

    least = 2

    def __init__(self, *kinds: type[Any]) -> None:
        self.kinds = kinds

    @property
    def has_parts(self) -> bool:  # type: ignore[override]
        return any(_has_parts(kind) for kind in self.kinds)

    def write(self, out: bytearray, value: Any) -> None:
        if type(value) not in self.kinds:
            raise MisuseError(f"{type(value).__name__} is not one of the kinds due here")
        TAG.write(out, tag_of(type(value)))
        Nested(type(value)).write(out, value)

    def read(self, source: Reader) -> Any:
        tag = TAG.read(source)
        for kind in self.kinds:
            if tag_of(kind) == tag:
                return Nested(kind).read(source)
        raise UnknownTag(f"tag {tag:#06x} is not one of those due here")

    def references(self, value: Any) -> Iterator[Any]:
        return Nested(type(value)).references(value)


# --- frames ---------------------------------------------------------------------------------------

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
