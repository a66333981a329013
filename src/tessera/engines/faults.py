"""What goes wrong in a simulated round, described as data.

A script is a list of faults. Those on the way up (from a client) name the phase in which the client
would answer: advertise, share, reveal, collect, consistency, unmask. Those on the way down name the
kind of message the server sends. A phase that comes once in every stage is told apart by `stage`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.ids import ClientId
from tessera.protocols import wire
from tessera.protocols.secagg.messages import (
    ConsistencyProof,
    ForwardedShares,
    Roster,
    RowGroups,
    SurvivorList,
)


@dataclass(frozen=True, slots=True)
class Drop:
    """The client is gone from this phase on: before it answers, or right after."""

    client: ClientId
    phase: str
    stage: int = 0
    after: bool = False


@dataclass(frozen=True, slots=True)
class Delay:
    """The client's answer takes this many seconds longer."""

    client: ClientId
    phase: str
    seconds: float
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The client's answer arrives twice; or, given a kind, the server's message does."""

    client: ClientId
    phase: str = ""
    kind: str = ""
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Reorder:
    """The answers of a phase arrive in an order drawn from this seed."""

    phase: str
    seed: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Corrupt:
    """One byte of the client's answer (or, given a kind, of the server's message) is changed."""

    client: ClientId
    phase: str = ""
    kind: str = ""
    offset: int = 0
    flip: int = 1
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """Instead of its answer the client sends the bytes it sent in an earlier phase."""

    client: ClientId
    phase: str
    of: str
    stage: int = 0
    of_stage: int = 0


@dataclass(frozen=True, slots=True)
class Lie:
    """The server tells one client a list without somebody in it; `again`: after the true one."""

    client: ClientId
    kind: str
    without: ClientId
    stage: int = 0
    again: bool = False


Fault = Drop | Delay | Duplicate | Reorder | Corrupt | Replay | Lie


def corrupted(data: bytes, fault: Corrupt) -> bytes:
    changed = bytearray(data)
    changed[fault.offset % len(changed)] ^= fault.flip or 1
    return bytes(changed)


def lied(data: bytes, fault: Lie) -> bytes:
    """The server's message as if `without` had never been there."""
    message = wire.decode(data)
    gone = fault.without
    forged: Any
    if isinstance(message, Roster):
        forged = replace(message, members=tuple(m for m in message.members if m.client != gone))
    elif isinstance(message, ForwardedShares):
        forged = replace(
            message,
            sharers=message.sharers[message.sharers != np.uint64(gone)],
            boxes={c: b for c, b in message.boxes.items() if c != gone},
        )
    elif isinstance(message, RowGroups):
        tables = tuple(
            replace(t, shared={c: rows for c, rows in t.shared.items() if c != gone})
            for t in message.tables
        )
        forged = replace(message, tables=tables)
    elif isinstance(message, SurvivorList):
        forged = replace(message, survivors=message.survivors[message.survivors != np.uint64(gone)])
    elif isinstance(message, ConsistencyProof):
        forged = replace(
            message, endorsements={c: e for c, e in message.endorsements.items() if c != gone}
        )
    else:
        forged = message
    return wire.encode(forged)
