"""Federation: round after round over a population, in one process.

The plan's seed decides who is sampled and who drops out, and nothing else. Every message is encoded
and decoded; each party's view can be recorded for audits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.engines.cohort_training import (
    CohortTrainer,
    TrainingOutcome,
    between_messages,
    failing_alone,
)
from tessera.engines.cohorts import Cohorts
from tessera.engines.dropouts import FaultScript, dropouts
from tessera.engines.faults import Drop, Fault, Reorder
from tessera.engines.measurements import round_finished
from tessera.engines.participant import Participant
from tessera.engines.simulator import PhaseEnd, Simulator
from tessera.engines.subcohort import Subcohort
from tessera.engines.two_server import TwoServerSetup
from tessera.engines.views import Views
from tessera.errors import RoundAborted
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import Averaging, ServerStep
from tessera.learning.derived_map import DerivedMap
from tessera.learning.submodel import ModelUpdate, Submodel
from tessera.learning.tables import StoredTable
from tessera.protocols.secagg.identity import identities
from tessera.protocols.two_server.workers import Workers
from tessera.rounds import schemes
from tessera.rounds.client import ClientRound
from tessera.rounds.encode import RoundResult, merged
from tessera.rounds.events import Event, PhaseClosed, RoundAbort, RoundStarted
from tessera.rounds.ideal import RoundTrainer, run_ideal
from tessera.rounds.plan import Plan
from tessera.rounds.server import ServerRound
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound

LEAST_TOGETHER: Final = 3
LEAST_SHARE: Final = 0.1
"""If fewer clients of a cohort would remain in the secure sum, all of them take part in it."""

OUT_OF_BOUNDS: Final = "the opened sum is not one of honest clients"
"""Why a round is not merged whose dense part is out of bounds."""


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
    ) -> None:
        """`evaluate` tests the model after a round, in the rounds in which it is due.

        Each of two servers runs on these `workers` (`engines/threads.py`), by default on one.
        """
        self.plan, self.participants = plan, participants
        self.dense, self.tables, self.derived = dense, tables, dict(derived or {})
        self.averaging = Averaging(plan.server or ServerStep(), plan.model.dense, tables)
        self.views = views
        self.last: ServerRound | None = None
        self.survivors: dict[ClientId, ClientId] = {}  # of the last round: who each name is
        self._trainer, self._evaluate = trainer, evaluate
        self._entropy: Entropy = entropy or SystemEntropy()
        self.cohorts = Cohorts(plan, participants, self._entropy)
        self._set_own_rounds(participants)
        self._faults, self._workers = faults, workers
        self.two_server = (
            TwoServerSetup.of(self._entropy, plan.federation)
            if schemes.of(plan).two_servers
            else None
        )
        self.next_round = 0

    def admit(self, newcomers: Mapping[ClientId, Participant]) -> None:
        """Clients that join from the next round on; the trainer knows them already."""
        self.participants = {**self.participants, **newcomers}
        self.cohorts.admit(newcomers)
        self._set_own_rounds(self.participants)

    def _set_own_rounds(self, participants: Mapping[ClientId, Participant]) -> None:
        """Where cohorts are drawn a simulated client has no rounds of its own to insist on."""
        if self.plan.privacy.own_rounds:
            return
        for participant in participants.values():
            if participant.local.own_rounds in (None, self.plan.privacy.least_rounds):
                participant.local.own_rounds = self.cohorts.least_rounds

    def go_on_at(self, round_id: int) -> None:
        """Skip to this round. Cohorts, periods and ledger charges of earlier rounds are recomputed.

        They follow from the plan's seed and the entropy. The entropy must be the same as then, or a
        period would get a second secret.
        """
        for number in map(RoundId, range(self.next_round, round_id)):
            named = self._drawn(number)
            for plan, names in self._split(named):
                part = self._part(plan, {name: named[name] for name in names}, number, ())
                for name, client in part.clients.items():
                    client.prepare()
                    self.participants[named[name]].local.last_round = number
        self.next_round = round_id

    def run(self, rounds: int) -> Iterator[Event]:
        for _ in range(rounds):
            yield from self.round()

    def round(self) -> Iterator[Event]:
        """One round: its events in the order they happen, and the model merged at the end."""
        plan, round_id = self.plan, RoundId(self.next_round)
        started = time.monotonic()
        self.next_round += 1
        named = self._drawn(round_id)
        cohort = sorted(named)
        yield RoundStarted(
            round_id=round_id, period=plan.period(round_id), cohort=tuple(int(c) for c in cohort)
        )
        faults = list(self._faults(round_id, cohort)) if self._faults else []
        parts = [
            self._part(each, {c: named[c] for c in names}, round_id, faults)
            for each, names in self._split(named)
        ]
        self.last = parts[0].server
        training = TrainingOutcome()
        # With two servers a client whose training failed must still send a report.
        trainer = self._trainer if self.two_server is None else failing_alone(self._trainer)

        def train(submodels: Mapping[ClientId, Submodel]) -> Mapping[ClientId, ModelUpdate | None]:
            """Train under names of this round those who are known by their own."""
            trained = trainer(round_id, {named[c]: s for c, s in submodels.items()})
            training.add(trained)
            return {
                c: None if named[c] in trained.failed else trained.updates[named[c]]
                for c in submodels
            }

        summed: list[Subcohort] = []
        results: list[RoundResult] = []
        abort: RoundAbort | None = None
        for part in parts:
            try:
                if plan.simulation.real(round_id):
                    yield from self._carried(part, train, training)
                    results.append(part.server.result)
                else:
                    results.append(
                        run_ideal(part.server, part.clients, train, dropouts(part.faults))
                    )
                summed.append(part)
            except RoundAborted as aborted:
                abort = RoundAbort(
                    round_id=round_id,
                    phase=aborted.phase,
                    answered=aborted.answered,
                    needed=aborted.needed,
                    reason=part.why_aborted(),
                )
                if not plan.grouped:  # a group that lacks a member opens nothing; the others do
                    break
        if abort is not None and (not plan.grouped or not results):
            yield abort
            return
        possible = [each for each in results if not each.out_of_bounds]
        if not possible:
            yield RoundAbort(
                round_id=round_id,
                phase="merge",
                answered=sum(len(each.survivors) for each in results),
                needed=plan.least_survivors,
                reason=OUT_OF_BOUNDS,
            )
            return
        result = merged(possible)
        self.survivors = {c: named[c] for c in result.survivors}
        # Without any examples there is no mean, and momentum does not advance either.
        mean = result.dense if result.weight else None
        self.dense = self.averaging.apply(self.dense, mean, result.tables, int(round_id))
        metric = self._evaluate(round_id) if self._evaluate else None
        seconds = time.monotonic() - started
        yield round_finished(
            plan,
            round_id,
            parts,
            summed,
            self.participants,
            results,
            result,
            training,
            metric,
            seconds,
        )

    def _drawn(self, round_id: RoundId) -> dict[ClientId, ClientId]:
        """The round's cohort: who each name is."""
        return self.cohorts.named(round_id, self.cohorts.sample(round_id))

    def _split(self, named: Mapping[ClientId, ClientId]) -> list[tuple[Plan, tuple[ClientId, ...]]]:
        """Who is summed with whom, by which plan: masked clients first, then those in the clear."""
        plan, names = self.plan, tuple(sorted(named))
        if plan.grouped:
            met = set(names)
            return [(plan.group_plan, group) for group in self.cohorts.groups if met & set(group)]
        if not schemes.of(plan).masks:
            return [(plan, names)]
        bare = {c for c in names if self.participants[named[c]].local.sends_unmasked(plan)}
        masked = tuple(c for c in names if c not in bare)
        if not bare or 0 < len(masked) < max(LEAST_TOGETHER, LEAST_SHARE * len(names)):
            return [(plan, names)]
        plain = tuple(c for c in names if c in bare)
        split = [(plan.part(secure=False, clients=len(plain)), plain)]
        if masked:
            split.insert(0, (plan.part(secure=True, clients=len(masked)), masked))
        return split

    def _part(
        self,
        plan: Plan,
        named: Mapping[ClientId, ClientId],
        round_id: RoundId,
        faults: Sequence[Fault],
    ) -> Subcohort:
        names = tuple(named)
        if self.two_server is not None:
            return self._between_two(self.two_server, named, round_id, faults)
        server = ServerRound(
            plan,
            round_id,
            names,
            dense=self.dense,
            tables=self.tables,
            derived=self.derived,
            entropy=self._entropy,
            identity=self.participants[named[names[0]]].identity,
        )
        clients = {c: self._client(plan, c, client, round_id) for c, client in named.items()}
        if self.plan.grouped:
            faults = [f for f in faults if isinstance(f, Reorder) or f.client in named]
        elif plan is not self.plan:
            # In the clear there is one phase in which all may be missing; of those that mask, no
            # more than a cohort of their number tolerates.
            gone = {c: left for c, left in dropouts(faults).items() if c in named}
            places = [
                Drop(c, left.phase, stage=left.visit)
                if schemes.of(plan).masks
                else Drop(c, "collect")
                for c, left in gone.items()
            ]
            faults = places[: len(names) - plan.least_survivors]
        return Subcohort(plan, named, server, clients, faults)

    def _between_two(
        self,
        setup: TwoServerSetup,
        named: Mapping[ClientId, ClientId],
        round_id: RoundId,
        faults: Sequence[Fault],
    ) -> Subcohort:
        """The whole cohort between a leader and a helper."""
        plan = self.plan
        signers = identities(named, self._entropy, plan.federation)
        one = next(iter(signers.values()))
        server = LeaderRound(
            plan,
            round_id,
            tuple(named),
            dense=self.dense,
            tables=self.tables,
            derived=self.derived,
            entropy=self._entropy,
            servers=setup.servers,
            key=setup.leader,
            identity=one,
            workers=self._workers,
            row_tags=setup.leader_row_tags,
        )
        helper = HelperRound(
            plan,
            round_id,
            dense=self.dense,
            tables=self.tables,
            derived=self.derived,
            servers=setup.servers,
            keys=setup.helper,
            directory=one.directory,
            replay_guard=setup.replay_guard,
            entropy=self._entropy,
            workers=self._workers,
            row_tags=setup.helper_row_tags,
        )
        clients = {
            c: TwoServerClientRound(
                plan,
                round_id,
                c,
                local=self.participants[client].local,
                entropy=self._entropy,
                identity=signers[c],
                servers=setup.servers,
            )
            for c, client in named.items()
        }
        return Subcohort(plan, named, server, clients, faults, helper)

    def _carried(
        self, part: Subcohort, train: RoundTrainer, training: TrainingOutcome
    ) -> Iterator[Event]:
        """The round with real messages; `RoundAborted` if too few answered."""
        server, clients, named, watch = part.server, part.clients, part.named, part.watch
        phase_ends: list[PhaseEnd] = []

        def on_phase(phase_end: PhaseEnd) -> None:
            watch.on_phase(phase_end)
            phase_ends.append(phase_end)

        first_messages = {c: client.start() for c, client in clients.items()}
        simulator = watch.simulator = Simulator(
            server,
            clients,
            first_messages,
            helper=part.helper,
            greeting=server.start(),
            faults=part.faults,
            work=between_messages(clients, train, lambda c: training.seconds.get(named[c], 0.0)),
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

    def _client(
        self, plan: Plan, name: ClientId, client: ClientId, round_id: RoundId
    ) -> ClientRound:
        """One of a cohort that meets before a single server."""
        participant = self.participants[client]
        return ClientRound(
            plan,
            round_id,
            name,
            local=participant.local,
            entropy=self._entropy,
            identity=participant.identity,
        )
