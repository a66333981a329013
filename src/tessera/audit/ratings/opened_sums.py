"""Openings: what sums of ratings' gradients give away, round by round, beside what they claim."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.ratings.gradient import Floats
from tessera.audit.ratings.labels import Labels
from tessera.audit.ratings.plain_uploads import NEAR
from tessera.audit.ratings.record import RatingRound
from tessera.audit.ratings.sums import Linked, linked, mixtures
from tessera.ids import ClientId
from tessera.learning.rating_models import ITEMS, USER_START
from tessera.learning.tables.arrays import Ids
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Plan
from tessera.rounds import schemes


@dataclass(slots=True)
class OpenedSums:
    """Rows of one rating, whose they are, and rows of several that come apart."""

    plan: Plan
    labels: Labels = field(repr=False)
    starts: Floats | None = field(default=None, repr=False)  # factors that clients began with
    _sole: ClusteredTrials = field(default_factory=ClusteredTrials)
    _truly: ClusteredTrials = field(default_factory=ClusteredTrials)
    _mixed: ClusteredTrials = field(default_factory=ClusteredTrials)
    _named: ClusteredTrials = field(default_factory=ClusteredTrials)
    _chance: float = 0.0
    _by_start: ClusteredTrials = field(default_factory=ClusteredTrials)
    _cohorts: float = 0.0

    def take(self, seen: RatingRound) -> None:
        total = seen.total
        if total is None:
            return
        training = self.plan.training or LocalTraining()
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
        self._name(seen, known, whose)

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

    def _name(self, seen: RatingRound, known: list[Linked], whose: list[ClientId | None]) -> None:
        """Guess the client of linked rows: by their groups, and by what it began with."""
        cluster = int(seen.round_id)
        members = {c: self._behind(seen, c) for c in seen.survivors}
        rng = np.random.default_rng([cluster, 6])  # the same at every audit
        for group, client in zip(known, whose, strict=True):
            rows = len(group.at)
            in_all = [c for c, behind in members.items() if behind[group.at].all()]
            guess = in_all[int(rng.integers(len(in_all)))] if in_all else None
            self._named.add(cluster, rows if guess is not None and guess == client else 0, rows)
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
        named, started = self._named.trials, self._by_start.trials
        hidden = "its group" if schemes.of(self.plan).by_rows else "the whole cohort"
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
            self._named.finding(
                "secure sum: the client of a row of its own is identified",
                claimed=self._chance / named if named else 1.0,
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
