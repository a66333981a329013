"""NoisySteps: how a client trains with noise; and batches of groups that are clipped together.

A step, in words. Some of the client's examples are drawn by its own coins. They fall into groups:
at item level every example is one, at subject level those of one person are. The gradients of a
group's losses are added up, over the dense part, all rows and local rows together, and scaled down
to `clip` if they are longer: a group without a finite gradient counts as zeros. What the groups
give is added up, noise of deviation `noise` times `clip` is added to every value of the dense part
and of **every row at hand**, and the step is the rate times that, over the plan's batch: not over
the number of examples that were drawn, which is nobody's business.

To draw otherwise, write another `Drawing`. It is handed the client's prepared examples (with their
subjects, where they have some) and the coins of the round, and gives the batch of one step. It may
not use any other randomness, nor give a group that holds two units of the privacy claimed.

    def whole_shops(prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        shop = prepared.batch["shop"]
        ...
        return StepBatch(which, groups)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.crypto.coins import CoinStream
from tessera.crypto.noise import DEVIATION
from tessera.errors import ConfigError, MisuseError
from tessera.learning.training.local import PreparedJob

Ints = npt.NDArray[np.int64]

LEAST_NOISE: Final = 1e-3
"""With less, contributions would not fit the integers that noise comes in."""
FINEST: Final = 2**20
"""Integers per clip where there is no noise."""
SHORTER: Final = 1.0 - 1e-5
"""Contributions are cut to this much of the clip: their length is found in single precision."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's batch: which examples, and the group of each, numbered from 0 in ascending order.

    Examples of one group stand side by side. `draws` says how many times the plan's noise this step
    adds to every value: 1, but where noise goes by the batch, as printed in a paper. `most` is then
    the most examples of one person in it.
    """

    which: Ints = field(repr=False)
    groups: Ints = field(repr=False)
    draws: int = 1
    most: int = 0

    def __post_init__(self) -> None:
        if self.which.shape != self.groups.shape or self.which.ndim != 1:
            raise MisuseError("a batch has one group for each of its examples")
        steps = np.diff(self.groups, prepend=-1)
        if self.groups.size and not (((steps == 0) | (steps == 1)).all() and self.groups[0] == 0):
            raise MisuseError("groups of a batch are numbered from 0, one after the other")

    @property
    def many(self) -> int:
        """How many groups there are."""
        return int(self.groups[-1]) + 1 if self.groups.size else 0

    @classmethod
    def grouped(cls, which: Ints, of: Ints) -> StepBatch:
        """These examples, those with the same number in `of` in one group."""
        order = np.argsort(of, kind="stable")
        _, groups = np.unique(of[order], return_inverse=True)
        return cls(which[order].astype(np.int64), groups.astype(np.int64))


Drawing: TypeAlias = Callable[[PreparedJob, CoinStream], StepBatch]
"""Draws one step's batch; called once for every step, in order."""


@dataclass(frozen=True, slots=True)
class EachExample:
    """Item level: every example by a coin of its own, and by itself."""

    probability: float

    def __call__(self, prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        which = np.flatnonzero(coins.heads(prepared.examples, self.probability))
        return StepBatch(which, np.arange(which.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisySteps:
    """What a plan says about training with noise; none of it follows from the data.

    `batch` divides every step: it is the number of examples that a batch is to have. A `noise` of 0
    is that of a client who only clips, for noise that others add to the sum: it takes one step, in
    which local rows stay as they are, and of which it clips what it will send. There rows weigh
    `row_weight` times their gradient beside the dense part.
    """

    clip: float
    noise: float
    steps: int
    batch: int
    drawing: Drawing
    row_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.only_clips and self.steps != 1:
            raise MisuseError(f"a sum of {self.steps} steps without noise protects no example")
        if not self.only_clips and not self.noise >= LEAST_NOISE:
            raise ConfigError(
                f"noise = {self.noise:g} times the clip is as good as none",
                hint=f"use {LEAST_NOISE:g} or more; privacy begins far above it",
            )

    @property
    def only_clips(self) -> bool:
        return self.noise == 0.0

    @property
    def unit(self) -> float:
        """The value that one integer of noise stands for (`crypto/noise.py`), or of a sum."""
        return self.clip / FINEST if self.only_clips else self.clip * self.noise / DEVIATION

    @property
    def longest(self) -> float:
        """A group's contribution in integers is at most this long."""
        return self.clip / self.unit
