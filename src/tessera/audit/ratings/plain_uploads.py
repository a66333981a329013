"""Uploads in the clear: ratings, or masked ratings, recovered from them, and what these reveal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import ClusteredTrials, Finding, FindingUnit, average
from tessera.audit.ratings.gradient import Floats, Profile, on_scale
from tessera.audit.ratings.labels import Labels, Rated
from tessera.audit.ratings.masks import BINS, PROPORTIONS, HitRates, best, liked, ranking, recovery
from tessera.audit.ratings.record import RatingRound
from tessera.ids import ClientId, RoundId
from tessera.learning.rating_models import mask_penalties
from tessera.plan import Plan

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
