"""MovieLens, as ratings, and as clicks: a rating of 4 or 5 is one, a lower one is not.

Three layouts: 10M (`ml-10M100K`, ratings only), 1M (`ml-1m`) and 100K (`ml-100k`). Rows of the item
table are the movies as the set lists them, in the order of their ids, so the public list is the
dictionary that every client has. All are for research, with acknowledgement (Harper and Konstan
2015) and no redistribution.

Attributes of a movie are its genres, one column each, and its year, standardised over the list; of
a user, where the set has them, age, gender and occupation. Age is scaled by numbers fixed here:
a mean over users would be a release of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.data import published, values
from tessera.data.clicks import Ints, Log, check, click_data, numbered
from tessera.data.delimited import Dialect
from tessera.data.examples import NONE, ClientData, Timeline
from tessera.data.ratings import (
    TEST_SHARE,
    Attributes,
    Floats,
    Mask,
    RatingData,
    rating_data,
    standardised,
)
from tessera.data.row_names import RowNames
from tessera.data.sequences import LENGTH, SequenceData, Sequences, one_of, sequence_data
from tessera.data.split import TEST
from tessera.data.subjects import at_clients, held_by
from tessera.data.tags import Tagging, tag_attributes
from tessera.errors import ConfigError

LIKED: Final = 4

_PUBLISHER: Final = "GroupLens Research, University of Minnesota"
_GENRES_100K: Final = 19
_OCCUPATIONS_1M: Final = 21
_UNDER_18, _ABOUT = 1, 16  # 1M gives the first year of an age group, and 1 for the youngest
_AGE_MIDDLE, _AGE_SPREAD = 34.0, 12.0

_PERIODS: Final = (1930, 1940, *range(1950, 1971, 5), *range(1973, 1983, 3), *range(1984, 2001))
"""First years of release of the periods in which films are counted; one before all of them."""
_YEAR: Final = re.compile(r"[-(](\d{4})\)?\s*$")

GENRES: Final = tuple(
    "Action|Adventure|Animation|Children's|Comedy|Crime|Documentary|Drama|Fantasy|Film-Noir|Horror|"
    "Musical|Mystery|Romance|Sci-Fi|Thriller|War|Western".split("|")
)
"""In the order of 100K's flags, whose first, "unknown", is not a genre. 10M writes "Children"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileFormat:
    source: published.Source
    ratings: str
    movies: str
    separator: str
    movie_separator: str
    movie_fields: int
    encoding: str = "latin-1"
    profiles: str = ""
    tags: str = ""
    low: float = 1.0
    step: float = 1.0

    @property
    def rated(self) -> Dialect:
        """How the ratings are written."""
        return published.written(self.separator, "user", "movie", "rating", "time")


ML_1M: Final = _FileFormat(
    source=published.Source(
        title="MovieLens 1M",
        publisher=_PUBLISHER,
        page="grouplens.org, Datasets, MovieLens 1M, ml-1m.zip",
        folders=("ml-1m",),
        files=("ratings.dat", "movies.dat", "users.dat"),
    ),
    ratings="ratings.dat",
    movies="movies.dat",
    separator="::",
    movie_separator="::",
    movie_fields=3,
    profiles="users.dat",
)
ML_10M: Final = _FileFormat(
    source=published.Source(
        title="MovieLens 10M",
        publisher=_PUBLISHER,
        page="grouplens.org, Datasets, MovieLens 10M, ml-10m.zip",
        folders=("ml-10M100K", "ml-10m"),
        files=("ratings.dat", "movies.dat", "tags.dat"),
    ),
    ratings="ratings.dat",
    movies="movies.dat",
    separator="::",
    movie_separator="::",
    movie_fields=3,
    encoding="utf-8",
    tags="tags.dat",
    low=0.5,
    step=0.5,
)
ML_100K: Final = _FileFormat(
    source=published.Source(
        title="MovieLens 100K",
        publisher=_PUBLISHER,
        page="grouplens.org, Datasets, MovieLens 100K, ml-100k.zip",
        folders=("ml-100k",),
        files=("u.data", "u.item", "u.user", "ua.base", "ua.test"),
    ),
    ratings="u.data",
    movies="u.item",
    separator="\t",
    movie_separator="|",
    movie_fields=5 + _GENRES_100K,
    profiles="u.user",
)
_PUBLISHED_100K: Final = ("ua.base", "ua.test")


