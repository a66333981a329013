"""Parts of a data set: who holds which examples, and what is tested on.

The sets of Cui et al. 2022, section 7.3, know no users: their training examples are shuffled and
dealt out, equally many to everybody, as McMahan et al. 2017 do where clients are all alike. So are
the published test examples, which only a federated metric looks at client by client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data.examples import ClientData, Examples
from tessera.errors import ConfigError

TEST: Final = "test"
VALIDATION: Final = "validation"
HELD: Final = 0.1
"""Share of the training examples that is held out to tune settings on."""


def spread_evenly(
    name: str,
    train: Examples,
    test: Examples,
    *,
    clients: int,
    seed: int,
    part: str = TEST,
    sizes: Mapping[str, int],
    facts: Mapping[str, Any],
) -> ClientData:
    """Everybody gets as many examples as the others, or one more, drawn by the seed.

    With `part` "validation" the model is tested on a tenth of the training examples, which nobody
    trains on then, and the published test part is not looked at.
    """
    if part not in (TEST, VALIDATION):
        raise ConfigError(f"{name}: part = {part!r}", hint=f"{TEST} or {VALIDATION}")
    if not 1 <= clients <= len(train):
        raise ConfigError(
            f"{name}: {clients} clients for {len(train):,} examples",
            hint="at least one client, and an example for each",
        )
    rng = np.random.default_rng([seed, 17])
    train = train.take(rng.permutation(len(train)))
    if part == VALIDATION:
        held = round(HELD * len(train))
        train, test = train.take(slice(held, None)), train.take(slice(0, held))
    return ClientData(
        name=name,
        train=train,
        offsets=_dealt(len(train), clients),
        test=test.take(rng.permutation(len(test))),
        test_offsets=_dealt(len(test), clients),
        sizes=sizes,
        facts={
            **facts,
            "split": "published test part" if part == TEST else "a tenth of the training part",
            "clients": f"{clients:,}, examples dealt out by chance (seed {seed})",
        },
    )


def _dealt(examples: int, clients: int) -> npt.NDArray[np.int64]:
    """Bounds of parts that differ by one example at most."""
    return np.arange(clients + 1, dtype=np.int64) * examples // clients


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
