"""A user's own interactions, from a file or a frame: a line per user, item and, if known, outcome.

Ids may be any text. Users are numbered (a user's own row never leaves the device). Items need
rows that all clients agree on without telling each other what they have:

- `ids="dictionary"`: a public file with one id per line; the line's number is the row. An id not
  in it is *cold*: its interactions are dropped, or (`unknown="row"`) all share one last row.
  Without a file the dictionary is made of this one, which suits a simulation and nothing else.
  An `ItemCatalogue` (`data/catalogue.py`) is such a list, with titles and what else is public.
- `ids="hash"`: row = keyed hash of the id modulo `buckets`. No file, no cold ids; ids that fall
  into one bucket share a row. The key is public and hides nothing: all have to use the same.

Whose device holds a line, and whom it is about, are two questions: `client` and `subject` name the
columns that answer them, and both are `user` where they are left out. So shops can be clients and
shoppers the people in them (`data/subjects.py`). Lines without a subject are kept and counted: what
becomes of them is decided where people are protected.

A deployed client reads its own file, which need not name its user (`alone`): all lines are its own.

What was cold or fell together is counted among the facts. A click is a label of 1, or a value of at
least `threshold`. Without a label every line is a click, and clients draw negatives beside them
(`data/examples.py`); with `negatives` 0 they draw none, for a softmax over what comes next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Label
from tessera.data import columns, delimited, item_features, published, values
from tessera.data.catalogue import ItemCatalogue
from tessera.data.clicks import Ints, Log, check, click_data, with_negatives
from tessera.data.columns import SKIP, STOP, BadLines, Columns, Mask
from tessera.data.examples import NONE, ClientData, Timeline
from tessera.data.item_features import ItemFeatures
from tessera.data.row_names import RowNames
from tessera.data.sequences import TIES, SequenceData, Sequences, sequence_data
from tessera.data.split import TEST
from tessera.data.subjects import held_by
from tessera.data.values import Encoded, encoded
from tessera.errors import ConfigError

KEY: Final = Label.HASHED_IDS.encode()
"""The default key of the hash. Public, as any other would be."""

MAX_BUCKETS: Final = 2**32
MAX_MAPPED: Final = 2**26
"""Rows that can have categories: the map from rows to categories is an array."""
_MAX_KEY: Final = 64  # bytes, of BLAKE2b
UNKNOWN_IDS: Final = "items that the catalogue lacks"
UNKNOWN_LINES: Final = "interactions with them, which wait"
"""Among facts, of a catalogue."""
OWN_FIELDS: Final = ("user", "item", "history", "label", "rate", "target", "category", "subject")
"""Fields of an example that a feature column must not hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interactions:
    """Which columns of a table are what, and how its ids become rows; see above.

    Without `time` the lines of a user count as in order. Times are seconds since 1970, dates as
    in ISO 8601 (without a zone: UTC) or with day, month and year, or as `time_format` says in the
    words of `strptime`. `features` are further
    columns, which reach the batch under their names: numbers as they are, text as ids.

    Of sequences, `title` and `attributes` name columns that say something about items, and are
    public: of a second file, `item_features`, or of this one (`data/item_features.py`).
    """

    item: str
    user: str = "user"
    client: str | None = None
    subject: str | None = None
    time: str | None = None
    time_format: str | None = None
    label: str | None = None
    threshold: float | None = None
    category: str | None = None
    features: Sequence[str] = ()
    ids: str = "dictionary"
    dictionary: Path | str | ItemCatalogue | None = None
    unknown: str = "drop"
    buckets: int = 2**20
    key: bytes = KEY
    negatives: int = 1
    history: int = 20
    test_share: float = 0.2
    separator: str | None = None
    encoding: str | None = None
    on_bad: str = STOP
    item_features: Path | str | None = None
    title: str | None = None
    attributes: Sequence[str] = ()

    @property
    def holder(self) -> str:
        """The column that says whose device holds a line."""
        return self.client or self.user

    @property
    def person(self) -> str:
        """The column that says whom a line is about."""
        return self.subject or self.user

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        named = (self.holder, self.person, self.item, self.time, self.label)
        about = (self.title, *self.attributes, self.category)
        if self.catalogue is not None:  # it says all that there is to say about items
            about = ()
        elif self.item_features:
            about = (self.category,)
        return [one for one in (*named, *self.features, *about) if one is not None]

    @property
    def catalogue(self) -> ItemCatalogue | None:
        return self.dictionary if isinstance(self.dictionary, ItemCatalogue) else None

    @property
    def public_list(self) -> bool:
        """Whether negatives are drawn from a public list and not from what occurs."""
        return self.ids != "hash" and self.dictionary is not None

    def check(self, name: str) -> None:
        """A ConfigError for what cannot be, under the name of the table."""
        check(name, history=self.history, test_share=self.test_share)
        for field, value, words in (
            ("ids", self.ids, ("dictionary", "hash")),
            ("unknown", self.unknown, ("drop", "row")),
            ("on_bad", self.on_bad, (STOP, SKIP)),
        ):
            if value not in words:
                raise ConfigError(
                    f"{name}: {field} = {value!r}", hint=" or ".join(f'"{w}"' for w in words)
                )
        if not 1 <= self.buckets <= MAX_BUCKETS:
            raise ConfigError(f"{name}: {self.buckets} buckets", hint=f"1 to {MAX_BUCKETS}")
        if not 1 <= len(self.key) <= _MAX_KEY:
            raise ConfigError(
                f"{name}: a key of {len(self.key)} bytes", hint=f"1 to {_MAX_KEY} bytes"
            )
        if self.ids == "hash" and self.dictionary is not None:
            raise ConfigError(f"{name}: a dictionary and a hash", hint="choose one of them")
        if self.threshold is not None and (self.label is None or not math.isfinite(self.threshold)):
            raise ConfigError(
                f"{name}: threshold = {self.threshold} without a label column, or not a number",
                hint="label names the column that is compared with the threshold",
            )
        for feature in self.features:
            if feature in OWN_FIELDS:
                raise ConfigError(
                    f"{name}: a feature column called {feature!r}, which is a field of every "
                    "example",
                    hint="rename the column",
                )


