"""How likely a row's holder is identified after k rounds, as a bound and as an estimate.

The bound B follows from what the plan forces and holds for any attack; the estimate is the rate of
one, simulated. The audit measures the same rate on a recorded run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError
from tessera.privacy.index.bound import Promise
from tessera.privacy.index.exposure import Holders, hypergeometric
from tessera.privacy.index.posterior import (
    Bits,
    Floats,
    Indices,
    Posterior,
    Rates,
    Words,
    log_ratio_table,
    pack,
    posterior,
    rate,
    size_prior,
)
from tessera.privacy.index.response import IndexPrivacy, Perturbation

# --- simulated transcripts ------------------------------------------------------------------------
#
# A federation in a setting, and how often the attack is right.
#
# Answers, counts and unions are drawn as the roles would give them; there are no models and no
# keys. Rows are independent of each other, so a sample of them estimates the rate of all.


CHUNK: Final = 1 << 25
"""Bytes of traces that are simulated at a time, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A federation whose transcript is attacked. Everybody is honest; the server looks on.

    Decoys are left aside: they have no count, and are known after one round without late dropouts.
    """

    privacy: IndexPrivacy
    cohort: int
    rounds: int  # in all; each client joins cohort / population of them
    holders: Holders  # of a row, among the population
    population: int = 0  # clients that cohorts are drawn from; 0: the cohort itself
    period_rounds: int = 0  # rounds of a period; 0: one period
    perturbation: Perturbation | None = None
    dropout: float = 0.0  # of each client, on its own, between its revealed set and the sum
    min_group: int = 1  # rows that fewer reveal are not opened
    group: int = 0  # fixed groups that open whole or not at all; 0: none
    union: bool = True  # whether the attacker uses the unions beside counts and answers

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.cohort < 1 or 0 < self.population < self.cohort:
            raise MisuseError(
                f"forecast: {self.rounds} rounds of {self.cohort} out of {self.population} clients"
            )

    @property
    def clients(self) -> int:
        """Among whom a row's holder is looked for."""
        return self.group or self.population or self.cohort

    @property
    def looked_for(self) -> Holders:
        """A row's holders among those clients."""
        everybody = max(self.population, self.cohort, self.group)
        return within(self.holders, self.clients, everybody)

    @property
    def periods(self) -> npt.NDArray[np.int64]:
        """The period of each round."""
        return np.arange(self.rounds) // (self.period_rounds or self.rounds)


