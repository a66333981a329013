"""Who trains a cohort: compiled, vectorised or one by one, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tessera.errors import ConfigError
from tessera.learning.training.jobs import Job, Learner, Trainable
from tessera.learning.training.local import NoisySequential, Sequential
from tessera.learning.training.noisy_steps import NoisySteps
from tessera.learning.training.vectorised.check import best, best_noisy, tried
from tessera.plan import Plan
from tessera.rounds.noise import noise_of
from tessera.runs.noisy import noisy_steps
from tessera.tasks import Task

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