@dataclass(frozen=True, slots=True)
class Alone:
    """A deployed client that reads its own file: its number among so many clients.

    `as_of` is when all of it was, in seconds since 1970, where the file has no times: its owner's
    word that nothing in it is later.
    """

    client: int
    clients: int
    as_of: int | None = None

    def columns(self, source: Any, how: Interactions) -> list[str]:
        """Those of `how` that have to be there: who it is about is known, and when by `as_of`."""
        there = columns.names_of(source)
        own = {how.holder} if how.holder != how.person or how.subject is None else set()
        if self.as_of is not None and how.time is not None:
            own.add(how.time)
        return [one for one in how.columns if one in there or one not in own]

    def holder(self, table: Columns, how: Interactions) -> Encoded:
        """This client, of every line; `ConfigError` if lines are of several."""
        pa = delimited.load()
        if how.holder in table.table.column_names:
            found = encoded(table, how.holder)
            if len(found.names) > 1:
                raise ConfigError(
                    f"{table.where}: lines of {len(found.names):,} in the column {how.holder!r}, "
                    "and a client has its own alone",
                    hint="one file for each client",
                )
            return Encoded(found.names, np.zeros(len(table), np.int64))
        return Encoded(pa.arrow.array([""]), np.zeros(len(table), np.int64))


@dataclass(slots=True)
class _Lines:
    """The good lines of a table by their columns; None for a column that is not named."""

    table: Columns
    who: Encoded
    whom: Encoded
    what: Encoded
    clicked: Mask
    when: npt.NDArray[Any] | None
    kinds: Encoded | None
    features: dict[str, npt.NDArray[Any]]
    sizes: dict[str, int]
    facts: dict[str, Any]
    good: Mask  # of all lines of the table

    @classmethod
    def of(cls, source: Any, how: Interactions, alone: Alone | None = None) -> _Lines:
        """What can be read; bad lines are refused or left out."""
        wanted = how.columns if alone is None else alone.columns(source, how)
        table = columns.read(
            source,
            wanted,
            separator=how.separator,
            encoding=how.encoding,
            distinct=[one for one in wanted if one == how.time and wanted.count(one) == 1],
        )
        bad = BadLines(table)
        what = encoded(table, how.item)
        who = encoded(table, how.holder) if alone is None else alone.holder(table, how)
        whom = who if how.person == how.holder else encoded(table, how.person)
        for column, found in ((how.holder, who), (how.item, what)):
            bad.add(
                found.codes < 0,
                partial(values.missing, table, column),
                hint="every line needs a user and an item",
            )
        when = None
        if how.time is not None and how.time in table.table.column_names:
            when = values.times(table, how.time, bad, how.time_format or "")
        elif alone is not None and alone.as_of is not None:
            when = np.full(len(table), float(alone.as_of))
        clicked = np.ones(len(table), dtype=np.bool_)
        if how.label is not None:
            clicked = _clicked(table, how.label, how.threshold, bad)
        listed = how.category is None or how.catalogue is not None
        kinds = None if listed else encoded(table, how.category or "")
        more, sizes = _features(table, how.features, bad)
        if alone is not None and sizes:
            raise ConfigError(
                f"{table.where}: {next(iter(sizes))!r} is a feature of words, which every client "
                "would number in its own way",
                hint="features of deployed clients are numbers",
            )
        facts = bad.settle(how.on_bad)
        good_lines = cls(table, who, whom, what, clicked, when, kinds, more, sizes, facts, bad.good)
        if not bad.good.all():
            good_lines._keep(bad.good)
        return good_lines

    def _keep(self, good: Mask) -> None:
        same = self.whom is self.who
        self.who, self.what = self.who.only(good), self.what.only(good)
        self.whom = self.who if same else self.whom.only(good)
        self.clicked = self.clicked[good]
        self.when = None if self.when is None else self.when[good]
        self.kinds = None if self.kinds is None else self.kinds.only(good)
        self.features = {one: column[good] for one, column in self.features.items()}

    def up_to(self, until: int | None) -> Mask:
        """Lines that are not later."""
        if until is None or self.when is None:
            return np.ones(len(self.clicked), dtype=np.bool_)
        return np.asarray(values.seconds(self.when) <= until)

    def timeline(self, up_to: Callable[[int], ClientData]) -> Timeline | None:
        return None if self.when is None else Timeline.of(values.seconds(self.when), up_to)


