"""Many rounds over a population, in one process: cohorts, periods, dropouts, and the record.

The plan's seed drives who is sampled and who drops out, and nothing else. Every message is really
encoded and decoded; what each party saw can be recorded for the audits.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.engines.faults import Drop, Fault
from tessera.engines.lessons import Lesson, Teacher, between_messages
from tessera.engines.simulator import Happening, Simulator, Traffic
from tessera.engines.stopwatch import ANSWERS, STAGE_OF, TRAIN, Stopwatch
from tessera.engines.views import Views
from tessera.errors import ConfigError, MisuseError, RoundAborted
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import Averaging, ServerStep
from tessera.learning.submodel import Submodel, Update
from tessera.learning.tables import DerivedMap, Table
from tessera.protocols.secagg.binding import Identity
from tessera.protocols.secagg.params import Threat
from tessera.rounds.client import ClientRound, LocalState
from tessera.rounds.events import Event, PhaseClosed, RoundFinished, RoundGivenUp, RoundStarted
from tessera.rounds.plan import Plan
from tessera.rounds.rehearsal import CohortTrainer, Exit, rehearse
from tessera.rounds.server import RoundResult, ServerRound

FaultScript = Callable[[RoundId, Sequence[ClientId]], Sequence[Fault]]


@dataclass(slots=True)
class Member:
    """One client of the population: what it has of its own."""

    local: LocalState
    identity: Identity | None = None


class Federation:
    """A plan, its population and the model, round after round."""

    def __init__(
        self,
        plan: Plan,
        members: Mapping[ClientId, Member],
        *,
        dense: npt.NDArray[np.float32],
        tables: Mapping[str, Table],
        teacher: Teacher,
        derived: Mapping[str, DerivedMap] | None = None,
        entropy: Entropy | None = None,
        faults: FaultScript | None = None,
        views: Views | None = None,
        evaluate: Callable[[RoundId], float | None] | None = None,
    ) -> None:
        """`evaluate` tests the model after a round, in the rounds in which it is due."""
        if len(members) < plan.cohort:
            raise ConfigError(
                f"{len(members)} clients for a cohort of {plan.cohort}",
                hint="take a smaller cohort, or more clients",
            )
        self.plan, self.members = plan, members
        self.dense, self.tables, self.derived = dense, tables, dict(derived or {})
        self.averaging = Averaging(plan.server or ServerStep(), plan.model.dense, tables)
        self.views = views
        self.last: ServerRound | None = None
        self.stayed: dict[ClientId, ClientId] = {}  # the last round's survivors: who each name is
        self.pseudonyms: dict[int, dict[int, int]] = {}
        self._teacher, self._evaluate = teacher, evaluate
        self._entropy: Entropy = entropy or SystemEntropy()
        self._faults = faults
        self.next_round = 0
        self._met: dict[int, set[ClientId]] = defaultdict(set)

    def go_on_at(self, round_id: int) -> None:
        """Skip to this round. Cohorts, periods and charges of those before are made again.

        They follow from the plan's seed and the entropy; with entropy that answers otherwise than
        it did then, a period would get a second secret.
        """
        for number in map(RoundId, range(self.next_round, round_id)):
            named = self._named(number, self.sample(number))
            for name, client in named.items():
                self._client(name, client, number).prepare()
                self.members[client].local.last_round = number
        self.next_round = round_id

    def run(self, rounds: int) -> Iterator[Event]:
        for _ in range(rounds):
            yield from self.round()

    def round(self) -> Iterator[Event]:
        """One round: its events in the order they happen, and the model merged at the end."""
        plan, round_id = self.plan, RoundId(self.next_round)
        started = time.monotonic()
        self.next_round += 1
        named = self._named(round_id, self.sample(round_id))
        cohort = sorted(named)
        yield RoundStarted(
            round_id=round_id, period=plan.period(round_id), cohort=tuple(int(c) for c in cohort)
        )
        server = self.last = ServerRound(
            plan,
            round_id,
            cohort,
            dense=self.dense,
            tables=self.tables,
            derived=self.derived,
            entropy=self._entropy,
            identity=self.members[named[cohort[0]]].identity,
        )
        clients = {c: self._client(c, named[c], round_id) for c in cohort}
        faults = list(self._faults(round_id, cohort)) if self._faults else []
        lesson, watch = Lesson(), Stopwatch()

        def teach(submodels: Mapping[ClientId, Submodel]) -> Mapping[ClientId, Update]:
            """Train under names of this round those who are known by their own."""
            learnt = self._teacher(round_id, {named[c]: s for c, s in submodels.items()})
            lesson.add(learnt)
            return {c: learnt.updates[named[c]] for c in submodels}

        try:
            if plan.simulation.real(round_id):
                yield from self._carried(server, clients, faults, teach, lesson, named, watch)
                result = server.result
            else:
                result = rehearse(server, clients, teach, exits(faults))
        except RoundAborted as aborted:
            yield RoundGivenUp(
                round_id=round_id,
                phase=aborted.phase,
                answered=aborted.answered,
                needed=aborted.needed,
            )
            return
        self.stayed = {c: named[c] for c in result.survivors}
        # Where nobody's examples stand behind the mean it is no mean, and momentum rests too.
        mean = result.dense if result.weight else None
        self.dense = self.averaging.apply(self.dense, mean, result.tables)
        metric = self._evaluate(round_id) if self._evaluate else None
        yield self._finished(
            round_id, named, clients, result, lesson, watch, metric, time.monotonic() - started
        )

    def _carried(
        self,
        server: ServerRound,
        clients: Mapping[ClientId, ClientRound],
        faults: Sequence[Fault],
        teach: CohortTrainer,
        lesson: Lesson,
        named: Mapping[ClientId, ClientId],
        watch: Stopwatch,
    ) -> Iterator[Event]:
        """The round with real messages; `RoundAborted` if too few answered."""
        happened: list[Happening] = []

        def on_phase(happening: Happening) -> None:
            watch.on_phase(happening)
            happened.append(happening)

        opening = {c: client.start() for c, client in clients.items()}
        simulator = watch.simulator = Simulator(
            server,
            clients,
            opening,
            greeting=server.start(),
            faults=faults,
            work=between_messages(clients, teach, lambda c: lesson.seconds.get(named[c], 0.0)),
            views=self.views,
            on_phase=on_phase,
        )
        outcome = simulator.run()
        for h in happened:
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

    def sample(self, round_id: RoundId) -> list[ClientId]:
        """The cohort: drawn without replacement, within what the plan allows in this period."""
        plan = self.plan
        pool = sorted(self.members)
        if plan.privacy.fixed_groups:
            turn = int(round_id) % plan.privacy.fixed_groups
            pool = pool[turn :: plan.privacy.fixed_groups]
        if plan.privacy.one_participation:
            met = self._met[plan.period(round_id)]
            pool = [c for c in pool if c not in met]
        if len(pool) < plan.cohort:
            raise ConfigError(
                f"round {round_id}: {len(pool)} clients may take part, a cohort has {plan.cohort}",
                hint="more clients, a smaller cohort, fewer fixed_groups or shorter periods",
            )
        rng = np.random.default_rng([plan.seed, int(round_id)])
        chosen = [pool[i] for i in sorted(rng.choice(len(pool), plan.cohort, replace=False))]
        self._met[plan.period(round_id)].update(chosen)
        return chosen

    def _named(self, round_id: RoundId, chosen: Sequence[ClientId]) -> dict[ClientId, ClientId]:
        """Who is who in this round: themselves, or under pseudonyms names drawn afresh."""
        if not self.plan.privacy.pseudonyms:
            return {c: c for c in chosen}
        secret = self._entropy.secret("pseudonyms", self.plan.federation, int(round_id))
        names = np.unique(uniform(Ring(32), Stream.of(secret, Label.NONCE), 4 * len(chosen)))
        order = np.random.default_rng([self.plan.seed, int(round_id), 2]).permutation(len(chosen))
        named = {
            ClientId(int(names[place])): client for place, client in zip(order, chosen, strict=True)
        }
        self.pseudonyms[int(round_id)] = {int(name): int(c) for name, c in named.items()}
        return named

    def _client(self, name: ClientId, client: ClientId, round_id: RoundId) -> ClientRound:
        member = self.members[client]
        return ClientRound(
            self.plan,
            round_id,
            name,
            local=member.local,
            entropy=self._entropy,
            identity=member.identity,
        )

    def _finished(
        self,
        round_id: RoundId,
        named: Mapping[ClientId, ClientId],
        clients: Mapping[ClientId, ClientRound],
        result: RoundResult,
        lesson: Lesson,
        watch: Stopwatch,
        metric: float | None,
        seconds: float,
    ) -> RoundFinished:
        cohort, real = sorted(named), watch.simulator is not None
        spent = [self.members[c].local.ledger.guarantee() for c in named.values()]
        worst = max(spent, key=lambda guarantee: guarantee.epsilon)
        traffic = watch.simulator.outcome.traffic if watch.simulator else Traffic()
        client_seconds = watch.by_stage(traffic.client_seconds, "seconds", cohort, ANSWERS)
        client_seconds[TRAIN] = sum(lesson.seconds.values()) / len(cohort)
        cut = sum(client.clipped.cut for client in clients.values())
        values = sum(client.clipped.of for client in clients.values())
        return RoundFinished(
            round_id=round_id,
            cohort=len(cohort),
            survivors=len(result.survivors),
            union_rows=result.union_rows,
            union_residual=result.union_residual,
            rows_opened=result.rows_opened,
            rows_below_quorum=result.below_quorum,
            rows_shrunk=result.shrunk,
            rows_lost=result.lost,
            weight=result.weight,
            measured=real,
            secure=real and self.plan.scheme.secure,
            bytes_up=watch.by_stage(traffic.up, "up", cohort, STAGE_OF),
            bytes_down=watch.by_stage(traffic.down, "down", cohort, STAGE_OF),
            client_seconds=client_seconds,
            server_seconds=dict(watch.server),
            epsilon=worst.epsilon,
            condition=worst.condition,
            metric=metric,
            loss=lesson.loss / lesson.examples if lesson.examples else None,
            not_finite=lesson.not_finite,
            clipped=cut / values if values else 0.0,
            left_home=sum(client.left_out for client in clients.values()),
            seconds=seconds,
        )


def exits(faults: Sequence[Fault]) -> dict[ClientId, Exit]:
    """Who leaves where; a rehearsed round knows no other faults."""
    found = {}
    for fault in faults:
        if not isinstance(fault, Drop) or fault.after:
            raise MisuseError(f"a rehearsed round knows dropouts only, not {fault}")
        found[fault.client] = Exit(fault.phase, fault.stage)
    return found


def leaving_places(plan: Plan) -> list[tuple[str, int]]:
    """Every phase of the plan's rounds in which a client can be missing: (phase, visit)."""
    if not plan.scheme.secure:
        return [("reveal", 0), ("collect", 0)] if plan.scheme.by_rows else [("collect", 0)]
    each = ["collect", "unmask"]
    if plan.security.threat is Threat.ACTIVE:
        each.insert(1, "consistency")
    places = [("advertise", 0), ("share", 0), *((phase, 0) for phase in each)]
    if len(plan.stages) == 2:
        places += [("reveal", 0), *((phase, 1) for phase in each)]
    return places


def random_dropouts(share: float, seed: int, plan: Plan) -> FaultScript:
    """Every client drops out of a round with this probability, at a phase drawn evenly.

    At most as many as the plan tolerates: a round that loses more is given up, and says nothing.
    """
    most = plan.cohort - plan.least_survivors if plan.scheme.secure else None
    places = leaving_places(plan)

    def script(round_id: RoundId, cohort: Sequence[ClientId]) -> list[Fault]:
        rng = np.random.default_rng([seed, int(round_id), 1])
        gone = [c for c in cohort if rng.random() < share][:most]
        return [
            Drop(c, phase, stage=stage)
            for c in gone
            for phase, stage in [places[int(rng.integers(len(places)))]]
        ]

    return script


def write_truth(path: Path, members: Mapping[ClientId, Member]) -> None:
    """What the audits compare with: everybody's real rows. Simulated data only, ever."""
    truth = {
        str(client): {name: rows.tolist() for name, rows in member.local.real.items()}
        for client, member in members.items()
    }
    path.write_text(json.dumps(truth))
