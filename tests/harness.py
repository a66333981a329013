"""Runs a cohort of secure sums in memory: small factories and one `run`, for all tests.

Entropy is scripted, so that a run can be repeated; inputs come from a seeded numpy generator, which
is what inputs may come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.group import Group
from tessera.crypto.keys import Identity, SigningKey
from tessera.crypto.ring import Ring
from tessera.ids import ClientId, RoundId, TableId
from tessera.protocols.machine import Outbound
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.secagg.messages import RevealedShares, Roster
from tessera.protocols.secagg.params import RowSumSpec, SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.phases import StageSum
from tessera.protocols.secagg.server import SecAggServerSetup
from tessera.protocols.secagg.standalone import Aggregator, Contribution, Contributor, RowInput
from tessera.simulation.faults import Drop, Fault
from tessera.simulation.simulator import Outcome, Simulator
from tessera.simulation.views import Views

PLAN = bytes(range(32))


def dense_stage(group: Group | None = None, length: int = 7, **more) -> StageSpec:
    return StageSpec(name="dense", group=group or Ring(32), dense=length, **more)


def row_stage(group: Group | None = None, width: int = 3, dense: int = 0, tables=(0,)) -> StageSpec:
    specs = tuple(RowSumSpec(table=TableId(t), width=width) for t in tables)
    return StageSpec(name="rows", group=group or Ring(32), dense=dense, tables=specs)


def params(clients: int, *stages: StageSpec, **more) -> SecAggParams:
    settings = {
        "federation": "test",
        "round_id": RoundId(12),
        "plan_hash": PLAN,
        "cohort": clients,
        "stages": stages or (dense_stage(),),
        **more,
    }
    return SecAggParams(**settings)


@lru_cache
def signing_key(client: ClientId) -> SigningKey:
    return SigningKey.from_secret(ScriptedEntropy(b"identities").secret("identity", client))


@lru_cache
def identities(clients: tuple[ClientId, ...]) -> dict[ClientId, Identity]:
    directory = {c: signing_key(c).public for c in clients}
    return {c: Identity(signing_key(c), directory) for c in clients}


def random_words(
    group: Group, shape: tuple[int, ...], rng: np.random.Generator, below: int | None = None
) -> np.ndarray:
    count = int(np.prod(shape))
    order = group.order if below is None else below
    values = [int.from_bytes(rng.bytes(17), "little") % order for _ in range(count)]
    return group.from_ints(values).reshape(*shape, *group.limbs)


def contributions(
    settings: SecAggParams,
    clients: Iterable[ClientId],
    seed: int = 0,
    *,
    universe: int = 12,
    quorums: Mapping[ClientId, int] | None = None,
) -> dict[ClientId, list[Contribution]]:
    """Random inputs for every stage: dense words, and for each table about half of the rows."""
    rng = np.random.default_rng(seed)
    found: dict[ClientId, list[Contribution]] = {}
    for client in clients:
        found[client] = []
        for stage in settings.stages:
            tables = {}
            for spec in stage.tables:
                rows = np.flatnonzero(rng.random(universe) < 0.5).astype(np.uint64)
                words = random_words(stage.group, (len(rows), spec.width), rng)
                tables[spec.table] = RowInput(rows=rows, words=words)
            top = None if stage.max_value is None else stage.max_value + 1
            dense = random_words(stage.group, (stage.dense,), rng, top) if stage.dense else None
            quorum = (quorums or {}).get(client, 0)
            found[client].append(Contribution(dense=dense, tables=tables, quorum=quorum))
    return found


@dataclass
class Cohort:
    """A round about to happen: parameters, members and their inputs."""

    params: SecAggParams
    inputs: dict[ClientId, list[Contribution]]
    seed: bytes = b"harness"

    @classmethod
    def of(cls, settings: SecAggParams, *, seed: int = 0, **more) -> Cohort:
        clients = [ClientId(3 * i + 1) for i in range(settings.cohort)]
        return cls(settings, contributions(settings, clients, seed, **more), seed=b"%d" % seed)

    @property
    def clients(self) -> list[ClientId]:
        return sorted(self.inputs)

    def identity(self, client: ClientId) -> Identity | None:
        if self.params.threat is Threat.SEMI_HONEST:
            return None
        return identities(tuple(self.clients))[client]

    def setup(self, client: ClientId) -> SecAggClientSetup:
        return SecAggClientSetup(self.params, client, identity=self.identity(client))

    def server_setup(self) -> SecAggServerSetup:
        identity = self.identity(self.clients[0])
        return SecAggServerSetup(self.params, self.clients, identity=identity)

    def join(self, client: ClientId) -> tuple[Contributor, list[Outbound]]:
        member, out = Client.join(self.setup(client), entropy=ScriptedEntropy(self.seed))
        return Contributor(member, self.inputs[client]), out

    def server(self) -> Aggregator:
        return Aggregator(self.server_setup(), entropy=ScriptedEntropy(self.seed))


@dataclass
class Ran:
    """A round that happened."""

    cohort: Cohort
    outcome: Outcome
    server: Aggregator
    clients: dict[ClientId, Contributor]
    views: Views
    sums: tuple[StageSum, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = self.server.sums

    def survivors(self, stage: int = 0) -> list[ClientId]:
        return [ClientId(int(c)) for c in self.sums[stage].survivors]


def woken(role: Any, *given: Any, **more: Any) -> Any:
    """The role from its bytes alone, as in another process."""
    return type(role).wake(bytes(role.snapshot()), dict(role.messages), *given, **more)


def reload_everybody(cohort: Cohort):
    """For `between_messages`: every role is stored and woken again after every step."""

    def reload(simulator: Simulator) -> None:
        simulator.server = woken(simulator.server, cohort.server_setup())
        for name, member in simulator.clients.items():
            simulator.clients[name] = woken(member, cohort.setup(name), cohort.inputs[name])

    return reload


def simulator(cohort: Cohort, *, server: Aggregator | None = None, **more) -> Simulator:
    """The cohort about to begin, for a test that watches or meddles."""
    joined = {c: cohort.join(c) for c in cohort.clients}
    return Simulator(
        server or cohort.server(),
        {c: member for c, (member, _) in joined.items()},
        {c: out for c, (_, out) in joined.items()},
        **more,
    )


def run(cohort: Cohort, faults: Iterable[Fault] = (), *, reload: bool = False) -> Ran:
    views = Views()
    started = simulator(
        cohort,
        faults=faults,
        views=views,
        between_messages=reload_everybody(cohort) if reload else None,
    )
    outcome = started.run()
    return Ran(cohort, outcome, started.server, started.clients, views)


def plain_dense(cohort: Cohort, stage: int, included: Iterable[ClientId]) -> list[int]:
    """The sum as Python integers: the oracle."""
    group = cohort.params.stages[stage].group
    total = [0] * cohort.params.stages[stage].dense
    for client in included:
        words = group.to_ints(cohort.inputs[client][stage].dense)
        total = [(a + b) % group.order for a, b in zip(total, words, strict=True)]
    return total


def plain_groups(
    cohort: Cohort, stage: int, table: TableId, present: Iterable[ClientId]
) -> dict[int, set[ClientId]]:
    """Each row's group by exhaustion: drop whoever's quorum is not met until nobody is left to."""
    found: dict[int, set[ClientId]] = {}
    for client in present:
        for row in cohort.inputs[client][stage].tables[table].rows:
            found.setdefault(int(row), set()).add(client)
    for members in found.values():
        while True:
            unhappy = {
                c
                for c in members
                if (cohort.inputs[c][stage].quorum or cohort.params.quorum) > len(members)
            }
            if not unhappy:
                break
            members -= unhappy
    return {row: members for row, members in found.items() if members}


def plain_rows(
    cohort: Cohort,
    stage: int,
    table: TableId,
    present: Iterable[ClientId],
    included: Iterable[ClientId],
) -> dict[int, list[int]]:
    """Each opened row's sum as Python integers, over the survivors of its group."""
    group = cohort.params.stages[stage].group
    width = next(t.width for t in cohort.params.stages[stage].tables if t.table == table)
    total: dict[int, list[int]] = {}
    alive = set(included)
    for row, members in plain_groups(cohort, stage, table, present).items():
        total[row] = [0] * width
        for client in members & alive:
            part = cohort.inputs[client][stage].tables[table]
            at = int(np.searchsorted(part.rows, row))
            words = group.to_ints(part.words[at])
            total[row] = [(a + b) % group.order for a, b in zip(total[row], words, strict=True)]
    return total


