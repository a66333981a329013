"""The roles of a round by scheme: who is made of what.

A party has things of its own for all rounds: secrets, keys, what it remembers. With the plan, the
round's number and, for servers, the model, they make its role in one round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity, SigningKey
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.protocols.two_server.collector import ReplayGuard
from tessera.protocols.two_server.key_period import KeyStore
from tessera.protocols.two_server.params import Servers
from tessera.protocols.two_server.read.row_tags import RowTagCache
from tessera.protocols.two_server.reports import Workers
from tessera.rounds import schemes
from tessera.rounds.client import ClientRound
from tessera.rounds.local_state import LocalState
from tessera.rounds.server import ServerRound
from tessera.rounds.server_model import ServerModel
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperKeys, HelperRound
from tessera.rounds.two_server.leader import LeaderRound

RoundClient: TypeAlias = ClientRound | TwoServerClientRound
RoundServer: TypeAlias = ServerRound | LeaderRound


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParty:
    """A client: `servers` are pinned in it where there are two."""

    local: LocalState
    entropy: Entropy = field(repr=False)
    identity: Identity | None = None
    servers: Servers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParty:
    """The server; with a key where it is the leader of two. `row_tags` save it some work."""

    entropy: Entropy = field(repr=False)
    servers: Servers | None = None
    key: SigningKey | None = field(default=None, repr=False)
    workers: Workers | None = None
    row_tags: RowTagCache | None = field(default=None, repr=False)
    key_store: KeyStore | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperParty:
    """The helper. What it remembers of reports must outlast every round."""

    entropy: Entropy = field(repr=False)
    servers: Servers
    keys: HelperKeys = field(repr=False)
    replay_guard: ReplayGuard
    workers: Workers | None = None
    row_tags: RowTagCache | None = field(default=None, repr=False)
    key_store: KeyStore | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class StoredRole:
    """A role at rest: its snapshot, and the messages that the snapshot names, by digest."""

    snapshot: bytes = field(repr=False)
    messages: Mapping[bytes, bytes] = field(repr=False)


MakeClient = Callable[[Plan, RoundId, ClientId, ClientParty, StoredRole | None], RoundClient]
MakeServer = Callable[
    [
        Plan,
        RoundId,
        Iterable[ClientId],
        ServerModel,
        ServerParty,
        Identity | None,
        StoredRole | None,
    ],
    RoundServer,
]
MakeHelper = Callable[
    [Plan, RoundId, ServerModel, HelperParty, Mapping[ClientId, bytes], StoredRole | None],
    HelperRound,
]


@dataclass(frozen=True, slots=True)
class Roles:
    """What makes the roles of a round, or wakes them; `helper` is None with one server."""

    client: MakeClient
    server: MakeServer
    helper: MakeHelper | None = None


# --- one server -----------------------------------------------------------------------------------


def _client(
    plan: Plan,
    round_id: RoundId,
    me: ClientId,
    party: ClientParty,
    stored: StoredRole | None = None,
) -> RoundClient:
    given: dict[str, Any] = {
        "local": party.local,
        "entropy": party.entropy,
        "identity": party.identity,
    }
    if stored is None:
        return ClientRound(plan, round_id, me, **given)
    return ClientRound.wake(stored.snapshot, stored.messages, plan, round_id, me, **given)


def _server(
    plan: Plan,
    round_id: RoundId,
    cohort: Iterable[ClientId],
    model: ServerModel,
    party: ServerParty,
    identity: Identity | None,
    stored: StoredRole | None = None,
) -> RoundServer:
    given: dict[str, Any] = {**_given(model), "identity": identity}
    if stored is None:
        return ServerRound(plan, round_id, cohort, entropy=party.entropy, **given)
    return ServerRound.wake(stored.snapshot, stored.messages, plan, round_id, cohort, **given)


def _given(model: ServerModel) -> dict[str, Any]:
    """The model as a server's role takes it."""
    return {"dense": model.dense, "tables": model.tables, "derived": model.derived}


ONE_SERVER: Final = Roles(_client, _server)

# --- two servers ----------------------------------------------------------------------------------


def _two_server_client(
    plan: Plan,
    round_id: RoundId,
    me: ClientId,
    party: ClientParty,
    stored: StoredRole | None = None,
) -> RoundClient:
    if party.servers is None or party.identity is None:
        raise MisuseError("a client of two servers has their keys, and one of its own")
    given: dict[str, Any] = {
        "local": party.local,
        "entropy": party.entropy,
        "identity": party.identity,
        "servers": party.servers,
    }
    if stored is None:
        return TwoServerClientRound(plan, round_id, me, **given)
    return TwoServerClientRound.wake(stored.snapshot, stored.messages, plan, round_id, me, **given)


def _leader(
    plan: Plan,
    round_id: RoundId,
    cohort: Iterable[ClientId],
    model: ServerModel,
    party: ServerParty,
    identity: Identity | None,
    stored: StoredRole | None = None,
) -> RoundServer:
    if party.servers is None or party.key is None:
        raise MisuseError("the leader of two servers has a key, and the helper's")
    clients = tuple(cohort)
    given: dict[str, Any] = {
        **_given(model),
        "servers": party.servers,
        "key": party.key,
        "identity": identity,
        "workers": party.workers,
        "row_tags": party.row_tags,
        "key_store": party.key_store,
    }
    if stored is None:
        return LeaderRound(plan, round_id, clients, entropy=party.entropy, **given)
    return LeaderRound.wake(stored.snapshot, stored.messages, plan, round_id, clients, **given)


def _helper(
    plan: Plan,
    round_id: RoundId,
    model: ServerModel,
    party: HelperParty,
    directory: Mapping[ClientId, bytes],
    stored: StoredRole | None = None,
) -> HelperRound:
    given: dict[str, Any] = {
        **_given(model),
        "servers": party.servers,
        "keys": party.keys,
        "directory": directory,
        "replay_guard": party.replay_guard,
        "workers": party.workers,
        "row_tags": party.row_tags,
        "key_store": party.key_store,
    }
    if stored is None:
        return HelperRound(plan, round_id, entropy=party.entropy, **given)
    return HelperRound.wake(stored.snapshot, stored.messages, plan, round_id, **given)


TWO_SERVERS: Final = Roles(_two_server_client, _leader, _helper)


def roles_of(plan: Plan) -> Roles:
    """What makes the roles of a plan's rounds; `MisuseError` if it has none."""
    entry = schemes.of(plan)
    if not entry.federated:
        raise MisuseError(f"scheme {entry.name} has no rounds, and so no roles")
    return TWO_SERVERS if entry.two_servers else ONE_SERVER
