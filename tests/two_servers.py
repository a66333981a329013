"""Two servers and a few clients in memory: factories, and one way to carry their messages.

Entropy is scripted where the protocol lets it be (sealed boxes draw their own). A test may hand in
`meddle`, which sees every message on its way and says what arrives instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

import harness
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.group import Group
from tessera.crypto.keys import SealingKey, SigningKey
from tessera.crypto.ring import Ring
from tessera.errors import PeerError, RoundAborted, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId, TableId
from tessera.protocols.machine import Outbound
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.collector import MemoryReplayGuard
from tessera.protocols.two_server.handshake import (
    HelperHandshake,
    HelperHandshakeSetup,
    LeaderHandshake,
    LeaderHandshakeSetup,
    ServedModel,
    TwoServerClientSetup,
)
from tessera.protocols.two_server.key_period import MemoryStore
from tessera.protocols.two_server.messages import Header, SealedAnswer
from tessera.protocols.two_server.params import (
    Read,
    Servers,
    TwoServerParams,
    TwoServerTable,
    Write,
)
from tessera.protocols.two_server.read.client import Fetched, RetrievalClient
from tessera.protocols.two_server.read.server import (
    RetrievalHelper,
    RetrievalHelperSetup,
    RetrievalLeader,
    RetrievalLeaderSetup,
)
from tessera.protocols.two_server.reports import ReportContext
from tessera.protocols.two_server.write.client import RowUpdate, Update, WriteClient
from tessera.protocols.two_server.write.helper import WriteHelper, WriteHelperSetup
from tessera.protocols.two_server.write.leader import WriteLeader, WriteLeaderSetup
from tessera.protocols.two_server.write.sums import TwoServerSum

Meddle = Callable[[Party, Outbound], Iterable[bytes]]
"""(from whom, what) -> the bytes that arrive instead."""


@lru_cache
def keys() -> tuple[SigningKey, SigningKey, SealingKey]:
    """The leader's, the helper's, and the one that opens the helper's boxes."""
    entropy = ScriptedEntropy(b"two servers")
    return (
        SigningKey.from_secret(entropy.secret("leader")),
        SigningKey.from_secret(entropy.secret("helper")),
        SealingKey.from_secret(entropy.secret("box")),
    )


def servers() -> Servers:
    leader, helper, box = keys()
    return Servers(leader=leader.public, helper=helper.public, box=box.public)


def table(rows: int = 40, max_rows: int = 3, *, name: int = 0, **more: Any) -> TwoServerTable:
    settings = {"row_bytes": 6, "words": 3, **more}
    return TwoServerTable(table=TableId(name), rows=rows, max_rows=max_rows, **settings)


def small_table(rows: int = 1, *, name: int = 9, **more: Any) -> TwoServerTable:
    """A table that is read whole and written densely."""
    return table(rows, rows, name=name, read=Read.WHOLE, write=Write.DENSE, **more)


def params(*tables: TwoServerTable, clients: int = 3, group: Group | None = None, **more: Any):
    settings: dict[str, Any] = {
        "federation": "test",
        "round_id": RoundId(12),
        "plan_hash": harness.PLAN,
        "cohort": clients,
        "min_cohort": 2,
        "most_excluded": clients - 1,
        "group": group or Ring(32),
        "servers": servers(),
        "tables": tables or (table(),),
        **more,
    }
    return TwoServerParams(**settings)


def model(settings: TwoServerParams, seed: int = 0) -> ServedModel:
    rng = np.random.default_rng(seed)
    rows = {
        t.table: rng.integers(0, 256, (t.rows, t.row_bytes), dtype=np.uint8) for t in settings.read
    }
    return ServedModel(rows, rng.bytes(settings.dense_bytes))


def update(
    settings: TwoServerParams, wanted: Mapping[TableId, np.ndarray], seed: int = 0
) -> Update:
    """Random words for these rows, uniform in the group."""
    rng, group = np.random.default_rng(seed), settings.group
    tables = {
        t.table: RowUpdate(
            wanted[t.table], harness.random_words(group, (len(wanted[t.table]), t.words), rng)
        )
        for t in settings.written
    }
    dense = harness.random_words(group, (settings.dense,), rng) if settings.dense else None
    return Update(dense, tables)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@dataclass
