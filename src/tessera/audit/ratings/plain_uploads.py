"""Uploads in the clear: ratings, or masked ratings, recovered from them, and what these reveal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import ClusteredTrials, Finding, FindingUnit, average
from tessera.audit.ratings.gradient import Floats, Profile, on_scale
from tessera.audit.ratings.labels import Labels, Rated
from tessera.audit.ratings.record import RatingRound
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.rating_models import INTERCEPT, mask_penalties
from tessera.plan import Plan

# --- masks of ratings -----------------------------------------------------------------------------
#
# Masks: what masked ratings of matrix factorisation reveal about the ratings.
#
# Three attacks. *Recovery* and *ranking* are those of Yang et al., *Practical and Secure Federated
# Recommendation with Personalized Masks*, section 4.2; *inversion* is not in the paper.
#
# Ratings of all clients stand in one array, one client's after the other's; client c has those from
# `offsets[c]` to `offsets[c + 1]`.

Numbers: TypeAlias = npt.NDArray[np.floating[Any]]
Offsets: TypeAlias = npt.NDArray[np.integer[Any]]
Counts: TypeAlias = npt.NDArray[np.int64]

BINS: Final = ("0-.2", ".2-.4", ".4-.6", ".6-.8", ".8-1")
"""The bins of Tables 2 and 3 in Yang et al. 2021; the last one includes 1."""


@dataclass(frozen=True, slots=True)
class HitRates:
    """For each setting of an attack (an error level, a proportion) and client: hits of trials."""

    settings: tuple[float, ...]
    hits: Counts = field(repr=False)  # (settings, clients)
    trials: Counts = field(repr=False)

    @property
    def binned(self) -> npt.NDArray[np.float64]:
        """(settings, bins): the share of clients with a rate in each bin; clients without a
        trial are in none."""
        with_any = self.trials > 0
        # In whole numbers, so that 2 of 5 is not a hair below .4.
        bins = np.minimum(len(BINS) * self.hits // np.maximum(self.trials, 1), len(BINS) - 1)
        counted = [
            np.bincount(row[kept], minlength=len(BINS))
            for row, kept in zip(bins, with_any, strict=True)
        ]
        return np.asarray(np.array(counted) / np.maximum(with_any.sum(axis=1), 1)[:, None])

    @property
    def pooled(self) -> npt.NDArray[np.float64]:
        """For each setting the rate over all ratings."""
        return np.asarray(self.hits.sum(axis=1) / np.maximum(self.trials.sum(axis=1), 1))

    @property
    def by_client(self) -> npt.NDArray[np.float64]:
        """For each setting the mean of the clients' rates."""
        with_any = self.trials > 0
        rates = self.hits / np.maximum(self.trials, 1)
        return np.asarray(rates.sum(axis=1) / np.maximum(with_any.sum(axis=1), 1))


