"""The states of a client's round between two servers, and in them its roles in the protocols.

Each has exactly the fields that exist in it. `client.py` has the steps between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate
from tessera.plan import Plan
from tessera.protocols.machine import Outbound
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.two_server.client import TwoServerClientSetup
from tessera.protocols.two_server.key_period import own_keys_of
from tessera.protocols.two_server.messages import Header, SignedHeader
from tessera.protocols.two_server.params import Servers, TwoServerParams
from tessera.protocols.two_server.read.client import RetrievalClient
from tessera.protocols.two_server.write.client import WriteClient
from tessera.rounds.ideal import IdealClient, IdealSum
from tessera.rounds.local_state import LocalState
from tessera.rounds.messages import RowsByTable, UnionOpened
from tessera.rounds.root import NAME as ROOT
from tessera.rounds.root import StoredRoot
from tessera.rounds.sums import MaskedSum, Sum
from tessera.rounds.two_server.domain import NAME as DOMAIN
from tessera.rounds.two_server.domain import RoundDomain, StoredDomain, check_stored
from tessera.rounds.two_server.ideal import IdealReader, IdealWriter, TrustedServers
from tessera.wire.stored import ByDigest, Inner, Kept

UnionSum = Annotated[Client | IdealClient | None, wire.Maybe(Inner("sum"))]
"""None where tables are not narrowed to a union."""
Reader = Annotated[RetrievalClient | IdealReader, Inner("reader")]
Writer = Annotated[WriteClient | IdealWriter, Inner("writer")]
KeptHeader = Annotated[Kept[SignedHeader], ByDigest(SignedHeader)]


@wire.record(tag=0x02B0)
@dataclass(frozen=True, slots=True, kw_only=True)
class NotJoined:
    """Nothing is charged and nothing sent."""


@wire.record(tag=0x02B1)
@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingIds:
    """Takes part in the union's sum; waits for the union."""

    root: StoredRoot
    sum: Annotated[Client | IdealClient, Inner("sum")]


@wire.record(tag=0x02B2)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingHeader:
    """Knows the rows that the round is about; waits for the header that both servers signed."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    reader: Reader


@wire.record(tag=0x02B3)
@dataclass(frozen=True, slots=True, kw_only=True)
class FetchingRows:
    """Has asked for its `rows` of root tables; waits for both servers' answers."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    header: KeptHeader
    rows: RowsByTable = field(repr=False)
    reader: Reader


@wire.record(tag=0x02B4)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Has something to train (`pending`); waits for its caller's update."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    header: KeptHeader
    rows: RowsByTable = field(repr=False)
    reader: Reader


@wire.record(tag=0x02B5)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWritten:
    """Its report is out; nothing more is due."""

    sum: UnionSum
    domain: StoredDomain
    writer: Writer


AT_WORK: Final = (OfferingIds, AwaitingHeader, FetchingRows, TrainingRows, RowsWritten)


@dataclass(frozen=True, slots=True)
class GivenUpdate:
    """What came out of training; None: nothing."""

    update: ModelUpdate | None


# --- client roles ---------------------------------------------------------------------------------
#
# The roles inside a client's round between two servers: made, or woken in the same order.


@dataclass(kw_only=True)
class ClientRoles:
    """What a client's roles are made of, the same when they are woken. `party`: the round is
    ideal."""

    plan: Plan
    round_id: RoundId
    me: ClientId
    local: LocalState = field(repr=False)
    identity: Identity
    servers: Servers
    party: TrustedServers | None = None

    def domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        def made() -> RoundDomain:
            derived = self.local.derived
            return RoundDomain.of(self.plan, self.round_id, self.servers, union, derived)

        return made() if self.party is None else self.party.domain(union, made)

    @property
    def union(self) -> Sum:
        """How the union is summed: in the active setting, always."""
        return MaskedSum() if self.party is None else IdealSum(self.party.union)

    def check_keys(self, params: TwoServerParams, header: Header) -> None:
        """Refuse a round that is to be written with keys this client does not have."""
        own_keys_of(params, header, self.local.own_keys, ideal=self.party is not None)

    # --- made -------------------------------------------------------------------------------------

    def sum(
        self, root: Entropy, last_round: RoundId | None
    ) -> tuple[Client | IdealClient, list[Outbound]]:
        """The union's, and what it says first."""
        if self.party is not None:
            ideal = IdealClient(self.party.union, self.me)
            return ideal, ideal.begin()
        return Client.join(self.sum_setup(), entropy=root, last_round=last_round)

    def reader(
        self, root: Entropy, domain: RoundDomain, last_round: RoundId | None = None
    ) -> RetrievalClient | IdealReader:
        if self.party is not None:
            return IdealReader(self.party, domain.params, self.me)
        return RetrievalClient(self.setup(root, domain.params), last_round=last_round)

    def writer(self, root: Entropy, domain: RoundDomain) -> WriteClient | IdealWriter:
        params, own_keys = domain.params, self.local.own_keys
        if self.party is not None:
            return IdealWriter(self.party, params, self.me, entropy=root, own_keys=own_keys)
        return WriteClient(self.setup(root, params))

    # --- what they are given, made or woken -------------------------------------------------------

    def sum_setup(self) -> SecAggClientSetup:
        return SecAggClientSetup(
            self.plan.union_sum(self.round_id), self.me, identity=self.identity
        )

    def setup(self, root: Entropy, params: TwoServerParams) -> TwoServerClientSetup:
        """Of the reader and of the writer."""
        return TwoServerClientSetup(
            params,
            self.me,
            entropy=root,
            identity=self.identity,
            own_keys=self.local.own_keys,
        )


class WokenClientRoles:
    """Wakes the roles inside a state in the order in which they are read: the reader and the writer
    are given the domain and the root before them."""

    def __init__(self, roles: ClientRoles, entropy: Entropy) -> None:
        self._roles = roles
        self._root = entropy
        self._found: RoundDomain | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {
            "sum": self._sum,
            DOMAIN: self._domain,
            ROOT: self._keep_root,
            "reader": self._reader,
            "writer": self._writer,
        }

    def _keep_root(self, root: Entropy) -> None:
        self._root = root

    def _sum(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> Client:
        return Client.wake(snapshot, messages, self._roles.sum_setup())

    def _domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        check_stored(self._roles.plan, union)
        self._found = self._roles.domain(union)
        return self._found

    def _reader(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> RetrievalClient:
        return RetrievalClient.wake(snapshot, messages, self._setup)

    def _writer(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> WriteClient:
        return WriteClient.wake(snapshot, messages, self._setup)

    @property
    def _setup(self) -> TwoServerClientSetup:
        assert self._found is not None
        return self._roles.setup(self._root, self._found.params)
