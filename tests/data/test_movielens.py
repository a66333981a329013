"""MovieLens in both layouts: made-up files here, the published ones where somebody has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.data.movielens import ML_100K, movielens_1m, movielens_100k, titles
from tessera.errors import ConfigError

RATINGS = [  # user, movie, rating, time; movie 30 is listed and never rated
    (7, 20, 5, 100),
    (3, 10, 4, 50),
    (7, 10, 3, 90),
    (3, 40, 1, 60),
    (3, 20, 4, 55),
    (7, 40, 4, 110),
]
MOVIES = {10: "First (1990)", 20: "S\u00e9cond (1991)", 30: "Third (1992)", 40: "Fourth (1993)"}
GENRES = {10: "Drama", 20: "Comedy|Drama", 30: "War", 40: "Drama"}


def write_1m(folder: Path, ratings=RATINGS) -> Path:
    own = folder / "ml-1m"
    own.mkdir()
    lines = "".join("::".join(map(str, row)) + "\n" for row in ratings)
    (own / "ratings.dat").write_text(lines, encoding="latin-1")
    listed = "".join(f"{one}::{MOVIES[one]}::{GENRES[one]}\n" for one in reversed(MOVIES))
    (own / "movies.dat").write_text(listed, encoding="latin-1")
    return folder


def write_100k(folder: Path) -> Path:
    own = folder / "ml-100k"
    own.mkdir()
    (own / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in RATINGS))
    flags = {10: 1, 20: 2, 30: 3, 40: 1}
    listed = "".join(
        f"{one}|{MOVIES[one]}|01-Jan-1990||no address|"
        + "|".join(str(int(k == flags[one])) for k in range(19))
        + "\n"
        for one in MOVIES
    )
    (own / "u.item").write_text(listed, encoding="latin-1")
    return folder


@pytest.mark.parametrize(
    ("write", "read"), [(write_1m, movielens_1m), (write_100k, movielens_100k)]
)
def test_ratings_become_clicks_in_the_order_of_time(tmp_path, write, read):
    data = read(write(tmp_path), history=2)
    assert data.sizes == {"user": 2, "item": 4}
    first, second = data.of(0), data.of(1)  # users 3 and 7
    assert first["item"].tolist() == [0, 1, 3]
    assert first["label"].tolist() == [1, 1, 0]
    assert first["history"].tolist() == [[-1, -1], [0, -1], [0, 1]]
    assert second["item"].tolist() == [0, 1, 3]
    assert second["history"].tolist() == [[-1, -1], [-1, -1], [1, -1]]
    assert data.facts["rated items"] == 3


@pytest.mark.parametrize(
    ("write", "read"), [(write_1m, movielens_1m), (write_100k, movielens_100k)]
)
def test_movies_with_the_same_genres_are_of_one_category(tmp_path, write, read):
    data = read(write(tmp_path), genres=True)
    assert data.category_of is not None
    assert data.sizes["category"] == 3
    assert data.category_of[0] == data.category_of[3]
    assert len(set(data.category_of.tolist())) == 3


def test_titles_stand_in_the_order_of_the_rows(tmp_path):
    assert titles(write_1m(tmp_path)) == tuple(MOVIES.values())
    assert titles(write_100k(tmp_path), layout=ML_100K) == tuple(MOVIES.values())


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ((1, 99, 4, 5), "line 7: 99: a movie that movies.dat does not list"),
        ((1, 10, 6, 5), "line 7: 6: a rating that is not 1 to 5"),
        ((1, 10, 0, 5), "line 7: 0: a rating"),
        ((1, 10, "4.5", 5), "line 7: column 3"),
        ((1, 10, 4), "line 7: 3 columns"),
    ],
)
def test_a_rating_that_cannot_be_is_named(tmp_path, row, match):
    with pytest.raises(ConfigError, match=match):
        movielens_1m(write_1m(tmp_path, [*RATINGS, row]))


def test_a_broken_list_of_movies_is_named(tmp_path):
    write_1m(tmp_path)
    path = tmp_path / "ml-1m" / "movies.dat"
    for text, match in [("1::a::b\n2::c\n", "line 2: not a movie"), ("", "empty")]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=match):
            movielens_1m(tmp_path)


def test_without_the_files_the_error_says_where_they_come_from(tmp_path):
    with pytest.raises(ConfigError) as caught:
        movielens_1m(tmp_path)
    assert "GroupLens" in str(caught.value.hint)
    assert "ml-1m/" in str(caught.value.hint)


@pytest.mark.slow
def test_the_published_1m_has_its_counts(published):
    folder = published("ml-1m")
    data = movielens_1m(folder)
    assert data.facts["examples"] == 1_000_209
    assert data.clients == data.sizes["user"] == 6_040
    assert data.facts["rated items"] == 3_706
    assert data.sizes["item"] == len(titles(folder)) == 3_883
    assert data.facts["clicks"] == 575_281
    assert (len(data.train), len(data.test)) == (802_553, 197_656)
    per_user = np.diff(data.offsets) + np.diff(data.test_offsets)
    assert per_user.min() == 20  # as the set's own description has it
    assert (np.diff(data.test_offsets) == per_user // 5).all()


def test_the_published_100k_has_its_counts(published):
    data = movielens_100k(published("ml-100k"))
    assert data.facts["examples"] == 100_000
    assert data.sizes == {"user": 943, "item": 1_682}
    assert data.facts["clicks"] == 55_375
