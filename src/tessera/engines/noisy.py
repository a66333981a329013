"""Training with noise by a plan: who is drawn, and whose randomness draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.crypto.coins import CoinStream
from tessera.data.examples import SUBJECT
from tessera.errors import ConfigError
from tessera.learning.local import PreparedJob
from tessera.learning.noisy.steps import Drawing, EachExample, NoisySteps, StepBatch
from tessera.privacy.noise_setting import Drawn
from tessera.privacy.subjects import SubjectSampler
from tessera.rounds import dp
from tessera.rounds.plan import NoiseFrom, Plan


def noisy_steps(plan: Plan) -> NoisySteps:
    """What the plan's clients do in a round, for a unit that is protected in every step."""
    section = dp.section(plan)
    if section.trust is not NoiseFrom.LOCAL:
        raise ConfigError(
            f'[dp] unit = "{section.unit}" with trust = "{section.trust.value}" is not trained',
            hint='use trust = "local"',
        )
    assert plan.training is not None
    return NoisySteps(
        clip=section.clip,
        noise=section.noise,
        steps=section.steps,
        batch=plan.training.batch,
        drawing=drawing(plan),
    )


def drawing(plan: Plan) -> Drawing:
    section = dp.section(plan)
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
