"""EpochFederation: a simulation of fixed groups that wait, in one process.

What a server does is an `EpochCourse`. Here are the members with their rows and secrets, who is
there in which round, and figures that no server could know. A member that is absent delivers
nothing in that round, and the group waits for it.

A group's messages are real (encoded, masked, signed) for its whole life, or its vectors are summed
in memory by a trusted party; the models are the same to the bit. With `crypto = "sampled"` one
group of so many is carried, and figures of bytes and seconds are those of its members.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tessera import wire
from tessera.crypto.entropy import Entropy, RootedEntropy, ScriptedEntropy
from tessera.crypto.keys import SigningKey, identities
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, WireError
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.learning.tables.submodel import Ids, ModelUpdate, Submodel
from tessera.plan import Crypto, Plan
from tessera.protocols.epochs import messages
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.epochs.messages import EpochKind
from tessera.protocols.machine import Outbound
from tessera.rounds import schemes
from tessera.rounds.cohorts import Cohorts, cohorts_of
from tessera.rounds.cohorts import FixedGroup as Members
from tessera.rounds.course import Evaluate
from tessera.rounds.encode import UpdateLayout
from tessera.rounds.epochs.client import EpochClient, EpochClientSetup, MemberWork
from tessera.rounds.epochs.group import Cutoffs, GroupEpochs, MemoryVectors, PeriodRecord, all_data
from tessera.rounds.epochs.server import EpochCourse, EpochServer, EpochServerSetup
from tessera.rounds.events import Event, RoundFinished, RoundStarted
from tessera.rounds.noise import noise_of
from tessera.rounds.party import ServerModel, ServerParty, Word
from tessera.rounds.root import coins_of
from tessera.rounds.schemes import CATEGORIES, KEYS, UNION
from tessera.rounds.select import Selection
from tessera.simulation.epochs_at_rest import (
    FederationAtRest,
    GroupAtRest,
    PendingRows,
    RoleAtRest,
    memory_at_rest,
    memory_woken,
)
from tessera.simulation.faults import dropouts
from tessera.simulation.federation import Federation
from tessera.simulation.subcohort import (
    TRAIN,
    Participant,
    TrainingOutcome,
    failing_alone,
    scope_of,
)
from tessera.simulation.views import Views
from tessera.wire.stored import MAX_STATE_BYTES

# --- one member that is there ---------------------------------------------------------------------


class Visit(ABC):
    """One member that is there, and what it does for the epoch that is open."""

    group: GroupEpochs

    @property
    @abstractmethod
    def work(self) -> MemberWork:
        """What it computes."""

    @abstractmethod
    def offer_rows(self) -> None:
        """Freeze this period's rows and deliver them into the union."""

    @abstractmethod
    def fetch(self) -> Submodel:
        """Charge for the epoch, and take the base."""

    @property
    @abstractmethod
    def coins(self) -> RootedEntropy:
        """What this member draws from in this epoch."""

    @abstractmethod
    def deliver(self, update: ModelUpdate | None) -> None:
        """Deliver what came out of training; None: nothing did."""

    @property
    def base_round(self) -> RoundId:
        """The round in which the base was fixed."""
        assert self.group.at.open is not None
        return self.group.at.open.round_id


@dataclass(slots=True)
class MemoryVisit(Visit):
    """To a group whose vectors are summed in memory."""

    group: GroupEpochs
    own: MemberWork
    entropy: Entropy = field(repr=False)
    chosen: Selection | None = field(default=None, repr=False)

    @property
    def work(self) -> MemberWork:
        return self.own

    @property
    def coins(self) -> RootedEntropy:
        open_epoch = self.group.at.open
        assert open_epoch is not None
        group, epoch = self.group.group, open_epoch.header.epoch
        return messages.coins(messages.fresh_root(self.entropy, group, self.work.me, epoch))

    def offer_rows(self) -> None:
        assert self.group.at.open is not None
        header = self.group.at.open.header
        self.work.begin(self.group.at.open.record)
        self.work.freeze(header.period, self.entropy)
        words = self.work.union_words(header.period, header.epoch, self.coins)
        _in_memory(self.group).add(self.work.me, words)

    def fetch(self) -> Submodel:
        at = self.group.at.open
        assert at is not None and at.base is not None
        self.work.begin(at.record)
        self.work.charge(at.header.epoch, at.header.period)
        self.chosen = self.work.selection(at.header.period, self._union, self.coins)
        return self.work.submodel(at.base.message, self.chosen)

    def deliver(self, update: ModelUpdate | None) -> None:
        assert self.chosen is not None
        layout = UpdateLayout(self.work.plan, self._union)
        words = self.work.update_words(update, self.chosen, layout, self.base_round, self.coins)
        _in_memory(self.group).add(self.work.me, words)

    @property
    def _union(self) -> Mapping[str, Ids]:
        union = self.group.at.union
        return self.work.union_of(None if union is None else union.message)


