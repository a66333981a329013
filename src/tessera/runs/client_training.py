"""How a client of a task trains in a round: the same in a simulation and as a service.

What fails because of a client's own data is sent as zeros: if a client left for it, or said
otherwise, whoever sees that would learn about the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from tessera.crypto.prg import CoinStream
from tessera.crypto.secret import Secret
from tessera.data.examples import SUBJECT, Examples
from tessera.data.subjects import check_local_rows, check_named, check_spread, one_unnamed
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.bound_model import BoundModel
from tessera.learning.tables.submodel import Ids, ModelUpdate, Submodel, TablePart, TableUpdate
from tessera.learning.training.jobs import Job, Learner, PreparedJob, Trainable, Trained, drawn
from tessera.learning.training.local import NoisySequential, Sequential
from tessera.learning.training.noisy_steps import Drawing, EachExample, NoisySteps, StepBatch
from tessera.learning.training.row_cut import RowCut, places_in
from tessera.learning.training.settings import FAILURES, LocalTraining
from tessera.learning.training.vectorised.check import best, best_noisy, tried
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
from tessera.rounds.root import with_negatives
from tessera.tasks import Task

# --- noisy steps ----------------------------------------------------------------------------------
#
# Training with noise by a plan: who is drawn, and whose randomness draws.

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


def own_rows(bound: BoundModel, examples: Examples, secret: Secret) -> dict[str, Ids]:
    """The rows of a client's examples, and negatives where there is a softmax."""
    own, softmax = bound.row_ids_of(examples), bound.candidates
    if softmax is None:
        return own
    return with_negatives(own, softmax, secret)


@dataclass(frozen=True, slots=True)
class ClientTraining:
    """A plan's local training over a bound model."""

    plan: Plan
    bound: BoundModel
    training: LocalTraining
    learner: Learner

    def job(
        self,
        client: int,
        submodel: Submodel,
        examples: Examples,
        local: Mapping[str, TablePart],
        coins: Secret,
    ) -> Job:
        """What a client trains in a round; `examples` and `local` are all that it has."""
        some, softmax = drawn(examples, self.training.examples, coins), self.bound.candidates
        some = cut_examples(self.plan, self.bound, some, coins)
        own = None if softmax is None else self.bound.row_ids_of(examples)[softmax.root]
        return Job(client, submodel, some, local, coins=coins, own=own)

    def alone(
        self,
        client: int,
        submodel: Submodel,
        examples: Examples,
        local: Mapping[str, TablePart],
        coins: Secret,
        round_id: RoundId,
    ) -> Trained:
        """What came of one client's training, as a service does it: whatever fails is zeros."""
        try:
            job = self.job(client, submodel, examples, local, coins)
        except Exception as error:  # noqa: BLE001 (as below)
            return untrained(submodel, local, error)
        return self.train([job], round_id)[0]

    def train(self, jobs: Sequence[Job], round_id: RoundId) -> list[Trained]:
        """What came of each job; zeros, and why, of one whose training failed.

        If training all together fails, it is not known whose failure it was: then each is trained
        alone. If all of several fail, the reason is no client's data: `ConfigError`.
        """
        try:
            return self.learner.train(jobs, round_id=int(round_id))
        except Exception as error:
            if len(jobs) == 1:  # whatever it was: data that nobody foresaw raise any error
                return [untrained(jobs[0].submodel, jobs[0].local, error)]
            if not isinstance(error, FAILURES):
                raise
            alone = [self.train([job], round_id)[0] for job in jobs]
            if all(each.failed for each in alone):
                raise ConfigError(
                    f"training fails for each of {len(jobs)} clients: {error}",
                    hint="try the module and its loss on a few examples, outside tessera",
                ) from error
            return alone


def untrained(submodel: Submodel, local: Mapping[str, TablePart], error: Exception) -> Trained:
    """What a client has to send whose training failed: as many values as others, all zeros."""
    tables = {
        name: TableUpdate(
            np.zeros((len(ids), submodel.tables[name].values.shape[1]), np.float32),
            np.zeros(len(ids), np.int64),
        )
        for name, ids in submodel.trained.items()
    }
    update = ModelUpdate(np.zeros_like(submodel.dense), 0, tables)
    why = f"training raised {type(error).__name__}"
    return Trained(update, local, 0.0, 0, finite=False, failed=why)


