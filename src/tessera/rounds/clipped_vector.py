"""A client's update as one clipped vector of integers, and noise on it: pure functions.

Rows, dense part, counts and weight are clipped together, by the plan's public scales, and rounded
until the rounded vector is within the plan's bound (Kairouz, Liu, Steinke 2021, arXiv 2102.06387,
Algorithm 1, lines 5 to 7). What is rounded too long for many times in a row is cut towards zero,
which is within the bound always. An update that is not finite is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Words
from tessera.crypto.noise import DEVIATION, dense_noise, row_noise
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.ids import Party, RoundId
from tessera.learning.compression import signed
from tessera.learning.tables.submodel import Ids, ModelUpdate, TableUpdate
from tessera.plan.noisy_vector import NoisyVector

Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Asked = Callable[[], Integers]

ATTEMPTS: Final = 64
"""Each is within the bound with probability 0.39 at least."""
DENSE: Final = ""
"""The name of the dense part, of which the weight is the last value; no table is called so."""


@dataclass(frozen=True, slots=True, eq=False)
class ClippedVector:
    """Integers by part: the dense part with its weight, and of each table (rows, width + 1).

    `cut` says whether it was longer than the clip.
    """

    dense: Integers = field(repr=False)
    tables: Mapping[str, Integers] = field(repr=False)
    cut: bool = False

    @property
    def square(self) -> int:
        """The square of its length, exactly: no word has more than 2^30 in size."""
        parts = [self.dense, *self.tables.values()]
        return sum(int(np.square(part).sum()) for part in parts)


def clipped_vector(
    vector: NoisyVector,
    update: ModelUpdate,
    trained: Mapping[str, Ids],
    widths: Mapping[str, int],
    max_count: int,
    coins: Secret,
) -> ClippedVector:
    """The update as integers; `trained` are the rows of each table that it has deltas of."""
    with np.errstate(over="ignore", invalid="ignore"):  # found by the length
        parts = _weighted(vector, update, trained, widths, max_count)
        length = math.sqrt(sum(float(np.square(part).sum()) for part in parts.values()))
    if not math.isfinite(length):
        parts = {name: np.zeros_like(part) for name, part in parts.items()}
        length = 0.0
    # A hair less than the clip, so that rounding of floats cannot pass it.
    scale = 1.0 if length <= vector.top else vector.top * (1.0 - 1e-12) / length
    scaled = {name: part * scale for name, part in parts.items()}
    most = vector.bound**2
    for attempt in range(ATTEMPTS):
        rounded = _of({n: _rounded(part, n, attempt, coins) for n, part in scaled.items()}, scale)
        if rounded.square <= most:
            return rounded
    return _of({name: np.trunc(part).astype(np.int64) for name, part in scaled.items()}, scale)


def _of(parts: dict[str, Integers], scale: float) -> ClippedVector:
    tables = {name: part for name, part in parts.items() if name != DENSE}
    return ClippedVector(parts[DENSE], tables, scale < 1.0)


def _weighted(
    vector: NoisyVector,
    update: ModelUpdate,
    trained: Mapping[str, Ids],
    widths: Mapping[str, int],
    max_count: int,
) -> dict[str, Values]:
    """In integers per unit: each delta times its count, the count behind it; the weight last.

    Where counts are not sent everything weighs 1, and their place is 0.
    """
    counted = bool(vector.counts)
    weight = min(update.weight, max_count) if counted else 1
    dense = np.asarray(update.dense, dtype=np.float64) * (weight * vector.scale)
    found: dict[str, Values] = {DENSE: np.append(dense, weight * vector.count_scale)}
    for name, width in widths.items():
        values = np.zeros((len(trained[name]), width + 1))
        part = update.tables.get(name)
        if part is not None and len(values):
            counts = np.minimum(part.counts, max_count) if counted else np.ones(len(values))
            deltas = np.asarray(part.values, dtype=np.float64)
            values[:, :-1] = deltas * (counts[:, None] * vector.scale)
            values[:, -1] = counts * vector.count_scale
        found[name] = values
    return found


def _rounded(values: Values, name: str, attempt: int, coins: Secret) -> Integers:
    """Up or down to an integer, right on average; what is an integer stays, zeros too."""
    stream = Stream.of(coins, Label.ROUNDING, "vector", name, attempt)
    words = uniform(Ring(32), stream, values.size).reshape(values.shape)
    return np.floor(values + words.astype(np.float64) * 2.0**-32).astype(np.int64)


def within_bound(bound: float, ring: Ring, parts: Sequence[Words]) -> list[Words]:
    """One client's words, cut to the length of what an honest client may send.

    A longer vector is scaled down as a whole, towards zero.
    """
    values = [signed(part, ring) for part in parts]
    length = math.sqrt(sum(float(np.square(part.astype(np.float64)).sum()) for part in values))
    if length <= bound * (1.0 + 1e-9):  # floats may round up the length of an honest vector
        return list(parts)
    scale = bound / length
    return [ring.from_ints(np.trunc(part * scale).astype(np.int64)) for part in values]


def noise_stream(secret: Secret, round_id: RoundId, sender: Party, part: str) -> Stream:
    """What the noise of one party in one round follows from: sent again, it is the same."""
    name = sender if isinstance(sender, str) else int(sender)
    return Stream.of(secret, Label.SUM_NOISE, int(round_id), name, part)


# --- in real numbers -----------------------------------------------------------------------------
#
# Where a client adds all of the noise itself, all that it sends is one unit: dense part and all
# rows are scaled down together to the clip. Weight and counts are 1 whatever data stands behind
# them, so that sums are divided by numbers that are known: how many took part, and how many have
# the row at hand. They are no part of what is clipped, since they are the same if the client sends
# zeros.


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


# --- bounds of sums -------------------------------------------------------------------------------
#
# A secure sum hides who added what, so that one client could add anything. What it cannot do is
# stay unnoticed beyond these bounds. A client's count of a row is between 0 and `max_count`; where
# it is 0 its delta is 0, and else the delta times the count is cut to `clip`. Over n clients a row
# with count s has therefore at most min(n, s) clips behind it, and its mean is within one clip.
# The dense part is bounded by the weight in the same way.
#
# Where noise is integers on the sum, every client's vector is within a bound as a whole, and sums
# are wider by the noise, which is in them before they are looked at. Counts have noise, too: they
# may be negative, and a sum is divided by 1 at least. Where none are sent, it is divided by the
# number of clients, or of those that asked for the row.
#
# A row that is out of bounds is not merged and stays as it was; a round whose dense part is out of
# bounds is not merged at all. Within its bounds a lying client still adds what it likes.


@dataclass(frozen=True, slots=True, kw_only=True)
class SumBounds:
    """Of sums over `clients` inputs, in the integers of the quantiser."""

    clients: int
    top: int  # the integer that stands for `clip`
    max_count: int

    def rows_within(self, values: Integers, counts: Integers) -> npt.NDArray[np.bool_]:
        """For each row whether its values (rows, width) and its count are possible."""
        fits = (counts >= 0) & (counts <= self.clients * self.max_count)
        most = np.minimum(np.clip(counts, 0, None), self.clients) * self.top
        within: npt.NDArray[np.bool_] = fits & (np.abs(values) <= most[:, None]).all(axis=1)
        return within

    def examples(self, counts: Integers, asked: Asked | None = None) -> Integers:
        """The numbers that sums are divided by, from the sums of counts as they were opened.

        `asked` says how many clients of the sum asked for each row, where they did.
        """
        return counts

    def dense_within(self, values: Integers, weight: int) -> bool:
        """Whether these sums with this weight are possible."""
        return bool(self.rows_within(values[None, :], np.array([weight], dtype=np.int64))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedBounds(SumBounds):
    """The same where every client's input is one clipped vector, and noise is on the sum."""

    vector: NoisyVector

    def rows_within(self, values: Integers, counts: Integers) -> npt.NDArray[np.bool_]:
        most = self.clients * math.ceil(self.vector.bound) + self.vector.tail
        fits = (counts >= -self.vector.tail) & (counts <= most)
        return np.asarray(fits & (np.abs(values) <= most).all(axis=1), dtype=np.bool_)

    def examples(self, counts: Integers, asked: Asked | None = None) -> Integers:
        """Without counts they are of clients: all, or those that asked for a row."""
        if not self.vector.counts:
            return np.maximum(np.full_like(counts, self.clients) if asked is None else asked(), 1)
        return np.maximum(np.rint(counts / self.vector.count_scale), 1.0).astype(np.int64)
