"""The states of the leader's round: what it has come to, and in them its roles in the protocols.

Each has exactly the fields that exist in it. `leader.py` has the steps between them. A role that is
done stays inside the state until the round is over: it recognises what is sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity, SigningKey
from tessera.crypto.secret import Secret
from tessera.errors import Malformed
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.arrays import Floats
from tessera.learning.tables.spec import DerivedMap
from tessera.learning.tables.table import StoredTable
from tessera.plan import UNION, Plan
from tessera.protocols.secagg.server import SecAggServerSetup, Server
from tessera.protocols.two_server.handshake import (
    LeaderHandshake,
    LeaderHandshakeSetup,
    ServedModel,
)
from tessera.protocols.two_server.key_period import KeyPeriod, KeyStore, keys_of, with_keys
from tessera.protocols.two_server.messages import Header
from tessera.protocols.two_server.params import Servers
from tessera.protocols.two_server.read.row_tags import RowTagCache
from tessera.protocols.two_server.read.server import RetrievalLeader, RetrievalLeaderSetup
from tessera.protocols.two_server.reports import Workers
from tessera.protocols.two_server.write.leader import WriteLeader, WriteLeaderSetup
from tessera.protocols.two_server.write.sums import NoiseSecret
from tessera.rounds.ideal import IdealServer, IdealSum
from tessera.rounds.messages import UnionOpened
from tessera.rounds.root import StoredRoot
from tessera.rounds.sums import MaskedSum, Sum
from tessera.rounds.two_server.domain import NAME as DOMAIN
from tessera.rounds.two_server.domain import RoundDomain, StoredDomain, check_stored, served
from tessera.rounds.two_server.ideal import (
    IdealHandshake,
    IdealRetrieval,
    IdealWrite,
    TrustedServers,
)
from tessera.wire.index_set import client_set
from tessera.wire.stored import Inner, Kept

UnionSum = Annotated[Server | IdealServer, Inner("sum")]
Handshake = Annotated[LeaderHandshake | IdealHandshake, Inner("handshake")]
Retrieval = Annotated[RetrievalLeader | IdealRetrieval, Inner("retrieval")]
Writing = Annotated[WriteLeader | IdealWrite, Inner("write")]


@wire.record(tag=0x02C0)
@dataclass(frozen=True, slots=True, kw_only=True)
class NotBegun:
    """Has no union to wait for, and has sent nothing."""

    root: StoredRoot


@wire.record(tag=0x02C1)
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitingRows:
    """Carries the union's sum."""

    root: StoredRoot
    sum: UnionSum


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRows:
    """Over which rows the round goes. `sum` is the union's, if there is one; `residual` counts the
    ids that its encoding could not give back."""

    sum: Annotated[Server | IdealServer | None, wire.Maybe(Inner("sum"))]
    residual: Annotated[int, wire.VARINT]
    domain: StoredDomain
    noise: NoiseSecret = field(default=None, repr=False)


@wire.record(tag=0x02C2)
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreeing:
    """Agrees with the helper on a header."""

    over: RoundRows
    handshake: Handshake


@wire.record(tag=0x02C3)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRows:
    """Queries come in and are answered with the helper."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval


@wire.record(tag=0x02C4)
@dataclass(frozen=True, slots=True, kw_only=True)
class AddingReports:
    """Reports come in and are added up with the helper."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval
    write: Writing


@wire.record(tag=0x02C5)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsAdded:
    """The sum is opened, and its means are `result`; the helper may ask for it once more."""

    over: RoundRows
    handshake: Handshake
    retrieval: Retrieval
    write: Writing


# --- leader roles ---------------------------------------------------------------------------------
#
# The roles inside a leader's round: made one after the other, or woken in the same order.


