"""Real rounds, kept as evidence: every message that was sent and every state that was stored.

`rounds()` runs a handful of small cohorts once - dense and row by row, one stage and several, both
threat models, with dropouts, a lying server and an aborted round - so that every kind of message
and every state of either role is among them. Decoders and transition tables are tested on these.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

import groups
import harness
import two_servers
import waiting_group
from rounds import population
from tessera import wire
from tessera.crypto.entropy import RootedEntropy
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import RoundAborted, WireError
from tessera.ids import ClientId, Party, RoundId, TableId
from tessera.protocols.machine import Outbound, Over, RoundOutcome, RoundOver, StateMachine
from tessera.protocols.plain import PlainClient, PlainClientSetup, PlainServer, PlainServerSetup
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.params import GraphKind, SecAggParams, Threat
from tessera.protocols.secagg.standalone import Aggregator, Contributor
from tessera.protocols.secagg.states import Reveal
from tessera.rounds.client import NotStarted, RowsAsked
from tessera.rounds.noise_chain import ChainsAtRest, NoiseChain
from tessera.rounds.two_server.client import NotJoined
from tessera.rounds.two_server.helper import AwaitingUnion
from tessera.rounds.two_server.leader import NotBegun
from tessera.simulation.epochs_at_rest import FederationAtRest
from tessera.simulation.faults import Drop, Fault, Lie
from tessera.simulation.simulator import Simulator
from tessera.simulation.views import Views
from tessera.wire import codecs
from tessera.wire.stored import ByDigest, Inner, Supplied


def stands_alone(kind: type[Any]) -> bool:
    """Whether records of this kind name no messages and need nothing to be given."""

    def plain(codec: wire.Codec) -> bool:
        if isinstance(codec, ByDigest | Supplied | Inner):
            return False
        if isinstance(codec, wire.Nested):
            return stands_alone(codec.kind)
        if isinstance(codec, wire.OneOf):
            return all(map(stands_alone, codec.kinds))
        inner = getattr(codec, "inner", None)
        return inner is None or plain(inner)

    return all(plain(codec) for _, codec in wire.layout(kind))


@dataclass
class Recording:
    """One round: what was sent, and what either role would have stored, by name of its state."""

    cohort: harness.Cohort
    messages: list[tuple[Party, Party, str, bytes]] = field(default_factory=list)
    clients: dict[str, list[tuple[ClientId, bytes]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    server: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    kept: dict[bytes, bytes] = field(default_factory=dict)  # what the snapshots name, by digest
    states: dict[bytes, None] = field(default_factory=dict)  # as records

    def stored(self) -> Iterator[bytes]:
        """Every snapshot of either role, and the parameters on their own."""
        yield wire.encode(self.cohort.params)
        for snapshots in self.clients.values():
            yield from (snapshot for _, snapshot in snapshots)
        for snapshots in self.server.values():
            yield from snapshots
        yield from self.states

    def keep(self, role: StateMachine) -> bytes:
        """A role's snapshot, with what it names."""
        self.kept.update(role.messages)
        for state in (role.state, getattr(role.state, "total", None)):
            if state is not None:
                self.states[wire.encode(state)] = None
        return role.snapshot()


class Witnessed(Client):
    """A client that is stored before and after every call, states between two messages too."""

    recording: Recording

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        try:
            return super().receive(sender, data)
        finally:
            self.note()

    def submit(self, contribution: object) -> list[Outbound]:
        out = super().submit(contribution)
        self.note()
        return out

    def note(self) -> None:
        self.recording.clients[self.phase].append((self.setup.party, self.recording.keep(self)))


class WitnessedServer(Aggregator):
    """A server that is stored between two stages, where an `Aggregator` does not stay."""

    recording: Recording

    def begin_stage(self, context: bytes = bytes(32)) -> list[Outbound]:
        self.recording.server[self.phase].append(self.recording.keep(self))
        return super().begin_stage(context)


def record(cohort: harness.Cohort, faults: Iterable[Fault] = ()) -> Recording:
    """Run a cohort and keep everything."""
    kept = Recording(cohort)
    clients, first_messages = {}, {}
    for name in cohort.clients:
        member, first_messages[name] = cohort.join(name)
        witness = Witnessed.wake(
            member.snapshot(),
            member.messages,
            cohort.setup(name),
        )
        witness.recording = kept
        witness.note()
        clients[name] = Contributor(witness, cohort.inputs[name])
    fresh = cohort.server()
    server = WitnessedServer.wake(fresh.snapshot(), fresh.messages, cohort.server_setup())
    server.recording = kept
    kept.server[server.phase].append(kept.keep(server))

    def note(simulator: Simulator) -> None:
        snapshot = kept.keep(simulator.server)
        if snapshot not in kept.server[simulator.server.phase][-1:]:
            kept.server[simulator.server.phase].append(snapshot)

    views = Views()
    Simulator(
        server, clients, first_messages, faults=faults, views=views, between_messages=note
    ).run()
    for party, seen in views.by_party.items():
        for entry in seen:
            if entry.direction == "sent":
                kept.messages.append((party, entry.other, entry.kind, entry.data))
    return kept


