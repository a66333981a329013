"""Subcohort: the clients of a cohort that are summed together, with the roles of their round.

All of a cohort, or those who mask their updates and those who do not apart.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np

from tessera.crypto.keys import Identity
from tessera.errors import RoundAborted
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart
from tessera.learning.tables.table import StoredTable
from tessera.learning.training.settings import FAILURES
from tessera.plan import Plan
from tessera.privacy.dp.guarantee import Guarantee
from tessera.protocols.machine import Outbound
from tessera.rounds import schemes
from tessera.rounds.course import PartOutcome, RoundClient, RoundPart, RoundServer
from tessera.rounds.events import RoundFinished
from tessera.rounds.messages import RoundResult
from tessera.rounds.noise import noise_of
from tessera.rounds.party import LocalState
from tessera.rounds.schemes import CATEGORIES, UNION, UNMASK, UPDATE
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound
from tessera.simulation.faults import Fault
from tessera.simulation.simulator import OUTCOME, WORK, PhaseEnd, Simulator, Work

# --- cohort training ------------------------------------------------------------------------------
#
# A cohort's training, between the messages of a round.
#
# A client round that has fetched its submodel waits (`TrainingClient.pending`). The engine trains
# it with a `CohortTrainer`, one client after the other or all together.


ClientTrainer = Callable[[Submodel], ModelUpdate]
CohortTrainer = Callable[[RoundId, Mapping[ClientId, Submodel]], "TrainingOutcome"]
"""Trains what some clients have fetched, all together."""
RoundTrainer = Callable[[Mapping[ClientId, Submodel]], Mapping[ClientId, ModelUpdate | None]]
"""The same within one round, under its names; None where nothing came of it."""


@dataclass(slots=True)
class TrainingOutcome:
    """What clients trained in a round: updates, CPU seconds of each, and how it went.

    `loss` adds up over `examples`; `not_finite` counts the clients whose training broke and who
    send zeros, `groups_not_finite` groups of examples that were left out alone, where there is
    noise; `failed` has those whose training raised an error, and which. `largest` has the most
    examples of one person in a client's batch, where noise goes by it.
    """

    updates: dict[ClientId, ModelUpdate] = field(default_factory=dict)
    seconds: dict[ClientId, float] = field(default_factory=dict)
    loss: float = 0.0
    examples: int = 0
    not_finite: int = 0
    groups_not_finite: int = 0
    failed: dict[ClientId, str] = field(default_factory=dict)
    largest: dict[ClientId, int] = field(default_factory=dict)

    def add(self, other: TrainingOutcome) -> None:
        self.updates.update(other.updates)
        self.seconds.update(other.seconds)
        self.loss += other.loss
        self.examples += other.examples
        self.not_finite += other.not_finite
        self.groups_not_finite += other.groups_not_finite
        self.failed.update(other.failed)
        self.largest.update(other.largest)


def one_by_one(trainers: Mapping[ClientId, ClientTrainer]) -> CohortTrainer:
    """Every client by a trainer of its own."""

    def train_cohort(_: RoundId, submodels: Mapping[ClientId, Submodel]) -> TrainingOutcome:
        outcome = TrainingOutcome()
        for client, submodel in submodels.items():
            started = time.process_time()
            outcome.updates[client] = trainers[client](submodel)
            outcome.seconds[client] = time.process_time() - started
        return outcome

    return train_cohort


def failing_alone(trainer: CohortTrainer) -> CohortTrainer:
    """The same trainer, but a failure of one client's training does not affect the others.

    If joint training fails, it is not known whose failure it was: then each is trained alone.
    """

    def train_cohort(round_id: RoundId, submodels: Mapping[ClientId, Submodel]) -> TrainingOutcome:
        try:
            return trainer(round_id, submodels)
        except FAILURES as error:
            if len(submodels) == 1:
                (client,) = submodels
                return TrainingOutcome(failed={client: f"training raised {type(error).__name__}"})
            outcome = TrainingOutcome()
            for client, submodel in submodels.items():
                outcome.add(train_cohort(round_id, {client: submodel}))
            return outcome

    return train_cohort


def between_messages(
    clients: Mapping[ClientId, RoundClient],
    train: RoundTrainer,
    seconds: Callable[[ClientId], float] = lambda _: 0.0,
) -> Work:
    """A simulator's work: train whatever is pending. `seconds` is asked afterwards."""

    def work(
        present: Collection[ClientId],
    ) -> dict[ClientId, tuple[float, Callable[[], list[Outbound]]]]:
        found = {c: clients[c].pending for c in sorted(present)}
        submodels = {c: s for c, s in found.items() if s is not None}
        updates = train(submodels) if submodels else {}
        return {c: (seconds(c), partial(clients[c].supply, u)) for c, u in updates.items()}

    return work


