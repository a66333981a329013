"""Correlated noise: its matrices, how far one client moves them, and the error of running sums.

A training of T rounds opens o_t = x_t + y_t with y = C^-1 z: z is independent, and C is lower
triangular and Toeplitz, with coefficients c_0 = 1, c_1, ... The inverse is banded
(`crypto/correlated.py`): y_t mixes the last p of z. What a training opens is a function of
C x + z, one Gaussian mechanism, which a client moves by |C d| if its vectors are d_t in round t.
With y_t the model's noise after t rounds is the running sum y_1 + ... + y_t, in which most of z
cancels.

*Sensitivity.* Let a client be in at most k rounds, any two at least b apart, with |d_t| <= 1. Where
no coefficient is negative, |C d| is largest for vectors of length 1 and one direction, as
<d_s, d_t> <= |d_s| |d_t| and no entry of C'C is negative. Where they do not rise either, entry
(s, t) of C'C falls with |s - t| and with the later of both, so that the largest is at rounds
0, b, 2b, ... (Choquette-Choo et al. 2023, arXiv 2306.08153, section 4; Kalinin and Lampert 2024,
arXiv 2405.13763, Theorem 2). Coefficients that rise or are negative are refused.

*Error.* The root of the mean, over rounds, of the variance of a running sum; times the sensitivity,
so that matrices can be compared: noise is sized by it. It is that of a model to which every round's
sum is added with the same weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.correlated import FRACTION, BandedInverse
from tessera.errors import ConfigError
from tessera.privacy.dp.participation import Participation

Values = npt.NDArray[np.float64]

BLOCK: Final = 128
"""Coefficients that are computed at once, from the last few before them."""
ROUNDED_UP: Final = 1.0 + 2.0**-40
"""Factor on a sensitivity: floats of up to a million rounds err by less."""
MOST_ROUNDS: Final = 10**6
START: Final = 0.7
"""Where the search begins, in every share."""
TERMS: Final = (3, 4)
"""How many rounds' draws the noise of one round may have, where it is optimised."""


