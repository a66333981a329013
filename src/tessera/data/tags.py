"""Tags that users gave to items, as a few numbers per item: TF-IDF, then principal components.

Yang et al. 2021 (FedMMF, section 4.1) make features from tags in this way and leave the details
open. Here:

- The 1,000 tags that stand on the most items are used (equal ones: the first by name), so that the
  covariance of tags, not the matrix of items and tags, is what has to fit into memory.
- An item's weight of a tag is how often it was given, times ln((1 + n) / (1 + df)) + 1, where n
  items have tags and df of them this one. Each item's weights are scaled to length 1.
- The components are taken over the items that have tags. An item without any is at their mean,
  which is 0. The first component is scaled to variance 1 and the others by the same factor, so that
  a penalty on weights treats them as it treats other standardised attributes.
- The largest weight of a component is positive, so that a file always gives the same numbers.

The numbers are treated as *public* attributes of items. In HetRec and MovieLens 10M the tags come
from the very users whose ratings are learned: a deployment that has no other source of tags would
reveal who tagged what, and would have to sum them securely first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data.ratings import Attributes, Floats, Ints
from tessera.errors import ConfigError

MOST: Final = 1000
"""Tags that are used."""

_ROWS_AT_ONCE: Final = 4096
_NOTHING: Final = 1e-9  # of the first component's variance: what is left is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagging:
    """How often each tag was given to each item: one entry per pair, sorted by item."""

    item: Ints = field(repr=False)
    tag: Ints = field(repr=False)
    count: Ints = field(repr=False)
    words: tuple[str, ...] = field(repr=False)
    unlisted: int = 0

    @classmethod
    def of(cls, item: Ints, words: Sequence[str] | npt.NDArray[Any]) -> Tagging:
        """One item and one tag per time that somebody tagged something.

        Items below 0 are not listed: their tags are left out and counted. Empty tags are left out.
        """
        given = np.asarray(words, dtype=np.str_)
        there = given != ""
        listed = there & (item >= 0)
        known, tag = np.unique(given[listed], return_inverse=True)
        width = max(len(known), 1)
        pair, count = np.unique(item[listed] * width + tag.reshape(-1), return_counts=True)
        return cls(
            item=pair // width,
            tag=pair % width,
            count=count.astype(np.int64),
            words=tuple(str(word) for word in known),
            unlisted=int((there & ~listed).sum()),
        )

    def facts(self) -> dict[str, Any]:
        return {
            "tags": len(self.words),
            "tags used": f"the {min(MOST, len(self.words))} on the most items",
            "tagged items": len(np.unique(self.item)),
            "tags left out: item not listed": self.unlisted,
        }


def tag_attributes(
    tagging: Tagging, *, items: int, columns: int = 20, most: int = MOST
) -> Attributes:
    """`columns` numbers per item, or fewer if the tags do not give so many."""
    if columns < 0 or most < 1:
        raise ConfigError(f"tags: {columns} columns from {most} tags", hint="0 or more columns")
    matrix = _Weights.of(tagging, most)
    components, spread = _principal(matrix, columns)
    values = np.zeros((items, components.shape[1]))
    if components.shape[1]:
        centre = matrix.mean() @ components
        for rows, block in matrix.blocks():
            values[rows] = (block @ components - centre) / spread
    names = tuple(f"tags {place + 1}" for place in range(components.shape[1]))
    return Attributes(names, values.astype(np.float32))


@dataclass(frozen=True, slots=True)
class _Weights:
    """TF-IDF of the items that have tags, by pairs. `rows` are these items, ascending."""

    rows: Ints
    row: Ints  # place in `rows`
    column: Ints
    weight: Floats
    width: int

    @classmethod
    def of(cls, tagging: Tagging, most: int) -> _Weights:
        on = np.bincount(tagging.tag, minlength=len(tagging.words))
        used = np.sort(np.argsort(-on, kind="stable")[:most])
        column_of = np.full(len(tagging.words), -1, dtype=np.int64)
        column_of[used] = np.arange(len(used))
        kept = column_of[tagging.tag] >= 0
        rows, row = np.unique(tagging.item[kept], return_inverse=True)
        row, column = row.reshape(-1).astype(np.int64), column_of[tagging.tag[kept]]
        rarity = np.log((1 + len(rows)) / (1 + on[used])) + 1
        weight = tagging.count[kept] * rarity[column]
        length = np.sqrt(np.bincount(row, weight**2, minlength=len(rows)))
        return cls(rows, row, column, weight / length[row], len(used))

    def mean(self) -> Floats:
        total = np.bincount(self.column, self.weight, minlength=self.width)
        return np.asarray(total / max(len(self.rows), 1))

    def blocks(self) -> Iterator[tuple[Ints, Floats]]:
        """Some items at a time: their rows in the item table, and their weights."""
        for low in range(0, len(self.rows), _ROWS_AT_ONCE):
            rows = self.rows[low : low + _ROWS_AT_ONCE]
            own = slice(*np.searchsorted(self.row, [low, low + len(rows)]))
            block = np.zeros((len(rows), self.width))
            block[self.row[own] - low, self.column[own]] = self.weight[own]
            yield rows, block


def _principal(matrix: _Weights, columns: int) -> tuple[Floats, float]:
    """The first components, as columns over tags, and the first one's standard deviation."""
    n = len(matrix.rows)
    if n < 2 or not columns:
        return np.zeros((matrix.width, 0)), 1.0
    mean = matrix.mean()
    scatter = -n * np.outer(mean, mean)
    for _, block in matrix.blocks():
        scatter += block.T @ block
    variance, vectors = np.linalg.eigh(scatter / n)
    variance, vectors = variance[::-1][:columns], vectors[:, ::-1][:, :columns]
    if variance[0] <= _NOTHING:  # weights are of length 1: all items are alike
        return np.zeros((matrix.width, 0)), 1.0
    vectors = vectors[:, variance > _NOTHING * variance[0]]
    largest = np.abs(vectors).argmax(axis=0)
    signs = np.sign(vectors[largest, np.arange(vectors.shape[1])])
    return np.asarray(vectors * signs), float(np.sqrt(variance[0]))
