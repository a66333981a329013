"""Ranking: which items a client rated highest, read off the order of its masked ratings.

Yang et al., *Practical and Secure Federated Recommendation with Personalized Masks*, section 4.2.2.
The attacker takes the top proportion h of a client's items by masked rating, and the hit ratio is
the share of them that are in the true top set. On a scale of five values that set is mostly chosen
among equals: of forty items rated 5, four are "the top tenth", and whoever picks another of the
forty has missed, by this count. So hits are counted `fair`, too: an item is one if it is rated as
high as the last of the true top set. And there is a question without a cut: how well do masked
ratings tell items that a client liked from the others (`liked`)?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.ratings.table import HitRates, Numbers, Offsets, owners

PROPORTIONS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The top proportions of Table 3."""


def ranking(
    masked: Numbers,
    true: Numbers,
    offsets: Offsets,
    *,
    rng: np.random.Generator,
    fair: bool = False,
    proportions: Sequence[float] = PROPORTIONS,
) -> HitRates:
    """Of the items picked by masked rating, how many are in each client's true top set.

    A set has the proportion's number of items, rounded, and at least one. Equal ratings are put in
    random order, drawn anew for either set: who picks does not know how the true set was drawn.
    """
    owner = owners(offsets, masked, true)
    sizes = np.diff(offsets)
    guess, truth = (_places(values, owner, offsets, rng) for values in (masked, true))
    hits, trials = [], []
    for proportion in proportions:
        top = np.where(sizes > 0, np.maximum(1, np.floor(proportion * sizes + 0.5)), 0)
        picked, right = (places < top[owner] for places in (guess, truth))
        if fair:
            last = np.full(len(sizes), np.inf)
            np.minimum.at(last, owner[right], true[right])
            right = true >= last[owner]
        hits.append(np.bincount(owner[picked & right], minlength=len(sizes)))
        trials.append(top)
    return HitRates(tuple(proportions), np.array(hits, np.int64), np.array(trials, np.int64))


def liked(masked: Numbers, true: Numbers, offsets: Offsets, *, least: float) -> Numbers:
    """Each client's AUC of masked ratings for "rated `least` or more"; NaN without both kinds.

    It is the chance that an item the client liked stands above one it did not, ties half: .5 says
    nothing, 1 says all.
    """
    owner = owners(offsets, masked, true)
    clients = len(offsets) - 1
    order = np.lexsort((masked, owner))
    value, whose, good = masked[order], owner[order], true[order] >= least
    first = np.ones(len(order), np.bool_)
    first[1:] = (value[1:] != value[:-1]) | (whose[1:] != whose[:-1])
    group = np.cumsum(first) - 1
    likes = np.bincount(group, weights=good, minlength=1)
    others = np.bincount(group, weights=~good, minlength=1)
    by_group = whose[first]  # whose values these are
    bad, total = (np.bincount(by_group, weights=w, minlength=clients) for w in (others, likes))
    before = np.cumsum(others) - others
    # A client's first group starts its count anew.
    start = np.concatenate([[0.0], np.cumsum(bad)])[by_group] if len(by_group) else before
    won = np.bincount(by_group, weights=likes * (before - start + others / 2), minlength=clients)
    pairs = bad * total
    return np.asarray(np.where(pairs > 0, won / np.maximum(pairs, 1.0), np.nan))


def _places(
    values: Numbers, owner: npt.NDArray[np.int64], offsets: Offsets, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """The place of each rating in its client's order, the highest first, from 0."""
    order = np.lexsort((rng.random(len(values)), -values, owner))
    places = np.empty(len(values), np.int64)
    places[order] = np.arange(len(values)) - np.asarray(offsets, np.int64)[owner[order]]
    return places
