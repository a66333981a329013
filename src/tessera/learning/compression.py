"""What an update becomes before it is sent: quantised, and only its largest changes (top-k).

Floats <-> group words: signed levels, stochastic rounding, and the room a cohort's sum needs.
A value in [-clip, clip] becomes one of `levels` integers, zero among them, so that a row nobody
trained adds exactly nothing. Rounding goes up with the probability that makes it right on average
(Niu et al. 2020, long version, VI); its random bits come from a cryptographic stream like every
other secret of a client, because they decide what the server sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Stream, uniform
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError

Floats = npt.NDArray[np.floating[Any]]


LEVELS: Final = 2**15
"""Values to which numbers are rounded, unless a plan says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """`levels` values from -clip to clip, and counts up to `max_count`, in one ring."""

    levels: int
    clip: float
    max_count: int

    def __post_init__(self) -> None:
        if not 3 <= self.levels <= 2**24:
            raise ConfigError(f"update: levels = {self.levels}", hint="levels is 3 to 2^24")
        if not 0.0 < self.clip < float("inf"):
            raise ConfigError(f"update: clip = {self.clip}", hint="clip is above 0, and finite")
        if not 1 <= self.max_count < 2**31:
            raise ConfigError(
                f"update: max_count = {self.max_count}", hint="max_count is 1 to 2^31 - 1"
            )

    @property
    def top(self) -> int:
        """The integer that stands for `clip`."""
        return (self.levels - 1) // 2

    def ring(self, cohort: int) -> Ring:
        """The narrowest ring in which no sum of a cohort wraps: half of it is for negatives."""
        largest = cohort * max(self.top, self.max_count)
        return Ring(max(8, largest.bit_length() + 1))

    def encode(self, values: Floats, ring: Ring, coins: Stream) -> npt.NDArray[Any]:
        """Rounded at random to a level above or below; `coins` is a stream for this array alone."""
        if not np.isfinite(values).all():
            raise MisuseError("update: a value that is not finite cannot be quantised")
        scaled = np.clip(values, -self.clip, self.clip) * (self.top / self.clip)
        words = uniform(Ring(32), coins, values.size).reshape(values.shape)
        rounded = np.floor(scaled + words.astype(np.float64) * 2.0**-32).astype(np.int64)
        return ring.from_ints(np.clip(rounded, -self.top, self.top).reshape(-1)).reshape(
            values.shape
        )

    def encode_counts(self, counts: npt.NDArray[Any], ring: Ring) -> npt.NDArray[Any]:
        """Counts as they are, cut at `max_count`."""
        if (counts < 0).any():
            raise MisuseError("update: a count is negative")
        cut = np.minimum(counts, self.max_count).astype(np.int64)
        return ring.from_ints(cut.reshape(-1)).reshape(counts.shape)

    def decode(self, total: npt.NDArray[Any], ring: Ring) -> npt.NDArray[np.float64]:
        """A sum of encodings as floats."""
        return signed(total, ring).astype(np.float64) * np.float64(self.clip / self.top)


def signed(words: npt.NDArray[Any], ring: Ring) -> npt.NDArray[np.int64]:
    """Words of Z_2^b as integers in [-2^(b-1), 2^(b-1)); b is at most 63 here."""
    if ring.limbs or ring.bits > 63:
        raise MisuseError(f"update: sums of {ring.bits} bits do not fit 64-bit integers")
    values = words.astype(np.int64)
    return np.where(values >= 1 << (ring.bits - 1), values - (1 << ring.bits), values)


# --- selection ------------------------------------------------------------------------------------
#
# Selection: the largest changes of a dense part, the only ones that are sent (top-k).
#
# Cui et al. 2022 select by element (section 7.3) or by row of a layer, a "mega-element", whose
# size is the sum of its absolute values (7.4). All is over the integers that updates are quantised
# to, so that what is sent and what is kept (`Residual`) add up to the update, to the bit. Which
# places there are follows from the plan; which of them a client chose follows from its data.
#
# By rows, only tensors of `ROWS` rows and more are cut, along their first dimension: there a row
# is a word or an item. Where a row is a filter or a unit, few of them are no small part of a
# network, and such tensors are sent whole.


Integers = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]
Shape = tuple[int, ...]

ROWS: Final = 1000
"""Rows of a tensor from which on it is cut into them."""