def read(
    source: Any, how: Interactions, *, until: int | None = None, alone: Alone | None = None
) -> ClientData:
    """Interactions of a path or a frame as click examples; with `until` those up to then.

    With `alone` all of them are one client's.
    """
    name = Path(source).name if isinstance(source, str | Path) else type(source).__name__
    how.check(name)
    found = _Lines.of(source, how, alone)
    rows, items, names, about = _rows(found.what, how)
    facts = found.facts | about
    category_of, categories = None, None
    if found.kinds is not None:
        if items > MAX_MAPPED:
            raise ConfigError(
                f"{name}: categories for {items} rows", hint=f"at most {MAX_MAPPED} buckets"
            )
        category_of, categories, doubts = _categories(found.kinds, rows, items)
        facts["items with several categories, the first counts"] = doubts
    if how.catalogue is not None and (category_of := how.catalogue.category_of) is not None:
        categories = int(category_of.max()) + 1
    known = rows >= 0
    if not known.any():
        raise ConfigError(f"{found.table.where}: no item of it is in the dictionary")
    known &= found.up_to(until)
    when = None if found.when is None else found.when[known]
    line = np.flatnonzero(known) if found.features else None
    clients, subjects = found.who.texts(), found.whom.texts()
    held_at = found.who.codes if alone is None else found.who.codes + alone.client
    if alone is not None:  # numbered as in the federation
        clients = [""] * alone.clients
    whom = held_at if found.whom is found.who else found.whom.codes
    pair, pairs = _at_clients(held_at, whom, len(clients), len(subjects))
    log, held, pools = (
        Log.sorted(pair[known], rows[known], found.clicked[known], when, line),
        None,
        None,
    )
    if how.label is None and how.negatives:
        sampled = with_negatives(
            log,
            users=len(pairs),
            items=items,
            each=how.negatives,
            catalogue=_named(how, items) if how.public_list else None,
            test_share=how.test_share,
        )
        log, held, pools = sampled.log, sampled.held, sampled.pools
        whence = "the dictionary" if how.public_list else "the items of the same part"
        facts["click"] = (
            f"every interaction; each beside {how.negatives} drawn evenly from {whence}"
        )
    elif how.label is None:
        facts["click"] = "every interaction; no others are drawn"
    else:
        rule = "" if how.threshold is None else f" of at least {how.threshold:g}"
        facts["click"] = f"{how.label}{rule or ' is 1'}"
    dialect = found.table.dialect
    data = click_data(
        name,
        log,
        users=len(pairs),
        items=items,
        history=how.history,
        test_share=how.test_share,
        held=held,
        pools=pools,
        category_of=category_of,
        categories=categories,
        extra={one: column[log.line] for one, column in found.features.items()},
        rate=how.label is not None,
        facts={
            "source": name,
            **({} if dialect is None else {"read as": str(dialect)}),
            "interactions": len(rows),
            "order": "as in the file" if how.time is None else f"by {how.time}",
            **facts,
        },
    )
    data = replace(
        data,
        sizes={**data.sizes, **found.sizes},
        ids={"item": names},
        public_rows=how.ids == "hash" or how.dictionary is not None,
        titles=[] if how.catalogue is None else how.catalogue.all_titles,
        timeline=found.timeline(lambda until: read(source, how, until=until, alone=alone)),
    )
    if how.client is None and how.subject is None:  # a user is a client and a person
        people = {} if alone is not None else {"user": RowNames(clients)}
        return replace(data, ids={**data.ids, **people})
    of = pairs[np.concatenate([data.train["user"], data.test["user"]])]
    person = of % (len(subjects) + 1)
    moved = held_by(
        data,
        of // (len(subjects) + 1),
        np.where(person == len(subjects), NONE, person),
        clients=len(clients),
        subjects=len(subjects),
    )
    of_people = {"subject": RowNames(subjects)}
    if alone is None:
        of_people["client"] = RowNames(clients)
    return replace(data, ids={**data.ids, **of_people}, **moved)