def _in_memory(group: GroupEpochs) -> MemoryVectors:
    assert isinstance(group.vectors, MemoryVectors)
    return group.vectors


# --- groups whose messages are real ---------------------------------------------------------------


@dataclass(slots=True)
class MessageCosts:
    """What a round's messages have cost, by cost category: clients' bytes and everybody's time."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    client: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    server: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class CarriedGroup:
    """A group whose messages are real: everybody's role, kept for the group's life."""

    def __init__(self, server: EpochServer, clients: Mapping[ClientId, EpochClient]) -> None:
        self.server, self.clients = server, dict(clients)
        self.visits = 0

    def exchange(
        self,
        client: ClientId,
        out: Sequence[Outbound],
        carrier: Carrier,
        category: str = "",
    ) -> None:
        """A client's messages to the server, and its answers, until nobody has anything to say."""
        waiting: list[tuple[Party, Outbound]] = [(SERVER, message) for message in out]
        role = self.clients[client]
        while waiting:
            to, message = waiting.pop(0)
            kind = category or carrier.category(message.kind)
            carrier.record(client, to, message)
            started = time.process_time()
            if to == SERVER:
                carrier.costs.up[kind] += len(message.data)
                answers = self.server.receive(client, message.data)
                carrier.costs.server[kind] += time.process_time() - started
                waiting += [(client, each) for each in answers]
            else:
                carrier.costs.down[kind] += len(message.data)
                answers = role.receive(SERVER, message.data)
                carrier.costs.client[kind] += time.process_time() - started
                waiting += [(SERVER, each) for each in answers]


@dataclass(slots=True)
class Carrier:
    """Where messages go by in a round: their costs, and views of them."""

    plan: Plan
    views: Views | None
    costs: MessageCosts = field(default_factory=MessageCosts)
    now: float = 0.0

    def category(self, kind: str) -> str:
        return schemes.of(self.plan).costs.messages[kind]

    def record(self, client: ClientId, to: Party, message: Outbound) -> None:
        if self.views is None:
            return
        sender: Party = client if to == SERVER else SERVER
        for arrived in (False, True):
            self.views.add(self.now, sender, to, message.kind, message.data, arrived=arrived)


@dataclass(slots=True)
class CarriedVisit(Visit):
    """By messages between the roles."""

    group: GroupEpochs
    carried: CarriedGroup
    client: ClientId
    carrier: Carrier

    @property
    def role(self) -> EpochClient:
        return self.carried.clients[self.client]

    @property
    def work(self) -> MemberWork:
        return self.role.work

    @property
    def coins(self) -> RootedEntropy:
        return self.role.epoch_coins

    def offer_rows(self) -> None:
        self._come(UNION)

    def fetch(self) -> Submodel:
        self._come("")
        submodel = self.role.pending
        assert submodel is not None
        return submodel

    def _come(self, category: str) -> None:
        self.carried.visits += 1
        asked = self.role.fetch(self.carried.visits)
        self.carried.exchange(self.client, asked, self.carrier, category)

    def deliver(self, update: ModelUpdate | None) -> None:
        started = time.process_time()
        out = self.role.supply(update)
        self.carrier.costs.client["update"] += time.process_time() - started
        self.carried.exchange(self.client, out, self.carrier)


# --- the federation -------------------------------------------------------------------------------