@dataclass(kw_only=True)
class LeaderRoles:
    """What the leader's roles are made of, the same when they are woken.

    `dense` and `tables` are the model as it stands; `row_tags` and `key_store` have this server's
    from earlier rounds. `party`: the round is ideal.
    """

    plan: Plan
    round_id: RoundId
    invited: frozenset[ClientId]
    dense: Floats = field(repr=False)
    tables: Mapping[str, StoredTable] = field(repr=False)
    derived: Mapping[str, DerivedMap] = field(repr=False)
    servers: Servers
    key: SigningKey = field(repr=False)
    identity: Identity | None
    workers: Workers
    row_tags: RowTagCache | None
    key_store: KeyStore | None
    party: TrustedServers | None = None
    _served: tuple[RoundDomain, ServedModel] | None = None

    def domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        def made() -> RoundDomain:
            return RoundDomain.of(self.plan, self.round_id, self.servers, union, self.derived)

        return made() if self.party is None else self.party.domain(union, made)

    @property
    def union(self) -> Sum:
        """How the union is summed: in the active setting, always."""
        return MaskedSum() if self.party is None else IdealSum(self.party.union)

    def model(self, domain: RoundDomain) -> ServedModel:
        if self._served is None or self._served[0] is not domain:
            self._served = (domain, served(self.plan, domain.params, self.dense, self.tables))
        return self._served[1]

    def clients(self, total: Server | IdealServer | None) -> frozenset[ClientId]:
        """Those who go on: whose rows are in the union, where there is one."""
        return self.invited if total is None else client_set(total.sums[UNION].survivors)

    def keys(self, domain: RoundDomain, header: Header) -> KeyPeriod | None:
        """Those of an earlier round that this one is written with, if it is."""
        ideal = self.party is not None
        return keys_of(domain.params, header, self.key_store, ideal=ideal)

    def _with_keys(
        self, domain: RoundDomain, header: Header, clients: frozenset[ClientId]
    ) -> frozenset[ClientId]:
        ideal = self.party is not None
        return with_keys(domain.params, header, self.key_store, clients, ideal=ideal)

    # --- made -------------------------------------------------------------------------------------

    def sum(self, root: Entropy) -> Server | IdealServer:
        if self.party is not None:
            return IdealServer(self.party.union)
        return Server(self.sum_setup(), entropy=root)

    def handshake(
        self, domain: RoundDomain, clients: frozenset[ClientId], root: Entropy
    ) -> LeaderHandshake | IdealHandshake:
        if self.party is not None:
            return IdealHandshake(self.party, domain.params, clients, self.key_store)
        setup = self.handshake_setup(domain, clients)
        return LeaderHandshake(setup, self.model(domain), entropy=root)

    def retrieval(
        self, domain: RoundDomain, header: Header, clients: frozenset[ClientId]
    ) -> RetrievalLeader | IdealRetrieval:
        members = self._with_keys(domain, header, clients)
        if self.party is not None:
            return IdealRetrieval(self.party, domain.params, header, members)
        return RetrievalLeader(self.retrieval_setup(domain, header, members))

    def write(
        self,
        domain: RoundDomain,
        header: Header,
        clients: frozenset[ClientId],
        noise: Secret | None,
    ) -> WriteLeader | IdealWrite:
        members = self._with_keys(domain, header, clients)
        if self.party is not None:
            self.party.noise[SERVER] = noise
            return IdealWrite(self.party, domain.params, header, members, self.key_store)
        return WriteLeader(self.write_setup(domain, header, members), noise=noise)

    # --- what they are given, made or woken -------------------------------------------------------

    def sum_setup(self) -> SecAggServerSetup:
        params = self.plan.union_sum(self.round_id)
        return SecAggServerSetup(params, self.invited, identity=self.identity)

    def handshake_setup(
        self, domain: RoundDomain, clients: frozenset[ClientId]
    ) -> LeaderHandshakeSetup:
        return LeaderHandshakeSetup(
            params=domain.params, invited=clients, key=self.key, key_store=self.key_store
        )

    def retrieval_setup(
        self, domain: RoundDomain, header: Header, members: frozenset[ClientId]
    ) -> RetrievalLeaderSetup:
        return RetrievalLeaderSetup(
            params=domain.params,
            header=header,
            invited=members,
            model=self.model(domain),
            row_tags=self.row_tags,
            workers=self.workers,
        )

    def write_setup(
        self, domain: RoundDomain, header: Header, members: frozenset[ClientId]
    ) -> WriteLeaderSetup:
        return WriteLeaderSetup(
            params=domain.params,
            header=header,
            invited=members,
            key=self.key,
            key_store=self.key_store,
            workers=self.workers,
        )


class WokenLeaderRoles:
    """Wakes the roles inside a state in the order in which they are read: later ones are given what
    earlier ones have."""

    def __init__(self, roles: LeaderRoles) -> None:
        self._roles = roles
        self._total: Server | None = None
        self._found: RoundDomain | None = None
        self._agreed: LeaderHandshake | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {
            "sum": self._sum,
            DOMAIN: self._domain,
            "handshake": self._handshake,
            "retrieval": self._retrieval,
            "write": self._write,
        }

    def _sum(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> Server:
        self._total = Server.wake(snapshot, messages, self._roles.sum_setup())
        return self._total

    def _domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        check_stored(self._roles.plan, union)
        self._found = self._roles.domain(union)
        return self._found

    def _handshake(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> LeaderHandshake:
        setup = self._roles.handshake_setup(self._over, self._roles.clients(self._total))
        self._agreed = LeaderHandshake.wake(snapshot, messages, setup)
        return self._agreed

    def _retrieval(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> RetrievalLeader:
        setup = self._roles.retrieval_setup(self._over, self._header, self._members)
        return RetrievalLeader.wake(snapshot, messages, setup)

    def _write(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> WriteLeader:
        setup = self._roles.write_setup(self._over, self._header, self._members)
        return WriteLeader.wake(snapshot, messages, setup)

    @property
    def _over(self) -> RoundDomain:
        assert self._found is not None
        return self._found

    @property
    def _members(self) -> frozenset[ClientId]:
        clients, store = self._roles.clients(self._total), self._roles.key_store
        return with_keys(self._over.params, self._header, store, clients)

    @property
    def _header(self) -> Header:
        if self._agreed is None or self._agreed.signed_header is None:
            raise Malformed("a stored state is past its handshake, and has no header")
        return self._agreed.signed_header.message.header
