"""Fixed groups that wait as services in one process, over real journals, with kills at any step.

What comes out is compared with the simulator, given the same order: which epoch was opened from
which round's model, and which round merged it, as the leader's journal has it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rounds.population import DENSE, derived, holdings, members, plan, specs
from rounds.population import trainer as plain_trainer
from services.service_lab import Killed
from tessera import wire
from tessera.crypto.entropy import Entropy, ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.crypto.secret import Secret
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TableUpdate
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.period import PeriodStore
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.epochs.messages import Delivery, EpochKind
from tessera.protocols.membership.proof import CheckedGroup
from tessera.rounds.party import LocalState, ServerModel
from tessera.services.client import MakeLocal, Train, TrainingResult
from tessera.services.group_client import GroupClientService
from tessera.services.group_leader import EpochPlace, GroupLeaderService, epochs_in
from tessera.services.journal import Journal, Moment
from tessera.services.link import name_of
from tessera.services.loopback import ReplayedGroups
from tessera.simulation.subcohort import one_by_one

SEED = b"groups as services"
NOW = 1_700_000_000.0


def grouped(clients: int, size: int, *, cohort: int = 0, **more: Any) -> Plan:
    groups = {"size": size, "small": True, **more.pop("groups", {})}
    return plan(cohort=cohort or clients, groups=groups, **more)


def trainer(client: ClientId) -> Callable[[Submodel], ModelUpdate]:
    """Depends on the base: from another one it comes to something else."""
    train = plain_trainer(client)

    def moved(sub: Submodel) -> ModelUpdate:
        made = train(sub)
        tables = {
            name: TableUpdate(each.values - 0.2 * _rows(sub, name), each.counts)
            for name, each in made.tables.items()
        }
        return replace(made, dense=made.dense - 0.2 * sub.dense, tables=tables)

    return moved


def _rows(sub: Submodel, name: str) -> np.ndarray:
    part = sub.tables[name]
    return part.values[np.searchsorted(part.ids, sub.trained[name])]


def groups_of(settings: Plan, clients: int) -> list[FixedGroup]:
    """As if drawn: ids that are not in the order of the leaves."""
    everybody = [ClientId(c) for c in range(clients)]
    signers = identities(everybody, ScriptedEntropy(SEED), settings.federation)
    size, order = settings.group_size, np.random.default_rng(3).permutation(clients)
    return [
        FixedGroup(
            federation=settings.federation,
            plan=settings.lasting_digest,
            number=number,
            snapshot=1,
            snapshot_digest=b"s" * 32,
            values=(b"1" * 32, b"2" * 32),
            beacon=b"b" * 32,
            leaves=tuple(
                Leaf(
                    federation=settings.federation,
                    client=ClientId(int(c)),
                    key=signers[ClientId(int(c))].directory[ClientId(int(c))],
                    serial=0,
                )
                for c in order[number * size : (number + 1) * size]
            ),
        )
        for number in range(clients // size)
    ]


class Visits:
    """Carries what clients and the leader of fixed groups say, as the transport does."""

    parties: dict[Party, Any]
    sent: dict[tuple[ClientId, int], bytes]
    """What was ever sent of an epoch: one content."""

    @property
    def leader(self) -> Any:
        return self.parties[SERVER]

    def ask(self, client: ClientId, data: bytes) -> bytes:
        """The leader's answer; what is delivered has one content for each epoch."""
        if wire.kind_of(data) is Delivery:
            epoch = wire.decode(data, expect=[Delivery]).statement.epoch
            assert self.sent.setdefault((client, epoch), data) == data, "other bytes"
        answer = self.leader.take(client, data)
        assert not answer.refused, answer.refused
        return answer.message

    def visit(self, client: ClientId, *, once: bool = False) -> None:
        """A client comes, and stays until nothing is due, or `once` until it has sent something;
        whoever is killed comes back at once."""
        while True:
            try:
                sends = bool(self.parties[client].outgoing)
                if not self._step(client) or (once and sends):
                    return
            except Killed as killed:
                self.restart(killed.party)

    def restart(self, party: Party) -> None:
        raise Killed(party)

    def _step(self, client: ClientId) -> bool:
        one: GroupClientService = self.parties[client]
        if one.left or one.retired:
            return False
        if one.role is None:
            one.join()
        elif one.outgoing:
            answer = self.ask(client, one.outgoing[0])
            if answer:
                one.take(answer)
            else:
                one.sent()
        elif one.pending is not None:
            one.train()
        else:
            answer = self.ask(client, one.fetch())
            if answer:
                one.take(answer)
            return bool(one.outgoing) or one.pending is not None
        return True


