"""Examples know the past of their user and nothing else; the split is by time within each user."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from own_secrets import secret_of
from tessera.data.clicks import Log, click_data, numbered, with_negatives
from tessera.data.examples import draw, draw_own
from tessera.errors import ConfigError, MisuseError

USERS, ITEMS = 3, 12


@st.composite
def logs(draw):
    """Columns in any order; every user has at least one row."""
    rows = draw(st.lists(st.integers(0, USERS - 1), max_size=60))
    user = np.array([*range(USERS), *rows], dtype=np.int64)
    n = len(user)
    item = draw(st.lists(st.integers(0, ITEMS - 1), min_size=n, max_size=n))
    clicked = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    time = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    return user, np.array(item), np.array(clicked), np.array(time)


def made(user, item, clicked, time, **more):
    log = Log.sorted(user, item, clicked, time)
    return click_data("made", log, users=USERS, items=ITEMS, history=4, **more)


def by_hand(user, item, clicked, time, history=4):
    """The same rules, one row after the other: {user: (train rows, test rows)}."""
    found = {}
    for who in range(USERS):
        rows = [k for k in range(len(user)) if user[k] == who]
        rows.sort(key=lambda k: (time[k], k))
        cut = len(rows) - int(len(rows) / 5)
        liked, seen, clicks, parts = [], 0, 0, ([], [])
        for place, k in enumerate(rows):
            window = liked[-history:]
            window = window + [-1] * (history - len(window))
            row = (int(item[k]), window, float(clicked[k]), (clicks + 2.5) / (seen + 5))
            parts[place >= cut].append(row)
            if clicked[k]:
                liked.append(int(item[k]))
            if place < cut:
                seen, clicks = seen + 1, clicks + int(clicked[k])
        found[who] = parts
    return found


def as_rows(part):
    return [
        (int(i), h.tolist(), float(y), pytest.approx(float(r), abs=1e-6))
        for i, h, y, r in zip(
            part["item"], part["history"], part["label"], part["rate"], strict=True
        )
    ]


@given(logs())
def test_examples_are_those_of_the_rules_applied_by_hand(log):
    data = made(*log)
    for who, (train, test) in by_hand(*log).items():
        assert as_rows(data.of(who)) == train
        assert as_rows(data.test_of(who)) == test
        assert (data.of(who)["user"] == who).all()


def known_to(data, who, field):
    """One user's column in the order of time, training part and test part."""
    return np.concatenate([data.of(who)[field], data.test_of(who)[field]])


@given(logs(), st.data())
def test_no_example_sees_its_own_label_or_a_later_one(log, data):
    user, item, clicked, time = log
    who = data.draw(st.integers(0, USERS - 1))
    own = np.flatnonzero(user == who)
    own = own[np.argsort(time[own], kind="stable")]
    place = data.draw(st.integers(0, len(own) - 1))
    other = clicked.copy()
    other[own[place:]] = ~other[own[place:]]
    before, after = made(*log), made(user, item, other, time)
    for field in ("history", "rate"):
        assert (
            known_to(before, who, field)[: place + 1] == known_to(after, who, field)[: place + 1]
        ).all()
        for stranger in set(range(USERS)) - {who}:
            assert (known_to(before, stranger, field) == known_to(after, stranger, field)).all()


@pytest.mark.parametrize(("rows", "held"), [(1, 0), (4, 0), (5, 1), (9, 1), (10, 2), (100, 20)])
def test_the_last_fifth_rounded_down_is_held_out(rows, held):
    log = Log(
        user=np.zeros(rows, dtype=np.int64),
        item=np.arange(rows),
        clicked=np.ones(rows, dtype=np.bool_),
    )
    data = click_data("made", log, users=1, items=rows, history=3)
    assert data.train["item"].tolist() == list(range(rows - held))
    assert data.test["item"].tolist() == list(range(rows - held, rows))


