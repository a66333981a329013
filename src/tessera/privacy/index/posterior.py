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

HolderSets: every set of clients that explains one row, weighed and summed.

Clients are taken one after the other; what is kept is which rounds are explained so far and by how
many holders. Going forward and backward once gives P(u in H) for every client, as a sum of positive
terms. Where that would take too many steps, belief propagation approximates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import MisuseError
from tessera.privacy.index import exposure
from tessera.privacy.index.exposure import Holders
from tessera.privacy.index.response import IndexPrivacy, Perturbation

Bits = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Masks = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

MOST_STATES: Final = 512
"""Most sets of explained rounds per row; beyond, belief propagation."""
MOST_CLASSES: Final = 64
"""Most different traces for which all triples are looked at."""
MOST_COLUMNS: Final = 62
"""Most rounds to explain, after merging: they are bits of a machine word."""
SWEEPS: Final = 40
"""Of belief propagation."""
SURE: Final = 40.0
"""Log-ratios are cut here: a proof (infinite) and e^40 make no odds in a posterior."""


def unpack(words: Words, rounds: int) -> Bits:
    """Rounds out of machine words."""
    octets = np.ascontiguousarray(words.astype("<u8")).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=rounds, bitorder="little").astype(np.bool_)


@dataclass(frozen=True, slots=True)
class _Step:
    """Clients that explain the same rounds, and how their members' weights multiply.

    `moves`: for each period with rounds to explain, (mask, weight if offered, weight if left out).
    """

    moves: tuple[tuple[int, float, float], ...]
    members: Indices
    weights: Floats


@dataclass(frozen=True, slots=True)
class HolderSets:
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
    ) -> HolderSets:
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

    @property
    def _masks(self) -> Masks:
        """The rounds that a candidate explains in each period, as bits; periods are disjoint."""
        bit = 1 << np.arange(self.explains.shape[2], dtype=np.int64)
        return np.asarray(self.explains @ bit, dtype=np.int64)

    def steps(self) -> Iterator[_Step]:
        """Clients in turn; those that explain the same rounds for certain take one step."""
        masks = self._masks
        if not self.silent.any():
            weights, whole = self.offered.prod(axis=1), masks.sum(axis=1)
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
        """Exact marginals; `weights` is the prior of one set of each size.

        None if no set explains the row, or too many sets of rounds arise on the way.
        """
        columns, most = self.explains.shape[2], int(np.flatnonzero(weights).max(initial=0))
        if not self.explained:
            return None
        if most <= 3 and not self.silent.any():
            left, of = _classes(np.asarray(self.explains.any(axis=1)))
            if len(left) <= MOST_CLASSES:
                sizes = weights[: most + 1].copy()
                sizes[0] *= not columns  # nobody explains a round
                return _up_to_three(left, of, self.offered.prod(axis=1), sizes)
        if columns > MOST_COLUMNS:
            return None
        steps = list(self.steps())
        states = _reachable(steps, columns, most)
        if states is None or states[-1] != (1 << columns) - 1:
            return None
        targets = {
            mask: _places(states, states | mask) for step in steps for mask, _, _ in step.moves
        }
        # value[s, d]: weight of all ways to go on, with the rounds s explained by d holders
        value = np.zeros((len(states) + 1, len(weights)))  # the last one is not worth reaching
        value[-2] = weights  # everything explained
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

    def propagated(self, prior: Floats, clients: int) -> Floats:
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
        for _ in range(SWEEPS):
            belief = base[:, None] + news.sum(axis=1, keepdims=True) - news
            absent = np.where(explains, -np.logaddexp(0.0, belief), 0.0)  # log P(not a holder)
            others = np.minimum(absent.sum(axis=0) - absent, -1e-12)
            fresh = np.where(explains, -np.log(-np.expm1(others)), 0.0)
            news = 0.5 * news + 0.5 * np.minimum(fresh, SURE)
        belief = base + news.sum(axis=1)
        # Rounds that overlap are counted too often; nobody has more holders than the prior allows.
        most = int(np.flatnonzero(prior).max(initial=1))
        for _ in range(SWEEPS):
            if (found := _odds_to_shares(belief)).sum() <= most:
                break
            belief = belief - 1.0
        return found


def _odds_to_shares(log_odds: Floats) -> Floats:
    return np.asarray(np.exp(-np.logaddexp(0.0, -log_odds)), dtype=np.float64)


