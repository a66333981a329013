"""Canaries: a lower bound on epsilon from guesses about who was in the training data.

Many canaries (examples, clients or persons that nobody else resembles) are each trained on or not,
by a fair coin. The attacker sees what the observer sees, knows each canary's gradient, and guesses.
Whatever keeps (epsilon, delta) per canary makes the number of correct guesses hardly larger than
Binomial(guesses, e^epsilon / (1 + e^epsilon)), whatever the guesses depend on (Steinke, Nasr,
Jagielski 2023, arXiv 2305.08846, Theorem 5.2). Turned round, many correct guesses are evidence
against every smaller epsilon: `lower_bound` is the largest that is refuted, wrong with a
probability of 1 - level at most. One run is enough, and canaries need not be independent.

The bound saturates: with g guesses, all correct, it is about ln(g / ln(1 / (1 - level))).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError
from tessera.privacy.dp.mechanism import GaussianNoise

Values = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

SHARES: Final = (0.05, 0.15, 0.4, 1.0)
"""Shares of the canaries that are guessed, the surest first: the best counts, and for having chosen
among them the error rate is divided by their number."""
MOST: Final = 60.0


@dataclass(frozen=True, slots=True)
class Guessing:
    """How sure the attacker is that each canary was in (large) or not (small), and the truth."""

    scores: Values = field(repr=False)
    present: Mask = field(repr=False)

    def __post_init__(self) -> None:
        if self.scores.shape != self.present.shape or self.scores.ndim != 1:
            raise MisuseError(f"canaries: {self.scores.shape} scores, {self.present.shape} truths")

    def correct(self, guesses: int) -> int:
        """How many of so many guesses are right: half for "in", at the top, half for "out"."""
        order = np.argsort(self.scores, kind="stable")
        outs = guesses // 2
        ins = guesses - outs
        right = int((~self.present[order[:outs]]).sum())
        return right + int(self.present[order[len(order) - ins :]].sum())

    def bound(self, *, delta: float, level: float) -> float:
        """The best lower bound on epsilon at this level."""
        canaries = len(self.scores)
        each = 1.0 - (1.0 - level) / len(SHARES)
        found = 0.0
        for share in SHARES:
            guesses = max(1, int(share * canaries))
            bound = lower_bound(
                canaries=canaries,
                guesses=guesses,
                correct=self.correct(guesses),
                delta=delta,
                level=each,
            )
            found = max(found, bound)
        return found


def lower_bound(*, canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """The largest epsilon that so many correct guesses refute; 0 if they refute none."""
    if not 0 <= correct <= guesses <= canaries:
        raise MisuseError(f"canaries: {correct} correct of {guesses} guesses of {canaries}")

    def refuted(epsilon: float) -> bool:
        chance = p_value(epsilon, canaries=canaries, guesses=guesses, correct=correct, delta=delta)
        return chance < 1.0 - level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, MOST
    while high - low > 1e-4:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def p_value(epsilon: float, *, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """At most how likely so many correct guesses are if the training keeps (epsilon, delta)."""
    logs = _log_binomial(guesses, epsilon)
    tail = float(np.exp(logs[correct:]).sum())
    # delta lets some guesses be right for certain: the worst way of spending it (Theorem 5.2).
    below = np.cumsum(np.exp(logs[:correct][::-1]))
    worst = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, tail + 2.0 * canaries * delta * worst)


def _log_binomial(trials: int, epsilon: float) -> Values:
    """Log probabilities of 0 .. trials successes at a rate of e^epsilon / (1 + e^epsilon)."""
    k = np.arange(trials + 1, dtype=np.float64)
    factorials = np.concatenate([np.zeros(1), np.cumsum(np.log(np.arange(1, trials + 1)))])
    choose = factorials[-1] - factorials - factorials[::-1]
    log_rate, log_rest = -math.log1p(math.exp(-epsilon)), -math.log1p(math.exp(epsilon))
    return np.asarray(choose + k * log_rate + (trials - k) * log_rest)


def likelihood_ratios(seen: Values, mechanism: GaussianNoise) -> Values:
    """How much likelier each canary's observations are if it was in: the best possible score.

    `seen` (releases, canaries) is what lies along each canary's gradient, in units of the clip.
    """
    variance = mechanism.noise**2
    logs = [math.log(p) + shift * (seen - 0.5 * shift) / variance for shift, p in mechanism.shifts]
    return np.asarray(np.logaddexp.reduce(logs, axis=0).sum(axis=0))
