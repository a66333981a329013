"""Set-up: what clients agree on before the first round, and what each then works out for itself.

A sum over all clients is taken first (`runs/setup.py`), through the secure sum where the scheme
has one: for ratings their number and their total, so that all know the mean. The mean is a release,
exact and to the server, too, or with noise, where a plan protects users; a run's folder says so.
Then every client fits its mask, if it has one, on its own ratings, and keeps it. Masks that are
fitted again in each round begin at the middle of the scale, and need no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from tessera.data.examples import LABEL, ClientData, Examples, SecretOf
from tessera.data.ratings import RatingData
from tessera.errors import ConfigError
from tessera.learning.models.features import FEATURES
from tessera.learning.models.masked import ClientMasks, MaskTraining, fit
from tessera.learning.rating_models import BASE

UNIT: Final = 2.0**-10
"""A rating is counted in these."""

Progress = Callable[[int, int], None]
"""(clients done, of how many)."""


@dataclass(frozen=True, slots=True)
class SetupResult:
    """The data as it is trained on, what a report says of the set-up, and what stays at clients.

    `indicator` is each client's own estimate of the privacy indicator, NaN without one.
    """

    data: ClientData
    facts: Mapping[str, Any]
    indicator: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    masks: ClientMasks | None = field(default=None, repr=False)


class Setup(Protocol):
    """What a task needs before its first round."""

    @property
    def sums(self) -> bool:
        """Whether that takes a sum over all clients."""

    @property
    def keeps(self) -> bool:
        """Whether a client keeps what it fits to its data, and trains over it."""

    def count(self, examples: Examples) -> npt.NDArray[np.int64]:
        """One client's part of the sum, whole numbers, equally many for everybody."""

    def spans(self, data: ClientData) -> npt.NDArray[np.float64]:
        """For each number of a part what one example adds at most: what noise on it is sized by."""

    def finish(
        self,
        data: ClientData,
        total: npt.NDArray[np.int64],
        secret_of: SecretOf,
        progress: Progress | None = None,
    ) -> SetupResult:
        """The data that is trained on, from the sum over all clients and each one's secret."""


@dataclass(frozen=True, slots=True)
class RatingSetup:
    """The global mean for everybody, then everybody's own base: that mean, or its mask's word.

    `features` are what a client knows of its examples, `attributes` what all know of their items.
    """

    mask: MaskTraining | None = None
    features: bool = False
    attributes: bool = False

    @property
    def sums(self) -> bool:
        return not self.attributes

    @property
    def keeps(self) -> bool:
        return self.mask is not None

    def count(self, examples: Examples) -> npt.NDArray[np.int64]:
        ratings = examples[LABEL].astype(np.float64)
        return np.array([len(ratings), round(float(ratings.sum()) / UNIT)], np.int64)

    def spans(self, data: ClientData) -> npt.NDArray[np.float64]:
        assert isinstance(data, RatingData)
        return np.array([1.0, max(abs(data.low), abs(data.high)) / UNIT])

    def described(self, data: RatingData, examples: Examples) -> Examples:
        """The examples with what is known of each, where the model wants it."""
        if not (self.features or self.attributes):
            return examples
        known = [data.items.values[examples["item"]]]
        if self.features:
            known.insert(0, data.profiles.values[examples["user"]])
        return examples.with_field(FEATURES, np.concatenate(known, axis=1, dtype=np.float32))

    def finish(
        self,
        data: ClientData,
        total: npt.NDArray[np.int64],
        secret_of: SecretOf,
        progress: Progress | None = None,
    ) -> SetupResult:
        if not isinstance(data, RatingData):
            raise ConfigError(f"task {data.name!r} has no ratings to set up")
        if self.sums:
            count, summed = (int(word) for word in total)
            # With noise both may be anything; the scale is public.
            mean = float(np.clip(summed * UNIT / max(count, 1), data.low, data.high))
            facts: dict[str, Any] = {"mean": mean, "ratings": count}
        else:
            mean = (data.low + data.high) / 2.0
            facts = {"mean": mean}
        masks = None
        if self.mask is not None:
            masks = fit(data, self.mask, mean=mean, secret_of=secret_of, progress=progress)
            facts["mask"] = {"order": self.mask.order, "penalty": self.mask.penalty, **masks.facts}
        base = (
            (np.full(len(data.train), mean, np.float32), np.full(len(data.test), mean, np.float32))
            if masks is None
            else (masks.train, masks.test)
        )
        train, test = data.train.with_field(BASE, base[0]), data.test.with_field(BASE, base[1])
        train, test = self.described(data, train), self.described(data, test)
        return SetupResult(
            replace(data, train=train, test=test),
            facts,
            None if masks is None else masks.indicator,
            masks,
        )