def test_the_rate_stands_still_in_the_test_part():
    clicked = np.array([True] * 3 + [False] * 5 + [True] * 2)
    log = Log(user=np.zeros(10, dtype=np.int64), item=np.arange(10), clicked=clicked)
    data = click_data("made", log, users=1, items=10, history=3)
    assert data.train["rate"][[0, 1, 7]].tolist() == pytest.approx([2.5 / 5, 3.5 / 6, 5.5 / 12])
    assert data.test["rate"].tolist() == pytest.approx([5.5 / 13, 5.5 / 13])
    assert data.test["history"][1].tolist() == [1, 2, 8]  # the history does move


def test_columns_have_the_agreed_types_and_users_without_rows_are_kept():
    log = Log(user=np.array([1, 1]), item=np.array([0, 2]), clicked=np.array([True, False]))
    data = click_data("made", log, users=4, items=3, history=2)
    assert data.clients == 4
    assert data.offsets.tolist() == [0, 0, 2, 2, 2]
    kinds = {name: column.dtype for name, column in data.train.fields.items()}
    assert kinds == {
        "user": np.int64,
        "item": np.int64,
        "history": np.int64,
        "label": np.float32,
        "rate": np.float32,
    }
    assert data.train["history"].tolist() == [[-1, -1], [0, -1]]


@pytest.mark.parametrize("bad", [{"history": 0}, {"test_share": 1.0}, {"test_share": -0.1}])
def test_settings_that_cannot_work_are_refused(bad):
    log = Log(user=np.array([0]), item=np.array([0]), clicked=np.array([True]))
    with pytest.raises(ConfigError, match="made: "):
        click_data("made", log, **{"users": 1, "items": 1, "history": 2, **bad})


def test_an_empty_log_and_an_unsorted_one_are_refused():
    empty = np.zeros(0, dtype=np.int64)
    log = Log(user=empty, item=empty, clicked=empty.astype(np.bool_))
    with pytest.raises(ConfigError, match="no interactions"):
        click_data("made", log, users=1, items=1, history=2)
    with pytest.raises(MisuseError, match="sorted"):
        Log(user=np.array([1, 0]), item=np.array([0, 0]), clicked=np.array([True, True]))


def test_ids_are_numbered_in_their_order():
    rows, known = numbered(np.array([70, -3, 70, 12]))
    assert rows.tolist() == [2, 0, 2, 1]
    assert known.tolist() == [-3, 12, 70]


# -- sampled negatives


def positives(seed, users=6, items=40, each=20):
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(users), each)
    item = np.concatenate([rng.choice(items, size=each, replace=False) for _ in range(users)])
    return Log(user=user, item=item, clicked=np.ones(len(user), dtype=np.bool_))


@given(st.integers(0, 50), st.integers(1, 3), st.booleans())
def test_negatives_are_never_the_users_own_and_share_the_history_of_their_positive(
    seed, each, public
):
    log = positives(seed)
    catalogue = np.arange(40) if public else None
    sampled = with_negatives(log, users=6, items=40, each=each, catalogue=catalogue)
    assert sampled.log.item[sampled.log.clicked].tolist() == log.item.tolist()
    read = with_places(sampled, users=6, items=40)
    data = draw(read, partial(secret_of, script=bytes([seed])))
    for name in ("user", "history", "label"):
        assert (data.train[name] == read.train[name]).all()
    assert "rate" not in data.train.fields
    for who in range(6):
        every = set(log.item[log.user == who].tolist())
        trained = set(log.item[log.user == who][:16].tolist())
        for part, own in ((data.of(who), trained), (data.test_of(who), every)):
            label, item, history = part["label"], part["item"], part["history"]
            assert own.isdisjoint(item[label == 0].tolist())
            ends = np.flatnonzero(label == 1)
            assert ends[-1] == len(part) - 1  # no positive is parted from its negatives
            for begin, end in zip([0, *(ends[:-1] + 1)], ends, strict=True):
                assert (history[begin:end] == history[end]).all()
                assert end - begin == each
        assert (data.test_of(who)["label"] == 1).sum() == 4  # a fifth of the 20 positives
    if not public:
        for part in (data.train, data.test):
            assert set(part["item"][part["label"] == 0]) <= set(part["item"][part["label"] == 1])


