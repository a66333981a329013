"""Gradients in sums: rows with one rater, whose they are, and what follows for the others.

A secure sum gives, for each row it opens, the number of ratings in it and the sum of their deltas.
Where that number is 1 the sum *is* one client's (e, e p), solved as in `gradient.py`. Three things
follow, and the second and third are not in the paper:

- the rating but for the client's own bias, with no name on it;
- *links*: all rows of one client have the same p, which differs from everybody else's, so that its
  sole rows are known to belong together. If each row hides its rater among the members of a group,
  the rater of all of them is a member of all the groups;
- *mixtures*: a row with several raters is the sum of e p over them: k + 1 equations for as many
  unknown e as there are raters, once their p is known. Every client with a sole row has revealed
  its p, so rows of such clients can be separated into single ratings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.ratings.gradient import Floats, factors_of, gradients
from tessera.audit.ratings.labels import Labels
from tessera.audit.ratings.plain_uploads import NEAR
from tessera.audit.ratings.record import RatingRound, SumRows
from tessera.audit.record import Record
from tessera.ids import ClientId
from tessera.learning.rating_models import ITEMS, USER_START
from tessera.learning.tables.submodel import Ids
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Plan
from tessera.rounds import schemes

SURE: Final = 4.0
"""Standard deviations by which something has to differ from what rounding does."""

AMPLE: Final = 20.0
"""An error this many times what rounding explains is large enough to divide by."""


@dataclass(frozen=True, slots=True)
class Linked:
    """Sole rows of one client: places in the sum, their x = r - base - c, and its factors.

    `weight` is the sum of their squared errors: the factors are as sharp as its root is large.
    """

    at: npt.NDArray[np.int64] = field(repr=False)
    ratings: Floats = field(repr=False)
    factors: Floats = field(repr=False)
    weight: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """A row of several raters, taken apart: which of the linked clients, and the x of each."""

    at: int
    raters: tuple[int, ...]
    ratings: tuple[float, ...]


def alone(rows: SumRows, training: LocalTraining) -> tuple[Floats, Floats, Floats]:
    """(e, p, x) of every row, each taken for one client's; wrong where there are several.

    Factors are NaN where the error is too small to divide by.
    """
    errors, products = gradients(rows.rows, rows.means, training, rows.round_id)
    enough = np.abs(errors) > AMPLE * rows.noise(training)
    factors = np.full_like(products, np.nan)
    factors[enough] = products[enough] / errors[enough, None]
    ratings = errors + np.einsum("nk,nk->n", rows.rows[:, :-1], factors) + rows.rows[:, -1]
    return errors, factors, ratings


def linked(rows: SumRows, training: LocalTraining) -> list[Linked]:
    """The rows with one rating, put together by whose they are; those that fit nobody or two are
    left out."""
    errors, products = gradients(rows.rows, rows.means, training, rows.round_id)
    noise = rows.noise(training)
    sole = np.flatnonzero((rows.counts == 1) & (np.abs(errors) > AMPLE * noise))
    found: list[list[int]] = []
    centres = np.zeros((0, products.shape[1]))
    # The largest errors first: they give the sharpest factors to compare the others with.
    for at in sole[np.argsort(-np.abs(errors[sole]))]:
        off = _misfit(products[at], errors[at], centres, noise)
        fits = np.flatnonzero(off < _close(products.shape[1]))
        if not len(fits):
            found.append([int(at)])
            centres = np.vstack([centres, products[at] / errors[at]])
        elif len(fits) == 1:
            whose = int(fits[0])
            found[whose].append(int(at))
            centres[whose] = factors_of(errors[found[whose]], products[found[whose]])
    groups = []
    for places, centre in zip(found, centres, strict=True):
        where = np.array(sorted(places), dtype=np.int64)
        x = errors[where] + rows.rows[where, :-1] @ centre + rows.rows[where, -1]
        groups.append(Linked(where, x, centre, float(errors[where] @ errors[where])))
    return groups


def mixtures(rows: SumRows, known: list[Linked], training: LocalTraining) -> list[Mixture]:
    """The rows of several ratings that linked clients explain to within rounding.

    The raters are picked one after the other (orthogonal matching pursuit), among directions made
    as different as they can be; as many as the count says, and not more than half the equations.
    Who is picked with an error that rounding explains is left out: it may be somebody else.
    """
    if not known:
        return []
    errors, products = gradients(rows.rows, rows.means, training, rows.round_id)
    total = np.column_stack([products, errors]) * rows.counts[:, None]
    atoms = np.column_stack([[g.factors for g in known], np.ones(len(known))])  # (clients, k + 1)
    weights = np.array([group.weight for group in known])
    noise = rows.noise(training)
    flat = _flattened(atoms, noise)
    room = min(len(known), atoms.shape[1] // 2)
    found = []
    for at in np.flatnonzero((rows.counts >= 2) & (rows.counts <= room)):
        count = int(rows.counts[at])
        picked = np.array(_picked(total[at], atoms, flat, count))
        chosen = atoms[picked]
        parts, *_ = np.linalg.lstsq(chosen.T, total[at], rcond=None)
        left = total[at] - parts @ chosen
        # The raters' own rounding, and that of the sole rows which gave their factors.
        spread = noise * np.sqrt(count + float(np.sum(parts * parts / weights[picked])))
        if np.sqrt(np.sum(left * left) / (len(left) - count)) > spread * _close(len(left) - count):
            continue
        sigma = spread * np.sqrt(np.diag(np.linalg.pinv(chosen @ chosen.T)))
        sure = np.abs(parts) > SURE * sigma
        x = parts + rows.rows[at, :-1] @ chosen[:, :-1].T + rows.rows[at, -1]
        if sure.any():
            raters, ratings = picked[sure].tolist(), x[sure].tolist()
            found.append(Mixture(int(at), tuple(raters), tuple(ratings)))
    return found


def _close(freedom: int) -> float:
    """Up to this many times its standard deviation the root mean square of noise may come."""
    return 1.0 + SURE / float(np.sqrt(2.0 * freedom))


def _misfit(product: Floats, error: float, centres: Floats, noise: float) -> Floats:
    """How far e p lies from e times each centre, in units of what rounding explains."""
    left = product - error * centres
    # The centre comes from a row at least as large: its own rounding is at most as much again.
    spread = noise * np.sqrt(2.0 * (1.0 + np.einsum("ck,ck->c", centres, centres)))
    return np.asarray(np.sqrt(np.mean(left * left, axis=1)) / spread)


def _flattened(atoms: Floats, noise: float) -> Floats:
    """A map under which the atoms' directions share nothing that is more than noise."""
    values, vectors = np.linalg.eigh(atoms.T @ atoms)
    scale = 1.0 / np.sqrt(np.maximum(values, 0.0) + max(noise, 1e-12) ** 2 * len(atoms))
    return np.asarray((vectors * scale) @ vectors.T)


