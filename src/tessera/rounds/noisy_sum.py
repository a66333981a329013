"""Noise that a trusted server adds to the sum it has opened, before it looks at it.

A client's vector is clipped, rounded and within a bound (`clipped_vector.py`). The server adds
integer noise to every word of the opened sum in the ring, before the sum is centred: what is
centred, judged and merged, and what clients are told of it, follows from noisy words alone. Noise
on a centred sum would not do: a lying client can put the others at the wrap of the ring, where one
integer more or less changes the sum by 2^b.

The ring has room for all clients and for the noise, but for 2^-40 in a round (`NoisyVector.tail`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.noise import DEVIATION, Gaussian, dense_noise, row_noise
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.averaging import TableMean
from tessera.plan import NoiseFrom, Plan
from tessera.privacy.dp.subjects import Printed
from tessera.protocols.secagg.phases import StageSum
from tessera.rounds import as_printed, dp
from tessera.rounds.clipped_vector import add_noise, noise_stream
from tessera.rounds.encode import RoundResult


def noisy_total(plan: Plan, total: StageSum, secret: Secret, round_id: RoundId) -> StageSum:
    """An opened sum with the noise of the server; as it is, where the server adds none."""
    if plan.noisy_vector is None or dp.section(plan).trust is not NoiseFrom.SERVER:
        return total
    dense = add_noise(plan, total.dense, noise_stream(secret, round_id, SERVER, "dense"))
    tables = {}
    for table, part in total.tables.items():
        stream = noise_stream(secret, round_id, SERVER, f"table {int(table)}")
        words = add_noise(plan, part.words.reshape(-1), stream).reshape(part.words.shape)
        tables[table] = replace(part, words=words)
    return replace(total, dense=dense, tables=tables)


def printed_result(
    plan: Plan,
    result: RoundResult,
    entropy: Entropy,
    round_id: RoundId,
    largest: Mapping[ClientId, int] | None = None,
) -> RoundResult:
    """Line 17 of `CentralSubDP`, as printed: noise of sigma_Z C on every client's mean gradient.

    `largest` has what clients say beside their gradients: the most examples of one person in a
    batch. What is summed are steps: means times the rate of the round, for rows times that of
    tables. Other plans' results are as they were.
    """
    if plan.dp is None or plan.dp.printed is not Printed.CENTRAL:
        return result
    said = largest or {}
    missing = [client for client in result.survivors if client not in said]
    if missing:
        raise MisuseError(f"CentralSubDP: client {missing[0]} has not said its Z")
    assert plan.training is not None
    secret = entropy.secret(Label.SERVER_NOISE, plan.federation, int(round_id))
    noise, clip = as_printed.noise(plan), dp.section(plan).clip
    parts = sum(noise.units(said[client]) for client in result.survivors)
    step = plan.training.rate_in(int(round_id)) * clip * noise.unit / DEVIATION

    def drawn(source: Gaussian, shape: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        steps = np.full(shape[0], parts, np.int64)
        return source.owed(steps, shape[1]).astype(np.float64) * step

    tables = {}
    for name, part in result.tables.items():
        rows = drawn(row_noise(secret, name), part.mean.shape) * plan.training.table_rate
        tables[name] = TableMean(
            part.ids, part.mean + rows / np.maximum(part.counts, 1)[:, None], part.counts
        )
    dense = drawn(dense_noise(secret), (result.dense.size, 1))[:, 0] / max(result.weight, 1)
    return replace(result, dense=result.dense + dense, tables=tables)