def within(holders: Holders, part: int, everybody: int) -> Holders:
    """Holders in a part of the clients, of rows that are held there, given those in all."""
    if part >= everybody:
        return holders
    shares: dict[int, float] = {}
    for count, share in holders.by_row:
        for there, chance in hypergeometric(everybody, min(count, everybody), part):
            if there and share * chance:
                shares[there] = shares.get(there, 0.0) + share * chance
    total = math.fsum(shares.values())
    return Holders.of({count: share / total for count, share in shares.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTranscript:
    """What an observer has of some rows, packed as `posterior` takes it; and the truth."""

    active: Words = field(repr=False)
    positive: Words = field(repr=False)
    known: Words = field(repr=False)
    log_lr: Floats = field(repr=False)
    periods: Words = field(repr=False)
    perturbation: Perturbation | None
    truth: Bits = field(repr=False)  # (rows, clients)
    offered: Bits = field(repr=False)  # holders that put the row into a period, at least once

    def posterior(self, prior: Floats) -> Posterior:
        return posterior(
            self.active,
            self.positive,
            self.log_lr,
            prior,
            known=self.known,
            periods=self.periods,
            perturbation=self.perturbation,
        )


def simulate(setting: Setting, *, rows: int, seed: int = 0) -> Rates:
    """The attack on `rows` rows of a federation in this setting."""
    prior = size_prior(setting.looked_for)
    found = [
        (part.posterior(prior).holds, part.truth)
        for part in transcripts(setting, rows=rows, seed=seed)
    ]
    holds, truth = (np.concatenate(part) for part in zip(*found, strict=True))
    return rate(holds, truth.astype(np.bool_), np.random.default_rng([seed, 3]))


def transcripts(setting: Setting, *, rows: int, seed: int = 0) -> Iterator[SimulatedTranscript]:
    """Some rows at a time, so that memory stays small; the same rounds for all of them."""
    drawn = [
        _Round.draw(setting, np.random.default_rng([seed, 1, k])) for k in range(setting.rounds)
    ]
    size = max(1, CHUNK // (setting.clients * (64 + setting.rounds // 4)))
    for at in range(0, rows, size):
        rng = np.random.default_rng([seed, 2, at])
        yield _transcript(setting, drawn, min(size, rows - at), rng)


@dataclass(frozen=True, slots=True)
class _Round:
    """Who is in a round, and who of them is in its sums."""

    cohort: Indices
    stays: Bits

    @classmethod
    def draw(cls, setting: Setting, rng: np.random.Generator) -> _Round:
        size = setting.group or setting.cohort
        cohort = np.sort(rng.choice(setting.clients, size, replace=False))
        stays = rng.random(size) >= setting.dropout
        if setting.group and not stays.all():
            return cls(cohort[:0], stays[:0])  # opens nothing
        return cls(cohort, stays)


def _transcript(
    setting: Setting, drawn: Sequence[_Round], rows: int, rng: np.random.Generator
) -> SimulatedTranscript:
    privacy, rounds, clients = setting.privacy, setting.rounds, setting.clients
    perturbed, period = setting.perturbation, setting.periods
    periods = int(period[-1]) + 1
    certain = perturbed is None or perturbed.add == 0.0  # who puts a row into a union has it
    truth = _holders(setting.looked_for, rows, clients, rng)
    ever = np.zeros_like(truth)
    active, positive, known = (_Bits.of(2 * rounds, rows, *n) for n in ((clients,), (), ()))
    log_lr = np.zeros((rows, clients, periods if perturbed else 1))
    table = log_ratio_table(privacy, int(np.bincount(period).max()))
    for t in range(periods):
        offered = truth
        if perturbed is not None:
            coin = rng.random((rows, clients), dtype=np.float32)
            offered = coin < np.where(truth, perturbed.keep, perturbed.add)
        trains = offered & truth
        ever |= trains
        coin = rng.random((rows, clients), dtype=np.float32)
        permanent = coin < np.where(offered, privacy.p1, privacy.p2)
        asked, yes = (np.zeros((rows, clients), dtype=np.int64) for _ in range(2))
        for k in np.flatnonzero(period == t).tolist():
            who, stays = drawn[k].cohort, drawn[k].stays
            in_union = np.asarray(offered[:, who].any(axis=1))
            coin = rng.random((rows, len(who)), dtype=np.float32)
            revealed = coin < np.where(permanent[:, who], privacy.p3, privacy.p4)
            revealed &= in_union[:, None]
            asked[:, who] += in_union[:, None]
            yes[:, who] += revealed
            summed = revealed & stays
            active.put(k, summed, who)
            positive.put(k, np.asarray((summed & trains[:, who]).any(axis=1)))
            known.put(k, in_union & (revealed.sum(axis=1) >= setting.min_group))
            if setting.union:
                active.put(rounds + k, np.ones_like(revealed), who)
                positive.put(rounds + k, in_union)
                known.put(rounds + k, ~in_union | certain)
        log_lr[:, :, t if perturbed else 0] += table[asked, yes]
    both = np.concatenate([period, period])
    return SimulatedTranscript(
        active=active.words,
        positive=positive.words,
        known=known.words,
        log_lr=log_lr,
        periods=pack(both == np.arange(periods)[:, None]),
        perturbation=perturbed,
        truth=truth,
        offered=ever,
    )


def _holders(holders: Holders, rows: int, clients: int, rng: np.random.Generator) -> Bits:
    counts, shares = (np.array(values) for values in zip(*holders.by_row, strict=True))
    size = np.minimum(rng.choice(counts, rows, p=shares / shares.sum()), clients)
    truth = np.zeros((rows, clients), dtype=np.bool_)
    for row in range(rows):
        truth[row, rng.choice(clients, size[row], replace=False)] = True
    return truth


@dataclass(slots=True)
class _Bits:
    """One bit per round and channel (counts, then unions), packed as it is written."""

    words: Words

    @classmethod
    def of(cls, bits: int, *shape: int) -> _Bits:
        return cls(np.zeros((*shape, -(-bits // 64)), dtype=np.uint64))

    def put(self, at: int, bits: Bits, clients: Indices | None = None) -> None:
        word, shift = divmod(at, 64)
        values = bits.astype(np.uint64) << np.uint64(shift)
        if clients is None:
            self.words[:, word] |= values
        else:
            self.words[:, clients, word] |= values


# --- the forecast ---------------------------------------------------------------------------------

MOST_ROWS: Final = 400
"""Rows that are simulated; a rate then has a standard error of 2.5 points at most."""
FEW_ROWS: Final = 100
"""The same where rows have many holders, or clients and rounds are many."""
WORK: Final = 40_000_000
"""Rows times clients times rounds that are simulated at most, down to a few rows."""
CURIOUS: Final = 1
"""Clients of a group that look on, beside the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentificationForecast:
    """One setting with nobody dropping out, and the same with late dropouts."""

    setting: Setting
    promise: Promise
    sampled: int
    estimate: Rates
    with_dropout: Rates | None
    dropout: float

    @classmethod
    def of(
        cls, setting: Setting, promise: Promise, *, dropout: float = 0.0, rows: int = 0
    ) -> IdentificationForecast:
        """`setting` has no dropouts; clients of `promise` that are corrupt hide nobody."""
        if setting.group:
            setting = replace(setting, group=max(1, promise.alike()))
        rows = rows or MOST_ROWS
        many = max(count for count, _ in setting.holders.by_row) > 3
        most = FEW_ROWS if many else WORK // (setting.clients * setting.rounds)
        sampled = min(rows, max(FEW_ROWS, most))
        with_dropout = None
        if dropout:
            with_dropout = simulate(replace(setting, dropout=dropout), rows=sampled)
        return cls(
            setting=setting,
            promise=promise,
            sampled=sampled,
            estimate=simulate(setting, rows=sampled),
            with_dropout=with_dropout,
            dropout=dropout,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; bounds are of a row with one holder, and averaged over (row, holder)."""
        setting, promise, holders = self.setting, self.promise, self.setting.looked_for
        late = self.with_dropout
        return {
            "bound": {
                "server": promise.bound(),
                "one_client": promise.bound(curious_clients=CURIOUS),
            },
            "bound_by_corrupt": {str(c): each for c, each in promise.with_corrupt().items()},
            "bound_in_words": promise.in_words(),
            "bound_mean": {
                "server": promise.mean(holders),
                "one_client": promise.mean(holders, curious_clients=CURIOUS),
            },
            "estimate": rates_json(self.estimate),
            "with_dropout": None if late is None else rates_json(late),
            "settings": {
                "rounds": setting.rounds,
                "rounds_per_client": setting.rounds * min(1.0, setting.cohort / setting.clients),
                "cohort": setting.cohort,
                "population": setting.population or setting.cohort,
                "period_rounds": setting.period_rounds or setting.rounds,
                "group": promise.group,
                "corrupt": promise.corrupt,
                "dropout": self.dropout,
                "holders": {str(count): share for count, share in holders.by_row},
                "rows_sampled": self.sampled,
            },
        }


def rates_json(rates: Rates) -> dict[str, float | None]:
    """Shares of all (row, holder) pairs, but for the last two."""
    return {
        "best_guess": rates.best_guess,
        "named": rates.identified_share,
        "right_among_named": rates.identified_precision if rates.identified else None,
        "most_confident": rates.most_confident,
    }
