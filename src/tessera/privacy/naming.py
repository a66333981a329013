"""Naming: whose a row is, from everything that many rounds show about it.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError
from tessera.privacy import exposure
from tessera.privacy.exposure import Holders
from tessera.privacy.response import IndexPrivacy, Perturbation

Bits = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

NAMED: Final = 0.9
"""A client is named as a row's holder if the posterior is above this."""
CONFIDENT: Final = 0.01
"""The share of all best guesses, by posterior, that are looked at as the most confident."""
MOST_HOLDERS: Final = 10
"""Largest holder set that is summed over exactly."""
MOST_STATES: Final = 2048
"""Most sets of explained rounds per row; beyond, belief propagation."""
MOST_COLUMNS: Final = 62
"""Most rounds to explain, after merging: they are bits of a machine word."""
CHUNK: Final = 1 << 24
"""Bytes of traces that are simulated at a time, about."""
SURE: Final = 40.0
"""Log-ratios are cut here: a proof (infinite) and e^40 make no odds in a posterior."""


# ------------------------------------------------------------------------------------- evidence


def pack(bits: Bits) -> Words:
    """Rounds (the last axis) as bits of machine words."""
    rounds = bits.shape[-1]
    words = max(1, -(-rounds // 64))
    padded = np.zeros((*bits.shape[:-1], 8 * words), dtype=np.uint8)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    padded[..., : packed.shape[-1]] = packed
    return np.ascontiguousarray(padded).view("<u8").astype(np.uint64)


def unpack(words: Words, rounds: int) -> Bits:
    """The way back."""
    octets = np.ascontiguousarray(words.astype("<u8")).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=rounds, bitorder="little").astype(np.bool_)


def log_ratio_table(privacy: IndexPrivacy, most: int) -> Floats:
    """log P(answers | real) / P(answers | not) at [asked, yes], up to `most` answers of a period.

    0 where neither can be (more yes than answers too); cut to +-SURE.
    """
    table = np.zeros((most + 1, most + 1))
    log = exposure.log

    def times(count: int, probability: float) -> float:
        return count * log(probability) if count else 0.0

    def chance(p: float, asked: int, yes: int) -> float:
        after_yes = times(yes, privacy.p3) + times(asked - yes, 1.0 - privacy.p3)
        after_no = times(yes, privacy.p4) + times(asked - yes, 1.0 - privacy.p4)
        return float(np.logaddexp(log(p) + after_yes, log(1.0 - p) + after_no))

    for asked in range(most + 1):
        for yes in range(asked + 1):
            real, other = chance(privacy.p1, asked, yes), chance(privacy.p2, asked, yes)
            table[asked, yes] = 0.0 if real == other else real - other
    return np.clip(table, -SURE, SURE)


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
            f"naming: {active.shape} traces, {positive.shape} counts and {log_lr.shape} ratios"
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
            raise MisuseError("naming: perturbed sets need the rounds and the ratios by period")
        ratio = np.exp(np.clip(log_lr, -SURE, SURE))
        other = perturbation.add * ratio + (1.0 - perturbation.add)
        offered = perturbation.keep * ratio / other
        silent = (1.0 - perturbation.keep) / other
    found = np.zeros((rows, clients))
    exact = np.ones(rows, dtype=np.bool_)
    for row in range(rows):
        case = _Case.of(active[row], must[row], may[row], periods, offered[row], silent[row])
        solved = case.summed(weights) if case.explained else None
        exact[row] = solved is not None
        found[row, case.clients] = case.propagated(prior, clients) if solved is None else solved
    return Posterior(found, exact)


def _set_weights(prior: Floats, clients: int) -> Floats:
    """Prior probability of one holder set of each size."""
    sizes = np.zeros(min(len(prior), MOST_HOLDERS + 1, clients + 1))
    for h in range(len(sizes)):
        sizes[h] = prior[h] / math.comb(clients, h)
    return sizes


# ------------------------------------------------------------------------------------ one row


@dataclass(frozen=True, slots=True)
class _Step:
    """Clients that explain the same rounds, and how their members' weights multiply.

    `moves`: for each period with rounds to explain, (mask, weight if offered, weight if left out).
    """

    moves: tuple[tuple[int, float, float], ...]
    members: Indices
    weights: Floats


@dataclass(frozen=True, slots=True)
class _Case:
    """One row: the clients that can hold it and the rounds somebody has to explain.

    Rounds whose active candidates include all those of another round are explained whenever that
    other one is (in the same period), so only the smallest are kept, each once.
    """

    clients: Indices  # candidates
    explained: bool  # every positive round has a candidate
    explains: Bits  # (candidates, periods, columns)
    offered: Floats  # (candidates, periods)
    silent: Floats

    @classmethod
    def of(
        cls, active: Words, must: Words, may: Words, periods: Words, offered: Floats, silent: Floats
    ) -> _Case:
        outside = (active & ~may)[:, None, :] & periods  # (clients, periods, words)
        allowed = ~outside.any(axis=2)
        offered = np.where(allowed, offered, 0.0)
        clients = np.flatnonzero((offered + silent > 0.0).all(axis=1))
        offered, silent = offered[clients], silent[clients]
        bits = 64 * active.shape[1]
        needed = np.flatnonzero(unpack(must, bits))
        explains = unpack(active[clients], bits)[:, needed]  # (candidates, columns)
        where = unpack(periods, bits)[:, needed]  # (periods, columns)
        possible = explains[:, None, :] & where & (offered > 0.0)[:, :, None]
        columns = _smallest(possible.reshape(clients.size * len(periods), needed.size))
        explained = bool(possible.any(axis=(0, 1)).all())
        return cls(clients, explained, possible[:, :, columns], offered, silent)

    def steps(self) -> Iterator[_Step]:
        """Clients in turn; those that explain the same rounds for certain take one step."""
        masks = self.explains @ (1 << np.arange(self.explains.shape[2], dtype=np.int64))
        if not self.silent.any():
            weights, whole = self.offered.prod(axis=1), masks.sum(axis=1)  # periods are disjoint
            for mask in np.unique(whole):
                members = np.flatnonzero(whole == mask)
                yield _Step(((int(mask), 1.0, 0.0),) if mask else (), members, weights[members])
            return
        weights = np.where(masks != 0, 1.0, self.offered + self.silent).prod(axis=1)
        idle = np.flatnonzero(~masks.any(axis=1))
        if idle.size:
            yield _Step((), idle, weights[idle])
        for u in np.flatnonzero(masks.any(axis=1)):
            moves = tuple(
                (int(mask), float(yes), float(no))
                for mask, yes, no in zip(masks[u], self.offered[u], self.silent[u], strict=True)
                if mask
            )
            yield _Step(moves, np.array([u]), weights[[u]])

    def summed(self, weights: Floats) -> Floats | None:
        """Exact marginals; None if no set explains the row, or too many sets of rounds arise."""
        columns = self.explains.shape[2]
        if columns > MOST_COLUMNS:
            return None
        steps = list(self.steps())
        states = _reachable([mask for step in steps for mask, _, _ in step.moves])
        if states is None or states[-1] != (1 << columns) - 1:
            return None
        targets = {
            mask: np.searchsorted(states, states | mask)
            for step in steps
            for mask, _, _ in step.moves
        }
        # value[s, d]: weight of all ways to go on, with the rounds s explained by d holders
        value = np.zeros((len(states), len(weights)))
        value[-1] = weights  # everything explained
        after: list[Floats] = []
        added = [_shifts(_product(step.weights, len(weights)), len(weights)) for step in steps]
        for step, shifts in zip(reversed(steps), reversed(added), strict=True):
            after.append(_pull(step, targets, value))
            value = value + after[-1] @ shifts
        total = value[0, 0]
        if not total > 0.0:
            return None
        reached = np.zeros_like(value)  # reached[s, d]: weight of all ways to get there
        reached[0, 0] = 1.0
        found = np.zeros(len(self.clients))
        for step, shifts, moved in zip(steps, added, reversed(after), strict=True):
            pairs = np.einsum("sd,se->de", reached, moved)
            through = np.array([pairs.trace(offset=j) for j in range(1, len(weights))])
            rest = _products_without(step.weights, len(through))  # of the step's other members
            found[step.members] = step.weights * (rest @ through) / total
            reached = reached + _push(step, targets, reached) @ shifts.T
        return np.clip(found, 0.0, 1.0)

    def propagated(self, prior: Floats, clients: int, sweeps: int = 30) -> Floats:
        """Belief propagation over rounds that a holder must explain: approximate marginals.

        Independent prior odds; a round tells a client how likely the others are to explain it.
        Used where holders are many (then rounds say little about any one of them).
        """
        explains = self.explains.any(axis=1)  # (candidates, columns)
        weight = np.where(self.explains.any(axis=2), self.offered, self.offered + self.silent)
        mean = float(np.dot(np.arange(len(prior)), prior) / max(float(np.sum(prior)), 1e-300))
        share = min(0.9, max(mean, 0.5) / clients)
        base = np.log(np.maximum(weight.prod(axis=1), 1e-30)) + math.log(share / (1.0 - share))
        news = np.zeros(explains.shape)  # log-odds that a round gives a client
        for _ in range(sweeps):
            belief = base[:, None] + news.sum(axis=1, keepdims=True) - news
            absent = np.where(explains, -np.logaddexp(0.0, belief), 0.0)  # log P(not a holder)
            others = np.minimum(absent.sum(axis=0) - absent, -1e-12)
            fresh = np.where(explains, -np.log(-np.expm1(others)), 0.0)
            news = 0.5 * news + 0.5 * np.minimum(fresh, SURE)
        return np.asarray(1.0 / (1.0 + np.exp(-(base + news.sum(axis=1)))), dtype=np.float64)


def _smallest(possible: Bits) -> Indices:
    """Columns that include no other column, each pattern once."""
    if not possible.shape[1]:
        return np.zeros(0, dtype=np.intp)
    _, first = np.unique(np.packbits(possible, axis=0), axis=1, return_index=True)
    distinct = possible[:, first].astype(np.float32)
    sizes = distinct.sum(axis=0)
    shared = distinct.T @ distinct  # candidates that two columns have in common
    inside = shared == sizes[:, None]  # [i, j]: column i is within column j
    np.fill_diagonal(inside, False)
    return np.asarray(np.sort(first[~inside.any(axis=0)]), dtype=np.intp)


def _reachable(masks: Sequence[int]) -> npt.NDArray[np.int64] | None:
    """Every set of explained rounds, in ascending order; None if they are too many."""
    states = np.zeros(1, dtype=np.int64)
    for mask in dict.fromkeys(masks):
        states = np.unique(np.concatenate([states, states | mask]))
        if len(states) > MOST_STATES:
            return None
    return states


def _pull(step: _Step, targets: dict[int, Indices], value: Floats) -> Floats:
    """What the value is worth before one member of the step is added."""
    for mask, yes, no in reversed(step.moves):
        value = yes * value[targets[mask]] + (no * value if no else 0.0)
    return value


def _push(step: _Step, targets: dict[int, Indices], reached: Floats) -> Floats:
    """The transposed of `_pull`."""
    for mask, yes, no in step.moves:
        degrees = reached.shape[1]
        at = (targets[mask][:, None] * degrees + np.arange(degrees)).ravel()
        sums = np.bincount(at, weights=reached.ravel(), minlength=reached.size)
        landed = sums.astype(np.float64).reshape(reached.shape)
        reached = yes * landed + (no * reached if no else 0.0)
    return reached


def _product(weights: Floats, most: int) -> Floats:
    """Coefficients of the product of (1 + w x), up to `most` of them."""
    terms = np.zeros(min(most, len(weights) + 1))
    terms[0] = 1.0
    for w in weights:
        terms[1:] += w * terms[:-1]
    return terms


def _shifts(terms: Floats, size: int) -> Floats:
    """The matrix that adds one holder or more: [d + j, d] is the weight of j of them."""
    shifts = np.zeros((size, size))
    for j in range(1, len(terms)):
        shifts[np.arange(j, size), np.arange(size - j)] = terms[j]
    return shifts


def _products_without(weights: Floats, most: int) -> Floats:
    """[u, j]: the same for all weights but u; sums of positive terms only, so nothing cancels."""
    count = len(weights)
    if count == 1 or most < 2:
        return np.eye(1, max(most, 0)).repeat(count, axis=0)
    before, behind = np.zeros((count, most)), np.zeros((count, most))
    before[0, 0] = behind[-1, 0] = 1.0
    for u in range(1, count):
        before[u] = before[u - 1]
        before[u, 1:] += weights[u - 1] * before[u - 1, :-1]
        behind[-u - 1] = behind[-u]
        behind[-u - 1, 1:] += weights[-u] * behind[-u, :-1]
    found = np.zeros((count, most))
    for j in range(most):
        found[:, j:] += before[:, [j]] * behind[:, : most - j]
    return found


# --------------------------------------------------------------------------------------- rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How often an attack names holders, over all (row, holder) pairs."""

    pairs: int
    right: int  # best guesses that are right: h per row with h holders
    named: int  # (row, client) pairs with a posterior above NAMED
    named_right: int
    confident: int  # the most confident best guesses
    confident_right: int

    @property
    def best_guess(self) -> float:
        """Share of right best guesses."""
        return self.right / self.pairs if self.pairs else 0.0

    @property
    def named_share(self) -> float:
        """Named pairs that are right, as a share of all pairs."""
        return self.named_right / self.pairs if self.pairs else 0.0

    @property
    def named_precision(self) -> float:
        """Of the named pairs, the share that is right; 1 if nobody is named."""
        return self.named_right / self.named if self.named else 1.0

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
    """As many guesses per row as it has holders; between equals by lot."""
    lot = rng.random(holds.shape)
    order = np.lexsort((lot, -holds), axis=1)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(holds.shape[1])[None, :], axis=1)
    rows, clients = np.nonzero(rank < truth.sum(axis=1, keepdims=True))
    return Guesses(holds[rows, clients], truth[rows, clients], rows, clients)


