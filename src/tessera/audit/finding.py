"""Finding: what an attack measured, with its interval, beside what the plan claims.

Intervals are Wilson's. A report tests many claims, and all of them together call an honest run
broken once in a hundred times: if chance could break m claims, each interval is one at 1 - 0.01 / m
(Bonferroni; `corrected`). Trials of one period are not independent of each other (a permanent
answer stays for the period, and a row of the union comes back), so the number of trials is divided
by the design effect (Kish 1965): how much more the periods differ than independent trials would.
Figures that every client has one of are averaged, and then the clients are the trials.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import NormalDist, fmean, stdev
from typing import Any, Final

from tessera.ids import SERVER

LEVEL: Final = 0.99
"""Of all intervals of a report together; of one that stands by itself."""
Interval = Callable[[float], tuple[float, float]]
"""The interval at a level."""


class Verdict(StrEnum):
    """A claim is broken if the whole confidence interval of the attack lies above it."""

    HOLDS = "within bound"
    BROKEN = "broken"
    UNCLAIMED = "no claim"  # the plan claims no bound: the figure is for information
    UNTESTED = "untested"  # the run has no trial for the attack


class FindingUnit(StrEnum):
    SHARE = "share"
    EPSILON = "epsilon"
    AUC = "auc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One attack's outcome. A claim is the most that the plan allows the attack to reach.

    `spread` is how far the claim itself may lie off for one population, where it is an average
    over populations. `chance` is what guessing by chance would reach. Findings of one `kind` mean
    the same, and are explained once.
    """

    name: str
    measured: float
    low: float
    high: float
    claimed: float
    trials: int
    meaning: str
    unit: FindingUnit = FindingUnit.SHARE
    attacker: str = SERVER
    rounds: int = 0
    spread: float = 0.0
    kind: str = ""
    chance: float = math.nan
    level: float = LEVEL  # of the interval
    interval: Interval | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, name: str, measured: float, interval: Interval, **facts: Any) -> Finding:
        """One with its interval at `LEVEL`; `facts` are the other fields."""
        low, high = interval(LEVEL)
        return cls(name=name, measured=measured, low=low, high=high, interval=interval, **facts)

    def at(self, level: float) -> Finding:
        """The same with an interval at another level."""
        if self.interval is None:
            return self
        low, high = self.interval(level)
        return replace(self, low=low, high=high, level=level)

    @property
    def chance_can_break(self) -> bool:
        """Whether it has a claim that an honest run breaks now and then: not one of "never"."""
        return bool(self.trials) and self.claims and self.claimed + self.spread > 0.0

    @property
    def claims(self) -> bool:
        """Whether the plan claims a bound: a share of 1 or an infinite epsilon is none."""
        return self.claimed < (math.inf if self.unit is FindingUnit.EPSILON else 1.0)

    @property
    def verdict(self) -> Verdict:
        if not self.trials:
            return Verdict.UNTESTED
        if not self.claims:
            return Verdict.UNCLAIMED
        return Verdict.BROKEN if self.low > self.claimed + self.spread else Verdict.HOLDS

    @property
    def agrees(self) -> bool:
        """Whether the claim is within the interval: not only kept, but met."""
        slack = self.spread
        return bool(self.trials) and self.low - slack <= self.claimed <= self.high + slack

    def as_json(self) -> dict[str, Any]:
        """Plain values; a number that JSON does not have is the string "inf", or null."""
        return {name: _json(getattr(self, name)) for name in IN_JSON}


IN_JSON: Final = (
    "name attacker unit measured low high level claimed spread chance verdict agrees trials rounds "
    "meaning"
).split()


def _json(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def corrected(found: Sequence[Finding]) -> list[Finding]:
    """Findings of one report, with intervals that hold all at once at `LEVEL`."""
    tests = max(1, sum(finding.chance_can_break for finding in found))
    return [finding.at(1.0 - (1.0 - LEVEL) / tests) for finding in found]


@dataclass(slots=True)
class ClusteredTrials:
    """Hits among trials, kept apart by what they have in common (a period)."""

    by_cluster: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def add(self, cluster: int, hits: int, trials: int) -> None:
        counted = self.by_cluster[cluster]
        counted[0] += int(hits)
        counted[1] += int(trials)

    @property
    def hits(self) -> int:
        return sum(hits for hits, _ in self.by_cluster.values())

    @property
    def trials(self) -> int:
        return sum(trials for _, trials in self.by_cluster.values())

    @property
    def rate(self) -> float:
        return self.hits / self.trials if self.trials else math.nan

    @property
    def design_effect(self) -> float:
        """Variance between clusters over that of independent trials; never below 1."""
        rate, trials = self.rate, self.trials
        full = [(h, n) for h, n in self.by_cluster.values() if n]
        if len(full) < 2 or not 0.0 < rate < 1.0:
            return 1.0
        between = math.fsum((h - rate * n) ** 2 for h, n in full)
        between *= len(full) / (len(full) - 1) / trials**2
        return max(1.0, between / (rate * (1.0 - rate) / trials))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        return wilson(self.rate, self.trials / self.design_effect, level)

    def finding(self, name: str, **facts: Any) -> Finding:
        """The rate beside a claim; `facts` are the other fields of a finding."""
        return Finding.of(name, self.rate, self.interval, trials=self.trials, **facts)


def average(name: str, values: Sequence[float], **facts: Any) -> Finding:
    """The mean of a figure from 0 to 1 that clients have, NaN aside, and its normal interval."""
    known = [value for value in values if not math.isnan(value)]
    mean = fmean(known) if known else math.nan

    def interval(level: float) -> tuple[float, float]:
        if len(known) < 2:
            return 0.0, 1.0
        z = NormalDist().inv_cdf((1.0 + level) / 2.0)
        half = z * stdev(known) / math.sqrt(len(known))
        return max(0.0, mean - half), min(1.0, mean + half)

    return Finding.of(name, mean, interval, trials=len(known), **facts)


def wilson(rate: float, trials: float, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval (Wilson 1927); everything is possible without a trial."""
    if not trials:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1.0 + level) / 2.0)
    scale = 1.0 + z * z / trials
    middle = (rate + z * z / (2.0 * trials)) / scale
    half = z * math.sqrt(rate * (1.0 - rate) / trials + z * z / (4.0 * trials**2)) / scale
    # At the ends the interval reaches 0 and 1 in real numbers; rounding must not say otherwise.
    low = 0.0 if rate == 0.0 else max(0.0, middle - half)
    return low, 1.0 if rate == 1.0 else min(1.0, middle + half)
