"""MovieLens in both layouts: synthetic files here, the published ones where somebody has them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from tessera.data import movielens
from tessera.data.movielens import (
    ML_100K,
    movielens_1m,
    movielens_100k,
    ratings_1m,
    ratings_10m,
    ratings_100k,
    shops_1m,
    titles,
)
from tessera.data.ratings import (
    NO_ATTRIBUTES,
    NOT_A_NUMBER,
    NOT_LISTED,
    OFF_STEP,
    OUT_OF_RANGE,
    REPEATED,
)
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


@pytest.mark.parametrize(
    ("write", "read"), [(write_1m, movielens_1m), (write_100k, movielens_100k)]
)
def test_clicks_have_the_ids_and_titles_of_their_movies(tmp_path, write, read):
    data = read(write(tmp_path))
    assert data.names_of("user").names == ["3", "7"]
    assert [data.names_of("item").row(one) for one in MOVIES] == [0, 1, 2, 3]
    assert [data.title_of(row) for row in range(4)] == list(MOVIES.values())


@pytest.mark.parametrize(
    ("folder", "read", "listed", "cut"),
    [
        ("ml-1m", movielens_1m, "movies.dat.gz", "::"),
        ("ml-100k", movielens_100k, "u.item.gz", "|"),
    ],
)
def test_the_published_ids_and_titles_are_those_of_the_published_list(
    published, folder, read, listed, cut
):
    """Of 1M row 1180 is another film than the one whose id is 1180."""
    root = published(folder)
    with gzip.open(root / folder / listed, "rt", encoding="latin-1") as lines:
        titles = dict(line.rstrip("\n").split(cut)[:2] for line in lines)
    data = read(root)
    items, users = data.names_of("item"), data.names_of("user")
    assert {items.name(row): data.title_of(row) for row in range(len(items))} == titles
    assert users.row(6) == 5
    if folder == "ml-1m":
        assert items.name(1180) == "1198"
        assert data.title_of(1180) == titles["1198"] != titles["1180"]


def test_titles_stand_in_the_order_of_the_rows(tmp_path):
    assert titles(write_1m(tmp_path)) == tuple(MOVIES.values())
    assert titles(write_100k(tmp_path), layout=ML_100K) == tuple(MOVIES.values())


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ((1, 99, 4, 5), "line 7: 99: a movie that movies.dat does not list"),
        ((1, 10, 6, 5), "line 7: 6: a rating that is not 1 to 5"),
        ((1, 10, 0, 5), "line 7: 0: a rating"),
        ((1, 10, "4.5", 5), "line 7: 'rating' is not a whole number: '4.5'"),
        ((1, 10, 4), "line 7: 3 fields where 4"),
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


# -- ratings


EIGHTEEN = movielens.GENRES
PEOPLE = {3: (20, "M", "writer", 20), 7: (46, "F", "artist", 2)}


def rated_1m(folder: Path, ratings=RATINGS) -> Path:
    lines = (f"{one}::{sex}::{age}::{code}::55117" for one, (age, sex, _, code) in PEOPLE.items())
    (write_1m(folder, ratings) / "ml-1m" / "users.dat").write_text("\n".join(lines) + "\n")
    return folder


def rated_100k(folder: Path, ratings=RATINGS) -> Path:
    own = write_100k(folder) / "ml-100k"
    lines = (f"{one}|{age}|{sex}|{work}|55117" for one, (age, sex, work, _) in PEOPLE.items())
    (own / "u.user").write_text("\n".join(lines) + "\n")
    text = ["\t".join(map(str, row)) + "\n" for row in ratings]
    (own / "u.data").write_text("".join(text))
    (own / "ua.base").write_text("".join(text[:4]))
    (own / "ua.test").write_text("".join(text[4:]))
    return folder


def rated_10m(folder: Path) -> Path:
    own = folder / "ml-10M100K"
    own.mkdir()
    rows = [*RATINGS, (7, 30, 0.5, 130), (7, 40, 4.5, 120), (3, 30, 4.25, 10), (3, 30, 0, 20)]
    (own / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in rows))
    genres = {10: "Children|Drama", 20: "IMAX|Comedy", 30: "(no genres listed)", 40: "Drama"}
    listed = "".join(f"{one}::{MOVIES[one]}::{genres[one]}\n" for one in MOVIES)
    (own / "movies.dat").write_text(listed, encoding="utf-8")
    tags = [(3, 10, "Slow"), (7, 10, "slow "), (7, 20, "fun::ny"), (7, 99, "slow"), (7, 40, "fun")]
    text = "".join("::".join(map(str, row)) + "::1215184630\n" for row in tags)
    (own / "tags.dat").write_text(text, encoding="utf-8")
    return folder


def everything(data):
    return {
        (int(u), int(i)): float(r)
        for part in (data.train, data.test)
        for u, i, r in zip(part["user"], part["item"], part["label"], strict=True)
    }


def test_ratings_over_shops_are_the_same_ratings_of_the_same_people(tmp_path):
    folder = rated_1m(tmp_path)
    alone, shops = ratings_1m(folder), shops_1m(folder, shops=5, shops_each=2)
    assert shops.clients == 5 and shops.subjects == alone.clients
    assert shops.profiles.values.shape == (5, 0)
    for own, moved in ((alone.train, shops.train), (alone.test, shops.test)):
        before = sorted(zip(own["user"], own["item"], own["label"], strict=True))
        assert sorted(zip(moved["subject"], moved["item"], moved["label"], strict=True)) == before
    assert shops.facts["clients per subject"].endswith("2 at most")


@pytest.mark.parametrize(("write", "read"), [(rated_1m, ratings_1m), (rated_100k, ratings_100k)])
def test_ratings_are_kept_as_they_are(tmp_path, write, read):
    data = read(write(tmp_path))
    row, movie = {3: 0, 7: 1}, {10: 0, 20: 1, 30: 2, 40: 3}
    assert everything(data) == {(row[u], movie[m]): r for u, m, r, _ in RATINGS}
    assert data.titles == tuple(MOVIES.values())
    assert (len(data.train), len(data.test)) == (5, 1)
    assert (data.low, data.high, data.step) == (1, 5, 1)
    assert data.facts["rated items"] == 3


def test_movies_have_genres_and_a_year(tmp_path):
    data = ratings_1m(rated_1m(tmp_path))
    assert data.items.names == (*EIGHTEEN, "year")
    assert len(EIGHTEEN) == 18
    column = dict(zip(data.items.names, data.items.values.T.tolist(), strict=True))
    assert column["Drama"] == [1, 1, 0, 1]
    assert column["Comedy"] == [0, 1, 0, 0]
    assert column["War"] == [0, 0, 1, 0]
    assert sum(map(sum, (column[one] for one in EIGHTEEN))) == 5
    years = np.array([1990, 1991, 1992, 1993])
    assert column["year"] == pytest.approx((years - 1991.5) / years.std())


def test_the_flags_of_100k_are_the_same_genres_and_unknown_is_none(tmp_path):
    folder = rated_100k(tmp_path)
    path = folder / "ml-100k" / "u.item"
    listed = path.read_text(encoding="latin-1").splitlines()
    flags = "|".join("1" if place == 0 else "0" for place in range(19))
    listed += [f"50|unknown||||{flags}", f"51|Late (1999)|02-Feb-1998||no address|{flags}"]
    path.write_text("\n".join(listed) + "\n", encoding="latin-1")
    data = ratings_100k(folder)
    column = dict(zip(data.items.names, data.items.values.T.tolist(), strict=True))
    assert column["Action"] == [1, 0, 0, 1, 0, 0]  # the second of 19 flags
    assert column["Adventure"] == [0, 1, 0, 0, 0, 0]
    assert column["Animation"] == [0, 0, 1, 0, 0, 0]
    assert data.facts["items without a year"] == 1
    assert column["year"][4] == 0  # the mean
    assert column["year"][5] > 0  # of the release date, not of the title
    assert column["year"][5] == pytest.approx(
        2.0
    )  # 8 years after four others: mean 1.6, spread 3.2
    assert data.facts[NO_ATTRIBUTES] == 1


@pytest.mark.parametrize(
    ("write", "read", "works"),
    [
        (rated_1m, ratings_1m, [f"occupation {code}" for code in range(21)]),
        (rated_100k, ratings_100k, ["occupation artist", "occupation writer"]),
    ],
)
def test_users_have_age_gender_and_occupation(tmp_path, write, read, works):
    data = read(write(tmp_path))
    assert data.profiles.names == ("age", "gender", *works)
    assert data.profiles.values[:, 0] == pytest.approx([(20 - 34) / 12, 1.0])
    assert data.profiles.values[:, 1].tolist() == [1, -1]
    first, second = data.profiles.values[:, 2:].argmax(axis=1)
    assert (works[first], works[second]) in {
        ("occupation writer", "occupation artist"),
        ("occupation 20", "occupation 2"),
    }
    assert data.profiles.values[:, 2:].sum(axis=1).tolist() == [1, 1]
    assert data.facts["users with an unknown attribute"] == 0


def test_a_user_of_whom_nothing_is_known_has_zeros(tmp_path):
    folder = rated_1m(tmp_path, [*RATINGS, (12, 10, 4, 5)])
    path = folder / "ml-1m" / "users.dat"
    path.write_text("3::X::::0::1\n7::M::1::99::1\n")
    data = ratings_1m(folder)
    assert not data.profiles.values[2].any()
    assert data.profiles.values[0, :2].tolist() == [0, 0]
    assert data.profiles.values[1, 0] == pytest.approx((16 - 34) / 12)  # the youngest group is "1"
    assert data.facts["users with an unknown attribute"] == 3
    path.write_text("3::M::25\n")
    with pytest.raises(ConfigError, match="line 1: not a user"):
        ratings_1m(folder)


def test_ratings_that_cannot_be_are_left_out_and_told(tmp_path):
    bad = [(3, 30, 6, 1), (3, 30, "nan", 1), (3, 30, "good", 1), (3, 99, 4, 1), (3, 10, 2, 70)]
    for write, read in ((rated_1m, ratings_1m), (rated_100k, ratings_100k)):
        data = read(write(tmp_path, [*RATINGS, *bad]))
        expected = {OUT_OF_RANGE: 1, NOT_A_NUMBER: 2, NOT_LISTED: 1, REPEATED: 1}
        assert {name: data.facts[name] for name in expected} == expected
        assert len(everything(data)) == 6
        assert everything(data)[0, 0] == 2


def test_the_published_split_of_100k_is_read_from_its_files(tmp_path):
    data = ratings_100k(rated_100k(tmp_path), split="published")
    assert data.test["item"].tolist() == [1, 3]
    assert data.test["user"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match="no test part was published"):
        ratings_1m(rated_1m(tmp_path), split="published")


def test_10m_has_half_stars_and_tags(tmp_path):
    data = ratings_10m(rated_10m(tmp_path), columns=2)
    assert (data.low, data.high, data.step) == (0.5, 5, 0.5)
    rating = everything(data)
    assert (rating[1, 2], rating[1, 3], rating[0, 2]) == (0.5, 4.5, 4.25)
    assert data.facts[OFF_STEP] == 1
    assert data.facts[OUT_OF_RANGE] == 1
    assert data.facts[REPEATED] == 1
    assert data.titles[1] == "S\u00e9cond (1991)"
    assert data.items.names == (*EIGHTEEN, "year", "tags 1", "tags 2")
    column = dict(zip(data.items.names, data.items.values.T.tolist(), strict=True))
    assert column["Children's"] == [1, 0, 0, 0]
    assert column["Comedy"] == [0, 1, 0, 0]
    assert column["tags 1"][2] == column["tags 2"][2] == 0
    assert all(column["tags 1"][one] or column["tags 2"][one] for one in (0, 1, 3))
    assert data.facts["tags"] == 3  # slow, fun::ny and fun
    assert data.facts["tags left out: item not listed"] == 1
    assert data.profiles.values.shape == (2, 0)


def test_a_broken_tag_is_named(tmp_path):
    path = rated_10m(tmp_path) / "ml-10M100K" / "tags.dat"
    path.write_text("3::10::slow\n")
    with pytest.raises(ConfigError, match="line 1: not a tag"):
        ratings_10m(tmp_path)


def test_the_published_ratings_of_100k_have_their_counts(published):
    folder = published("ml-100k")
    data = ratings_100k(folder)
    assert (len(data.train), len(data.test)) == (80_000, 20_000)
    assert data.sizes == {"user": 943, "item": 1_682}
    assert data.items.values.shape == (1_682, 19)
    assert data.profiles.values.shape == (943, 23)
    assert data.facts["items without a year"] == 1
    total = float(data.train["label"].sum() + data.test["label"].sum())
    assert total / 100_000 == pytest.approx(3.52986)
    ua = ratings_100k(folder, split="published")
    assert (len(ua.train), len(ua.test)) == (90_570, 9_430)
    assert (np.diff(ua.test_offsets) == 10).all()
    assert everything(ua) == everything(data)
    tuning = ratings_100k(folder, part="validation")
    assert (len(tuning.train), len(tuning.test)) == (72_000, 8_000)


@pytest.mark.slow
def test_the_published_ratings_of_1m_have_their_counts(published):
    data = ratings_1m(published("ml-1m"))
    assert (len(data.train), len(data.test)) == (800_167, 200_042)
    assert data.sizes == {"user": 6_040, "item": 3_883}
    assert data.facts["rated items"] == 3_706
    assert data.profiles.values.shape == (6_040, 23)
    assert data.facts["items without a year"] == 0
    assert data.facts["users with an unknown attribute"] == 0


# -- clicks of the published sets


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
