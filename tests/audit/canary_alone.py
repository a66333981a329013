"""One canary or none in each of many trainings, beside examples that are always there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.audit.canary_training import (
    FIELD,
    SLOPE,
    Guessing,
    MakeLearner,
    Mask,
    Values,
    flipped,
    likelihood_ratios,
    real_learner,
    trained,
)
from tessera.crypto.entropy import Entropy
from tessera.data.examples import SUBJECT, Examples
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.noise_setting import NoiseSetting

DOMINANT: Final = 1e4
"""Of a canary beside which all others of its batch together are nothing."""


@dataclass(frozen=True, slots=True)
class SeenAlone:
    """(rounds, clients, rows): every client has examples on row 0, some a canary on row 1."""

    moved: Values = field(repr=False)
    present: Mask = field(repr=False)

    def guesses(self, one: GaussianNoise) -> Guessing:
        """By the canary's own row."""
        return Guessing(likelihood_ratios(self.moved[:, :, 1], one), self.present)

    def by_absence(self, one: GaussianNoise, *, most: float, others: int) -> Guessing:
        """By the canary's row and by that of the others, of whom there are so many.

        The likelihood ratio where a batch is clipped as one, to `most` clips: it moves the canary's
        row by all of it if the canary was drawn, and otherwise the others' if any of them was.
        """
        rate, variance = 1.0 - dict(one.shifts).get(0, 0.0), one.noise**2
        alone = (1.0 - rate) ** others
        canary, rest = (most * (self.moved[:, :, at] - most / 2.0) / variance for at in (1, 0))
        without = np.logaddexp(math.log(alone), math.log1p(-alone) + rest)
        logs = np.logaddexp(math.log1p(-rate), math.log(rate) + canary - without)
        return Guessing(np.asarray(logs.sum(axis=0)), self.present)

    def by_length(self) -> Guessing:
        """By the noise on rows that nobody touches, which shows what it was divided by."""
        return Guessing(-np.square(self.moved[:, :, 2:]).sum(axis=(0, 2)), self.present)


def observe_alone(
    setting: NoiseSetting,
    *,
    clients: int,
    rounds: int,
    entropy: Entropy,
    rows: int = 32,
    others: int = 1,
    learner: MakeLearner = real_learner,
) -> SeenAlone:
    """So many trainings with one canary or none each, beside examples that are always there.

    The canary's gradient is far longer than that of all others together.
    """
    present = flipped(entropy, clients)
    each = [
        Examples(
            {
                FIELD: np.repeat([0, 1], [others, int(there)]),
                SUBJECT: np.arange(others + int(there)),
                SLOPE: np.repeat(np.array([1.0, DOMINANT], np.float32), [others, int(there)]),
            }
        )
        for there in present
    ]
    updates = list(trained(setting, rows, each, rounds, entropy, learner))
    return SeenAlone(np.stack(updates), present)
