"""Sequences: what is held out, what is seen before it, and what cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from tessera import tasks
from tessera.data.interactions import Interactions, read_sequences
from tessera.data.movielens import ML_1M, ML_100K, sequences_1m, sequences_100k, titles
from tessera.data.sequences import SEEN, Sequences, sequence_data
from tessera.errors import ConfigError


def by_hand() -> Sequences:
    """User 0: items 3, 1, 4 (3 again later); user 1: 2, 0; user 2: 5 alone."""
    user = np.array([1, 0, 0, 2, 0, 1, 0])
    item = np.array([2, 3, 1, 5, 4, 0, 3])
    time = np.array([10, 1, 2, 1, 3, 20, 4])
    return Sequences.sorted(user, item, time, users=3, items=6)


def test_events_stand_in_the_order_of_time_and_the_first_of_an_item_counts():
    events = by_hand()
    assert [events.of(user).tolist() for user in range(3)] == [[3, 1, 4], [2, 0], [5]]
    assert events.place.tolist() == [0, 1, 2, 0, 1, 0]


def test_the_last_item_is_held_out_and_everything_before_it_is_seen():
    data = sequence_data("hand", by_hand(), items=6, length=2)
    assert [data.of(user)["item"].tolist() for user in range(3)] == [[3, 1], [2], [5]]
    assert data.train["history"].tolist() == [[-1, -1], [3, -1], [-1, -1], [-1, -1]]
    assert data.test["item"].tolist() == [4, 0]
    assert data.test["history"].tolist() == [[1, 3], [2, -1]]
    assert [sorted(set(row) - {-1}) for row in data.test[SEEN].tolist()] == [[1, 3], [2]]
    assert [len(data.test_of(user)) for user in range(3)] == [1, 1, 0]
    assert data.events.item.tolist() == [3, 1, 2, 5]


def test_for_validation_the_last_item_is_left_out_unread():
    data = sequence_data("hand", by_hand(), items=6, length=2, part="validation")
    assert data.train["item"].tolist() == [3, 2, 5]
    assert data.test["item"].tolist() == [1] and 4 not in data.test[SEEN]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"part": "tests"}, "part = 'tests'"),
        ({"length": 0}, "a history of 0 items"),
    ],
)
def test_what_cannot_be_is_named(changes, match):
    with pytest.raises(ConfigError, match=match):
        sequence_data("hand", by_hand(), items=6, **changes)


def test_one_item_per_user_is_refused():
    alone = Sequences.sorted(np.arange(4), np.arange(4), None, users=4, items=4)
    with pytest.raises(ConfigError, match="no user has 2 items"):
        sequence_data("alone", alone, items=4)


@pytest.mark.parametrize(
    ("layout", "read", "users", "events"),
    [(ML_100K, sequences_100k, 943, 100_000), (ML_1M, sequences_1m, 6_040, 1_000_209)],
)
def test_the_published_sets(published, layout, read, users, events):
    root = published(layout.source.folders[0])
    data = read(root, history=1)
    assert (data.clients, len(data.test)) == (users, users)
    assert len(data.train) == events - users
    assert data.title_of(data.names_of("item").row(1)) == titles(root, layout=layout)[0]


# --- a file of one's own --------------------------------------------------------------------------

LINES = """who,what,when,stars
ann,tea,2024-01-02,5
ann,milk,2024-01-01,4
ben,tea,2024-03-01,1
ann,jam,2024-01-03,5
ben,jam,2024-03-01,5
ben,milk,2024-03-02,5
"""


def own(tmp_path, **settings):
    path = tmp_path / "own.csv"
    path.write_text(LINES)
    how = Interactions(**{"user": "who", "item": "what", "time": "when", "history": 3, **settings})
    return read_sequences(path, how)


def named(data, user: str) -> list[str]:
    items = data.names_of("item")
    row = data.names_of("user").row(user)
    return [items.name(one) for one in [*data.events.of(row), *data.test_of(row)["item"]]]


def test_a_file_is_read_in_the_order_of_its_times_and_ties_are_counted(tmp_path):
    data = own(tmp_path)
    assert data.ordered and named(data, "ann") == ["milk", "tea", "jam"]
    assert named(data, "ben") == ["tea", "jam", "milk"]
    assert data.facts["lines at the time of the one before"] == 1
    assert not data.public_rows  # the dictionary is made of the data


def test_with_labels_what_was_not_clicked_is_no_event(tmp_path):
    data = own(tmp_path, label="stars", threshold=4.0)
    assert named(data, "ben") == ["jam", "milk"]


def test_without_times_there_is_no_order(tmp_path):
    data = own(tmp_path, time=None)
    assert not data.ordered and "no times" in data.facts["order"]
    with pytest.raises(ConfigError, match="no times, and what comes next has an order"):
        tasks.from_frame(tmp_path / "own.csv", user="who", item="what", model="next", negatives=2)
    task = tasks.from_frame(
        tmp_path / "own.csv", user="who", item="what", model="pairs", exact_pairs=True
    )
    assert task.bind(task.build(0))["pairs"].rows == 9  # m^2 cells: EASE has one table


def test_a_task_of_a_file_has_its_own_ids(tmp_path):
    own(tmp_path)
    task = tasks.load(
        "sequences",
        path=str(tmp_path / "own.csv"),
        user="who",
        item="what",
        time="when",
        negatives=2,
    )
    assert task.data.names_of("item").row("jam") >= 0 and task.metric.name == "NDCG@10"
    framed = tasks.from_frame(
        tmp_path / "own.csv", user="who", item="what", time="when", model="next", negatives=2
    )
    assert framed.loss.negatives == 2
    assert framed.data.train["history"].shape[1] == task.data.train["history"].shape[1] == 50


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"client": "who"}, "of users who are clients"),
        ({"category": "stars"}, "of users who are clients"),
        ({"label": "stars", "threshold": 6.0}, "no line of it counts"),
        ({"time": "stars"}, "not from 1990 to 2100"),
    ],
)
def test_files_that_say_nothing_of_what_came_next_are_refused(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match) as caught:
        own(tmp_path, **settings)
    assert caught.value.hint


# --- about items ----------------------------------------------------------------------------------

ITEMS = "what,name,shelf\ntea,Green tea,drinks\nmilk,Milk,drinks\njam,Plum jam,sweets\n"


def described(tmp_path, items: str = ITEMS, **settings):
    (tmp_path / "items.csv").write_text(items)
    about = {"item_features": tmp_path / "items.csv", "title": "name", "attributes": ["shelf"]}
    return own(tmp_path, **{**about, **settings})


def test_titles_and_attributes_of_items_come_from_a_second_file(tmp_path):
    data = described(tmp_path)
    row = data.names_of("item").row
    assert [data.title_of(row(one)) for one in ("tea", "jam")] == ["Green tea", "Plum jam"]
    shelf = data.attributes["shelf"]
    assert shelf.shape == (3, 2) and shelf.sum(axis=1).tolist() == [1.0, 1.0, 1.0]
    assert shelf[row("tea")].tolist() == shelf[row("milk")].tolist() != shelf[row("jam")].tolist()
    short = described(tmp_path, "what,name,shelf\ntea,Green tea,\njam,Jam,sweets\n")
    assert short.title_of(row("milk")) == "milk" and not short.attributes["shelf"][row("tea")].any()
    assert short.facts["items without shelf"] == 2


def test_titles_may_be_a_column_of_the_file_itself(tmp_path):
    data = own(tmp_path, title="stars", attributes=["stars"])
    assert data.title_of(data.names_of("item").row("tea")) == "5"  # of its lines the first counts
    assert data.attributes["stars"].shape[0] == 3


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("tea,Black tea,drinks\n", "line 5: item 'tea' a second time"),
        (",Nothing,drinks\n", "line 5: no 'what'"),
    ],
)
def test_items_twice_and_lines_without_one_are_refused(tmp_path, more, match):
    with pytest.raises(ConfigError, match=match) as caught:
        described(tmp_path, ITEMS + more)
    assert caught.value.hint
    data = described(tmp_path, ITEMS + more, on_bad="skip")
    assert data.title_of(data.names_of("item").row("tea")) == "Green tea"
    assert data.facts["item_features: bad lines, left out"] == 1


def test_items_that_nobody_has_are_left_out_and_counted(tmp_path):
    more = "".join(f"gin {k},Gin,drinks\n" for k in range(20))
    data = described(tmp_path, ITEMS + more)
    assert data.facts["item_features: items that nobody has"] == 20
    assert data.title_of(data.names_of("item").row("tea")) == "Green tea"
    assert data.attributes["shelf"].shape == (3, 2)


def test_an_attribute_of_too_many_classes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tessera.data.item_features.MOST_CLASSES", 1)
    with pytest.raises(ConfigError, match="'shelf' has 2 classes"):
        described(tmp_path)


def test_a_task_of_a_file_takes_a_second_one_about_its_items(tmp_path):
    described(tmp_path)
    named = {"path": "own.csv", "item_features": "items.csv"}
    task = tasks.load(
        "sequences",
        **{key: str(tmp_path / name) for key, name in named.items()},
        user="who",
        item="what",
        time="when",
        title="name",
        attributes="shelf",
        negatives=2,
    )
    assert "Plum jam" in task.data.titles and list(task.data.attributes) == ["shelf"]
