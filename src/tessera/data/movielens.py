"""MovieLens as a click task: a rating of 4 or 5 is a click, a lower one is not.

Two layouts, 1M (`ml-1m`) and 100K (`ml-100k`). Rows of the item table are the movies as the set
lists them, in the order of their ids, so the public list is the dictionary that every client has.
Both sets are for research, with acknowledgement (Harper and Konstan 2015) and no redistribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tessera.data import files
from tessera.data.clicks import Ints, Log, check, click_data, numbered
from tessera.data.examples import ClientData
from tessera.errors import ConfigError

LIKED: Final = 4

_PUBLISHER: Final = "GroupLens Research, University of Minnesota"
_GENRES_100K: Final = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    source: files.Source
    ratings: str
    movies: str
    separator: str
    movie_separator: str
    movie_fields: int


ML_1M: Final = _Layout(
    source=files.Source(
        title="MovieLens 1M",
        publisher=_PUBLISHER,
        page="grouplens.org, Datasets, MovieLens 1M, ml-1m.zip",
        folders=("ml-1m",),
        files=("ratings.dat", "movies.dat"),
    ),
    ratings="ratings.dat",
    movies="movies.dat",
    separator="::",
    movie_separator="::",
    movie_fields=3,
)
ML_100K: Final = _Layout(
    source=files.Source(
        title="MovieLens 100K",
        publisher=_PUBLISHER,
        page="grouplens.org, Datasets, MovieLens 100K, ml-100k.zip",
        folders=("ml-100k",),
        files=("u.data", "u.item"),
    ),
    ratings="u.data",
    movies="u.item",
    separator="\t",
    movie_separator="|",
    movie_fields=5 + _GENRES_100K,
)


@dataclass(frozen=True, slots=True)
class Movies:
    """The movies as listed: ids ascending, titles and genres beside them."""

    ids: Ints
    titles: tuple[str, ...]
    genres: tuple[str, ...]


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


def titles(folder: Path | str | None = None, *, layout: _Layout = ML_1M) -> tuple[str, ...]:
    """The title of each row of the item table."""
    return _movies(layout, folder).titles


def _read(
    name: str, layout: _Layout, folder: Path | str | None, *, history: int, genres: bool
) -> ClientData:
    check(name, history=history)
    path = layout.source.find(layout.ratings, folder)
    movies = _movies(layout, folder)
    user, movie, rating, time = files.integers(
        path, separator=layout.separator, columns=4, keep=range(4)
    )
    item = np.searchsorted(movies.ids, movie)
    listed = movies.ids[np.minimum(item, len(movies.ids) - 1)] == movie
    _refuse(path, ~listed, movie, f"a movie that {layout.movies} does not list")
    _refuse(path, (rating < 1) | (rating > 5), rating, "a rating that is not 1 to 5")
    rows, people = numbered(user)
    return click_data(
        name,
        Log.sorted(rows, item, rating >= LIKED, time),
        users=len(people),
        items=len(movies.ids),
        history=history,
        category_of=numbered(np.array(movies.genres))[0] if genres else None,
        facts={
            "source": f"{layout.source.title}, {layout.source.publisher}",
            "click": f"a rating of {LIKED} or 5",
            "rated items": len(np.unique(item)),
        },
    )


def _refuse(path: Path, wrong: np.typing.NDArray[np.bool_], found: Ints, what: str) -> None:
    if wrong.any():
        line = int(np.argmax(wrong))
        raise ConfigError(f"{path}, line {line + 1}: {found[line]}: {what}")


def _movies(layout: _Layout, folder: Path | str | None) -> Movies:
    path = layout.source.find(layout.movies, folder)
    rows: dict[int, tuple[str, str]] = {}
    for line, text in files.lines(path, encoding="latin-1"):
        fields = text.split(layout.movie_separator)
        if len(fields) != layout.movie_fields or not fields[0].isdecimal():
            raise ConfigError(
                f"{path}, line {line}: not a movie: {layout.movie_fields} fields are due, of which "
                "the first is an id"
            )
        # 100K marks genres by flags, 1M by their joined names: either way one word per set.
        rows[int(fields[0])] = (fields[1], "|".join(fields[5:]) if len(fields) > 5 else fields[2])
    if not rows:
        raise ConfigError(f"{path}: empty", hint=layout.source.hint)
    ids = sorted(rows)
    return Movies(
        np.array(ids, dtype=np.int64),
        tuple(rows[one][0] for one in ids),
        tuple(rows[one][1] for one in ids),
    )
