"""A validation part: the last tenth of every client's training examples, which nobody trains on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.data.classes import HELD
from tessera.data.examples import ClientData


def with_validation(data: ClientData) -> tuple[ClientData, ClientData]:
    """The population without the last tenth of each training part, rounded down; twice.

    The test part of the first is as it was, that of the second is what was held out.
    """
    counts = np.diff(data.offsets)
    kept = counts - np.floor(counts * HELD + 1e-9).astype(np.int64)
    place = np.arange(len(data.train)) - np.repeat(data.offsets[:-1], counts)
    held = place >= np.repeat(kept, counts)
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(kept)])
    fewer = replace(data, train=data.train.take(~held), offsets=ends)
    return fewer, replace(fewer, test=data.train.take(held), test_offsets=data.offsets - ends)
