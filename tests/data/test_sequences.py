"""Sequences: what is held out, what is seen before it, and what cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.data.movielens import sequences_1m, sequences_100k
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
    ("folder", "read", "users", "events"),
    [("ml-100k", sequences_100k, 943, 100_000), ("ml-1m", sequences_1m, 6_040, 1_000_209)],
)
def test_the_published_sets(published, folder, read, users, events):
    data = read(published(folder), history=1)
    assert (data.clients, len(data.test)) == (users, users)
    assert len(data.train) == events - users
    assert data.title_of(data.names_of("item").row(1)) == "Toy Story (1995)"