# --- learners -------------------------------------------------------------------------------------
#
# Who trains a cohort: compiled, vectorised or one by one, and why.


WORTH_COMPILING: Final = 1_000_000
"""Examples that a run still trains on, from which the minute of a compilation comes back.

Vectorised, a core trains on about 10,000 examples of a small model in a second, compiled on two to
three times as many.
"""

LARGE: Final = 1 << 19
"""Dense weights from which clients are trained one by one, unless another way is asked for.

Side by side, the weights and gradients of all clients go through the cache in every step. One by
one took 0.7 of the CPU time for 0.9 and for 1.7 million weights (TREC, MNIST).
"""


class Trainer(StrEnum):
    """How a cohort's local training is done."""

    AUTO = "auto"
    COMPILED = "compiled"
    VECTORISED = "vectorised"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class ChosenLearner:
    """A learner, and why it is this one."""

    learner: Learner
    reason: str


def learner_of(
    plan: Plan,
    task: Task,
    model: Trainable,
    how: Trainer = Trainer.SEQUENTIAL,
    *,
    sample: Callable[[], list[Job]] = list,
    rounds: int = 0,
) -> ChosenLearner:
    """Who trains clients of this task: its own learner if it has one. `sample`: what a few clients
    train, to try others on; compiling has to pay off in so many `rounds`."""
    bound, training = model.bound, model.training
    noisy = noisy_steps(plan) if noise_of(plan).clips_examples else None
    if noisy is not None and task.noisy_learner is not None:
        own = task.noisy_learner(bound, training, noisy)
        return ChosenLearner(own, "the task's own, with noise per person")
    if noisy is None and task.learner is not None:
        return ChosenLearner(task.learner(bound, training), "the task's own")
    mean = len(task.data.train) / task.data.clients
    if training.examples:
        mean = min(mean, training.examples)
    if noisy is not None:
        mean = noisy.steps * noisy.batch
    return choose(
        how,
        model,
        sample=sample(),
        examples=int(rounds * plan.cohort * mean),
        noisy=noisy,
    )


def choose(
    how: Trainer,
    model: Trainable,
    *,
    sample: list[Job],
    examples: int,
    noisy: NoisySteps | None = None,
) -> ChosenLearner:
    """A learner, and the reason for it in words; `examples` is how many the run will train on."""
    if noisy is not None:
        return choose_noisy(how, model, noisy, sample=sample, examples=examples)
    if how is Trainer.SEQUENTIAL:
        return ChosenLearner(Sequential(model), "asked for")
    weights = model.bound.dense_size
    if how is Trainer.AUTO and weights >= LARGE:
        reason = f"{weights:,} dense weights: side by side they do not fit the cache"
        return ChosenLearner(Sequential(model), reason)
    if how is Trainer.COMPILED:
        why_not = ""
    elif how is Trainer.VECTORISED:
        why_not = "compiling was not asked for"
    elif model.bound.candidates is not None:
        # A minute for every number of candidates, of which there are a dozen or more.
        why_not = "compiling does not pay where every client has its own number of candidates"
    elif examples < WORTH_COMPILING:
        why_not = f"compiling does not pay for the {examples:,} examples to come"
    else:
        why_not = ""
    learner = best(model, sample=sample, compile=not why_not)
    if why_not and learner.name == "vectorised":
        return ChosenLearner(learner, f"{learner.reason}; {why_not}")
    if how is Trainer.COMPILED and learner.name != "compiled":
        raise not_compiled(learner.reason)
    return ChosenLearner(learner, learner.reason)


def choose_noisy(
    how: Trainer, model: Trainable, noisy: NoisySteps, *, sample: list[Job], examples: int
) -> ChosenLearner:
    """The same where there is noise in every step."""
    if how is Trainer.SEQUENTIAL:
        tried(model, noisy, sample=sample)
        return ChosenLearner(NoisySequential(model, noisy), "asked for")
    compiled = how is Trainer.COMPILED or (how is Trainer.AUTO and examples >= WORTH_COMPILING)
    learner = best_noisy(model, noisy, sample=sample, compile=compiled)
    if how is Trainer.COMPILED and not learner.name.startswith("compiled"):
        raise not_compiled(learner.reason)
    return ChosenLearner(learner, learner.reason)


def not_compiled(reason: str) -> ConfigError:
    return ConfigError(
        f"training cannot be compiled here: {reason}",
        hint="leave --trainer out to take what works",
    )