class Stores:
    """What everybody keeps from round to round, where keys last."""

    leader: MemoryStore = field(default_factory=MemoryStore)
    helper: MemoryStore = field(default_factory=MemoryStore)
    clients: dict[ClientId, MemoryStore] = field(default_factory=dict)

    def of(self, client: ClientId) -> MemoryStore:
        return self.clients.setdefault(client, MemoryStore())


@dataclass
class Network:
    """Both servers and the clients of one round, and all messages sent and refused."""

    params: TwoServerParams
    model: ServedModel
    clients: list[ClientId]
    seed: bytes = b"pairs"
    replay_guard: MemoryReplayGuard = field(default_factory=MemoryReplayGuard)
    meddle: Meddle | None = None
    log: list[tuple[Party, Outbound]] = field(default_factory=list)
    refused: list[PeerError] = field(default_factory=list)
    left: dict[Party, ServerFault] = field(default_factory=dict)
    aborted: RoundAborted | None = None
    roles: dict[Party, Any] = field(default_factory=dict)
    helper_model: ServedModel | None = None
    stores: Stores = field(default_factory=Stores)

    @classmethod
    def of(cls, settings: TwoServerParams, **more: Any) -> Network:
        clients = [ClientId(3 * i + 1) for i in range(settings.cohort)]
        return cls(settings, model(settings), clients, **more)

    def later(self, rounds: int = 1, **more: Any) -> Network:
        """A later round of the same parties, with what they have kept."""
        settings = replace(self.params, round_id=RoundId(self.params.round_id + rounds))
        given = {"seed": self.seed + b"+", "replay_guard": self.replay_guard, "stores": self.stores}
        return type(self)(settings, self.model, self.clients, **{**given, **more})

    @property
    def entropy(self) -> ScriptedEntropy:
        return ScriptedEntropy(self.seed)

    def identity(self, client: ClientId):
        return harness.identities(tuple(self.clients))[client]

    @property
    def directory(self) -> dict[ClientId, bytes]:
        return dict(self.identity(self.clients[0]).directory)

    @property
    def helper_keys(self) -> dict[str, Any]:
        _, key, box_key = keys()
        return {
            "key": key,
            "box_key": box_key,
            "directory": self.directory,
            "replay_guard": self.replay_guard,
        }

    # -- what roles are given, made or woken

    def leader_handshake(self) -> LeaderHandshakeSetup:
        return LeaderHandshakeSetup(
            params=self.params,
            invited=self.clients,
            key=keys()[0],
            key_store=self.stores.leader,
        )

    def helper_handshake(self) -> HelperHandshakeSetup:
        return HelperHandshakeSetup(
            params=self.params,
            model=self.helper_model or self.model,
            key=keys()[1],
            replay_guard=self.replay_guard,
            key_store=self.stores.helper,
        )

    def reading_leader(self, header: Header) -> RetrievalLeaderSetup:
        return RetrievalLeaderSetup(
            params=self.params, header=header, invited=self.clients, model=self.model
        )

    def reading_helper(self, header: Header) -> RetrievalHelperSetup:
        model = self.helper_model or self.model
        return RetrievalHelperSetup(
            params=self.params, header=header, model=model, **self.helper_keys
        )

    def writing_leader(self, header: Header) -> WriteLeaderSetup:
        return WriteLeaderSetup(
            params=self.params,
            header=header,
            invited=self.clients,
            key=keys()[0],
            key_store=self.stores.leader,
        )

    def writing_helper(self, header: Header) -> WriteHelperSetup:
        return WriteHelperSetup(
            params=self.params,
            header=header,
            key_store=self.stores.helper,
            **self.helper_keys,
        )

    def client_setup(self, client: ClientId) -> TwoServerClientSetup:
        return TwoServerClientSetup(
            self.params,
            client,
            entropy=self.entropy,
            identity=self.identity(client),
            own_keys=self.stores.of(client),
        )

    def setup(self, name: Party, role: Any) -> Any:
        """What this role is woken with, besides its own bytes."""
        match role:
            case LeaderHandshake():
                return self.leader_handshake()
            case HelperHandshake():
                return self.helper_handshake()
            case RetrievalLeader():
                return self.reading_leader(role.header)
            case RetrievalHelper():
                return self.reading_helper(role.header)
            case WriteLeader():
                return self.writing_leader(role.header)
            case WriteHelper():
                return self.writing_helper(role.header)
        assert not isinstance(name, str)
        return self.client_setup(name)

    def woken(self, name: Party) -> Any:
        """A role from its bytes alone, as in another process."""
        return harness.woken(self.roles[name], self.setup(name, self.roles[name]))

    # -- carrying

    def carry(self, sender: Party, out: Sequence[Outbound]) -> None:
        queue = deque((sender, message) for message in out)
        while queue:
            source, message = queue.popleft()
            self.log.append((source, message))
            arriving = [message.data] if self.meddle is None else self.meddle(source, message)
            for data in arriving:
                queue.extend((message.to, m) for m in self.arrive(source, message.to, data))

    def arrive(self, source: Party, to: Party, data: bytes) -> list[Outbound]:
        role = self.roles.get(to)
        if role is None:
            return []
        try:
            return role.receive(source, data) if to == SERVER else role.receive(SERVER, data)
        except PeerError as error:
            self.refused.append(error)
        except ServerFault as fault:
            self.left.setdefault(to, fault)
        except RoundAborted as error:
            self.aborted = error
        return []

    def close(self) -> None:
        try:
            out = self.roles[SERVER].close_phase()
        except RoundAborted as error:
            self.aborted = error
            return
        self.carry(SERVER, out)

    def sent(self, kind: str, by: Party | None = None) -> list[bytes]:
        return [m.data for who, m in self.log if m.kind == kind and by in (None, who)]

    # -- the parts of a round

    def handshake(self) -> Header | None:
        self.roles[SERVER] = leader = LeaderHandshake(
            self.leader_handshake(), self.model, entropy=self.entropy
        )
        self.roles[HELPER] = HelperHandshake(self.helper_handshake(), entropy=self.entropy)
        self.carry(SERVER, leader.begin())
        signed = self.roles[SERVER].signed_header  # which may have been woken since
        return signed.message.header if signed else None

    def admit(self, kind: type[RetrievalClient] | type[WriteClient]) -> None:
        """Clients that know the round and have its signed header."""
        headers = {m.to: m.data for _, m in self.log if m.kind == "SignedHeader"}
        for c in self.clients:
            self.roles[c] = kind(self.client_setup(c))
            if c in headers:
                self.arrive(SERVER, c, headers[c])

    def reading(self, header: Header, *, helper: type[RetrievalHelper] = RetrievalHelper) -> None:
        self.roles[SERVER] = RetrievalLeader(self.reading_leader(header))
        self.roles[HELPER] = helper(self.reading_helper(header))
        self.admit(RetrievalClient)

    def read(self, wanted: Mapping[ClientId, Mapping[TableId, np.ndarray]]) -> None:
        for c, rows in wanted.items():
            self.carry(c, self.roles[c].submit(rows))
        self.close()

    def writing(
        self,
        header: Header,
        *,
        helper: type[WriteHelper] = WriteHelper,
        leader: type[WriteLeader] = WriteLeader,
    ) -> None:
        self.roles[SERVER] = leader(self.writing_leader(header))
        self.roles[HELPER] = helper(self.writing_helper(header), entropy=self.entropy)
        self.admit(WriteClient)

    def write(self, updates: Mapping[ClientId, Update | None]) -> None:
        for c, given in updates.items():
            self.carry(c, self.roles[c].submit(given))
        self.close()

    @property
    def total(self) -> TwoServerSum | None:
        found: TwoServerSum | None = self.roles[SERVER].total
        return found

    def fetched(self, client: ClientId) -> Fetched | None:
        found: Fetched | None = self.roles[client].fetched
        return found


