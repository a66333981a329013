"""Participant: one client of a simulated population."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.protocols.secagg.identity import Identity
from tessera.rounds.local_state import LocalState


@dataclass(slots=True)
class Participant:
    """What a client has of its own, from round to round."""

    local: LocalState
    identity: Identity | None = None
