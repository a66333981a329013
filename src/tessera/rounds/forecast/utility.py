"""Utility under noise: whether what a plan releases says more about rows than its noise hides.

A model of one value a row (an item's effect b), which every holder sees under its own error e and
which noise z is added to. Nothing here looks at data: users, rows a client holds, how popular rows
are and how much effects differ are public, assumed or charged.

*What a holder sends.* Its update is the residual b - b' + e of each of its m rows, and is clipped
as one vector: a row's part is h (b - b' + e), in clips, with h = min(1 / C, 1 / (r sqrt(m))) for
residuals of deviation r.

*What a round does.* n holders of a row, a share f of the users in a round, noise of s clips on a
sum. Sums are divided by D: by popularity C (n f / sqrt(m) + max(1, 5 s)), as
`learning/popularity.py` has it, or the number of clients. The value b' moves by
g (b - b' + mean of e) + rate C z / D, with g = rate C h n f / D.

*After T rounds*, with a = 1 - g:

    left of the effect        a^T b
    noise                     variance (rate C s / D)^2 |(a^(T-1), ..., a, 1) C^-1|^2
    the holders' own errors   with everybody in every round (1 - a^T)^2 v / n; else a sum over the
                              1 / f parts that take turns: g^2 (sum of their a^t)^2 v / (n f)

C^-1 is the mixing of correlated noise, the identity where noise is independent; v is the variance
of e. A row's error is the sum of the three (with t^2 for b^2). It is *learnt* if that is below t^2,
the error of leaving it at zero. Averaged over rows by popularity this is compared with two models
without noise: *nothing shared* (masks alone) has t^2, and the *sum of means* has v / n, and
d more, as it has a user's mean in place of a model of the user's own.

What it leaves out: that clients differ in how many rows they hold, factors beside the biases
(words of a row share its effect evenly), momentum and decay of the server's steps, noise in the
popularity that sums are divided by, rows that a client leaves out. `tests/rounds/test_utility.py`
checks the formula against a simulation of the same steps, and `benchmarks/forecast.py` against
training. It is an expectation, not a promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.correlated import FRACTION
from tessera.errors import ConfigError
from tessera.learning.popularity import LEAST, NOISY
from tessera.plan import Plan, Trust
from tessera.privacy.dp.events import THE_POPULARITY
from tessera.rounds.noise import noise_of

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """How much labels differ, as deviations: assumed, not counted in anybody's data.

    `own` is by how much a model of a user's own (a mask) is better than the user's mean.
    """

    residual: float
    item: float
    own: float
    source: str

    def scaled(self, unit: float) -> Effects:
        """The same for labels whose range is so many times as wide."""
        return replace(
            self, residual=self.residual * unit, item=self.item * unit, own=self.own * unit
        )


RATINGS: Final = Effects(
    residual=0.885 / 4, item=0.44 / 4, own=0.308 / 4, source="as in MovieLens 1M"
)
"""Of a rating over the width of its scale. From figures of docs/results.md: masks alone .989,
biases without noise .885, user mean 1.036."""
CLICKS: Final = Effects(residual=0.44, item=0.098, own=0.147, source="as in a synthetic shop")
"""Of labels 0 and 1. From the shop of docs/results.md (2,000 users, 5,000 items, seed 0)."""


@dataclass(frozen=True, slots=True)
class RowPopularity:
    """The share of users that hold a row, falling, for so `many` rows each; and where it is from.

    Rows of a long table are put together where they are nearly alike, a thousand kinds at most.
    """

    shares: Floats
    many: Floats
    source: str

    @classmethod
    def zipf(cls, rows: int, held: float, skew: float = 1.0) -> RowPopularity:
        """Assumed: row number r is held with odds that fall as r to the power of -`skew`.

        A user holds `held` rows on average, no row twice: shares are 1 - exp(-c r^-skew).
        """
        if not 0.0 < held <= rows:
            raise ConfigError(
                f"{held:g} rows of {rows:,} in a table", hint="a client holds 1 row to all of them"
            )
        if not 0.0 <= skew < 10.0:
            raise ConfigError(f"a skew of {skew:g}", hint="0: all rows alike; 1 is usual")
        edges = np.unique(np.geomspace(1, rows + 1, MOST_KINDS + 1).astype(np.int64))
        many = np.diff(edges).astype(np.float64)
        weights = (0.5 * (edges[:-1] + edges[1:] - 1)) ** -skew

        def found(scale: float) -> Floats:
            return np.asarray(-np.expm1(-scale * weights))

        low, high = 0.0, 1.0
        while found(high) @ many < held * (1.0 - 1e-12) and high < 1e300:
            high *= 2.0
        for _ in range(100):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if found(middle) @ many < held else (low, middle)
        return cls(found(high), many, f"assumed: Zipf, exponent {skew:g}")

    @classmethod
    def counted(cls, counts: Floats, users: int, source: str) -> RowPopularity:
        """From public or charged counts of holders."""
        if counts.ndim != 1 or not counts.size or not np.isfinite(counts).all():
            raise ConfigError("popularity is not a list of counts", hint="one number for each row")
        ordered = np.clip(np.sort(counts)[::-1] / users, 0.0, 1.0)
        if not ordered.any():
            raise ConfigError("popularity: nobody holds any row", hint="one number for each row")
        edges = np.unique(np.geomspace(1, len(ordered) + 1, MOST_KINDS + 1).astype(np.int64)) - 1
        many = np.diff(edges).astype(np.float64)
        return cls(np.add.reduceat(ordered, edges[:-1]) / many, many, source)

    @property
    def rows(self) -> int:
        return int(self.many.sum())

    @property
    def held(self) -> float:
        """Rows of a user, on average."""
        return float(self.shares @ self.many)

    def kind(self, rank: float) -> int:
        """Which kind the row at this part of the list is, from 0 (the most popular) to 1."""
        at = min(self.rows - 1, int(rank * self.rows))
        return int(np.searchsorted(np.cumsum(self.many), at, side="right"))

    def mean(self, values: Floats) -> float:
        """Of a value of rows, by how often they are looked at."""
        return float(np.average(values, weights=self.shares * self.many))


MOST_KINDS: Final = 1_000
RANKS: Final = {"popular": 0.01, "median": 0.5, "rare": 0.9}
"""Which rows are shown: one of the first hundredth, in the middle, and after nine tenths."""
MOST_USERS: Final = 10**10
MOST_ROUNDS: Final = 2_000
"""More are looked at as if they were so many, with as much noise in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyTraining:
    """What the formula needs of a plan. Noise is that of one round's sum, in clips."""

    rounds: int
    share: float  # of the users in a round
    noise: float  # of what is drawn for one round
    clip: float
    rate: float
    by_popularity: bool  # what sums are divided by; else the number of clients
    marks: float = 0.0  # noise of the popularity, where rows are selected by it
    threshold: float = 0.0
    inverse: tuple[float, ...] = ()  # of correlated noise, after the 1 of its own round
    width: int = 1
    grows: float = 0.0  # noise grows with the users to this power: 1/2 where each adds its own

    @classmethod
    def of(cls, plan: Plan, users: int) -> NoisyTraining | None:
        """None where there is no noise, or where it is in steps of training."""
        if plan.dp is None or plan.dp.by_batches:
            return None
        noise = noise_of(plan)
        dp, by_rows = noise.dp, noise.selects_rows
        if not 0.0 < noise.in_the_sum < math.inf:
            return None
        rounds = plan.simulation.rounds
        fewer = min(rounds, MOST_ROUNDS)
        return cls(
            rounds=fewer,
            share=min(1.0, plan.cohort / users),
            noise=noise.in_the_sum / plan.correlation.one_round * math.sqrt(rounds / fewer),
            clip=dp.clip,
            rate=plan.server_step.rate,
            by_popularity=by_rows,
            marks=noise.statistic_noise(THE_POPULARITY) if by_rows else 0.0,
            threshold=dp.threshold if by_rows else 0.0,
            inverse=tuple(part / 2**FRACTION for part in noise.correlation.terms),
            width=max(1, sum(table.width for table in plan.tables)),
            grows=0.5 if dp.trust is Trust.LOCAL else 0.0,
        )


