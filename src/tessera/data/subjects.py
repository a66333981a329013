"""Subjects: people whose records lie with clients, some with several: a shopper of many shops.

Examples of such data have a field `subject`, people numbered over the whole population, and their
`user` is a person *at one client*: a local row, which stays with its client, then belongs to one
person, and a person at three shops has three rows that never meet. A client's examples stand person
by person, each person's oldest first.

Where there is no such field, every client is one person and all its examples are that person's. A
subject below 0 is one that a record does not name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tessera.data.clicks import Ints, offsets
from tessera.data.examples import SUBJECT, ClientData, Examples
from tessera.errors import ConfigError

UNNAMED: Final = "training examples that name no subject"


def at_clients(subject: Ints, *, clients: int, each: int, seed: int) -> Ints:
    """A client for every record: each person goes to `each` of them, evenly and by the seed.

    Records of one person get the same clients wherever they stand, so that several calls with
    parts of the data would differ: hand in all records at once.
    """
    if not 1 <= each <= clients:
        raise ConfigError(
            f"people at {each} clients each, of {clients}", hint=f"each is 1 to {clients}"
        )
    rng = np.random.default_rng([seed, 0x5B])
    people = int(subject.max(initial=-1)) + 1
    theirs = rng.random((people, clients)).argsort(axis=1)[:, :each]
    return np.asarray(theirs[subject, rng.integers(each, size=len(subject))], np.int64)


def held_by(
    data: ClientData, client: Ints, subject: Ints, *, clients: int, subjects: int
) -> dict[str, Any]:
    """What of these data differs if these clients hold the examples: for `dataclasses.replace`.

    `client` and `subject` are of every training example, then of every test example.
    """
    person = np.where(subject < 0, subjects, subject)
    pairs, user = np.unique(client * (subjects + 1) + person, return_inverse=True)
    user = user.reshape(-1).astype(np.int64)
    split = len(data.train)
    of_user = pairs // (subjects + 1)

    def part(examples: Examples, rows: slice) -> tuple[Examples, Ints]:
        order = np.argsort(user[rows], kind="stable")
        moved = examples.with_field("user", user[rows]).with_field(SUBJECT, subject[rows])
        counts = np.bincount(of_user[user[rows]], minlength=clients).astype(np.int64)
        return moved.take(order), offsets(counts)

    train, begins = part(data.train, slice(split))
    test, test_begins = part(data.test, slice(split, None))
    spread = SubjectSpread.of(train, begins)
    return {
        "train": train,
        "offsets": begins,
        "test": test,
        "test_offsets": test_begins,
        "sizes": {**data.sizes, "user": len(pairs), SUBJECT: subjects},
        "facts": {
            **data.facts,
            "clients": clients,
            "subjects": subjects,
            "clients per subject": f"{spread.by_subject.mean():.2f}, {spread.clients} at most",
            UNNAMED: int((train[SUBJECT] < 0).sum()),
            "training examples of a subject at one client": f"{spread.records} at most",
        },
    }


@dataclass(frozen=True, slots=True)
class SubjectSpread:
    """How much of a person there is: `records` at one client and `clients`, of whoever has most."""

    by_pair: Ints = field(repr=False)  # training examples of each person at each of its clients
    by_subject: Ints = field(repr=False)  # clients of each person

    @classmethod
    def of(cls, train: Examples, begins: Ints) -> SubjectSpread:
        client = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
        subject = client if train.subjects is None else train.subjects
        client, subject = client[subject >= 0], subject[subject >= 0]
        people = int(subject.max(initial=-1)) + 1
        pairs, by_pair = np.unique(client * people + subject, return_counts=True)
        by_subject = np.bincount(pairs % people) if people else np.zeros(0, np.int64)
        return cls(by_pair.astype(np.int64), by_subject.astype(np.int64))

    @property
    def records(self) -> int:
        return int(self.by_pair.max(initial=0))

    @property
    def clients(self) -> int:
        return int(self.by_subject.max(initial=0))

    def beyond(self, *, records: int, clients: int) -> tuple[int, int]:
        """People over `records` at one client (0: any number may be), and at over `clients`."""
        many = int((self.by_pair > records).sum()) if records else 0
        return many, int((self.by_subject > clients).sum())


def check_spread(data: ClientData, *, records: int, clients: int) -> None:
    """Whether the bounds that an account takes for granted hold; in a simulation one can look.

    `records` is the bound on a person's records at one client, 0 where the account needs none.
    """
    spread = SubjectSpread.of(data.train, data.offsets)
    many, wide = spread.beyond(records=records, clients=clients)
    if many:
        raise ConfigError(
            f"{data.name}: {many} times a person has more than the {records} records at a client "
            f"that the account takes for granted; the most is {spread.records}",
            hint="state a larger bound, or draw subjects, whose account needs none",
        )
    if wide:
        raise ConfigError(
            f"{data.name}: {wide} people are at more than the {clients} clients that the account "
            f"takes for granted; the most is {spread.clients}",
            hint=f"clients per subject = {spread.clients}",
        )


def check_local_rows(data: ClientData, fields: tuple[str, ...]) -> None:
    """Whether every local row that these fields index belongs to one person.

    A row of several people would carry what one of them did into the gradients of the others.
    """
    if data.train.subjects is None:
        return
    for name in fields:
        rows, subject = data.train[name], data.train.subjects
        if rows.ndim == 2:
            subject = np.repeat(subject, rows.shape[1])
        rows = rows.reshape(-1)
        known = rows >= 0
        pairs = np.unique(np.stack([rows[known], subject[known]]), axis=1)
        shared = len(pairs[0]) - len(np.unique(pairs[0]))
        if shared:
            raise ConfigError(
                f"{data.name}: local rows by {name!r} are of several people, {shared} times",
                hint="privacy per subject needs local rows of one person each",
            )


def one_unnamed(data: ClientData) -> ClientData:
    """The same with all records that name no subject as those of one more person.

    That protects each of the people behind them, at the price of being clipped together.
    """
    named = data.train.subjects
    if named is None or not (named < 0).any():
        return data
    last = data.subjects

    def part(examples: Examples) -> Examples:
        subject = examples[SUBJECT]
        return examples.with_field(SUBJECT, np.where(subject < 0, last, subject))

    sizes = {**data.sizes, SUBJECT: last + 1}
    return replace(data, train=part(data.train), test=part(data.test), sizes=sizes)


def check_named(data: ClientData) -> None:
    """Whether every training example says whom it is about."""
    named = data.train.subjects
    if named is None or not (named < 0).any():
        return
    unnamed = named < 0
    client = int(np.searchsorted(data.offsets, np.argmax(unnamed), side="right")) - 1
    raise ConfigError(
        f"{data.name}: {int(unnamed.sum())} records name no subject, the first at client {client}",
        hint='[dp] unknown = "one-subject" protects them all as one person',
    )