# --- subcohort ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Subcohort:
    """A part of a round, with everybody's role in it and what goes wrong."""

    part: RoundPart
    server: RoundServer
    clients: Mapping[ClientId, RoundClient]
    faults: Sequence[Fault]
    helper: HelperRound | None = None
    watch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.part.plan)

    @property
    def named(self) -> Mapping[ClientId, ClientId]:
        """Who each name of the round is."""
        return self.part.named

    def summed(self, result: RoundResult) -> PartOutcome:
        """It came to a sum."""
        return PartOutcome(
            part=self.part,
            result=result,
            excluded=self.excluded(result.survivors),
            writing=self.writing,
        )

    def aborted(self, aborted: RoundAborted) -> PartOutcome:
        """Too few answered."""
        return PartOutcome(
            part=self.part, aborted=aborted, reason=self.why_aborted() or aborted.reason
        )

    def singleton_rows(self, result: RoundResult) -> int:
        """Opened rows that exactly one client of the sum has written."""
        alone, none = 0, np.zeros(0, dtype=np.uint64)
        for name, mean in result.tables.items():
            written = [self.clients[c].written.get(name, none) for c in result.survivors]
            rows = np.sort(np.concatenate([none, *written]))
            if rows.size:
                edge = np.concatenate([[True], rows[1:] != rows[:-1], [True]])
                single = rows[edge[:-1] & edge[1:]]
                alone += int(np.isin(single, mean.ids, assume_unique=True).sum())
        return alone

    def excluded(self, survivors: Collection[ClientId] = ()) -> Counter[str]:
        """Those who answered and are not among the survivors, by the reason there is for it."""
        why: dict[ClientId, str] = {}
        if self.watch.simulator is not None:
            outcome = self.watch.simulator.outcome
            for error in outcome.refused:
                if error.peer is not None and not isinstance(error.peer, str):
                    why.setdefault(error.peer, error.reason.partition(":")[0])
            for client, fault in outcome.left.items():
                why.setdefault(client, f"left, for the server {fault.reason}")
        if isinstance(self.server, LeaderRound):
            why = {**self.server.excluded, **why}
        return Counter(reason for client, reason in why.items() if client not in survivors)

    def why_aborted(self) -> str:
        """Why a round was aborted, as far as more is known than how many were missing."""
        if self.watch.simulator is not None:
            left = self.watch.simulator.outcome.helper_left
            if left is not None:
                return f"the helper left, for the leader {left.reason}"
        return "; ".join(f"{count} x {reason}" for reason, count in self.excluded().most_common())

    @property
    def writing(self) -> dict[str, str]:
        """How two servers had each table written, and why."""
        if self.watch.simulator is None or not isinstance(self.server, LeaderRound):
            return {}
        return {cost.table: cost.reason for cost in self.server.writing}


@dataclass(slots=True)
class Participant:
    """What a client has of its own, from round to round."""

    local: LocalState
    identity: Identity | None = None


