"""A client's update as one contribution: cut to one length, with counts that say nothing.

At user level all that a client sends is one unit: dense part and all rows are scaled down together
to the clip. Weight and counts are 1 whatever data stands behind them, so that sums are divided by
numbers that are known: how many took part, and how many have the row at hand. They are no part of
what is clipped, since they are the same if the client sends zeros.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tessera.crypto.noise import DEVIATION, dense_noise, row_noise
from tessera.crypto.secret import Secret
from tessera.learning.tables.submodel import ModelUpdate, TableUpdate

Values = npt.NDArray[np.float64]


def clipped_update(update: ModelUpdate, clip: float) -> ModelUpdate:
    """At most `clip` long in all, weight and counts of 1; zeros where it was not finite."""
    parts = [np.asarray(update.dense, np.float64)]
    parts += [np.asarray(part.values, np.float64) for part in update.tables.values()]
    length = math.sqrt(sum(float(np.square(part).sum()) for part in parts))
    scale = 0.0 if not math.isfinite(length) else min(1.0, clip / length) if length else 1.0
    scaled = [part * scale if scale else np.zeros_like(part) for part in parts]
    return _replaced(update, scaled)


def noisy_update(update: ModelUpdate, clip: float, noise: float, secret: Secret) -> ModelUpdate:
    """A clipped update with the client's own noise on every value; in integers, towards zero."""
    unit = clip * noise / DEVIATION
    parts = [(update.dense, dense_noise(secret))]
    parts += [(part.values, row_noise(secret, name)) for name, part in update.tables.items()]
    noised: list[Values] = []
    for part, source in parts:
        drawn = source.draw(part.size).reshape(part.shape)
        noised.append(np.asarray((np.trunc(part / unit) + drawn) * unit, np.float64))
    return _replaced(update, noised)


def _replaced(update: ModelUpdate, parts: list[Values]) -> ModelUpdate:
    dense, *rows = parts
    tables = {
        name: TableUpdate(values, np.ones(len(values), np.int64))
        for name, values in zip(update.tables, rows, strict=True)
    }
    return ModelUpdate(dense, 1, tables)