def _picked(total: Floats, atoms: Floats, flat: Floats, count: int) -> list[int]:
    target, dictionary = flat @ total, atoms @ flat
    dictionary /= np.linalg.norm(dictionary, axis=1, keepdims=True)
    picked: list[int] = []
    left = target
    for _ in range(count):
        score = np.abs(dictionary @ left)
        score[picked] = -1.0
        picked.append(int(np.argmax(score)))
        parts, *_ = np.linalg.lstsq(dictionary[picked].T, target, rcond=None)
        left = target - parts @ dictionary[picked]
    return sorted(picked)


# --- the attack -----------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenedSums:
    """Rows of one rating, whose they are, and rows of several that come apart."""

    plan: Plan
    labels: Labels = field(repr=False)
    starts: Floats | None = field(default=None, repr=False)  # factors that clients began with
    _sole: ClusteredTrials = field(default_factory=ClusteredTrials)
    _truly: ClusteredTrials = field(default_factory=ClusteredTrials)
    _mixed: ClusteredTrials = field(default_factory=ClusteredTrials)
    _identified: ClusteredTrials = field(default_factory=ClusteredTrials)
    _chance: float = 0.0
    _by_start: ClusteredTrials = field(default_factory=ClusteredTrials)
    _cohorts: float = 0.0

    def take(self, seen: RatingRound) -> None:
        total = seen.total
        if total is None:
            return
        training = self.plan.local_training
        raters = self._raters(seen)
        known = linked(total, training)
        whose = [self._whose(group, raters) for group in known]
        level: dict[ClientId, float] = {}
        right = 0
        for group, client in zip(known, whose, strict=True):
            if client is None:
                continue
            off = self._true(client, total.items[group.at]) - group.ratings
            level[client] = float(np.median(off))
            right += int((np.abs(off - level[client]) < NEAR * self.labels.step).sum())
        alone = sum(len(r) == 1 for r in raters)
        cluster = int(seen.round_id)
        self._sole.add(cluster, right, len(raters))
        self._truly.add(cluster, alone, len(raters))
        hits = 0
        for mixed in mixtures(total, known, training):
            item = total.items[mixed.at : mixed.at + 1]
            for place, x in zip(mixed.raters, mixed.ratings, strict=True):
                client = whose[place]
                if client is not None and client in raters[mixed.at]:
                    wrong = float(self._true(client, item)[0]) - x - level[client]
                    hits += int(abs(wrong) < NEAR * self.labels.step)
        self._mixed.add(cluster, hits, sum(len(r) for r in raters if len(r) > 1))
        self._identify(seen, known, whose)

    def _raters(self, seen: RatingRound) -> list[tuple[ClientId, ...]]:
        """For each row who truly has a rating in its sum."""
        assert seen.total is not None
        found: list[list[ClientId]] = [[] for _ in seen.total.items]
        for client in seen.survivors:
            items = self.labels.of[client].items
            if seen.groups is not None:
                items = np.intersect1d(items, seen.groups.get(client, items[:0]))
            at = np.flatnonzero(np.isin(seen.total.items, items))
            for place in at:
                found[int(place)].append(client)
        return [tuple(raters) for raters in found]

    def _whose(self, group: Linked, raters: list[tuple[ClientId, ...]]) -> ClientId | None:
        """The one client that truly has all of these rows, alone in each; None if there is none."""
        behind = {raters[int(at)] for at in group.at}
        (first,) = behind if len(behind) == 1 else ((),)
        return first[0] if len(first) == 1 else None

    def _true(self, client: ClientId, items: Ids) -> Floats:
        rated = self.labels.of[client]
        return rated.masked[rated.at(items)[0]]

    def _identify(
        self, seen: RatingRound, known: list[Linked], whose: list[ClientId | None]
    ) -> None:
        """Guess the client of linked rows: by their groups, and by what it began with."""
        cluster = int(seen.round_id)
        members = {c: self._behind(seen, c) for c in seen.survivors}
        rng = np.random.default_rng([cluster, 6])  # the same at every audit
        for group, client in zip(known, whose, strict=True):
            rows = len(group.at)
            in_all = [c for c, behind in members.items() if behind[group.at].all()]
            guess = in_all[int(rng.integers(len(in_all)))] if in_all else None
            self._identified.add(
                cluster, rows if guess is not None and guess == client else 0, rows
            )
            sizes = np.sum([behind[group.at] for behind in members.values()], axis=0)
            self._chance += float(np.sum(1.0 / np.maximum(sizes, 1)))
            if self.starts is not None:
                like = self._like(group.factors, seen.survivors, rng)
                self._by_start.add(cluster, rows if like == client else 0, rows)
                self._cohorts += rows / len(seen.survivors)

    def _like(
        self, factors: Floats, clients: tuple[ClientId, ...], rng: np.random.Generator
    ) -> ClientId:
        """The client whose first factors are most similar; ties are broken at random."""
        assert self.starts is not None
        first = self.starts[[int(c) for c in clients]]
        length = np.linalg.norm(first, axis=1)
        likeness = first @ factors / np.where(length > 0.0, length, 1.0)
        best = rng.permutation(np.flatnonzero(likeness == likeness.max()))
        return clients[int(best[0])]

    def _behind(self, seen: RatingRound, client: ClientId) -> npt.NDArray[np.bool_]:
        """The rows that this client may stand behind, as far as the server can tell."""
        assert seen.total is not None
        if seen.groups is None:
            return np.ones(len(seen.total.items), np.bool_)
        return np.isin(seen.total.items, seen.groups.get(client, np.zeros(0, np.uint64)))

    def findings(self) -> list[Finding]:
        identified, started = self._identified.trials, self._by_start.trials
        hidden = schemes.of(self.plan).rows.summed_over
        return [
            self._sole.finding(
                "secure sum: a row opens as one rating",
                claimed=self._truly.rate if self._truly.trials else 0.0,
                meaning="of the rows in it; claimed is the share with one true rater. Rating less "
                "mask and less the client's own level, without a name",
            ),
            self._mixed.finding(
                "secure sum: ratings of rows with several raters",
                claimed=0.0,
                meaning="that come apart, because clients with a row to themselves have given "
                "away the factors by which the others are solved",
            ),
            self._identified.finding(
                "secure sum: the client of a row of its own is identified",
                claimed=self._chance / identified if identified else 1.0,
                meaning=f"one row hides its client in {hidden}; rows with the same factors "
                "belong together, and their client is in the group of each",
            ),
            self._by_start.finding(
                "secure sum: the same, by the factors clients began with",
                claimed=self._cohorts / started if started else 1.0,
                meaning="where those follow from the plan's seed and the client's number: "
                "factors still resemble them after a few rounds",
            ),
        ]


def initial_factors(plan: Plan, clients: int) -> Floats:
    """What the clients of a plan begin with, (clients, k); everybody can work it out."""
    return np.full((clients, plan.table(ITEMS).width - 1), USER_START)


def with_initial_factors(record: Record) -> OpenedSums:
    plan, labels = record.plan, record.rated
    return OpenedSums(plan, labels, initial_factors(plan, len(labels.of)))