@lru_cache
def rounds() -> tuple[Recording, ...]:
    """The rounds that the tests of `wire` and `machine` stand on; the same at every call."""

    def cohort(settings: SecAggParams, seed: int) -> harness.Cohort:
        return harness.Cohort.of(settings, seed=seed, universe=6)

    dense = cohort(harness.params(4, harness.dense_stage(Ring(20), 5)), 1)
    rows = cohort(harness.params(4, harness.row_stage(Ring(100), 2, dense=3, tables=(0, 7))), 2)
    stages = (harness.row_stage(Field(31), 1), harness.dense_stage(Ring(8), 3))
    active = cohort(harness.params(4, *stages, threat=Threat.ACTIVE, round_id=RoundId(2**40)), 3)
    aborted = cohort(harness.params(3), 4)
    lied_to = cohort(harness.params(4), 5)
    sparse = cohort(harness.params(8, graph=GraphKind.SPARSE, degree=4, threshold=3), 6)
    first, last = dense.clients[0], dense.clients[-1]
    return (
        record(dense, [Drop(first, "collect")]),
        record(rows, [Drop(last, "reveal", after=True)]),
        record(active, [Drop(first, "collect"), Drop(last, "unmask", stage=1, after=True)]),
        record(aborted, [Drop(aborted.clients[0], "collect")]),
        record(lied_to, [Lie(first, "SurvivorList", without=first)]),
        record(sparse, [Drop(sparse.clients[2], "share")]),
    )


def plain_records() -> list[bytes]:
    """The states of a small sum in the clear, and of one that was given up; few words of many."""
    spec, round_id, me = harness.row_stage(dense=1), RoundId(3), ClientId(5)
    rows = np.array([1, 4], dtype=np.uint64)
    words = {TableId(0): spec.group.zeros((2, 3))}
    client = PlainClient(PlainClientSetup(spec, round_id, me))
    server = PlainServer(PlainServerSetup(spec, round_id, [me], needed=1))
    states = [client.state, server.state]
    for given in (
        Reveal(tables={TableId(0): rows}),
        Input(dense=spec.group.zeros(1), tables=words),
    ):
        (sent,) = client.submit(given)
        server.receive(me, sent.data)
        states += [client.state, server.state]
        server.close_phase()
        states.append(server.state)
    alone = PlainServer(PlainServerSetup(spec, round_id, [me], needed=1))
    try:
        alone.close_phase()
    except RoundAborted:
        states.append(alone.state)
    dense = harness.dense_stage(spec.group, 60)
    few = spec.group.zeros(60)
    few[[3, 40]] = 7
    (sparse,) = PlainClient(PlainClientSetup(dense, round_id, me, sparse=True)).submit(
        Input(dense=few)
    )
    return [*(wire.encode(state) for state in states), sparse.data]


@lru_cache
def round_messages() -> tuple[bytes, ...]:
    """Messages of training rounds besides their secure sums: plain sums, two servers, groups."""
    found = []
    for scheme in ("submodel", "secure-submodel"):
        views = Views()
        federation = population.federation(population.plan(scheme, cohort=5), views=views)
        assert list(federation.run(1))
        found += [seen.data for seen in views.by_party["server"]]
    found += plain_records()
    over = RoundOver.of(RoundId(12), RoundOutcome.DONE, "for a test")
    tombstone = Over(outcome=over.outcome, reason=over.reason)
    ends = (wire.encode(over), wire.encode(tombstone))
    made = [*two_servers.records(), *groups.records(), *waiting_group.records()]
    return tuple(dict.fromkeys([*found, *made, *ends, *before_rounds()]))


def before_rounds() -> list[bytes]:
    """States of rounds that name no message, and what a client has asked for."""
    asked = {TableId(0): np.array([3, 8], dtype=np.uint64)}
    root = RootedEntropy(Secret(bytes(32)))
    rest = FederationAtRest(next_round=3, counted=(ClientId(4),), groups={}, pending={})
    chain = NoiseChain(round_id=RoundId(3), secrets=(Secret(bytes(32)), Secret(bytes([1] * 32))))
    chains = ChainsAtRest(chains={"helper": chain, "server": chain})
    states = (
        rest,
        chain,
        chains,
        NotStarted(),
        NotJoined(),
        NotBegun(root=root),
        AwaitingUnion(root=root),
    )
    return [wire.encode(each) for each in (*states, RowsAsked(requested=asked, trained=asked))]


def checksummed(unfinished: bytes | bytearray) -> bytes:
    """A frame with its checksum; where it cannot be read, that of one without parts."""
    try:
        data = bytes(unfinished) + bytes(wire.CHECKSUM_BYTES)
        _, source = wire._read(data, None, wire.DEFAULT_CAP)
    except WireError:
        return bytes(unfinished) + hashlib.sha256(unfinished).digest()[: wire.CHECKSUM_BYTES]
    return bytes(unfinished) + codecs.hashes(source.hashed())[1]
