"""The roles of a round by scheme, new or woken."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

from tessera.rounds.client import ClientRound
from tessera.rounds.resolve import resolve
from tessera.rounds.role_setup import (
    ClientRoundSetup,
    HelperRoundSetup,
    ServerRoundSetup,
    StoredRole,
)
from tessera.rounds.server import ServerRound
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound

RoundClient: TypeAlias = ClientRound | TwoServerClientRound
RoundServer: TypeAlias = ServerRound | LeaderRound

R = TypeVar("R", ClientRound, TwoServerClientRound, ServerRound, LeaderRound, HelperRound)


def client_role(setup: ClientRoundSetup, stored: StoredRole | None = None) -> RoundClient:
    if resolve(setup.plan).sum.two_servers:
        return _role(TwoServerClientRound, setup, stored)
    return _role(ClientRound, setup, stored)


def server_role(setup: ServerRoundSetup, stored: StoredRole | None = None) -> RoundServer:
    """The server's, or the leader's of two."""
    if resolve(setup.plan).sum.two_servers:
        return _role(LeaderRound, setup, stored)
    return _role(ServerRound, setup, stored)


def helper_role(setup: HelperRoundSetup, stored: StoredRole | None = None) -> HelperRound:
    return _role(HelperRound, setup, stored)


def _role(kind: type[R], setup: Any, stored: StoredRole | None) -> R:
    if stored is None:
        return kind(setup)
    return kind.wake(stored.snapshot, stored.messages, setup)
