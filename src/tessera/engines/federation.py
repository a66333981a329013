"""Many rounds over a population, in one process: cohorts, periods, dropouts, and the record.

The plan's seed drives who is sampled and who drops out, and nothing else. Every message is really
encoded and decoded; what each party saw can be recorded for the audits.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.data.examples import LABEL, ClientData
from tessera.engines.faults import Drop, Fault
from tessera.engines.lessons import Lesson, Teacher, between_messages, each_for_itself
from tessera.engines.pair import Pair, identities
from tessera.engines.simulator import Happening, Simulator, Traffic
from tessera.engines.stopwatch import ANSWERS, STAGE_OF, TRAIN, Stopwatch
from tessera.engines.views import Views
from tessera.errors import ConfigError, MisuseError, RoundAborted
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import Averaging, ServerStep
from tessera.learning.ratings import BASE
from tessera.learning.submodel import Submodel, Update
from tessera.learning.tables import DerivedMap, Table
from tessera.protocols.secagg.binding import Identity
from tessera.protocols.secagg.params import Threat
from tessera.protocols.two_server.hands import Hands
from tessera.rounds.client import ClientRound, LocalState
from tessera.rounds.events import Event, PhaseClosed, RoundFinished, RoundGivenUp, RoundStarted
from tessera.rounds.plan import Plan, Scheme
from tessera.rounds.rehearsal import CohortTrainer, Exit, rehearse
from tessera.rounds.server import RoundResult, ServerRound, merged
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound

FaultScript = Callable[[RoundId, Sequence[ClientId]], Sequence[Fault]]


COUNTED: Final = {"up": "up", "down": "down", "seconds": "client_seconds"}

LEAST_TOGETHER: Final = 3
LEAST_SHARE: Final = 0.1
"""If fewer of a cohort would be left to the secure sum, everybody goes through it."""


@dataclass(slots=True)
class Member:
    """One client of the population: what it has of its own."""

    local: LocalState
    identity: Identity | None = None


@dataclass(slots=True)
class Part:
    """Those of a cohort who are summed together: all, or the masked and the others apart."""

    plan: Plan
    named: Mapping[ClientId, ClientId]
    server: ServerRound
    clients: Mapping[ClientId, ClientRound]
    faults: Sequence[Fault]
    helper: HelperRound | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)


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
        hands: Hands | None = None,
    ) -> None:
        """`evaluate` tests the model after a round, in the rounds in which it is due.

        Each of two servers adds up with these `hands`, or with one: `engines/pair.py` has more.
        """
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
        self._faults, self._hands = faults, hands
        self.pair = (
            Pair.of(self._entropy, plan.federation) if plan.scheme is Scheme.TWO_SERVER else None
        )
        self.next_round = 0
        self._met: dict[int, set[ClientId]] = defaultdict(set)

    def go_on_at(self, round_id: int) -> None:
        """Skip to this round. Cohorts, periods and charges of those before are made again.

        They follow from the plan's seed and the entropy; with entropy that answers otherwise than
        it did then, a period would get a second secret.
        """
        for number in map(RoundId, range(self.next_round, round_id)):
            named = self._named(number, self.sample(number))
            for plan, names in self._split(named):
                part = self._part(plan, {name: named[name] for name in names}, number, ())
                for name, client in part.clients.items():
                    client.prepare()
                    self.members[named[name]].local.last_round = number
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
        faults = list(self._faults(round_id, cohort)) if self._faults else []
        parts = [
            self._part(each, {c: named[c] for c in names}, round_id, faults)
            for each, names in self._split(named)
        ]
        self.last = parts[0].server
        lesson = Lesson()
        # Between two servers nobody may fall silent because its training failed.
        teacher = self._teacher if self.pair is None else each_for_itself(self._teacher)

        def teach(submodels: Mapping[ClientId, Submodel]) -> Mapping[ClientId, Update | None]:
            """Train under names of this round those who are known by their own."""
            learnt = teacher(round_id, {named[c]: s for c, s in submodels.items()})
            lesson.add(learnt)
            return {
                c: None if named[c] in learnt.failed else learnt.updates[named[c]]
                for c in submodels
            }

        results = []
        try:
            for part in parts:
                if plan.simulation.real(round_id):
                    yield from self._carried(part, teach, lesson)
                    results.append(part.server.result)
                else:
                    results.append(rehearse(part.server, part.clients, teach, exits(part.faults)))
        except RoundAborted as aborted:
            yield RoundGivenUp(
                round_id=round_id,
                phase=aborted.phase,
                answered=aborted.answered,
                needed=aborted.needed,
                reason=_why(part),
            )
            return
        result = merged(results)
        self.stayed = {c: named[c] for c in result.survivors}
        # Where nobody's examples stand behind the mean it is no mean, and momentum rests too.
        mean = result.dense if result.weight else None
        self.dense = self.averaging.apply(self.dense, mean, result.tables, int(round_id))
        metric = self._evaluate(round_id) if self._evaluate else None
        yield self._finished(
            round_id, parts, results, result, lesson, metric, time.monotonic() - started
        )

    def _split(self, named: Mapping[ClientId, ClientId]) -> list[tuple[Plan, tuple[ClientId, ...]]]:
        """Who is summed with whom, by which plan: the masked first, then those in the open."""
        plan, names = self.plan, tuple(sorted(named))
        if not plan.scheme.secure:
            return [(plan, names)]
        bare = {c for c in names if self.members[named[c]].local.in_the_open(plan)}
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
    ) -> Part:
        names = tuple(named)
        if self.pair is not None:
            return self._between_two(self.pair, named, round_id, faults)
        server = ServerRound(
            plan,
            round_id,
            names,
            dense=self.dense,
            tables=self.tables,
            derived=self.derived,
            entropy=self._entropy,
            identity=self.members[named[names[0]]].identity,
        )
        clients = {c: self._client(plan, c, client, round_id) for c, client in named.items()}
        if plan is not self.plan:
            # In the open there is one phase in which all can be missing; and of the masked no more
            # may be than their smaller number bears.
            gone = {c: left for c, left in exits(faults).items() if c in named}
            places = [
                Drop(c, left.phase, stage=left.visit) if plan.scheme.secure else Drop(c, "collect")
                for c, left in gone.items()
            ]
            faults = places[: len(names) - plan.least_survivors]
        return Part(plan, named, server, clients, faults)

    def _between_two(
        self,
        pair: Pair,
        named: Mapping[ClientId, ClientId],
        round_id: RoundId,
        faults: Sequence[Fault],
    ) -> Part:
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
            servers=pair.servers,
            key=pair.leader,
            identity=one,
            hands=self._hands,
            fingerprints=pair.leader_prints,
        )
        helper = HelperRound(
            plan,
            round_id,
            dense=self.dense,
            tables=self.tables,
            derived=self.derived,
            servers=pair.servers,
            keys=pair.helper,
            directory=one.directory,
            ledger=pair.ledger,
            entropy=self._entropy,
            hands=self._hands,
            fingerprints=pair.helper_prints,
        )
        clients = {
            c: TwoServerClientRound(
                plan,
                round_id,
                c,
                local=self.members[client].local,
                entropy=self._entropy,
                identity=signers[c],
                servers=pair.servers,
            )
            for c, client in named.items()
        }
        return Part(plan, named, server, clients, faults, helper)

    def _carried(self, part: Part, teach: CohortTrainer, lesson: Lesson) -> Iterator[Event]:
        """The round with real messages; `RoundAborted` if too few answered."""
        server, clients, named, watch = part.server, part.clients, part.named, part.watch
        happened: list[Happening] = []

        def on_phase(happening: Happening) -> None:
            watch.on_phase(happening)
            happened.append(happening)

        opening = {c: client.start() for c, client in clients.items()}
        simulator = watch.simulator = Simulator(
            server,
            clients,
            opening,
            helper=part.helper,
            greeting=server.start(),
            faults=part.faults,
            work=between_messages(clients, teach, lambda c: lesson.seconds.get(named[c], 0.0)),
            views=self.views,
            on_phase=on_phase,
        )
        outcome = simulator.run()
        watch.finish()
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
        """Who is who in this round: themselves, or under pseudonyms names drawn afresh.

        Not even the order of the names follows from the plan's seed, which everybody knows.
        """
        if not self.plan.privacy.pseudonyms:
            return {c: c for c in chosen}
        secret = self._entropy.secret("pseudonyms", self.plan.federation, int(round_id))
        drawn = uniform(Ring(32), Stream.of(secret, Label.NONCE), 4 * len(chosen))
        names = dict.fromkeys(drawn.tolist())  # each once, in the order in which they were drawn
        named = {ClientId(name): client for name, client in zip(names, chosen, strict=False)}
        self.pseudonyms[int(round_id)] = {int(name): int(c) for name, c in named.items()}
        return named

    def _client(
        self, plan: Plan, name: ClientId, client: ClientId, round_id: RoundId
    ) -> ClientRound:
        """One of a cohort that meets before a single server."""
        member = self.members[client]
        return ClientRound(
            plan,
            round_id,
            name,
            local=member.local,
            entropy=self._entropy,
            identity=member.identity,
        )

    def _finished(
        self,
        round_id: RoundId,
        parts: Sequence[Part],
        results: Sequence[RoundResult],
        result: RoundResult,
        lesson: Lesson,
        metric: float | None,
        seconds: float,
    ) -> RoundFinished:
        cohort = sum(len(part.named) for part in parts)
        real = parts[0].watch.simulator is not None
        clients = [client for part in parts for client in part.clients.values()]
        members = [self.members[c] for part in parts for c in part.named.values()]
        worst = max(
            (member.local.ledger.guarantee() for member in members), key=lambda g: g.epsilon
        )
        client_seconds = _mean_by_stage(parts, "seconds", ANSWERS)
        client_seconds[TRAIN] = sum(lesson.seconds.values()) / cohort
        server_seconds: defaultdict[str, float] = defaultdict(float)
        helper_seconds: defaultdict[str, float] = defaultdict(float)
        between = 0.0
        for part in parts:
            for stage, spent in part.watch.server.items():
                server_seconds[stage] += spent
            for stage, spent in part.watch.helper.items():
                helper_seconds[stage] += spent
            if part.watch.simulator is not None:
                between += part.watch.simulator.outcome.traffic.between.total() / cohort
        cut = sum(client.clipped.cut for client in clients)
        values = sum(client.clipped.of for client in clients)
        broken = Counter(
            lesson.failed.get(part.named[c], client.broken)
            for part in parts
            for c, client in part.clients.items()
            if client.broken
        )
        return RoundFinished(
            round_id=round_id,
            cohort=cohort,
            survivors=len(result.survivors),
            union_rows=result.union_rows,
            union_residual=result.union_residual,
            rows_opened=result.rows_opened,
            rows_below_quorum=result.below_quorum,
            rows_shrunk=result.shrunk,
            rows_lost=result.lost,
            weight=result.weight,
            measured=real,
            secure=real and parts[0].plan.scheme.hides,
            bytes_up=_mean_by_stage(parts, "up", STAGE_OF),
            bytes_down=_mean_by_stage(parts, "down", STAGE_OF),
            client_seconds=client_seconds,
            server_seconds=dict(server_seconds),
            helper_seconds=dict(helper_seconds),
            bytes_between=between,
            writing=_told(parts[0].server) if real else {},
            epsilon=worst.epsilon,
            condition=worst.condition,
            metric=metric,
            loss=lesson.loss / lesson.examples if lesson.examples else None,
            not_finite=lesson.not_finite + broken.total(),
            broken=dict(broken),
            clipped=cut / values if values else 0.0,
            left_home=sum(client.left_out for client in clients),
            rows_of_one=sum(map(_rows_of_one, parts, results)),
            excluded=dict(
                sum(
                    (_excluded(part, r.survivors) for part, r in zip(parts, results, strict=True)),
                    Counter(),
                )
            ),
            in_the_open=sum(
                len(part.named) for part in parts if part.plan.scheme is not self.plan.scheme
            ),
            seconds=seconds,
        )


def _rows_of_one(part: Part, result: RoundResult) -> int:
    """Opened rows that one of those in the sum has written, and nobody else."""
    alone, none = 0, np.zeros(0, dtype=np.uint64)
    for name, mean in result.tables.items():
        written = [part.clients[c].written.get(name, none) for c in result.survivors]
        rows = np.sort(np.concatenate([none, *written]))
        if rows.size:
            edge = np.concatenate([[True], rows[1:] != rows[:-1], [True]])
            single = rows[edge[:-1] & edge[1:]]
            alone += int(np.isin(single, mean.ids, assume_unique=True).sum())
    return alone


def _excluded(part: Part, survivors: Collection[ClientId] = ()) -> Counter[str]:
    """Those who answered and are not among the survivors, by the reason there is for it."""
    why: dict[ClientId, str] = {}
    if part.watch.simulator is not None:
        outcome = part.watch.simulator.outcome
        for error in outcome.refused:
            if error.peer is not None and not isinstance(error.peer, str):
                why.setdefault(error.peer, error.reason.partition(":")[0])
        for client, fault in outcome.left.items():
            why.setdefault(client, f"left, for the server {fault.reason}")
    if isinstance(part.server, LeaderRound):
        why = {**part.server.excluded, **why}
    return Counter(reason for client, reason in why.items() if client not in survivors)


def _why(part: Part) -> str:
    """Why a round was given up, as far as more is known than how many were missing."""
    if part.watch.simulator is not None:
        left = part.watch.simulator.outcome.helper_left
        if left is not None:
            return f"the helper left, for the leader {left.reason}"
    return "; ".join(f"{count} x {reason}" for reason, count in _excluded(part).most_common())


def _told(server: ServerRound) -> dict[str, str]:
    """How two servers had each table written, and why."""
    if not isinstance(server, LeaderRound):
        return {}
    return {cost.table: cost.reason for cost in server.writing}


def _mean_by_stage(
    parts: Sequence[Part], which: str, stage_of: Mapping[str, str]
) -> dict[str, float]:
    """Bytes or seconds of a client in the mean over all parts of a cohort, by stage."""
    every = sum(len(part.named) for part in parts)
    total: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        simulator = part.watch.simulator
        traffic = simulator.outcome.traffic if simulator else Traffic()
        counted: Mapping[ClientId, Mapping[str, float]] = getattr(traffic, COUNTED[which])
        for stage, mean in part.watch.by_stage(counted, which, list(part.named), stage_of).items():
            total[stage] += mean * len(part.named) / every
    return dict(total)


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
    if plan.scheme is Scheme.TWO_SERVER:
        return [("query", 0), ("collect", 1 if plan.narrows else 0)]
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
    most = plan.cohort - plan.least_survivors if plan.scheme.hides else None
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


def write_labels(path: Path, data: ClientData) -> None:
    """Everybody's ratings, and what was taken off them: likewise for scoring only."""
    truth = {
        str(client): {name: data.of(client)[name].tolist() for name in ("item", LABEL, BASE)}
        for client in range(data.clients)
    }
    path.write_text(json.dumps(truth))