def _classes(explains: Bits) -> tuple[Words, Indices]:
    """Clients that explain the same rounds: the rounds each class leaves open, and whose is which.

    (classes, words) and (candidates,).
    """
    octets = np.packbits(~explains, axis=1)
    words = np.zeros((len(explains), max(1, -(-octets.shape[1] // 8))), dtype=np.uint64)
    words.view(np.uint8)[:, : octets.shape[1]] = octets
    if words.shape[1] == 1:
        left, of = np.unique(words[:, 0], return_inverse=True)
        return left[:, None], of
    left, of = np.unique(words, axis=0, return_inverse=True)
    return left, of.reshape(-1)


def _up_to_three(left: Words, of: Indices, w: Floats, weights: Floats) -> Floats | None:
    """Marginals over sets of at most three, by `_classes`; None if no set explains the row.

    In the sums, a, b and c are different classes, and x is another member of u's class.
    """
    if not len(left):  # everybody is excluded
        return np.zeros(len(w)) if weights[0] > 0.0 else None
    alone = np.asarray(~left.any(axis=1))
    both = left[:, None] & left
    two = np.asarray(~both.any(axis=2))
    np.fill_diagonal(two, False)
    same = of[:, None] == of
    np.fill_diagonal(same, False)
    others = same @ w  # sum of w[x]
    one, pairs = (np.bincount(of, v, len(left)) for v in (w, w * others / 2))
    with_b = (two @ one)[of]
    company = [alone[of].astype(np.float64), with_b + alone[of] * others]  # of u, by set size
    if len(weights) > 3:
        place = np.arange(len(left))
        three = np.ones((len(left),) * 3, dtype=np.bool_)
        for word in range(left.shape[1]):
            three &= (both[:, :, None, word] & left[:, word]) == 0
        three[place, place] = three[place, :, place] = three[:, place, place] = False
        with_bc = three.reshape(len(left), -1) @ np.outer(one, one).ravel() / 2
        company.append((with_bc + two @ pairs)[of] + others * with_b)
        for a in np.flatnonzero(alone):
            members = np.flatnonzero(of == a)
            if len(members) > 2:
                company[2][members] += _products_without(w[members], 3)[:, 2]
    total = weights[0]
    found = np.zeros(len(w))
    for h, (prior, rest) in enumerate(zip(weights[1:], company, strict=False), start=1):
        found += prior * w * rest
        total += prior * np.dot(w, rest) / h  # every set is counted by each of its members
    return np.clip(found / total, 0.0, 1.0) if total > 0.0 else None


def _smallest(possible: Bits) -> Indices:
    """Columns that include no other column; of equal ones the first."""
    columns = possible.astype(np.float32)
    sizes = columns.sum(axis=0)
    within = columns.T @ columns == sizes[:, None]  # [i, j]: column i is within column j
    place = np.arange(len(sizes))
    smaller = sizes[:, None] < sizes
    first = (sizes[:, None] == sizes) & (place[:, None] < place)
    return np.flatnonzero(~(within & (smaller | first)).any(axis=0))


def _reachable(steps: Sequence[_Step], columns: int, most: int) -> Masks | None:
    """Sets of explained rounds that `most` holders can get through, in ascending order.

    None if they are too many. One that can no longer be completed is left out.
    """
    states, used = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    most_by_one = max((sum(m for m, _, _ in s.moves).bit_count() for s in steps), default=0)
    halfway = any(len(step.moves) > 1 for step in steps)  # one holder passes through states
    if most * most_by_one < columns:
        return None
    for step in steps:
        further = states[used < most]
        holders = used[used < most] + 1
        for mask, _, _ in step.moves:
            further = np.concatenate([further, further | mask])
            holders = np.concatenate([holders, holders])
        states, used = np.concatenate([states, further]), np.concatenate([used, holders])
        worth = _count(states) + (most - used + halfway) * most_by_one >= columns
        order = np.lexsort((used[worth], states[worth]))
        states, used = states[worth][order], used[worth][order]
        fresh = np.append(True, states[1:] != states[:-1])
        states, used = states[fresh], used[fresh]
        if len(states) > MOST_STATES:
            return None
    return states


def _count(masks: Masks) -> Masks:
    """Bits that are set."""
    octets = np.ascontiguousarray(masks).view(np.uint8).reshape(len(masks), 8)
    return np.asarray(np.unpackbits(octets, axis=1).sum(axis=1), dtype=np.int64)


def _places(states: Masks, wanted: Masks) -> Indices:
    """Where each wanted state is; one past the last if it is not worth reaching, and so that is."""
    at = np.searchsorted(states, wanted)
    at[at == len(states)] = 0
    return np.append(np.where(states[at] == wanted, at, len(states)), len(states))


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
