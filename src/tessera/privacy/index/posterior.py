"""Posterior: whose a row is, from everything that many rounds show about it.

In every round a row's count is positive exactly if one of its holders was *active* for it: took
part, survived to the update, and said yes (where everybody names the whole union: was there). So
with holder set H

    positive[k] = OR over u in H of active[u, k],

and a set that breaks this in any round is not the holder set. Whether a row is in a round's union
is a second channel of the same form: the OR over the holders present in that union. What is left
is weighed by how many holders a row has and by the answers themselves: log_lr[u], the logarithm of
P(answers of u | it has the row) / P(answers | it has not).

`posterior` weighs all holder sets, and is exact (`exact` of what it returns): rounds that say the
same are merged, and the sets are summed by dynamic programming over the rounds explained so far.
Rows with too many possible explanations go to belief propagation, an approximation.

With perturbed sets a holder leaves a row out of a whole period with probability 1 - keep, and then
answers and trains as if it had not got it; consistency is per period with that probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError
from tessera.privacy.index import exposure
from tessera.privacy.index.exposure import Holders
from tessera.privacy.index.holder_sets import SURE, HolderSets
from tessera.privacy.index.response import IndexPrivacy, Perturbation

Bits = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

IDENTIFIED: Final = 0.9
"""A client is identified as a row's holder if the posterior is above this."""
CONFIDENT: Final = 0.01
"""The share of all best guesses, by posterior, that are looked at as the most confident."""
DIGITS: Final = 9
"""Posteriors that agree to so many digits are equal: what is left is rounding, not evidence."""
MOST_HOLDERS: Final = 10
"""Largest holder set that is summed over exactly."""


# ------------------------------------------------------------------------------------- evidence