@dataclass(frozen=True, slots=True)
class Movies:
    """The movies as listed: ids ascending, beside them titles, genres and years (NaN: unknown)."""

    ids: Ints
    titles: tuple[str, ...]
    genres: tuple[str, ...]
    years: Floats

    def rows(self, ids: Ints) -> Ints:
        """Rows of the table; -1 for what is not listed."""
        row = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[row] == ids, row, -1)

    def attributes(self) -> dict[str, Floats]:
        """A column for each genre, and the year."""
        has = [_genres(words) for words in self.genres]
        columns = {genre: np.array([float(genre in own) for own in has]) for genre in GENRES}
        return {**columns, "year": standardised(self.years)}

    def classes(self) -> dict[str, Floats]:
        """The year of release, single years where there are many films, and the genres in shares:
        what a transition between films is counted by."""
        years = np.searchsorted(_PERIODS, self.years, side="right")
        has = [_genres(words) for words in self.genres]
        genres = np.array([[float(genre in own) for genre in GENRES] for own in has])
        return {
            "year": one_of(np.where(np.isnan(self.years), NONE, years)),
            "genre": genres / np.maximum(genres.sum(axis=1, keepdims=True), 1.0),
        }


def movielens_1m(
    folder: Path | str | None = None, *, history: int = 20, genres: bool = False
) -> ClientData:
    """1,000,209 ratings of 6,040 users; with `genres`, a movie's category is its set of genres."""
    return _read("movielens-1m", ML_1M, folder, history=history, genres=genres)


def movielens_100k(
    folder: Path | str | None = None, *, history: int = 20, genres: bool = False
) -> ClientData:
    """100,000 ratings of 943 users, as in `movielens_1m`."""
    return _read("movielens-100k", ML_100K, folder, history=history, genres=genres)


def sequences_1m(
    folder: Path | str | None = None, *, history: int = LENGTH, part: str = TEST
) -> SequenceData:
    """1,000,209 films that 6,040 users rated, in the order of time; ratings do not count."""
    return _sequences("sequences-1m", ML_1M, folder, history, part)


def sequences_100k(
    folder: Path | str | None = None, *, history: int = LENGTH, part: str = TEST
) -> SequenceData:
    """100,000 films that 943 users rated, likewise."""
    return _sequences("sequences-100k", ML_100K, folder, history, part)


def ratings_100k(
    folder: Path | str | None = None,
    split: str = "random",
    test_share: float = TEST_SHARE,
    seed: int = 0,
    part: str = "test",
) -> RatingData:
    """100,000 ratings of 943 users; the published split holds out ten ratings of each (ua)."""
    return _ratings("ratings-100k", ML_100K, folder, split, test_share, seed, part)


def ratings_1m(
    folder: Path | str | None = None,
    split: str = "random",
    test_share: float = TEST_SHARE,
    seed: int = 0,
    part: str = "test",
) -> RatingData:
    """1,000,209 ratings of 6,040 users; no split was published."""
    return _ratings("ratings-1m", ML_1M, folder, split, test_share, seed, part)


def shops_1m(
    folder: Path | str | None = None,
    shops: int = 20,
    shops_each: int = 2,
    split: str = "random",
    test_share: float = TEST_SHARE,
    seed: int = 0,
    part: str = "test",
) -> RatingData:
    """The same, with a person's ratings over `shops_each` of the `shops`, which are the clients.

    Which shops, and which rating lies at which of them, follows from the seed. People have no
    attributes here: those of 1M are each person's own, and a client is not a person.
    """
    data = ratings_1m(folder, split, test_share, seed, part)
    person = np.concatenate([data.train["user"], data.test["user"]])
    return replace(
        data,
        name="shops-1m",
        profiles=Attributes.of({}, rows=shops),
        ids={"subject": data.ids["user"], "item": data.ids["item"]},
        **held_by(
            data,
            at_clients(person, clients=shops, each=shops_each, seed=seed),
            person,
            clients=shops,
            subjects=data.clients,
        ),
    )


def ratings_10m(
    folder: Path | str | None = None,
    columns: int = 20,
    split: str = "random",
    test_share: float = TEST_SHARE,
    seed: int = 0,
    part: str = "test",
) -> RatingData:
    """10,000,054 ratings of 71,567 users, in half stars, as published; tags as `columns` numbers.

    The set has no attributes of users, so clients have no profiles. The set's own scripts can make
    splits, but none lies beside the files.
    """
    return _ratings("ratings-10m", ML_10M, folder, split, test_share, seed, part, columns)


def titles(folder: Path | str | None = None, *, layout: _FileFormat = ML_1M) -> tuple[str, ...]:
    """The title of each row of the item table."""
    return _movies(layout, folder).titles