def rate(holds: Floats, truth: Bits, rng: np.random.Generator) -> Rates:
    """Score posteriors at [row, client] against the truth."""
    guesses = best_guesses(holds, truth, rng)
    named = holds > NAMED
    count = math.ceil(CONFIDENT * len(guesses.right))
    order = np.lexsort((rng.random(len(guesses.right)), -guesses.confidence))
    return Rates(
        pairs=int(truth.sum()),
        right=int(guesses.right.sum()),
        named=int(named.sum()),
        named_right=int((named & truth).sum()),
        confident=count,
        confident_right=int(guesses.right[order[:count]].sum()),
    )


# ----------------------------------------------------------------------------------- simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A federation whose transcript is attacked. Everybody is honest; the server looks on.

    A row has `holders` holders among the population, any of them equally likely.
    """

    privacy: IndexPrivacy
    cohort: int
    rounds: int  # in all; each client joins cohort / population of them
    holders: Holders
    population: int = 0  # clients that cohorts are drawn from; 0: the cohort itself
    period_rounds: int = 0  # rounds of a period; 0: one period
    perturbation: Perturbation | None = None
    dropout: float = 0.0  # of each client, on its own, between naming its rows and the sum
    min_group: int = 1  # rows named by fewer open nothing
    group: int = 0  # fixed groups that open whole or not at all; 0: none
    decoys: bool = False  # a row may be in a union without a holder
    union: bool = True  # whether the attacker uses the unions beside counts and answers

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.cohort < 1 or self.clients < self.cohort:
            raise MisuseError(f"{self.rounds} rounds of {self.cohort} out of {self.clients}")

    @property
    def clients(self) -> int:
        """Among whom a row's holder is looked for."""
        return self.group or self.population or self.cohort

    @property
    def periods(self) -> npt.NDArray[np.int64]:
        """The period of each round."""
        return np.arange(self.rounds) // (self.period_rounds or self.rounds)