def pack(bits: Bits) -> Words:
    """Rounds (the last axis) as bits of machine words."""
    rounds = bits.shape[-1]
    words = max(1, -(-rounds // 64))
    padded = np.zeros((*bits.shape[:-1], 8 * words), dtype=np.uint8)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    padded[..., : packed.shape[-1]] = packed
    return np.ascontiguousarray(padded).view("<u8").astype(np.uint64)


def log_ratio_table(privacy: IndexPrivacy, most: int) -> Floats:
    """log P(answers | real) / P(answers | not) at [asked, yes], up to `most` answers of a period.

    0 where neither can be (more yes than answers too); cut to +-SURE.
    """
    asked, yes = np.ogrid[: most + 1, : most + 1]
    no = np.maximum(asked - yes, 0)
    log = exposure.log

    def times(count: npt.NDArray[np.int64], probability: float) -> Floats:
        with np.errstate(invalid="ignore"):  # none of what never happens
            return np.where(count > 0, count * log(probability), 0.0)

    def chance(p: float) -> Floats:
        after_yes = times(yes, privacy.p3) + times(no, 1.0 - privacy.p3)
        after_no = times(yes, privacy.p4) + times(no, 1.0 - privacy.p4)
        return np.logaddexp(log(p) + after_yes, log(1.0 - p) + after_no)

    real, other = chance(privacy.p1), chance(privacy.p2)
    with np.errstate(invalid="ignore"):
        return np.where((real == other) | (yes > asked), 0.0, np.clip(real - other, -SURE, SURE))


def size_prior(holders: Holders) -> Floats:
    """P(a row has h holders) at [h], as `posterior` takes it."""
    prior = np.zeros(max(count for count, _ in holders.by_row) + 1)
    for count, share in holders.by_row:
        prior[count] = share
    return prior


@dataclass(frozen=True, slots=True)
class Posterior:
    """P(client holds row) at [row, client], and which rows were summed exactly."""

    holds: Floats = field(repr=False)
    exact: Bits = field(repr=False)


def posterior(
    active: Words,
    positive: Words,
    log_lr: Floats,
    prior: Floats,
    *,
    known: Words | None = None,
    periods: Words | None = None,
    perturbation: Perturbation | None = None,
) -> Posterior:
    """P(u in H) for every row and client, given all rounds.

    active:    (rows, clients, words), rounds packed by `pack`: the client was active for the row
    positive:  (rows, words): a holder was active
    log_lr:    (rows, clients); with perturbed sets (rows, clients, periods)
    prior:     P(h holders) at [h], h from 0 up; before the run any h clients are equally likely
    known:     (rows, words): `positive` was seen in this round; everywhere if left out. A bit that
               is positive and not known excludes nobody and has to be explained by nobody
    periods:   (periods, words): the rounds of each period; with perturbed sets only
    """
    rows, clients, words = active.shape
    if positive.shape != (rows, words) or log_lr.shape[:2] != (rows, clients):
        raise MisuseError(
            f"posterior: {active.shape} traces, {positive.shape} counts and {log_lr.shape} ratios"
        )
    known = np.full_like(positive, ~np.uint64(0)) if known is None else known
    must, may = positive & known, positive | ~known
    weights = _set_weights(np.asarray(prior, dtype=np.float64), clients)
    if perturbation is None:
        ratio = log_lr if log_lr.ndim == 2 else log_lr.sum(axis=2)
        offered = np.exp(np.clip(ratio, -SURE, SURE))[:, :, None]
        silent = np.zeros_like(offered)
        periods = np.full((1, words), ~np.uint64(0))
    else:
        if periods is None or log_lr.shape != (rows, clients, len(periods)):
            raise MisuseError("posterior: perturbed sets need the rounds and the ratios by period")
        ratio = np.exp(np.clip(log_lr, -SURE, SURE))
        other = perturbation.add * ratio + (1.0 - perturbation.add)
        offered = perturbation.keep * ratio / other
        silent = (1.0 - perturbation.keep) / other
    found = np.zeros((rows, clients))
    exact = np.ones(rows, dtype=np.bool_)
    for row in range(rows):
        sets = HolderSets.of(active[row], must[row], may[row], periods, offered[row], silent[row])
        solved = sets.summed(weights)
        exact[row] = solved is not None
        found[row, sets.clients] = sets.propagated(prior, clients) if solved is None else solved
    return Posterior(found, exact)


def _set_weights(prior: Floats, clients: int) -> Floats:
    """Prior probability of one holder set of each size."""
    sizes = np.zeros(min(len(prior), MOST_HOLDERS + 1, clients + 1))
    for h in range(len(sizes)):
        sizes[h] = prior[h] / math.comb(clients, h)
    return sizes


# --------------------------------------------------------------------------------------- rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How often an attack names holders, over all (row, holder) pairs."""

    pairs: int
    right: int  # best guesses that are right: h per row with h holders
    identified: int  # (row, client) pairs with a posterior above IDENTIFIED
    identified_right: int
    confident: int  # the most confident best guesses
    confident_right: int

    @property
    def best_guess(self) -> float:
        """Share of right best guesses."""
        return self.right / self.pairs if self.pairs else 0.0

    @property
    def identified_share(self) -> float:
        """Named pairs that are right, as a share of all pairs."""
        return self.identified_right / self.pairs if self.pairs else 0.0

    @property
    def identified_precision(self) -> float:
        """Of the identified pairs, the share that is right; 1 if nobody is identified."""
        return self.identified_right / self.identified if self.identified else 1.0

    @property
    def most_confident(self) -> float:
        """Of the most confident best guesses, the share that is right."""
        return self.confident_right / self.confident if self.confident else 0.0


@dataclass(frozen=True, slots=True)
class Guesses:
    """Best guesses: the h clients of highest posterior for a row with h holders."""

    confidence: Floats = field(repr=False)
    right: Bits = field(repr=False)
    rows: Indices = field(repr=False)
    clients: Indices = field(repr=False)


def best_guesses(holds: Floats, truth: Bits, rng: np.random.Generator) -> Guesses:
    """As many guesses per row as it has holders; between equals by chance."""
    lot = rng.random(holds.shape)
    order = np.lexsort((lot, -holds.round(DIGITS)), axis=1)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(holds.shape[1])[None, :], axis=1)
    rows, clients = np.nonzero(rank < truth.sum(axis=1, keepdims=True))
    return Guesses(holds[rows, clients], truth[rows, clients], rows, clients)


def chance_of_guess(holds: Floats, holders: Indices, client: int) -> Floats:
    """For each row, how likely the client is among its best guesses, ties broken by chance.

    As many guesses per row as it has `holders`: the mean of `best_guesses` over its draws.
    """
    rounded = holds.round(DIGITS)
    own = rounded[:, client, None]
    ahead, equal = (rounded > own).sum(axis=1), (rounded == own).sum(axis=1)
    chances: Floats = np.clip((holders - ahead) / equal, 0.0, 1.0)
    return chances


def rate(holds: Floats, truth: Bits, rng: np.random.Generator) -> Rates:
    """Score posteriors at [row, client] against the truth."""
    guesses = best_guesses(holds, truth, rng)
    identified = holds > IDENTIFIED
    count = math.ceil(CONFIDENT * len(guesses.right))
    order = np.lexsort((rng.random(len(guesses.right)), -guesses.confidence.round(DIGITS)))
    return Rates(
        pairs=int(truth.sum()),
        right=int(guesses.right.sum()),
        identified=int(identified.sum()),
        identified_right=int((identified & truth).sum()),
        confident=count,
        confident_right=int(guesses.right[order[:count]].sum()),
    )
