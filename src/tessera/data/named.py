"""Rating data by the name of its task: a task reads it, and so does an audit of the task's runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tessera.data.lastfm import ratings_lastfm
from tessera.data.movielens import ratings_1m, ratings_10m, ratings_100k
from tessera.data.ratings import RatingData

RATINGS: Final[Mapping[str, Callable[..., RatingData]]] = {
    "ratings-100k": ratings_100k,
    "ratings-1m": ratings_1m,
    "ratings-10m": ratings_10m,
    "ratings-lastfm": ratings_lastfm,
}
