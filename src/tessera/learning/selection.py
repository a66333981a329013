"""Selection: the largest changes of a dense part, the only ones that are sent (top-k).

Cui et al. 2022 select by element (section 7.3) or by row of a layer, a "mega-element", whose size
is the sum of its absolute values (7.4). All is over the integers that updates are quantised to, so
that what is sent and what is kept (`residual.py`) add up to the update, to the bit. Which places
there are follows from the plan; which of them a client chose follows from its data.

By rows, only tensors of `ROWS` rows and more are cut, along their first dimension: there a row is a
word or an item. Where a row is a filter or a unit, few of them are no small part of a network, and
such tensors are sent whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError

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