def read_sequences(
    source: Any,
    how: Interactions,
    *,
    part: str = TEST,
    until: int | None = None,
    alone: Alone | None = None,
) -> SequenceData:
    """The same lines as what came next: every one counts, or those whose label is a click."""
    name = Path(source).name if isinstance(source, str | Path) else type(source).__name__
    how.check(name)
    if how.client is not None or how.subject is not None or how.category or how.features:
        raise ConfigError(
            f"{name}: what comes next is of users who are clients, by their items alone",
            hint="leave client, subject, category and features out",
        )
    found = _Lines.of(source, how, alone)
    rows, items, names, about = _rows(found.what, how)
    kept = (rows >= 0) & found.clicked & found.up_to(until)
    if not kept.any():
        raise ConfigError(f"{found.table.where}: no line of it counts", hint="label, threshold?")
    described = _described(found, rows, items, names, how)
    when = None if found.when is None else found.when[kept]
    who, what, users = found.who.codes[kept], rows[kept], len(found.who.names)
    people = {"user": RowNames(found.who.texts())}
    if alone is not None:
        who, users, people = who + alone.client, alone.clients, {}
    dialect = found.table.dialect
    data = sequence_data(
        name,
        Sequences.sorted(who, what, when, users=users, items=items),
        items=items,
        length=how.history,
        part=part,
        ordered=how.time is not None,
        alone=alone is not None,
        popularity=None if how.catalogue is None else how.catalogue.weights,
        waiting=0 if how.catalogue is None else how.catalogue.room,
        ids={"item": names, **people},
        titles=described.titles,
        attributes=described.attributes,
        facts={
            "source": name,
            **({} if dialect is None else {"read as": str(dialect)}),
            "interactions": len(rows),
            "order": "none: the file has no times" if when is None else f"by {how.time}",
            **({} if when is None else {TIES: _ties(who, when)}),
            **found.facts,
            **about,
            **described.facts,
        },
    )
    return replace(
        data,
        public_rows=how.ids == "hash" or how.dictionary is not None,
        timeline=found.timeline(
            lambda until: read_sequences(source, how, part=part, until=until, alone=alone)
        ),
    )


def _named(how: Interactions, items: int) -> Ints:
    """Rows of a public list that have an item."""
    return np.arange(items - (0 if how.catalogue is None else how.catalogue.room))


def _described(
    found: _Lines, rows: Ints, items: int, names: RowNames, how: Interactions
) -> ItemFeatures:
    """Titles and attributes of items, by the catalogue, the second file or this one."""
    if how.catalogue is not None:
        return ItemFeatures(how.catalogue.all_titles)
    named: dict[str, Any] = {"items": items, "title": how.title, "attributes": how.attributes}
    if how.item_features is not None:
        return item_features.of_file(
            how.item_features, names, item=how.item, on_bad=how.on_bad, **named
        )
    row = np.full(len(found.table), NONE, np.int64)
    row[found.good] = rows
    return item_features.of_lines(found.table, row, names, **named)


def _ties(user: Ints, time: npt.NDArray[Any]) -> int:
    """Lines whose user has an earlier one of the same time: the file's order counts there."""
    order = np.lexsort((time, user))
    same = (np.diff(user[order]) == 0) & (np.diff(time[order]) == 0)
    return int(np.count_nonzero(same))


# -- values


def _clicked(table: Columns, name: str, threshold: float | None, bad: BadLines) -> Mask:
    found = values.labels(table, name, bad)
    if threshold is not None:
        return np.asarray(found >= threshold)
    bad.add(
        (found != 0) & (found != 1),
        lambda row: f"{name!r} is {values.quoted(table, name, row)}, neither 0 nor 1",
        hint="threshold = 4 makes every value of 4 or more a click",
    )
    return np.asarray(found == 1)


