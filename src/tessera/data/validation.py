"""A validation part: the last tenth of every client's training examples, which nobody trains on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.data.classes import HELD
from tessera.data.examples import ClientData, Examples


def with_validation(data: ClientData) -> tuple[ClientData, Examples]:
    """The population without the last tenth of each training part, rounded down; and those."""
    counts = np.diff(data.offsets)
    kept = counts - np.floor(counts * HELD + 1e-9).astype(np.int64)
    place = np.arange(len(data.train)) - np.repeat(data.offsets[:-1], counts)
    held = place >= np.repeat(kept, counts)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(kept)])
    return replace(data, train=data.train.take(~held), offsets=offsets), data.train.take(held)
