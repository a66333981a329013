"""Writer and Reader: a frame's bytes as they are written and read, and what is hashed of them.

Long bytes that several parties look at are *parts* (`HashedBytes`). Wherever a frame is hashed, the
SHA-256 of a part stands in place of its bytes, so that one pass over them gives the checksum, the
digest by which a role recognises the message, and what is signed about the part; and whoever passes
a part on in another message does not hash it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple

from tessera.errors import Truncated

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