def opened_rows(summed: StageSum, group: Group, table: TableId) -> dict[int, list[int]]:
    part = summed.tables[table]
    return {int(row): group.to_ints(part.words[i]) for i, row in enumerate(part.rows)}


def roster_of(ran: Ran) -> Roster | None:
    """The roster of the round, if it came to one."""
    sent = (seen.data for seen in ran.views.by_party["server"] if seen.kind == "Roster")
    return next((wire.decode(data) for data in sent), None)


def drops(clients: Iterable[ClientId], phase: str, **more) -> list[Drop]:
    return [Drop(client, phase, **more) for client in clients]


def assert_sums_are_exact(ran: Ran) -> None:
    for stage, summed in enumerate(ran.sums):
        group = ran.cohort.params.stages[stage].group
        survivors = ran.survivors(stage)
        if ran.cohort.params.stages[stage].dense:
            assert group.to_ints(summed.dense) == plain_dense(ran.cohort, stage, survivors)
        for table, part in summed.tables.items():
            expected = plain_rows(ran.cohort, stage, table, part.members, survivors)
            assert opened_rows(summed, group, table) == expected


def shares_by_secret(ran: Ran) -> dict[tuple[int, str, int], set[int]]:
    """Who has given the server a share of what: (stage, kind, owner) -> holders."""
    found: dict[tuple[int, str, int], set[int]] = {}
    for seen in ran.views.by_party.get("server", []):
        if seen.direction == "received" and seen.kind == "RevealedShares":
            message = wire.decode(seen.data, expect=[RevealedShares])
            for kind in ("self_masks", "mask_keys"):
                for owner in getattr(message, kind):
                    found.setdefault((message.stage, kind, owner), set()).add(message.sender)
    return found


def assert_nobody_gave_both_shares(ran: Ran) -> None:
    given = shares_by_secret(ran)
    for stage, kind, owner in given:
        if kind == "self_masks":
            assert (stage, "mask_keys", owner) not in given