@dataclass(frozen=True)
class UtilityForecast:
    """What noise leaves of a model, for so many users."""

    training: NoisyTraining
    users: int
    popularity: RowPopularity
    effects: Effects

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ConfigError(f"users = {self.users}", hint="1 or more")

    # --- the steps ------------------------------------------------------------------------------

    @cached_property
    def holders(self) -> Floats:
        return self.popularity.shares * self.users

    @cached_property
    def reach(self) -> float:
        """h: what a holder's residual of 1 is in its clipped update, in clips."""
        residual = math.hypot(self.effects.residual, self.effects.item)
        return min(1.0 / self.training.clip, 1.0 / (residual * math.sqrt(self.popularity.held)))

    @cached_property
    def step(self) -> Floats:
        """How far a value moves for 1 clip of a row's sum: rate C / D."""
        t = self.training
        divisor = np.full(len(self.holders), self.users * t.share)
        if t.by_popularity:
            marks = self.holders * t.share / math.sqrt(self.popularity.held)
            divisor = t.clip * (marks + max(LEAST, NOISY * t.noise))
        return np.asarray(t.rate * t.clip / divisor)

    @cached_property
    def left(self) -> Floats:
        """a: what a round leaves of an effect; steps that swing further each time count as -1."""
        found = 1.0 - self.step * self.reach * self.holders * self.training.share
        return np.clip(found, -1.0, 1.0)

    @cached_property
    def noise(self) -> Floats:
        """Variance of the noise in a value after the last round."""
        t = self.training
        weights = self.left[:, None] ** np.arange(t.rounds - 1, -1, -1, dtype=np.float64)
        mixed = weights.copy()
        for lag, part in enumerate(t.inverse, start=1):
            mixed[:, :-lag] += part * weights[:, lag:]
        each = np.sum(mixed * mixed, axis=1) * (self.step * t.noise) ** 2
        return np.asarray(each * t.width)  # words of a row share one effect, and all have noise

    @cached_property
    def own(self) -> Floats:
        """Variance of what holders' own errors leave in a value.

        As many parts as it takes for everybody to be in a round; a part comes back with the same
        errors.
        """
        t, left = self.training, self.left
        parts = max(1, round(1.0 / t.share))
        powers = left[:, None] ** np.arange(t.rounds, dtype=np.float64)
        whole = np.zeros((len(left), -(-t.rounds // parts) * parts))
        whole[:, : t.rounds] = powers
        by_part = whole.reshape(len(left), -1, parts).sum(axis=1)
        holders = np.maximum(self.holders * t.share, t.share)  # of one part
        moved = (1.0 - left) ** 2 * np.sum(by_part * by_part, axis=1)
        return np.asarray(moved * self.effects.residual**2 / holders)

    @cached_property
    def selected(self) -> Floats:
        """How likely a row is selected."""
        t = self.training
        if not t.marks:
            return np.ones(len(self.holders))
        over = self.holders / math.sqrt(self.popularity.held) / t.marks - t.threshold
        return np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in over])

    # --- errors ---------------------------------------------------------------------------------

    @cached_property
    def errors(self) -> Floats:
        """Of every kind of rows: mean square of the effect less the value."""
        whole = self.effects.item**2
        learnt = self.left ** (2 * self.training.rounds) * whole + self.noise + self.own
        return np.asarray(self.selected * learnt + (1.0 - self.selected) * whole)

    @property
    def error(self) -> float:
        return self.popularity.mean(self.errors)

    @property
    def nothing_shared(self) -> float:
        """Where every row is left at zero: masks alone."""
        return self.effects.item**2

    @property
    def sum_of_means(self) -> float:
        """Of an exact mean of every row's holders, over users' means."""
        own = self.effects.residual**2 / np.maximum(self.holders, 1.0)
        return self.popularity.mean(own) + self.effects.own**2

    # --- what is said ---------------------------------------------------------------------------

    @property
    def beats_nothing(self) -> bool:
        return self.error < self.nothing_shared

    @property
    def beats_means(self) -> bool:
        return self.error < self.sum_of_means

    @property
    def learnt(self) -> int:
        """Rows whose value is better than none."""
        better = self.errors < self.effects.item**2 * (1.0 - 1e-9)
        return int((self.popularity.many * better).sum())

    def noise_over_signal(self, rank: float) -> float:
        """Deviation of the noise in a row's value over that of its learnt effect."""
        at = self.popularity.kind(rank)
        signal = abs(1.0 - self.left[at] ** self.training.rounds) * self.effects.item
        return float(math.sqrt(self.noise[at]) / max(signal, 1e-300))

    def with_users(self, users: int) -> UtilityForecast:
        """The same rounds, and the same share of more users, or fewer, in each."""
        t = self.training
        grown = replace(t, noise=t.noise * (users / self.users) ** t.grows)
        return replace(self, training=grown, users=users)

    def users_needed(self, *goals: Callable[[UtilityForecast], bool]) -> int | None:
        """The fewest users with whom all these goals are met, within 1 %; None: no number does.

        Of several answers the one nearest to the users there are: with a handful of users the sum
        of means is no goal either.
        """

        def met(users: int) -> bool:
            there = self.with_users(users)
            return all(goal(there) for goal in goals)

        low = high = self.users
        if met(self.users):
            while low > 1 and met(low):
                low, high = low // 2, low
            if low == 1 and met(low):
                return 1
        while not met(high):
            low, high = high, 2 * high
            if high > MOST_USERS:
                return None
        while high - low > max(1, low // 200):
            middle = (low + high) // 2
            low, high = (low, middle) if met(middle) else (middle, high)
        return high

    @property
    def warning(self) -> str:
        """Why such a plan is of no use; "" if it is of some."""
        if self.beats_nothing and self.beats_means:
            return ""
        less = "is expected to help less than the sum of means, which has no privacy"
        if not self.beats_nothing:
            less = "is not expected to help: it learns no more than nothing shared (masks alone)"
        needed = self.users_needed(over_nothing, over_means)
        enough = "no number of users is enough" if needed is None else f"it takes {needed:,} users"
        return (
            f"this plan {less}. With these rounds and this noise {enough} to beat both; here are "
            f"{self.users:,}"
        )

    def as_json(self) -> dict[str, Any]:
        ranks = {name: self.popularity.kind(rank) for name, rank in RANKS.items()}
        return {
            "users": self.users,
            "rows": self.popularity.rows,
            "rows_held": self.popularity.held,
            "popularity": self.popularity.source,
            "effects": self.effects.source,
            "holders": {name: float(self.holders[at]) for name, at in ranks.items()},
            "noise_over_signal": {
                name: self.noise_over_signal(rank) for name, rank in RANKS.items()
            },
            "rows_learnt": self.learnt,
            "error": self.error,
            "nothing_shared": self.nothing_shared,
            "sum_of_means": self.sum_of_means,
            "users_to_beat_nothing_shared": self.users_needed(over_nothing),
            "users_to_beat_sum_of_means": self.users_needed(over_means),
            "warning": self.warning,
        }


def over_nothing(found: UtilityForecast) -> bool:
    return found.beats_nothing


def over_means(found: UtilityForecast) -> bool:
    return found.beats_means
