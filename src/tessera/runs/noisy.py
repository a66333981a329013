"""Training with noise by a plan: who is drawn, and whose randomness draws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.crypto.prg import CoinStream
from tessera.crypto.secret import Secret
from tessera.data.examples import SUBJECT, Examples
from tessera.data.subjects import check_local_rows, check_named, check_spread, one_unnamed
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel
from tessera.learning.training.jobs import PreparedJob
from tessera.learning.training.noisy_steps import Drawing, EachExample, NoisySteps, StepBatch
from tessera.learning.training.row_cut import RowCut, places_in
from tessera.plan import Plan, Trust, Unknown
from tessera.privacy.dp.guarantee import Unit
from tessera.privacy.dp.noise_setting import Drawn
from tessera.privacy.dp.subjects import (
    Printed,
    PrintedNoise,
    SubjectSampler,
    fixed_size_batch,
    largest_group,
)
from tessera.rounds.noise import noise_of
from tessera.tasks import Task

# --- people ---------------------------------------------------------------------------------------
#
# People in a simulation: what a number per subject takes for granted is looked at before training.
#
# In a deployment nobody sees all clients' data, and the bounds are assumptions. Here they can be
# counted, and a run whose data break them is refused: its number would be about other data.


def with_subjects(task: Task, bound: BoundModel, plan: Plan) -> Task:
    """The task with every record's subject known, where the plan protects subjects."""
    section = noise_of(plan).of_people
    if section is None:
        return task
    data = task.data
    if section.unknown is Unknown.ONE_SUBJECT:
        data = one_unnamed(data)
    check_named(data)
    check_spread(
        data,
        records=section.records_per_subject if section.drawn is Drawn.RECORDS else 0,
        clients=section.clients_per_subject,
    )
    check_local_rows(data, tuple(f for t in bound.tables if t.local for f in t.fields))
    return replace(task, data=data)


# --- noisy ----------------------------------------------------------------------------------------


def noisy_steps(plan: Plan) -> NoisySteps:
    """What the plan's clients do in a round, for a unit that is protected in every step."""
    return STEPS[noise_of(plan).dp.unit](plan)


def index_steps(plan: Plan) -> NoisySteps:
    """All examples that the cut leaves, each by itself; with noise where the client adds all of it.

    Noise is for `clip`, and an example's is shorter. What others add noise to is clipped as it is
    sent: by the first rate, and later ones are not higher.
    """
    section, training = noise_of(plan).dp, plan.local_training
    local = noise_of(plan).vector is None
    if training.decay > 1.0 and not local:
        raise ConfigError(
            f'[dp] unit = "index" with decay = {training.decay:g} in [training]: a rate that grows '
            "makes an example longer than its clip",
            hint="use a decay of 1 or less",
        )
    return NoisySteps(
        clip=section.example_clip * (1.0 if local else training.batch / training.rate),
        noise=section.noise * section.clip / section.example_clip if local else 0.0,
        steps=section.steps,
        batch=training.batch,
        drawing=EachExample(1.0),
        row_weight=1.0 if local else training.table_rate,
    )


def example_steps(plan: Plan) -> NoisySteps:
    section = noise_of(plan).dp
    return _steps(plan, section.noise, EachExample(section.sampling))


def person_steps(plan: Plan) -> NoisySteps:
    """People or their records, or the batches of a paper's algorithm."""
    section, paper = noise_of(plan).dp, noise_of(plan).paper
    if paper is not None:
        batches = PrintedBatches(section.printed, plan.local_training.batch, paper)
        return _steps(plan, paper.unit, batches)
    if section.trust is not Trust.LOCAL:
        raise ConfigError(
            f'[dp] unit = "{section.unit}" with trust = "{section.trust.value}" is not trained',
            hint='use trust = "local"',
        )
    drawing = OfSubjects(section.sampling, section.cap, section.drawn)
    return _steps(plan, section.noise, drawing)


def _steps(plan: Plan, noise: float, drawing: Drawing) -> NoisySteps:
    section, training = noise_of(plan).dp, plan.local_training
    return NoisySteps(
        clip=section.clip,
        noise=noise,
        steps=section.steps,
        batch=training.batch,
        drawing=drawing,
    )


STEPS: Final = {
    Unit.INDEX: index_steps,
    Unit.ITEM: example_steps,
    Unit.SUBJECT: person_steps,
}


def cut_examples(plan: Plan, bound: BoundModel, examples: Examples, secret: Secret) -> Examples:
    """A client's examples of a round, cut by its own coins where a row is what is protected."""
    per_row = noise_of(plan).per_row
    if not per_row:
        return examples
    places = places_in(bound.fetched_fields(examples))
    return RowCut.of(per_row, places).apply(bound, examples, secret)


@dataclass(frozen=True, slots=True)
class OfSubjects:
    """Subject level: people by a coin each, or their records, cut to the cap.

    Where examples name no subject, all of a client's are about one person.
    """

    probability: float
    cap: int
    drawn: Drawn

    def __call__(self, prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        subjects = prepared.batch.get(SUBJECT, np.zeros(prepared.examples, np.int64))
        sampler = SubjectSampler(subjects, rate=self.probability, cap=self.cap, drawn=self.drawn)
        batch = sampler.draw(coins.uniform)
        return StepBatch(batch.places.astype(np.int64), batch.groups.astype(np.int64))


@dataclass(frozen=True, slots=True)
class PrintedBatches:
    """Batches of Marathe and Kanani 2022, as printed: of fixed size, with noise by their Z.

    Every example is clipped by itself (line 7 of Algorithms 1 and 2). The noise of `LocalSubDP` is
    that of the most examples of one person (line 11); that of `CentralSubDP` is the server's
    (`rounds/noise.py`), who is told Z.
    """

    algorithm: Printed
    size: int
    noise: PrintedNoise

    def __call__(self, prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        subjects = prepared.batch.get(SUBJECT, np.zeros(prepared.examples, np.int64))
        size = min(self.size, prepared.examples)
        which = np.sort(fixed_size_batch(prepared.examples, size, coins.uniform)).astype(np.int64)
        most = largest_group(subjects[which])
        draws = 0 if self.algorithm is Printed.CENTRAL else self.noise.units(most)
        return StepBatch(which, np.arange(size), draws=draws, most=most)
