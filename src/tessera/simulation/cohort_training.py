"""A cohort's training, between the messages of a round.

A client round that has fetched its submodel waits (`ClientRound.pending`). The engine trains it
with a `CohortTrainer`, one client after the other or all together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel
from tessera.learning.training.settings import FAILURES
from tessera.protocols.machine import Outbound
from tessera.rounds.ideal import RoundTrainer
from tessera.rounds.roles import RoundClient
from tessera.simulation.simulator import Work

ClientTrainer = Callable[[Submodel], ModelUpdate]
CohortTrainer = Callable[[RoundId, Mapping[ClientId, Submodel]], "TrainingOutcome"]
"""Trains what some clients have fetched, all together."""


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
