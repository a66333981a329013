"""The names that every layer shares: clients, rounds, stages, tables and rows.

They are integers on the wire and `NewType`s in the code, so that a row cannot be passed where a
client is meant. Row ids are 64-bit everywhere; nothing assumes that a table is small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NewType

ClientId = NewType("ClientId", int)
"""A member of the federation, 0 .. 2^32 - 1."""

RoundId = NewType("RoundId", int)
"""A round's number, 0 .. 2^64 - 1. At a client round numbers only increase."""

StageId = NewType("StageId", int)
"""A secure sum within a round (union, update), counted from 0 in the order they happen."""

TableId = NewType("TableId", int)
"""A table of the model, 0 .. 2^16 - 1."""

SERVER: Final = "server"
"""How messages, logs and recorded views name the aggregation server."""

HELPER: Final = "helper"
"""The second server of the two-server scheme. It talks to the first one only."""

Party = ClientId | str
"""Whoever sends or receives: a client, `SERVER` or `HELPER`."""


def clients_in(parties: Iterable[Party]) -> frozenset[ClientId]:
    """The clients among them."""
    return frozenset(party for party in parties if not isinstance(party, str))