def _read(
    name: str,
    layout: _FileFormat,
    folder: Path | str | None,
    *,
    history: int,
    genres: bool,
    until: int | None = None,
) -> ClientData:
    check(name, history=history)
    path = layout.source.find(layout.ratings, folder)
    movies = _movies(layout, folder)
    table, bad = published.table(path, layout.rated, layout.rated.names, distinct=("time",))
    user, movie, rating, time = (values.whole(table, name, bad) for name in layout.rated.names)
    item = movies.rows(movie)
    bad.add(item < 0, lambda row: f"{movie[row]}: a movie that {layout.movies} does not list")
    bad.add((rating < 1) | (rating > 5), lambda row: f"{rating[row]}: a rating that is not 1 to 5")
    published.refuse(bad)
    rows, clients = numbered(user)
    kept = slice(None) if until is None else time <= until
    data = click_data(
        name,
        Log.sorted(rows[kept], item[kept], rating[kept] >= LIKED, time[kept]),
        users=len(clients),
        items=len(movies.ids),
        history=history,
        category_of=numbered(np.array(movies.genres))[0] if genres else None,
        facts={
            "source": f"{layout.source.title}, {layout.source.publisher}",
            "click": f"a rating of {LIKED} or 5",
            "rated items": len(np.unique(item)),
        },
        ids={"user": RowNames.of(clients), "item": RowNames.of(movies.ids)},
        titles=movies.titles,
    )
    again = partial(_read, name, layout, folder, history=history, genres=genres)
    return replace(data, timeline=Timeline.of(time, lambda until: again(until=until)))


def _sequences(
    name: str,
    layout: _FileFormat,
    folder: Path | str | None,
    history: int,
    part: str,
    until: int | None = None,
) -> SequenceData:
    movies = _movies(layout, folder)
    user, movie, _, time = _table(layout, layout.source.find(layout.ratings, folder))
    item = movies.rows(movie)
    rows, clients = numbered(user[item >= 0])
    kept = slice(None) if until is None else time[item >= 0] <= until
    data = sequence_data(
        name,
        Sequences.sorted(
            rows[kept],
            item[item >= 0][kept],
            time[item >= 0][kept],
            users=len(clients),
            items=len(movies.ids),
        ),
        items=len(movies.ids),
        length=history,
        part=part,
        ids={"user": RowNames.of(clients), "item": RowNames.of(movies.ids)},
        titles=movies.titles,
        attributes=movies.classes(),
        facts={
            "source": f"{layout.source.title}, {layout.source.publisher}",
            "event": "a rating, whatever it is",
            "rated items": len(np.unique(item[item >= 0])),
            "ratings of movies that are not listed, left out": int((item < 0).sum()),
        },
    )
    again = partial(_sequences, name, layout, folder, history, part)
    return replace(data, timeline=Timeline.of(time, again))


def _ratings(
    name: str,
    layout: _FileFormat,
    folder: Path | str | None,
    split: str,
    test_share: float,
    seed: int,
    part: str,
    columns: int = 0,
) -> RatingData:
    movies = _movies(layout, folder)
    held: Mask | None = None
    if split == "published" and layout is ML_100K:
        pieces = [_table(layout, layout.source.find(own, folder)) for own in _PUBLISHED_100K]
        held = np.repeat([False, True], [len(piece[0]) for piece in pieces])
        user, movie, rating, time = (np.concatenate(column) for column in zip(*pieces, strict=True))
    else:
        user, movie, rating, time = _table(layout, layout.source.find(layout.ratings, folder))
    rows, ids = numbered(user)
    described: dict[str, Floats] = movies.attributes()
    facts: dict[str, Any] = {
        "source": f"{layout.source.title}, {layout.source.publisher}",
        "items without a year": int(np.isnan(movies.years).sum()),
    }
    if layout.tags:
        tagging = _tagging(layout, movies, folder)
        tags = tag_attributes(tagging, items=len(movies.ids), columns=columns)
        described |= dict(zip(tags.names, tags.values.T, strict=True))
        facts |= tagging.facts()
    profiles: dict[str, Floats] = {}
    if layout.profiles:
        profiles, incomplete = _profiles(layout, ids, folder)
        facts["users with an unknown attribute"] = incomplete
    return rating_data(
        name,
        user=rows,
        item=movies.rows(movie),
        rating=rating,
        time=time,
        users=len(ids),
        items=len(movies.ids),
        low=layout.low,
        high=5.0,
        step=layout.step,
        item_attributes=Attributes.of(described, rows=len(movies.ids)),
        profiles=Attributes.of(profiles, rows=len(ids)),
        ids={"user": RowNames.of(ids), "item": RowNames.of(movies.ids)},
        titles=movies.titles,
        split=split,
        test_share=test_share,
        seed=seed,
        part=part,
        held=held,
        facts=facts,
    )