@dataclass(frozen=True, slots=True)
class Correlation:
    """The noise of a training whose clients keep a participation bound; `inverse` is C^-1."""

    inverse: BandedInverse
    participation: Participation

    def __post_init__(self) -> None:
        check_inverse(self.inverse)
        limits = self.participation
        most = MOST_ROUNDS if self.correlated else math.inf
        if min(limits.rounds, limits.most, limits.separation) < 1 or limits.rounds > most:
            raise ConfigError(
                f"noise of {limits.rounds} rounds, of which a client is in {limits.most}, "
                f"{limits.separation} apart",
                hint=f"all three are 1 or more, and correlated rounds at most {MOST_ROUNDS:,}",
            )

    @property
    def coefficients(self) -> Values:
        """c_0 .. c_(T-1)."""
        return coefficients(self.inverse, self.participation.rounds)

    @property
    def sensitivity(self) -> float:
        """How far a client moves C x at most, over the longest vector that it sends."""
        if not self.correlated:
            return math.sqrt(self.participations())
        return _sensitivity(self.inverse, self.participation)

    @property
    def correlated(self) -> bool:
        return self.inverse.draws > 1

    @property
    def releases(self) -> float:
        """How many releases of independent noise, as wide as z, cost as much as all rounds."""
        return self.sensitivity**2 if self.correlated else float(self.participations())

    def participations(self, rounds: int | None = None) -> int:
        """Rounds that one client may be in, of the first so many or of all."""
        limits = self.participation
        within = limits.rounds if rounds is None else rounds
        return min(limits.most, -(-within // limits.separation))

    def moves(self, *, bound: float, words: int, grid: int) -> float:
        """How far a client whose vectors are at most `bound` long moves C x, in ring units.

        On a grid of 2^-grid units the past's part of a round's noise is rounded, by half a step
        each in two worlds: that is C times a vector of up to a step in every word and round.
        """
        steps = math.sqrt(words * self.participation.rounds) * 2.0**-grid
        return self.sensitivity * bound + self.operator_norm * steps

    @property
    def operator_norm(self) -> float:
        """At least |C| as an operator: a Toeplitz matrix is at most the sum of its coefficients."""
        if not self.correlated:
            return 1.0
        return float(self.coefficients.sum()) * ROUNDED_UP

    @property
    def one_round(self) -> float:
        """Deviation of one round's noise over that of z."""
        return math.sqrt(1.0 + math.fsum(r * r for r in _terms(self.inverse)))

    @property
    def all_rounds(self) -> float:
        """Deviation of the sum of all rounds' noise over that of z."""
        first, rest = _running(self.inverse, self.participation.rounds)
        later = self.participation.rounds - len(first)
        return math.sqrt(float((first**2).sum()) + later * rest**2)

    @property
    def running_error(self) -> float:
        """Root mean square deviation of running sums, over that of z."""
        return _running_error(self.inverse, self.participation.rounds)

    @property
    def error(self) -> float:
        """The same if z is as wide as the sensitivity."""
        return self.running_error * self.sensitivity


def check_inverse(inverse: BandedInverse) -> None:
    """Refuse an inverse whose C has coefficients that rise or are negative.

    Let q_i = -r_i. No q is to be negative, and c_0 >= c_1 >= ... >= c_(p-1). Then the same holds
    for all: c_t - c_(t-1) is the sum of q_i (c_(t-i) - c_(t-i-1)) for t >= p, each at most 0. That
    is checked in exact arithmetic, since the best coefficients have c_1 = c_2.
    """
    exact, first = [Fraction(-r, 1 << FRACTION) for r in inverse.terms], [Fraction(1)]
    for t in range(1, inverse.draws):
        first.append(sum((exact[i] * first[t - 1 - i] for i in range(t)), Fraction(0)))
    falls = all(b <= a for a, b in itertools.pairwise(first))
    if not falls or any(q < 0 for q in exact):
        shown = ", ".join(f"{float(-q):.4g}" for q in exact)
        raise ConfigError(
            f"correlated noise by 1, {shown}: its matrix has coefficients that rise or are "
            "negative, and the sensitivity of such a matrix is not known",
            hint="coefficients that come from `optimised`, such as 1, -1/2, -1/8",
        )


def coefficients(inverse: BandedInverse, rounds: int) -> Values:
    """The first coefficients of C: c_t = -(r_1 c_(t-1) + r_2 c_(t-2) + ...)."""
    q = [-r for r in _terms(inverse)]
    first = [1.0]
    for t in range(1, min(rounds, BLOCK)):
        first.append(sum(q[i] * first[t - 1 - i] for i in range(min(len(q), t))))
    found = np.zeros(rounds)
    found[: len(first)] = first
    if rounds <= BLOCK or not q:
        return found
    # How the next BLOCK follow from the last ones, the latest first: c_(n+i) is the sum over j of
    # follow[i, j] c_(n-1-j), and follow[i, j] the sum over m > j of q_m c_(i+j+1-m).
    follow = np.zeros((BLOCK, len(q)))
    for j in range(len(q)):
        for m in range(j + 1, len(q) + 1):
            follow[m - j - 1 :, j] += q[m - 1] * found[: BLOCK - (m - j - 1)]
    for start in range(BLOCK, rounds, BLOCK):
        before = found[start - len(q) : start][::-1]
        found[start : start + BLOCK] = follow[: rounds - start] @ before
    return found


def pattern_length(c: Values, participation: Participation) -> float:
    """|C d| of a client that is in rounds 0, b, 2b, ..., k of them at most, with the same vector.

    That is the sensitivity, where coefficients neither rise nor are negative.
    """
    rounds, b = participation.rounds, min(participation.separation, participation.rounds)
    padded = np.zeros(-(-rounds // b) * b)
    padded[:rounds] = c
    columns = np.cumsum(padded.reshape(-1, b), axis=0)  # of all participations so far
    most = participation.most
    if most < len(columns):
        columns[most:] -= columns[:-most].copy()
    return math.sqrt(float((columns.reshape(-1)[:rounds] ** 2).sum()))


def banded_sensitivity(c: Values, participation: Participation) -> float:
    """For w <= b coefficients of any sign: columns of one client do not meet."""
    rounds, b = participation.rounds, participation.separation
    if len(c) > b:
        raise ConfigError(
            f"{len(c)} coefficients with participations {b} rounds apart",
            hint="at most as many as rounds lie between two participations",
        )
    times = min(participation.most, -(-rounds // b))
    squares = (float((c[: max(0, rounds - i * b)] ** 2).sum()) for i in range(times))
    return math.sqrt(math.fsum(squares))


@lru_cache(maxsize=256)
def _sensitivity(inverse: BandedInverse, participation: Participation) -> float:
    c = coefficients(inverse, participation.rounds)
    return pattern_length(c, participation) * ROUNDED_UP


def _terms(inverse: BandedInverse) -> list[float]:
    return [r / (1 << FRACTION) for r in inverse.terms]


def _running(inverse: BandedInverse, rounds: int) -> tuple[Values, float]:
    """By how much each z is in the sum of all rounds, the latest first, and all earlier ones."""
    weights = np.cumsum([1.0, *_terms(inverse)])
    return weights[:rounds], float(weights[-1])


def _running_error(inverse: BandedInverse, rounds: int) -> float:
    """Running sums after 1 .. T rounds have the first 1 .. T of these weights."""
    first, rest = _running(inverse, rounds)
    later = rounds - len(first)
    often = rounds - np.arange(len(first))
    total = float((first**2 * often).sum()) + rest**2 * later * (later + 1) / 2.0
    return math.sqrt(total / rounds)


# --- optimised ------------------------------------------------------------------------------------
#
# Coefficients with the least error of running sums, among those that are allowed. Allowed are c_i
# from what the terms before leave, with r_i = 0, to c_(i-1): shares u_i of that interval are from
# 0 to 1, each by itself, and the best often has some at 1. A simplex in that box finds it (Nelder
# and Mead 1965) in some hundred steps.


@lru_cache(maxsize=64)
def optimised(participation: Participation, draws: int) -> BandedInverse:
    """C^-1 with so many terms, 1 among them: the same everywhere for the same arguments."""
    if draws not in TERMS:
        raise ConfigError(
            f"correlated noise of {draws} terms", hint=f"use {' or '.join(map(str, TERMS))}"
        )
    rounds = participation.rounds

    def error(shares: Values) -> float:
        inverse = inverse_of(shares)
        c = coefficients(inverse, rounds)
        return _running_error(inverse, rounds) * pattern_length(c, participation)

    return inverse_of(minimised(error, np.full(draws - 1, START)))


def inverse_of(shares: Values) -> BandedInverse:
    """The allowed inverse by its shares, in whole units of 2^-FRACTION, rounded towards 0."""
    one, q = 1 << FRACTION, list[int]()
    first = [1.0]
    for share in shares:
        low = sum(q[j] * first[-1 - j] for j in range(len(q))) / one
        # A unit less than the most, so that floats cannot pass it.
        q.append(max(0, math.floor(float(share) * (first[-1] - low) * one) - 1))
        first.append(low + q[-1] / one)
    return BandedInverse(tuple(-each for each in q))


def minimised(
    function: Callable[[Values], float], start: Values, *, steps: int = 400, size: float = 1e-6
) -> Values:
    """A minimum of a function on the box from 0 to 1, by a simplex that is cut to it."""
    points = [start]
    for axis in range(len(start)):
        moved = start.copy()
        moved[axis] += 0.1 if start[axis] < 0.5 else -0.1
        points.append(moved)
    ranked = sorted((function(p), tuple(p)) for p in points)

    def tried(at: Values) -> tuple[float, tuple[float, ...]]:
        inside = np.clip(at, 0.0, 1.0)
        return function(inside), tuple(inside)

    for _ in range(steps):
        ranked.sort()
        best, worst = np.array(ranked[0][1]), np.array(ranked[-1][1])
        if max(np.abs(np.array(p) - best).max() for _, p in ranked) < size:
            break
        centre = np.mean([p for _, p in ranked[:-1]], axis=0)
        mirrored = tried(2.0 * centre - worst)
        if mirrored[0] < ranked[0][0]:
            ranked[-1] = min(mirrored, tried(3.0 * centre - 2.0 * worst))
        elif mirrored[0] < ranked[-2][0]:
            ranked[-1] = mirrored
        else:
            nearer = min(mirrored, ranked[-1])
            inner = tried((centre + np.array(nearer[1])) / 2.0)
            if inner[0] < nearer[0]:
                ranked[-1] = inner
            else:
                ranked = [ranked[0]] + [tried((best + np.array(p)) / 2.0) for _, p in ranked[1:]]
    return np.array(min(ranked)[1])