class TopBy(StrEnum):
    """What is selected: single elements, or rows of large tensors."""

    ELEMENT = "element"
    ROW = "row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A part of the dense vector as rows, of which no more than `most` are sent."""

    start: int
    rows: int
    width: int
    most: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.width

    def of(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """This part of a dense vector, (rows, width); a view."""
        return values[self.start : self.stop].reshape(self.rows, self.width)


def cuts(dense: int, shapes: Sequence[Shape], top: float, by: TopBy) -> tuple[Cut, ...]:
    """The parts of a dense vector in which a share of `top` is selected; the rest is sent whole."""
    if top == 1.0:
        return ()
    if by is TopBy.ELEMENT:
        return (Cut(start=0, rows=dense, width=1, most=_most(dense, top)),)
    return tuple(
        Cut(start=start, rows=shape[0], width=prod(shape[1:]), most=_most(shape[0], top))
        for start, shape in _placed(shapes)
        if len(shape) > 1 and shape[0] >= ROWS
    )


def _placed(shapes: Sequence[Shape]) -> Iterator[tuple[int, Shape]]:
    start = 0
    for shape in shapes:
        yield start, shape
        start += prod(shape)


def _most(rows: int, top: float) -> int:
    """At least one; a share of 0.07 is not to become one more by the way floats are rounded."""
    return max(1, ceil(round(top * rows, 6)))


def selected(values: Integers, cut: Cut) -> Places:
    """The rows that are sent, ascending: the largest, of equal ones the first, none of zeros."""
    size = np.abs(cut.of(values)).sum(axis=1)
    if cut.most < cut.rows:
        least = np.partition(size, cut.rows - cut.most)[cut.rows - cut.most]
        chosen = size > least
        equal = np.flatnonzero(size == least)
        chosen[equal[: cut.most - int(np.count_nonzero(chosen))]] = True
        size = np.where(chosen, size, 0)
    return np.flatnonzero(size)


def sent_of(values: Integers, parts: Sequence[Cut]) -> Integers:
    """A dense vector with zeros in all rows that were not selected."""
    sent = values.copy()
    for cut in parts:
        chosen = np.zeros(cut.rows, dtype=np.bool_)
        chosen[selected(values, cut)] = True
        cut.of(sent)[~chosen] = 0
    return sent


def shapes_text(shapes: Sequence[Shape]) -> str:
    """Shapes of tensors as a plan has them: "8678x100 100"."""
    return " ".join("x".join(map(str, shape)) for shape in shapes)


def shapes_of(text: str) -> tuple[Shape, ...]:
    """The inverse; a `ConfigError` for what is not one."""
    try:
        found = tuple(tuple(int(side) for side in word.split("x")) for word in text.split())
    except ValueError:
        found = ((0,),)
    if any(side < 1 for shape in found for side in shape):
        raise ConfigError(
            f"shapes = {text[:60]!r}", hint='tensors in order, such as "8678x100 100"; all above 0'
        )
    return found


# --- residual -------------------------------------------------------------------------------------
#
# Residual: what a client has not sent of its updates, and adds to the next (error feedback).
#
# Aji and Heafield 2017, Alg. 1: what the selection leaves is not lost but waits. Here it waits as
# the integers that updates are quantised to. A client's update counts only if the round came to an
# end with it in the sum; until it is told so (`settle`), nothing is given up: an update that was
# left out goes back whole.


Kept = npt.NDArray[np.int32]

LARGEST: Final = 1 << 23
"""A residual of this size is not kept: stores hold it as a float32, exactly up to here."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a client has sent in a round, of all that it had to send."""

    round_id: int
    total: Integers = field(repr=False)
    sent: Integers = field(repr=False)


@dataclass(slots=True)
class Residual:
    """One client's, for one dense part. `dropped` counts values that could not be kept."""

    kept: Kept = field(repr=False)
    offer: Offer | None = None
    dropped: int = 0

    @classmethod
    def nothing(cls, dense: int) -> Residual:
        return cls(np.zeros(dense, dtype=np.int32))

    @classmethod
    def stored(cls, values: npt.NDArray[np.float32]) -> Residual:
        """From a store. What is not a whole number that could have been kept is dropped."""
        fit = np.isfinite(values) & (np.abs(values) < LARGEST)
        fit &= values == np.where(fit, np.rint(values), 0)
        kept = np.where(fit, values, 0).astype(np.int32)
        return cls(kept, dropped=int(values.size - np.count_nonzero(fit)))

    def due(self, round_id: int, update: Integers) -> Integers:
        """What there is to send in a round: the update and what waited.

        Asked again in the same round, it is the same: what was offered then is forgotten.
        """
        if self.offer is not None and self.offer.round_id != round_id:
            raise MisuseError(f"round {self.offer.round_id} is not settled")
        self.offer = None
        return self.kept + update

    def offered(self, round_id: int, total: Integers, sent: Integers) -> None:
        """This was sent in a round, of all that was due."""
        self.offer = Offer(round_id, total, sent)

    def settle(self, round_id: int, *, counted: bool) -> None:
        """The round has ended, and the update was in its sum or was not."""
        offer = self.offer
        if offer is None or offer.round_id != round_id:
            return
        kept = offer.total - offer.sent if counted else offer.total
        fit = np.abs(kept) < LARGEST
        self.dropped += int(kept.size - np.count_nonzero(fit))
        self.kept, self.offer = np.where(fit, kept, 0).astype(np.int32), None