class SimulatedRows:
    """One client's rows of local tables, which all clients of a simulation share by row."""

    def __init__(self, tables: Mapping[str, StoredTable]) -> None:
        self._tables = tables
        self.offered: dict[str, TablePart] = {}
        self.pending: RoundId | None = None

    def offer(self, round_id: RoundId, rows: Mapping[str, TablePart]) -> None:
        self.pending, self.offered = round_id, dict(rows)

    def settle(self, *, counted: bool) -> None:
        if counted:
            for name, part in self.offered.items():
                self._tables[name].put(part.ids, part.values, np.ones(len(part.ids), np.int64))
        self.pending, self.offered = None, {}


# --- stopwatch ------------------------------------------------------------------------------------
#
# Stopwatch: bytes and seconds of a simulated round, by cost category.
#
# What a message or a phase is counted as is in the table of schemes. Both sums of a round send the
# same kinds of message, so the counters are read when the union is opened, too.


TRAIN: Final = "train"
"""A category of client seconds only."""
OTHER: Final = "other"
"""Kinds of message that a scheme's table does not have: a new one stops no run."""
BETWEEN_MESSAGES: Final = MappingProxyType({WORK: TRAIN, OUTCOME: UPDATE})
"""What a client's seconds are spent on that answer no message."""


class Counted(Enum):
    """Of clients: bytes up, bytes down, seconds."""

    UP = "up"
    DOWN = "down"
    SECONDS = "client_seconds"