class EpochFederation(Federation):
    """A plan with fixed groups, its population and the model, round after round."""

    def _begin(
        self,
        party: ServerParty,
        model: ServerModel,
        evaluate: Evaluate | None,
        groups: Sequence[Members],
    ) -> None:
        self._cohorts = Cohorts(self.plan, self.participants, self._entropy, groups)
        self._model = model

    @property
    def model(self) -> ServerModel:
        return self._model

    @property
    def cohorts(self) -> Cohorts:
        return self._cohorts

    _stored: tuple[int, bytes] | None = None
    """Where to go on from: read when it is needed, as reading a model needs no secrets."""

    @cached_property
    def epochs(self) -> EpochCourse:
        """The groups and where they are."""
        evaluate = None if self._evaluate is None else self._tested
        course = EpochCourse(
            self.plan, self._formed, self._made, self.model, self._entropy, evaluate=evaluate
        )
        if self._stored is not None:
            self._restore(course, *self._stored)
        return course

    @property
    def _formed(self) -> Sequence[tuple[ClientId, ...]]:
        return self.cohorts.groups

    @cached_property
    def _carrier(self) -> Carrier:
        return Carrier(self.plan, self.views)

    @cached_property
    def _real(self) -> dict[int, CarriedGroup]:
        """Groups whose messages are real, by number."""
        return {}

    def _made(self, number: int, members: Sequence[ClientId]) -> GroupEpochs:
        """A group at its beginning, carried or in memory."""
        group = self._fixed_group(number, members)
        if not self._is_carried(number):
            vectors = MemoryVectors(frozenset(members))
            return GroupEpochs(self.plan, group, vectors, cutoffs=self.cutoffs)
        server = EpochServer(self._server_setup(group))
        carried = self._real[number] = CarriedGroup(server, {})
        for client in members:
            carried.clients[client], out = EpochClient.join(self._setup_of(client, group))
            carried.exchange(client, out, self._carrier, KEYS)
        return server.epochs

    def _is_carried(self, number: int) -> bool:
        simulation = self.plan.simulation
        sampled = simulation.crypto is Crypto.SAMPLED and number % simulation.crypto_every == 0
        return simulation.crypto is Crypto.EVERY or sampled

    def _fixed_group(self, number: int, members: Sequence[ClientId]) -> FixedGroup:
        federation = self.plan.federation
        leaves = tuple(
            Leaf(federation=federation, client=client, key=self._key(client).public, serial=0)
            for client in members
        )
        return FixedGroup(
            federation=federation,
            plan=self.plan.lasting_digest,
            number=number,
            snapshot=1,
            snapshot_digest=bytes(32),
            values=(bytes(32), bytes(32)),
            beacon=bytes(32),
            leaves=leaves,
        )

    def _key(self, client: ClientId) -> SigningKey:
        if client not in self._keys:
            found = identities([client], self._entropy, self.plan.federation)
            self._keys[client] = found[client].key
        return self._keys[client]

    @cached_property
    def _keys(self) -> dict[ClientId, SigningKey]:
        """Of those that somebody was invited with; drawn once."""
        return {}

    cutoffs: Cutoffs = staticmethod(all_data)
    """Of the periods' data; those of a task with times may be given."""

    def _server_setup(self, group: FixedGroup) -> EpochServerSetup:
        return EpochServerSetup(plan=self.plan, group=group, cutoffs=self.cutoffs)

    def _setup_of(self, client: ClientId, group: FixedGroup) -> EpochClientSetup:
        return EpochClientSetup(
            plan=self.plan,
            group=group,
            party=client,
            key=self._key(client),
            local=self.participants[client].local,
            entropy=self._entropy,
        )

    @property
    def next_round(self) -> int:
        if self._stored is not None and "epochs" not in vars(self):
            return self._stored[0]
        return self.epochs.next_round

    @property
    def survivors(self) -> Mapping[ClientId, ClientId]:
        return {client: client for client in self.epochs.counted}

    def coins(self, round_id: RoundId, client: ClientId) -> Secret:
        """What the training of a member draws from, in the epoch that is open to it."""
        return coins_of(self._visit(client, round_id).coins)

    def possible(self, round_id: RoundId) -> Mapping[ClientId, RoundId]:
        group_of = self.epochs.group_of
        return {c: RoundId(group_of(c).next_epoch) for c in self.epochs.invited(round_id)}

    def admit(self, newcomers: Mapping[ClientId, Participant]) -> None:
        before = len(self.cohorts.groups)
        super().admit(newcomers)
        self.epochs.form(self.cohorts.groups[before:])

    # --- rounds ---------------------------------------------------------------------------------

    def round(self) -> Iterator[Event]:
        started, course = time.monotonic(), self.epochs
        round_id = RoundId(course.next_round)
        self._carrier.costs, self._carrier.now = MessageCosts(), float(round_id)
        undecoded = self._collect_unions(round_id)
        invited = course.invited(round_id)
        yield RoundStarted(
            round_id=round_id, period=0, cohort=tuple(int(c) for c in sorted(invited))
        )
        gone = self._absent(round_id, invited)
        visits = {c: self._visit(c, round_id) for c in sorted(invited) if c not in gone}
        training = self._train(visits)
        ended = course.conclude(
            round_id,
            invited,
            len(visits),
            measured=any(isinstance(visit, CarriedVisit) for visit in visits.values()),
            secure=lambda number: number in self._real,
            undecoded=undecoded,
            clock=lambda: time.monotonic() - started,
        )
        self._settle_counted()
        yield self._measured(ended, visits, training)

    def _collect_unions(self, round_id: RoundId) -> int:
        """Everybody who is there delivers a union that is due; how many did not decode."""
        due = self.epochs.unions(round_id)
        if not due:
            return 0
        gone = self._absent(round_id, due)
        for client in due:
            if client not in gone:
                self._visit(client, round_id).offer_rows()
        return self.epochs.take_unions()

    def _absent(self, round_id: RoundId, clients: Sequence[ClientId]) -> frozenset[ClientId]:
        if self._faults is None:
            return frozenset()
        return frozenset(dropouts(self._faults(round_id, sorted(clients))))

    def _visit(self, client: ClientId, round_id: RoundId) -> Visit:
        group = self.epochs.group_of(client)
        group.opened(self.model, round_id)
        carried = self._real.get(group.group.number)
        if carried is not None:
            return CarriedVisit(group, carried, client, self._carrier)
        return MemoryVisit(group, self._work(group, client), self._entropy)

    def _work(self, group: GroupEpochs, client: ClientId) -> MemberWork:
        return MemberWork(group.plan, client, self.participants[client].local)

    def _train(self, visits: Mapping[ClientId, Visit]) -> TrainingOutcome:
        """Train everybody who is there, those from bases of one round together."""
        training, trainer = TrainingOutcome(), failing_alone(self._trainer)
        by_base: defaultdict[RoundId, dict[ClientId, Submodel]] = defaultdict(dict)
        for client, visit in visits.items():
            by_base[visit.base_round][client] = visit.fetch()
        for round_id, submodels in sorted(by_base.items()):
            training.add(trainer(round_id, submodels))
        for client, visit in visits.items():
            visit.deliver(training.updates.get(client))
        return training

    def _settle_counted(self) -> None:
        """Members of groups that opened hear of it, as with the certificate in their next visit."""
        for client in self.epochs.counted:
            local = self.participants[client].local
            if (pending := local.unsettled) is not None:
                local.settle(pending, counted=True, by=Word.CERTIFICATE)

    def _tested(self, round_id: RoundId) -> float | None:
        assert self._evaluate is not None
        self._settle_counted()
        return self._evaluate(round_id)

    def _measured(
        self, event: RoundFinished, visits: Mapping[ClientId, Visit], training: TrainingOutcome
    ) -> RoundFinished:
        """The event with what a simulation knows beside the server."""
        work = [visit.work for visit in visits.values()]
        cut, values = sum(w.clipped.cut for w in work), sum(w.clipped.of for w in work)
        ledgers = [self.participants[c].local.ledger for c in visits]
        worst = max((g.guarantee() for g in ledgers), key=lambda g: g.epsilon, default=None)
        spent = [s for g in ledgers if (s := noise_of(self.plan).guarantee(g)) is not None]
        noise = max(spent, key=lambda g: g.epsilon, default=None)
        scripted = isinstance(self._entropy, ScriptedEntropy)
        costs, cohort = self._carrier.costs, max(1, event.cohort)
        carried = max(1, sum(isinstance(visit, CarriedVisit) for visit in visits.values()))
        counted = CATEGORIES if event.measured else ()  # with zeros: means are over all rounds
        broken = Counter(
            why for c, v in visits.items() if (why := training.failed.get(c, v.work.broken))
        )
        return replace(
            event,
            bytes_up={k: costs.up[k] / carried for k in counted},
            bytes_down={k: costs.down[k] / carried for k in counted},
            client_seconds={
                **{k: costs.client[k] / carried for k in counted},
                TRAIN: sum(training.seconds.values()) / cohort,
            },
            server_seconds={k: costs.server[k] for k in counted},
            epsilon=0.0 if worst is None else worst.epsilon,
            condition="" if worst is None else worst.condition,
            loss=training.loss / training.examples if training.examples else None,
            not_finite=training.not_finite + broken.total(),
            broken=dict(broken),
            clipped=cut / values if values else 0.0,
            noise_epsilon=None if noise is None or scripted else noise.epsilon,
            noise_scope=scope_of(noise, scripted),
            groups_not_finite=training.groups_not_finite,
            rows_over_cap=sum(w.left_out for w in work),
        )

    # --- the checkpoint -------------------------------------------------------------------------

    def at_rest(self) -> bytes:
        found = self.epochs
        pending = {}
        for group in found.groups.values():
            for client in group.group.members:
                if (rows := PendingRows.of(self.participants[client].local)) is not None:
                    pending[client] = rows
        return wire.encode(
            FederationAtRest(
                next_round=found.next_round,
                counted=tuple(found.counted),
                groups={at: self._group_at_rest(at, group) for at, group in found.groups.items()},
                pending=pending,
            )
        )

    def _group_at_rest(self, number: int, group: GroupEpochs) -> GroupAtRest:
        carried = self._real.get(number)
        if carried is None:
            return GroupAtRest(server=memory_at_rest(group))
        roles = {client: RoleAtRest.of(role) for client, role in carried.clients.items()}
        return GroupAtRest(
            server=RoleAtRest.of(carried.server), clients=roles, visits=carried.visits
        )

    def go_on_at(self, round_id: int, at_rest: bytes = b"") -> None:
        """Go on from what was stored. Periods and charges of earlier rounds are recomputed: the
        entropy must be the same as then, or a period would get a second secret."""
        self._stored = (round_id, at_rest)

    def _restore(self, course: EpochCourse, round_id: int, at_rest: bytes) -> None:
        try:
            found = wire.decode(at_rest, expect=(FederationAtRest,), cap=MAX_STATE_BYTES)
        except WireError as error:
            raise ConfigError(
                f"what waits in the checkpoint's groups cannot be read: {error}",
                hint="restore the run's folder from a copy, or begin a new run",
            ) from error
        if found.next_round != round_id or not found.groups.keys() <= set(
            range(len(course.members))
        ):
            raise ConfigError(
                f"the checkpoint's groups are those of another run, or of round {found.next_round}",
                hint="restore the run's folder from a copy, or begin a new run",
            )
        course.next_round, course.counted = round_id, found.counted
        for number, stored in found.groups.items():
            group = self._fixed_group(number, course.members[number])
            course.groups[number] = self._woken(number, group, stored)
            for client in group.members:
                self._recharge(course.groups[number], client)
        for client, pending in found.pending.items():
            pending.restore(self.participants[client].local)

    def _woken(self, number: int, group: FixedGroup, stored: GroupAtRest) -> GroupEpochs:
        if not stored.clients:
            return memory_woken(self.plan, group, stored.server, self.cutoffs)
        server = stored.server.woken(EpochServer, self._server_setup(group))
        clients = {
            client: role.woken(EpochClient, self._setup_of(client, group))
            for client, role in stored.clients.items()
        }
        carried = self._real[number] = CarriedGroup(server, clients)
        carried.visits = stored.visits
        return carried.server.epochs

    def _recharge(self, group: GroupEpochs, client: ClientId) -> None:
        """What this member froze and was charged for, in the order in which it happened."""
        work, begun = self._work(group, client), 0
        for epoch, period, kind in group.met_by(client):
            if period != begun:
                cutoff, begun = self.cutoffs(period), period
                assert cutoff is not None, "a period that has begun has a cut-off"
                work.begin(PeriodRecord(period=period, cutoff=cutoff))
            if kind is EpochKind.UNION:
                work.freeze(period, self._entropy)
            else:
                work.charge(epoch, period)


def federation_for(plan: Plan) -> type[Federation]:
    """What simulates a plan: rounds of a cohort, or epochs of fixed groups."""
    return EpochFederation if cohorts_of(plan).waits else Federation
