"""Federation: round after round over a population, in one process.

What a server does is a `Course`; here is what only a simulation has: the members with their rows
and secrets, faults, recorded views, ideal sums, and figures that no server could know. The plan's
seed decides who is sampled and who drops out, and nothing else. Every message is encoded and
decoded.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.entropy import Entropy, ScriptedEntropy, SystemEntropy
from tessera.crypto.keys import Identity, identities
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, RoundAborted, RoundRefused, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, RoundId
from tessera.learning.averaging import Averaging
from tessera.learning.popularity import Popularity
from tessera.learning.tables.submodel import ModelUpdate, Submodel
from tessera.learning.tables.table import DerivedMap, StoredTable
from tessera.plan import Plan
from tessera.protocols.machine import Outbound
from tessera.protocols.two_server.key_period import MemoryStore
from tessera.protocols.two_server.reports import Workers
from tessera.rounds import noise_chain, schemes
from tessera.rounds.attendance import registered
from tessera.rounds.cohorts import Cohorts, FixedGroup
from tessera.rounds.course import (
    Course,
    DrawnRound,
    Evaluate,
    HelperCourse,
    PartOutcome,
    RoundClient,
    RoundPart,
    RoundServer,
    client_role,
)
from tessera.rounds.events import Event, PhaseClosed, RoundFinished
from tessera.rounds.ideal import IdealSum, InMemory, TrustedParty
from tessera.rounds.messages import RoundResult
from tessera.rounds.noise import noise_of
from tessera.rounds.noise_chain import ChainsAtRest, ChainStore, check_same
from tessera.rounds.party import ClientRoundSetup, ServerModel, ServerParty, Word
from tessera.rounds.resolve import resolve
from tessera.rounds.root import simulated_coins
from tessera.rounds.sums import Sum
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.ideal import IdealSharedSum
from tessera.simulation.faults import Drop, Dropout, Fault, FaultScript, dropouts
from tessera.simulation.simulator import FINISHED, PhaseEnd, Simulator
from tessera.simulation.subcohort import (
    CohortTrainer,
    Participant,
    RoundTrainer,
    Subcohort,
    TrainingOutcome,
    between_messages,
    failing_alone,
    measured_round,
)
from tessera.simulation.two_server import TwoServerSetup
from tessera.simulation.views import Views


class Federation:
    """A plan, its population and the model, round after round."""

    def __init__(
        self,
        plan: Plan,
        participants: Mapping[ClientId, Participant],
        *,
        dense: npt.NDArray[np.float32],
        tables: Mapping[str, StoredTable],
        trainer: CohortTrainer,
        derived: Mapping[str, DerivedMap] | None = None,
        entropy: Entropy | None = None,
        faults: FaultScript | None = None,
        views: Views | None = None,
        evaluate: Callable[[RoundId], float | None] | None = None,
        workers: Workers | None = None,
        groups: Sequence[FixedGroup] = (),
        noisy: bool = False,
        popularity: Popularity | None = None,
        counts: bytes = b"",
    ) -> None:
        """`evaluate` tests the model after a round, in the rounds in which it is due.

        Each of two servers runs on these `workers` (`simulation/two_server.py`), by default on one.
        `groups` are fixed groups that were formed before. `noisy`: the trainer does what [dp] says.
        `popularity` is that of the rows, where [dp] has them selected; `counts` the digest of those
        by which clients draw negatives.
        """
        if noise_of(plan).by_trainer and not noisy:
            raise ConfigError(
                "[dp] with a trainer of one's own, which adds no noise",
                hint="train by `Training`, or leave [dp] out",
            )
        self.plan, self.participants, self.views = plan, participants, views
        self.last: RoundServer | None = None
        self._trainer, self._faults = trainer, faults
        self._entropy: Entropy = entropy or SystemEntropy()
        self.two_server: TwoServerSetup | None = None
        self._chains: dict[str, ChainStore] = {SERVER: MemoryStore()}
        party = ServerParty(entropy=self._entropy, chain_store=self._chains[SERVER])
        if schemes.of(plan).two_servers:
            self.two_server = TwoServerSetup.of(self._entropy, plan.federation, workers)
            party = self.two_server.leader_party
            self._chains = {
                SERVER: self.two_server.leader_chain,
                HELPER: self.two_server.helper_chain,
            }
        self._begin(
            party,
            ServerModel(
                plan,
                dense=dense,
                tables=tables,
                derived=derived,
                popularity=popularity,
                counts=counts,
            ),
            None if evaluate is None else self._tested,
            groups,
        )
        self._evaluate = evaluate
        self._named: Mapping[ClientId, ClientId] = {}
        self.helper_course: HelperCourse | None = None
        self._set_own_rounds(participants)

    def _begin(
        self,
        party: ServerParty,
        model: ServerModel,
        evaluate: Evaluate | None,
        groups: Sequence[FixedGroup],
    ) -> None:
        self.course = Course(self.plan, self.participants, model, party, evaluate=evaluate)

    # --- the server's, as it stands -------------------------------------------------------------

    @property
    def model(self) -> ServerModel:
        return self.course.model

    @property
    def dense(self) -> npt.NDArray[np.float32]:
        return self.model.dense

    @property
    def tables(self) -> Mapping[str, StoredTable]:
        return self.model.tables

    @property
    def averaging(self) -> Averaging:
        return self.model.averaging

    @property
    def cohorts(self) -> Cohorts:
        return self.course.cohorts

    @property
    def next_round(self) -> int:
        return self.course.next_round

    @property
    def survivors(self) -> Mapping[ClientId, ClientId]:
        """Of the last round: who each name is."""
        return self.course.survivors

    # --- members --------------------------------------------------------------------------------

    def admit(self, newcomers: Mapping[ClientId, Participant]) -> None:
        """Clients that join from the next round on; the trainer knows them already."""
        self.participants = {**self.participants, **newcomers}
        self.cohorts.admit(newcomers)
        self._set_own_rounds(self.participants)

    def _set_own_rounds(self, participants: Mapping[ClientId, Participant]) -> None:
        """Where cohorts are drawn a simulated client has no rounds of its own to insist on."""
        privacy, drawn = self.plan.privacy, self.cohorts.least_rounds
        for participant in participants.values():
            local = participant.local
            local.own_rounds = privacy.own_rounds_of(local.own_rounds, drawn)
        for client, place in self.cohorts.places().items():
            participants[client].local.place = place
        servers = None if self.two_server is None else self.two_server.servers
        for federation, nothing in registered(self.plan, servers).items():
            for participant in participants.values():
                participant.local.attendance.setdefault(federation, nothing)

    def _sends_unmasked(self, client: ClientId) -> bool:
        return self.participants[client].local.sends_unmasked(self.plan)

    def coins(self, round_id: RoundId, client: ClientId) -> Secret:
        """What the training of a client in this round draws from."""
        return simulated_coins(self._entropy, self.plan, round_id, client)

    def possible(self, round_id: RoundId) -> Mapping[ClientId, RoundId]:
        """Who may be in a round, and under which number each is charged for it."""
        return dict.fromkeys(self.cohorts.sample(round_id), round_id)

    def at_rest(self) -> bytes:
        """What a checkpoint has beside the model; secret."""
        found = {party: store.latest() for party, store in self._chains.items()}
        chains = {party: chain for party, chain in found.items() if chain is not None}
        return wire.encode(ChainsAtRest(chains=chains)) if chains else b""

    def go_on_at(self, round_id: int, at_rest: bytes = b"") -> None:
        """Skip to this round. Cohorts, periods and ledger charges of earlier rounds are recomputed.

        They follow from the plan's seed and the entropy. The entropy must be the same as then, or a
        period would get a second secret. `at_rest` has the secrets of noise
        that the next rounds have a part of.
        """
        self._restore_chains(at_rest)
        for drawn in self.course.skip_to(round_id, self._sends_unmasked):
            self._charge_absent(drawn)
            for part in drawn.parts:
                signers = self._signers(part)
                for name, client in part.named.items():
                    with contextlib.suppress(RoundRefused):
                        self._client(drawn, part, name, signers).prepare()
                        self.participants[client].local.last_round = drawn.round_id

    def _restore_chains(self, at_rest: bytes) -> None:
        stored = wire.decode(at_rest, expect=[ChainsAtRest]).chains if at_rest else {}
        for party, chain in stored.items():
            if not isinstance(self._entropy, SystemEntropy):
                check_same(chain, self._entropy, self.plan, party)
            self._chains[party].keep(chain)

    # --- rounds ---------------------------------------------------------------------------------

    def run(self, rounds: int) -> Iterator[Event]:
        for _ in range(rounds):
            yield from self.round()

    def round(self) -> Iterator[Event]:
        """One round: its events in the order they happen, and the model merged at the end."""
        started = time.monotonic()
        drawn = self.course.draw(self._sends_unmasked)
        yield drawn.started
        self._charge_absent(drawn)
        if (given_up := self.course.given_up(drawn)) is not None:
            yield given_up
            return
        round_id, named = drawn.round_id, drawn.named
        self._named = named
        real = self._is_real(round_id)
        faults = list(self._faults(round_id, sorted(named))) if self._faults else []
        parts = [self._subcohort(drawn, part, faults, ideal=not real) for part in drawn.parts]
        self.last = parts[0].server
        training = TrainingOutcome()
        trainer = failing_alone(self._trainer)  # who fails sends zeros, as all others send values

        def train(submodels: Mapping[ClientId, Submodel]) -> Mapping[ClientId, ModelUpdate | None]:
            """Train under names of this round those who are known by their own."""
            trained = trainer(round_id, {named[c]: s for c, s in submodels.items()})
            training.add(trained)
            return {c: trained.updates.get(named[c]) for c in submodels}

        outcomes: list[PartOutcome] = []
        for part in parts:
            try:
                if real:
                    yield from self._carried(part, train, training)
                    result = part.server.result
                else:
                    result = self._ideal(part, train)
                outcomes.append(part.summed(result))
            except RoundAborted as aborted:
                outcomes.append(part.aborted(aborted))
                break
        ended = self.course.conclude(
            drawn,
            outcomes,
            measured=real,
            clock=lambda: time.monotonic() - started,
            largest={n: training.largest[c] for n, c in named.items() if c in training.largest},
        )
        self._settle(round_id, self.survivors if isinstance(ended, RoundFinished) else {})
        if self.helper_course is not None:
            helper, shown = parts[0].helper, outcomes[0].result
            if helper is not None:
                shown = helper.result  # what it was sent, and not what the leader has
            self.helper_course.conclude(round_id, shown)
        for store in self._chains.values():
            noise_chain.settle(store, self.plan)
        if isinstance(ended, RoundFinished):
            scripted = isinstance(self._entropy, ScriptedEntropy)
            ended = measured_round(
                ended, parts, outcomes, self.participants, training, scripted=scripted
            )
        yield ended

    def _settle(self, round_id: RoundId, counted: Collection[ClientId]) -> None:
        """Everybody hears whether its update has counted, in an ideal round, too."""
        for name, client in self._named.items():
            local = self.participants[client].local
            local.settle(round_id, counted=name in counted, by=Word.SERVER)

    def _tested(self, round_id: RoundId) -> float | None:
        """The stepped model beside the rows that clients have kept."""
        assert self._evaluate is not None
        self._settle(round_id, self.survivors)
        return self._evaluate(round_id)

    def _charge_absent(self, drawn: DrawnRound) -> None:
        """Of a secret cohort everybody is charged: who sees a sample does not see who is in it."""
        if not self.cohorts.rule.hidden:
            return
        there = {client for part in drawn.parts for client in part.named.values()}
        for client, participant in self.participants.items():
            if client not in there:
                noise_of(self.plan).charge_absent(participant.local.ledger, drawn.round_id)

    def _subcohort(
        self, drawn: DrawnRound, part: RoundPart, faults: Sequence[Fault], *, ideal: bool
    ) -> Subcohort:
        """The roles of those who are summed together."""
        signers = self._signers(part)
        one = signers[next(iter(part.named))]
        total = ideal_sum(part.plan, drawn.round_id, part.named, self.model) if ideal else None
        return Subcohort(
            part=part,
            server=self.course.server(drawn, part, one, ideal=total),
            clients={name: self._client(drawn, part, name, signers, total) for name in part.named},
            faults=self._faults_of(part, faults),
            helper=None
            if self.two_server is None
            else self._helped_by(self.two_server).helper(
                drawn.round_id, {} if one is None else one.directory, ideal=total
            ),
        )

    def _helped_by(self, setup: TwoServerSetup) -> HelperCourse:
        """The helper's course; its model is a copy of the leader's before its first round."""
        if self.helper_course is None:
            self.helper_course = HelperCourse(self.plan, self.model.copy(), setup.helper_party)
        return self.helper_course

    def _signers(self, part: RoundPart) -> Mapping[ClientId, Identity | None]:
        """Signing keys by name, where there are any; between two servers everybody has one."""
        if self.two_server is not None:
            return identities(part.named, self._entropy, self.plan.federation)
        return {name: self.participants[client].identity for name, client in part.named.items()}

    def _client(
        self,
        drawn: DrawnRound,
        part: RoundPart,
        name: ClientId,
        signers: Mapping[ClientId, Identity | None],
        ideal: Sum | None = None,
    ) -> RoundClient:
        setup = ClientRoundSetup(
            plan=part.plan,
            round_id=drawn.round_id,
            party=name,
            local=self.participants[part.named[name]].local,
            entropy=self._entropy,
            identity=signers[name],
            servers=None if self.two_server is None else self.two_server.servers,
            ideal=ideal,
        )
        return client_role(setup)

    def _faults_of(self, part: RoundPart, faults: Sequence[Fault]) -> Sequence[Fault]:
        plan, named = part.plan, part.named
        if plan is self.plan:
            return faults
        # In the open there is one phase in which all can be missing; and of the masked no more may
        # be than their smaller number bears.
        gone = {c: left for c, left in dropouts(faults).items() if c in named}
        masks = schemes.of(plan).masks
        places = [
            Drop(c, left.phase, stage=left.visit) if masks else Drop(c, "collect")
            for c, left in gone.items()
        ]
        return places[: len(named) - plan.least_survivors]

    def _is_real(self, round_id: RoundId) -> bool:
        """Whether this round sends real messages.

        One in which keys are made does so for all rounds that are written with them: a round with
        real messages needs real keys.
        """
        plan, last = self.plan, self.plan.key_rounds
        if last == 1 or self.two_server is None:
            return plan.simulation.real(round_id)
        held = self.two_server.leader_keys.latest()
        first = round_id // last * last
        begun = held is not None and first <= held.period
        rounds = [round_id] if begun else range(round_id, first + last)
        return any(plan.simulation.real(RoundId(each)) for each in rounds)

    def _ideal(self, part: Subcohort, train: RoundTrainer) -> RoundResult:
        """The round in memory; `RoundAborted` if too few answered."""
        gone = dropouts(part.faults)
        return run_ideal(part.server, part.clients, train, gone, part.helper)

    def _carried(
        self, part: Subcohort, train: RoundTrainer, training: TrainingOutcome
    ) -> Iterator[Event]:
        """The round with real messages; `RoundAborted` if too few answered."""
        server, clients, named, watch = part.server, part.clients, part.named, part.watch
        phase_ends: list[PhaseEnd] = []

        def on_phase(phase_end: PhaseEnd) -> None:
            watch.on_phase(phase_end)
            phase_ends.append(phase_end)

        first_messages = started(clients)
        simulator = watch.simulator = Simulator(
            server,
            clients,
            first_messages,
            helper=part.helper,
            greeting=server.start(),
            faults=part.faults,
            work=between_messages(clients, train, lambda c: training.seconds.get(named[c], 0.0)),
            ending=server.farewell,
            views=self.views,
            on_phase=on_phase,
        )
        outcome = simulator.run()
        watch.finish()
        for h in phase_ends:
            yield PhaseClosed(
                round_id=server.round_id,
                phase=h.phase,
                visit=h.visit,
                time=h.time,
                answered=h.answered,
                missing=tuple(int(c) for c in h.missing),
            )
        if outcome.aborted is not None:
            raise outcome.aborted


# --- ideal rounds ---------------------------------------------------------------------------------
#
# The real rounds over ideal roles, in memory and without a clock. A client that drops out is
# missing in the phase where it would be, and from then on.


def started(clients: Mapping[ClientId, RoundClient]) -> dict[ClientId, list[Outbound]]:
    """First messages of those who take part; who refuses the round is missing from it."""
    found = {}
    for name, client in clients.items():
        with contextlib.suppress(RoundRefused):
            found[name] = client.start()
    return found


def ideal_sum(
    plan: Plan, round_id: RoundId, cohort: Collection[ClientId], model: ServerModel
) -> Sum:
    """What all roles of an ideal round share in memory, over the model as it stands."""
    if resolve(plan).sum.two_servers:
        return IdealSharedSum(plan, round_id, cohort, model.dense, model.tables)
    return IdealSum(TrustedParty(plan, round_id, cohort))


def run_ideal(
    server: RoundServer,
    clients: Mapping[ClientId, RoundClient],
    train: RoundTrainer,
    places: Mapping[ClientId, Dropout],
    helper: HelperRound | None = None,
) -> RoundResult:
    """Run a round whose roles share an ideal sum; some clients drop out at these places."""
    gone = set[ClientId]()
    visits: Counter[str] = Counter()

    def from_client(client: ClientId, out: Iterable[Outbound]) -> None:
        for message in out:
            place = places.get(client)
            if place is not None and place == Dropout(server.phase, visits[server.phase]):
                gone.add(client)
            if client in gone:
                return
            server.receive(client, message.data)

    def from_server(out: Iterable[Outbound]) -> None:
        waiting = deque(out)
        while waiting:
            message = waiting.popleft()
            if isinstance(message.to, str):
                assert helper is not None
                for answer in helper.receive(SERVER, message.data):
                    waiting.extend(server.receive(HELPER, answer.data))
            elif message.to not in gone:
                from_client(message.to, _delivered(clients[message.to], message))

    begun = started(clients)
    gone |= clients.keys() - begun.keys()
    from_server(server.start())
    for c, out in begun.items():
        from_client(c, out)
    while server.phase not in FINISHED:
        found = {c: clients[c].pending for c in sorted(clients.keys() - gone)}
        pending = {c: submodel for c, submodel in found.items() if submodel is not None}
        for c, update in (train(pending) if pending else {}).items():
            from_client(c, clients[c].supply(update))
        phase = server.phase
        out = server.close_phase()
        visits[phase] += 1
        from_server(out)
    return server.result


def _delivered(client: RoundClient, message: Outbound) -> list[Outbound]:
    """A client's answer; none if it cannot go on with what it was sent, and has left."""
    try:
        if isinstance(message, InMemory):
            return client.take(message.message)
        return client.receive(SERVER, message.data)
    except ServerFault:
        return []
