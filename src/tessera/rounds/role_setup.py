"""Set-up records: what the roles of a round are made with, and woken with again.

A record has all that a role does not store: the plan, the round's number and what its party has of
its own. A new role begins from it alone (`ClientRound(setup)`); one that was stored goes on from
snapshot and messages (`StateMachine.wake(snapshot, messages, setup)`), where the record must be
the same: the plan's digest is in the snapshot, and a server is given the model that it had. Who
has begun a round draws nothing from `entropy` any more: its root is in its state.

`ideal` is a sum in memory in place of the plan's own, one for all roles of a round, which cannot be
stored (`rounds/ideal.py`).

What a party has for all rounds is a record of its own (`ServerParty`, `HelperParty`); what a client
has is its `LocalState`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.keys import Identity, SealingKey, SigningKey
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.learning.tables.spec import DerivedMap
from tessera.learning.tables.submodel import Floats
from tessera.learning.tables.table import StoredTable
from tessera.plan import Plan
from tessera.protocols.two_server.collector import ReplayGuard
from tessera.protocols.two_server.key_period import KeyStore
from tessera.protocols.two_server.params import Servers
from tessera.protocols.two_server.read.row_tags import RowTagCache
from tessera.protocols.two_server.reports import SingleWorker, Workers
from tessera.rounds import noise_chain
from tessera.rounds.local_state import LocalState, check_rows
from tessera.rounds.noise_chain import ChainStore
from tessera.rounds.resolve import resolve
from tessera.rounds.sums import ClientSetup, Sum


@dataclass(frozen=True, slots=True)
class StoredRole:
    """A role at rest: its snapshot, and the messages that the snapshot names, by digest."""

    snapshot: bytes = field(repr=False)
    messages: Mapping[bytes, bytes] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class ClientRoundSetup(ClientSetup):
    """A client in a round. `servers` are pinned in it where there are two; these take reports
    signed by its `identity`."""

    local: LocalState = field(repr=False)
    entropy: Entropy = field(repr=False)
    servers: Servers | None = None
    ideal: Sum | None = None

    def __post_init__(self) -> None:
        check_rows(self.plan, self.local)

    @property
    def sum(self) -> Sum:
        return self.ideal or resolve(self.plan).sum


# --- servers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParty:
    """What the server has for all rounds; a key and the helper's, where it is the leader of two.

    `row_tags`, `key_store` and `chain_store` have what it keeps from earlier rounds.
    """

    entropy: Entropy = field(repr=False)
    servers: Servers | None = None
    key: SigningKey | None = field(default=None, repr=False)
    workers: Workers = field(default_factory=SingleWorker)
    row_tags: RowTagCache | None = field(default=None, repr=False)
    key_store: KeyStore | None = field(default=None, repr=False)
    chain_store: ChainStore | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class HelperKeys:
    """What the helper has of its own: it signs, and it unseals what clients seal to it."""

    signing: SigningKey = field(repr=False)
    box: SealingKey = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperParty:
    """What the helper has for all rounds. What it remembers of reports must outlast each."""

    entropy: Entropy = field(repr=False)
    servers: Servers
    keys: HelperKeys = field(repr=False)
    replay_guard: ReplayGuard
    workers: Workers = field(default_factory=SingleWorker)
    row_tags: RowTagCache | None = field(default=None, repr=False)
    key_store: KeyStore | None = field(default=None, repr=False)
    chain_store: ChainStore | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class OverModel:
    """A server in a round, over the model as it stands: the role reads it, and steps nothing."""

    party: ClassVar[Party]
    replays: ClassVar[bool] = False
    """Whether a role that is woken may come to the same step once more."""

    own: ServerParty | HelperParty
    plan: Plan
    round_id: RoundId
    dense: Floats = field(repr=False)
    tables: Mapping[str, StoredTable] = field(repr=False)
    derived: Mapping[str, DerivedMap] = field(default_factory=dict, repr=False)
    ideal: Sum | None = None

    def __post_init__(self) -> None:
        shape, names = (self.plan.model.dense,), {t.name for t in self.plan.tables}
        if self.dense.shape != shape or self.tables.keys() != names:
            raise MisuseError("the model is not the plan's")

    @property
    def context(self) -> bytes:
        return self.plan.digest

    def noise_secrets(self, root: RootedEntropy) -> tuple[Secret, ...]:
        """What its noise on this round's sum follows from, stored where later rounds need it."""
        return noise_chain.round_secrets(
            resolve(self.plan).noise.correlation,
            self.own.chain_store,
            noise_chain.own_secret(root),
            self.round_id,
            noise_chain.drawn_again(self.own.entropy, self.plan, self.party),
            replayed=self.replays,
        )

    @property
    def sum(self) -> Sum:
        return self.ideal or resolve(self.plan).sum


@dataclass(frozen=True, kw_only=True)
class ServerRoundSetup(OverModel):
    """The server in a round, or the leader of two; `identity` has the directory of public keys."""

    invited: Collection[ClientId]
    own: ServerParty
    identity: Identity | None = None

    party: ClassVar[Party] = SERVER


@dataclass(frozen=True, kw_only=True)
class HelperRoundSetup(OverModel):
    """The helper in a round, over its own copy of the model; `directory` has the clients' keys."""

    own: HelperParty
    directory: Mapping[ClientId, bytes] = field(repr=False)

    party: ClassVar[Party] = HELPER
    replays: ClassVar[bool] = True  # its replay guard has the one list of a round
