"""Training with noise by a plan: who is drawn, and whose randomness draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from tessera.crypto.coins import CoinStream
from tessera.crypto.secret import Secret
from tessera.data.examples import SUBJECT, Examples
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel
from tessera.learning.training.jobs import PreparedJob
from tessera.learning.training.noisy_steps import Drawing, EachExample, NoisySteps, StepBatch
from tessera.learning.training.row_cut import RowCut, aimed_at, places_in
from tessera.plan import NoiseFrom, Plan
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


def noisy_steps(plan: Plan) -> NoisySteps:
    """What the plan's clients do in a round, for a unit that is protected in every step."""
    section = noise_of(plan).dp
    if section.unit == "index":
        return index_steps(plan)
    assert plan.training is not None
    if section.printed is not Printed.NONE:
        printed = noise_of(plan).paper
        return NoisySteps(
            clip=section.clip,
            noise=printed.unit,
            steps=section.steps,
            batch=plan.training.batch,
            drawing=PrintedBatches(section.printed, plan.training.batch, printed),
        )
    if section.trust is not NoiseFrom.LOCAL:
        raise ConfigError(
            f'[dp] unit = "{section.unit}" with trust = "{section.trust.value}" is not trained',
            hint='use trust = "local"',
        )
    return NoisySteps(
        clip=section.clip,
        noise=section.noise,
        steps=section.steps,
        batch=plan.training.batch,
        drawing=drawing(plan),
    )


def index_steps(plan: Plan) -> NoisySteps:
    """All examples that the cut leaves, each by itself; with noise where the client adds all of it.

    Noise is for `clip`, and an example's is shorter. What others add noise to is clipped as it is
    sent: by the first rate, and later ones are not higher.
    """
    section, training = noise_of(plan).dp, plan.training
    assert training is not None
    local = section.trust is NoiseFrom.LOCAL
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


def cut_examples(plan: Plan, bound: BoundModel, examples: Examples, secret: Secret) -> Examples:
    """A client's examples of a round, cut by its own coins where a row is what is protected."""
    section = plan.dp
    if section is None or section.unit != "index":
        return examples
    places = places_in(bound.fetched_fields(examples))
    return RowCut.of(section.per_row, places).apply(bound, examples, secret)


def check_examples(plan: Plan, task: Task, module: nn.Module, bound: BoundModel) -> None:
    """Refuse what would let one example, person or row move the gradients of others."""
    if plan.dp is None or not plan.dp.by_examples:
        return
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in module.modules()):
        raise ConfigError(
            f"[dp] unit = {plan.dp.unit!r} with dropout: which units are left out goes by the "
            "place of an example among the others, so that one more moves all after it",
            hint="a model without dropout; noise keeps it from overfitting",
        )
    if plan.dp.unit == "index":
        _check_index(task, bound)


def _check_index(task: Task, bound: BoundModel) -> None:
    """Refuse what would let a row of a client's data move more than its examples."""
    aimed_at(bound.fetched_fields(task.data.train.take(slice(0, 1))), 1)
    if task.architecture is not None and task.architecture.get("rate"):
        raise ConfigError(
            f'[dp] unit = "index" with task {task.name!r}, whose examples have the client\'s own '
            "click rate: it changes with every row the client has met",
            hint='[task] model = "biased", or another model without the rate',
        )


def drawing(plan: Plan) -> Drawing:
    section = noise_of(plan).dp
    if section.unit == "item":
        return EachExample(section.sampling)
    return OfSubjects(section.sampling, section.cap, section.drawn)


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
    (`rounds/noisy_sum.py`), who is told Z.
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