def plain_sum(
    settings: TwoServerParams, updates: Iterable[Update | None]
) -> tuple[list[int], dict]:
    """Dense words and rows by (table, id) as Python integers: the oracle."""
    order = settings.group.order
    dense = [0] * settings.dense
    rows: dict[tuple[int, int], list[int]] = {}
    for given in updates:
        if given is None:
            continue
        if given.dense is not None:
            words = settings.group.to_ints(given.dense)
            dense = [(a + b) % order for a, b in zip(dense, words, strict=True)]
        for name, part in given.tables.items():
            for i, row in enumerate(part.ids.tolist()):
                words = settings.group.to_ints(part.words[i])
                before = rows.get((name, row), [0] * len(words))
                rows[name, row] = [(a + b) % order for a, b in zip(before, words, strict=True)]
    return dense, {at: words for at, words in rows.items() if any(words)}


def opened(settings: TwoServerParams, total: TwoServerSum) -> tuple[list[int], dict]:
    """A `TwoServerSum` in the oracle's form."""
    rows = {
        (name, row): settings.group.to_ints(part.words[i])
        for name, part in total.tables.items()
        for i, row in enumerate(part.rows.tolist())
    }
    return settings.group.to_ints(total.dense), rows


@dataclass
class Recorded(Network):
    """A round of which every message and every stored state is kept."""

    kept: dict[bytes, None] = field(default_factory=dict)

    def keep(self, value: Any) -> None:
        """A record, and those inside it that can stand on their own."""
        self.kept[wire.encode(value)] = None
        for name in ("header", "total"):
            inner = getattr(value, name, None)
            if type(inner) in wire.records().values():
                self.keep(inner)

    def note(self, name: Party) -> None:
        role = self.roles.get(name)
        if role is not None:
            self.kept[role.snapshot()] = None
            self.keep(role.state)
            if getattr(role, "total", None) is not None:
                self.keep(role.total)

    def carry(self, sender: Party, out: Sequence[Outbound]) -> None:
        self.note(sender)
        self.note(HELPER)
        super().carry(sender, out)

    def arrive(self, source: Party, to: Party, data: bytes) -> list[Outbound]:
        self.keep(wire.decode(data))
        out = super().arrive(source, to, data)
        self.note(to)
        return out

    def close(self) -> None:
        super().close()
        self.note(SERVER)