def owners(offsets: Offsets, *arrays: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Whose each rating is, by place; refuses arrays that are not as long as the offsets say."""
    sizes = np.diff(offsets)
    if len(offsets) < 1 or offsets[0] != 0 or (sizes < 0).any():
        raise MisuseError("ratings: offsets begin at 0 and do not fall")
    if any(array.shape != (int(offsets[-1]),) for array in arrays):
        raise MisuseError("ratings: not one value per rating")
    return np.repeat(np.arange(len(sizes)), sizes)


def extremes(values: Numbers, offsets: Offsets) -> tuple[Numbers, Numbers]:
    """The least and the greatest value of each client; NaN for one that has none."""
    low, high = (np.full(len(offsets) - 1, np.nan) for _ in range(2))
    some = np.flatnonzero(np.diff(offsets) > 0)
    if some.size:
        starts = np.asarray(offsets, np.int64)[some]
        low[some] = np.minimum.reduceat(values, starts)
        high[some] = np.maximum.reduceat(values, starts)
    return low, high


# --- recovery -------------------------------------------------------------------------------------
#
# Section 4.2.1: masked ratings stretched to the range that the client's true ratings are known to
# have. A rating is recovered at error level g if the stretched value is off by less than g steps of
# the scale. The text leaves the unit of g open, and compares with another letter than g; its Table
# 2 is for a scale in steps of half a star, so that its g = 1 reads as "off by less than half a
# star". A level is another thing on another scale; `within` gives distances in the ratings' unit.

LEVELS: Final = (1.0, 2.0, 3.0, 4.0, 5.0)
"""The error levels of Table 2, in steps of the scale."""


def stretched(
    masked: Numbers, offsets: Offsets, low: Numbers, high: Numbers
) -> npt.NDArray[np.float64]:
    """Each client's values, moved and scaled so that they reach from `low` to `high`.

    A client whose values are all equal gets the middle of its range: nothing says which end.
    """
    owner = owners(offsets, masked)
    least, most = extremes(masked, offsets)
    width = np.where(most > least, most - least, 1.0)
    place = np.where(most > least, 0.0, 0.5)[owner] + (masked - least[owner]) / width[owner]
    return np.asarray(low[owner] + place * (high - low)[owner], np.float64)


def recovery(
    masked: Numbers,
    true: Numbers,
    offsets: Offsets,
    *,
    step: float = 0.0,
    levels: Sequence[float] = LEVELS,
    within: Sequence[float] = (),
    low: Numbers | None = None,
    high: Numbers | None = None,
) -> HitRates:
    """How many of each client's ratings come back, at each level or distance.

    Settings are `levels` times `step`, or the distances `within`, as they stand. The attacker knows
    each client's lowest and highest rating (`low`, `high`; those of `true` if left out).
    """
    owner = owners(offsets, masked, true)
    if low is None or high is None:
        low, high = extremes(true, offsets)
    if not within and step <= 0.0:
        raise MisuseError("recovery: error levels are steps of a scale, and there is none")
    distances = tuple(within) or tuple(level * step for level in levels)
    error = np.abs(stretched(masked, offsets, low, high) - true)
    clients = len(offsets) - 1
    hits = [np.bincount(owner[error < d], minlength=clients) for d in distances]
    trials = np.broadcast_to(np.diff(offsets), (len(distances), clients))
    settings = tuple(within) or tuple(levels)
    return HitRates(settings, np.array(hits, np.int64), trials.astype(np.int64))


# --- ranking --------------------------------------------------------------------------------------
#
# Section 4.2.2: which items a client rated highest, read off the order of its masked ratings. The
# attacker takes the top proportion h of a client's items by masked rating, and the hit
# ratio is the share of them that are in the true top set. On a scale of five values that set is
# mostly chosen among equals: of forty items rated 5, four are "the top tenth", and whoever picks
# another of the forty has missed, by this count. So hits are counted `fair`, too: an item is one
# if it is rated as high as the last of the true top set. And there is a question without a cut:
# how well do masked ratings tell items that a client liked from the others (`liked`)?


PROPORTIONS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The top proportions of Table 3."""


def ranking(
    masked: Numbers,
    true: Numbers,
    offsets: Offsets,
    *,
    rng: np.random.Generator,
    fair: bool = False,
    proportions: Sequence[float] = PROPORTIONS,
) -> HitRates:
    """Of the items picked by masked rating, how many are in each client's true top set.

    A set has the proportion's number of items, rounded, and at least one. Equal ratings are put in
    random order, drawn anew for either set: who picks does not know how the true set was drawn.
    """
    owner = owners(offsets, masked, true)
    sizes = np.diff(offsets)
    guess, truth = (_places(values, owner, offsets, rng) for values in (masked, true))
    hits, trials = [], []
    for proportion in proportions:
        top = np.where(sizes > 0, np.maximum(1, np.floor(proportion * sizes + 0.5)), 0)
        picked, right = (places < top[owner] for places in (guess, truth))
        if fair:
            last = np.full(len(sizes), np.inf)
            np.minimum.at(last, owner[right], true[right])
            right = true >= last[owner]
        hits.append(np.bincount(owner[picked & right], minlength=len(sizes)))
        trials.append(top)
    return HitRates(tuple(proportions), np.array(hits, np.int64), np.array(trials, np.int64))


def liked(masked: Numbers, true: Numbers, offsets: Offsets, *, least: float) -> Numbers:
    """Each client's AUC of masked ratings for "rated `least` or more"; NaN without both kinds.

    It is the chance that an item the client liked stands above one it did not, ties half: .5 says
    nothing, 1 says all.
    """
    owner = owners(offsets, masked, true)
    clients = len(offsets) - 1
    order = np.lexsort((masked, owner))
    value, whose, good = masked[order], owner[order], true[order] >= least
    first = np.ones(len(order), np.bool_)
    first[1:] = (value[1:] != value[:-1]) | (whose[1:] != whose[:-1])
    group = np.cumsum(first) - 1
    likes = np.bincount(group, weights=good, minlength=1)
    others = np.bincount(group, weights=~good, minlength=1)
    by_group = whose[first]  # whose values these are
    bad, total = (np.bincount(by_group, weights=w, minlength=clients) for w in (others, likes))
    before = np.cumsum(others) - others
    # A client's first group starts its count anew.
    start = np.concatenate([[0.0], np.cumsum(bad)])[by_group] if len(by_group) else before
    won = np.bincount(by_group, weights=likes * (before - start + others / 2), minlength=clients)
    pairs = bad * total
    return np.asarray(np.where(pairs > 0, won / np.maximum(pairs, 1.0), np.nan))


def _places(
    values: Numbers, owner: npt.NDArray[np.int64], offsets: Offsets, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """The place of each rating in its client's order, the highest first, from 0."""
    order = np.lexsort((rng.random(len(values)), -values, owner))
    places = np.empty(len(values), np.int64)
    places[order] = np.arange(len(values)) - np.asarray(offsets, np.int64)[owner[order]]
    return places


# --- inversion ------------------------------------------------------------------------------------
#
# The residual of a ridge regression determines what it subtracted.
#
# A mask of order one (`learning/models/private.py`) minimises |y - X w|^2 + w' D w over a client's
# ratings y less the global mean, X being public attributes of the items and D public penalties.
# What it leaves is s = y - X w. At the minimum D w = X' s, so that whoever has s has w = X' s / D,
# and
#
#     y  =  s + X D^-1 X' s
#
# with no unknown left: such a mask is a linear map that anybody can invert. It is not in the
# paper, which tries to guess ratings from masked ones as if the mask were noise. Where each client
# chooses its penalty among a few, the right one is that whose ratings lie on the scale. Masks of
# higher order start from this fit and, under penalties that serve the federation, end close to it:
# the same map then gives nearly all ratings, since what is left over is less than half a step of
# the scale.


def unmasked(masked: Floats, attributes: Floats, penalty: float) -> Floats:
    """Ratings less the global mean from what a linear mask left of them; a row of attributes each.

    With an infinite penalty there was no mask but a share of the client's mean.
    """
    weights = attributes.T @ masked / penalty
    return np.asarray(masked + attributes @ weights + masked.sum() / INTERCEPT)


def best(
    masked: Floats,
    attributes: Floats,
    penalties: Sequence[float],
    *,
    mean: float,
    low: float,
    high: float,
    step: float,
) -> Floats:
    """The ratings on the scale under the penalty that puts them there best.

    That there was no mask, because the client had too few ratings for one, is tried as well.
    """
    tried = [masked, *(unmasked(masked, attributes, penalty) for penalty in penalties)]
    fit = [abs(np.exp(2j * np.pi * (y + mean - low) / step).mean()) for y in tried]
    return on_scale(tried[int(np.argmax(fit))] + mean, low, high, step)


NEAR: Final = 0.05
"""What was read back may be off by this much of a step: rounding is amplified on the way."""

HALF: Final = 0.5


class PlainUploads:
    """Uploads without a secure sum: ratings, or masked ratings, recovered from them."""

    def __init__(self, plan: Plan, labels: Labels) -> None:
        self._plan, self._labels = plan, labels
        self._training = plan.local_training
        self._profiles: dict[ClientId, Profile] = {}
        self._last: dict[ClientId, int] = {}
        self._silent: dict[ClientId, bool] = {}

    def take(self, seen: RatingRound) -> None:
        for client in seen.silent:
            self._silent[client] = True
        for client, upload in seen.uploads.items():
            profile = self._profiles.setdefault(client, Profile(self._training))
            between = range(self._last.get(client, int(seen.round_id)) + 1, int(seen.round_id))
            ideal = any(not self._plan.simulation.real(RoundId(r)) for r in between)
            profile.take(upload, unseen=ideal or self._silent.get(client, False))
            self._last[client], self._silent[client] = int(seen.round_id), False

    def findings(self) -> list[Finding]:
        return self._masked() if self._labels.is_masked else self._bare()

    def _bare(self) -> list[Finding]:
        labels = self._labels
        twice, once = ClusteredTrials(), ClusteredTrials()
        for client, profile in self._profiles.items():
            true = labels.of[client]
            items, values = profile.ratings()
            read = on_scale(values + labels.mean, labels.low, labels.high, labels.step)
            at, there = true.at(items)
            hits = int((np.abs(read - true.labels[at]) < NEAR * labels.step)[there].sum())
            (twice if profile.levelled else once).add(int(client), hits, len(true.items))
        return [
            twice.finding(
                "gradients in the open: ratings read back exactly",
                claimed=1.0,
                meaning="of clients with uploads in two rounds or more; sharing in the clear "
                "claims nothing",
            ),
            once.finding(
                "gradients in the open: the same after one round",
                claimed=1.0,
                meaning="of clients with one upload: their own level follows from the scale",
            ),
        ]

    def _masked(self) -> list[Finding]:
        labels, step = self._labels, self._labels.step
        found = self._gathered()
        off = [np.abs(v - t.masked) < NEAR * step for _, v, t in found]
        near = ClusteredTrials()
        for (client, _, true), hits in zip(found, off, strict=True):
            near.add(int(client), int(hits.sum()), len(true.items))
        recovered, as_paper, fairly, auc = _tried(found, labels)
        return [
            near.finding(
                "gradients in the open: masked ratings read back",
                claimed=1.0,
                meaning="rating less mask, off by less than a twentieth of a step; sharing in the "
                "clear claims nothing",
            ),
            _of_clients(
                recovered,
                f"masks: ratings recovered to within {HALF:g}",
                HALF,
                "Yang et al. 2021, 4.2.1: stretched to the client's known range; mean over clients",
            ),
            _of_clients(
                as_paper,
                "masks: top tenth found, as Yang et al. count",
                PROPORTIONS[0],
                "hit ratio of Yang et al. 2021, 4.2.2: items rated as high as the top set's last, "
                "but not drawn into it, count as missed",
            ),
            _of_clients(
                fairly,
                "masks: top tenth found, ties counted fairly",
                PROPORTIONS[0],
                "the same, where an item rated as high as the top set's last is a hit",
            ),
            average(
                f"masks: rated {labels.liked:.3g} or more, AUC",
                auc.tolist(),
                claimed=1.0,
                meaning="how often an item the client liked stands above one it did not, by masked "
                "ratings alone",
                unit=FindingUnit.AUC,
            ),
            *self._undone(found),
        ]

    def _undone(self, found: list[_Found]) -> list[Finding]:
        """Masks taken off as linear ones can be, where the items' attributes are at hand."""
        labels = self._labels
        if labels.attributes is None:
            return []
        penalties = mask_penalties(labels.penalty, labels.attributes)
        exact = ClusteredTrials()
        for client, values, true in found:
            read = best(
                values,
                labels.attributes[true.items].astype(np.float64),
                penalties,
                mean=labels.mean,
                low=labels.low,
                high=labels.high,
                step=labels.step,
            )
            hits = np.abs(read - true.labels) < NEAR * labels.step
            exact.add(int(client), int(hits.sum()), len(true.items))
        return [
            exact.finding(
                "masks: taken off, ratings exact",
                claimed=1.0,
                meaning="a ridge regression can be solved for the ratings from what it left of "
                "them; masks of higher order are near one",
            )
        ]

    def tables(self) -> dict[str, Any]:
        """Tables 2 and 3 of Yang et al. 2021: shares of clients by their rate, in five bins."""
        if not self._labels.is_masked or not self._profiles:
            return {}
        found, labels = self._gathered(), self._labels
        flat = _flat(found)
        rng = np.random.default_rng(0)
        levels = recovery(*flat, step=labels.step)
        return {
            "bins": list(BINS),
            "recovery": {f"{level:g}": row for level, row in _rows(levels)},
            "step": labels.step,
            "ranking": {f"{h:g}": row for h, row in _rows(ranking(*flat, rng=rng))},
            "ranking_fair": {f"{h:g}": row for h, row in _rows(ranking(*flat, rng=rng, fair=True))},
        }

    def _gathered(self) -> list[_Found]:
        """What was read of each client whose level is known, for all its ratings; 0 for one that
        is in no upload."""
        found: list[_Found] = []
        for client, profile in sorted(self._profiles.items()):
            true = self._labels.of[client]
            if not profile.levelled or not len(true.items):
                continue
            items, values = profile.ratings()
            at, there = true.at(items)
            every = np.zeros(len(true.items))
            every[at[there]] = values[there]
            found.append((client, every, true))
        return found


_Found = tuple[ClientId, Floats, Rated]


def _flat(found: list[_Found]) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """(masked, true, offsets) of all these clients."""
    sizes = [len(true.items) for _, _, true in found]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    masked = np.concatenate([np.zeros(0), *(values for _, values, _ in found)])
    return masked, np.concatenate([np.zeros(0), *(t.labels for _, _, t in found)]), offsets


def _tried(found: list[_Found], labels: Labels) -> tuple[HitRates, HitRates, HitRates, Floats]:
    flat = _flat(found)
    rng = np.random.default_rng(0)  # the same at every audit
    return (
        recovery(*flat, within=(HALF,)),
        ranking(*flat, rng=rng, proportions=PROPORTIONS[:1]),
        ranking(*flat, rng=rng, proportions=PROPORTIONS[:1], fair=True),
        np.asarray(liked(*flat, least=labels.liked)),
    )


def _rows(rates: HitRates) -> Iterable[tuple[float, list[float]]]:
    for setting, shares in zip(rates.settings, rates.binned, strict=True):
        yield setting, [round(float(share), 4) for share in shares]


def _of_clients(rates: HitRates, name: str, setting: float, meaning: str) -> Finding:
    at = rates.settings.index(setting)
    with np.errstate(invalid="ignore"):
        values = (rates.hits[at] / rates.trials[at]).tolist()
    return average(name, values, claimed=1.0, meaning=meaning)
