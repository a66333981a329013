"""The interface of a role, whatever carries its messages.

A role is a state machine over encoded messages. It takes bytes and returns bytes with addresses;
it has no clock, no socket and no thread. A dropout is a message that did not come before somebody
called `close_phase`, in a test exactly as in the field. Between any two calls a role can be turned
into bytes with `snapshot` and restored from them in another process.

The carrier of messages stores the snapshot before it sends what the call returned. A client
restored from an earlier state does not know what it has sent since and would answer again: given
two lists of survivors, it would reveal both shares of a peer.

Whose fault something is decides what happens (`tessera.errors`): a bad message *from a client*
raises `PeerError` at the server and changes nothing; a bad message *from the server* raises
`ServerFault` at the client, which is then in its terminal state and stays there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tessera.ids import ClientId
from tessera.protocols import wire

Party = ClientId | str
"""A client, or `SERVER`."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """One encoded message on its way; `kind` is the record's name, for logs and byte counts."""

    to: Party
    kind: str
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, to: Party, message: Any) -> Outbound:
        return cls(to, type(message).__name__, wire.encode(message))


class ClientRole(Protocol):
    """One client's side of a protocol. It receives messages of the server only."""

    def receive(self, data: bytes) -> list[Outbound]:
        """Take one message. `ServerFault`: this client has left the round.

        Bytes that it has handled before are a repeated delivery and are ignored.
        """

    @property
    def phase(self) -> str:
        """The name of the state it is in, for logs."""

    def snapshot(self) -> bytes:
        """Everything needed to go on elsewhere; stored before sending. Contains secrets."""


class ServerRole(Protocol):
    """The server's side. Clients answer in any order; the engine's clock ends each phase."""

    def receive(self, sender: ClientId, data: bytes) -> list[Outbound] | None:
        """Take one client's answer. `PeerError`: refused, and this role is as it was.

        Messages to be sent at once are returned; most roles wait for their phase to close.
        """

    def close_phase(self) -> list[Outbound]:
        """Go on with whoever has answered. `RoundAborted`: too few, and nothing was revealed."""

    @property
    def phase(self) -> str:
        """The name of the current phase."""

    @property
    def expected(self) -> frozenset[ClientId]:
        """The clients whose answers are due and have not come."""

    def snapshot(self) -> bytes:
        """Everything needed to go on in another process."""


class HelperRole(Protocol):
    """The second server's side, where there is one. It receives messages of the first only."""

    def receive(self, data: bytes) -> list[Outbound]:
        """Take one message. `PeerError`: that client is excluded, and the round goes on;
        `ServerFault`: the helper has left the round."""


Step = Callable[..., Any]
Steps = Mapping[tuple[type[Any], type[Any]], Step]
"""A protocol's diagram as data: (state, message) -> the transition that takes the one to the next.

A combination that is not in the table is not a step of the protocol. Documentation is drawn from
the same table, and a test walks every combination.
"""


def message_digest(data: bytes) -> bytes:
    """128 bits of SHA-256, by which a role recognises a message that it has handled."""
    return hashlib.sha256(data).digest()[:16]
