"""Negatives beside clicks, where nobody wrote down what was shown: every client draws its own.

A reader leaves their places empty (`clicks.with_negatives`), and a run fills them before first use,
each client's from a secret of its own that lasts as long as the client: once, and for good. Drawn
by a public seed they would show whose they are: whoever knows the seed and a client's place in the
data could draw them again, and find them among the rows of its group. Drawn anew in every period
they would leave the client's own rows in the intersection.

Of the training part, whatever the user does not have there may be drawn, what is held out of it
included: if that were left out, a model could tell it by its never being a negative.

Central training draws them in the same way, so that under the same entropy all schemes have the
same examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.data.examples import LABEL, NONE, ClientData, Examples

Ints = npt.NDArray[np.int64]
SecretOf = Callable[[int], Secret]
"""A client's lasting secret, by its number."""


def draw(data: ClientData, secret_of: SecretOf, earlier: ClientData | None = None) -> ClientData:
    """The data with every client's negatives; as they are where none are to be drawn.

    `earlier` are the same clients' data up to an earlier moment: what was drawn beside them stays.
    """
    if data.undrawn is None:
        return data
    secrets = [secret_of(client) for client in range(data.clients)]
    items = data.sizes["item"]
    trained, tested = (_pairs(part, items) for part in (data.train, data.test))

    def filled(name: str, part: Examples, offsets: Ints, pool: Ints, own: Ints) -> Examples:
        empty = np.flatnonzero(part["item"] == NONE)
        if not len(empty):
            return part
        words = [
            CoinStream(Stream.of(secret, Label.SAMPLED_NEGATIVES, name)).words(int(count))
            for secret, count in zip(secrets, np.diff(np.searchsorted(empty, offsets)), strict=True)
            if count
        ]
        item = part["item"].copy()
        item[empty] = _others(own, items, pool, part["user"][empty], np.concatenate(words))
        return part.with_field("item", item)

    train = filled("train", data.train, data.offsets, data.undrawn.train, trained)
    return replace(
        data,
        train=train if earlier is None else _with_earlier(data, train, earlier),
        test=filled(
            "test",
            data.test,
            data.test_offsets,
            data.undrawn.test,
            np.union1d(trained, tested),
        ),
        undrawn=None,
    )


def _pairs(part: Examples, items: int) -> Ints:
    """user * items + item of what users touched, ascending."""
    touched = part["item"] != NONE
    return np.unique(part["user"][touched] * items + part["item"][touched])


def _with_earlier(data: ClientData, train: Examples, earlier: ClientData) -> Examples:
    """A client's first places are those that there were before, with what was drawn for them."""
    counts = np.diff(earlier.offsets)
    at = np.arange(len(earlier.train)) + np.repeat(data.offsets[:-1] - earlier.offsets[:-1], counts)
    at = np.minimum(at, len(train) - 1)
    same = (data.train["user"][at] == earlier.train["user"]) & (data.train["item"][at] == NONE)
    same &= earlier.train[LABEL] == 0.0
    item = train["item"].copy()
    item[at[same]] = earlier.train["item"][same]
    return train.with_field("item", item)


def draw_own(
    data: ClientData, client: int, secret: Secret, earlier: Examples | None = None
) -> Examples:
    """One client's training examples with its negatives, as it draws them by itself; `earlier` as
    above."""
    train = data.of(client)
    if data.undrawn is None or not len(train):
        return train
    ends = np.array([[0, len(train)], [0, 0]])
    none = data.test.take(slice(0))
    alone = replace(data, train=train, offsets=ends[0], test=none, test_offsets=ends[1])
    before = None
    if earlier is not None and 0 < len(earlier) <= len(train):
        before = replace(alone, train=earlier, offsets=np.array([0, len(earlier)]))
    return draw(alone, lambda _: secret, before).train


def placeholders(data: ClientData) -> ClientData:
    """The data with some item in every empty place: to try a model on, not to train it."""
    if data.undrawn is None:
        return data
    item = data.train["item"]
    some = data.train.with_field("item", np.where(item == NONE, data.undrawn.train[0], item))
    return replace(data, train=some)


def _others(own: Ints, items: int, pool: Ints, user: Ints, words: npt.NDArray[np.uint64]) -> Ints:
    """For each word an item of the pool that its user does not have; all are equally likely.

    `own` are the pairs user * items + item that there are, ascending. A user's free items are
    numbered in the order of the pool: the word gives the number, and the user's own items up to
    there are skipped.
    """
    place = np.searchsorted(pool, own % items)
    inside = pool[np.minimum(place, len(pool) - 1)] == own % items
    owner, place = own[inside] // items, place[inside]
    begin = np.searchsorted(owner, user)
    had = np.searchsorted(owner, user, side="right") - begin
    # So many free items are before each own one; with its owner ahead of it this is ascending.
    wide = len(pool) + 1
    before = owner * wide + place - _ranks(owner)
    number = _scaled(words, (len(pool) - had).astype(np.uint64))
    skipped = np.searchsorted(before, user * wide + number, side="right") - begin
    return np.asarray(pool[number + skipped], np.int64)


def _ranks(owner: Ints) -> Ints:
    """0, 1, 2, ... within each run of equal owners."""
    first = np.flatnonzero(np.diff(owner, prepend=NONE))
    return np.asarray(np.arange(len(owner)) - np.repeat(first, np.diff(first, append=len(owner))))


def _scaled(words: npt.NDArray[np.uint64], below: npt.NDArray[np.uint64]) -> Ints:
    """floor(word * below / 2^64), for fewer than 2^32: even but for 2^-32 of each chance."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    high = (words >> half) * below + (((words & low) * below) >> half)
    return (high >> half).astype(np.int64)
