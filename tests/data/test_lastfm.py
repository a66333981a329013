"""Last.fm: synthetic files here, the published ones where somebody has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data.lastfm import binned, ratings_lastfm, sequences_lastfm
from tessera.data.ratings import NO_ATTRIBUTES, NOT_A_NUMBER, NOT_LISTED, OUT_OF_RANGE, REPEATED
from tessera.errors import ConfigError

PLAYS = [  # user, artist, plays
    (9, 70, 10),
    (2, 51, 100),
    (2, 52, 20),
    (2, 70, 30),
    (9, 51, 20),
    (9, 52, 50),
    (4, 52, 7),
    (4, 70, 60),
    (4, 51, 80),
    (4, 60, 1),
]
ARTISTS = {70: "Séventy", 51: "Fifty-one", 52: "Fifty-two", 60: "Sixty"}
TAGS = [(2, 51, 13), (2, 52, 13), (9, 51, 14), (4, 70, 15), (4, 999, 13)]


def write(folder: Path, plays=PLAYS, artists=ARTISTS, header="userID\tartistID\tweight") -> Path:
    own = folder / "hetrec2011-lastfm-2k"
    own.mkdir(exist_ok=True)
    rows = "".join("\t".join(map(str, row)) + "\r\n" for row in plays)
    (own / "user_artists.dat").write_bytes(f"{header}\r\n{rows}".encode())
    listed = "".join(f"{one}\t{name}\taddress\tpicture\n" for one, name in artists.items())
    text = "id\tname\turl\tpictureURL\n" + listed
    (own / "artists.dat").write_text(text, encoding="utf-8")
    tags = "".join(f"{u}\t{a}\t{t}\t1\t4\t2009\r\n" for u, a, t in TAGS)
    head = "userID\tartistID\ttagID\tday\tmonth\tyear\r\n"
    (own / "user_taggedartists.dat").write_bytes((head + tags).encode())
    return folder


def everything(data):
    return {
        (int(u), int(i)): float(r)
        for part in (data.train, data.test)
        for u, i, r in zip(part["user"], part["item"], part["label"], strict=True)
    }


def test_play_counts_become_ratings_by_quintiles(tmp_path):
    data = ratings_lastfm(write(tmp_path))
    assert data.titles == ("Fifty-one", "Fifty-two", "Sixty", "Séventy")  # in the order of ids
    assert data.sizes == {"user": 3, "item": 4}
    # Sorted: 1 7 | 10 20 20 | 30 | 50 60 | 80 100. The fourth is 20, and so the fifth.
    users, artists = {2: 0, 4: 1, 9: 2}, {51: 0, 52: 1, 60: 2, 70: 3}
    rating = {1: 1, 7: 1, 10: 2, 20: 2, 30: 3, 50: 4, 60: 4, 80: 5, 100: 5}
    assert everything(data) == {(users[u], artists[a]): rating[p] for u, a, p in PLAYS}
    assert "1 up to 7, 2 up to 20, 3 up to 30, 4 up to 60, 5 above" in data.facts["binning"]
    assert (data.low, data.high, data.step) == (1, 5, 1)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_more_plays_never_give_a_lower_rating(plays):
    counts = np.array(plays, dtype=float)
    rating, bounds = binned(counts)
    order = np.argsort(counts, kind="stable")
    assert (np.diff(rating[order]) >= 0).all()
    for one in set(plays):
        assert len(set(rating[counts == one].tolist())) == 1
    assert rating.min() >= 1
    assert rating.max() <= 5
    for place, bound in enumerate(bounds):
        # The smallest count with at least this share of the pairs at or below it.
        assert (counts <= bound).mean() >= (place + 1) / 5 - 1e-9
        assert (counts < bound).mean() < (place + 1) / 5 + 1e-9
        assert (rating[counts <= bound] <= place + 1).all()
        assert (rating[counts > bound] > place + 1).all()


def test_distinct_counts_fall_evenly_into_the_five_ratings():
    rating, _ = binned(np.random.default_rng(0).permutation(1000) + 1.0)
    assert np.bincount(rating.astype(int)).tolist() == [0, 200, 200, 200, 200, 200]


def test_counts_that_cannot_be_are_left_out_and_told(tmp_path):
    bad = [(2, 60, 0), (2, 60, -5), (7, 51, "many"), (9, 888, 10), (9, 51, 100)]
    data = ratings_lastfm(write(tmp_path, [*PLAYS, *bad]))
    expected = {OUT_OF_RANGE: 2, NOT_A_NUMBER: 1, NOT_LISTED: 1, REPEATED: 1}
    assert {name: data.facts[name] for name in expected} == expected
    assert data.clients == 4  # user 7 has no usable rating and is still there
    assert everything(data)[3, 0] == 5.0  # the last in the file


def test_a_set_without_usable_counts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none of 2 ratings"):
        ratings_lastfm(write(tmp_path, [(1, 51, 0), (2, 51, "x")]))


def test_artists_have_their_tags_and_users_nothing(tmp_path):
    data = ratings_lastfm(write(tmp_path), columns=2)
    assert data.items.names == ("tags 1", "tags 2")
    assert data.items.values[[0, 1, 3]].any(axis=1).all()
    assert not data.items.values[2].any()
    assert data.facts[NO_ATTRIBUTES] == 1
    assert data.facts["tags left out: item not listed"] == 1
    assert data.profiles.values.shape == (3, 0)


def test_broken_files_are_named(tmp_path):
    write(tmp_path, header="user\tartist\tplays")
    with pytest.raises(ConfigError, match="no column 'userID'"):
        ratings_lastfm(tmp_path)
    write(tmp_path, artists={})
    with pytest.raises(ConfigError, match=r"artists\.dat: empty"):
        ratings_lastfm(tmp_path)
    (write(tmp_path) / "hetrec2011-lastfm-2k" / "artists.dat").write_text("id\tname\nx\ty\n")
    with pytest.raises(ConfigError, match="line 2: not an artist"):
        ratings_lastfm(tmp_path)
    with pytest.raises(ConfigError, match="no test part was published"):
        ratings_lastfm(write(tmp_path), split="published")


def test_sequences_have_known_artists_in_a_drawn_order(tmp_path):
    plays = [*PLAYS, (4, 70, 5), (9, 999, 5)]  # once more, and one that is not listed
    one = sequences_lastfm(write(tmp_path, plays), least=3)
    assert one.titles == ("Fifty-one", "Fifty-two", "Séventy") and not one.ordered
    assert [one.names_of("item").name(at) for at in range(3)] == ["51", "52", "70"]
    for user in range(3):
        every = [*one.of(user)["item"].tolist(), *one.test_of(user)["item"].tolist()]
        assert sorted(every) == [0, 1, 2]
    tested = {tuple(sequences_lastfm(tmp_path, least=3, seed=s).test["item"]) for s in range(9)}
    assert len(tested) > 3  # not the least played, as in the file's order
    again = sequences_lastfm(tmp_path, least=3)
    assert (again.test["item"] == one.test["item"]).all()
    with pytest.raises(ConfigError, match="no artist has 9 listeners"):
        sequences_lastfm(tmp_path, least=9)


def test_the_published_set_has_its_counts(published):
    data = ratings_lastfm(published("hetrec2011-lastfm-2k"))
    assert data.facts["ratings"] == len(data.train) + len(data.test) == 92_834
    assert data.sizes == {"user": 1_892, "item": 17_632}
    assert (len(data.train), len(data.test)) == (74_267, 18_567)
    assert data.facts["rated items"] == 17_632
    shares = np.bincount(np.concatenate([data.train["label"], data.test["label"]]).astype(int))
    assert np.abs(shares[1:] / 92_834 - 0.2).max() < 0.003  # equal counts stay together
    assert data.items.values.shape == (17_632, 20)
    assert data.items.values.any(axis=1).sum() + data.facts[NO_ATTRIBUTES] == 17_632
    assert data.profiles.values.shape == (1_892, 0)