def _table(layout: _FileFormat, path: Path) -> tuple[Ints, Ints, Floats, Ints]:
    """User, movie, rating (NaN where it is not a number) and time."""
    table, bad = published.table(path, layout.rated, layout.rated.names, distinct=("time",))
    user, movie, time = (values.whole(table, name, bad) for name in ("user", "movie", "time"))
    published.refuse(bad)
    return user, movie, values.numbers(table, "rating", bad), time


def _profiles(
    layout: _FileFormat, ids: Ints, folder: Path | str | None
) -> tuple[dict[str, Floats], int]:
    """Age, gender (1 for M, -1 for F) and a column per occupation; how many are not complete.

    What is not known is 0 or, of the age, NaN.
    """
    path = layout.source.find(layout.profiles, folder)
    separator = "|" if layout is ML_100K else "::"
    listed: dict[int, tuple[str, str, str]] = {}
    for line, text in published.lines(path, encoding=layout.encoding):
        fields = text.split(separator)
        if len(fields) != 5 or not fields[0].isdecimal():
            raise ConfigError(
                f"{path}, line {line}: not a user: 5 fields are due, the first of them an id"
            )
        age, sex = (fields[1], fields[2]) if layout is ML_100K else (fields[2], fields[1])
        listed[int(fields[0])] = (age, sex, fields[3])
    occupations = (
        [str(code) for code in range(_OCCUPATIONS_1M)]
        if layout is ML_1M
        else sorted({occupation for _, _, occupation in listed.values()})
    )
    found = [listed.get(int(one), ("", "", "")) for one in ids]
    ages = np.array([float(age) if age.isdecimal() else np.nan for age, _, _ in found])
    if layout is ML_1M:
        ages[ages == _UNDER_18] = _ABOUT
    sign = {"M": 1.0, "F": -1.0}
    gender = np.array([sign.get(sex, 0.0) for _, sex, _ in found])
    works = {
        f"occupation {one}": np.array([float(own == one) for _, _, own in found])
        for one in occupations
    }
    working = np.logical_or.reduce([column > 0 for column in works.values()])
    partial = np.isnan(ages) | (gender == 0) | ~working
    columns = {"age": (ages - _AGE_MIDDLE) / _AGE_SPREAD, "gender": gender, **works}
    return columns, int(partial.sum())


def _tagging(layout: _FileFormat, movies: Movies, folder: Path | str | None) -> Tagging:
    """Who gave which tag to which movie, as (movie, tag) pairs; case does not count."""
    path = layout.source.find(layout.tags, folder)
    ids: list[int] = []
    words: list[str] = []
    for line, text in published.lines(path, encoding=layout.encoding):
        fields = text.split(layout.separator)
        if len(fields) < 4 or not fields[1].isdecimal():
            raise ConfigError(f"{path}, line {line}: not a tag: user, movie, tag and time are due")
        ids.append(int(fields[1]))
        words.append(layout.separator.join(fields[2:-1]).strip().casefold())
    return Tagging.of(movies.rows(np.array(ids, dtype=np.int64)), words)


def _genres(words: str) -> frozenset[str]:
    """The genres behind 100K's joined flags or the others' joined names."""
    parts = words.split("|")
    if len(parts) == _GENRES_100K and set(parts) <= {"0", "1"}:
        return frozenset(one for one, flag in zip(GENRES, parts[1:], strict=True) if flag == "1")
    return frozenset("Children's" if one == "Children" else one for one in parts)


def _movies(layout: _FileFormat, folder: Path | str | None) -> Movies:
    path = layout.source.find(layout.movies, folder)
    rows: dict[int, tuple[str, str, float]] = {}
    for line, text in published.lines(path, encoding=layout.encoding):
        fields = text.split(layout.movie_separator)
        if len(fields) != layout.movie_fields or not fields[0].isdecimal():
            raise ConfigError(
                f"{path}, line {line}: not a movie: {layout.movie_fields} fields are due, of which "
                "the first is an id"
            )
        # 100K marks genres by flags, 1M by their joined names: either way one word per set.
        genres = "|".join(fields[5:]) if len(fields) > 5 else fields[2]
        # 100K has a release date, 1M and 10M the year at the end of the title.
        year = _YEAR.search(fields[2] if len(fields) > 5 else fields[1])
        rows[int(fields[0])] = (fields[1], genres, float(year[1]) if year else np.nan)
    if not rows:
        raise ConfigError(f"{path}: empty", hint=layout.source.hint)
    ids = sorted(rows)
    return Movies(
        np.array(ids, dtype=np.int64),
        tuple(rows[one][0] for one in ids),
        tuple(rows[one][1] for one in ids),
        np.array([rows[one][2] for one in ids], dtype=np.float64),
    )
