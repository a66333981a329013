"""Noise that a trusted server adds to a round's sums, before anybody else sees what comes of them.

Every client's contribution is at most `clip` long before it is rounded to the quantiser's integers,
each value up or down by a coin. Rounded, it is at most `rounded_length` long, but for a probability
of `dp.ROUNDED_LONGER` (Kairouz, Liu, Steinke 2021, arXiv 2102.06387, section 4.2), which is charged
to delta; the noise is for that length.

Sum and noise are multiples of one unit, a fraction of the quantiser's step: else a reader who knows
both grids could take them apart again. The unit is so small that the noise is at most half a per
cent larger than it has to be, and never smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.noise import DEVIATION, Gaussian, dense_noise, row_noise
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import TableMean
from tessera.learning.quantize import Quantizer
from tessera.privacy.subjects import Printed
from tessera.rounds import as_printed, dp, schemes
from tessera.rounds.encode import RoundResult
from tessera.rounds.plan import NoiseFrom, Plan

LEAST_DRAWS: Final = 100
"""Integers of noise that one value adds up, at least: what is rounded up is less than 1 of them."""
COARSEST: Final = 3.0
"""Deviations of noise are at least so many steps of the quantiser."""


def rounded_length(clip: float, step: float, values: int) -> float:
    """How long a contribution of this length and so many values can be once it is rounded."""
    spread = (
        math.sqrt(2.0 * math.log(1.0 / dp.ROUNDED_LONGER))
        * step
        * (clip + math.sqrt(values) * step / 2.0)
    )
    return math.sqrt(clip**2 + values * step**2 / 4.0 + spread)


def noisy_result(
    plan: Plan,
    result: RoundResult,
    entropy: Entropy,
    round_id: RoundId,
    largest: Mapping[ClientId, int] | None = None,
) -> RoundResult:
    """The means that follow from the sums with noise, where the server adds it.

    `largest` has what clients of `CentralSubDP` say beside their gradients: the most examples of
    one person in a batch.
    """
    if plan.dp is None or plan.dp.trust is not NoiseFrom.SERVER:
        return result
    secret = entropy.secret(Label.SERVER_NOISE, plan.federation, int(round_id))
    if plan.dp.printed is Printed.CENTRAL:
        return printed_result(plan, result, secret, round_id, largest or {})
    dense = SumNoise(plan, plan.dense_quantizer, dense_noise(secret))
    rows = plan.quantizer if schemes.of(plan).by_rows or plan.counts_rows else plan.dense_quantizer
    tables = {}
    for name, part in result.tables.items():
        noise = SumNoise(plan, rows, row_noise(secret, name))
        drawn = noise.draw(part.mean.shape)
        tables[name] = TableMean(
            part.ids, part.mean + drawn / np.maximum(part.counts, 1)[:, None], part.counts
        )
    mean = result.dense + dense.draw((1, result.dense.size))[0] / max(result.weight, 1)
    return replace(result, dense=mean, tables=tables)


def printed_result(
    plan: Plan,
    result: RoundResult,
    secret: Secret,
    round_id: RoundId,
    largest: Mapping[ClientId, int],
) -> RoundResult:
    """Line 17 of Algorithm 1, as printed: noise of sigma_Z C on every client's mean gradient.

    What is summed are steps: means times the rate of the round, for rows times that of tables.
    """
    missing = [client for client in result.survivors if client not in largest]
    if missing:
        raise MisuseError(f"CentralSubDP: client {missing[0]} has not said its Z")
    assert plan.training is not None
    noise, clip = as_printed.noise(plan), dp.section(plan).clip
    parts = sum(noise.units(largest[client]) for client in result.survivors)
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


class SumNoise:
    """Noise on sums of one quantiser's integers."""

    def __init__(self, plan: Plan, quantizer: Quantizer, source: Gaussian) -> None:
        section = dp.section(plan)
        step = quantizer.clip / quantizer.top
        longest = rounded_length(section.clip, step, plan.full_length)
        wanted = section.noise * longest
        if wanted < COARSEST * step:
            raise ConfigError(
                f"[dp] noise = {section.noise:g} is below the quantiser's step of {step:.3g}",
                hint="raise levels in [update], or lower its clip",
            )
        parts = math.ceil(math.sqrt(LEAST_DRAWS) * step * DEVIATION / wanted)
        self._unit = step / parts
        self._draws = math.ceil((wanted / (self._unit * DEVIATION)) ** 2)
        self._source = source

    @property
    def deviation(self) -> float:
        return math.sqrt(self._draws) * DEVIATION * self._unit

    def draw(self, shape: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Noise for rows of values."""
        count, width = shape
        steps = np.full(count, self._draws, dtype=np.int64)
        return self._source.owed(steps, width).astype(np.float64) * self._unit
