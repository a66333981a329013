"""What goes wrong in a simulated round, described as data.

A script is a list of faults. Those on the way up (from a client) name the phase in which the client
would answer: advertise, share, reveal, collect, consistency, unmask. Those on the way down name the
kind of message the server sends. A phase that comes once in every stage is told apart by `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera import wire
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.protocols.secagg.messages import (
    ConsistencyProof,
    ForwardedShares,
    Roster,
    RowGroups,
    SurvivorList,
)
from tessera.rounds import schemes
from tessera.rounds.cohorts import cohorts_of


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


# --- dropouts -------------------------------------------------------------------------------------
#
# Dropouts: in which phases of a round a client can be missing, and who is, drawn at random.


FaultScript = Callable[[RoundId, Sequence[ClientId]], Sequence[Fault]]
"""What goes wrong in a round with this cohort."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """Where a client drops out: before it answers in this phase, at its `visit` from 0."""

    phase: str
    visit: int = 0


def dropouts(faults: Sequence[Fault]) -> dict[ClientId, Dropout]:
    """Who leaves where; an ideal round knows no other faults."""
    found = {}
    for fault in faults:
        if not isinstance(fault, Drop) or fault.after:
            raise MisuseError(f"an ideal round knows dropouts only, not {fault}")
        found[fault.client] = Dropout(fault.phase, fault.stage)
    return found


def dropout_places(plan: Plan) -> list[tuple[str, int]]:
    """Every phase of the plan's rounds in which a client can be missing: (phase, visit)."""
    return [(p.name, p.visit) for p in schemes.of(plan).phases(plan) if p.dropouts]


def random_dropouts(share: float, seed: int, plan: Plan) -> FaultScript:
    """Every client drops out of a round with this probability, at a phase drawn evenly.

    At most as many as the plan's cohorts tolerate: with more, the round would be aborted.
    """
    places, cohorts = dropout_places(plan), cohorts_of(plan)

    def script(round_id: RoundId, cohort: Sequence[ClientId]) -> list[Fault]:
        rng = np.random.default_rng([seed, int(round_id), 1])
        most = cohorts.most_dropouts(len(cohort))
        gone = [c for c in cohort if rng.random() < share][:most]
        return [
            Drop(c, phase, stage=stage)
            for c in gone
            for phase, stage in [places[int(rng.integers(len(places)))]]
        ]

    return script
