"""Labels: everybody's true ratings, for scoring only, and what is public about a rating task."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from tessera.data.lastfm import RATINGS
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.learning.rating_models import FACTORS, NO_MASK, REFITTED
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.runs.folder import LABELS, RunFolder

Floats = npt.NDArray[np.float64]

LIKED: Final = 0.25
"""The part of the scale, from its top, that says "liked": 4 or more out of 1 to 5."""


@dataclass(frozen=True, slots=True)
class Rated:
    """One client's training ratings by item, ascending: what it gave, and what was taken off."""

    items: Ids = field(repr=False)
    labels: Floats = field(repr=False)
    base: Floats = field(repr=False)

    @property
    def masked(self) -> Floats:
        """What is federated: the rating less the mask, or less the global mean."""
        return self.labels - self.base

    def at(self, items: Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Where these items stand here, and which of them do."""
        at = np.minimum(np.searchsorted(self.items, items), max(len(self.items) - 1, 0))
        there = self.items[at] == items if len(self.items) else np.zeros(len(items), np.bool_)
        return at, there


@dataclass(frozen=True, slots=True)
class Labels:
    """A recorded rating task: truth by client; and the public mean, scale, and kind of mask."""

    of: Mapping[ClientId, Rated] = field(repr=False)
    mean: float
    low: float
    high: float
    step: float
    model: str
    mask: str
    penalty: float  # of a mask; 0: every client its own
    attributes: npt.NDArray[np.float32] | None = field(default=None, repr=False)  # of all items

    @property
    def liked(self) -> float:
        """The rating from which on a client liked an item."""
        return self.high - LIKED * (self.high - self.low)

    @property
    def is_masked(self) -> bool:
        return self.mask != NO_MASK

    @property
    def factorised(self) -> bool:
        """Whether factors are federated, and not a model of attributes."""
        return self.model == FACTORS

    @classmethod
    def read(cls, run: RunFolder) -> Self | None:
        """Those of a run's folder; None if it is not a rating task's."""
        path, plan = run.folder / LABELS, run.plan
        if not path.exists():
            return None
        try:
            raw = json.loads(path.read_text())
            of = {ClientId(int(client)): _rated(given) for client, given in raw.items()}
            mean = float(run.fact("setup", "mean"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{path}: not ratings by client: {error}", hint="it is written with the run"
            ) from error
        options = plan.task.options
        low, high, step = _scale(of)
        return cls(
            of=of,
            mean=mean,
            low=low,
            high=high,
            step=step,
            model=REFITTED if options.get("refit") else str(options.get("model", FACTORS)),
            mask=str(options.get("mask", _mask(of, mean))),
            penalty=float(options.get("penalty", 0.0)),
            attributes=_attributes(plan),
        )


def _attributes(plan: Plan) -> npt.NDArray[np.float32] | None:
    """What is publicly known of the items, if masks were made of it and the data is here."""
    read, options = RATINGS.get(plan.task.name), plan.task.options
    if read is None or options.get("mask", NO_MASK) == NO_MASK:
        return None
    own = inspect.signature(read).parameters  # the others are the model's
    try:
        data = read(**{name: value for name, value in options.items() if name in own})
    except ConfigError:
        return None  # not here: that attack is not tried
    return data.items.values


def _rated(given: Mapping[str, Any]) -> Rated:
    items = np.array(given["item"], dtype=np.uint64)
    labels, base = (np.array(given[name], dtype=np.float64) for name in ("label", "base"))
    if not items.shape == labels.shape == base.shape or items.ndim != 1:
        raise ValueError("not one label and one base for each item")
    order = np.argsort(items)
    return Rated(items[order], labels[order], base[order])


def _scale(of: Mapping[ClientId, Rated]) -> tuple[float, float, float]:
    """The scale is public. Everybody's ratings together have its ends, and its step."""
    values = np.unique(np.concatenate([np.zeros(0), *(rated.labels for rated in of.values())]))
    if len(values) < 2:
        raise ConfigError("ratings: all of them are equal", hint="there is nothing to find out")
    return float(values[0]), float(values[-1]), float(np.diff(values).min())


def _mask(of: Mapping[ClientId, Rated], mean: float) -> str:
    """For a task of one's own, without options: whether anything but the mean was taken off."""
    off = max((np.abs(rated.base - mean).max(initial=0.0) for rated in of.values()), default=0.0)
    return "its own" if off > 1e-3 else NO_MASK