class GroupLab(Visits):
    """The leader and all clients of a plan with fixed groups."""

    def __init__(
        self,
        settings: Plan,
        folder: Path,
        clients: int,
        *,
        entropy: Callable[[], Entropy] | None = None,
    ) -> None:
        self.plan, self.folder, self.count = settings, folder, clients
        self.entropy = entropy or (lambda: ScriptedEntropy(SEED))
        self.groups = groups_of(settings, clients)
        self.clients = [ClientId(c) for c in range(clients)]
        self.signers = identities(self.clients, ScriptedEntropy(SEED), settings.federation)
        self.moments: Counter[Party] = Counter()
        self.kill_at: set[tuple[Party, int]] = set()
        self.sent, self.parties, self.now = {}, {}, NOW
        for party in (SERVER, *self.clients):
            self.start(party)

    # --- processes ------------------------------------------------------------------------------

    def clock(self) -> float:
        """Everybody's: a second goes by with each look."""
        self.now += 1.0
        return self.now

    def start(self, party: Party) -> None:
        journal = Journal.open(
            self.folder / name_of(party), owner=name_of(party), plan=self.plan.digest
        )
        journal.database.execute("PRAGMA synchronous = OFF")
        journal.watch = lambda moment: self._watch(party, moment)
        self.parties[party] = self._made(party, journal)

    def _watch(self, party: Party, _: Moment) -> None:
        here = (party, self.moments[party])
        self.moments[party] += 1
        if here in self.kill_at:
            self.kill_at.remove(here)
            raise Killed(party)

    def kill(self, party: Party) -> None:
        self.parties.pop(party).journal.close()

    def restart(self, party: Party) -> None:
        self.kill(party)
        self.start(party)

    def _made(self, party: Party, journal: Journal) -> Any:
        if isinstance(party, str):
            return GroupLeaderService(
                journal,
                self.plan,
                self.groups,
                first_model=self.first_model,
                entropy=self.entropy(),
                clock=self.clock,
            )
        (group,) = [each for each in self.groups if party in each.members]
        local, train = self.own(party, journal)
        return GroupClientService(
            journal,
            self.plan,
            party,
            group=CheckedGroup(group=group, void=0, reasons=()),
            key=self.signers[party].key,
            local=local,
            train=train,
            entropy=self.entropy(),
            clock=self.clock,
        )

    def own(self, client: ClientId, journal: Journal) -> tuple[MakeLocal, Train]:
        """A client's data, and how it trains."""
        train, rows = trainer(client), holdings(self.count)[client]

        def local(periods: PeriodStore, ledger: Ledger) -> LocalState:
            return LocalState(
                real={"goods": rows}, periods=periods, ledger=ledger, derived=derived()
            )

        def trained(_: RoundId, submodel: Submodel, coins: Secret) -> TrainingResult:
            return TrainingResult(train(submodel))

        return local, trained

    def first_model(self) -> ServerModel:
        return ServerModel(
            self.plan,
            dense=np.zeros(DENSE, dtype=np.float32),
            tables={name: LazyTable(spec) for name, spec in specs().items()},
            derived=derived(),
        )

    # --- visits ---------------------------------------------------------------------------------

    def client(self, number: int) -> GroupClientService:
        found: GroupClientService = self.parties[ClientId(number)]
        return found

    def ready(self) -> None:
        """All unions are there, and no update is due to anybody yet."""
        for _ in range(2):
            for client in self.clients:
                self.visit(client, once=True)

    def run(self, rounds: int, *, seed: int = 0, away: float = 0.0) -> None:
        """Clients come in random order, some of them stay away each time."""
        rng = np.random.default_rng(seed)
        for _ in range(100 * rounds):
            for at in rng.permutation(self.count):
                if self.leader.next_round >= rounds:
                    return
                if rng.random() >= away:
                    self.visit(self.clients[at])
        raise AssertionError(f"{self.leader.next_round} of {rounds} rounds: {self.leader.open}")

    # --- what is left ---------------------------------------------------------------------------

    def order(self) -> list[EpochPlace]:
        return epochs_in(self.folder / name_of(SERVER))

    def updates(self) -> list[EpochPlace]:
        """Those that a round has merged."""
        merged = [each for each in self.order() if each.closed is not None]
        return [each for each in merged if each.kind is EpochKind.UPDATE]

    def replayed(self) -> str:
        """The digest of the simulator's model after the same epochs in the same order."""
        everybody = members(self.count)
        made = ReplayedGroups(
            self.plan,
            everybody,
            trainer=one_by_one({client: trainer(client) for client in everybody}),
            dense=np.zeros(DENSE, dtype=np.float32),
            tables={name: LazyTable(spec) for name, spec in specs().items()},
            derived=derived(),
            entropy=ScriptedEntropy(SEED),
        )
        made.drawn = self.groups
        made.replay(self.order(), self.leader.next_round)
        return made.model.digest.hex()

    def close(self) -> None:
        for party in list(self.parties):
            self.kill(party)
        shutil.rmtree(self.folder)
