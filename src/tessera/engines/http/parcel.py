"""A parcel: consecutive messages of a link as one body, each behind its length.

The number of the first one travels beside it. A request has as many messages as are on their way,
and so has an answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from tessera.engines.link import Numbered
from tessera.protocols.wire import DEFAULT_CAP

LENGTH: Final = struct.Struct(">I")
MOST_MESSAGES: Final = 64
ENOUGH_BYTES: Final = 1 << 22
"""Beyond it, further messages wait for the next request; a single one may be larger."""
MOST_BYTES: Final = DEFAULT_CAP + ENOUGH_BYTES + LENGTH.size * MOST_MESSAGES


def filled(messages: Iterable[Numbered]) -> list[Numbered]:
    """As many of these as fit into one parcel, at least one if there is one."""
    chosen: list[Numbered] = []
    size = 0
    for message in messages:
        size += len(message.data)
        if chosen and (size > ENOUGH_BYTES or len(chosen) == MOST_MESSAGES):
            break
        chosen.append(message)
    return chosen


def pack(messages: Sequence[Numbered]) -> bytes:
    return b"".join(part for m in messages for part in (LENGTH.pack(len(m.data)), m.data))


def unpack(first: int, body: bytes) -> list[Numbered]:
    """`ValueError` if these bytes are not a parcel."""
    messages: list[Numbered] = []
    at = 0
    while at < len(body):
        if len(messages) == MOST_MESSAGES or at + LENGTH.size > len(body):
            raise ValueError("not a parcel of messages")
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if at + length > len(body):
            raise ValueError("a message is longer than its parcel")
        messages.append(Numbered(first + len(messages), body[at : at + length]))
        at += length
    return messages