def test_one_item_is_drawn_as_often_as_another():
    log = Log(
        user=np.repeat(np.arange(2_000), 1),
        item=np.zeros(2_000, dtype=np.int64),
        clicked=np.ones(2_000, dtype=np.bool_),
    )
    sampled = with_negatives(log, users=2_000, items=5, each=2, catalogue=np.arange(5))
    train = draw(with_places(sampled, users=2_000, items=5), secret_of).train
    drawn = np.bincount(train["item"][train["label"] == 0], minlength=5)
    assert drawn[0] == 0
    assert drawn.sum() == 4_000
    assert (abs(drawn[1:] - 1_000) < 150).all()  # five standard deviations


def test_what_is_held_out_is_drawn_as_often_as_anything_else():
    """Otherwise a held-out item could be told by its never being a negative."""
    log = positives(0, users=300, items=20, each=10)
    sampled = with_negatives(log, users=300, items=20, each=5, catalogue=np.arange(20))
    data = draw(with_places(sampled, users=300, items=20), secret_of)
    held = drawn = 0
    for who in range(300):
        train, test = data.of(who), data.test_of(who)
        negatives = train["item"][train["label"] == 0]
        drawn += len(negatives)
        held += int(np.isin(negatives, test["item"][test["label"] == 1]).sum())
    assert drawn == 300 * 8 * 5
    assert held / drawn == pytest.approx(2 / 12, abs=0.02)  # two of the twelve it does not have


def test_who_has_everything_gets_no_negatives():
    log = positives(0, users=1, items=20, each=20)
    sampled = with_negatives(log, users=1, items=20, each=1)
    assert len(sampled.log) == 20
    assert sampled.held.tolist() == [4]


def test_who_has_all_but_one_gets_that_one_every_time():
    log = positives(0, users=3, items=20, each=19)
    sampled = with_negatives(log, users=3, items=20, each=3, catalogue=np.arange(20))
    data = draw(with_places(sampled, users=3, items=20), secret_of)
    for who in range(3):
        (left,) = set(range(20)) - set(log.item[log.user == who].tolist())
        own = data.test_of(who)
        assert (own["item"][own["label"] == 0] == left).all()


def test_one_client_alone_draws_what_it_draws_among_all():
    read = with_places(with_negatives(positives(1), users=6, items=40, each=2), users=6, items=40)
    everybody = draw(read, secret_of)
    for who in range(6):
        assert (draw_own(read, who, secret_of(who))["item"] == everybody.of(who)["item"]).all()


@given(st.permutations(range(6)), st.booleans())
def test_what_a_client_draws_goes_with_its_secret_and_not_with_its_place(order, public):
    """Users in another order, each with its data and its secret: everybody draws the same."""
    log, place = positives(2), np.argsort(order)
    moved = Log.sorted(place[log.user], log.item, log.clicked)
    settings = {"users": 6, "items": 40, "each": 2}
    settings |= {"catalogue": np.arange(40)} if public else {}
    first, second = (
        draw(with_places(with_negatives(one, **settings), users=6, items=40), own)
        for one, own in ((log, secret_of), (moved, lambda who: secret_of(order[who])))
    )
    for who in range(6):
        for one, other in (
            (first.of(who), second.of(place[who])),
            (first.test_of(who), second.test_of(place[who])),
        ):
            assert (one["item"] == other["item"]).all()
            assert (one["history"] == other["history"]).all()


def test_other_secrets_draw_other_negatives_and_the_data_that_is_read_is_the_same():
    read = with_places(with_negatives(positives(0), users=6, items=40, each=1), users=6, items=40)
    one, two, other = (
        draw(read, partial(secret_of, script=script)) for script in (b"a", b"a", b"b")
    )
    assert (one.train["item"] == two.train["item"]).all()
    for part in ("train", "test"):
        changed = getattr(one, part)["item"] != getattr(other, part)["item"]
        assert changed[getattr(one, part)["label"] == 0].mean() > 0.5
    assert one.undrawn is None
    assert draw(one, secret_of) is one


def with_places(sampled, *, users, items):
    return click_data(
        "made",
        sampled.log,
        users=users,
        items=items,
        history=5,
        held=sampled.held,
        pools=sampled.pools,
        rate=False,
    )