@dataclass(slots=True)
class _Bits:
    """Two channels of one bit per round, packed: counts, then unions."""

    rounds: int
    words: Words

    @classmethod
    def zeros(cls, rounds: int, *shape: int) -> _Bits:
        return cls(rounds, np.zeros((*shape, max(1, -(-2 * rounds // 64))), dtype=np.uint64))

    def put(self, at: int, bits: Bits, clients: Indices | slice | None = None) -> None:
        word, shift = divmod(at, 64)
        values = bits.astype(np.uint64) << np.uint64(shift)
        if clients is None:
            self.words[:, word] |= values
        else:
            self.words[:, clients, word] |= values


def simulate(setting: Setting, *, rows: int, seed: int = 0) -> Rates:
    """The attack on `rows` rows of a federation in this setting."""
    holds, truth = simulate_posterior(setting, rows=rows, seed=seed)
    return rate(holds, truth, np.random.default_rng([seed, 3]))


def simulate_posterior(setting: Setting, *, rows: int, seed: int = 0) -> tuple[Floats, Bits]:
    """Posterior and truth at [row, client] of the attack on `rows` rows."""
    drawn = [
        _Round.draw(setting, np.random.default_rng([seed, 1, k])) for k in range(setting.rounds)
    ]
    per_row = setting.clients * (8 + setting.rounds // 4)
    size = max(1, min(rows, CHUNK // per_row))
    parts = [
        _attack(setting, drawn, min(size, rows - at), np.random.default_rng([seed, 2, at]))
        for at in range(0, rows, size)
    ]
    holds, truth = (np.concatenate([part[i] for part in parts]) for i in range(2))
    return holds, truth.astype(np.bool_)


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


def _attack(
    setting: Setting, drawn: Sequence[_Round], rows: int, rng: np.random.Generator
) -> tuple[Floats, Bits]:
    privacy, rounds, clients = setting.privacy, setting.rounds, setting.clients
    perturbed = setting.perturbation
    counts = np.array([count for count, _ in setting.holders.by_row])
    shares = np.array([share for _, share in setting.holders.by_row])
    size = np.minimum(rng.choice(counts, rows, p=shares / shares.sum()), clients)
    truth = rng.random((rows, clients)).argsort(axis=1).argsort(axis=1) < size[:, None]
    period = setting.periods
    last = int(period[-1])
    active = _Bits.zeros(rounds, rows, clients)
    positive, known = _Bits.zeros(rounds, rows), _Bits.zeros(rounds, rows)
    log_lr = np.zeros((rows, clients, last + 1 if perturbed else 1))
    table = log_ratio_table(privacy, int(np.bincount(period).max()))
    for t in range(last + 1):
        offered = truth
        if perturbed is not None:
            coin = rng.random((rows, clients), dtype=np.float32)
            offered = coin < np.where(truth, perturbed.keep, perturbed.add)
        coin = rng.random((rows, clients), dtype=np.float32)
        permanent = coin < np.where(offered, privacy.p1, privacy.p2)
        asked, yes = (np.zeros((rows, clients), dtype=np.int64) for _ in range(2))
        for k in np.flatnonzero(period == t).tolist():
            who, stays = drawn[k].cohort, drawn[k].stays
            in_union = offered[:, who].any(axis=1)
            coin = rng.random((rows, len(who)), dtype=np.float32)
            said = coin < np.where(permanent[:, who], privacy.p3, privacy.p4)
            said &= in_union[:, None]
            asked[:, who] += in_union[:, None]
            yes[:, who] += said
            summed = said & stays
            active.put(k, summed, who)
            positive.put(k, (summed & offered[:, who] & truth[:, who]).any(axis=1))
            known.put(k, in_union & (said.sum(axis=1) >= setting.min_group))
            if setting.union:
                certain = not setting.decoys and (perturbed is None or perturbed.add == 0.0)
                active.put(rounds + k, np.ones_like(said), who)
                positive.put(rounds + k, in_union)
                known.put(rounds + k, ~in_union | certain)
        log_lr[:, :, t if perturbed else 0] += table[asked, yes]
    both = np.concatenate([period, period])
    found = posterior(
        active.words,
        positive.words,
        log_lr,
        size_prior(setting.holders),
        known=known.words,
        periods=pack(both[None, :] == np.arange(last + 1)[:, None]),
        perturbation=perturbed,
    )
    return found.holds, truth