def _features(
    table: Columns, names: Sequence[str], bad: BadLines
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, int]]:
    """The feature columns by name, and how many ids those of text have."""
    found: dict[str, npt.NDArray[Any]] = {}
    sizes = {}
    for name in names:
        if values.is_number(table, name):
            found[name] = values.numbers(table, name, bad).astype(np.float32)
        else:
            coded = encoded(table, name)
            found[name], sizes[name] = coded.codes, len(coded.names)
    return found, sizes


# -- ids to rows


def _rows(found: Encoded, how: Interactions) -> tuple[Ints, int, RowNames, dict[str, Any]]:
    """The row of every line's item, how many there are, their names, and facts."""
    if how.ids == "hash":
        return _hashed(found, how.buckets, how.key)
    return _looked_up(found, how.dictionary, how.unknown)


def _at_clients(who: Ints, whom: Ints, clients: int, subjects: int) -> tuple[Ints, Ints]:
    """A person at a client as one number, and the pair behind each, client first.

    Whoever is not named counts as one more, and comes last.
    """
    if who is whom:
        return who, np.arange(clients)
    every = who * (subjects + 1) + np.where(whom < 0, subjects, whom)
    pairs, pair = np.unique(every, return_inverse=True)
    return pair.reshape(-1).astype(np.int64), pairs


def _looked_up(
    found: Encoded, dictionary: Path | str | ItemCatalogue | None, unknown: str
) -> tuple[Ints, int, RowNames, dict[str, Any]]:
    names = found.texts()
    if isinstance(dictionary, ItemCatalogue):
        place = np.array([dictionary.row(one) for one in names], dtype=np.int64)
        rows = place[found.codes]
        known_facts = {
            "rows": f"a catalogue of {len(dictionary.ids):,} items, {dictionary.room:,} rows wait",
            UNKNOWN_IDS: int((place < 0).sum()),
            UNKNOWN_LINES: int((rows < 0).sum()),
        }
        return rows, dictionary.rows, dictionary.names, known_facts
    if dictionary is None:
        facts: dict[str, Any] = {"rows": f"a dictionary made of this file, {len(names)} ids"}
        return found.codes, len(names), RowNames(names), facts
    known = read_dictionary(dictionary)
    cold = len(known) if unknown == "row" else -1
    place = np.array([known.get(one, -1) for one in names], dtype=np.int64)
    strange = place[found.codes] < 0
    rows = np.where(strange, cold, place[found.codes])
    fate = "share the last row" if unknown == "row" else "left out"
    facts = {
        "rows": f"the dictionary {Path(dictionary).name}, {len(known)} ids",
        "ids not in the dictionary": int((place < 0).sum()),
        f"interactions with them, {fate}": int(strange.sum()),
    }
    return rows, len(known) + (unknown == "row"), RowNames(list(known)), facts


def read_dictionary(path: Path | str) -> dict[str, int]:
    """A public list of ids, one per line: each id's row."""
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"{source}: no such dictionary", hint="a text file with one id per line")
    rows: dict[str, int] = {}
    for line, text in published.lines(source):
        one = text.strip()
        if not one or one in rows:
            what = f"{one[:40]!r} a second time" if one else "empty"
            raise ConfigError(f"{source}, line {line}: {what}", hint="one id per line, each once")
        rows[one] = len(rows)
    if not rows:
        raise ConfigError(f"{source}: empty", hint="a text file with one id per line")
    return rows


def bucket(one: str, *, buckets: int, key: bytes = KEY) -> int:
    """The row of an id under the keyed hash: 64 bits of BLAKE2b, modulo the number of rows."""
    digest = blake2b(one.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "big") % buckets


def _hashed(found: Encoded, buckets: int, key: bytes) -> tuple[Ints, int, RowNames, dict[str, Any]]:
    names = found.texts()
    place = np.array([bucket(one, buckets=buckets, key=key) for one in names], dtype=np.int64)
    facts = {
        "rows": f"a keyed hash into {buckets} rows, {len(names)} ids",
        "ids that share a row with another, beyond the first": len(names) - len(np.unique(place)),
    }
    return place[found.codes], buckets, RowNames(names, place), facts


def _categories(kinds: Encoded, rows: Ints, items: int) -> tuple[Ints, int, int]:
    """The category of each row of the items (the first it is listed with), how many, and doubts.

    Rows without one share a last category of their own.
    """
    inside = (kinds.codes >= 0) & (rows >= 0)
    item, kind, known = rows[inside], kinds.codes[inside], len(kinds.names)
    category_of = np.full(items, known, dtype=np.int64)
    category_of[item[::-1]] = kind[::-1]
    doubts = len(np.unique(item[category_of[item] != kind]))
    return category_of, known + bool((category_of == known).any()), doubts
