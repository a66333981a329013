"""Ratings on a scale, with what is publicly known of items and what a client knows of itself.

Every reader of ratings ends in `rating_data`, so that all sets follow the same rules:

- The test part is a random share of *all* ratings, by seed (`split="random"`), or the one that was
  published with the set (`split="published"`). A user may end up with no training rating: it is a
  client with no examples, and nobody's number changes.
- With `part="validation"` the test part is taken away unread, and a random tenth of the training
  part stands in its place. Settings are tuned on that.
- A client's ratings stand oldest first; where a set has no times, in random order, by seed (files
  are often sorted by the rating, which a client that holds back its last ones must not meet).
- What is random follows from the seed and the user's own ratings, never from who the user is or
  where its ratings stand: users who swap their data swap what is drawn, and nothing in a split
  says whose it is. Whoever knows all ratings of a user can draw its split again.
- What is wrong with the input has a rule and is counted in `facts`, under these names:
  a rating that is not a number, or out of range, or of an item that is not listed, is left out; of
  the same user and item twice, the last by time is kept; a rating between two steps is kept as it
  is; an attribute that is missing is 0, which is the mean of a standardised one; users whose
  training ratings are all equal, and those who have too few of them for a mask, are kept.
- If nothing is left, that is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.data.clicks import offsets
from tessera.data.examples import LABEL, ClientData, Examples
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError, MisuseError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

TEST_SHARE: Final = 0.2
VALIDATION_SHARE: Final = 0.1
FEWEST: Final = 10
"""Training ratings that a user needs for a mask of its own; with fewer it has the global part."""

NOT_A_NUMBER: Final = "ratings left out: not a number"
OUT_OF_RANGE: Final = "ratings left out: out of range"
NOT_LISTED: Final = "ratings left out: item not listed"
REPEATED: Final = "ratings left out: rated again later"
OFF_STEP: Final = "ratings between two steps, kept"
NO_ATTRIBUTES: Final = "items without attributes"
CONSTANT: Final = "users whose training ratings are all equal"
TOO_FEW: Final = f"users with fewer than {FEWEST} training ratings: global part only"
NONE_LEFT: Final = "users without training ratings"

_ORDER, _SPLIT, _VALIDATION = range(3)  # what one seed and a user's ratings give words for


@dataclass(frozen=True, slots=True)
class Attributes:
    """One row of numbers per item, or per client, with the names of the columns."""

    names: tuple[str, ...]
    values: npt.NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.shape[1] != len(self.names):
            raise MisuseError(f"attributes: {self.values.shape} for {len(self.names)} columns")

    @classmethod
    def of(cls, columns: Mapping[str, npt.NDArray[Any]], *, rows: int) -> Attributes:
        """Columns side by side; without columns every row is empty."""
        values = np.zeros((rows, len(columns)), dtype=np.float32)
        for place, column in enumerate(columns.values()):
            values[:, place] = column
        return cls(tuple(columns), values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingData(ClientData):
    """Examples with the fields `user`, `item` and `label` (the rating), client c being user c.

    Ratings lie between `low` and `high`, `step` apart. `items` are public attributes; row c of
    `profiles` is known to client c alone. `titles` are public names of the items.
    """

    low: float
    high: float
    step: float
    items: Attributes
    profiles: Attributes

    def __post_init__(self) -> None:
        ClientData.__post_init__(self)
        if len(self.items.values) != self.sizes["item"]:
            raise MisuseError(f"{self.name}: not one row of attributes per item")
        if len(self.profiles.values) != self.clients:
            raise MisuseError(f"{self.name}: not one row of attributes per client")


def rating_data(
    name: str,
    *,
    user: Ints,
    item: Ints,
    rating: npt.NDArray[Any],
    time: npt.NDArray[Any] | None = None,
    users: int,
    items: int,
    low: float,
    high: float,
    step: float,
    item_attributes: Attributes,
    profiles: Attributes,
    titles: Sequence[str],
    split: str = "random",
    test_share: float = TEST_SHARE,
    seed: int = 0,
    part: str = "test",
    held: Mask | None = None,
    ids: Mapping[str, RowNames] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> RatingData:
    """Ratings in any order as clients' examples, by the rules above.

    `user` and `item` are rows 0 .. n - 1; an item below 0 is one that the set does not list, and a
    rating of NaN is one that is not a number. `held` marks the published test part. Attributes may
    be NaN where they are not known.
    """
    _check(name, split=split, test_share=test_share, seed=seed, part=part, held=held)
    rating = np.asarray(rating, dtype=np.float64)
    kept, faults = _usable(item, rating, low=low, high=high)
    # Within a client by time; equal times stay in the order given.
    order = kept[np.argsort(user[kept], kind="stable")]
    if time is None:
        late: npt.NDArray[Any] = _words(user[order], item[order], rating[order], (seed, _ORDER))
    else:
        late = time[order]
    order = order[np.lexsort((late, user[order]))]
    # Without times "later" is further down in the file, whatever the order of the examples.
    last = _last_of_each(user[order] * items + item[order], order if time is None else None)
    faults[REPEATED] = len(order) - len(last)
    order = order[last]
    if not len(order):
        raise ConfigError(
            f"{name}: none of {len(user)} ratings can be used",
            hint=f"ratings of listed items from {low:g} to {high:g} are due: is it the right file?",
        )
    user, item, rating = user[order], item[order], rating[order]
    steps = (rating - low) / step
    faults[OFF_STEP] = int((np.abs(steps - np.round(steps)) > 1e-6).sum())

    tested = held[order] if split == "published" and held is not None else None
    if tested is None:
        tested = _share(_words(user, item, rating, (seed, _SPLIT)), test_share)
    train, test = np.flatnonzero(~tested), np.flatnonzero(tested)
    if part == "validation":
        words = _words(user[train], item[train], rating[train], (seed, _VALIDATION))
        chosen = _share(words, VALIDATION_SHARE)
        train, test = train[~chosen], train[chosen]
    attributes, bare = _known(item_attributes)
    faults[NO_ATTRIBUTES] = int(bare.sum())
    faults.update(_uneven(user[train], rating[train], users))

    def examples(rows: Ints) -> Examples:
        return Examples(
            {"user": user[rows], "item": item[rows], LABEL: rating[rows].astype(np.float32)}
        )

    return RatingData(
        name=name,
        train=examples(train),
        offsets=offsets(np.bincount(user[train], minlength=users).astype(np.int64)),
        test=examples(test),
        test_offsets=offsets(np.bincount(user[test], minlength=users).astype(np.int64)),
        sizes={"user": users, "item": items},
        facts={
            **(facts or {}),
            "users": users,
            "items": items,
            "rated items": len(np.unique(item)),
            "ratings": len(order),
            "scale": f"{low:g} to {high:g} in steps of {step:g}",
            "training examples": len(train),
            "test examples": len(test),
            "split": _split_in_words(split, test_share=test_share, seed=seed, part=part),
            "order": "by time" if time is not None else f"random (seed {seed}): no times are known",
            **faults,
        },
        low=low,
        high=high,
        step=step,
        items=attributes,
        profiles=_known(profiles)[0],
        ids=ids or {},
        titles=titles,
    )


def standardised(values: npt.NDArray[Any]) -> Floats:
    """Mean 0 and variance 1 over the known ones; NaN stays; what is constant becomes 0."""
    values = np.asarray(values, dtype=np.float64)
    known = values[~np.isnan(values)]
    if not len(known):
        return values
    spread = float(known.std())
    return np.asarray((values - known.mean()) / (spread if spread > 0 else 1.0))


def _check(
    name: str, *, split: str, test_share: float, seed: int, part: str, held: Mask | None
) -> None:
    if split not in ("random", "published"):
        raise ConfigError(f"{name}: no split is called {split!r}", hint="random or published")
    if split == "published" and held is None:
        raise ConfigError(
            f"{name}: no test part was published with this set", hint='use split = "random"'
        )
    if part not in ("test", "validation"):
        raise ConfigError(
            f"{name}: {part!r} cannot be held out", hint="part is test, or validation for tuning"
        )
    if not 0.0 < test_share < 1.0:
        raise ConfigError(f"{name}: a test share of {test_share} must lie between 0 and 1")
    if seed < 0:
        raise ConfigError(f"{name}: a seed of {seed}", hint="0 or more")


def _usable(item: Ints, rating: Floats, *, low: float, high: float) -> tuple[Ints, dict[str, int]]:
    """The places of ratings that can be, and how many could not, each under its first fault."""
    wrong = np.isnan(rating)
    faults = {NOT_A_NUMBER: int(wrong.sum())}
    for fault, found in (
        (OUT_OF_RANGE, (rating < low) | (rating > high)),
        (NOT_LISTED, item < 0),
    ):
        faults[fault] = int((found & ~wrong).sum())
        wrong = wrong | found
    return np.flatnonzero(~wrong), faults


def _last_of_each(pair: Ints, rank: Ints | None) -> Ints:
    """Places of the last of each pair, by rank or else by place; ascending."""
    by = np.arange(len(pair)) if rank is None else rank
    order = np.lexsort((by, pair))
    ends = np.ones(len(pair), dtype=np.bool_)
    ends[:-1] = pair[order][1:] != pair[order][:-1]
    return np.sort(order[ends])


def _words(user: Ints, item: Ints, rating: Floats, use: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """A random word for every rating, from its user's ratings and this use of a seed alone.

    Users stand one after the other here.
    """
    ends = np.flatnonzero(np.diff(user, append=-1)) + 1
    found = np.empty(len(user), np.uint64)
    for begin, end in pairwise([0, *ends.tolist()]):
        own = item[begin:end].tobytes() + rating[begin:end].tobytes()
        secret = Secret(blake2b(own, digest_size=32, key=Label.OWN_RATINGS.encode()).digest())
        found[begin:end] = CoinStream(Stream.of(secret, Label.OWN_RATINGS, *use)).words(end - begin)
    return found


def _share(words: npt.NDArray[np.uint64], share: float) -> Mask:
    """So many of all, those with the least words."""
    chosen = np.zeros(len(words), dtype=np.bool_)
    chosen[np.argsort(words)[: round(share * len(words))]] = True
    return chosen


def _split_in_words(split: str, *, test_share: float, seed: int, part: str) -> str:
    test = (
        "the published test part"
        if split == "published"
        else f"a random {100 * test_share:g} % of all ratings (seed {seed})"
    )
    if part == "test":
        return f"{test} as test"
    return (
        f"for tuning: {test} is left out unread, and a random {100 * VALIDATION_SHARE:g} % of the "
        f"rest (seed {seed}) are the test examples here"
    )


def _known(given: Attributes) -> tuple[Attributes, Mask]:
    """The attributes with 0 for what is missing, and which rows have nothing else."""
    values = np.nan_to_num(given.values, nan=0.0, posinf=0.0, neginf=0.0).astype(np.float32)
    return Attributes(given.names, values), np.asarray(~values.any(axis=1))


def _uneven(user: Ints, rating: Floats, users: int) -> dict[str, int]:
    """How many users have training ratings that a mask can do little with."""
    counts = np.bincount(user, minlength=users)
    least, most = np.full(users, np.inf), np.full(users, -np.inf)
    np.minimum.at(least, user, rating)
    np.maximum.at(most, user, rating)
    return {
        CONSTANT: int((least == most).sum()),
        TOO_FEW: int((counts < FEWEST).sum()),
        NONE_LEFT: int((counts == 0).sum()),
    }