@lru_cache
def records() -> tuple[bytes, ...]:
    """Encodings of every record of the two-server protocols, from real rounds."""
    settings = params(table(), small_table(), dense=2, dense_bytes=3)
    network = Recorded.of(settings)
    header = network.handshake()
    network.reading(header)
    for c in network.clients:
        network.note(c)
    network.read({c: {TableId(0): ids(1, 2)} for c in network.clients})
    network.writing(header)
    wanted = {TableId(0): ids(1, 2), TableId(9): ids(0)}
    first, *others = network.clients
    network.roles[first] = stranger = WriteClient(network.client_setup(first))
    network.note(first)
    stranger.receive(SERVER, network.sent("SignedHeader")[0])
    network.write({c: update(settings, wanted, c) for c in (first, *others)})

    aborted = Recorded.of(params(round_id=RoundId(13)))
    aborted.writing(aborted.handshake())
    aborted.write({})
    aborted.arrive(
        SERVER, HELPER, network.sent("Closing")[0]
    )  # of another round: the helper leaves

    lasting = Recorded.of(params(round_id=RoundId(20), key_rounds=5))
    lasting.writing(lasting.handshake())
    lasting.write(dict.fromkeys(lasting.clients))
    lasting = lasting.later()
    lasting.writing(lasting.handshake())
    lasting.write(dict.fromkeys(lasting.clients))
    for store in (lasting.stores.leader, lasting.stores.of(lasting.clients[0])):
        lasting.keep(store.latest())

    query = next(q for q in map(wire.decode, network.sent("Forwarded")))
    context = ReportContext(
        params=settings,
        header=header,
        purpose=query.purpose,
        client=query.sender,
        report_id=query.report_id,
    )
    box = reports.unseal_box(context, query.box, keys()[2])
    network.keep(box)
    network.keep(SealedAnswer(tables=(b"half",), signature=box.signature))
    found: dict[type, list[bytes]] = {}
    for data in {**network.kept, **aborted.kept, **lasting.kept}:
        found.setdefault(wire.kind_of(data), []).append(data)
    return tuple(data for some in found.values() for data in (*some[:2], some[-1]))