class Stopwatch:
    """Listens to one simulation of a round by this plan; `simulator` is set once there is one."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.scheme = plan, schemes.of(plan)
        self.simulator: Simulator | None = None
        self.server: defaultdict[str, float] = defaultdict(float)
        self.helper: defaultdict[str, float] = defaultdict(float)
        self.in_union: dict[Counted, dict[ClientId, Mapping[str, float]]] = {}
        self._counted = {"server": 0.0, "helper": 0.0}

    def on_phase(self, phase_end: PhaseEnd) -> None:
        assert self.simulator is not None
        phase = self.scheme.phase(self.plan, phase_end.phase, phase_end.visit)
        self._count("server", phase.category)
        self._count("helper", phase.category)
        if self.plan.has_union and (phase.name, phase.visit) == ("unmask", 0):
            self.in_union = {
                which: {c: dict(kinds) for c, kinds in self.by_kind(which).items()}
                for which in Counted
            }

    def by_kind(self, which: Counted) -> Mapping[ClientId, Mapping[str, float]]:
        """By client and kind of message, so far."""
        if self.simulator is None:
            return defaultdict(dict)
        traffic = self.simulator.outcome.traffic
        found: Mapping[ClientId, Mapping[str, float]] = getattr(traffic, which.value)
        return found

    def finish(self) -> None:
        """What came after the last phase was closed: two servers open a sum among themselves."""
        if self.simulator is not None:
            self._count("server", UNMASK)
            self._count("helper", UNMASK)

    def _count(self, whose: str, category: str) -> None:
        """Add the seconds since the last call to a category."""
        assert self.simulator is not None
        traffic = self.simulator.outcome.traffic
        seconds = traffic.server_seconds if whose == "server" else traffic.helper_seconds
        spent = sum(seconds.values())
        if spent > self._counted[whose]:
            counter = self.server if whose == "server" else self.helper
            counter[category] += spent - self._counted[whose]
            self._counted[whose] = spent

    def by_category(
        self,
        which: Counted,
        clients: Sequence[ClientId],
        counted: Mapping[ClientId, Mapping[str, float]] | None = None,
    ) -> dict[str, float]:
        """Of one of these clients, on average; `counted` in place of what the simulator has."""
        costs, by_kind = self.scheme.costs, self.by_kind(which) if counted is None else counted
        seconds = which is Counted.SECONDS
        category_of = {**costs.answers, **BETWEEN_MESSAGES} if seconds else costs.messages
        total = dict.fromkeys((*CATEGORIES, TRAIN) if seconds else CATEGORIES, 0.0)
        for client in clients:
            before = self.in_union.get(which, {}).get(client, {})
            for kind, amount in by_kind[client].items():
                category, early = category_of.get(kind, OTHER), before.get(kind, 0.0)
                total.setdefault(category, 0.0)
                if category == UNION and not self.plan.has_union:
                    category = UPDATE  # shares opened, and the only sum's input masked at once
                before_union = UNION if category in (UPDATE, UNMASK) else category
                total[before_union] += early / len(clients)
                total[category] += (amount - early) / len(clients)
        return total


# --- measurements ---------------------------------------------------------------------------------


def measured_round(
    event: RoundFinished,
    parts: Sequence[Subcohort],
    outcomes: Sequence[PartOutcome],
    participants: Mapping[ClientId, Participant],
    training: TrainingOutcome,
    *,
    scripted: bool = False,
) -> RoundFinished:
    """The event of a finished round with all that a simulation knows beside the server.

    Noise that was `scripted` by test entropy protects nobody, and has no number.

    Bytes and seconds are a client's on average. Parts that came to no sum have cost something, too.
    """
    cohort = event.cohort
    clients = [client for part in parts for client in part.clients.values()]
    worst = max(
        (participants[c].local.ledger.guarantee() for part in parts for c in part.named.values()),
        key=lambda g: g.epsilon,
    )
    left = [
        found
        for part in parts
        for c in part.named.values()
        if (found := noise_of(part.part.plan).guarantee(participants[c].local.ledger)) is not None
    ]
    noise = max(left, key=lambda g: g.epsilon, default=None)
    client_seconds = _mean_by_category(parts, Counted.SECONDS)
    client_seconds[TRAIN] = sum(training.seconds.values()) / cohort
    server_seconds: defaultdict[str, float] = defaultdict(float)
    helper_seconds: defaultdict[str, float] = defaultdict(float)
    between = 0.0
    for part in parts:
        for category, spent in part.watch.server.items():
            server_seconds[category] += spent
        for category, spent in part.watch.helper.items():
            helper_seconds[category] += spent
        if part.watch.simulator is not None:
            between += part.watch.simulator.outcome.traffic.between.total() / cohort
    cut = sum(client.clipped.cut for client in clients)
    values = sum(client.clipped.of for client in clients)
    broken = Counter(
        why
        for part in parts
        for c, client in part.clients.items()
        if (why := training.failed.get(part.named[c], client.broken))
    )
    return replace(
        event,
        bytes_up=_mean_by_category(parts, Counted.UP),
        bytes_down=_mean_by_category(parts, Counted.DOWN),
        client_seconds=client_seconds,
        server_seconds=dict(server_seconds),
        helper_seconds=dict(helper_seconds),
        bytes_between=between,
        epsilon=worst.epsilon,
        condition=worst.condition,
        loss=training.loss / training.examples if training.examples else None,
        not_finite=training.not_finite + broken.total(),
        broken=dict(broken),
        clipped=cut / values if values else 0.0,
        noise_epsilon=None if noise is None or scripted else noise.epsilon,
        noise_scope=scope_of(noise, scripted),
        groups_not_finite=training.groups_not_finite,
        rows_over_cap=sum(client.left_out for client in clients),
        rows_exposed=sum(
            len(ids)
            for part in parts
            if isinstance(part.server, LeaderRound)
            for c in part.server.absent
            if (keys := participants[part.named[c]].local.own_keys.latest()) is not None
            for ids in keys.rows.values()
        ),
        singleton_rows=sum(
            part.singleton_rows(outcome.result)
            for part, outcome in zip(parts, outcomes, strict=True)
            if outcome.result is not None
        ),
    )


def scope_of(noise: Guarantee | None, scripted: bool) -> str:
    """What the epsilon of noise is about, in a round's event."""
    if noise is None:
        return ""
    return "no number: test entropy" if scripted else f"delta {noise.delta:.3g} {noise.scope}"


def _mean_by_category(parts: Sequence[Subcohort], which: Counted) -> dict[str, float]:
    """Bytes or seconds of a client on average over all parts of a cohort, by cost category."""
    every = sum(len(part.named) for part in parts)
    total: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for category, mean in part.watch.by_category(which, list(part.named)).items():
            total[category] += mean * len(part.named) / every
    return dict(total)
