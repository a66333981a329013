"""Examples in columns, and how they are spread over clients.

A field is an array with one entry (N,) or one sequence (N, T) per example: ids as int64, where a
negative id means "none" (padding, nothing known), and features or labels as float32. Client i has
the examples `offsets[i] : offsets[i + 1]`, oldest first.

Negatives beside clicks, where nobody wrote down what was shown: every client draws its own.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError, MisuseError

Field = npt.NDArray[Any]

LABEL: Final = "label"
SUBJECT: Final = "subject"
"""The field that says which person an example is about; see `data/subjects.py`."""
NONE: Final = -1
"""Stands where there is no id."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Equally long columns, by field name."""

    fields: Mapping[str, Field] = field(repr=False)

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self.fields.values()}
        if len(lengths) > 1:
            raise MisuseError(f"examples: columns of different lengths: {sorted(lengths)}")

    def __len__(self) -> int:
        return next((len(column) for column in self.fields.values()), 0)

    def __getitem__(self, name: str) -> Field:
        return self.fields[name]

    @property
    def subjects(self) -> npt.NDArray[np.int64] | None:
        """The person that each example is about, or None where all are about the client itself."""
        return self.fields.get(SUBJECT)

    def take(self, which: npt.NDArray[Any] | slice) -> Examples:
        """Some of the examples: by position, by mask, or a slice (which copies nothing)."""
        return Examples({name: column[which] for name, column in self.fields.items()})

    def with_field(self, name: str, column: Field) -> Examples:
        return Examples({**self.fields, name: column})


@dataclass(frozen=True, slots=True)
class Pools:
    """The items that clients draw negatives from, ascending: in the training and the test part."""

    train: npt.NDArray[np.int64] = field(repr=False)
    test: npt.NDArray[np.int64] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a population's events were, and the population as it was up to a moment.

    `up_to` reads the data again, as they are by then, and leaves out what is later than so many
    seconds since 1970, before anything is made of them: splits, histories and rates of what is left
    do not depend on it. Clients and ids are numbered as in the whole. The training part of a client
    up to an earlier moment is the beginning of that up to a later one.
    """

    marks: npt.NDArray[np.int64] = field(repr=False)
    """The latest of each thousandth of all events, ascending."""
    up_to: Callable[[int], ClientData] = field(repr=False)

    @classmethod
    def of(cls, times: npt.NDArray[Any], up_to: Callable[[int], ClientData]) -> Timeline | None:
        """Of the times of all events, in seconds; None if there are none."""
        if not len(times):
            return None
        at = np.minimum(np.arange(1, 1001) * len(times) // 1000, len(times) - 1)
        return cls(np.ceil(np.sort(times)[at]).astype(np.int64), up_to)

    def moment(self, share: float) -> int:
        """When this share of all events is over."""
        return int(self.marks[max(0, min(len(self.marks), round(share * len(self.marks))) - 1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientData:
    """A population's examples: what clients train on, and what the model is tested on.

    `sizes` gives the number of ids of each kind ("user", "item", "category", and "subject" where
    people are not clients), `category_of` the
    public map from items to categories where there is one. `facts` says in words what this is:
    source, counts, split, and whether it is a sample. `ids` has the names of those kinds of
    ids that have any of their own, `titles` what people call each item, where that is known.

    With `undrawn` the examples whose `item` is NONE are negatives that nobody has drawn yet: each
    client does, from a secret of its own (`data/examples.py`). Whatever is counted here is the
    same before and after.
    """

    name: str
    train: Examples = field(repr=False)
    offsets: npt.NDArray[np.int64] = field(repr=False)
    test: Examples = field(repr=False)
    test_offsets: npt.NDArray[np.int64] = field(repr=False)
    sizes: Mapping[str, int]
    category_of: npt.NDArray[np.int64] | None = field(default=None, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, RowNames] = field(default_factory=dict, repr=False)
    titles: Sequence[str] = field(default=(), repr=False)
    public_rows: bool = True  # which ids there are is known whatever the examples are
    undrawn: Pools | None = field(default=None, repr=False)
    timeline: Timeline | None = field(default=None, repr=False)  # None: the events have no times
    of_nobody: bool = False  # a catalogue, for which a model is made before anybody has read a file

    def __post_init__(self) -> None:
        for part, offsets, what in (
            (self.train, self.offsets, "training"),
            (self.test, self.test_offsets, "test"),
        ):
            if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(part):
                raise MisuseError(f"{self.name}: offsets do not span the {what} examples")
        if len(self.offsets) != len(self.test_offsets):
            raise MisuseError(f"{self.name}: training and test parts are of different clients")
        if self.titles and len(self.titles) != self.sizes["item"]:
            raise MisuseError(f"{self.name}: not one title per item")
        if not len(self.train) and not self.of_nobody:
            raise ConfigError(f"{self.name}: no training examples", hint="is the data set empty?")

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def subjects(self) -> int:
        """How many people there are: as many as clients, where nothing else is said."""
        return self.sizes.get(SUBJECT, self.clients)

    def names_of(self, kind: str) -> RowNames:
        """The names of the ids of a kind; where there are none, their rows as text."""
        return self.ids.get(kind) or RowNames.numbered(self.sizes[kind])

    def title_of(self, item: int) -> str:
        """What people call the item in this row: its title, or else its id."""
        return self.titles[item] if self.titles else self.names_of("item").name(item)

    def of(self, client: int) -> Examples:
        """One client's training examples."""
        return self.train.take(slice(int(self.offsets[client]), int(self.offsets[client + 1])))

    def test_of(self, client: int) -> Examples:
        """One client's held-out examples."""
        return self.test.take(
            slice(int(self.test_offsets[client]), int(self.test_offsets[client + 1]))
        )


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
